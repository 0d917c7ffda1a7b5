"""Callbacks that show what a strategy does, or check what a configuration requires."""

from lightning_pardist.callbacks.global_batch_size import GlobalBatchSize
from lightning_pardist.callbacks.pipeline_timeline import PipelineTimeline
from lightning_pardist.callbacks.step_profile import StepProfile
from lightning_pardist.trainer.batch_size import ExpectedBatchSize

__all__ = ["ExpectedBatchSize", "GlobalBatchSize", "PipelineTimeline", "StepProfile"]
