"""Callbacks that show what a strategy does."""

from lightning_pardist.callbacks.pipeline_timeline import PipelineTimeline

__all__ = ["PipelineTimeline"]
