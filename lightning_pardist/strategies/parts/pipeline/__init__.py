"""The pipeline axis of a strategy."""

from lightning_pardist.strategies.parts.pipeline.part import PipelinePart
from lightning_pardist.strategies.parts.pipeline.settings import PipelineSettings

__all__ = ["PipelinePart", "PipelineSettings"]
