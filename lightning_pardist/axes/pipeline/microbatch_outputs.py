"""Side effects of a step (logs, metrics, attributes, buffers), recorded on the last stage and applied on every rank.

A pipeline runs the user's step once per stage and micro-batch, and only the last stage runs it to the end. There
``self.log``, metric updates and assignments to attributes (``self.outputs.append(loss)``) are recorded for each
micro-batch; side effects of other stages, which leave the step early, are undone. Afterwards the micro-batches' records
are combined to one of the batch, which every rank applies.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric, MetricCollection

from lightning_pardist.axes.pipeline.merged_values import (
    WEIGHT,
    MetricName,
    combined_logs,
    is_numeric,
    merged_numbers,
    rule_of,
)
from lightning_pardist.axes.pipeline.metric_calls import ScalarMetricCalls
from lightning_pardist.axes.pipeline.printed_text import merged_texts, printed
from lightning_pardist.axes.pipeline.reduction_rules import Collector, Place, Rules, Shares, relative_error
from lightning_pardist.compat.metrics import (
    computed_of,
    forward_cache_of,
    groups_of,
    set_computed,
    set_forward_cache,
    set_update_count,
)
from lightning_pardist.compat.modules import own_buffers
from lightning_pardist.compat.patches import original_function
from lightning_pardist.compat.tensors import version_of
from lightning_pardist.engines.common.containers import refill, same_items
from lightning_pardist.engines.pipeline import merge_results, with_scalar_loss
from lightning_pardist.engines.pipeline.interception import (
    HOOKS,
    entries_of,
    has_hooks_since,
    is_flag,
    next_hook,
    remove_gradient_hooks_since,
    remove_hooks_since,
)
from lightning_pardist.engines.pipeline.nested import flatten, rebuild

_LOG_SIGNATURE = inspect.signature(pl.LightningModule.log)
#: Extra key in the arguments of a ``log`` call: the default dtype at the time of the call.
_DTYPE = "default dtype"
_MISSING = object()
#: Types of values that are sent to other ranks, besides tensors; other values (a logger, a trainer) are not.
_PLAIN = (int, float, str, bytes, bool, type(None))
#: Relative difference of metric states up to which they count as equal, for rounding.
_LOOSE = 1e-4
#: Depth to which nested lists, dicts and objects in attributes are compared.
_DEPTH = 4
#: Longer lists are compared as a whole, and longer dicts inside others are not looked into (a vocabulary, say).
_SHORT, _LONG = 64, 1000

Path = tuple[Any, ...]
#: Takes a step's result and the arguments of its ``log`` calls, and adds :data:`WEIGHT` to the latter.
Weigh = Callable[[Any, list[dict[str, Any]]], None]


@dataclass(frozen=True)
class Part:
    """Range of a micro-batch's samples in the batch.

    Attributes:
        begin: Index of the first sample.
        size: Number of samples.
        total: Number of samples of the batch.
    """

    begin: int
    size: int
    total: int


@dataclass
class _Record:
    """Side effects of the step on one micro-batch.

    Attributes:
        logged: Arguments of each ``self.log`` call, in order, with the weight of its value if known.
        appended: Items appended to lists.
        assigned: New values of attributes and dictionary entries.
        metrics: Per metric: value of its last ``forward``, update count and states (for list states, the new items).
        calls: Calls of each metric that was given scalars only, such as a loss, with the method's name.
        buffers: New values of buffers of free modules (outside of units), by module and name.
        printed: Calls of ``self.print``, in order.
    """

    logged: list[dict[str, Any]] = field(default_factory=list)
    appended: dict[Path, list[Any]] = field(default_factory=dict)
    assigned: dict[Path, Any] = field(default_factory=dict)
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    calls: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    buffers: dict[Path, Tensor] = field(default_factory=dict)
    printed: list[dict[str, Any]] = field(default_factory=list)

    def as_containers(self) -> dict[str, Any]:
        """Convert to dicts and lists, so that code that traverses containers finds the tensors."""
        return {
            "logged": self.logged,
            "appended": [list(self.appended), list(self.appended.values())],
            "assigned": [list(self.assigned), list(self.assigned.values())],
            "metrics": self.metrics,
            "calls": self.calls,
            "buffers": [list(self.buffers), list(self.buffers.values())],
            "printed": self.printed,
        }

    @classmethod
    def of_containers(cls, value: dict[str, Any]) -> _Record:
        """Build a record from the result of :meth:`as_containers`."""
        appended, assigned, buffers = (
            dict(zip(map(tuple, value[key][0]), value[key][1], strict=True))
            for key in ("appended", "assigned", "buffers")
        )
        return cls(value["logged"], appended, assigned, value["metrics"], value["calls"], buffers, value["printed"])


@dataclass
class BatchOutputs:
    """Result and side effects of a step on a whole batch.

    Attributes:
        result: Return value of the step.
        logged: Arguments of each ``self.log`` call, with the weight of its value if known.
        appended: New items of lists.
        assigned: New values of attributes.
        metrics: Changes of metrics by each micro-batch.
        forward: The batch's value of each metric that was called.
        calls: The batch's calls of metrics that are given scalars only.
        buffers: New values of buffers of free modules.
        samples: For attributes with one entry per sample (a recurrent state): the sample dim, by index of the tensor.
        printed: The batch's calls of ``self.print``.
    """

    result: Any
    logged: list[dict[str, Any]] = field(default_factory=list)
    appended: dict[Path, list[Any]] = field(default_factory=dict)
    assigned: dict[Path, Any] = field(default_factory=dict)
    metrics: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    forward: dict[str, Any] = field(default_factory=dict)
    calls: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    buffers: dict[Path, Any] = field(default_factory=dict)
    samples: dict[Path, dict[int, int]] = field(default_factory=dict)
    printed: list[dict[str, Any]] = field(default_factory=list)

    @property
    def has_persistent_effects(self) -> bool:
        """Whether the step has set attributes or buffers, which the next step may read; appended items do not count."""
        return bool(self.assigned or self.buffers)


class StepOutputs:
    """Records and replays the side effects of a module's steps. Not collective.

    Args:
        module: The module whose steps are run.
        units: Names of the modules that each run on one stage only; effects inside them are not recorded.
        written: Buffers that steps write to; those outside of units are recorded.
        repeats_metrics: Whether all metrics are called again with the batch's samples, as those given scalars only
            always are; otherwise micro-batches update the same metric states one after another.

    Attributes:
        seen_written: Buffers that steps have written to, by module and name.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        units: Collection[str] = (),
        *,
        written: Collection[Path] = (),
        repeats_metrics: bool = False,
    ) -> None:
        self.module = module
        self.seen_written: set[Path] = set(written)
        inside = [name for name, _ in module.named_modules() if any(_within(name, unit) for unit in units)]
        self._free = {
            name: each
            for name, each in module.named_modules()
            if name not in inside and not isinstance(each, (Metric, MetricCollection))
        }
        self._metrics = {name: each for name, each in module.named_modules() if isinstance(each, Metric)}
        self._written = sorted(path for path in written if path[0] in self._free)
        #: For attributes with one entry per sample: the sample dim, by index of the tensor.
        self._samples: dict[Path, dict[int, int]] = {}
        self._open: _State | None = None
        #: Handles of hooks that the latest micro-batch has registered, by module and attribute.
        self._handles: dict[tuple[str, str], Any] = {}
        self._latest: dict[str, dict[str, Any]] = {}
        self._numbers = ScalarMetricCalls(every=repeats_metrics)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context around all runs of one step: nothing is logged, and side effects are undone on exit."""
        self._open = self._state()
        self._latest, self._handles = {}, {}
        kept = {name: self.module.__dict__.get(name, _MISSING) for name in _RECORDED}
        buffers = self._written_buffers()
        try:
            with self._numbers.watching(self._metrics):
                yield
        finally:
            for table, key, buffer in buffers:
                table[key] = buffer
            for name, value in kept.items():
                if value is _MISSING:
                    self.module.__dict__.pop(name, None)
                else:
                    self.module.__dict__[name] = value
            self._open.restore(self)
            self._open = None
            for (name, key), handle in self._handles.items():
                # A trial has removed the hooks.
                if _is_handle(handle):
                    self._free[name].__dict__[key] = handle

    def preset(self, place: Place, value: Any) -> None:
        """Set an attribute or buffer temporarily, until :meth:`watching` ends or the caller restores it."""
        kind, path = _kind_and_path(place)
        if kind == "assigned":
            self._assign(path, value)
        else:
            own_buffers(self._free[path[0]])[path[1]] = value

    def value_at(self, place: Place) -> Any:
        """Return the value of an attribute or buffer."""
        kind, path = _kind_and_path(place)
        return self._at(path) if kind == "assigned" else own_buffers(self._free[path[0]])[path[1]]

    def run(
        self, step: Callable[[Any], Any], microbatch: Any, part: Part | None = None, *, weigh: Weigh | None = None
    ) -> dict[str, Any]:
        """Run the step on one micro-batch as if it were the first, except that states of sample metrics accumulate.

        Args:
            step: Takes the micro-batch.
            microbatch: Argument of ``step``.
            part: Range of its samples in the batch; None for all.
            weigh: Adds the weights of the logged values, while their autograd graphs exist.

        Returns:
            The step's result under ``"result"``, and the record of its effects.
        """
        return self._run(step, microbatch, part, weigh, in_order=False)

    def run_in_order(self, step: Callable[[Any], Any], batch: Any) -> dict[str, Any]:
        """Run the step on a whole batch after those before it, keeping their side effects; otherwise as :meth:`run`."""
        return self._run(step, batch, None, None, in_order=True)

    def _run(
        self,
        step: Callable[[Any], Any],
        microbatch: Any,
        part: Part | None,
        weigh: Weigh | None,
        *,
        in_order: bool,
    ) -> dict[str, Any]:
        record = _Record()
        self.module.__dict__.update(log=self._recorder(record.logged), print=_printer(record.printed))
        before = self._state()
        if self._open is not None and not in_order:
            # Each micro-batch registers the hooks of one step, so those of the one before would be too many.
            remove_gradient_hooks_since(self.module, self._open.next_hook)
        try:
            if part is not None:
                self._narrow_states(part)
            with self._numbers.recording(record.calls), self._own_buffers(record, in_order=in_order):
                result = step(microbatch)
            if not in_order:
                result = with_scalar_loss(result)
            if weigh is not None:
                weigh(result, record.logged)
            self._handles = before.new_handles(self)
        except BaseException:
            # A stage leaves the step early, before the step can remove its own hooks.
            before.remove_hooks(self.module)
            self._handles = before.new_handles(self)
            before.restore(self)
            raise
        finally:
            for name in _RECORDED:
                self.module.__dict__.pop(name, None)
        before.compare(self, record)
        is_last = part is None or part.begin + part.size == part.total
        for name in record.metrics if is_last and not in_order else ():
            value = self._numbers.value_of(name)
            record.metrics[name]["forward"] = record.metrics[name]["forward"] if value is None else value
        for arguments in record.logged:
            dtype = arguments.pop(_DTYPE)
            if isinstance(arguments["value"], Tensor):
                arguments["value"] = arguments["value"].detach()
            elif isinstance(arguments["value"], float):
                arguments["value"] = torch.tensor(arguments["value"], dtype=dtype)
        # States of metrics of scalars depend on the number of micro-batches: they are called again with the batch's.
        repeated = self._numbers.updated_by(record.calls)
        record.metrics = {name: change for name, change in record.metrics.items() if name not in repeated}
        if not in_order:
            before.restore_attributes(self)
            # Only the states after the last micro-batch are used.
            for states in self._latest.values():
                states["states"] = {}
            self._latest = record.metrics
        return {"result": result, **record.as_containers()}

    def _narrow_states(self, part: Part) -> None:
        """Narrow attributes with one entry per sample to the samples of one micro-batch."""
        for path, dims in self._samples.items():
            leaves, spec = flatten(self._at(path))
            for index, dim in dims.items():
                leaf = leaves[index] if index < len(leaves) else None
                if isinstance(leaf, Tensor) and leaf.ndim > dim and leaf.shape[dim] == part.total:
                    leaves[index] = leaf.narrow(dim, part.begin, part.size).clone()
            self._assign(path, rebuild(spec, leaves))

    def uneven_metrics(self, whole: dict[str, Any], parts: Sequence[dict[str, Any]]) -> list[str]:
        """Return metrics whose states after all micro-batches differ from those after the batch (they count calls).

        Args:
            whole: Result of :meth:`run` for the batch.
            parts: Results for its micro-batches, in one :meth:`watching`.
        """
        pairs = ((name, whole["metrics"][name], change) for name, change in parts[-1]["metrics"].items())
        return [name for name, one, other in pairs if _states_differ(one["states"], other["states"])]

    def adopt_rules(self, rules: Rules) -> None:
        """Take from a trial's rules which attributes have one entry per sample."""
        for place, rule in rules.of.items():
            if place[0] == "assigned" and rule.startswith("cat"):
                kind_and_path = _kind_and_path(place)
                index = place[2] if len(place) > 2 else 0
                if isinstance(index, int):
                    self._samples.setdefault(kind_and_path[1], {})[index] = int(rule[3:])

    def of_batch(self, result: dict[str, Any]) -> BatchOutputs:
        """Return the outputs of a step that ran on the whole batch.

        Args:
            result: Result of :meth:`run` or :meth:`run_in_order`.
        """
        record = _Record.of_containers(result)
        return BatchOutputs(
            result["result"],
            record.logged,
            record.appended,
            {path: value for path, value in record.assigned.items() if not _is_same(value, self._at(path))},
            {name: [change] for name, change in record.metrics.items()},
            {name: change["forward"] for name, change in record.metrics.items() if change["forward"] is not None},
            record.calls,
            record.buffers,
            printed=record.printed,
        )

    def combine(self, results: Sequence[dict[str, Any]], shares: Shares, rules: Rules) -> BatchOutputs:
        """Combine micro-batches' results and side effects to those of the step on the whole batch.

        Args:
            results: Results of :meth:`run` for each micro-batch.
            shares: Shares of the micro-batches in the batch.
            rules: How values are combined.
        """
        if len(results) == 1 and not isinstance(rules, Collector):
            return self.of_batch(results[0])
        records = [_Record.of_containers(result) for result in results]

        def merged(column: Sequence[Any], *where: Hashable) -> Any:
            def number(place: tuple[int, ...], numbers: list[Any], which: Sequence[int]) -> Any:
                return rules.combine((*where, *place), numbers, shares.only(which))

            return merge_results(column, shares.loss, shares.sizes, combine=number)

        done = BatchOutputs(merged([result["result"] for result in results], "result"))
        for path in dict.fromkeys(path for record in records for path in record.assigned):
            known = [record.assigned[path] for record in records if path in record.assigned]
            before = self._at(path)
            if len(known) < len(records) or all(_is_same(value, before) for value in known):
                # A list assigned again with equal contents is not per-sample, even if it has one item, as a micro-batch
                # of one sample would.
                done.assigned[path] = known[-1]
            elif not is_numeric(before) and _has_form_of(known[0], before) and _are_same(known):
                # Nor one whose items all micro-batches have converted to another dtype.
                done.assigned[path] = known[-1]
            elif not all(map(is_numeric, known)) and not _are_alike(known):
                done.assigned[path] = merged(known, "assigned", path)
            else:
                done.assigned[path], dims = self._merged_state(known, path, shares, rules)
                if dims:
                    done.samples[path] = dims
        for path in dict.fromkeys(path for record in records for path in record.buffers):
            before = own_buffers(self._free[path[0]])[path[1]]
            written = [record.buffers[path] for record in records]
            done.buffers[path] = merged_numbers(written, before, ("buffer", path), shares, rules)
        kept = [([record.assigned.get(path) for record in records], value) for path, value in done.assigned.items()]
        done.logged = list(combined_logs([record.logged for record in records], kept, shares, rules))
        for path in dict.fromkeys(path for record in records for path in record.appended):
            grown = [record.appended.get(path, []) for record in records]
            if len({len(items) for items in grown}) == 1:
                columns = enumerate(zip(*grown, strict=True))
                done.appended[path] = [merged(column, "appended", path, index) for index, column in columns]
            else:
                done.appended[path] = [item for items in grown for item in items]
        for name in dict.fromkeys(name for record in records for name in record.metrics):
            done.metrics[name] = found = [record.metrics[name] for record in records if name in record.metrics]
            values = [each["forward"] for each in found]
            if len(values) == len(records) and all(value is not None for value in values):
                # The last value covers all micro-batches.
                done.forward[name] = values[-1]
        for name in dict.fromkeys(name for record in records for name in record.calls):
            called = [record.calls.get(name, []) for record in records]
            if len({len(calls) for calls in called}) == 1:
                columns = enumerate(zip(*called, strict=True))
                done.calls[name] = [merged(column, "called", name, index) for index, column in columns]
            else:
                done.calls[name] = [call for calls in called for call in calls]
        texts = [record.printed for record in records]
        for index in range(max(map(len, texts))):
            calls = [column[index] for column in texts if len(column) > index]

            def number(which: int, column: list[float], call: int = index) -> Any:
                return rules.combine(("printed", call, which), column, shares)

            same = len(calls) == len(records)
            done.printed += merged_texts(calls, number) if same else calls
        return done

    def _merged_state(self, known: list[Any], path: Path, shares: Shares, rules: Rules) -> tuple[Any, dict[int, int]]:
        """Return the combined value of an attribute, and the sample dims of its tensors."""
        place: Place = ("assigned", path)
        if all(map(is_numeric, known)):
            rule = rule_of(known, place, shares, rules)
            value = merged_numbers(known, self._at(path), place, shares, rules)
            return value, {0: int(rule[3:])} if rule.startswith("cat") else {}
        leaves, spec = flatten(known[0])
        columns = zip(*(flatten(value)[0] for value in known), strict=True)
        dims: dict[int, int] = {}
        for index, column in enumerate(columns):
            if not all(map(is_numeric, column)):
                continue
            rule = rule_of(list(column), (*place, index), shares, rules)
            # For tuples, changes from step to step are not distinguished: no value before.
            leaves[index] = merged_numbers(list(column), None, (*place, index), shares, rules)
            if rule.startswith("cat"):
                dims[index] = int(rule[3:])
        return rebuild(spec, leaves), dims

    def apply(self, done: BatchOutputs) -> Any:
        """Apply the step's side effects on this rank.

        Args:
            done: Outputs of :meth:`combine` or :meth:`of_batch`.

        Returns:
            The step's return value for the whole batch.
        """
        for path, value in done.assigned.items():
            self._assign(path, value)
        self._samples |= done.samples
        for (name, key), value in done.buffers.items():
            buffer = own_buffers(self._free[name])[key]
            if buffer is not None and buffer.shape == value.shape and buffer.dtype == value.dtype:
                with torch.no_grad():
                    buffer.copy_(value)
            else:
                own_buffers(self._free[name])[key] = value
        for path, items in done.appended.items():
            target = self._at(path)
            if isinstance(target, list):
                target.extend(items)
        for name, changes in done.metrics.items():
            self._apply_metric(self._metrics[name], changes)
            set_forward_cache(self._metrics[name], done.forward.get(name))
        for name, calls in done.calls.items():
            for call in calls:
                getattr(self._metrics[name], call["method"])(*call["args"].values(), **call["kwargs"])
        for arguments in done.logged:
            value = arguments["value"]
            if isinstance(value, MetricName):
                value = self.module.get_submodule(value.name)
            self.module.log(**{key: each for key, each in arguments.items() if key != WEIGHT} | {"value": value})
        for call in done.printed:
            self.module.print(call["text"], end=call["end"], flush=call["flush"])
        return done.result

    @contextmanager
    def _own_buffers(self, record: _Record, *, in_order: bool = False) -> Iterator[None]:
        """Replace written buffers by copies inside, since autograd may save them; record their new values on exit.

        Args:
            record: Receives the values; of a run in order, only those that have changed.
            in_order: Whether the next run reads the new values, as it does those of attributes.
        """
        own = self._written_buffers()
        versions = self._versions()
        copies = [None if buffer is None else buffer.clone() for _, _, buffer in own]
        for (table, key, _), copied in zip(own, copies, strict=True):
            table[key] = copied
        left = own
        try:
            yield
            for path, (table, key, _), copied in zip(self._written, own, copies, strict=True):
                value = table[key]
                is_new = not in_order or value is not copied or (copied is not None and version_of(copied))
                if value is not None and is_new:
                    record.buffers[path] = value.detach()
            if in_order:
                left = self._written_buffers()
        finally:
            for table, key, buffer in left:
                table[key] = buffer
        self.seen_written |= {path for path, version in self._versions().items() if versions.get(path) != version}

    def _written_buffers(self) -> list[tuple[dict[str, Any], str, Tensor | None]]:
        """Return every buffer that steps write to, with its table and its key there."""
        tables = [(own_buffers(self._free[name]), key) for name, key in self._written]
        return [(table, key, table.get(key)) for table, key in tables]

    def _versions(self) -> dict[Path, tuple[int, int]]:
        return {
            (name, key): (id(buffer), 0 if buffer.is_inference() else version_of(buffer))
            for name, module in self._free.items()
            for key, buffer in own_buffers(module).items()
            if buffer is not None
        }

    # --- logged values ------------------------------------------------------------------------------------------

    def _recorder(self, logged: list[dict[str, Any]]) -> Callable[..., None]:
        def log(*args: Any, **kwargs: Any) -> None:
            arguments = dict(_LOG_SIGNATURE.bind(self.module, *args, **kwargs).arguments)
            arguments.pop("self", None)
            if "reduce_fx" in arguments:
                arguments["reduce_fx"] = original_function(arguments["reduce_fx"])
            if isinstance(arguments.get("value"), Metric):
                arguments["value"] = self._name_of(arguments["value"])
            # The default dtype set by the Trainer's precision plugin, which is active inside the step only.
            logged.append({**arguments, _DTYPE: torch.get_default_dtype()})

        return log

    def _name_of(self, metric: Metric) -> MetricName:
        for name, known in self.module.named_modules():
            if known is metric:
                return MetricName(name)
        raise ValueError(
            f"self.log was given a {type(metric).__name__} that is no attribute of {type(self.module).__name__}."
            " Assign it to the module in __init__."
        )

    # --- attributes and metrics ---------------------------------------------------------------------------------

    def _at(self, path: Path) -> Any:
        value: Any = self._free[path[0]].__dict__.get(path[1], _MISSING)
        for key in path[2:]:
            if isinstance(value, list):
                value = value[key] if isinstance(key, int) and key < len(value) else _MISSING
            else:
                value = entries.get(key, _MISSING) if (entries := entries_of(value)) is not None else _MISSING
        return value

    def _assign(self, path: Path, value: Any) -> None:
        if len(path) == 2:
            setattr(self._free[path[0]], path[1], value)
            return
        owner = self._at(path[:-1])
        if isinstance(owner, list) and path[-1] < len(owner):
            owner[path[-1]] = value
        elif (entries := entries_of(owner)) is not None:
            entries[path[-1]] = value

    @staticmethod
    def _apply_metric(metric: Metric, changes: list[dict[str, Any]]) -> None:
        set_update_count(metric, changes[-1]["count"])
        set_computed(metric, None)
        for state, value in changes[-1]["states"].items():
            setattr(metric, state, _on(value, metric.device))
        for each in changes:
            for state, items in each["added"].items():
                getattr(metric, state).extend(_on(items, metric.device))

    # --- state --------------------------------------------------------------------------------------------------

    def _state(self) -> _State:
        attributes = {
            (name, key): _freeze(value)
            for name, module in self._free.items()
            for key, value in module.__dict__.items()
            if key not in _REGISTRIES
        }
        metrics = {name: _freeze_metric(metric) for name, metric in self._metrics.items()}
        return _State(attributes, metrics, next_hook())


