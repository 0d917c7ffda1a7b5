"""Weights each rank's loss by its counts, so that gradients and logged losses equal those of a single process."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.autograd.graph import Node
from torch.optim import Optimizer

from lightning_pardist.compat.lightning_loops import logged
from lightning_pardist.compat.metrics import set_forward_cache
from lightning_pardist.compat.patches import original_function, original_reductions
from lightning_pardist.engines.common.combined_values import Combined, Value, ValueNames
from lightning_pardist.engines.common.logged_weights import LoggedWeight, NotedMeans, weight_of_logged
from lightning_pardist.engines.common.loss_balance import (
    Balance,
    Exchange,
    Scaling,
    agreed_terms,
    begin_exchange,
    counts_of,
    exchange,
    scale_gradients,
    signature,
    uneven_products,
)
from lightning_pardist.engines.common.loss_couplings import couplings
from lightning_pardist.engines.common.loss_of_all import OwnLoss, loss_of_all
from lightning_pardist.engines.common.loss_setting import LossWeight, terms_of
from lightning_pardist.engines.common.loss_term import (
    Term,
    as_counts,
    is_multiple_of_batch,
    leading_mean,
    opaque_term,
    weight_of,
)
from lightning_pardist.engines.common.mean_counts import MeanPart
from lightning_pardist.engines.common.numbers import tensor_of, where
from lightning_pardist.engines.data_engine import DataEngine
from lightning_pardist.engines.fsdp.fsdp_units import original_class
from lightning_pardist.engines.pipeline import find_loss
from lightning_pardist.engines.pipeline.cut import BatchCut
from lightning_pardist.local_tensors import whole_number
from lightning_pardist.trainer.patch_stack import OwnMethod, Patch, PatchStack
from lightning_pardist.trainer.steady_counts import SteadyCounts


def coupled_samples(module: pl.LightningModule, reason: str, who: str = "rank") -> str:
    """Return the warning for a loss that compares samples of the batch with each other.

    Args:
        module: The user's module.
        reason: What couples the samples.
        who: What holds a part of the batch.
    """
    return (
        f"The loss of {original_class(module).__name__}.training_step couples the samples of a batch ({reason}), but"
        f" each {who} has only some of them: training differs from that of a single process with all of them."
    )


def unlike_losses(module: pl.LightningModule) -> str:
    """Return the warning for losses whose terms differ between parts of a batch."""
    return (
        f"The loss of {original_class(module).__name__}.training_step has different terms for different parts of a"
        " batch, so it is unknown what counts in each part. The parts are weighted by their number of samples, and"
        " training may differ from that of a single process. Compute the same terms in every step, or set loss_weight."
    )


def divided_by_numbers(module: pl.LightningModule) -> str:
    """Return the warning for sums that ranks divide by different Python numbers."""
    return (
        f"The loss of {original_class(module).__name__}.training_step has a sum over samples that ranks divide by"
        " different numbers, such as counts. They were equal in the first step and are treated as constants, so"
        " training differs from that of a single process. Divide by a tensor that holds the count"
        " (mask.sum().clamp(min=1), without int() or item()), or set loss_weight."
    )


def unlike_settings(module: pl.LightningModule) -> str:
    """Return the warning for optimizers whose settings differ between ranks."""
    return (
        f"The optimizers of {original_class(module).__name__} have different settings on different ranks (learning"
        " rates, for example). Each rank updates what it holds with its own settings: training differs from that of a"
        " single process, and ranks drift apart. Compute the settings from values that are equal on all ranks:"
        " self.all_gather(value).mean(), or logged values in trainer.callback_metrics."
    )


_NUMBERS = (int, float)


def _settings_of(optimizers: Sequence[Optimizer]) -> float:
    """Return a signature of the Python numbers in the optimizers' parameter groups; tensors are not read."""
    settings = [setting for each in optimizers for group in each.param_groups for setting in group.items()]
    # Deduplicated, since hundreds of groups mostly share values; rounded, since last digits may differ between ranks.
    numbers = dict.fromkeys(setting for setting in settings if isinstance(setting[1], _NUMBERS))
    return signature([f"{name} {value:.9g}" for name, value in numbers])


