"""Recording of metric calls in micro-batches, so that metrics of scalars (``self.mean(loss)``) see the batch's.

A metric of samples has the same states after the micro-batches as after the batch. A metric of scalars does not: with
eight micro-batches, a mean over losses would count one batch eight times. Calls with scalars only are therefore
recorded, and repeated with the batch's scalars.

The value that a metric returns for a batch (logged with ``on_step=True``) cannot be computed from its values for
micro-batches: an F1 score is not a mean. Each metric called with samples therefore has a twin that is updated with the
samples of one step only.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor
from torchmetrics import Metric

from lightning_pardist.engines.pipeline.interception import HOOKS
from lightning_pardist.engines.pipeline.nested import flatten

_METHODS = ("forward", "update")
_METHODS_AND_VALUE = (*_METHODS, "compute")
_MISSING = object()


class ScalarMetricCalls:
    """Records metric calls whose arguments are scalars only, or all calls. Not collective.

    Args:
        every: Whether calls with samples are recorded as well; the micro-batches' metric states are then not used.
    """

    def __init__(self, *, every: bool = False) -> None:
        self._records_all = every
        self._calls: dict[str, list[dict[str, Any]]] | None = None
        self._mixed_calls: set[str] = set()
        self._inside = False
        self._metrics: Mapping[str, Metric] = {}
        #: Twins of metrics whose ``forward`` is called with samples; names of those updated in the current step.
        self._copies: dict[str, Metric | None] = {}
        self._updated_copies: set[str] = set()
        #: Metrics that were called since :meth:`recording` began.
        self.called: set[str] = set()

    def value_of(self, name: str) -> Any:
        """Return a metric's value over all samples of this step that it was called with; None if it was not called."""
        twin = self._copies.get(name) if name in self._updated_copies else None
        return None if twin is None else twin.compute()

    @contextmanager
    def watching(self, metrics: Mapping[str, Metric]) -> Iterator[None]:
        """Context in which calls of these metrics can be recorded, see :meth:`recording`.

        Args:
            metrics: The metrics by name.
        """
        self._metrics, self._updated_copies = metrics, set()
        saved = [
            (metric, name, metric.__dict__.get(name, _MISSING))
            for metric in metrics.values()
            for name in _METHODS_AND_VALUE
        ]
        for name, metric in metrics.items():
            for method in _METHODS:
                # On the instance, where torchmetrics puts its own wrapper of `update`.
                metric.__dict__[method] = self._wrap_method(name, method, getattr(metric, method))
            if self._records_all:
                metric.__dict__["compute"] = self._wrap_compute(name, metric.compute)
        try:
            yield
        finally:
            for metric, method, before in saved:
                if before is _MISSING:
                    metric.__dict__.pop(method, None)
                else:
                    metric.__dict__[method] = before

    @contextmanager
    def recording(self, calls: dict[str, list[dict[str, Any]]]) -> Iterator[None]:
        """Context that records calls; on exit, those of metrics that also had other calls are dropped.

        Args:
            calls: Receives the calls, by metric.
        """
        self._calls, self._mixed_calls, self.called = calls, set(), set()
        try:
            yield
        finally:
            for name in {*self._mixed_calls, *(name for name in calls if self._parts_of(name) & self._mixed_calls)}:
                calls.pop(name, None)
            self._calls = None

    def updated_by(self, calls: Collection[str]) -> set[str]:
        """Return the metrics that are called, and those that they contain, as a sum of metrics does."""
        return set(calls).union(*map(self._parts_of, calls))

    def _parts_of(self, name: str) -> set[str]:
        inside = {id(each) for each in self._metrics[name].modules() if each is not self._metrics[name]}
        return {other for other, metric in self._metrics.items() if id(metric) in inside}

    def _wrap_method(self, name: str, method: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def noted(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return call(*args, **kwargs)
            if self._calls is not None:
                self._note(name, method, args, kwargs)
            self._inside = True
            try:
                return call(*args, **kwargs)
            finally:
                self._inside = False

        return noted

    def _wrap_compute(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def compute(*args: Any, **kwargs: Any) -> Any:
            if not self._inside:
                raise ValueError(
                    f"training_step calls {name}.compute(), which on a replica covers only the replica's own"
                    " samples. Give the metric itself to self.log, or compute it in on_train_epoch_end."
                )
            return call(*args, **kwargs)

        return compute

    def _note(self, name: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.called.add(name)
        leaves = flatten((args, kwargs))[0]
        if self._calls is None or not (self._records_all or (leaves and all(map(_is_number, leaves)))):
            self._mixed_calls.add(name)
            if method == "forward" and (twin := self._copy_of(name)) is not None:
                twin.update(*args, **kwargs)
            return
        # A dict, since a list with one item per sample would be treated as samples.
        positional = {str(index): _detached(value) for index, value in enumerate(args)}
        named = {key: _detached(value) for key, value in kwargs.items()}
        self._calls.setdefault(name, []).append({"method": method, "args": positional, "kwargs": named})

    def _copy_of(self, name: str) -> Metric | None:
        """Return a metric's twin, a copy updated with this step's samples only and not synchronized over ranks.

        It is kept between steps and reset in each. None if the metric cannot be copied.
        """
        if name not in self._copies:
            self._copies[name] = None
            with suppress(Exception):
                self._copies[name] = _copied(self._metrics[name])
        twin = self._copies[name]
        if twin is not None and name not in self._updated_copies:
            self._updated_copies.add(name)
            twin.reset()
        return twin


def _copied(metric: Metric) -> Metric:
    """Copy a metric without its hooks, which may reference any object, and without the recording wrapper."""
    kept = [(each, dict(each.__dict__)) for each in metric.modules()]
    try:
        for each, attributes in kept:
            for key in HOOKS & attributes.keys():
                each.__dict__[key] = OrderedDict()
            each.__dict__.pop("forward", None)
        groups = [vars(each).get("process_group") for each, _ in kept]
        twin = copy.deepcopy(metric, {id(group): group for group in groups})
    finally:
        for each, attributes in kept:
            each.__dict__.update(attributes)
    for each in twin.modules():
        each.__dict__["distributed_available_fn"] = _return_false
    return twin


def _return_false() -> bool:
    return False


def _is_number(value: Any) -> bool:
    return value.ndim == 0 if isinstance(value, Tensor) else isinstance(value, (int, float))


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