#: Methods of the module that are recorded instead of executed.
_RECORDED = ("log", "print")
_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules", "training", *_RECORDED}) | HOOKS


@dataclass
class _State:
    """Snapshot of free modules' attributes and metric states, and the number of the next hook."""

    attributes: dict[tuple[str, str], _Frozen]
    metrics: dict[str, dict[str, Any]]
    next_hook: int

    def restore(self, effects: StepOutputs) -> None:
        """Restore attributes and metrics."""
        self.restore_attributes(effects)
        for name, kept in self.metrics.items():
            _thaw_metric(effects._metrics[name], kept)

    def restore_attributes(self, effects: StepOutputs) -> None:
        """Restore attributes, not metrics; keep flags if hooks registered since the snapshot are still present."""
        lasting = has_hooks_since(effects.module, self.next_hook)
        for name, module in effects._free.items():
            for key in [key for key in module.__dict__ if key not in _REGISTRIES]:
                if (name, key) not in self.attributes and not (lasting and is_flag(key, module.__dict__[key])):
                    del module.__dict__[key]
        for (name, key), frozen in self.attributes.items():
            now = effects._free[name].__dict__.get(key)
            effects._free[name].__dict__[key] = now if lasting and is_flag(key, now) else frozen.thaw()

    def new_handles(self, effects: StepOutputs) -> dict[tuple[str, str], Any]:
        """Return the attributes set since the snapshot that hold handles of hooks, by module and name."""
        if self.next_hook == next_hook():
            return {}
        return {
            (name, key): value
            for name, module in effects._free.items()
            for key, value in module.__dict__.items()
            if _is_handle(value)
            and ((name, key) not in self.attributes or self.attributes[name, key].value is not value)
        }

    def remove_hooks(self, root: nn.Module) -> None:
        """Remove hooks registered since the snapshot."""
        remove_hooks_since(root, self.next_hook)

    def compare(self, effects: StepOutputs, record: _Record) -> None:
        """Write the changes since the snapshot into a record."""
        seen: set[int] = set()
        for name, module in effects._free.items():
            for key, value in module.__dict__.items():
                if key not in _REGISTRIES:
                    _compare(self.attributes.get((name, key)), value, (name, key), record, seen)
        leaders = _leaders(effects.module) if effects._metrics else {}
        for name, metric in effects._metrics.items():
            source = leaders.get(id(metric), metric)
            before = self.metrics[name]
            is_new = source.update_count != before["count"] or forward_cache_of(metric) is not before["forward"]
            if is_new or name in effects._numbers.called:
                record.metrics[name] = _metric_change(metric, source, before)


