"""Callbacks for any Trainer."""

from lightning_pardist.callbacks.batch_size import ExpectedBatchSize

__all__ = ["ExpectedBatchSize"]
