"""Recording of the module's step functions on sample batches, as the Trainer would run them, and stage planning."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, repeat
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.rank_zero import rank_zero_debug
from torch import Tensor, nn

from lightning_pardist.axes.base import Samples
from lightning_pardist.axes.pipeline.collective_calls import CollectiveCalls
from lightning_pardist.axes.pipeline.merged_values import increment_of
from lightning_pardist.axes.pipeline.microbatch_outputs import StepOutputs
from lightning_pardist.axes.pipeline.microbatching import Microbatching
from lightning_pardist.axes.pipeline.owner_recording import needs_owners, record_for_owners, repeats_units
from lightning_pardist.axes.pipeline.pipeline_settings import PipelineSettings
from lightning_pardist.axes.pipeline.reduction_rules import (
    Collector,
    Place,
    Rules,
    Shares,
    combined,
    find_derived,
    find_rules,
    relative_error,
)
from lightning_pardist.axes.pipeline.spanning_functions import SpanningFunctions
from lightning_pardist.compat.lightning_loops import current_hook, layer_sync, set_current_hook
from lightning_pardist.compat.tensors import version_of
from lightning_pardist.engines.common.devices import RandomState, device_in_use, is_same_state, random_state
from lightning_pardist.engines.common.loss_setting import LossWeight, terms_of
from lightning_pardist.engines.common.loss_terms import Term
from lightning_pardist.engines.common.own_generators import are_same, generators_of, states_of
from lightning_pardist.engines.common.parameter_write_guard import ParameterWriteGuard
from lightning_pardist.engines.pipeline import (
    CannotPipelineError,
    MicroBatch,
    PipelinePlan,
    StepRecord,
    UnevenBatchError,
    dry_run,
    find_loss,
    plan_stages,
    record_step,
)
from lightning_pardist.engines.pipeline.errors import ALTERNATIVES, inner_gradient_error
from lightning_pardist.engines.pipeline.interception import intercepted, undisturbed
from lightning_pardist.engines.pipeline.loss_seeds import LossMakeup, common_ratios, part_weight
from lightning_pardist.engines.pipeline.microbatch import fresh_copy, weighted_mean
from lightning_pardist.engines.pipeline.nested import map_leaves
from lightning_pardist.engines.pipeline.steady_buffers import confirm_steady_buffers
from lightning_pardist.trainer.layer_sync import batch_norms, syncs_batch_norms
from lightning_pardist.trainer.sample_batches import NoSampleError
from lightning_pardist.trainer.sample_mixing import SampleMixing
from lightning_pardist.trainer.sample_orders import SampleOrders
from lightning_pardist.trainer.trial_run import HOOKS, placeholder_optimizers

STEPS = {
    RunningStage.TRAINING: "training_step",
    RunningStage.SANITY_CHECKING: "validation_step",
    RunningStage.VALIDATING: "validation_step",
    RunningStage.TESTING: "test_step",
    RunningStage.PREDICTING: "predict_step",
}
#: Strategies that run training steps on whole batches, suggested by errors.
_WHOLE = ("pardist_mp", "pardist_ddp", "pardist_zero3", "pardist_tp")
#: Kinds of places whose values persist between steps.
_KEPT = ("assigned", "buffer")
#: Relative errors: certainly rounding, possibly rounding, possibly rounding in half precision.
_CLOSE, _LOOSE, _ROUGH = 2e-6, 1e-4, 2e-2
#: Runs a step on batches, optionally with preset attributes or buffers, and returns the record of each run.
_Evaluate = Callable[..., list[dict[str, Any]]]
#: Name of a step function, and index of the loader whose batches it gets.
StepKey = tuple[str, int]


@dataclass(frozen=True)
class _Sample:
    """Step function and its sample batch; for training, also one micro-batch and its number of samples."""

    stage: RunningStage
    dataloader_idx: int
    num_dataloaders: int
    batch: Any
    microbatch: Any
    size: int | None = None

    @property
    def key(self) -> StepKey:
        return STEPS[self.stage], self.dataloader_idx


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


class MicrobatchError(CannotPipelineError):
    """Raised if a step runs on a batch but fails on a micro-batch.

    Attributes:
        failure: Message of the step's exception.
    """

    failure: str = ""


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
        self.trainer = trainer
        self.loss_weight: LossWeight = loss_weight
        self._loss = LossMakeup()
        #: How the samples of a batch depend on each other, if they do.
        self._coupled = ""
        self.samples = samples
        self.module: pl.LightningModule = trainer.lightning_module
        self.settings = settings
        self.ranks, self.num_ranks = ranks, len(ranks)
        # Units are not known yet: watch all modules, since a recorded run executes all of them.
        self._effects = StepOutputs(self.module)
        self.microbatching = Microbatching(settings, self.num_ranks)
        self._rng_afterwards = random_state(device_in_use())
        self._after_hooks: set[RunningStage] = set()
        self._failure, self._draws = "", False
        self._unstaged: dict[StepKey, str] = {}

    def record(self) -> Recorded:
        """Record, plan and try all step functions; the first one determines the stages.

        Raises:
            CannotPipelineError: If the module cannot be split as set, or a step fails on stubs.
        """
        samples = list(self._samples())
        if not samples:
            raise CannotPipelineError("There is no batch to record a run of a step with.", ())
        evaluates = self.trainer.state.fn in (TrainerFn.VALIDATING, TrainerFn.TESTING, TrainerFn.PREDICTING)
        if self.settings.schedule != "mp" and not evaluates:
            return self._record_stages(samples)
        if (why := needs_owners(self.module)) is not None and self.trainer.state.fn == TrainerFn.FITTING:
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
        sample = next(self._samples())
        for way in self.microbatching.candidate_splits(sample.batch) or [self.microbatching]:
            self.microbatching = way
            try:
                smallest = self._parts(sample)[-1]
            except ValueError as error:
                raise CannotPipelineError(f"{STEPS[sample.stage]} cannot run on parts of a batch: {error}") from error
            tried = replace(sample, microbatch=smallest.value, size=smallest.size)
            guard = ParameterWriteGuard(self.module)
            with self._running(tried) as run, undisturbed(self.module), guard as kept, torch.enable_grad():
                loss = loss_of(run(fresh_copy(tried.microbatch)))
                written = [name for name, param in self.module.named_parameters() if param in set(kept.written)]
            if written:
                raise CannotPipelineError(
                    f"{STEPS[sample.stage]} changes the values of {written[0]!r}, and it runs several times at once,"
                    " on parts of a batch. Change parameters in a hook."
                )
            if loss is not None and loss.numel() == 1:
                self._loss = LossMakeup.of(loss, tried.microbatch, tried.size, self.loss_weight)
            if not way.whole or self._is_additive(tried):
                return self._rules_of(tried), self._loss, way
        raise CannotPipelineError(f"{STEPS[sample.stage]} cannot run on parts of a batch: set batch_dim.")

    def _record_owners(self, samples: Sequence[_Sample], reason: str) -> Recorded:
        """Plan the placement of layers on ranks for steps that cannot run in stages."""
        steps = [(STEPS[sample.stage], sample.batch) for sample in samples]
        owners = record_for_owners(self.trainer, self.settings, self.num_ranks, steps)
        return Recorded({}, {}, unstaged={sample.key: reason for sample in samples}, owners=owners)

    def _record_stages(self, asked: Sequence[_Sample]) -> Recorded:
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
        written = frozenset(self._effects.seen_written)
        self._effects = StepOutputs(self.module, recorded.unit_names, written=written)
        main = self._plan(recorded, also=list(found.values()))
        if first.stage == RunningStage.TRAINING:
            self._refuse_shared_buffers(main, written)
            self._refuse_inner_gradients(main)
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
        rules = self._find_all_rules(staged)
        if (why := self._unsplit_reason(first, rules)) is not None:
            self.microbatching = self.microbatching.keep_whole(why)
            self._effects, self._unstaged = StepOutputs(self.module), {}
            return self._record_stages(asked)
        loss = replace(self._loss, coupled=self._loss.coupled or self._coupled)
        ways: dict[str, Any] = {"steady": steady, "microbatching": self.microbatching, "cut": cut, "loss": loss}
        ways["draws"] = self._draws
        return Recorded(plans, rules, written, self._unstaged, **ways)

    def _refuse_shared_buffers(self, made: PipelinePlan, written: frozenset[tuple[Any, ...]]) -> None:
        """Refuse units run by several ranks if the step writes to their buffers: each rank would miss updates.

        Raises:
            CannotPipelineError: If there is such a unit; names its buffer.
        """
        for unit, stages in made.unit_stages.items():
            ranks = sorted({stage % self.num_ranks for stage in stages})
            name = next((".".join(each) for each in sorted(written) if f"{each[0]}.".startswith(f"{unit}.")), None)
            if len(ranks) > 1 and name is not None:
                raise CannotPipelineError(
                    f"training_step calls {unit!r} several times, in the stages of ranks"
                    f" {', '.join(map(str, ranks))}, and each call changes {name!r}: a rank would have only the"
                    " changes of its own calls.",
                    ("pardist_mp", *ALTERNATIVES),
                )

    def _refuse_inner_gradients(self, made: PipelinePlan) -> None:
        """Refuse a step that differentiates by parameters of other stages than the loss', which has no graph of them.

        Raises:
            CannotPipelineError: If there is such a parameter; names it.
        """
        for name in sorted(made.trace.differentiated):
            if set(made.parameter_stages[name]) != {made.num_stages - 1}:
                raise inner_gradient_error("training_step", name)

    def _unsplit_reason(self, sample: _Sample, rules: Mapping[StepKey, Rules]) -> str | None:
        """Return why a batch must not be split; None if it may be, or if the user has set the number of parts."""
        found = rules.get(sample.key)
        if found is None or not self.microbatching.is_automatic or self.settings.split_batch is not None:
            return None
        if sample.stage == RunningStage.TRAINING and self._syncs_batch_norms and len(self._parts(sample)) > 1:
            return "sync_batchnorm=True normalizes all samples of a batch together"
        if self._loss.is_partly_fixed and len(self._parts(sample)) > 1:
            return "a part of the loss depends on no sample"
        coupled = self._coupling_reason(sample, found)
        self._coupled = self._coupled or coupled
        return coupled or None

    def _coupling_reason(self, sample: _Sample, found: Rules) -> str:
        """Return how the samples of a batch depend on each other; empty if they do not."""
        if found.mixing is not None:
            return f"{found.mixing} mixes the samples of a batch"
        if found.orders is not None:
            return f"the step mixes the samples of a batch ({found.orders})"
        coupled = self._batch_coupling(sample) if self._is_plan else self._loss.coupled
        if self.loss_weight != "auto" or (not coupled if self._is_plan else found.is_explained):
            return ""
        return f"the loss compares the samples of a batch{f' ({coupled})' if coupled else ''}"

    @property
    def _syncs_batch_norms(self) -> bool:
        asked = syncs_batch_norms(layer_sync(self.trainer.strategy))  # type: ignore[arg-type]
        return asked and bool(batch_norms(self.module))

    def _batch_coupling(self, sample: _Sample) -> str:
        """Return what makes the whole batch's loss more than a sum over samples, from its autograd graph.

        This needs no real values. Empty if nothing is found.
        """
        if len(self._parts(sample)) < 2:
            return ""
        with self._running(sample) as run, undisturbed(self.module), torch.enable_grad():
            loss = loss_of(run(fresh_copy(sample.batch)))
        if loss is None or loss.numel() != 1:
            return ""
        samples = self.microbatching.cut.samples_of(sample.batch)
        return LossMakeup.of(loss, sample.batch, samples, self.loss_weight).coupled

    def _steady_buffers(self, sample: _Sample, recorded: StepRecord) -> frozenset[str]:
        """Return buffers of units that change once per batch, independently of its samples and their number."""
        if sample.stage != RunningStage.TRAINING or not recorded.steady_buffers:
            return frozenset()
        with self._running(sample) as run, suppress(Exception):
            batches = (fresh_copy(sample.batch), fresh_copy(sample.microbatch))
            return confirm_steady_buffers(self.module, recorded.steady_buffers, run, *batches)
        return frozenset()

    def _record_training(self, sample: _Sample) -> tuple[StepRecord, _Sample]:
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
            if self._is_additive(tried):
                return recorded, tried
        try:
            asked.cut.size_of(sample.batch)
        except UnevenBatchError as error:
            raise CannotPipelineError(f"{STEPS[sample.stage]} cannot run on micro-batches: {error}", _WHOLE) from error
        raise RuntimeError("A batch was refused whose tensors agree.")

    def _record_smallest(self, sample: _Sample, way: Microbatching) -> tuple[StepRecord, _Sample]:
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

    def _is_additive(self, sample: _Sample) -> bool:
        """Return whether the mean or sum of the micro-batches' losses is the batch's loss, up to rounding."""
        tried, parts = self._trial_results(sample), self._parts(sample)
        if tried is None or len(parts) < 2:
            return False
        whole, run, _ = tried
        loss, losses = loss_of(whole), [loss_of(record) for record in run([part.value for part in parts])]
        if loss is None or any(each is None for each in losses):
            return False
        shares = Shares.of([part.size for part in parts], [part.size for part in parts])
        ways = (weighted_mean(losses, shares.loss), sum(losses))  # type: ignore[arg-type]
        return min(relative_error(loss, way) for way in ways) <= _CLOSE

    def _parts(self, sample: _Sample) -> list[MicroBatch]:
        return self.microbatching.split(sample.batch, self.microbatching.count(sample.batch))

    def _record_others(self, first: StepRecord, samples: Sequence[_Sample]) -> dict[StepKey, StepRecord]:
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

    def _try(self, sample: _Sample, made: PipelinePlan) -> None:
        with self._running(sample) as run:
            dry_run(self.module, run, sample.microbatch, made, loss_of=loss_of)

    def _samples(self) -> Iterator[_Sample]:
        trainer = self.trainer
        stages = [] if trainer.state.stage is None else [trainer.state.stage]
        if trainer.state.fn == TrainerFn.FITTING:
            stages = [RunningStage.TRAINING]
            if trainer.limit_val_batches and is_overridden("validation_step", self.module) and _validates(trainer):
                stages.append(RunningStage.VALIDATING)
        for stage in stages:
            with self._trainer_state_of(stage):
                batches = self._batches(stage)
            for index, batch in enumerate(batches):
                if batch is not None:
                    yield _Sample(stage, index, len(batches), batch, batch)

    def _batches(self, stage: RunningStage) -> list[Any]:
        try:
            return self.samples.of(stage)
        except NoSampleError as problem:
            raise NoSampleError(
                f"{type(self.trainer.strategy).__name__} records a run of {STEPS[stage]} before it starts, and has no"
                f" batch for it: {problem}. Let the loader give a batch whenever it is asked, or turn that loop off"
                " (limit_val_batches=0)."
            ) from problem

    def _record(self, sample: _Sample) -> StepRecord:
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

    def _trace_after_hooks(self, sample: _Sample, error: Exception) -> StepRecord:
        """Retry a failed step after its hooks, which may prepare it (``on_train_epoch_start`` sets ``self.outputs``).

        Raises:
            MicrobatchError: If it fails again, but runs on the whole batch.
        """
        self._after_hooks.add(sample.stage)
        try:
            return self._traced(sample)
        except CannotPipelineError:
            raise
        except Exception:
            if sample.microbatch is sample.batch or not self._runs_on_full_batch(sample):
                raise error from None
            failed = MicrobatchError(
                f"{STEPS[sample.stage]} runs on a batch and fails on a micro-batch"
                f" ({type(error).__name__}: {error}). If samples belong together, use pardist_mp, which makes no"
                " micro-batches; if micro-batches are too small, larger batches or a smaller num_microbatches.",
                (),
            )
            failed.failure = f"{type(error).__name__}: {error}"
            # Missing hooks were not the reason.
            self._after_hooks.discard(sample.stage)
            raise failed from error

    def _runs_on_full_batch(self, sample: _Sample) -> bool:
        # With gradients in training, since steps may compute some themselves (forces, penalties).
        training = sample.stage == RunningStage.TRAINING
        with (
            suppress(Exception),
            undisturbed(self.module),
            self._running(sample) as run,
            torch.set_grad_enabled(training),
        ):
            run(fresh_copy(sample.batch))
            return True
        return False

    def _traced(self, sample: _Sample) -> StepRecord:
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

        with self._running(sample) as run, ParameterWriteGuard(self.module) as kept, calls, functions:
            whole = self.unsplittable_modules
            recorded = record_step(
                self.module, step, sample.microbatch, grad=training, loss_of=note_loss, unsplittable_modules=whole
            )
            if kept.written:
                self._refuse_changes(sample, run, kept.written)
        # Outside of the modes that observe the run, under which saved random states cannot be compared.
        drawn = not all(is_same_state(*pair) for pair in states) or not all(are_same(*pair) for pair in own)
        self._draws = self._draws or (training and drawn)
        if training and loss is not None and loss.numel() == 1:
            self._loss = LossMakeup.of(loss, sample.microbatch, sample.size, self.loss_weight)
        if calls.found:
            raise CannotPipelineError(
                f"{STEPS[sample.stage]} calls a collective itself ({', '.join(dict.fromkeys(calls.found))}). In a"
                " pipeline the step runs stage by stage, so ranks reach this call at different times, or not at"
                " all. Call it in a hook (on_train_batch_end), or log with sync_dist=True."
            )
        if training:
            functions.refuse(recorded.unit_names)
        self._refuse_other_calls(sample, recorded)
        return recorded

    def _refuse_other_calls(self, sample: _Sample, recorded: StepRecord) -> None:
        """Refuse a step whose later runs call other units than the recorded one, as for code that runs once only.

        Raises:
            CannotPipelineError: If a second run, with the next ``batch_idx``, calls other units than the recorded one.
        """
        first, later = [call.unit for call in recorded.calls], self._later_calls(sample, recorded)
        # A step that returns before it calls any unit is skipped by all stages.
        if later and first != later:
            index = next((i for i, (one, two) in enumerate(zip(first, later, strict=False)) if one != two), None)
            index = min(len(first), len(later)) if index is None else index
            one, two = (repr(each[index]) if index < len(each) else "no further layer" for each in (first, later))
            raise CannotPipelineError(
                f"{STEPS[sample.stage]} does not call the same layers in every step: after {index} calls of layers,"
                f" a first run calls {one}, and a second run with batch_idx=1 calls {two}. Stages run in a fixed"
                " order. Move what is done once, or with some batches only, to a hook.",
                ("pardist_mp", *ALTERNATIVES),
            )

    def _later_calls(self, sample: _Sample, recorded: StepRecord) -> list[str]:
        """Return the units that a second run calls, with the next ``batch_idx``; empty if it could not be tried."""
        found: list[str] = []

        def note(name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            found.append(name)
            return forward(*args, **kwargs)

        if self._is_plan:
            return []
        units = {name: self.module.get_submodule(name) for name in recorded.unit_names}
        try:
            with (
                undisturbed(self.module),
                ParameterWriteGuard(self.module),
                self._running(sample, in_order=True) as run,
                torch.set_grad_enabled(sample.stage == RunningStage.TRAINING),
            ):
                run(fresh_copy(sample.microbatch))
                with intercepted(units, note):
                    run(fresh_copy(sample.microbatch))
        except Exception as error:
            # For example, since there is no backward between the two runs.
            rank_zero_debug(f"{STEPS[sample.stage]} was not tried a second time: {error}")
            return []
        return found

    @torch.no_grad()
    def _refuse_changes(self, sample: _Sample, run: Callable[[Any], Any], written: Sequence[nn.Parameter]) -> None:
        """Refuse a step that writes to parameters, unless repeated runs have the effect of one (a clamp).

        Raises:
            CannotPipelineError: If the change depends on how often the step runs, as for a moving average, or on other
                parameters or the samples.
        """
        begun = []
        for place, parameter in enumerate(written):
            # Each by a different amount, so that copies of each other differ.
            begun.append(parameter.add_(1.0 + place / len(written)).clone())
        with undisturbed(self.module), torch.enable_grad():
            run(fresh_copy(sample.microbatch))
            once = [parameter.detach().clone() for parameter in written]
            run(fresh_copy(sample.microbatch))
        if (name := self._differing(written, once)) is not None:
            raise CannotPipelineError(
                f"{STEPS[sample.stage]} changes the values of {name!r} again each time that it runs; in a pipeline"
                " it runs once for every micro-batch and stage. Change parameters in a hook, and compute them only"
                " from parameters of the same stage."
            )
        # Again, with all inputs shifted: parameters that are only read, and the samples.
        starts = dict(zip(written, begun, strict=True))
        changed = {each: values for each, values in zip(written, once, strict=True) if not values.equal(starts[each])}
        for parameter in self.module.parameters():
            if parameter in changed:
                parameter.copy_(starts[parameter])
            else:
                parameter.add_(1.0)
        moved = map_leaves(_moved, fresh_copy(sample.microbatch))
        name = None
        with undisturbed(self.module), torch.enable_grad(), suppress(Exception):
            run(moved)
            name = self._differing(list(changed), list(changed.values()))
        if name is not None:
            raise CannotPipelineError(
                f"{STEPS[sample.stage]} computes the values of {name!r} from other parameters or from the samples;"
                " in a pipeline each rank has only the parameters of its own stages, and runs micro-batches. Set"
                " parameters in a hook, and compute them only from parameters of the same stage."
            )

    def _differing(self, written: Sequence[nn.Parameter], values: Sequence[Tensor]) -> str | None:
        """Return the name of the first parameter whose values differ; None if none does."""
        wanted = dict(zip(written, values, strict=True))
        named = ((name, parameter) for name, parameter in self.module.named_parameters() if parameter in wanted)
        return next((name for name, own in named if relative_error(wanted[own], own) > _LOOSE), None)

    def _find_all_rules(self, samples: list[_Sample]) -> dict[StepKey, Rules]:
        found = {}
        for sample in samples:
            if sample.stage != RunningStage.TRAINING:
                continue
            # Rules depend on the split of the batch only, not on the number of stages.
            key = "rules", sample.key, self.microbatching.whole, tuple(part.size for part in self._parts(sample))
            if key not in self._found:
                self._found[key] = self._rules_of(sample), self._loss
            found[sample.key], self._loss = self._found[key]
        return found

    def _rules_of(self, sample: _Sample) -> Rules:
        rules = self._find_rules(sample)
        if not self.check_samples or len(self._parts(sample)) < 2:
            return rules
        orders, mixing = self._find_mixing(sample)
        return replace(rules, orders=orders, mixing=mixing)

    def _find_mixing(self, sample: _Sample) -> tuple[str | None, str | None]:
        """Return how a step mixes samples, and the name of a layer whose output depends on other samples.

        The step runs in training mode, unlike in the trial that finds rules.
        """
        batch, samples = fresh_copy(sample.batch), self.microbatching.cut.samples_of(sample.batch)
        mixing, orders = SampleMixing(self.module), SampleOrders(batch, samples or 0)
        guard = ParameterWriteGuard(self.module)
        try:
            with self._running(sample) as run, undisturbed(self.module), torch.no_grad(), guard:
                with mixing.noting(batch, samples), orders:
                    run(batch)
                with self.trainer.precision_plugin.train_step_context():
                    return orders.found, mixing.find()
        except Exception as error:
            rank_zero_debug(f"Whether layers mix samples is not known ({error}).")
            return orders.found, None

    def _find_rules(self, sample: _Sample) -> Rules:
        """Run the step on the whole sample batch and on its micro-batches, and find the rules that combine values."""
        parts = self._parts(sample)
        if len(parts) < 2:
            return Rules()
        values, sizes = [part.value for part in parts], [part.size for part in parts]
        rng = random_state(device_in_use())
        tried = self._trial_results(sample)
        if tried is None:
            return Rules(untried=self._failure)
        whole, run, is_exact = tried
        is_random = not is_same_state(rng, self._rng_afterwards)
        weights = self._weights(parts, run)
        shares = Shares.of([1.0 if weight is None else float(weight) for weight in weights], sizes)
        records = run(values)
        collector = self._numbers(records, shares)
        numbers, columns, meant = self._numbers_of(whole, sum(sizes)), collector.found, collector.meant
        loose, close = (_LOOSE, _CLOSE) if is_exact else (_ROUGH, _ROUGH)
        loss = loss_of(whole)
        place = next((key for key, number in numbers.items() if number is loss), None)
        derived = {} if place not in columns else find_derived(columns, columns[place], close=close)
        tolerances: dict[str, Any] = {"close": close, "tolerance": loose, "rough": is_random, "meant": meant}
        found = find_rules(numbers, columns, shares, **tolerances) | derived
        found = self._settle_sums(found, numbers, sample, run)
        told: dict[str, Any] = {}
        if not is_random:
            told["unexplained"] = _unexplained(numbers, columns, found)
            told["metrics"] = tuple(self._effects.uneven_metrics(whole, records))
        if place is None or place not in columns:
            return Rules(found, **told)
        own, shown = "sum" if None in weights else "mean", found.get(place)
        if is_random:
            # Random values cannot confirm the loss weighting; rely on the autograd graph.
            return Rules({**found, place: own}, None, not self._batch_coupling(sample), **told)
        if relative_error(numbers[place], combined(own, columns[place], shares)) <= loose:
            return Rules({**found, place: own}, **told)
        if shown not in ("mean", "samples", "sum"):
            linear = self._loss.several_counts and not self._loss.coupled
            return Rules({**found, place: own}, None, linear, **told)
        # The analysis of the autograd graph was wrong: use the rule of the trial.
        known = self.loss_weight == "auto"
        return Rules(found, ("sum" if shown == "sum" else "samples") if known else None, known, **told)

    def _weights(self, parts: Sequence[MicroBatch], run: _Evaluate) -> list[Tensor | float | None]:
        """Return the weights of the micro-batches' losses, None for each if they are summed."""
        if self._loss.is_sum:
            return [None] * len(parts)
        if not self._loss.by_data:
            return [1.0 if self.loss_weight == "ranks" else float(part.size) for part in parts]
        weights = []

        def look() -> Iterator[tuple[list[Term], int]]:
            # One at a time, since each loss holds an autograd graph.
            for part in parts:
                loss = loss_of(run([part.value], grad=True)[0])
                terms = [] if loss is None else terms_of(loss, part.value, part.size, self.loss_weight)
                weights.append(part_weight(terms, part.size))
                yield terms, part.size

        self._loss = replace(self._loss, several_counts=common_ratios(look()) is None)
        return weights

    def _settle_sums(
        self, found: dict[Place, str], numbers: dict[Place, Any], sample: _Sample, run: _Evaluate
    ) -> dict[Place, str]:
        """Decide whether a value that was 0 before the step is a sum over the batch, or is incremented in each step."""
        for place in [
            place for place, rule in found.items() if rule == "sum" and found.get(increment_of(place)) == "sum"
        ]:
            before = self._effects.value_at(place)
            try:
                (record,) = run([sample.batch], {place: before + 1})
                after = self._numbers_of(record, 1).get(place, math.nan)
            except Exception:
                after = math.nan
            del found[increment_of(place) if relative_error(after, numbers[place]) == 0.0 else place]
        return found

    def _trial_results(self, sample: _Sample) -> tuple[dict[str, Any], _Evaluate, bool] | None:
        """Return the record of the step on the whole batch, a function to run others, and whether values are exact.

        None if the step fails on the batch in evaluation mode, which is no reason to refuse it.
        """
        precision = str(self.trainer.precision)
        # If parameters are fp32, rules are distinguished best without autocast.
        for plain in (True, False) if precision.endswith("mixed") else (False,):
            run = partial(self._evaluated, sample, plain)
            try:
                return run([sample.batch])[0], run, plain or precision.startswith(("32", "64"))
            except Exception as error:
                self._failure = f"{type(error).__name__}: {error}"
        return None

    def _evaluated(
        self,
        sample: _Sample,
        plain: bool,
        batches: list[Any],
        preset: Mapping[Place, Any] | None = None,
        *,
        grad: bool = False,
    ) -> list[dict[str, Any]]:
        with self._running(sample, plain=plain) as run, undisturbed(self.module), torch.set_grad_enabled(grad):
            self.module.eval()
            for place, value in (preset or {}).items():
                self._effects.preset(place, value)
            records = [run(fresh_copy(batch)) for batch in batches]
            self._rng_afterwards = random_state(device_in_use())
            return records

    def _numbers_of(self, record: dict[str, Any], size: int) -> dict[Place, Any]:
        twice = self._numbers([record, record], Shares.of([1, 1], [size] * 2)).found
        return {place: column[0] for place, column in twice.items()}

    def _numbers(self, records: list[dict[str, Any]], shares: Shares) -> Collector:
        collector = Collector()
        self._effects.combine(records, shares, collector)
        for place in [place for place, column in collector.found.items() if len(column) < len(records)]:
            # None on some micro-batches: no rule can be found.
            del collector.found[place]
        return collector

    @contextmanager
    def _running(
        self, sample: _Sample, *, plain: bool = False, in_order: bool = False
    ) -> Iterator[Callable[[Any], Any]]:
        """Yield a function that runs the step on a batch, each time as the first or (``in_order``) after the others."""
        name = STEPS[sample.stage]
        function = getattr(self.module, name)
        takes_index = is_param_in_hook_signature(function, "batch_idx", min_args=2)
        rest = [sample.dataloader_idx] if sample.num_dataloaders > 1 else []
        indices = count() if in_order else repeat(0)
        run = self._effects.run_in_order if in_order else self._effects.run
        precision: Any = self.trainer.precision_plugin
        context = nullcontext if plain else getattr(precision, _CONTEXTS[name])

        def step(microbatch: Any) -> Any:
            with context():
                return function(microbatch, *([next(indices)] if takes_index else []), *rest)

        before = current_hook(self.module)
        set_current_hook(self.module, name)
        try:
            optimizers = placeholder_optimizers(self.module, self.trainer)
            with (
                optimizers,
                self._trainer_state_of(sample.stage),
                self._effects.watching(),
                self._with_step_hooks(sample),
            ):
                yield lambda microbatch: run(step, microbatch)
        finally:
            set_current_hook(self.module, before)

    @contextmanager
    def _with_step_hooks(self, sample: _Sample) -> Iterator[None]:
        """Run the module's hooks that precede the step, if the step needs them; undo their effects on exit.

        Raises:
            CannotPipelineError: If a hook changes parameters, which cannot be undone.
        """
        if sample.stage not in self._after_hooks:
            yield
            return
        module = self.module
        versions = [version_of(parameter) for parameter in module.parameters()]
        with undisturbed(module):
            module.__dict__["log"] = lambda *args, **kwargs: None
            for name in HOOKS[STEPS[sample.stage]]:
                set_current_hook(module, name)
                rest = [0, sample.dataloader_idx] if sample.num_dataloaders > 1 else [0]
                getattr(module, name)(*([sample.batch, *rest] if name.endswith("batch_start") else []))
                if versions != [version_of(parameter) for parameter in module.parameters()]:
                    raise CannotPipelineError(
                        f"{type(module).__name__}.{STEPS[sample.stage]} needs its hooks to run first, and {name}"
                        " changes parameters, which is not possible in a trial run. Change them in setup() or"
                        " configure_model().",
                        (),
                    )
            module.__dict__.pop("log")
            set_current_hook(module, STEPS[sample.stage])
            yield

    @contextmanager
    def _trainer_state_of(self, stage: RunningStage | None) -> Iterator[None]:
        """Set the Trainer's state and the module's mode to those of a running stage, and restore them on exit."""
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