@dataclass(slots=True)
class _Frozen:
    """Snapshot of a value, with its contents if it is a list, a dict or an object of the user's.

    Attributes:
        value: The value itself.
        items: Contents of a list, entries of a dict, or attributes of an object, each as a snapshot; None for others.
        keys: Keys or names of the items; None for a list.
    """

    value: Any
    items: tuple[_Frozen, ...] | None = None
    keys: tuple[Any, ...] | None = None

    def thaw(self) -> Any:
        """Return the value with its contents at the time of the snapshot."""
        if self.items is None:
            return self.value
        contents = [item.thaw() for item in self.items]
        if self.keys is None:
            if not same_items(self.value, contents):
                self.value[:] = contents
            return self.value
        entries = entries_of(self.value)
        if entries is not None:
            refill(entries, dict(zip(self.keys, contents, strict=True)))
        return self.value


def _freeze(value: Any, depth: int = 0) -> _Frozen:
    if isinstance(value, list):
        # Long lists are those that steps append to.
        inner = depth < _DEPTH and len(value) <= _SHORT
        return _Frozen(value, tuple(_freeze(item, depth + 1) if inner else _Frozen(item) for item in value))
    entries = entries_of(value) if depth < _DEPTH else None
    if entries is not None and (depth == 0 or len(entries) <= _LONG):
        return _Frozen(value, tuple(_freeze(item, depth + 1) for item in entries.values()), tuple(entries))
    return _Frozen(value)


