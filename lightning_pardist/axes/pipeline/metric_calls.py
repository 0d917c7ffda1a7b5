"""Metrics that are given numbers of a whole batch (``self.mean(loss)``), not samples.

A metric of samples comes to the same states however a batch is cut. One of numbers does not: the mean of eight
micro-batches' losses weighs a batch like eight. So calls with numbers alone are noted, and made again with the numbers
of the batch.

What a metric returns for a batch (``on_step=True`` logs it) does not follow from what it returns for micro-batches: an
F1 score is no mean. So a twin of each metric that is called with samples is given those of one step.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor
from torchmetrics import Metric

from lightning_pardist.engines.pipeline.interception import HOOKS
from lightning_pardist.engines.pipeline.nested import flatten

_METHODS = ("forward", "update")
_METHODS_AND_VALUE = (*_METHODS, "compute")
_MISSING = object()


class NumberCalls:
    """Notes calls of metrics whose arguments are numbers alone, or all calls. Not collective.

    Args:
        every: Whether calls with samples are noted as well, of which micro-batches' states are of no use then.
    """

    def __init__(self, *, every: bool = False) -> None:
        self._every = every
        self._calls: dict[str, list[dict[str, Any]]] | None = None
        self._others: set[str] = set()
        self._inside = False
        self._metrics: Mapping[str, Metric] = {}
        #: Of metrics that return something for samples; and which of them have seen some of this step's.
        self._twins: dict[str, Metric | None] = {}
        self._begun: set[str] = set()
        #: Metrics that were called since :meth:`into` began.
        self.called: set[str] = set()

    def value_of(self, name: str) -> Any:
        """What a metric returns for all samples of this step that it was called with; None if it was not."""
        twin = self._twins.get(name) if name in self._begun else None
        return None if twin is None else twin.compute()

    @contextmanager
    def watching(self, metrics: Mapping[str, Metric]) -> Iterator[None]:
        """Inside, calls of these metrics can be noted.

        Args:
            metrics: By name.
        """
        self._metrics, self._begun = metrics, set()
        saved = [
            (metric, name, metric.__dict__.get(name, _MISSING))
            for metric in metrics.values()
            for name in _METHODS_AND_VALUE
        ]
        for name, metric in metrics.items():
            for method in _METHODS:
                # On the instance, where torchmetrics has its own wrapper of update.
                metric.__dict__[method] = self._noted(name, method, getattr(metric, method))
            if self._every:
                metric.__dict__["compute"] = self._refused(name, metric.compute)
        try:
            yield
        finally:
            for metric, method, before in saved:
                if before is _MISSING:
                    metric.__dict__.pop(method, None)
                else:
                    metric.__dict__[method] = before

    @contextmanager
    def into(self, calls: dict[str, list[dict[str, Any]]]) -> Iterator[None]:
        """Inside, calls are noted; at the end only those of metrics that had no other calls are left.

        Args:
            calls: Receives them, by metric.
        """
        self._calls, self._others, self.called = calls, set(), set()
        try:
            yield
        finally:
            for name in self._others:
                calls.pop(name, None)
            self._calls = None

    def _noted(self, name: str, method: str, call: Callable[..., Any]) -> Callable[..., Any]:
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

    def _refused(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def compute(*args: Any, **kwargs: Any) -> Any:
            if not self._inside:
                raise ValueError(
                    f"training_step calls {name}.compute(), of which a replica knows its own samples only. Give the"
                    " metric itself to self.log, or compute it in on_train_epoch_end."
                )
            return call(*args, **kwargs)

        return compute

    def _note(self, name: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.called.add(name)
        leaves = flatten((args, kwargs))[0]
        if self._calls is None or not (self._every or (leaves and all(map(_is_number, leaves)))):
            self._others.add(name)
            if method == "forward" and (twin := self._twin_of(name)) is not None:
                twin.update(*args, **kwargs)
            return
        # A dict: a list with an item a sample would be taken for samples.
        positional = {str(index): _detached(value) for index, value in enumerate(args)}
        named = {key: _detached(value) for key, value in kwargs.items()}
        self._calls.setdefault(name, []).append({"method": method, "args": positional, "kwargs": named})

    def _twin_of(self, name: str) -> Metric | None:
        """A copy of a metric that has seen this step's samples alone, and knows of no other rank; None if it has none.

        It stays from step to step.
        """
        if name not in self._twins:
            self._twins[name] = None
            with suppress(Exception):
                self._twins[name] = _copied(self._metrics[name])
        twin = self._twins[name]
        if twin is not None and name not in self._begun:
            self._begun.add(name)
            twin.reset()
        return twin


def _copied(metric: Metric) -> Metric:
    """A copy without hooks, which may hold anything, and without what stands in for methods here."""
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
        each.__dict__["distributed_available_fn"] = _never
    return twin


def _never() -> bool:
    return False


def _is_number(value: Any) -> bool:
    return value.ndim == 0 if isinstance(value, Tensor) else isinstance(value, (int, float))


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
