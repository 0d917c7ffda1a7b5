"""Recording of the module's step functions on sample batches, and stage planning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from torch import Tensor

from lightning_pardist.axes.base import Samples
from lightning_pardist.axes.pipeline.collective_calls import CollectiveCalls
from lightning_pardist.axes.pipeline.microbatch_outputs import StepOutputs
from lightning_pardist.axes.pipeline.microbatching import Microbatching
from lightning_pardist.axes.pipeline.owner_recording import needs_owners, record_for_owners, repeats_units
from lightning_pardist.axes.pipeline.pipeline_settings import PipelineSettings
from lightning_pardist.axes.pipeline.reduction_rules import Rules
from lightning_pardist.axes.pipeline.rule_trial import RuleTrial
from lightning_pardist.axes.pipeline.sample_runs import (
    STEPS,
    MicrobatchError,
    SampleRuns,
    SampleStep,
    StepKey,
    loss_of,
    microbatch_error,
)
from lightning_pardist.axes.pipeline.spanning_functions import SpanningFunctions
from lightning_pardist.axes.pipeline.step_checks import (
    refuse_collectives,
    refuse_inner_gradients,
    refuse_parameter_changes,
    refuse_shared_buffers,
    refuse_varying_calls,
)
from lightning_pardist.compat.lightning_loops import layer_sync
from lightning_pardist.engines.common.devices import RandomState, device_in_use, is_same_state, random_state
from lightning_pardist.engines.common.loss_setting import LossWeight
from lightning_pardist.engines.common.own_generators import are_same, generators_of, states_of
from lightning_pardist.engines.common.parameter_write_guard import ParameterWriteGuard
from lightning_pardist.engines.pipeline import (
    CannotPipelineError,
    PipelinePlan,
    StepRecord,
    UnevenBatchError,
    dry_run,
    plan_stages,
    record_step,
)
from lightning_pardist.engines.pipeline.interception import undisturbed
from lightning_pardist.engines.pipeline.loss_seeds import LossMakeup
from lightning_pardist.engines.pipeline.microbatch import fresh_copy
from lightning_pardist.engines.pipeline.steady_buffers import confirm_steady_buffers
from lightning_pardist.trainer.layer_sync import batch_norms, syncs_batch_norms

#: Strategies that run training steps on whole batches, suggested by errors.
_WHOLE = ("pardist_mp", "pardist_ddp", "pardist_zero3", "pardist_tp")


@dataclass(frozen=True)
class Recorded:
    """Findings about the module's steps, recorded before the module is split.

    Attributes:
        plans: Stages and messages of each step function.
        rules: How the micro-batches' values of each step are combined.
        written: Buffers that steps write to, by module and name.
        unstaged: Steps that do not run in stages, or not in those of the first step, with the reason.
        owners: Placement of layers on ranks if no step runs in stages.
        steady: Buffers that change once per training step, for any number of micro-batches.
        microbatching: How training batches are split.
        cut: Description of the sample batch's split, for the log.
        loss: Terms that a micro-batch's loss consists of.
        draws: Whether the training step draws random numbers.
    """

    plans: dict[StepKey, PipelinePlan]
    rules: dict[StepKey, Rules]
    written: frozenset[tuple[Any, ...]] = frozenset()
    unstaged: dict[StepKey, str] = field(default_factory=dict)
    owners: PipelinePlan | None = None
    steady: frozenset[str] = frozenset()
    microbatching: Microbatching | None = None
    cut: str = ""
    loss: LossMakeup = field(default_factory=LossMakeup)
    draws: bool = False

    @property
    def placement_plan(self) -> PipelinePlan:
        """Plan that determines which rank holds which parameters."""
        return self.owners or next(iter(self.plans.values()))


class StepRecorder:
    """Records runs of the steps that a Trainer will run, and plans their stages. Not collective.

    Args:
        trainer: The Trainer, after its strategy has set up the module and before its loops start.
        settings: Settings of the pipeline.
        ranks: Global ranks of the pipeline.
        samples: Sample batches for the runs.
        loss_weight: How losses are weighted.
        found: Cache of findings, see :attr:`~lightning_pardist.axes.base.RunContext.found_once`; None outside of plans.
        check_samples: Whether to detect layers that mix samples.
        unsplittable_modules: Names of modules that must not be split between stages.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        settings: PipelineSettings,
        ranks: Sequence[int],
        samples: Samples,
        loss_weight: LossWeight,
        found: dict[Any, Any] | None = None,
        *,
        check_samples: bool = True,
        unsplittable_modules: Sequence[str] = (),
    ) -> None:
        self.check_samples, self.unsplittable_modules = check_samples, unsplittable_modules
        self._found: dict[Any, Any] = {} if found is None else found
        # Plans run without real values, so that comparing results of micro-batches and batch is meaningless.
        self._is_plan = found is not None
        self.runs = SampleRuns(trainer, samples)
        self.loss_weight: LossWeight = loss_weight
        self._loss = LossMakeup()
        #: How the samples of a batch depend on each other, if they do.
        self._coupled = ""
        self.module = self.runs.module
        self.settings = settings
        self.ranks, self.num_ranks = ranks, len(ranks)
        self.microbatching = Microbatching(settings, self.num_ranks)
        self._draws = False
        self._unstaged: dict[StepKey, str] = {}

    def record(self) -> Recorded:
        """Record, plan and try all step functions; the first one determines the stages.

        Raises:
            CannotPipelineError: If the module cannot be split as set, or a step fails on stubs.
        """
        samples = list(self.runs.steps())
        if not samples:
            raise CannotPipelineError("There is no batch to record a run of a step with.", ())
        evaluates = self.runs.trainer.state.fn in (TrainerFn.VALIDATING, TrainerFn.TESTING, TrainerFn.PREDICTING)
        if self.settings.schedule != "mp" and not evaluates:
            return self._record_stages(samples)
        if (why := needs_owners(self.module)) is not None and self.runs.trainer.state.fn == TrainerFn.FITTING:
            return self._record_owners(samples, f"{type(self.module).__name__} {why}.")
        try:
            return self._record_stages(samples)
        except CannotPipelineError as error:
            return self._record_owners(samples, error.reason)

    def training_rules(self) -> tuple[Rules, LossMakeup, Microbatching]:
        """Return rules, loss makeup and batch splitting for training steps whose parts run without stages.

        Raises:
            CannotPipelineError: If batches cannot be split, or the step writes to parameters.
        """
        sample = next(self.runs.steps())
        for way in self.microbatching.candidate_splits(sample.batch) or [self.microbatching]:
            self.microbatching = way
            try:
                smallest = way.split(sample.batch, way.count(sample.batch))[-1]
            except ValueError as error:
                raise CannotPipelineError(f"{STEPS[sample.stage]} cannot run on parts of a batch: {error}") from error
            tried = replace(sample, microbatch=smallest.value, size=smallest.size)
            guard = ParameterWriteGuard(self.module)
            with self.runs.running(tried) as run, undisturbed(self.module), guard as kept, torch.enable_grad():
                loss = loss_of(run(fresh_copy(tried.microbatch)))
                written = [name for name, param in self.module.named_parameters() if param in set(kept.written)]
            if written:
                raise CannotPipelineError(
                    f"{STEPS[sample.stage]} changes the values of {written[0]!r}, and it runs several times at once,"
                    " on parts of a batch. Change parameters in a hook."
                )
            if loss is not None and loss.numel() == 1:
                self._loss = LossMakeup.of(loss, tried.microbatch, tried.size, self.loss_weight)
            if not way.whole or self._trial(tried).is_additive():
                trial = self._trial(tried)
                rules = trial.rules(check_samples=self.check_samples)
                return rules, trial.loss, way
        raise CannotPipelineError(f"{STEPS[sample.stage]} cannot run on parts of a batch: set batch_dim.")

    def _record_owners(self, samples: Sequence[SampleStep], reason: str) -> Recorded:
        """Plan the placement of layers on ranks for steps that cannot run in stages."""
        steps = [(STEPS[sample.stage], sample.batch) for sample in samples]
        owners = record_for_owners(self.runs.trainer, self.settings, self.num_ranks, steps)
        return Recorded({}, {}, unstaged={sample.key: reason for sample in samples}, owners=owners)

    def _record_stages(self, asked: Sequence[SampleStep]) -> Recorded:
        first, *others = samples = list(asked)
        if first.stage == RunningStage.TRAINING:
            recorded, first = self._record_training(first)
            samples = [first, *others]
        else:
            recorded = self._record(first)
        if self.settings.schedule == "mp" and (why := repeats_units(recorded)) is not None:
            raise CannotPipelineError(why)
        steady = self._steady_buffers(first, recorded)
        found = self._record_others(recorded, others)
        written = frozenset(self.runs.effects.seen_written)
        self.runs.effects = StepOutputs(self.module, recorded.unit_names, written=written)
        main = self._plan(recorded, also=list(found.values()))
        if first.stage == RunningStage.TRAINING:
            refuse_shared_buffers(main, written, self.num_ranks)
            refuse_inner_gradients(main)
        plans = {first.key: main, **{key: main.adapt(other) for key, other in found.items()}}
        self._try(first, main)
        for sample in others:
            if sample.key in plans:
                try:
                    self._try(sample, plans[sample.key])
                except CannotPipelineError as error:
                    self._unstaged[sample.key] = error.reason
                    del plans[sample.key]
        staged = [sample for sample in samples if sample.key in plans]
        cut = self.microbatching.describe(first.batch) if first.stage == RunningStage.TRAINING else ""
        try:
            rules = self._find_all_rules(staged)
            why = self._unsplit_reason(first, rules)
        except MicrobatchError as error:
            if not self.microbatching.is_automatic or self.settings.split_batch is not None:
                raise
            rules, why = {}, f"fail: {error.failure}"
        if why is not None:
            self.microbatching = self.microbatching.keep_whole(why)
            self.runs.effects, self._unstaged = StepOutputs(self.module), {}
            return self._record_stages(asked)
        loss = replace(self._loss, coupled=self._loss.coupled or self._coupled)
        ways: dict[str, Any] = {"steady": steady, "microbatching": self.microbatching, "cut": cut, "loss": loss}
        ways["draws"] = self._draws
        return Recorded(plans, rules, written, self._unstaged, **ways)

    def _unsplit_reason(self, sample: SampleStep, rules: Mapping[StepKey, Rules]) -> str | None:
        """Return what smaller micro-batches do; None if they do not, or the user has set their number."""
        found = rules.get(sample.key)
        if found is None or not self.microbatching.is_automatic or self.settings.split_batch is not None:
            return None
        if sample.stage == RunningStage.TRAINING and self._syncs_batch_norms and len(self._trial(sample).parts) > 1:
            return "change the numbers: sync_batchnorm=True normalizes all samples of a batch together"
        if self._loss.is_partly_fixed and len(self._trial(sample).parts) > 1:
            return "change the numbers: a part of the loss depends on no sample"
        coupled = self._coupling_reason(sample, found)
        self._coupled = self._coupled or coupled
        return f"change the numbers: {coupled}" if coupled else None

    def _coupling_reason(self, sample: SampleStep, found: Rules) -> str:
        """Return how the samples of a batch depend on each other; empty if they do not."""
        if found.mixing is not None:
            return f"{found.mixing} mixes the samples of a batch"
        if found.orders is not None:
            return f"the step mixes the samples of a batch ({found.orders})"
        coupled = self._trial(sample).batch_coupling() if self._is_plan else self._loss.coupled
        if self.loss_weight != "auto" or (not coupled if self._is_plan else found.is_explained):
            return ""
        # A micro-batch of one sample does not show it.
        coupled = coupled or self._trial(sample).batch_coupling()
        return f"the loss compares the samples of a batch{f' ({coupled})' if coupled else ''}"

    @property
    def _syncs_batch_norms(self) -> bool:
        asked = syncs_batch_norms(layer_sync(self.runs.trainer.strategy))  # type: ignore[arg-type]
        return asked and bool(batch_norms(self.module))

    def _steady_buffers(self, sample: SampleStep, recorded: StepRecord) -> frozenset[str]:
        """Return buffers of units that change once per batch, independently of its samples and their number."""
        if sample.stage != RunningStage.TRAINING or not recorded.steady_buffers:
            return frozenset()
        with self.runs.running(sample) as run, suppress(Exception):
            batches = (fresh_copy(sample.batch), fresh_copy(sample.microbatch))
            return confirm_steady_buffers(self.module, recorded.steady_buffers, run, *batches)
        return frozenset()

    def _record_training(self, sample: SampleStep) -> tuple[StepRecord, SampleStep]:
        """Record the training step on a micro-batch, with a split of the batch that reproduces its loss.

        Raises:
            CannotPipelineError: If tensors of the batch differ in their number of samples and no split reproduces the
                batch's loss, or if the step fails.
        """
        asked = self.microbatching
        guesses = asked.candidate_splits(sample.batch)
        if not guesses:
            return self._record_smallest(sample, asked)
        for guess in guesses:
            try:
                recorded, tried = self._record_smallest(sample, guess)
            except (MicrobatchError, UnevenBatchError):
                continue
            with suppress(MicrobatchError):
                if self._trial(tried).is_additive():
                    return recorded, tried
        try:
            asked.cut.size_of(sample.batch)
        except UnevenBatchError as error:
            raise CannotPipelineError(f"{STEPS[sample.stage]} cannot run on micro-batches: {error}", _WHOLE) from error
        raise RuntimeError("A batch was refused whose tensors agree.")

    def _record_smallest(self, sample: SampleStep, way: Microbatching) -> tuple[StepRecord, SampleStep]:
        """Record the training step on a micro-batch of the smallest size on which it runs, for one way to split."""
        failure: MicrobatchError | None = None
        for other in way.alternatives(sample.batch):
            try:
                smallest = other.split(sample.batch, other.count(sample.batch))[-1]
            except UnevenBatchError:
                raise
            except ValueError as error:
                raise CannotPipelineError(str(error), _WHOLE) from error
            tried = replace(sample, microbatch=smallest.value, size=smallest.size)
            try:
                recorded = self._record(tried)
            except MicrobatchError as error:
                failure = failure or error
                continue
            self.microbatching = other if failure is None else replace(other, why=f"fail: {failure.failure}")
            return recorded, tried
        raise failure or RuntimeError("There is no way to cut a batch.")

    def _record_others(self, first: StepRecord, samples: Sequence[SampleStep]) -> dict[StepKey, StepRecord]:
        """Record the other steps; return those that fit the first one's stages (``generate`` does not)."""
        found: dict[StepKey, StepRecord] = {}
        for sample in samples:
            try:
                recorded = self._record(sample)
                self._plan(first, also=[recorded])
            except CannotPipelineError as error:
                self._unstaged[sample.key] = error.reason
            else:
                found[sample.key] = recorded
        return found

    def _plan(self, recorded: StepRecord, also: Sequence[StepRecord]) -> PipelinePlan:
        settings, num_stages = self.settings, self.num_ranks * self.settings.chunks_per_rank
        return plan_stages(recorded, num_stages, split=settings.split, reads=settings.reads, also=also)

    def _try(self, sample: SampleStep, made: PipelinePlan) -> None:
        with self.runs.running(sample) as run:
            dry_run(self.module, run, sample.microbatch, made, loss_of=loss_of)

    def _record(self, sample: SampleStep) -> StepRecord:
        training = sample.stage == RunningStage.TRAINING
        try:
            recorded = self._traced(sample)
        except CannotPipelineError:
            raise
        except Exception as error:
            recorded = self._trace_after_hooks(sample, error)
        if training and recorded.loss is None:
            raise CannotPipelineError(f"{type(self.module).__name__}.training_step returned no loss.", ())
        return recorded

    def _trace_after_hooks(self, sample: SampleStep, error: Exception) -> StepRecord:
        """Retry a failed step after its hooks, which may prepare it (``on_train_epoch_start`` sets ``self.outputs``).

        Raises:
            MicrobatchError: If it fails again, but runs on the whole batch.
        """
        self.runs.with_hooks.add(sample.stage)
        try:
            return self._traced(sample)
        except CannotPipelineError:
            raise
        except Exception:
            if sample.microbatch is sample.batch or not self.runs.runs_on_full_batch(sample):
                raise error from None
            # Missing hooks were not the reason.
            self.runs.with_hooks.discard(sample.stage)
            raise microbatch_error(sample, error) from error

    def _traced(self, sample: SampleStep) -> StepRecord:
        training = sample.stage == RunningStage.TRAINING
        calls, functions = CollectiveCalls(self.ranks), SpanningFunctions(self.module)
        loss: Tensor | None = None
        states: list[tuple[RandomState, RandomState]] = []
        own: list[tuple[list[Any], list[Any]]] = []
        generators = generators_of(self.module)

        def step(batch: Any) -> Any:
            before, own_before = random_state(device_in_use()), states_of(generators)
            record = run(batch)
            states.append((before, random_state(device_in_use())))
            own.append((own_before, states_of(generators)))
            return record

        def note_loss(record: dict[str, Any]) -> Tensor | None:
            nonlocal loss
            loss = loss_of(record)
            return loss

        with self.runs.running(sample) as run, ParameterWriteGuard(self.module) as kept, calls, functions:
            whole = self.unsplittable_modules
            recorded = record_step(
                self.module, step, sample.microbatch, grad=training, loss_of=note_loss, unsplittable_modules=whole
            )
            if kept.written:
                refuse_parameter_changes(self.runs, sample, run, kept.written)
        # Outside of the modes that observe the run, under which saved random states cannot be compared.
        drawn = not all(is_same_state(*pair) for pair in states) or not all(are_same(*pair) for pair in own)
        self._draws = self._draws or (training and drawn)
        if training and loss is not None and loss.numel() == 1:
            self._loss = LossMakeup.of(loss, sample.microbatch, sample.size, self.loss_weight)
        refuse_collectives(sample, calls)
        if training:
            functions.refuse(recorded.unit_names)
        if not self._is_plan:
            refuse_varying_calls(self.runs, sample, recorded)
        return recorded

    def _find_all_rules(self, samples: list[SampleStep]) -> dict[StepKey, Rules]:
        found = {}
        for sample in samples:
            if sample.stage != RunningStage.TRAINING:
                continue
            trial = self._trial(sample)
            # Rules depend on the split of the batch only, not on the number of stages.
            key = "rules", sample.key, self.microbatching.whole, tuple(part.size for part in trial.parts)
            if key not in self._found:
                self._found[key] = trial.rules(check_samples=self.check_samples), trial.loss
            found[sample.key], self._loss = self._found[key]
        return found

    def _trial(self, sample: SampleStep) -> RuleTrial:
        return RuleTrial(self.runs, sample, self.microbatching, self._loss, self.loss_weight)
