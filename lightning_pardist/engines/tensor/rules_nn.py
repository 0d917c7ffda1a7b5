"""Sharding rules: norms, attention, embeddings and losses."""

from __future__ import annotations

import inspect
import math
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_pardist.compat import pytree
from lightning_pardist.compat.tensors import assert_async
from lightning_pardist.engines.tensor.calls import Call, Need, NoRule, Operand, Outcome, rule
from lightning_pardist.engines.tensor.layout import Layout
from lightning_pardist.engines.tensor.mha_arguments import MHA_PROJECTIONS, added_mask, project
from lightning_pardist.engines.tensor.regions import PlainFunction, TensorGroup
from lightning_pardist.engines.tensor.rng import rank_specific_rng
from lightning_pardist.engines.tensor.rules_context import context_attention, context_loss, context_multi_head
from lightning_pardist.engines.tensor.rules_elementwise import keep_all


@rule("layer_norm", "rms_norm")
def layer_norm(call: Call) -> Outcome:
    """Shard a norm over the last dims, which must not be sharded."""
    x, shape = call.arg(0, "input"), call.arg(1, "normalized_shape")
    if x.layout is None or x.layout.dim >= x.ndim - len(shape):
        raise NoRule("normalized over the split dim", [x] if x.layout else None)
    args, kwargs = keep_all(call)
    return Outcome(args, kwargs, out=x.layout)


@rule("batch_norm", "instance_norm")
def batch_norm(call: Call) -> Outcome:
    """Shard by channels; running statistics are sharded with the channels."""
    names = ("input", "running_mean", "running_var", "weight", "bias")
    tensors = [call.arg(position, name) for position, name in enumerate(names)]
    if call.name == "batch_norm":
        training = call.arg(5, "training", False)
    else:
        training = call.arg(5, "use_input_stats", True)
    x = tensors[0]
    if x.layout is None or x.layout.dim != 1:
        raise NoRule("split along another dim than the channels")
    if training and not call.planning and any(stat is not None and stat.layout is None for stat in tensors[1:3]):
        raise NoRule("running statistics are whole")
    part = x.layout.at(0)
    needs = {
        name: None if value is None else value.part(part) for name, value in zip(names[1:], tensors[1:], strict=True)
    }
    rest = {name: value for name, value in call.kwargs.items() if name not in names}
    return Outcome(
        (x.keep(), needs["running_mean"], needs["running_var"], needs["weight"], needs["bias"], *call.args[5:]),
        rest,
        out=x.layout,
    )


@rule("group_norm")
def group_norm(call: Call) -> Outcome:
    """Shard by channels, with full groups on every rank."""
    x, groups = call.arg(0, "input"), call.arg(1, "num_groups")
    if x.layout is None or x.layout.dim != 1 or x.layout.ends or groups % (call.size * x.layout.segments):
        raise NoRule("groups cut through the parts")
    part = x.layout.at(0)
    weight, bias = call.arg(2, "weight"), call.arg(3, "bias")
    return Outcome(
        (
            x.keep(),
            groups // call.size,
            None if weight is None else weight.part(part),
            None if bias is None else bias.part(part),
            call.arg(4, "eps", 1e-5),
        ),
        out=x.layout,
    )


@rule("prelu")
def prelu(call: Call) -> Outcome:
    """Shard ``prelu``: one slope for all channels, or one for each, sharded with the channels."""
    x, weight = call.arg(0, "input"), call.arg(1, "weight")
    if x.layout is None:
        raise NoRule("slopes are split, and the input is not", [weight])
    of_channels = math.prod(weight.shape) > 1 and x.layout.dim == min(1, x.ndim - 1)
    if not of_channels and weight.layout is not None:
        raise NoRule("slopes are split in another way than the input", [weight])
    need = weight.part(x.layout.at(0)) if of_channels else weight.whole()
    return Outcome((x.keep(), need), out=x.layout)


