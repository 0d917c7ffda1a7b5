"""What nodes of an autograd graph tell of the forward that made them.

[Note: private names]
Nodes, their names and edges are public (``torch.autograd.graph.Node``). What they saved and the shapes of what they
made are attributes with an underscore, ``_saved_*``, ``_raw_saved_*`` and ``_input_metadata``, which torch's
documentation reads in examples and promises nothing about; they are read here alone. A name that a version lacks reads
as None.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from lightning_pardist.compat.contract import Private
from lightning_pardist.compat.fake_tensors import no_modes

NAMES = (
    Private("torch.autograd.graph.Node._input_metadata", "losses weighed by what they count", "loss_weight='samples'",
            on_instances=True),
    Private("torch._C._autograd.SavedTensor.unpack_hook", "telling held tensors from data in a loss, no hook asked",
            "take what needs no gradient as data, as kept() does where the name is gone"),
)  # fmt: skip
_SUFFIX = re.compile(r"Backward\d*$")


def kind_of(node: Node) -> str:
    """The operation, as ``"NllLoss"``, whatever overload; ``"AccumulateGrad"`` for a leaf."""
    return _SUFFIX.sub("", node.name().rpartition("::")[2])


def inputs_of(node: Node) -> list[Node | None]:
    """The nodes that made the operation's differentiable arguments; None for one that needs no gradient."""
    return [child for child, _ in node.next_functions]


def shape_of(node: Node) -> tuple[int, ...] | None:
    """Shape of the operation's first result; None if it is not known."""
    metadata = getattr(node, "_input_metadata", None)
    try:
        return tuple(int(size) for size in metadata[0].shape) if metadata else None
    except RuntimeError:
        # A nested tensor has no shape.
        return None


def saved(node: Node, name: str) -> Any:
    """An argument or result that the operation saved for backward; None if it saved none of that name, or has freed it.

    Args:
        node: Run backward (and freed by that) or not.
        name: As in torch's ``derivatives.yaml``.
    """
    try:
        value = getattr(node, f"_saved_{name}", None)
    except RuntimeError:
        # A manual step may log a loss behind its backward.
        return None
    # Dims counted from the end come as unsigned numbers.
    if isinstance(value, list | tuple):
        return type(value)(_signed(each) for each in value)
    return _signed(value)


def kept(node: Node, name: str) -> Any:
    """As :func:`saved`, of a tensor that lies there; None of one that a hook would have to fetch or compute again.

    Under activation checkpointing a look at what was saved runs the user's code once more.
    """
    try:
        raw = getattr(node, f"_raw_saved_{name}", None)
    except RuntimeError:
        return None
    # Where a version does not tell of hooks, there may be some.
    return saved(node, name) if getattr(raw, "unpack_hook", raw) is None and raw is not None else None


def _signed(value: Any) -> Any:
    return value - 2**64 if isinstance(value, int) and value >= 2**63 else value


def is_parameter(node: Node) -> bool:
    """Whether the node is the leaf of an ``nn.Parameter``."""
    return isinstance(getattr(node, "variable", None), nn.Parameter)


def is_python_number(value: Any) -> bool:
    """Whether an operand that was saved is a number of Python's, and not a tensor of no dims.

    torch saves numbers as tensors, which yield to any other tensor's dtype, as tensors of one kind do not.
    """
    if not isinstance(value, Tensor):
        return isinstance(value, int | float)
    if value.dim() or value.dtype not in (torch.int64, torch.float64):
        return False
    narrow = torch.float16 if value.is_floating_point() else torch.int8
    return torch.result_type(torch.zeros((), dtype=narrow, device=value.device), value) == narrow


def scalar(value: Any) -> float | None:
    """The number that an operand of no dims holds; None for one with dims, or of a class of its own, without values.

    Reading it waits for the device, if the operand is there.
    """
    if not isinstance(value, Tensor):
        return float(value) if isinstance(value, int | float) else None
    if value.dim() or type(value) not in (Tensor, nn.Parameter):
        return None
    # Modes get numbers of Python's as such, and cannot read them off a tensor.
    with no_modes():
        return float(value)
