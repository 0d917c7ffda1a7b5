"""Stubs (fake tensors without values), and detection of operators that depend on values.

Stubs are those of ``FakeTensorMode``, with one extension for operators such as ``x[mask]``, the shape of whose result
depends on the values of one argument only. If that argument is real (a mask from the batch) and only the data is a
stub, the shape is found by running the operator on zeros.
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


class StubMode(FakeTensorMode):
    """``FakeTensorMode`` of the stubs; active only while an operator has a stub among its arguments."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

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
            return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device=device)
