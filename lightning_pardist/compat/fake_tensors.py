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
    "UncompiledMode",
]

_STUBS = "values that a pipeline stage does not have"
_FAKE = "look for it in torch.fx.experimental or torch.export"
_FOLLOWED = "finding out which values depend on which"
_COUNTED = "counting bytes and operators of a step that is planned"
NAMES = (
    Private("torch._subclasses.fake_tensor.DataDependentOutputException", _STUBS, _FAKE),
    Private("torch._subclasses.fake_tensor.DynamicOutputShapeException", _STUBS, _FAKE),
    Private("torch._subclasses.fake_tensor.FakeTensor", _STUBS, _FAKE),
    Private("torch._subclasses.fake_tensor.FakeTensorMode", _STUBS, _FAKE),
    Private("torch.utils._python_dispatch.TorchDispatchMode", _FOLLOWED, "look for it in torch.overrides"),
    Private("torch._ops.OpOverload._schema", "knowing which arguments an operator writes to",
            "torch.library.get_kernel or the operator's name"),
    Private("torch.ops.aten._to_copy", _FOLLOWED, "the operator that Tensor.to() calls"),
    Private("torch.utils._python_dispatch._disable_current_modes", _COUNTED, "no_dispatch() of FakeTensorMode"),
    Private("torch.utils._python_dispatch.is_traceable_wrapper_subclass", _COUNTED, "isinstance(tensor, DTensor)"),
    Private("torch.ops.aten._unsafe_view", _COUNTED, "the operator behind matmul() that shares memory unsaid"),
    Private("torch.ops.aten._local_scalar_dense", "answering .item() of a fake tensor", "what Tensor.item() calls"),
    Private("torch.utils._python_dispatch.TorchDispatchMode._should_skip_dynamo", _COUNTED, "leave it out"),
    Private("torch.ops.aten._unique2", _COUNTED, "the operator that Tensor.unique() calls"),
    Private("torch.ops.aten._index_put_impl_", _COUNTED, "the operator behind backward of indexing"),
    Private("torch.ops.aten._pack_padded_sequence", _STUBS, "the operator that pack_padded_sequence() calls"),
)  # fmt: skip


class UncompiledMode(TorchDispatchMode):
    """A mode for code that is not compiled: torch.compile is not told so again at each operator, which takes long."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


to_copy: Any = torch.ops.aten._to_copy.default
local_scalar: Any = torch.ops.aten._local_scalar_dense.default
rnn_layer: Any = torch.ops.aten.mkldnn_rnn_layer.default
unique_values: Any = torch.ops.aten._unique2.default
index_put_impl: Any = torch.ops.aten._index_put_impl_.default
unsafe_view: Any = torch.ops.aten._unsafe_view.default
pack_padded_sequence: Any = torch.ops.aten._pack_padded_sequence.default


def enter_once() -> None:
    """Enter a mode for fake tensors before any operator is skipped.

    A build with CUDA, without a device that can be used, puts a guard in place of CUDA's at the first entry. torch 2.11
    crashes if operators of a training step were skipped before.
    """
    with FakeTensorMode():
        pass


def schema_of(operator: Any) -> Any:
    """An operator's arguments and results, and which it writes to."""
    return operator._schema


def no_modes() -> Any:
    """A context in which operators run as if no dispatch mode were on."""
    return torch.utils._python_dispatch._disable_current_modes()


def storage_key(tensor: torch.Tensor) -> int:
    """A number that the living views of one storage share."""
    return key_of(tensor.untyped_storage())


def key_of(storage: torch.UntypedStorage) -> int:
    """The same number, of the storage itself."""
    return int(storage._cdata)


def is_inplace_view(operator: Any) -> bool:
    """Whether an operator changes a tensor's size or strides in place, and none of its values."""
    return torch.Tag.inplace_view in operator.tags


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor wraps others, as a DTensor does: it has the size of the whole, and no memory of its own."""
    if type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter:
        return False
    found: bool = torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor)
    return found
