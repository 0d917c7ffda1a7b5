"""Access to what autograd nodes record of the forward that created them.

[Note: private names]
Nodes, their names and edges are public (``torch.autograd.graph.Node``). Their saved tensors and the shapes of their
results are attributes with an underscore, ``_saved_*``, ``_raw_saved_*`` and ``_input_metadata``, which torch's
documentation reads in examples without promising anything about them; only this file reads them. A name that a
version lacks reads as None.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import Node

from lightning_pardist.compat.contract import Private
from lightning_pardist.compat.fake_tensors import no_modes

NAMES = (
    Private("torch.autograd.graph.Node._input_metadata", "losses weighted by what they count", "loss_weight='samples'",
            on_instances=True),
    Private("torch._C._autograd.SavedTensor.unpack_hook",
            "telling held tensors from data in a loss, without running hooks",
            "take what needs no gradient as data, as kept() does where the name is gone"),
)  # fmt: skip
_SUFFIX = re.compile(r"Backward\d*$")


def kind_of(node: Node) -> str:
    """Return the name of a node's operation, without overload: ``"NllLoss"``, or ``"AccumulateGrad"`` for a leaf.

    A class derived from ``torch.autograd.Function`` may have the name of an operation: ``"Function.Gather"``.
    """
    name = _SUFFIX.sub("", node.name().rpartition("::")[2])
    return f"Function.{name}" if isinstance(node, FunctionCtx) else name


def inputs_of(node: Node) -> list[Node | None]:
    """Return the nodes that produced the operation's differentiable arguments; None for one that needs no gradient."""
    return [child for child, _ in node.next_functions]


def shape_of(node: Node) -> tuple[int, ...] | None:
    """Return the shape of the operation's first result; None if it is unknown."""
    metadata = getattr(node, "_input_metadata", None)
    try:
        return tuple(int(size) for size in metadata[0].shape) if metadata else None
    except RuntimeError:
        # A nested tensor has no shape.
        return None


def saved(node: Node, name: str) -> Any:
    """Return an argument or result that the operation saved for backward; None if there is none or it was freed.

    Args:
        node: A node whose backward has run (which frees it) or not.
        name: The name in torch's ``derivatives.yaml``.
    """
    try:
        value = getattr(node, f"_saved_{name}", None)
    except RuntimeError:
        # Under manual optimization a loss may be logged after its backward.
        return None
    # Negative dims are stored as unsigned numbers.
    if isinstance(value, list | tuple):
        return type(value)(_signed(each) for each in value)
    return _signed(value)


def kept(node: Node, name: str) -> Any:
    """Return :func:`saved` of a tensor that is in memory; None if a hook would have to fetch or recompute it.

    Under activation checkpointing, reading a saved tensor would run the user's code again.
    """
    try:
        raw = getattr(node, f"_raw_saved_{name}", None)
    except RuntimeError:
        return None
    # If a version does not report hooks, assume that there are some.
    return saved(node, name) if getattr(raw, "unpack_hook", raw) is None and raw is not None else None


def copies_or_adds(node: Node) -> bool:
    """Return whether a write into a part of a tensor (``CopySlices``) copied, added or subtracted its source.

    Autograd only records that something was written. The gradients tell what: those of a sum and a copy are the
    gradient of the result or its negative, or zero where it was overwritten. Waits for the device.

    Args:
        node: A node whose backward has not run.
    """
    sizes = shape_of(node)
    if sizes is None:
        return False
    like = node._input_metadata[0]
    with torch.no_grad(), no_modes():
        ones = torch.ones(sizes, dtype=like.dtype, device=like.device)
        try:
            gradients: tuple[Tensor | None, ...] = node(ones)  # type: ignore[operator]
        except RuntimeError:
            # The graph was freed, or has tensors of another kind.
            return False
        flat = torch.cat([each.detach().reshape(-1).abs() for each in gradients if each is not None])
        return bool(((flat == 0) | (flat == 1)).all())


def _signed(value: Any) -> Any:
    return value - 2**64 if isinstance(value, int) and value >= 2**63 else value


def is_parameter(node: Node) -> bool:
    """Return whether the node is the leaf of an ``nn.Parameter``."""
    return isinstance(getattr(node, "variable", None), nn.Parameter)


def is_python_number(value: Any) -> bool:
    """Return whether a saved operand is a Python number and not a zero-dim tensor.

    torch saves Python numbers as tensors that do not take part in type promotion, unlike tensors of the same kind.
    """
    if not isinstance(value, Tensor):
        return isinstance(value, int | float)
    if value.dim() or value.dtype not in (torch.int64, torch.float64):
        return False
    narrow = torch.float16 if value.is_floating_point() else torch.int8
    return torch.result_type(torch.zeros((), dtype=narrow, device=value.device), value) == narrow


def scalar(value: Any) -> float | None:
    """Return the value of a zero-dim operand; None if it has dims, or is of a tensor subclass without values.

    Reading a value on a device waits for the device.
    """
    if not isinstance(value, Tensor):
        return float(value) if isinstance(value, int | float) else None
    if value.dim() or type(value) not in (Tensor, nn.Parameter):
        return None
    # Under a mode, operators receive Python numbers as such, and a mode cannot read the value of a tensor.
    with no_modes():
        return float(value)
