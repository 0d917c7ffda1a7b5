"""Sharding rules: elementwise operators, reductions, and operators along one dim."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_pardist.engines.tensor.calls import Call, NoRule, Operand, Outcome, find_rule, map_only, rule
from lightning_pardist.engines.tensor.layout import Layout
from lightning_pardist.engines.tensor.rules_windows import zeros_along_split_dim

#: Elementwise functions of the Python API that lack the pointwise tag among ATen's operators.
_ELEMENTWISE = frozenset([
    "float", "double", "half", "bfloat16", "int", "long", "short", "bool", "to", "type", "type_as", "contiguous",
    "clone", "detach", "requires_grad_", "cpu", "cuda", "hardswish", "logsigmoid", "where", "masked_fill", "relu",
    "relu6", "elu", "selu", "celu", "silu", "mish", "gelu", "prelu_", "softsign", "tanhshrink", "hardtanh",
    "zeros_like", "ones_like", "full_like", "empty_like", "fill", "zero", "copy", "lerp", "square", "reciprocal",
    "nan_to_num", "addcmul", "addcdiv", "hardsigmoid", "softplus", "threshold", "leaky_relu", "bitwise_and",
    "bitwise_or", "bitwise_xor", "bitwise_not", "clip", "clamp", "clamp_min", "clamp_max", "threshold",
    "true_divide", "divide", "multiply", "subtract", "positive", "alias", "get:data", "get:real",
])  # fmt: skip
_RANDOM = frozenset(
    ["dropout", "alpha_dropout", "feature_alpha_dropout", "rand_like", "randn_like", "bernoulli", "rrelu"]
)


@cache
def is_elementwise(name: str) -> bool:
    """Return whether a function of this plain name acts on each element independently, after broadcasting."""
    if name in _ELEMENTWISE or name in _RANDOM:
        return True
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or name in ("frexp", "equal", "max", "min"):
        return False
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())


def lookup(name: str) -> Callable[[Call], Outcome] | None:
    """Return the rule for a plain name, elementwise functions included."""
    return find_rule(name) or (elementwise if is_elementwise(name) else None)


def elementwise(call: Call) -> Outcome:
    """Shard an elementwise operator: operands align from the right, replicated ones are sliced to match."""
    operands = call.operands()
    ndim = max(operand.ndim for operand in operands)
    target: Layout | None = None
    first = operands[0]
    for operand in operands:
        if operand.layout is None:
            continue
        aligned = operand.layout.at(operand.layout.dim + ndim - operand.ndim)
        if target is None:
            target, first = aligned, operand
        elif aligned != target and call.context:
            # The largest operand keeps its layout; an overwritten one always does.
            if operand.numel > first.numel and not (call.inplace and first is operands[0]):
                target, first = aligned, operand
        elif aligned != target:
            # Blame the operand with more segments, which user code never split apart.
            odd = [operand] if aligned.segments >= target.segments else [first]
            raise NoRule(f"operands split along {target.describe()} and {aligned.describe()}", odd)
    if target is None:
        raise NoRule("nothing is split")
    if call.name == "where" and len(operands) + sum(isinstance(arg, (int, float)) for arg in call.args) < 3:
        raise NoRule("indices where a condition holds")
    if call.inplace and operands[0].layout is None:
        raise NoRule("a whole tensor is overwritten with a split one")
    if call.kwargs.get("out") is not None:
        raise NoRule("out= with a split tensor")
    split_dim = target
    _covers(first, [operand.shape[-(ndim - target.dim) :] for operand in operands if operand.ndim >= ndim - target.dim])

    def need(operand: Operand) -> Any:
        dim = split_dim.dim - (ndim - operand.ndim)
        if operand.layout is not None and (not call.context or operand.layout == split_dim.at(dim)):
            return operand.keep()
        if dim < 0 or operand.shape[dim] == 1:
            return operand.gathered()
        return operand.moved(split_dim.at(dim))

    args, kwargs = map_only(Operand, need, (call.args, call.kwargs))
    if call.name in ("type_as", "to", "zeros_like", "ones_like", "empty_like", "full_like") and call.args:
        if not isinstance(call.args[0], Operand) or call.args[0].layout is None:
            raise NoRule("conversion to the type of a split tensor")
        # Only the type of the other operand is used.
        args = (args[0], *map_only(Operand, lambda op: op.keep(), call.args[1:]))
    return Outcome(args, kwargs, out=target, random=_draws(call))


def _covers(split: Operand, others: Sequence[Sequence[int]]) -> None:
    """Check that a sharded dim of size one is not broadcast.

    Args:
        split: The operand whose sharded dim determines the layout of the result.
        others: Sizes of all operands from that dim on.

    Raises:
        NoRule: If another operand is longer along the dim: no rank holds all that its shard of the result needs.
    """
    layout = split.layout
    if layout is not None and any(sizes[0] > split.shape[layout.dim] for sizes in others):
        raise NoRule("a split dim is broadcast")


def _draws(call: Call) -> bool:
    if call.name not in _RANDOM:
        return False
    if call.name == "rrelu":
        return bool(call.arg(3, "training", False))
    return "dropout" not in call.name or bool(call.arg(1, "p", 0.5) and call.arg(2, "training", True))


def normalize_dims(dim: Any, ndim: int) -> list[int] | None:
    """Return dims counted from the front; None for all."""
    if dim is None:
        return None
    dims = [dim] if isinstance(dim, int) else list(dim)
    if not dims:
        return None
    if not all(isinstance(item, int) for item in dims):
        raise NoRule("dims by name")
    return [item % ndim for item in dims]


def keep_all(call: Call) -> tuple[Any, Any]:
    """Return needs that keep sharded operands in their layouts and enter replicated ones into the computation."""
    args, kwargs = map_only(
        Operand, lambda op: op.keep() if op.layout is not None else op.whole(), (call.args, call.kwargs)
    )
    return args, kwargs


@rule("sum", "mean", "nansum")
def sums(call: Call) -> Outcome:
    """Shard a sum or mean: over the sharded dim, local results are reduced over ranks."""
    x = call.only_split()
    if x is not call.args[0]:
        raise NoRule("unusual arguments")
    return _reduction(call, x, call.arg(1, "dim"), call.arg(2, "keepdim", False), addable=True)


@rule("amax", "amin", "prod", "var", "std", "logsumexp", "norm", "vector_norm", "all", "any", "var_mean", "median")
def other_reductions(call: Call) -> Outcome:
    """Shard a reduction over dims other than the sharded one."""
    x = call.only_split()
    position = 2 if call.name in ("norm", "vector_norm") else 1
    dim = call.arg(position, "dim")
    if isinstance(dim, bool):
        raise NoRule("unusual arguments")
    keepdim = call.arg(position + (2 if call.name in ("var", "std", "var_mean") else 1), "keepdim", False)
    outcome = _reduction(call, x, dim, bool(keepdim), addable=False)
    if call.name in ("var_mean", "median"):
        outcome.out = [outcome.out, outcome.out]  # type: ignore[list-item]
    return outcome


@rule("max", "min")
def max_min(call: Call) -> Outcome:
    """Shard ``max`` or ``min``: elementwise of two tensors, or values and indices along a dim."""
    other = call.arg(1, "other")
    if isinstance(other, Operand):
        return elementwise(call)
    x = call.only_split()
    outcome = _reduction(call, x, call.arg(1, "dim"), call.arg(2, "keepdim", False), addable=False)
    outcome.out = [outcome.out, outcome.out]  # type: ignore[list-item]
    return outcome


@rule("argmax", "argmin")
def arg_extreme(call: Call) -> Outcome:
    """Shard ``argmax`` or ``argmin`` along a dim other than the sharded one."""
    x = call.only_split()
    return _reduction(call, x, call.arg(1, "dim"), call.arg(2, "keepdim", False), addable=False)


def _reduction(call: Call, x: Operand, dim: Any, keepdim: bool, *, addable: bool) -> Outcome:
    assert_layout = x.layout
    if assert_layout is None:
        raise NoRule("nothing is split")
    dims = normalize_dims(dim, x.ndim)
    args, kwargs = keep_all(call)
    if dims is None or assert_layout.dim in dims:
        if not addable:
            raise NoRule(f"{call.name} along the split dim")
        if call.name == "mean" and call.context:
            return _mean_of_parts(call, x, dims)
        return Outcome(args, kwargs, reduce="mean" if call.name == "mean" else "sum")
    return Outcome(args, kwargs, out=drop_dims(assert_layout, [] if keepdim else dims))


def _mean_of_parts(call: Call, x: Operand, dims: Sequence[int] | None) -> Outcome:
    """Return a mean over shards that may differ in length: sums are reduced, then divided by the global count."""
    count = x.numel if dims is None else math.prod(x.shape[dim] for dim in dims)
    if not x.dtype.is_floating_point and call.kwargs.get("dtype") is None:
        raise NoRule("a mean of integers")
    args, kwargs = keep_all(call)
    dtype = call.kwargs.get("dtype") or x.dtype

    def run(group: Any, *args: Any, **kwargs: Any) -> Tensor:
        # A sum may overflow a dtype that can hold the mean.
        return torch.sum(*args, **kwargs | {"dtype": torch.promote_types(dtype, torch.float32)})

    def after(result: Tensor) -> Tensor:
        # A tensor: a Python number may be taken as a constant that divides a sum.
        return (result / torch.full((), count, dtype=result.dtype, device=result.device)).to(dtype)

    return Outcome(args, kwargs, reduce="sum", run=run, after=after)


def drop_dims(layout: Layout, dims: Sequence[int]) -> Layout:
    """Return the layout after other dims have been removed."""
    return layout.at(layout.dim - sum(dim < layout.dim for dim in dims))


@rule(
    "softmax", "log_softmax", "softmin", "cumsum", "cumprod", "logcumsumexp", "flip", "sort", "argsort", "topk",
    "cummax", "cummin", "gumbel_softmax_", "normalize", "kthvalue", "roll", "renorm_",
)  # fmt: skip
def along_dim(call: Call) -> Outcome:
    """Shard an operator along one dim that keeps the shape, or changes it along a dim other than the sharded one."""
    x = call.only_split()
    if x is not call.args[0] or x.layout is None:
        raise NoRule("unusual arguments")
    position = {"topk": 2, "normalize": 2, "kthvalue": 2, "roll": 2}.get(call.name, 1)
    name = {"flip": "dims", "roll": "dims"}.get(call.name, "dim")
    default = {"normalize": 1}.get(call.name, -1)
    dim = call.arg(position, name, default)
    if call.name == "flip" and position == 1 and len(call.args) > 2:
        dim = call.args[1:]
    if dim is None or isinstance(dim, bool):
        raise NoRule("no dim given")
    dims = normalize_dims(dim, x.ndim)
    if dims is None or x.layout.dim in dims:
        raise NoRule(f"{call.name} along the split dim")
    args, kwargs = keep_all(call)
    many = call.name in ("sort", "topk", "cummax", "cummin", "kthvalue")
    return Outcome(args, kwargs, out=[x.layout, x.layout] if many else x.layout)


@rule("glu")
def glu(call: Call) -> Outcome:
    """Shard ``glu``, which multiplies the halves of a dim: along the sharded dim it needs two segments."""
    x = call.only_split()
    layout = x.layout
    if layout is None:
        raise NoRule("nothing is split")
    args, kwargs = keep_all(call)
    if call.arg(1, "dim", -1) % x.ndim != layout.dim:
        return Outcome(args, kwargs, out=layout)
    if layout.segments % 2 or layout.ends is not None:
        raise NoRule("halves of the split dim", segments=2 if layout.segments == 1 else None)
    return Outcome(args, kwargs, out=Layout(layout.dim, layout.segments // 2))


@rule("tril", "triu", "diagonal_")
def triangle(call: Call) -> Outcome:
    """Shard operators on the last two dims."""
    return batch_dims_only(call, 2)


def batch_dims_only(call: Call, last: int) -> Outcome:
    """Shard an operator that treats the ``last`` dims jointly and all dims before them independently.

    Raises:
        NoRule: If one of the last dims is sharded.
    """
    x = call.only_split()
    if x.layout is None or x.layout.dim >= x.ndim - last:
        raise NoRule(f"{call.name} along the split dim")
    args, kwargs = keep_all(call)
    return Outcome(args, kwargs, out=x.layout)


_WINDOWS = {"1d": 1, "2d": 2, "3d": 3}


@rule(
    *(f"{kind}_pool{dims}" for kind in ("max", "avg", "adaptive_avg", "lp") for dims in _WINDOWS),
    "pixel_shuffle_", "upsample_nearest2d", "upsample_bilinear2d",
)  # fmt: skip
def pool(call: Call) -> Outcome:
    """Shard pooling windows over the last dims."""
    return batch_dims_only(call, _WINDOWS.get(call.name[-2:], 2))


@rule("interpolate", "upsample")
def interpolate(call: Call) -> Outcome:
    """Shard an interpolation, which covers all dims after the channels."""
    x = call.only_split()
    return batch_dims_only(call, x.ndim - 2)


@rule("pad")
def pad(call: Call) -> Outcome:
    """Shard padding of the last dims, given by two numbers for each."""
    widths = call.arg(1, "pad")
    if not isinstance(widths, (tuple, list)):
        raise NoRule("unusual arguments")
    x = call.only_split()
    if call.context and x is call.args[0] and x.layout is not None and x.layout.dim >= x.ndim - len(widths) // 2:
        return zeros_along_split_dim(call, x, widths)
    return batch_dims_only(call, len(widths) // 2)


@rule("dropout1d", "dropout2d", "dropout3d", "feature_dropout")
def channel_dropout(call: Call) -> Outcome:
    """Shard dropout of whole channels: the input is sharded along the batch or the channels."""
    x = call.only_split()
    if x.layout is None or x.layout.dim > 1:
        raise NoRule("channels dropped along the split dim")
    args, kwargs = keep_all(call)
    return Outcome(args, kwargs, out=x.layout, random=True)