#: Hooks that may read logged values, or add hooks on gradients, before backward.
_BEFORE_BACKWARD = ("on_before_zero_grad", "on_before_backward")
#: Interval in steps of the check for differing losses on an accelerator, where reading the flags synchronises.
_LOOK_EVERY = 100


@dataclass(frozen=True)
class _Logged:
    """A value that the step has logged.

    Attributes:
        name: Name passed to ``log``.
        value: Value passed to ``log``.
        sum_before: The Trainer's accumulated sum under the name before this call; None if there was none.
        samples_before: Number of samples in that sum.
    """

    name: str
    value: Any
    sum_before: Tensor | None
    samples_before: Tensor | int


@dataclass(frozen=True)
class _Step:
    """A step whose counts are being exchanged.

    Attributes:
        exchange: The exchange.
        changed: Whether they may differ from those of the step before.
        loss: The loss; None if the step had none.
        terms: Its terms.
        samples: Number of samples in the batch.
        entries: Logged values that are combined.
        noted: All logged values.
        names: Names of values that all ranks know.
        begin: Begins the exchange again.
    """

    exchange: Exchange
    changed: bool
    loss: Tensor | None
    terms: list[Term]
    samples: float
    entries: list[tuple[_Logged, Value]]
    noted: list[_Logged]
    names: ValueNames
    begin: Callable[[], Exchange]


