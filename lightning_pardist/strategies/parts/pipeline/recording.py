"""Runs of the module's step functions, recorded on sample batches as the Trainer would run them, and planned."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from lightning_pardist.engines.kept_parameters import KeptParameters
from lightning_pardist.engines.pipeline import (
    CannotPipelineError,
    PipelinePlan,
    Trace,
    batch_size_of,
    dry_run,
    find_loss,
    plan,
    split_batch,
    trace,
)
from lightning_pardist.engines.pipeline.intercept import undisturbed
from lightning_pardist.engines.pipeline.microbatch import fresh_copy, weighted_mean
from lightning_pardist.engines.pipeline.structure import flatten, replace_leaves
from lightning_pardist.strategies.parts.pipeline.combining import (
    Collector,
    Place,
    Rules,
    Shares,
    TokenWeight,
    find_rules,
    find_token_weight,
    relative_error,
)
from lightning_pardist.strategies.parts.pipeline.effects import StepEffects
from lightning_pardist.strategies.parts.pipeline.merging import change_of
from lightning_pardist.strategies.parts.pipeline.settings import PipelineSettings
from lightning_pardist.strategies.rehearsal import HOOKS
from lightning_pardist.strategies.samples import NoSampleError, sample_batches

STEPS = {
    RunningStage.TRAINING: "training_step",
    RunningStage.SANITY_CHECKING: "validation_step",
    RunningStage.VALIDATING: "validation_step",
    RunningStage.TESTING: "test_step",
    RunningStage.PREDICTING: "predict_step",
}
#: What stays from one step to the next.
_KEPT = ("assigned", "buffer")
#: Relative errors that are rounding for certain, that may be, and that may be in half precision.
_CLOSE, _LOOSE, _ROUGH = 2e-6, 1e-4, 2e-2
#: Runs a step on batches, at will with other values of what it keeps, and returns what it did with each.
_Evaluate = Callable[..., list[dict[str, Any]]]
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
        written: Buffers that steps write to, by module and name.
        unstaged: Steps of evaluation beside another step that do not run in its stages, and why.
    """

    plans: dict[StepKey, PipelinePlan]
    rules: dict[StepKey, Rules]
    written: frozenset[tuple[Any, ...]] = frozenset()
    unstaged: dict[StepKey, str] = field(default_factory=dict)


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
        self._after_hooks: set[RunningStage] = set()
        self._unstaged: dict[StepKey, str] = {}

    def record(self) -> Recorded:
        """Plans for all step functions, the first of which decides the stages; each is tried.

        Raises:
            CannotPipelineError: If the module cannot be cut as asked, or a step fails on stubs.
        """
        samples = list(self._samples())
        if not samples:
            raise CannotPipelineError("There is no batch to record a run of a step with.", ())
        first, *others = samples
        recorded = self._record(first)
        found = self._record_others(recorded, others)
        written = frozenset(self._effects.seen_written)
        self._effects = StepEffects(self.module, recorded.unit_names, written=written)
        main = self._plan(recorded, also=list(found.values()))
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
        return Recorded(plans, self._find_all_rules(staged), written, self._unstaged)

    def _record_others(self, first: Trace, samples: Sequence[_Sample]) -> dict[StepKey, Trace]:
        """Runs of the other steps, as far as they go through the first one's stages (``generate`` does not)."""
        found: dict[StepKey, Trace] = {}
        for sample in samples:
            try:
                recorded = self._record(sample)
                self._plan(first, also=[recorded])
            except CannotPipelineError as error:
                self._unstaged[sample.key] = error.reason
            else:
                found[sample.key] = recorded
        return found

    def _plan(self, recorded: Trace, also: Sequence[Trace]) -> PipelinePlan:
        settings, num_stages = self.settings, self.num_ranks * self.settings.chunks_per_rank
        return plan(recorded, num_stages, split=settings.split, reads=settings.reads, also=also)

    def _try(self, sample: _Sample, made: PipelinePlan) -> None:
        with self._running(sample) as run:
            dry_run(self.module, run, sample.microbatch, made, loss_of=loss_of)

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
                batches = self._batches(stage)
            for index, batch in enumerate(batches):
                yield _Sample(stage, index, len(batches), batch, split_batch(batch, count)[0].value)

    def _batches(self, stage: RunningStage) -> list[Any]:
        try:
            return sample_batches(self.trainer, stage)
        except NoSampleError as problem:
            raise NoSampleError(
                f"{type(self.trainer.strategy).__name__} records a run of {STEPS[stage]} before it starts, and has no"
                f" batch for it: {problem}. Let the loader give a batch whenever it is asked, or turn that loop off"
                " (limit_val_batches=0)."
            ) from problem

    def _record(self, sample: _Sample) -> Trace:
        training = sample.stage == RunningStage.TRAINING
        try:
            recorded = self._traced(sample)
        except CannotPipelineError:
            raise
        except Exception as error:
            recorded = self._traced_behind_hooks(sample, error)
        if training and recorded.loss is None:
            raise CannotPipelineError(f"{type(self.module).__name__}.training_step returned no loss.", ())
        return recorded

    def _traced_behind_hooks(self, sample: _Sample, error: Exception) -> Trace:
        """Hooks may prepare what steps need, as in ``def on_train_epoch_start(self): self.outputs = []``."""
        self._after_hooks.add(sample.stage)
        try:
            return self._traced(sample)
        except CannotPipelineError:
            raise
        except Exception:
            if not self._runs_on_whole(sample):
                raise error from None
            size, whole = batch_size_of(sample.microbatch), batch_size_of(sample.batch)
            raise CannotPipelineError(
                f"{STEPS[sample.stage]} runs on a batch and fails on a micro-batch, {size} of the batch's {whole}"
                f" samples ({type(error).__name__}: {error}). If samples belong together, use pardist_mp, which makes"
                " no micro-batches; if micro-batches are too small, larger batches or a smaller num_microbatches.",
                (),
            ) from error

    def _runs_on_whole(self, sample: _Sample) -> bool:
        with suppress(Exception), undisturbed(self.module), torch.no_grad(), self._running(sample) as run:
            run(fresh_copy(sample.batch))
            return True
        return False

    def _traced(self, sample: _Sample) -> Trace:
        training = sample.stage == RunningStage.TRAINING
        with self._running(sample) as run, KeptParameters(self.module) as kept:
            recorded = trace(self.module, run, sample.microbatch, grad=training, loss_of=loss_of)
            if kept.written:
                self._refuse_changes(sample, run, kept.written)
        return recorded

    @torch.no_grad()
    def _refuse_changes(self, sample: _Sample, run: Callable[[Any], Any], written: Sequence[nn.Parameter]) -> None:
        """A step may clamp or normalize parameters, which comes to the same if every micro-batch does it, and no more.

        Raises:
            CannotPipelineError: If the change depends on how often the step runs, as that of a moving average does.
        """
        for parameter in written:
            parameter.add_(1.0)
        with undisturbed(self.module), torch.enable_grad():
            run(fresh_copy(sample.microbatch))
            once = [parameter.detach().clone() for parameter in written]
            run(fresh_copy(sample.microbatch))
        for name, parameter in self.module.named_parameters():
            before = next((value for other, value in zip(written, once, strict=True) if other is parameter), None)
            if before is not None and relative_error(before, parameter) > _LOOSE:
                raise CannotPipelineError(
                    f"{STEPS[sample.stage]} changes the values of {name!r}, and more of it each time that it runs; in a"
                    " pipeline it runs once for every micro-batch and stage. Change parameters in a hook, and only by"
                    " those of the same stage."
                )

    def _find_all_rules(self, samples: list[_Sample]) -> dict[StepKey, Rules]:
        found: dict[StepKey, Rules] = {}
        for sample in samples:
            found[sample.key] = self._find_rules(sample, found.get(("training_step", 0), Rules()).weight)
        return found

    def _find_rules(self, sample: _Sample, of_training: TokenWeight | None) -> Rules:
        """Run the step on the whole sample batch and on its micro-batches, and see how the numbers go together.

        Args:
            sample: Of the step.
            of_training: What weighs the losses of the training step.
        """
        parts = split_batch(sample.batch, self.settings.microbatches(self.num_ranks))
        if len(parts) < 2:
            return Rules()
        values, sizes = [part.value for part in parts], [part.size for part in parts]
        rng = torch.get_rng_state()
        tried = self._tried(sample)
        if tried is None:
            return Rules()
        whole, run, is_exact = tried
        is_random = not torch.equal(rng, self._rng_afterwards)
        weigh = self.settings.loss_weight
        weights = [float(weigh(value)) for value in values] if callable(weigh) else [float(size) for size in sizes]
        shares = Shares.of(weights, sizes)
        collector = self._numbers(run(values), shares)
        numbers, columns, meant = self._numbers_of(whole, sum(sizes)), collector.found, collector.meant
        loose, close = (_LOOSE, _CLOSE) if is_exact else (_ROUGH, _ROUGH)
        find = partial(find_rules, numbers, columns, close=close, tolerance=loose, rough=is_random, meant=meant)
        found = self._settle_sums(find(shares), numbers, sample, run)
        certain = find_rules(numbers, columns, shares, close=close, tolerance=close, meant=meant)
        training = sample.stage == RunningStage.TRAINING
        if training:
            loss = loss_of(whole)
            place = next((key for key, number in numbers.items() if number is loss), None)
        else:
            place = _place_of_loss(numbers, columns, certain, of_training)
        if place is None or place not in columns:
            return Rules(found, unexplained=() if is_random else _unexplained(numbers, columns, found))
        if is_random or weigh is not None or found.get(place) == "sum":
            return Rules(found, None, training and found.get(place) == "sum", not training or place in found)
        # Padding marked by the ignore index counts, even if this sample is padded so evenly that it does not show.
        evenly = -100 if of_training is None else of_training.ignored
        error = relative_error(numbers[place], weighted_mean(columns[place], shares.loss))
        weight = find_token_weight(
            numbers[place],
            columns[place],
            values,
            close=close,
            tolerance=close if place in certain else min(loose, error),
            only=evenly if place in certain else None,
        )
        if weight is not None:
            weight = self._settled(weight, sample, run, place, numbers[place])
            found = self._settle_sums(find(Shares.of([weight(value) for value in values], sizes)), numbers, sample, run)
        unexplained = _unexplained(numbers, columns, found)
        return Rules(found, weight, False, not training or place in found, unexplained)

    def _settle_sums(
        self, found: dict[Place, str], numbers: dict[Place, Any], sample: _Sample, run: _Evaluate
    ) -> dict[Place, str]:
        """Whether a number that was 0 before the step is a sum of the batch, or grows by it from step to step."""
        for place in [place for place, rule in found.items() if rule == "sum" and found.get(change_of(place)) == "sum"]:
            before = self._effects.value_at(place)
            try:
                (record,) = run([sample.batch], {place: before + 1})
                after = self._numbers_of(record, 1).get(place, math.nan)
            except Exception:
                after = math.nan
            del found[change_of(place) if relative_error(after, numbers[place]) == 0.0 else place]
        return found

    def _settled(self, weight: TokenWeight, sample: _Sample, run: _Evaluate, place: Place, number: Any) -> TokenWeight:
        """Whether a sample's first entry counts, which samples of one length do not show."""
        leaves = flatten(sample.batch)[0]
        entries = leaves[weight.leaf]
        if weight.ignored != -100 or entries.ndim < 2 or not (entries[:, 0] != -100).any():
            return weight
        leaves[weight.leaf] = entries.clone()
        leaves[weight.leaf][:, 0] = -100
        try:
            (without,) = run([replace_leaves(sample.batch, leaves)])
            again = self._numbers_of(without, len(entries)).get(place, math.nan)
        except Exception:
            return weight
        return replace(weight, first=int(relative_error(number, again) == 0.0))

    def _tried(self, sample: _Sample) -> tuple[dict[str, Any], _Evaluate, bool] | None:
        """What the step makes of the whole batch, how to run it on others, and whether its numbers are exact.

        A step that cannot take the batch in evaluation mode tells nothing, and need not be refused for it.
        """
        precision = str(self.trainer.precision)
        # Where parameters are fp32, numbers are told apart best without autocast.
        for plain in (True, False) if precision.endswith("mixed") else (False,):
            run = partial(self._evaluated, sample, plain)
            with suppress(Exception):
                return run([sample.batch])[0], run, plain or precision.startswith(("32", "64"))
        return None

    def _evaluated(
        self, sample: _Sample, plain: bool, batches: list[Any], preset: Mapping[Place, Any] | None = None
    ) -> list[dict[str, Any]]:
        with self._running(sample, plain=plain) as run, undisturbed(self.module), torch.no_grad():
            self.module.eval()
            for place, value in (preset or {}).items():
                self._effects.preset(place, value)
            records = [run(fresh_copy(batch)) for batch in batches]
            self._rng_afterwards = torch.get_rng_state()
            return records

    def _numbers_of(self, record: dict[str, Any], size: int) -> dict[Place, Any]:
        twice = self._numbers([record, record], Shares.of([1, 1], [size] * 2)).found
        return {place: column[0] for place, column in twice.items()}

    def _numbers(self, records: list[dict[str, Any]], shares: Shares) -> Collector:
        collector = Collector()
        self._effects.combine(records, shares, collector)
        return collector

    @contextmanager
    def _running(self, sample: _Sample, *, plain: bool = False) -> Iterator[Callable[[Any], Any]]:
        name = STEPS[sample.stage]
        function = getattr(self.module, name)
        rest = [0] if is_param_in_hook_signature(function, "batch_idx", min_args=2) else []
        if sample.num_dataloaders > 1:
            rest.append(sample.dataloader_idx)
        precision: Any = self.trainer.precision_plugin
        context = nullcontext if plain else getattr(precision, _CONTEXTS[name])

        def step(microbatch: Any) -> Any:
            with context():
                return function(microbatch, *rest)

        before = self.module._current_fx_name
        self.module._current_fx_name = name
        try:
            with self._as_in(sample.stage), self._effects.watching(), self._hooks_run(sample):
                yield lambda microbatch: self._effects.run(step, microbatch)
        finally:
            self.module._current_fx_name = before

    @contextmanager
    def _hooks_run(self, sample: _Sample) -> Iterator[None]:
        """As after the module's hooks before the step, if the step needs them; what they do is undone.

        Raises:
            CannotPipelineError: If a hook changes parameters, which cannot be undone.
        """
        if sample.stage not in self._after_hooks:
            yield
            return
        module = self.module
        versions = [parameter._version for parameter in module.parameters()]
        with undisturbed(module):
            module.__dict__["log"] = lambda *args, **kwargs: None
            for name in HOOKS[STEPS[sample.stage]]:
                module._current_fx_name = name
                rest = [0, sample.dataloader_idx] if sample.num_dataloaders > 1 else [0]
                getattr(module, name)(*([sample.batch, *rest] if name.endswith("batch_start") else []))
                if versions != [parameter._version for parameter in module.parameters()]:
                    raise CannotPipelineError(
                        f"{type(module).__name__}.{STEPS[sample.stage]} fails without what hooks prepare, and {name}"
                        " changes parameters, which a trial run may not. Change them in setup() or configure_model().",
                        (),
                    )
            module.__dict__.pop("log")
            module._current_fx_name = STEPS[sample.stage]
            yield

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


def _unexplained(
    numbers: Mapping[Place, Any], columns: Mapping[Place, Any], found: Mapping[Place, str]
) -> tuple[str, ...]:
    """Names of attributes and buffers of which no rule is known."""
    kept = [place for place in columns if place in numbers and place[0] in _KEPT]
    kept = [place for place in kept if place not in found and change_of(place) not in found]
    return tuple(dict.fromkeys(".".join(str(part) for part in place[1] if part) for place in kept))  # type: ignore[attr-defined]


def _place_of_loss(
    numbers: Mapping[Place, Any],
    columns: Mapping[Place, Any],
    certain: Mapping[Place, str],
    of_training: TokenWeight | None,
) -> Place | None:
    """Which number of an evaluation step is weighed as a loss is: one that samples do not explain, or any mean."""
    places = [place for place in columns if isinstance(numbers.get(place), Tensor | float)]
    unexplained = next((place for place in places if place not in certain), None)
    if unexplained is not None or of_training is None:
        return unexplained
    return next((place for place in places if certain[place] == "mean"), None)


def loss_of(record: dict[str, Any]) -> Tensor | None:
    """The loss in what :meth:`StepEffects.run` returns."""
    return find_loss(record["result"])