@rule("scaled_dot_product_attention")
def attention(call: Call) -> Outcome:
    """Shard by heads or samples; replicated keys and values are sliced, and so is a mask that has a heads dim."""
    if call.context:
        return context_attention(call)
    query, key, value = (call.arg(position, name) for position, name in enumerate(("query", "key", "value")))
    mask, dropout = call.arg(3, "attn_mask"), call.arg(4, "dropout_p", 0.0)
    layout = query.layout
    if layout is None:
        raise NoRule("queries are whole", [op for op in (key, value, mask) if op is not None and op.layout is not None])
    if layout.dim >= query.ndim - 2 or (layout.segments > 1 and key.shape[layout.dim] != query.shape[layout.dim]):
        raise NoRule("queries split within a head", [query])
    odd = [operand for operand in (key, value) if operand.layout not in (None, layout)]
    if odd:
        raise NoRule("keys or values split within a head", odd)
    repeats = query.shape[layout.dim] // key.shape[layout.dim]
    needs = [query.keep()]
    for operand in (key, value):
        # Fewer key heads than ranks: repeat them for the query heads, then slice.
        few = operand.layout is None and repeats > 1
        needs.append(operand.whole() if few else operand.part(layout))
    mask_need = None
    if mask is not None:
        dim = layout.dim - (query.ndim - mask.ndim)
        mask_need = mask.whole() if dim < 0 or mask.shape[dim] == 1 else mask.part(Layout(dim, layout.segments))
    rest = {name: item for name, item in call.kwargs.items() if name not in ("query", "key", "value", "attn_mask")}

    def run(group: TensorGroup, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        few = repeats > 1 and key.layout is None
        if few:
            k = layout.take(k.repeat_interleave(repeats, layout.dim), group.rank, group.size)
        if repeats > 1 and value.layout is None:
            v = layout.take(v.repeat_interleave(repeats, layout.dim), group.rank, group.size)
        if few:
            kwargs = {**kwargs, "enable_gqa": False}
        return call.func(q, k, v, *args, **kwargs)

    if (key.layout is None) != (value.layout is None) and repeats > 1:
        raise NoRule("keys and values split in different ways", [key, value])
    return Outcome((*needs, mask_need, *call.args[4:]), rest, out=layout, run=run, random=bool(dropout))


@rule("embedding")
def embedding(call: Call) -> Outcome:
    """Shard by vocabulary: each rank looks up the rows that it holds, and a sum over ranks adds the others."""
    ids, weight = call.arg(0, "input"), call.arg(1, "weight")
    padding, max_norm = call.arg(2, "padding_idx"), call.arg(3, "max_norm")
    if ids.layout is not None and call.arg(5, "scale_grad_by_freq", False):
        raise NoRule("frequencies of split indices")
    if weight.layout is None and max_norm is None:
        args, kwargs = keep_all(call)
        return Outcome(args, kwargs, out=ids.layout)
    if ids.layout is not None or max_norm is not None:
        raise NoRule("indices are split, or the weight is renormalized")
    layout = weight.layout
    if layout.dim == 1:
        args, kwargs = keep_all(call)
        return Outcome(args, kwargs, out=Layout(ids.ndim, layout.segments))
    if layout.segments > 1:
        raise NoRule("vocabulary in segments")
    rows = weight.shape[0] // call.size
    options = {
        "scale_grad_by_freq": call.arg(5, "scale_grad_by_freq", False),
        "sparse": call.arg(6, "sparse", False),
    }

    def run(group: TensorGroup, ids: Tensor, weight: Tensor) -> Tensor:
        check_range(ids, total, "index out of range in self")
        first = group.rank * rows
        elsewhere = (ids < first) | (ids >= first + rows)
        index = _local_padding(padding, total, first, rows)
        found = F.embedding((ids - first).masked_fill(elsewhere, 0), weight, index, **options)
        return found.masked_fill(elsewhere.unsqueeze(-1), 0.0)

    total = weight.shape[0]
    return Outcome((ids.whole(), weight.keep()), reduce="sum", run=run)


def _local_padding(padding: int | None, total: int, first: int, rows: int) -> int | None:
    if padding is None:
        return None
    index = padding % total - first
    return index if 0 <= index < rows else None


@rule("cross_entropy")
def cross_entropy(call: Call) -> Outcome:
    """Shard ``cross_entropy`` of class-sharded logits without a gather (Megatron-LM, arXiv 1909.08053, section 3)."""
    names = ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    defaults = (None, None, -100, None, "mean", 0.0)
    weight, size_average, ignored, reduce, reduction, smoothing = (
        call.arg(2 + position, name, default)
        for position, (name, default) in enumerate(zip(names, defaults, strict=True))
    )
    logits, target = call.arg(0, "input"), call.arg(1, "target")
    classes = 1 if logits.ndim > 1 else 0
    if call.context:
        return context_loss(call)
    if logits.layout != Layout(classes) or target.layout is not None:
        raise NoRule("split along another dim than the classes")
    if weight is not None or size_average is not None or reduce is not None or target.dtype.is_floating_point:
        raise NoRule("class weights or probabilities as targets")

    def run(group: TensorGroup, logits: Tensor, target: Tensor) -> Tensor:
        dtype = torch.float32 if torch.is_autocast_enabled(logits.device.type) else logits.dtype
        losses, counted = split_cross_entropy(group, logits.movedim(classes, -1), target, ignored, smoothing)
        if reduction == "mean":
            losses = losses.sum() / counted.sum()
        elif reduction == "sum":
            losses = losses.sum()
        return losses.to(dtype)

    samples = math.prod(logits.shape) // logits.shape[classes]
    return Outcome(
        (logits.keep(), target.whole()),
        run=run,
        collectives=(("all_gather", (4 if smoothing else 3) * call.size * samples),),
    )


def split_cross_entropy(
    group: TensorGroup, logits: Tensor, target: Tensor, ignored: int, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Return the loss of each sample from logits sharded along the last dim. Collective over the tensor group.

    Args:
        group: Tensor ranks.
        logits: Local shard, shape ``[..., classes / size]``.
        target: Class of each sample, shape ``[...]``.
        ignored: Target value of samples that do not count.
        smoothing: Label smoothing, 0 to 1.

    Returns:
        Losses in at least float32, 0 for ignored samples, and a mask of the samples that count.
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    counted = target != ignored
    check_range(target.masked_fill(~counted, 0), logits.shape[-1] * group.size, "a target is out of bounds")

    def of_rows(logits: Tensor, target: Tensor) -> Tensor:
        found: Tensor = _SplitCrossEntropy.run(logits, target, group, smoothing)
        return found

    losses = group.apply_rowwise(of_rows, logits, target)
    return losses.masked_fill(~counted, 0.0), counted


def check_range(index: Tensor, size: int, problem: str) -> None:
    """Check indices as a single process does: one outside of all shards is an error, not a row of zeros.

    Raises:
        IndexError: If an index is not in ``range(size)``, on CPU; other devices fail on their own, later.
    """
    if not index.numel():
        return
    lowest, highest = torch.aminmax(index)
    if index.device.type == "cpu":
        if lowest < 0 or highest >= size:
            raise IndexError(f"{problem}: {int(lowest)} to {int(highest)} where 0 to {size - 1} is possible.")
    else:
        assert_async((lowest >= 0) & (highest < size))


class _SplitCrossEntropy(PlainFunction):
    """Cross entropy of sharded logits with one all-gather: each rank's maximum, sum of exponentials and target logit.

    Composed of differentiable operators, it would need twice as many passes over the logits, which are the largest
    activations of a language model.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: TensorGroup, smoothing: float) -> Tensor:
        size = logits.shape[-1]
        index = target - group.rank * size
        here = (index >= 0) & (index < size)
        index = index.masked_fill_(~here, 0).unsqueeze(-1)
        # Finite, so that a rank whose classes are all masked out contributes nothing.
        highest = logits.amax(-1).clamp_(min=torch.finfo(logits.dtype).min)
        exponentials = logits - highest.unsqueeze(-1)
        told = [highest, exponentials.gather(-1, index).squeeze(-1).masked_fill_(~here, 0.0)]
        if smoothing:
            told.append(exponentials.sum(-1))
        told.append(exponentials.exp_().sum(-1))
        everyone = torch.stack(group.all_gather(torch.stack(told)))
        # All values below are relative to the largest logit of all ranks: large terms cancel before rounding.
        heights = everyone[:, 0] - everyone[:, 0].amax(0)
        log_sum = (everyone[:, -1] * heights.exp()).sum(0).log_()
        ctx.save_for_backward(exponentials, (heights[group.rank] - log_sum).exp_(), index, here)
        ctx.smoothing, ctx.classes = smoothing, size * group.size
        owner = (target // size).clamp_(0, group.size - 1).unsqueeze(0)
        losses = log_sum - (everyone[:, 1].sum(0) + heights.gather(0, owner).squeeze(0))
        if smoothing:
            spread = (everyone[:, 2] + size * (heights - log_sum)).sum(0)
            losses = (1 - smoothing) * losses - smoothing / ctx.classes * spread
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        exponentials, scale, index, here = ctx.saved_tensors
        (grad,) = grads
        result = exponentials * (scale * grad).unsqueeze(-1)
        if ctx.smoothing:
            result -= ctx.smoothing / ctx.classes * grad.unsqueeze(-1)
        result.scatter_add_(-1, index, ((ctx.smoothing - 1) * grad * here).unsqueeze(-1))
        return result, None, None, None


@rule("multi_head_attention_forward")
def multi_head_attention(call: Call) -> Outcome:
    """Shard ``nn.MultiheadAttention``: input projections by heads, the output projection row-wise."""
    bound = inspect.signature(F.multi_head_attention_forward).bind(*call.args, **call.kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    if call.context:
        return context_multi_head(call, given)
    projections = [given[name] for name in MHA_PROJECTIONS if given[name] is not None]
    if given["bias_k"] is not None or given["add_zero_attn"] or given["static_k"] is not None:
        raise NoRule("extra keys", projections)
    if given["num_heads"] % call.size:
        raise NoRule(f"{given['num_heads']} heads on {call.size} ranks", projections)
    inputs = [
        op
        for name, op in given.items()
        if isinstance(op, Operand) and name not in mha_layouts(True) | mha_layouts(False)
    ]
    if any(operand.layout is not None for operand in inputs) and not call.sequence:
        raise NoRule("inputs are split", [operand for operand in inputs if operand.layout is not None])
    separate = given["use_separate_proj_weight"]
    for name, layout in mha_layouts(separate).items():
        if given[name] is not None and given[name].layout != layout:
            raise NoRule("projections are not split by heads", projections)

    def need(operand: Operand) -> Need:
        if operand in inputs and operand.layout is not None:
            return Need(operand, "gather", None)
        return operand.whole() if operand.layout is None else operand.keep()

    needs = {name: pytree.tree_map_only(Operand, need, value) for name, value in given.items()}
    if given["out_proj_bias"] is not None:
        needs["out_proj_bias"] = Need(given["out_proj_bias"], "raw", None)
    samples = math.prod(given["query"].shape)
    return Outcome((), needs, out=[None, None], run=_attend, collectives=(("all_reduce", samples),))


def mha_layouts(separate: bool) -> dict[str, Layout]:
    """Return the parameter layouts of an ``nn.MultiheadAttention`` that is sharded by heads."""
    layouts = {"in_proj_bias": Layout(0, 3), "out_proj_weight": Layout(1)}
    if separate:
        layouts.update({name: Layout(0) for name in MHA_PROJECTIONS[1:4]})
    else:
        layouts["in_proj_weight"] = Layout(0, 3)
    return layouts


def _attend(group: TensorGroup, **given: Any) -> tuple[Tensor, Tensor | None]:
    batched = given["query"].dim() == 3
    query, key, value = (given[name] if batched else given[name].unsqueeze(1) for name in ("query", "key", "value"))
    heads = given["num_heads"] // group.size
    q, k, v = (
        part.reshape(part.shape[0], part.shape[1], heads, -1).permute(1, 2, 0, 3)
        for part in project(query, key, value, given)
    )
    mask = _mha_mask(group, given, q)
    dropout = given["dropout_p"] if given["training"] else 0.0
    weights = None
    with rank_specific_rng(group, q, "multi_head_attention_forward") if dropout > 0 else nullcontext():
        if given["need_weights"]:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            weights = (scores if mask is None else scores + mask).softmax(-1)
            weights = F.dropout(weights, dropout) if dropout else weights
            mixed = weights @ v
        else:
            causal = bool(given["is_causal"]) and mask is None
            mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
    mixed = mixed.permute(2, 0, 1, 3).flatten(2)
    out = group.reduce(F.linear(mixed, given["out_proj_weight"]))
    if given["out_proj_bias"] is not None:
        out = out + given["out_proj_bias"].to(out.dtype)
    if weights is not None:
        weights = group.gather(weights, Layout(1))
        weights = weights.mean(1) if given["average_attn_weights"] else weights
    if batched:
        return out, weights
    return out.squeeze(1), None if weights is None else weights.squeeze(0)


def _mha_mask(group: TensorGroup, given: dict[str, Any], q: Tensor) -> Tensor | None:
    """Return :func:`added_mask` for this rank's heads."""
    total = added_mask(given, q)
    if total is None or total.shape[1] == 1:
        return total
    return Layout(1).take(total, group.rank, group.size)
