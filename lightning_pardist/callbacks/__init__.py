"""Callbacks that show what a strategy does, or guard what a configuration asks for."""

from lightning_pardist.callbacks.batch_size import ExpectedBatchSize
from lightning_pardist.callbacks.pipeline_timeline import PipelineTimeline

__all__ = ["ExpectedBatchSize", "PipelineTimeline"]
