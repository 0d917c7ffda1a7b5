"""Runs of the module's step functions, recorded on sample batches as the Trainer would run them, and planned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from lightning_pardist.engines.pipeline import (
    CannotPipelineError,
    PipelinePlan,
    Trace,
    dry_run,
    find_loss,
    plan,
    split_batch,
    trace,
)
from lightning_pardist.engines.pipeline.intercept import undisturbed
from lightning_pardist.engines.pipeline.microbatch import fresh_copy
from lightning_pardist.strategies.parts.pipeline.combining import (
    Collector,
    Place,
    Rules,
    Shares,
    find_rules,
    find_token_weight,
)
from lightning_pardist.strategies.parts.pipeline.effects import StepEffects
from lightning_pardist.strategies.parts.pipeline.samples import sample_batches
from lightning_pardist.strategies.parts.pipeline.settings import PipelineSettings

STEPS = {
    RunningStage.TRAINING: "training_step",
    RunningStage.SANITY_CHECKING: "validation_step",
    RunningStage.VALIDATING: "validation_step",
    RunningStage.TESTING: "test_step",
    RunningStage.PREDICTING: "predict_step",
}
#: Name of a step function, and index of the loader whose batches it gets.
StepKey = tuple[str, int]


@dataclass(frozen=True)
class _Sample:
    """A step function of the module and a micro-batch for it."""

    stage: RunningStage
    dataloader_idx: int
    num_dataloaders: int
    batch: Any
    microbatch: Any

    @property
    def key(self) -> StepKey:
        return STEPS[self.stage], self.dataloader_idx


@dataclass(frozen=True)
class Recorded:
    """What is known of the module's steps before it is taken apart.

    Attributes:
        plans: Stages and messages of each step function.
        rules: How the numbers that each makes of micro-batches are combined.
    """

    plans: dict[StepKey, PipelinePlan]
    rules: dict[StepKey, Rules]


class StepRecorder:
    """Records runs of the steps that a Trainer is going to run, and plans stages for them. Not collective.

    Args:
        trainer: Between its strategy's setup of the module and its loops.
        settings: Of the pipeline.
        num_ranks: Ranks of the pipeline.
    """

    def __init__(self, trainer: pl.Trainer, settings: PipelineSettings, num_ranks: int) -> None:
        self.trainer = trainer
        self.module: pl.LightningModule = trainer.lightning_module
        self.settings = settings
        self.num_ranks = num_ranks
        # Before the units are known: all modules are watched, as a recorded run goes through all of them.
        self._effects = StepEffects(self.module)
        self._rng_afterwards = torch.get_rng_state()

    def record(self) -> Recorded:
        """Plans for all step functions, the first of which decides the stages; each is tried.

        Raises:
            CannotPipelineError: If the module cannot be cut as asked, or a step fails on stubs.
        """
        samples = list(self._samples())
        if not samples:
            raise CannotPipelineError("There is no batch to record a run of a step with.", ())
        traces = {sample.key: self._record(sample) for sample in samples}
        first = samples[0].key
        main = plan(
            traces[first],
            self.num_ranks * self.settings.chunks_per_rank,
            split=self.settings.split,
            reads=self.settings.reads,
            also=[recorded for key, recorded in traces.items() if key != first],
        )
        plans = {key: main if key == first else main.adapt(recorded) for key, recorded in traces.items()}
        for sample in samples:
            with self._running(sample) as run:
                dry_run(self.module, run, sample.microbatch, plans[sample.key], loss_of=loss_of)
        return Recorded(plans, {sample.key: self._find_rules(sample) for sample in samples})

    def _samples(self) -> Iterator[_Sample]:
        trainer = self.trainer
        stages = [] if trainer.state.stage is None else [trainer.state.stage]
        if trainer.state.fn == TrainerFn.FITTING:
            stages = [RunningStage.TRAINING]
            if trainer.limit_val_batches and is_overridden("validation_step", self.module):
                stages.append(RunningStage.VALIDATING)
        count = self.settings.microbatches(self.num_ranks)
        for stage in stages:
            with self._as_in(stage):
                batches = sample_batches(trainer, stage)
            for index, batch in enumerate(batches):
                yield _Sample(stage, index, len(batches), batch, split_batch(batch, count)[0].value)

    def _record(self, sample: _Sample) -> Trace:
        training = sample.stage == RunningStage.TRAINING
        with self._running(sample) as run:
            recorded = trace(self.module, run, sample.microbatch, grad=training, loss_of=loss_of)
        if training and recorded.loss is None:
            raise CannotPipelineError(f"{type(self.module).__name__}.training_step returned no loss.", ())
        return recorded

    def _find_rules(self, sample: _Sample) -> Rules:
        """Run the step on the whole sample batch and on its micro-batches, and see how the numbers go together."""
        parts = split_batch(sample.batch, self.settings.microbatches(self.num_ranks))
        if len(parts) < 2:
            return Rules()
        rng = torch.get_rng_state()
        try:
            (whole,) = self._evaluated(sample, [sample.batch])
            is_random = not torch.equal(rng, self._rng_afterwards)
            records = self._evaluated(sample, [part.value for part in parts])
        except Exception:
            # A step that cannot take the batch in evaluation mode tells nothing, and need not be refused for it.
            return Rules()
        sizes, values = [part.size for part in parts], [part.value for part in parts]
        weigh = self.settings.loss_weight
        weights = [float(weigh(value)) for value in values] if callable(weigh) else [float(size) for size in sizes]
        shares = Shares.of(weights, sizes)
        twice = self._numbers([whole, whole], Shares.of([1, 1], [sum(sizes)] * 2))
        numbers = {place: column[0] for place, column in twice.items()}
        columns = self._numbers(records, shares)
        tolerance = 1e-4 if str(self.trainer.precision).startswith(("32", "64")) else 2e-2
        find = partial(find_rules, numbers, columns, tolerance=tolerance, rough=is_random)
        found = find(shares)
        training = sample.stage == RunningStage.TRAINING
        if training:
            loss = loss_of(whole)
            place = next((key for key, number in numbers.items() if number is loss), None)
        else:
            # Not known which number is a loss: one that nothing explains may be.
            place = next((key for key, number in numbers.items() if key not in found and key in columns), None)
        if place is None or place not in columns:
            return Rules(found)
        if is_random or weigh is not None or found.get(place) == "sum":
            return Rules(found, None, training and found.get(place) == "sum", not training or place in found)
        # Padding marked by the ignore index counts, even if this sample is padded so evenly that it does not show.
        only = -100 if place in found else None
        weight = find_token_weight(numbers[place], columns[place], values, tolerance=tolerance, only=only)
        if weight is not None:
            found = find(Shares.of([weight(value) for value in values], sizes))
        return Rules(found, weight, False, not training or place in found)

    def _evaluated(self, sample: _Sample, batches: list[Any]) -> list[dict[str, Any]]:
        with self._running(sample) as run, undisturbed(self.module), torch.no_grad():
            self.module.eval()
            records = [run(fresh_copy(batch)) for batch in batches]
            self._rng_afterwards = torch.get_rng_state()
            return records

    def _numbers(self, records: list[dict[str, Any]], shares: Shares) -> dict[Place, list[Any]]:
        collector = Collector()
        self._effects.combine(records, shares, collector)
        return collector.found

    @contextmanager
    def _running(self, sample: _Sample) -> Iterator[Callable[[Any], Any]]:
        name = STEPS[sample.stage]
        function = getattr(self.module, name)
        rest = [0] if is_param_in_hook_signature(function, "batch_idx", min_args=2) else []
        if sample.num_dataloaders > 1:
            rest.append(sample.dataloader_idx)
        precision: Any = self.trainer.precision_plugin
        context = getattr(precision, _CONTEXTS[name])

        def step(microbatch: Any) -> Any:
            with context():
                return function(microbatch, *rest)

        before = self.module._current_fx_name
        self.module._current_fx_name = name
        try:
            with self._as_in(sample.stage), self._effects.watching():
                yield lambda microbatch: self._effects.run(step, microbatch)
        finally:
            self.module._current_fx_name = before

    @contextmanager
    def _as_in(self, stage: RunningStage | None) -> Iterator[None]:
        """The Trainer's state and the module's mode as they will be when that stage runs."""
        state = self.trainer.state
        before, modes = state.stage, [(each, each.training) for each in self.module.modules()]
        state.stage = stage
        try:
            if stage != RunningStage.TRAINING:
                self.module.eval()
            yield
        finally:
            state.stage = before
            for each, mode in modes:
                each.training = mode


_CONTEXTS = {
    "training_step": "train_step_context",
    "validation_step": "val_step_context",
    "test_step": "test_step_context",
    "predict_step": "predict_step_context",
}


def loss_of(record: dict[str, Any]) -> Tensor | None:
    """The loss in what :meth:`StepEffects.run` returns."""
    return find_loss(record["result"])
