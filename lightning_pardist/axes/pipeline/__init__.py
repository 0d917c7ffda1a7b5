"""Pipeline-parallel axis and its settings."""

from lightning_pardist.axes.pipeline.axis import PipelineAxis
from lightning_pardist.axes.pipeline.pipeline_settings import PipelineSettings

__all__ = ["PipelineAxis", "PipelineSettings"]