def _compare(before: _Frozen | None, now: Any, path: Path, record: _Record, seen: set[int]) -> None:
    """Write the changes of a value into a record; a container that several attributes refer to is written once."""
    if before is None or before.value is not now:
        if _is_sendable(now):
            record.assigned[path] = _copied(now)
        return
    if before.items is None or id(now) in seen:
        return
    seen.add(id(now))
    if before.keys is not None:
        old = dict(zip(before.keys, before.items, strict=True))
        for key, value in (entries_of(now) or {}).items():
            _compare(old.get(key), value, (*path, key), record, seen)
        return
    length = len(before.items)
    if same_items(now[:length], [item.value for item in before.items]):
        for index, item in enumerate(before.items):
            _compare(item, now[index], (*path, index), record, seen)
        if len(now) > length:
            record.appended[path] = now[length:]
    elif _is_sendable(now):
        record.assigned[path] = _copied(now)


def _copied(value: Any) -> Any:
    """Return a copy of nested lists and dicts, which the next run of the step may change, with detached tensors."""
    if type(value) is list:
        return [_copied(item) for item in value]
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    return value.detach() if isinstance(value, Tensor) else value


def _is_same(value: Any, before: Any) -> bool:
    """Return whether two nested values are equal."""
    (leaves, spec), (others, other_spec) = flatten(value), flatten(before)
    return spec == other_spec and all(map(_is_same_leaf, leaves, others))


