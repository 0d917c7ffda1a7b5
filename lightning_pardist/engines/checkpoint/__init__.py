"""Checkpoints: one content, global tensors under the module's own names, as a single file or as a folder of shards."""
