"""Tensors without values, and the operators that look at values.

``FakeTensorMode`` does nearly all of it. What it lacks: operators such as ``x[mask]`` whose result's shape depends on
one argument's values only. Where that argument is real (a mask out of the batch) and the stub is merely the data, the
shape is found by running the operator on zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from lightning_pardist.compat.fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    pack_padded_sequence,
)

_aten = torch.ops.aten
#: Operators whose first argument is data and whose shape the arguments at these positions decide.
_DECIDED_BY: dict[Any, tuple[int, ...]] = {
    _aten.index.Tensor: (1,),
    _aten.masked_select.default: (1,),
    pack_padded_sequence: (1,),
}


def deciding_tensors(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments whose values an operator's shape or Python result depends on; empty for ordinary operators.

    Args:
        func: The operator overload.
        args: Its arguments.
        kwargs: Its keyword arguments.
    """
    positions = _DECIDED_BY.get(func)
    if positions is not None:
        found = [tensor for position in positions for tensor in tensors_of(args[position])]
        # Indexing by integers has a shape known beforehand.
        return [t for t in found if t.dtype in (torch.bool, torch.uint8)] if func is _aten.index.Tensor else found
    if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
        return list(tensors_of((args, kwargs)))
    return []


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in an operator's arguments or results."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)


class StubMode(FakeTensorMode):
    """Computes with stubs: shapes only. Active only while an operator has a stub among its arguments."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operator on shapes, or on zeros where only real values decide the shape."""
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
        """A tensor without values.

        Args:
            shape: Its shape.
            stride: Its strides.
            dtype: Its dtype.
            device: Where it pretends to live.
        """
        with self:
            return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device=device)
