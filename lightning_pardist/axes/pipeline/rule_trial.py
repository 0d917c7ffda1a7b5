"""Trial of a training step on a batch and on its micro-batches, which shows how their values combine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_debug, rank_zero_info
from torch import Tensor

from lightning_pardist.axes.pipeline.merged_values import increment_of
from lightning_pardist.axes.pipeline.microbatching import Microbatching
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
from lightning_pardist.axes.pipeline.sample_runs import SampleRuns, SampleStep, loss_of, microbatch_error
from lightning_pardist.engines.common.devices import device_in_use, is_same_state, random_state
from lightning_pardist.engines.common.eager_runs import eagerly
from lightning_pardist.engines.common.loss_setting import LossWeight, terms_of
from lightning_pardist.engines.common.loss_term import BALANCING, Term
from lightning_pardist.engines.common.parameter_write_guard import ParameterWriteGuard
from lightning_pardist.engines.pipeline import CannotPipelineError
from lightning_pardist.engines.pipeline.interception import undisturbed
from lightning_pardist.engines.pipeline.loss_seeds import LossMakeup, LossSeeds, common_ratios, part_weight
from lightning_pardist.engines.pipeline.microbatch import fresh_copy, weighted_mean
from lightning_pardist.trainer.batch_figures import BatchFigures
from lightning_pardist.trainer.sample_mixing import SampleMixing
from lightning_pardist.trainer.sample_orders import SampleOrders

#: Kinds of places whose values persist between steps.
_KEPT = ("assigned", "buffer")
#: Relative errors: certainly rounding, possibly rounding, possibly rounding in half precision.
_CLOSE, _LOOSE, _ROUGH = 2e-6, 1e-4, 2e-2
#: Runs a step on batches, optionally with preset attributes or buffers, and returns the record of each run.
_Evaluate = Callable[..., list[dict[str, Any]]]


class RuleTrial:
    """Runs a training step on its sample batch and on the batch's micro-batches. Not collective.

    Args:
        runs: Runs the step.
        sample: The step and its sample batch.
        microbatching: How the batch is split.
        loss: Structure of a micro-batch's loss.
        loss_weight: How losses are weighted.

    Attributes:
        parts: The micro-batches.
        loss: Structure of the loss, with what the micro-batches' losses show.
    """

    def __init__(
        self,
        runs: SampleRuns,
        sample: SampleStep,
        microbatching: Microbatching,
        loss: LossMakeup,
        loss_weight: LossWeight,
    ) -> None:
        self.parts = microbatching.split(sample.batch, microbatching.count(sample.batch))
        self.loss = loss
        self._runs, self._sample, self._loss_weight = runs, sample, loss_weight
        self._module, self._cut = runs.module, microbatching.cut
        self._rng_before = self._rng_afterwards = random_state(device_in_use())
        self._failure = ""
        #: Whether the trial runs in training mode, since the step fails in evaluation mode.
        self._trains = False
        #: Values of the batch in the trial in evaluation mode.
        self._evaluated_numbers: dict[Place, Any] = {}

    def rules(self, *, check_samples: bool) -> Rules:
        """Return the rules that combine the micro-batches' values.

        Args:
            check_samples: Whether to look for steps and layers that mix samples as well.
        """
        rules = self._find_rules()
        if not check_samples or len(self.parts) < 2:
            return rules
        orders, mixing, trained = self._find_mixing()
        if trained is not None and not rules.untried:
            rules = self._with_what_training_sets(rules, trained)
        return replace(rules, orders=rules.orders or orders, mixing=mixing)

    def is_additive(self) -> bool:
        """Return whether the mean or sum of the micro-batches' losses is the batch's loss, up to rounding."""
        tried, parts = self._trial_results(), self.parts
        if tried is None or len(parts) < 2:
            return False
        whole, run, _ = tried
        loss, losses = loss_of(whole), [loss_of(record) for record in run([part.value for part in parts])]
        if loss is None or any(each is None for each in losses):
            return False
        shares = Shares.of([part.size for part in parts], [part.size for part in parts])
        ways = (weighted_mean(losses, shares.loss), sum(losses))  # type: ignore[arg-type]
        return min(relative_error(loss, way) for way in ways) <= _CLOSE

    def batch_coupling(self) -> str:
        """Return what makes the whole batch's loss more than a sum over samples, from its autograd graph.

        This needs no real values. Empty if nothing is found.
        """
        if len(self.parts) < 2:
            return ""
        with self._runs.running(self._sample) as run, undisturbed(self._module), torch.enable_grad():
            loss = loss_of(run(fresh_copy(self._sample.batch)))
        if loss is None or loss.numel() != 1:
            return ""
        samples = self._cut.samples_of(self._sample.batch)
        return LossMakeup.of(loss, self._sample.batch, samples, self._loss_weight).coupled

    def _find_mixing(self) -> tuple[str | None, str | None, dict[str, Any] | None]:
        """Return how a step mixes samples, the name of a layer that does, and the record of the step.

        The step runs in training mode, unlike in the trial that finds rules. The record is None if it draws random
        numbers.
        """
        batch, samples = fresh_copy(self._sample.batch), self._cut.samples_of(self._sample.batch)
        mixing, orders = SampleMixing(self._module), SampleOrders(batch, samples or 0)
        guard, trained = ParameterWriteGuard(self._module), None
        try:
            with self._runs.running(self._sample) as run, undisturbed(self._module), torch.no_grad(), guard:
                before = random_state(device_in_use())
                with mixing.noting(batch, samples), orders:
                    record = run(batch)
                trained = record if is_same_state(before, random_state(device_in_use())) else None
                with self._runs.trainer.precision_plugin.train_step_context():
                    return orders.found, mixing.find(), trained
        except Exception as error:
            rank_zero_debug(f"Whether layers mix samples is not known ({error}).")
            return orders.found, None, trained

    def _with_what_training_sets(self, rules: Rules, whole: dict[str, Any]) -> Rules:
        """Add rules for attributes and buffers that the step sets in training mode only (``if self.training:``).

        Args:
            rules: Rules from the trial in evaluation mode.
            whole: Record of the step on the whole batch in training mode.
        """
        numbers = self._numbers_of(whole, sum(part.size for part in self.parts))
        before = self._evaluated_numbers
        changed = [
            place
            for place, number in numbers.items()
            if place[0] in _KEPT and (place not in before or relative_error(before[place], number) > 0)
        ]
        if not changed:
            return rules
        places = {*changed, *map(increment_of, changed)}
        numbers = {place: number for place, number in numbers.items() if place in places}
        guard = ParameterWriteGuard(self._module)
        try:
            with self._runs.running(self._sample) as run, undisturbed(self._module), torch.no_grad(), guard:
                records = [run(fresh_copy(part.value)) for part in self.parts]
        except Exception as error:
            rank_zero_debug(f"How values that are set in training mode combine is not known ({error}).")
            return rules
        shares = Shares.of([part.size for part in self.parts], [part.size for part in self.parts])
        columns = {place: column for place, column in self._numbers(records, shares).found.items() if place in numbers}
        found = find_rules(numbers, columns, shares, close=_CLOSE, tolerance=_LOOSE)
        unexplained = dict.fromkeys((*rules.unexplained, *_unexplained(numbers, columns, found)))
        kept = {place: rule for place, rule in rules.of.items() if place not in numbers}
        return replace(rules, of=kept | found, unexplained=tuple(unexplained))

    def _find_rules(self) -> Rules:
        """Run the step on the whole sample batch and on its micro-batches, and find the rules that combine values."""
        if len(self.parts) < 2:
            return Rules()
        tried = self._trial_results()
        if tried is None:
            return Rules(untried=self._failure)
        rules = self._rules_of(*tried)
        # Layers such as batch norms mix samples in training mode.
        is_known = not self._trains or (rules.is_explained and not rules.unexplained) or self._find_mixing()[1] is None
        return rules if is_known else Rules(untried=self._failure)

    def _is_random(self, run: _Evaluate) -> bool:
        """Return whether values of the step depend on random numbers that it draws."""
        if is_same_state(self._rng_before, self._rng_afterwards):
            return False
        size = sum(part.size for part in self.parts)
        # Each run of the two draws numbers of its own.
        first, second = (self._numbers_of(record, size) for record in run([self._sample.batch] * 2))
        return any(
            place not in second or relative_error(number, second[place]) > _CLOSE for place, number in first.items()
        )

    def _rules_of(self, whole: dict[str, Any], run: _Evaluate, is_exact: bool) -> Rules:
        values, sizes = [part.value for part in self.parts], [part.size for part in self.parts]
        is_random = self._is_random(run)
        if self.loss.is_of_sample and sum(sizes) > 1:
            self._check_of_sample(run)
        weights = self._weights(run)
        shares = Shares.of([1.0 if weight is None else float(weight) for weight in weights], sizes)
        records = run(values)
        collector = self._numbers(records, shares)
        numbers, columns, meant = self._numbers_of(whole, sum(sizes)), collector.found, collector.meant
        self._evaluated_numbers = numbers
        loose, close = (_LOOSE, _CLOSE) if is_exact else (_ROUGH, _ROUGH)
        loss = loss_of(whole)
        place = next((key for key, number in numbers.items() if number is loss), None)
        derived = {} if place not in columns else find_derived(columns, columns[place], close=close)
        tolerances: dict[str, Any] = {"close": close, "tolerance": loose, "rough": is_random, "meant": meant}
        found = find_rules(numbers, columns, shares, **tolerances) | derived
        found = self._settle_sums(found, numbers, run)
        told: dict[str, Any] = {"zeros": _zeros(columns, found, place)}
        if left_out := [name for name in whole["metrics"] if not any(name in each["metrics"] for each in records)]:
            told["orders"] = f"{', '.join(left_out)} is updated with whole batches, and not with micro-batches"
        if not is_random:
            told["unexplained"] = _unexplained(numbers, columns, found)
            told["metrics"] = tuple(self._runs.effects.uneven_metrics(whole, records))
        if place is None or place not in columns:
            return Rules(found, **told)
        own, shown = "sum" if None in weights else "mean", found.get(place)
        if is_random:
            # Random values cannot confirm the loss weighting; rely on the autograd graph.
            return Rules({**found, place: own}, None, not self.batch_coupling(), **told)
        is_own = relative_error(numbers[place], combined(own, columns[place], shares)) <= loose
        if not is_own and shown not in ("mean", "samples", "sum"):
            # A micro-batch of one sample does not show what couples samples.
            linear = self.loss.several_counts and not (self.loss.coupled or self.batch_coupling())
            linear = linear and self._gradients_add_up(own, shares, tolerance=loose, always=True, by_terms=True)
            if linear and "unexplained" in told:
                # Of the loss, each summand has its weight where it is logged, too.
                told["unexplained"] = _unexplained(numbers, columns, found, loss=place)
            return Rules({**found, place: own}, None, linear, **told)
        way = own if is_own or shown is None else shown
        # A small difference may be rounding, or a loss of sorted elements (Lovasz).
        is_close = relative_error(numbers[place], combined(way, columns[place], shares)) <= close
        # Each summand may have a factor of its own.
        by_terms = is_own and self.loss.several_counts
        tolerance, always = 10 * close if is_close else loose, by_terms or not is_close
        adds_up = self._gradients_add_up(way, shares, tolerance=tolerance, always=always, by_terms=by_terms)
        if is_own:
            return Rules({**found, place: own}, None, adds_up, **told)
        # The analysis of the autograd graph was wrong: use the rule of the trial.
        known = self._loss_weight == "auto"
        weight: Literal["sum", "samples"] = "sum" if shown == "sum" else "samples"
        return Rules(found, weight if known else None, known and adds_up, **told)

    def _gradients_add_up(self, way: str, shares: Shares, *, tolerance: float, always: bool, by_terms: bool) -> bool:
        """Return whether the mean or sum of the micro-batches' gradients is that of the batch, as that of their losses.

        Losses may agree where gradients do not: by chance, or if a factor computed from the batch is detached
        (``loss * (other / loss).detach()``). Unless ``always``, gradients are computed only if something in the step
        couples samples.
        """
        if self._loss_weight != "auto":
            return True
        samples = self._cut.samples_of(self._sample.batch)
        parameters = [each for each in self._module.parameters() if each.requires_grad]
        try:
            with self._runs.running(self._sample) as run, undisturbed(self._module), torch.enable_grad():
                self._set_mode()
                batch = fresh_copy(self._sample.batch)
                with eagerly(), BatchFigures(batch, samples or 1) as figures:
                    loss = loss_of(run(batch))
                if loss is None or loss.numel() != 1 or not loss.requires_grad:
                    return True
                makeup = LossMakeup.of(loss, batch, samples, self._loss_weight, by_sample=self.loss.by_sample)
                if not (always or makeup.coupled or figures.found is not None or figures.was_read):
                    return True
                if makeup.coupled.endswith(BALANCING):
                    return False
                whole = _gradient(loss, parameters)
                del loss
                total = torch.zeros_like(whole)
                if by_terms:
                    return relative_error(whole, self._gradient_by_terms(run, parameters)) <= tolerance
                ones = (1.0,) * len(self.parts)
                weights = {"sum": ones, "samples": shares.samples}.get(way, shares.loss)
                for part, weight in zip(self.parts, weights, strict=True):
                    loss = loss_of(run(fresh_copy(part.value)))
                    if loss is not None and loss.requires_grad:
                        total += _gradient(loss, parameters) * weight
        except Exception as error:
            rank_zero_info(f"Whether gradients of micro-batches add up to a batch's is unknown; it is split ({error}).")
            return True
        return relative_error(whole, total) <= tolerance

    def _gradient_by_terms(self, run: Callable[[Any], dict[str, Any]], parameters: Sequence[Tensor]) -> Tensor:
        """Return the sum of the micro-batches' gradients, with each summand of the loss scaled as in training."""
        losses = [loss_of(run(fresh_copy(part.value))) for part in self.parts]
        known = [(part, loss) for part, loss in zip(self.parts, losses, strict=True) if loss is not None]
        seeds = LossSeeds(self._loss_weight, lambda: None, device_in_use(), by_sample=self.loss.by_sample)
        seeds.begin([part for part, _ in known])
        for index, (_, loss) in enumerate(known):
            seeds.add(index, loss)
        seeds.before_backward(0)
        total = torch.zeros(())
        for index, (_, loss) in enumerate(known):
            if loss.requires_grad:
                seed, _ = seeds.seed(index, loss)
                total = total + _gradient(loss, parameters, seed)
        return total

    def _check_of_sample(self, run: _Evaluate) -> None:
        """Analyse the micro-batches' losses again if the batch's loss is not one of single samples."""
        loss = loss_of(run([self._sample.batch], grad=True)[0])
        if loss is None or loss.numel() != 1:
            return
        samples = self._cut.samples_of(self._sample.batch)
        terms = terms_of(loss, self._sample.batch, samples, self._loss_weight)
        del loss
        if any(term.of_sample for term in terms):
            return
        part = min(self.parts, key=lambda part: part.size)
        loss = loss_of(run([part.value], grad=True)[0])
        if loss is None or loss.numel() != 1:
            return
        before, self.loss = self.loss, LossMakeup.of(loss, part.value, part.size, self._loss_weight, by_sample=False)
        self._weights(run)
        if self.loss.several_counts:
            # Not all summands show the count of the batch: a step with micro-batches would scale some of them only.
            self.loss = before

    def _weights(self, run: _Evaluate) -> list[Tensor | float | None]:
        """Return the weights of the micro-batches' losses, None for each if they are summed."""
        if self.loss.is_sum:
            return [None] * len(self.parts)
        if not self.loss.by_data:
            return [1.0 if self._loss_weight == "ranks" else float(part.size) for part in self.parts]
        weights = []

        def look() -> Iterator[tuple[list[Term], int]]:
            # One at a time, since each loss holds an autograd graph.
            for part in self.parts:
                loss = loss_of(run([part.value], grad=True)[0])
                ways = {"by_sample": self.loss.by_sample}
                terms = [] if loss is None else terms_of(loss, part.value, part.size, self._loss_weight, **ways)
                weights.append(part_weight(terms, part.size))
                yield terms, part.size

        self.loss = replace(self.loss, several_counts=common_ratios(look()) is None)
        return weights

    def _settle_sums(self, found: dict[Place, str], numbers: dict[Place, Any], run: _Evaluate) -> dict[Place, str]:
        """Decide whether a value that was 0 before the step is a sum over the batch, or is incremented in each step."""
        for place in [
            place for place, rule in found.items() if rule == "sum" and found.get(increment_of(place)) == "sum"
        ]:
            before = self._runs.effects.value_at(place)
            try:
                (record,) = run([self._sample.batch], {place: before + 1})
                after = self._numbers_of(record, 1).get(place, math.nan)
            except Exception:
                after = math.nan
            del found[increment_of(place) if relative_error(after, numbers[place]) == 0.0 else place]
        return found

    def _trial_results(self) -> tuple[dict[str, Any], _Evaluate, bool] | None:
        """Return the record of the step on the whole batch, a function to run others, and whether values are exact.

        The step runs in evaluation mode, or in training mode if it fails there (a detector has losses in training mode
        only) and draws no random numbers that matter. None if it fails in both, which is no reason to refuse it.
        """
        self._rng_before = random_state(device_in_use())
        for trains in (False, True):
            self._trains = trains
            failure, tried = self._results_in_mode()
            self._failure = self._failure or failure
            if tried is not None and not (trains and self._is_random(tried[1])):
                return tried
        return None

    def _results_in_mode(self) -> tuple[str, tuple[dict[str, Any], _Evaluate, bool] | None]:
        precision, failure = str(self._runs.trainer.precision), ""
        # If parameters are fp32, rules are distinguished best without autocast.
        for plain in (True, False) if precision.endswith("mixed") else (False,):
            run = partial(self._evaluated, plain)
            try:
                return "", (run([self._sample.batch])[0], run, plain or precision.startswith(("32", "64")))
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
        return failure, None

    def _evaluated(
        self,
        plain: bool,
        batches: list[Any],
        preset: Mapping[Place, Any] | None = None,
        *,
        grad: bool = False,
    ) -> list[dict[str, Any]]:
        running = self._runs.running(self._sample, plain=plain)
        with running as run, undisturbed(self._module), torch.set_grad_enabled(grad):
            self._set_mode()
            for place, value in (preset or {}).items():
                self._runs.effects.preset(place, value)
            records = []
            for batch in batches:
                try:
                    records.append(run(fresh_copy(batch)))
                except Exception as error:
                    if batch is self._sample.batch or isinstance(error, (CannotPipelineError, torch.OutOfMemoryError)):
                        raise
                    raise microbatch_error(self._sample, error) from error
            self._rng_afterwards = random_state(device_in_use())
            return records

    def _set_mode(self) -> None:
        if not self._trains:
            self._module.eval()

    def _numbers_of(self, record: dict[str, Any], size: int) -> dict[Place, Any]:
        twice = self._numbers([record, record], Shares.of([1, 1], [size] * 2)).found
        return {place: column[0] for place, column in twice.items()}

    def _numbers(self, records: list[dict[str, Any]], shares: Shares) -> Collector:
        collector = Collector()
        self._runs.effects.combine(records, shares, collector)
        for place in [place for place, column in collector.found.items() if len(column) < len(records)]:
            # None on some micro-batches: no rule can be found.
            del collector.found[place]
        return collector


