"""Helpers between a strategy and the Trainer: loaders, evaluation, logged values, state dicts, resuming."""
