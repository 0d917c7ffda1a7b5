"""Tensors without values, and modes that see operators. Documented by torch, and public under no name."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_pardist.compat.contract import Private

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
]

_STUBS = "values that a pipeline stage does not have"
_FAKE = "look for it in torch.fx.experimental or torch.export"
_FOLLOWED = "finding out which values depend on which"
NAMES = (
    Private("torch._subclasses.fake_tensor.DataDependentOutputException", _STUBS, _FAKE),
    Private("torch._subclasses.fake_tensor.DynamicOutputShapeException", _STUBS, _FAKE),
    Private("torch._subclasses.fake_tensor.FakeTensor", _STUBS, _FAKE),
    Private("torch._subclasses.fake_tensor.FakeTensorMode", _STUBS, _FAKE),
    Private("torch.utils._python_dispatch.TorchDispatchMode", _FOLLOWED, "look for it in torch.overrides"),
    Private("torch._ops.OpOverload._schema", "knowing which arguments an operator writes to",
            "torch.library.get_kernel or the operator's name"),
    Private("torch.ops.aten._to_copy", _FOLLOWED, "the operator that Tensor.to() calls"),
    Private("torch.ops.aten._pack_padded_sequence", _STUBS, "the operator that pack_padded_sequence() calls"),
)  # fmt: skip

to_copy: Any = torch.ops.aten._to_copy.default
pack_padded_sequence: Any = torch.ops.aten._pack_padded_sequence.default


def schema_of(operator: Any) -> Any:
    """An operator's arguments and results, and which it writes to."""
    return operator._schema
