"""Fake tensors and dispatch modes, which torch documents without a public name, and private operators."""

from __future__ import annotations

import functools
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
_KNOWN = "operators on stubs whose result is known"
_FAKE = "look for it in torch.fx.experimental or torch.export"
_FOLLOWED = "finding out which values depend on which"
_COUNTED = "counting bytes and operators of a step that is planned"
NAMES = (
    Private("torch._subclasses.fake_tensor.DataDependentOutputException", _STUBS, _FAKE),
    Private("torch._subclasses.fake_tensor.DynamicOutputShapeException", _STUBS, _FAKE),
    Private("torch._subclasses.fake_tensor.FakeTensor", _STUBS, _FAKE),
    Private("torch._subclasses.fake_tensor.FakeTensorMode", _STUBS, _FAKE),
    Private("torch._subclasses.fake_tensor.FakeTensor.fake_device", _KNOWN, "Tensor.device", on_instances=True),
    Private("torch._subclasses.fake_tensor.FakeTensor.constant", _KNOWN, "leave it out", on_instances=True),
    Private("torch._subclasses.fake_tensor.FakeTensorMode.in_kernel_invocation", _KNOWN, "leave it out",
            on_instances=True),
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
    """Dispatch mode for eager code that does not disable torch.compile again for each operator, which is slow."""

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
    """Enter a fake tensor mode before any operator is skipped.

    A build with CUDA but without a usable device replaces CUDA's device guard when a mode is first entered. torch 2.11
    crashes if operators of a training step were skipped before.
    """
    with FakeTensorMode():
        pass


def schema_of(operator: Any) -> Any:
    """Return an operator's schema: its arguments and results, and which arguments it writes to."""
    return operator._schema


@functools.lru_cache(maxsize=4096)
def makes_one_tensor(operator: Any) -> bool:
    """Return whether an operator writes to nothing and returns one tensor, with metadata that depend on metadata only.

    Views are among the operators. What the result of an operator of another library depends on is not known.
    """
    schema = getattr(operator, "_schema", None)
    if schema is None or schema.is_mutable or operator.namespace != "aten":
        return False
    if len(schema.returns) != 1 or str(schema.returns[0].type) != "Tensor":
        return False
    values = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
    return not any(tag in operator.tags for tag in values)


@functools.lru_cache(maxsize=4096)
def returns_view(operator: Any) -> bool:
    """Return whether the one tensor that an operator returns shares the memory of its first argument."""
    return operator._schema.returns[0].alias_info is not None


def fake_device(tensor: FakeTensor) -> torch.device:
    """Return the device that a fake tensor reports, without dispatching an operator."""
    return tensor.fake_device


def has_value(tensor: FakeTensor) -> bool:
    """Return whether a fake tensor has a known constant value."""
    return tensor.constant is not None


def runs_kernel(mode: FakeTensorMode) -> bool:
    """Return whether a mode is running a kernel on meta tensors."""
    return mode.in_kernel_invocation


def no_modes() -> Any:
    """Return a context in which operators run as if no dispatch mode were active."""
    return torch.utils._python_dispatch._disable_current_modes()


def storage_key(tensor: torch.Tensor) -> int:
    """Return a key that the live views of one storage share."""
    return key_of(tensor.untyped_storage())


def key_of(storage: torch.UntypedStorage) -> int:
    """Return the same key as :func:`storage_key`, of a storage."""
    return int(storage._cdata)


def is_inplace_view(operator: Any) -> bool:
    """Return whether an operator changes a tensor's size or strides in place, and none of its values."""
    return torch.Tag.inplace_view in operator.tags


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a wrapper subclass, such as DTensor: global size, and no memory of its own."""
    if type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter:
        return False
    found: bool = torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor)
    return found
