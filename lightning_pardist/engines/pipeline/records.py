"""What a recorded run leaves behind: plain data, to be planned with, sent to other ranks and printed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from lightning_pardist.engines.pipeline.nested import Spec


class Value(NamedTuple):
    """One output of one call of a unit: the thing that is sent between stages.

    Attributes:
        call: Index of the call in the run.
        leaf: Index of the leaf in the flattened output, side outputs behind.
    """

    call: int
    leaf: int


class Escape(NamedTuple):
    """Something a call made or changed that is not among its outputs; its readers must share the call's stage."""

    call: int


#: What a value can depend on: outputs of calls, escapes, and parameters by name.
Source = Value | Escape | str


@dataclass(frozen=True)
class TensorLeaf:
    """A tensor among a call's outputs.

    Attributes:
        shape: Its shape for the recorded micro-batch.
        stride: Its strides, in elements.
        dtype: Its dtype.
        device_type: ``"cpu"``, ``"cuda"``.
        requires_grad: Whether gradients flow back through it.
        split: How ranks of one stage have it in parts, in the words of who split it; None where each has all of it.
        of_batch: Whether it was computed from the batch, or may hold something for each sample.
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
        """Describe a tensor."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device.type, tensor.requires_grad)

    def split_by(self, split: Any) -> TensorLeaf:
        """The same tensor of which each rank of a stage has a part, which says nothing of the strides of the whole."""
        whole = torch.empty(self.shape, device="meta")
        return replace(self, stride=tuple(whole.stride()), split=split)

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


@dataclass(frozen=True)
class AliasLeaf:
    """An output that is one of the call's inputs, handed through untouched.

    Attributes:
        index: Position among the flattened ``(args, kwargs)``.
    """

    index: int


@dataclass(frozen=True)
class ConstLeaf:
    """An output that is no tensor.

    Attributes:
        value: The object itself.
    """

    value: Any


Leaf = TensorLeaf | AliasLeaf | ConstLeaf


@dataclass(frozen=True)
class Attribute:
    """A side output: what a call leaves in an attribute of the unit or of a module inside it.

    Attributes:
        module: Name of the module, relative to the unit (``""``: the unit).
        name: Name of the attribute.
        spec: Structure of its value.
        num_leaves: Leaves of that structure.
    """

    module: str
    name: str
    spec: Spec
    num_leaves: int


@dataclass(frozen=True)
class Output:
    """What one call returned, in enough detail for a stub to return the like.

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
    """Free code that looked at the value of a tensor (``.item()``, ``if``), and so cannot run on stubs.

    Attributes:
        position: Number of calls made before.
        needs: What the value depends on.
        where: Source line of the user's code.
        explicit: Whether the user's code itself gets a Python value, which may decide what it does next, rather than a
            check inside of torch or a shape that depends on values.
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
        output: What it returned.
        needs: What it read: outputs of earlier calls, directly or through free operators, and parameters.
        flops: Floating point operations of its forward.
        free_flops: Those of the free code before it.
    """

    unit: str
    output: Output
    needs: frozenset[Source]
    flops: int
    free_flops: int


@dataclass(frozen=True)
class ParameterInfo:
    """A parameter as the plan sees it.

    Attributes:
        names: All names, the first being the one of ``named_parameters``.
        shape: Its shape.
        num_bytes: Its size.
        unit: The unit that owns it; None for one owned by free code.
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
        parameters: By first name.
        result_needs: What the step's result depends on.
        tail_flops: FLOPs of the free code behind the last call.
        reads: Looks at values, in order.
        mutated: Outputs that somebody overwrites in place later on.
        unit_names: All units, called or not, in order of registration.
        dynamic: Whether a shape depended on values, so that shapes may change from one micro-batch to the next.
        grad_enabled: Whether the run recorded gradients.
        loss: Value of the loss, as a check on the replay; None if the step gave none.
        free_parameters: Parameters that free code reads.
        steady_buffers: Buffers of units that change by nothing in the batch's values, such as those of a power
            iteration over weights.
        sample_buffers: Buffers of units that change by the batch's values, such as code books that follow averages.
            The statistics of normalization layers are not among them.
        writers: Units that write to their arguments in place.
        differentiated: Parameters for whose gradients the step itself asks ``torch.autograd.grad``.
        transformed: A unit that is called inside of a transform of ``torch.func``, if any is.
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
        """The recorded leaf of a value."""
        return self.calls[value.call].output.leaves[value.leaf]