def _are_same(values: Sequence[Any]) -> bool:
    return all(_is_same(value, values[0]) for value in values[1:])


def _has_form_of(value: Any, before: Any) -> bool:
    """Return whether a value is a container like the one before, with as many items."""
    (leaves, spec), (others, other_spec) = flatten(value), flatten(before)
    return spec == other_spec and len(leaves) == len(others) > 0 and isinstance(before, (list, tuple, dict))


def _is_same_leaf(leaf: Any, other: Any) -> bool:
    if not isinstance(leaf, Tensor) or not isinstance(other, Tensor):
        return type(leaf) is type(other) and bool(leaf == other)
    alike = leaf.shape == other.shape and leaf.dtype == other.dtype
    return alike and torch.equal(leaf.to(other.device), other)


def _is_handle(value: Any) -> bool:
    """Return whether a value is a handle of a registered hook, or a list, tuple or dict of such handles."""
    if isinstance(value, (list, tuple, dict)):
        items = list(value.values()) if isinstance(value, dict) else value
        return len(items) > 0 and all(isinstance(item, RemovableHandle) and _is_handle(item) for item in items)
    return isinstance(value, RemovableHandle) and value.id in (value.hooks_dict_ref() or ())


def _is_sendable(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_sendable(item) for item in value)
    if isinstance(value, dict):
        return all(_is_sendable(item) for item in value.values())
    return isinstance(value, (Tensor, *_PLAIN)) and not isinstance(value, nn.Parameter)


