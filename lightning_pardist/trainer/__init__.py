"""Trainer integration of the strategies: loaders, evaluation, logged values, state dicts, resuming."""