class LossWeights:
    """Weights the losses of ranks that see different samples, and combines the values that their steps log.

    Args:
        trainer: Trainer that runs ``fit``.
        setting: How losses are weighted.
        group: Returns the ranks whose losses make up that of the next step.
        before: Called before each collective.
        value_weights: Weights of logged values that have lost their graphs; filled by the step.
        loss_count: Returns the weight of a loss that has lost its graph; NaN if none has.
        agree: Combines the loss counts of ranks that share a batch; None if no ranks share one.
        notes_counts: Whether counts that graphs do not show (of an accuracy over tokens) may be noted as means are
            computed.

    Attributes:
        warned_coupled: Whether the graph of a loss showed samples that are compared with each other.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        setting: LossWeight,
        *,
        group: Callable[[], dist.ProcessGroup],
        before: Callable[[], None],
        value_weights: dict[str, LoggedWeight],
        loss_count: Callable[[], float | None],
        agree: Callable[[Tensor], Tensor] | None = None,
        notes_counts: bool = False,
    ) -> None:
        self._agree = agree
        self._noted = NotedMeans(enabled=notes_counts)
        self._loss_count = loss_count
        #: Weight and sample count of the latest loss, and whether the latest step had a loss.
        self._own, self._has_loss = _UNWEIGHED, True
        self._own_before = self._own
        self._trainer = trainer
        self._setting = setting
        self._group = group
        self._before = before
        self._value_weights = value_weights
        self._device = trainer.strategy.root_device
        self.warned_coupled = False
        self._warned: set[str] = set()
        self._alike: Tensor | None = None
        self._warned_unlike = self._warned_numbers = self._warned_settings = False
        self._same_numbers: Tensor | None = None
        self._same_settings: Tensor | None = None
        self._weighed = 0
        #: The step that is being exchanged, and the factor by which its reduced gradients are multiplied.
        self._step: _Step | None = None
        self._common = 1.0
        self._steady = SteadyCounts()
        self._names: dict[dist.ProcessGroup, ValueNames] = {}
        #: Whether the numbers that divided sums in the first step were counts, since they differed between ranks.
        self._numbers_are_counts = False
        self._batch: Any = None
        self._counts = self._weighs = True
        self._logged: list[_Logged] | None = None
        self._attached = PatchStack()
        self._scaling = Scaling()
        #: Losses of a step with manual optimization, and the terms by node of these losses and their parts.
        self._losses: list[Tensor] = []
        self._known: dict[Node, list[Term]] = {}

    def attach(self) -> None:
        """Patch the module's ``log`` to record logged values. Not collective."""
        module = self._trainer.lightning_module
        self._attached.attach(Patch(module, "log", OwnMethod(module, "log", self._noting(module.log))))

    def detach(self) -> None:
        """Restore the module. Not collective."""
        self._attached.detach()

    def training_step(self, run: Callable[[], Any], batch: Any, *, counts: bool | None = None) -> Any:
        """Run a training step and weight its loss. Collective over the group.

        Args:
            run: Runs the step.
            batch: Batch of the step.
            counts: Whether this rank's batch counts, if that may differ between ranks: if not, gradients are zero and
                nothing is logged. None if all batches count.

        Returns:
            The step's output; the gradient of its loss is scaled in backward.
        """
        # A rank that is alone in its group may also have a batch that does not count.
        self._weighs = (self._setting != "ranks" and self._group().size() > 1) or counts is not None
        self._batch, self._counts = batch, counts is not False
        self._own, self._has_loss = _UNWEIGHED, True
        self._settle_without_backward()
        if not self._weighs:
            return run()
        self._logged, self._losses, self._known = [], [], {}
        self._value_weights.clear()
        try:
            with self._noted.step():
                output = run()
        finally:
            noted, self._logged = self._logged, None
        # With manual optimization, backward runs inside the step.
        self._weigh(find_loss(output) if self._trainer.lightning_module.automatic_optimization else None, noted)
        self._noted.end()
        self._losses, self._known = [], {}
        return output

    @property
    def batch_weight(self) -> float:
        """Weight of gradients whose losses are not known: this rank's samples; 0 if its batch does not count."""
        if not self._counts:
            return 0.0
        return 1.0 if self._setting == "ranks" else float(BatchCut().samples_of(self._batch) or 1)

    def _settle_without_backward(self) -> None:
        """Wait for the exchange of a step that had no backward. Its logged values may have been reset by now."""
        if self._step is not None:
            self._step.names.is_due = self._has_new_names(self._step.exchange)
            self._steady.end(self._step.exchange)
        self._step, self._common = None, 1.0

    def before_backward(self, *, accumulates: bool) -> None:
        """Weight the loss before backward if that cannot wait. May wait for the other ranks of the group.

        Args:
            accumulates: Whether there are gradients, to which backward adds.
        """
        step = self._step
        if step is None or not (accumulates or step.changed):
            return
        if not accumulates:
            self._common = self._steady.common_factor(step.exchange)
        self._finish(step)

    def after_backward(self) -> float:
        """Return the factor by which the reduced gradients are multiplied. Waits for the other ranks of the group."""
        step = None if self._step is None else self._with_known_names(self._step)
        if step is not None and not step.entries and self._is_unchanged(step):
            self._step, self._own = None, self._own_before
        elif step is not None:
            self._common = self._steady.common_factor(step.exchange)
            self._finish(step, scale=False)
        common, self._common = self._common, 1.0
        return common

    def before_manual_backward(self, loss: Tensor) -> None:
        """Weight a loss before a manual backward. Collective over the group."""
        if self._weighs:
            self._weigh(loss, [])

    def after_manual_backward(self) -> None:
        """Remove the scaling from the graph after a manual backward, since later losses may share the graph."""
        self._scaling.remove()

    def combined_loss(self, loss: Tensor | None) -> Tensor | None:
        """Return the single-process loss of the latest step from this rank's ``loss``. Collective over the group.

        Optimizers that evaluate their closure repeatedly decide by this value, which must be equal on all ranks.
        """
        self._before()
        value = loss if self._has_loss else None
        whole = loss_of_all(value, self._own, counts=self._counts, group=self._group(), device=self._device)
        if whole is None:
            return None
        return torch.tensor(whole, dtype=torch.float32 if loss is None else loss.dtype, device=self._device)

    def _weigh(self, loss: Tensor | None, noted: list[_Logged]) -> None:
        samples = BatchCut().samples_of(self._batch)
        ranks = self._group().size()
        terms = [] if loss is None else terms_of(loss, self._batch, samples, self._setting, gathers=True, ranks=ranks)
        if not self._weighed and self._setting == "auto":
            self._numbers_are_counts = not self._have_same_numbers(terms)
        terms = as_counts(terms) if self._numbers_are_counts else terms
        if loss is not None and ranks > 1:
            self._log_terms(loss, terms)
        terms = agreed_terms(terms, self._agree, self._device)
        entries = self._values(loss, terms, noted, samples)
        size, group, overlaps = float(samples or 1), self._group(), self._may_overlap()
        names = self._names.setdefault(group, ValueNames())
        counts = counts_of(terms, size) if overlaps and self._counts and not self._must_wait() else None
        changed = self._steady.begin(counts, group, allowed=overlaps)
        self._before()
        if names.is_due:
            names.learn(group)
        begin = partial(
            begin_exchange,
            terms,
            samples=size,
            present=self._counts,
            values=[value for _, value in entries],
            names=names,
            settings=_settings_of(self._trainer.optimizers),
            changed=changed,
            overlaps=self._steady.known is not None,
            group=group,
            device=self._device,
        )
        begun = begin()
        if self._steady.known is None and self._has_new_names(begun):
            names.learn(group)
            begun = begin()
        self._has_loss = loss is not None or not self._has_no_count
        self._step = _Step(begun, changed, loss, terms, size, entries, noted, names, begin)
        if self._steady.known is None:
            self._finish(self._step)

    @property
    def _engine(self) -> DataEngine | None:
        return getattr(self._trainer.strategy, "data_engine", None)

    def _may_overlap(self) -> bool:
        """Return whether backward may run while counts are exchanged, see [Note: backward before the counts are known].

        On an accelerator it would have to wait for the device to know the factors. Ranks that compute gradients
        together must agree on a factor, so that all of them have to take part in the exchange.
        """
        engine = self._engine
        if self._device.type != "cpu" or engine is None or not engine.scales_reduced_gradients:
            return False
        if self._group().size() != dist.get_world_size():
            return False
        return self._trainer.lightning_module.automatic_optimization and self._trainer.accumulate_grad_batches == 1

    def _must_wait(self) -> bool:
        """Return whether this rank's code may see gradients or logged values before they are weighted after backward.

        Code that adds to gradients, for example, needs those that have their factor.
        """
        module = self._trainer.lightning_module
        callbacks = self._trainer.callbacks  # type: ignore[attr-defined]
        return (
            any(is_overridden(name, module) for name in (*_BEFORE_BACKWARD, "backward"))
            or any(is_overridden(name, each, pl.Callback) for name in _BEFORE_BACKWARD for each in callbacks)
            or (self._engine is not None and self._engine.has_gradient_hooks)
        )

    def _is_unchanged(self, step: _Step) -> bool:
        """Return whether all ranks' counts are those of the step before. Waits for the other ranks."""
        if self._steady.known is None or step.changed:
            return False
        return bool(step.exchange.num_changed() == 0 and step.exchange.same_settings())

    def _finish(self, step: _Step, *, scale: bool = True) -> None:
        """Weight the loss of a step, and its logged values. Waits for the other ranks."""
        self._step = None
        found = step.exchange.result()
        step.names.is_due = self._has_new_names(step.exchange)
        weight, added = self._share_of(step.terms, step.samples)
        self._own = OwnLoss(weight, step.samples, found.agreed, added)
        self._own_before = self._own
        self._check_terms(found)
        if scale:
            scaling = scale_gradients(step.terms, found.factors / self._common)
            # With automatic optimization the graph is freed after backward, so no reference to it is kept here.
            if not self._trainer.lightning_module.automatic_optimization:
                self._scaling = scaling
                self._record_terms(step.loss, step.terms)
        for (entry, _), value in zip(step.entries, found.values, strict=True):
            self._correct(entry, value, step, found)
        if not self._counts:
            for entry in reversed(step.noted):
                self._forget(entry)
        self._steady.end(step.exchange)

    def _has_new_names(self, exchange: Exchange) -> bool:
        """Return whether a rank has logged names that others may not know. On an accelerator, only some steps look."""
        looks = self._device.type == "cpu" or self._weighed % _LOOK_EVERY == 0
        return looks and exchange.has_new_names()

    def _with_known_names(self, step: _Step) -> _Step:
        """Tell other ranks new names of values: at once if all of them wait after backward, else before the next step.

        Collective over the group if a rank has new names.
        """
        step.names.is_due = self._has_new_names(step.exchange)
        if not step.names.is_due or self._device.type != "cpu" or step.exchange.num_changed():
            return step
        self._before()
        step.names.learn(self._group())
        return replace(step, exchange=step.begin())

    def _have_same_numbers(self, terms: list[Term]) -> bool:
        """Return whether all ranks divide their sums by the same numbers. Collective over the group."""
        self._before()
        found = exchange(terms, samples=1.0, present=self._counts, group=self._group(), device=self._device)
        return bool(found.same_numbers)

    def _record_terms(self, loss: Tensor | None, terms: list[Term]) -> None:
        """Record the terms of a loss: manual steps may log it after backward, which frees the graph's saved tensors."""
        if loss is None or loss.grad_fn is None:
            return
        self._losses.append(loss)
        for term in terms:
            for node in dict.fromkeys((loss.grad_fn, *term.path)):
                self._known.setdefault(node, []).append(term)

    def _check_terms(self, found: Balance) -> None:
        """Warn once if ranks differ in loss terms, in the numbers that divide them, or in optimizer settings."""
        alike, same, settings = found.agreed, found.same_numbers, found.same_settings
        self._alike = alike if self._alike is None else self._alike & alike
        self._same_numbers = same if self._same_numbers is None else self._same_numbers & same
        self._same_settings = settings if self._same_settings is None else self._same_settings & settings
        self._weighed += 1
        if alike.device.type != "cpu" and self._weighed % _LOOK_EVERY != 1:
            return
        if not self._same_numbers and not self._warned_numbers:
            self._warned_numbers = True
            rank_zero_warn(divided_by_numbers(self._trainer.lightning_module))
        if not self._same_settings and not self._warned_settings:
            self._warned_settings = True
            rank_zero_warn(unlike_settings(self._trainer.lightning_module))
        if not self._alike and not self._warned_unlike:
            self._warned_unlike = True
            rank_zero_warn(unlike_losses(self._trainer.lightning_module))

    @property
    def _has_no_count(self) -> bool:
        known = self._loss_count()
        return known is not None and math.isnan(known)

    def _share_of(self, terms: list[Term], samples: float) -> tuple[Tensor | float | None, float]:
        """Return the weight of the loss, and the number contained in it that is added once for all ranks."""
        if not self._has_no_count:
            return self._loss_count(), 0.0
        try:
            weight = weight_of(terms, samples)
        except LookupError:
            return samples, 0.0
        lead = None if weight is None else leading_mean(terms)
        return weight, 0.0 if lead is None else lead.added

    # --- logged values ------------------------------------------------------------------------------------------

    def _noting(self, log: Callable[..., None]) -> Callable[..., None]:
        # Not a bound method: deep copies of the module (weight averaging) would copy the Trainer with it.
        @wraps(log)
        def noting(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            value = whole_number(value)
            args = tuple(map(original_function, args))
            kwargs = {key: original_function(each) for key, each in kwargs.items()}
            if self._logged is None:
                if self._counts or not self._trainer.training:
                    log(name, value, *args, **kwargs)
                return
            item = self._item(name)
            known = item is not None and item.is_tensor
            before = (item.value, getattr(item, "cumulated_batch_size", 0)) if known else (None, 0)
            with original_reductions():
                log(name, value, *args, **kwargs)
            self._logged.append(_Logged(name, value, *before))

        return noting

    def _item(self, name: str) -> Any:
        results = logged(self._trainer)
        return None if results is None else results.get(f"training_step.{name}")

    def _values(
        self, loss: Tensor | None, terms: list[Term], noted: list[_Logged], samples: int | None
    ) -> list[tuple[_Logged, Value]]:
        """Return the logged means and sums whose weights are known, of a batch with this number of samples."""
        found: dict[str, tuple[_Logged, Value]] = {}
        values = [*(each.value for each in noted), *self._losses]
        for each in noted:
            item = self._item(each.name)
            if item is None or not item.is_tensor or (item.meta.on_epoch and not item.meta.is_mean_reduction):
                continue
            try:
                weight = (
                    self._value_weights[each.name]
                    if self._value_weights
                    else weight_of_logged(
                        each.value,
                        values,
                        loss,
                        terms,
                        samples,
                        self._noted,
                        gathers=True,
                        ranks=self._group().size(),
                        with_counts=self._numbers_are_counts,
                        known=self._known,
                    )
                )
            except LookupError:
                count = self._noted.count_of(each.value)
                if count is None:
                    continue
                weight = LoggedWeight(MeanPart(each.value, count))
            found[each.name] = each, Value(each.name, weight.whole._replace(value=each.value), weight.parts)
        return list(found.values())

    def _correct(self, entry: _Logged, combined: Combined, step: _Step, found: Balance) -> None:
        """Replace a logged value by the one combined over the ranks that have logged it."""
        item = self._item(entry.name)
        value = tensor_of(combined.value, self._device).to(item.value)
        if item.meta.on_step:
            set_forward_cache(item, value)
        if item.meta.on_epoch:
            samples = item.cumulated_batch_size - entry.samples_before
            some = (combined.ranks > 0) & (combined.ranks < found.present) & (samples == step.samples)
            if self._device.type != "cpu" or some:
                # A single process weighs a value by all samples of the batch, including those of ranks without it.
                samples = where(some, found.samples / combined.ranks, samples)
                item.cumulated_batch_size = entry.samples_before + samples
            item.value = (_before(entry, item) + value * samples).to(value)
        else:
            item.value = value

    def _forget(self, entry: _Logged) -> None:
        """Remove a logged value from the epoch's accumulated value."""
        item = self._item(entry.name)
        known = item is not None and item.is_tensor and item.meta.on_epoch
        if not known or (entry.sum_before is None and (item.meta.is_max_reduction or item.meta.is_min_reduction)):
            return
        item.value = _before(entry, item)
        if item.meta.is_mean_reduction:
            item.cumulated_batch_size = torch.as_tensor(entry.samples_before).to(item.cumulated_batch_size)

    # --- messages -----------------------------------------------------------------------------------------------

    def _log_terms(self, loss: Tensor, terms: list[Term]) -> None:
        """Log the loss terms once, and warn if the ranks' losses do not add up to that of the whole batch."""
        found = "; ".join(dict.fromkeys(term.describe() for term in terms if term.kind != "constant"))
        if not found or found in self._warned:
            return
        self._warned.add(found)
        rank_zero_info(f"Loss over ranks: {found}. loss_weight sets it.")
        if self._setting == "auto" and (opaque := opaque_term(terms)):
            rank_zero_warn(
                f"{type(self._trainer.lightning_module).__name__}.training_step computes its loss by {opaque}, whose"
                " code does not show what the loss counts. Ranks are weighted by their samples, which differs from a"
                " single process if the loss is a mean over tokens or labels. Set loss_weight='samples' if it is none,"
                " else loss_weight to a function of the batch that returns their number."
            )
        samples = BatchCut().samples_of(self._batch)
        multiple = next((term.number for term in terms if is_multiple_of_batch(term, samples)), None)
        if self._setting == "auto" and multiple is not None:
            rank_zero_warn(
                f"The loss of {original_class(self._trainer.lightning_module).__name__}.training_step has a sum over"
                f" samples that is divided by {multiple:g}, a multiple of the {samples} samples of this rank's batch,"
                " and taken for a constant: ranks' losses are added up. If it is computed from the size of the batch,"
                " set loss_weight='samples'; loss_weight='sum' says that it is a constant."
            )
        if self.warned_coupled:
            return
        reasons = [*(term.nonlinear for term in terms if term.nonlinear), *uneven_products(terms)]
        reasons += couplings(loss, samples=samples, gathers=True)
        self.warned_coupled = bool(reasons)
        if reasons:
            rank_zero_warn(coupled_samples(self._trainer.lightning_module, reasons[0]))


_UNWEIGHED = OwnLoss(1.0, 1.0)


def _before(entry: _Logged, item: Any) -> Tensor:
    return torch.zeros_like(item.value) if entry.sum_before is None else entry.sum_before.to(item.value)