# --- metrics --------------------------------------------------------------------------------------------------------


def _freeze_metric(metric: Metric) -> dict[str, Any]:
    states = metric.metric_state
    return {
        "count": metric.update_count,
        "forward": forward_cache_of(metric),
        "computed": computed_of(metric),
        # Copies, since metric updates may be in place.
        "states": {name: list(v) if isinstance(v, list) else v.detach().clone() for name, v in states.items()},
    }


def _thaw_metric(metric: Metric, kept: dict[str, Any]) -> None:
    if metric.update_count == kept["count"] and forward_cache_of(metric) is kept["forward"]:
        return
    set_update_count(metric, kept["count"])
    set_forward_cache(metric, kept["forward"])
    set_computed(metric, kept["computed"])
    for name, value in kept["states"].items():
        setattr(metric, name, list(value) if isinstance(value, list) else value.clone())


def _metric_change(metric: Metric, source: Metric, before: dict[str, Any]) -> dict[str, Any]:
    states, added = {}, {}
    for name, value in source.metric_state.items():
        if isinstance(value, list):
            added[name] = value[len(before["states"][name]) :]
        else:
            states[name] = value.detach().clone()
    forward = forward_cache_of(metric) if forward_cache_of(metric) is not before["forward"] else None
    return {"count": source.update_count, "forward": forward, "states": states, "added": added}


