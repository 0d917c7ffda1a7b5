"""Stubs (fake tensors without values), and detection of operators that depend on values.

Stubs are those of ``FakeTensorMode``, with one extension for operators such as ``x[mask]``, the shape of whose result
depends on the values of one argument only. If that argument is real (a mask from the batch) and only the data is a
stub, the shape is found by running the operator on zeros. What is known of an operator's result is kept: a stage runs
the code between the units of all earlier stages on stubs in every micro-batch, and ``FakeTensorMode`` takes a quarter
of a millisecond for an operator.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from lightning_pardist.compat.fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    fake_device,
    has_value,
    makes_one_tensor,
    pack_padded_sequence,
    returns_view,
    runs_kernel,
)

_aten = torch.ops.aten
#: Operators whose first argument is data, and the positions of the arguments whose values determine the result's shape.
_DECIDED_BY: dict[Any, tuple[int, ...]] = {
    _aten.index.Tensor: (1,),
    _aten.masked_select.default: (1,),
    pack_padded_sequence: (1,),
}


def deciding_tensors(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the arguments on whose values an operator's result shape or Python result depends; usually none.

    Args:
        func: The operator overload.
        args: Its arguments.
        kwargs: Its keyword arguments.
    """
    positions = _DECIDED_BY.get(func)
    if positions is not None:
        found = [tensor for position in positions for tensor in tensors_of(args[position])]
        # Indexing by integer tensors has a shape that does not depend on their values.
        return [t for t in found if t.dtype in (torch.bool, torch.uint8)] if func is _aten.index.Tensor else found
    if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
        return list(tensors_of((args, kwargs)))
    return []


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in an operator's arguments or results."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)


class _Result(NamedTuple):
    """The tensor that an operator returns for arguments of one signature."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


#: Maximum number of operators and signatures whose results are kept.
_MOST_KNOWN = 4096


class StubTensor(FakeTensor):
    """A stub. Operators that return one tensor run without ``FakeTensorMode`` if their signature is known."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return the result of an operator with a stub among its arguments."""
        kwargs = kwargs or {}
        mode = _mode_of(args) if makes_one_tensor(func) and func not in _DECIDED_BY else None
        key = None if mode is None else _signature(func, args, kwargs)
        if mode is None or key is None:
            return _as_stubs(FakeTensor.__torch_dispatch__(func, types, args, kwargs))
        known = mode.results.get(key)
        if known is not None:
            return StubTensor(mode, _elem_of(known, args[0] if returns_view(func) else None), known.device)
        result = _as_stubs(FakeTensor.__torch_dispatch__(func, types, args, kwargs))
        is_stub = isinstance(result, StubTensor) and result.layout == torch.strided and not has_value(result)
        offset = result.storage_offset() if is_stub else 0
        if is_stub and (isinstance(args[0], StubTensor) if returns_view(func) else not offset):
            if len(mode.results) >= _MOST_KNOWN:
                del mode.results[next(iter(mode.results))]
            mode.results[key] = _Result(result.shape, result.stride(), offset, result.dtype, fake_device(result))
        return result


def _elem_of(known: _Result, base: torch.Tensor | None) -> torch.Tensor:
    """Return a meta tensor for a result, which shares the storage of its base if it is a view."""
    if base is None:
        return torch.empty_strided(known.shape, known.stride, dtype=known.dtype, device="meta")
    elem = torch.empty(0, dtype=known.dtype, device="meta")
    return elem.set_(base.untyped_storage(), known.offset, known.shape, known.stride)


def _mode_of(args: Sequence[Any]) -> StubMode | None:
    """Return the mode of the first stub among an operator's positional arguments; None while it runs a kernel."""
    first = next((each for each in tensors_of(args) if isinstance(each, StubTensor)), None)
    mode = None if first is None else first.fake_mode
    return mode if isinstance(mode, StubMode) and not runs_kernel(mode) else None


def _as_stubs(result: Any) -> Any:
    """Make the fake tensors in an operator's result stubs."""
    for tensor in tensors_of(result):
        if type(tensor) is FakeTensor:
            tensor.__class__ = StubTensor
    return result


def _signature(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
    """Return what the metadata of an operator's result depends on; None if it depends on more than metadata."""
    facts: list[Hashable] = [func, torch.get_default_dtype()]
    for name, value in kwargs.items():
        facts.append(name)
        if not _add_facts(value, facts):
            return None
    return tuple(facts) if all(_add_facts(value, facts) for value in args) else None


def _add_facts(value: Any, facts: list[Hashable], *, inside: bool = False) -> bool:
    """Add an argument's facts; return whether they are all that a result's metadata can depend on.

    Args:
        value: The argument.
        facts: Receives the facts.
        inside: Whether it is in a list: numbers there may be factors of sizes.
    """
    if isinstance(value, torch.Tensor):
        kind = type(value)
        if isinstance(value, StubTensor):
            device = fake_device(value)
        elif kind is torch.Tensor or kind is torch.nn.Parameter:
            device = value.device
        else:
            return False
        if value.layout != torch.strided or value.dtype.is_complex:
            return False
        # The offset of a view depends on its base's.
        facts.append((kind, value.shape, value.stride(), value.storage_offset(), value.dtype, device))
    elif isinstance(value, (list, tuple)):
        facts.append(len(value))
        return all(_add_facts(item, facts, inside=True) for item in value)
    elif isinstance(value, _PLAIN):
        # With its type: 1, 1.0 and True are equal. A factor that changes in each step determines no shape.
        facts.append((type(value), None if type(value) is float and not inside else value))
    else:
        return False
    return True


_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class StubMode(FakeTensorMode):
    """``FakeTensorMode`` of the stubs; active only while an operator has a stub among its arguments.

    Attributes:
        results: Known results by operator and signature of the arguments.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.results: dict[Hashable, _Result] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operator on fake tensors, or on zeros if only the values of real arguments determine the shape."""
        try:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        except (DynamicOutputShapeException, DataDependentOutputException):
            deciding = deciding_tensors(func, args, dict(kwargs or {}))
            if func not in _DECIDED_BY or any(isinstance(tensor, FakeTensor) for tensor in deciding):
                raise
        data = torch.zeros(args[0].shape, dtype=args[0].dtype, device=args[0].device)
        result = func(data, *args[1:], **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            return self.stub(result.shape, result.stride(), result.dtype, result.device)
        first = self.stub(result[0].shape, result[0].stride(), result[0].dtype, result[0].device)
        return (first, *result[1:])

    def stub(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a tensor without values.

        Args:
            shape: Its shape.
            stride: Its strides, in elements.
            dtype: Its dtype.
            device: The device that it reports.
        """
        with self:
            made: torch.Tensor = _as_stubs(torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device=device))
        return made
