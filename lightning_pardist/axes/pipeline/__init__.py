"""The pipeline axis of a strategy."""

from lightning_pardist.axes.pipeline.axis import PipelineAxis
from lightning_pardist.axes.pipeline.pipeline_settings import PipelineSettings

__all__ = ["PipelineAxis", "PipelineSettings"]