def _moved(leaf: Any) -> Any:
    return leaf + 1.0 if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _validates(trainer: pl.Trainer) -> bool:
    """Return whether training will run validation; its loader is not requested otherwise."""
    every, epochs = trainer.check_val_every_n_epoch, trainer.max_epochs
    return bool(trainer.num_sanity_val_steps) or every is None or epochs in (None, -1) or epochs >= every


def _unexplained(
    numbers: Mapping[Place, Any], columns: Mapping[Place, Any], found: Mapping[Place, str]
) -> tuple[str, ...]:
    """Return names of logged values, attributes and buffers without a rule."""
    kept = [place for place in columns if place in numbers and place[0] in (*_KEPT, "logged")]
    kept = [place for place in kept if place not in found and increment_of(place) not in found]
    return tuple(dict.fromkeys(_named(place) for place in kept))


def _named(place: Place) -> str:
    if place[0] == "logged":
        # A logged dict has one value per key.
        return repr(place[3] if len(place) > 3 and isinstance(place[3], str) else place[1])
    return ".".join(str(part) for part in place[1] if part)  # type: ignore[attr-defined]


def loss_of(record: dict[str, Any]) -> Tensor | None:
    """Return the loss in a result of :meth:`StepOutputs.run`."""
    return find_loss(record["result"])
