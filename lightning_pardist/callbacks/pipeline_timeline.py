"""Drawing of one training step of a pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_pardist.axes.pipeline import PipelineAxis
from lightning_pardist.engines.pipeline import Timeline, expected_idle_share
from lightning_pardist.engines.pipeline.drawing import chrome_trace, timeline_svg
from lightning_pardist.strategies.strategy import PardistStrategy


class PipelineTimeline(pl.Callback):
    """Writes the measured timeline of one training step: ``pipeline.svg`` and, for Perfetto, ``pipeline.json``.

    One row per rank, with a box for every forward and backward of a micro-batch. The measured idle share is shown next
    to that of the formula, which assumes that all stages cost the same and that messages cost nothing.

    Args:
        dirpath: Folder to write to; by default the Trainer's ``default_root_dir``.
        step: Index of the batch to show, from 0. The first batches are slower than the rest. A run that ends earlier
            shows its last batch, with a note in the log.

    Attributes:
        timeline: The last measured timeline; None before the first batch.

    Raises:
        ValueError: At the start of a run, if its strategy has no pipeline.
    """

    def __init__(self, dirpath: str | Path | None = None, *, step: int = 5) -> None:
        if step < 0:
            raise ValueError(f"step={step} is negative. Use 0 for the first batch.")
        self.dirpath = dirpath
        self.step = step
        self.timeline: Timeline | None = None
        #: Number of batches of the run so far.
        self._seen = 0
        self._microbatches = 0

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._seen, self.timeline = 0, None
        if _pipeline_of(trainer) is None:
            raise ValueError(
                f"PipelineTimeline shows the stages of a pipeline, but {type(trainer.strategy).__name__} has none. Use"
                " strategy='pardist_pp' or another pipeline, or remove the callback."
            )

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._seen <= self.step:
            self._pipeline(trainer).record_times = True

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._seen <= self.step:
            pipeline = self._pipeline(trainer)
            pipeline.record_times = False
            if pipeline.last_result is not None:
                self.timeline, self._microbatches = pipeline.last_result.timeline, len(pipeline.last_result.sizes)
        self._seen += 1
        if self._seen == self.step + 1:
            self._write(trainer, self._pipeline(trainer))

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if (pipeline := _pipeline_of(trainer)) is not None:
            pipeline.record_times = False

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if 0 < self._seen <= self.step:
            rank_zero_info(
                f"PipelineTimeline shows the last of {self._seen} step(s): the run ended before step {self.step}."
            )
            self._write(trainer, self._pipeline(trainer))

    def _write(self, trainer: pl.Trainer, pipeline: PipelineAxis) -> None:
        engine, timeline = pipeline.engine, self.timeline
        if not trainer.is_global_zero or timeline is None or engine is None:
            return
        count, chunks = self._microbatches, engine.options.chunks_per_rank
        expected = expected_idle_share(engine.options.schedule, engine.num_ranks, count, chunks_per_rank=chunks)
        title = f"{engine.options.schedule}, {engine.num_ranks} ranks, {count} micro-batches, step {self._seen - 1}"
        folder = Path(self.dirpath or trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "pipeline.svg").write_text(timeline_svg(timeline, title=title, expected_idle=expected))
        (folder / "pipeline.json").write_text(json.dumps(chrome_trace(timeline)))
        rank_zero_info(
            f"Pipeline: idle {timeline.idle_share:.1%}, by the formula {expected:.1%}; {folder}/pipeline.svg"
        )

    @staticmethod
    def _pipeline(trainer: pl.Trainer) -> PipelineAxis:
        pipeline = _pipeline_of(trainer)
        if pipeline is None:
            raise RuntimeError("The Trainer's strategy was exchanged since setup.")
        return pipeline


def _pipeline_of(trainer: pl.Trainer) -> PipelineAxis | None:
    strategy = trainer.strategy
    return strategy.axis(PipelineAxis) if isinstance(strategy, PardistStrategy) else None
