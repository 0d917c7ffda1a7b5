"""Data classes of a recorded run: plain data that is planned with, sent to other ranks and printed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from lightning_pardist.engines.pipeline.nested import Spec


class Value(NamedTuple):
    """One output of one call of a unit, the item that is sent between stages.

    Attributes:
        call: Index of the call in the run.
        leaf: Index of the leaf in the flattened output, followed by the side outputs.
    """

    call: int
    leaf: int


class Escape(NamedTuple):
    """A value that a call made or changed and that is not among its outputs; readers must be in the call's stage."""

    call: int


class Replays(NamedTuple):
    """What a rank runs of a recorded run for each micro-batch.

    Attributes:
        stages: Number of stages.
        units: Calls of units.
        stubs: Calls of earlier stages' units, which return what was received, or stubs.
    """

    stages: int
    units: int
    stubs: int


#: Dependency of a value: an output of a call, an escape, or a parameter by name.
Source = Value | Escape | str


@dataclass(frozen=True)
class TensorLeaf:
    """Metadata of a tensor among a call's outputs.

    Attributes:
        shape: Its shape for the recorded micro-batch.
        stride: Its strides, in elements.
        dtype: Its dtype.
        device_type: ``"cpu"``, ``"cuda"``.
        requires_grad: Whether gradients flow back through it.
        split: How the tensor is split over the ranks of a stage, as returned by :class:`~.replay.TensorParts`; None if
            each rank has the whole tensor.
        of_batch: Whether it was computed from the batch, or may hold a value per sample.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device_type: str
    requires_grad: bool
    split: Any = None
    of_batch: bool = True

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorLeaf:
        """Return the metadata of a tensor."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device.type, tensor.requires_grad)

    def split_by(self, split: Any) -> TensorLeaf:
        """Return the metadata of the tensor split over a stage's ranks, with contiguous strides for the whole."""
        whole = torch.empty(self.shape, device="meta")
        return replace(self, stride=tuple(whole.stride()), split=split)

    @property
    def num_bytes(self) -> int:
        """Size of the tensor as a message, in bytes."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


@dataclass(frozen=True)
class AliasLeaf:
    """An output that is one of the call's inputs, unmodified.

    Attributes:
        index: Position among the flattened ``(args, kwargs)``.
    """

    index: int


@dataclass(frozen=True)
class ConstLeaf:
    """An output that is not a tensor.

    Attributes:
        value: The object itself.
    """

    value: Any


Leaf = TensorLeaf | AliasLeaf | ConstLeaf


@dataclass(frozen=True)
class Attribute:
    """A side output: a value that a call stores in an attribute of the unit or of one of its submodules.

    Attributes:
        module: Name of the module, relative to the unit (``""``: the unit).
        name: Name of the attribute.
        spec: Structure of its value.
        num_leaves: Number of leaves of that structure.
    """

    module: str
    name: str
    spec: Spec
    num_leaves: int


@dataclass(frozen=True)
class Output:
    """Description of a call's outputs, from which a stub returns values of the same structure.

    Attributes:
        spec: Structure of the return value.
        num_returned: Number of leaves of the return value; those of the side outputs follow.
        leaves: All leaves.
        side: Side outputs, in the order of their leaves.
    """

    spec: Spec
    num_returned: int
    leaves: tuple[Leaf, ...]
    side: tuple[Attribute, ...] = ()


@dataclass(frozen=True)
class Read:
    """A read of a tensor's value by free code (``.item()``, ``if``), which cannot run on stubs.

    Attributes:
        position: Number of unit calls before the read.
        needs: Dependencies of the value.
        where: Source line of the user's code.
        explicit: Whether the user's code itself gets a Python value, which may affect control flow, rather than a check
            inside torch or a data-dependent shape.
    """

    position: int
    needs: frozenset[Source]
    where: str
    explicit: bool = True


@dataclass(frozen=True)
class UnitCall:
    """One call of a unit in the recorded run.

    Attributes:
        unit: Name of the unit.
        output: Description of its outputs.
        needs: Its dependencies: outputs of earlier calls, directly or through free operators, and parameters.
        flops: FLOPs of its forward.
        free_flops: FLOPs of the free code before it.
    """

    unit: str
    output: Output
    needs: frozenset[Source]
    flops: int
    free_flops: int


@dataclass(frozen=True)
class ParameterInfo:
    """Metadata of a parameter for planning.

    Attributes:
        names: All its names, starting with that of ``named_parameters``.
        shape: Its shape.
        num_bytes: Its size in bytes.
        unit: The unit that owns it; None if no unit does.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    num_bytes: int
    unit: str | None


@dataclass(frozen=True)
class StepRecord:
    """One recorded run of a training or evaluation step on one micro-batch.

    Attributes:
        calls: Calls of units, in order.
        parameters: Parameters by first name.
        result_needs: Dependencies of the step's result.
        tail_flops: FLOPs of the free code after the last call.
        reads: Reads of tensor values by free code, in order.
        mutated: Outputs that are overwritten in place later in the step.
        unit_names: All units, called or not, in order of registration.
        dynamic: Whether a shape depended on values, so that shapes may differ between micro-batches.
        grad_enabled: Whether the run recorded gradients.
        loss: Value of the loss; None if the step returned none, or one that is not a single number.
        free_parameters: Parameters that free code reads.
        steady_buffers: Buffers of units whose updates do not depend on the batch's values, such as those of a power
            iteration over weights.
        sample_buffers: Buffers of units whose updates depend on the batch's values, such as codebooks that follow
            averages. Statistics of normalization layers are not included.
        writers: Units that write to their arguments in place.
        differentiated: Parameters that the step passes to ``torch.autograd.grad``.
        transformed: A unit that is called inside a ``torch.func`` transform, if any is.
    """

    calls: tuple[UnitCall, ...]
    parameters: dict[str, ParameterInfo]
    result_needs: frozenset[Source]
    tail_flops: int
    reads: tuple[Read, ...]
    mutated: frozenset[Value]
    unit_names: tuple[str, ...]
    dynamic: bool
    grad_enabled: bool
    loss: float | None = None
    free_parameters: frozenset[str] = field(default_factory=frozenset)
    steady_buffers: frozenset[str] = frozenset()
    sample_buffers: frozenset[str] = frozenset()
    writers: frozenset[str] = frozenset()
    differentiated: frozenset[str] = frozenset()
    transformed: str | None = None

    def leaf(self, value: Value) -> Leaf:
        """Return the recorded leaf of a value."""
        return self.calls[value.call].output.leaves[value.leaf]