def _states_differ(some: dict[str, Any], others: dict[str, Any]) -> bool:
    return any(relative_error(value, others[name]) > _LOOSE for name, value in some.items())


def _leaders(module: nn.Module) -> dict[int, Metric]:
    """Map metrics of a collection's compute groups to the first of the group, whose states they share."""
    found: dict[int, Metric] = {}
    for collection in module.modules():
        if isinstance(collection, MetricCollection):
            for members in groups_of(collection):
                first, *others = (getattr(collection, name) for name in members)
                found.update({id(other): first for other in others})
    return found


def _on(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_on(item, device) for item in value]
    return value.to(device) if isinstance(value, Tensor) else value


def _printer(calls: list[dict[str, Any]]) -> Callable[..., None]:
    def record(*args: Any, **kwargs: Any) -> None:
        calls.append(printed(args, kwargs))

    return record


def _are_alike(values: Sequence[Any]) -> bool:
    """Return whether values have one nested structure and are not lists, which may have one item per sample."""
    if any(isinstance(value, list) for value in values):
        return False
    return len({flatten(value)[1] for value in values}) == 1


def _within(name: str, unit: str) -> bool:
    return name == unit or name.startswith(f"{unit}.")


def _kind_and_path(place: Place) -> tuple[Hashable, Path]:
    kind, path = place[:2]
    if not isinstance(path, tuple):
        raise TypeError(f"{place} is no place of an attribute or buffer.")
    return kind, path
