"""A picture of one training step of a pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_pardist.engines.pipeline import Timeline, expected_idle_share
from lightning_pardist.engines.pipeline.drawing import chrome_trace, timeline_svg
from lightning_pardist.strategies.parts.pipeline import PipelinePart


class PipelineTimeline(pl.Callback):
    """Writes the measured timeline of one training step: ``pipeline.svg`` and, for Perfetto, ``pipeline.json``.

    One row a rank, a box for every forward and backward of a micro-batch; the measured idle share stands beside the
    formula's, which takes all stages to cost the same and messages to cost nothing.

    Args:
        dirpath: Folder to write to; by default the Trainer's ``default_root_dir``.
        step: Which batch of the run to show, from 0. The first ones are slower than the rest.

    Attributes:
        timeline: What was measured; None before that step.

    Raises:
        ValueError: When a run begins, if its strategy has no pipeline.
    """

    def __init__(self, dirpath: str | Path | None = None, *, step: int = 5) -> None:
        if step < 0:
            raise ValueError(f"step={step} is negative. Use 0 for the first batch.")
        self.dirpath = dirpath
        self.step = step
        self.timeline: Timeline | None = None
        self._seen = 0

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._seen = 0
        if not isinstance(getattr(trainer.strategy, "pipeline", None), PipelinePart):
            raise ValueError(
                f"PipelineTimeline shows the stages of a pipeline, which {type(trainer.strategy).__name__} has not."
                " Use strategy='pardist_pp' or another pipeline, or remove the callback."
            )

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._seen == self.step:
            self._part(trainer).record_times = True

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._seen == self.step:
            part = self._part(trainer)
            part.record_times = False
            if part.last_result is not None:
                self.timeline = part.last_result.timeline
            if trainer.is_global_zero and self.timeline is not None:
                self._write(trainer, part, self.timeline)
        self._seen += 1

    def _write(self, trainer: pl.Trainer, part: PipelinePart, timeline: Timeline) -> None:
        engine = part.engine
        if engine is None or part.last_result is None:
            return
        count, chunks = len(part.last_result.sizes), engine.options.chunks_per_rank
        expected = expected_idle_share(engine.options.schedule, engine.num_ranks, count, chunks_per_rank=chunks)
        title = f"{engine.options.schedule}, {engine.num_ranks} ranks, {count} micro-batches, step {self.step}"
        folder = Path(self.dirpath or trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "pipeline.svg").write_text(timeline_svg(timeline, title=title, expected_idle=expected))
        (folder / "pipeline.json").write_text(json.dumps(chrome_trace(timeline)))
        rank_zero_info(
            f"Pipeline: idle {timeline.idle_share:.1%}, by the formula {expected:.1%}; {folder}/pipeline.svg"
        )

    @staticmethod
    def _part(trainer: pl.Trainer) -> PipelinePart:
        part: PipelinePart = trainer.strategy.pipeline  # type: ignore[attr-defined]
        return part