def _unexplained(
    numbers: Mapping[Place, Any], columns: Mapping[Place, Any], found: Mapping[Place, str], loss: Place | None = None
) -> tuple[str, ...]:
    """Return names of logged values, attributes and buffers without a rule, except for those of a loss that has one."""
    kept = [place for place in columns if place in numbers and place[0] in (*_KEPT, "logged")]
    kept = [place for place in kept if place not in found and increment_of(place) not in found]
    if loss is not None:
        kept = [place for place in kept if place[0] != "logged" or not _are_same(columns[place], columns[loss])]
    return tuple(dict.fromkeys(_named(place) for place in kept))


def _gradient(loss: Tensor, parameters: Sequence[Tensor], seed: Tensor | None = None) -> Tensor:
    """Return the gradient with respect to all parameters, flat."""
    found = torch.autograd.grad(loss, parameters, seed, allow_unused=True)
    both = zip(found, parameters, strict=True)
    return torch.cat([(torch.zeros_like(one) if each is None else each).detach().flatten() for each, one in both])


def _zeros(columns: Mapping[Place, Any], found: Mapping[Place, str], loss: Place | None) -> tuple[str, ...]:
    """Return names of logged values that are 0 for all micro-batches, so that a sum cannot be told from a mean."""
    places = [place for place, rule in found.items() if place[0] == "logged" and place != loss and rule == "mean"]
    of_loss = columns.get(loss) if loss is not None else None
    if of_loss is not None and _are_zero(of_loss):
        # They may be the loss, whose autograd graph shows its weights.
        return ()
    return tuple(dict.fromkeys(_named(place) for place in places if _are_zero(columns[place])))


def _are_same(values: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(values) == len(others) and all(
        bool((torch.as_tensor(one) == torch.as_tensor(other)).all()) for one, other in zip(values, others, strict=True)
    )


def _are_zero(values: Sequence[Any]) -> bool:
    return not any(torch.as_tensor(value).any() for value in values)


def _named(place: Place) -> str:
    if place[0] == "logged":
        # A logged dict has one value per key.
        return repr(place[3] if len(place) > 3 and isinstance(place[3], str) else place[1])
    return ".".join(str(part) for part in place[1] if part)  # type: ignore[attr-defined]
