"""Checkpoints of global tensors under the module's own names, as a single file or a folder of shards."""
