"""Sharding rules of context parallelism: attention and losses on tensors that are sharded along the sequence.

Attention masks keep their global meaning. Sharded by heads, every rank computes all rows and columns of its heads, with
the mask as user code made it (Ulysses, arXiv 2309.14509). Sharded by rows, a rank computes the rows of its queries,
with the mask's rows and the keys and values of the whole sequence (as in Llama 3's training, arXiv 2407.21783, section
3.3.2).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_pardist.engines.tensor.calls import Call, Need, NoRule, Operand, Outcome, map_only, rule
from lightning_pardist.engines.tensor.layout import Layout
from lightning_pardist.engines.tensor.mha_arguments import added_mask, project
from lightning_pardist.engines.tensor.regions import TensorGroup
from lightning_pardist.engines.tensor.rng import rank_specific_rng
from lightning_pardist.engines.tensor.rules_elementwise import drop_dims

# --- attention --------------------------------------------------------------------------------------------------


def context_attention(call: Call) -> Outcome:
    """Shard ``scaled_dot_product_attention`` whose queries are sharded: by samples, by heads, or by rows."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    query, key, value, mask, dropout, causal = (call.arg(position, name) for position, name in enumerate(names))
    rest = {name: item for name, item in call.kwargs.items() if name in ("scale", "enable_gqa")}
    settings = {"dropout_p": dropout or 0.0, "is_causal": bool(causal), **rest}
    layout = query.layout
    if layout is None:
        raise NoRule("queries are whole")
    if layout.segments > 1 or {query.ndim, key.ndim, value.ndim} != {query.ndim} or layout.dim == query.ndim - 1:
        raise NoRule("queries split within a head")
    if layout.dim < query.ndim - 2:
        return _by_samples(call, layout, (query, key, value), mask, settings)
    heads = query.ndim - 3
    if heads >= 0 and query.shape[heads] % call.size == 0:
        return _by_heads(call, Layout(heads), (query, key, value), mask, settings)
    return _by_rows(call, (query, key, value), mask, settings)


def _by_samples(
    call: Call, layout: Layout, tensors: tuple[Operand, ...], mask: Operand | None, settings: dict[str, Any]
) -> Outcome:
    if any(operand.shape[layout.dim] != tensors[0].shape[layout.dim] for operand in tensors):
        raise NoRule("numbers of keys and queries differ along the split dim")
    needs = [operand.moved(layout) for operand in tensors]
    return Outcome(
        (*needs, _mask_need(mask, layout, tensors[0].ndim)), settings, out=layout, random=bool(settings["dropout_p"])
    )


def _by_heads(
    call: Call, heads: Layout, tensors: tuple[Operand, ...], mask: Operand | None, settings: dict[str, Any]
) -> Outcome:
    query, rows = tensors[0], tensors[0].layout
    needs, few = [query.moved(heads)], []
    for operand in tensors[1:]:
        count = operand.shape[heads.dim]
        divides = count % call.size == 0
        if not divides and count > 1 and not settings.get("enable_gqa"):
            raise NoRule("keys and queries have different numbers of heads")
        # Fewer key heads than ranks: gather them, and repeat them for the query heads.
        few.append(not divides and bool(settings.get("enable_gqa")))
        needs.append(operand.moved(heads) if divides else operand.gathered())
    count = query.shape[heads.dim]

    def run(group: TensorGroup, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **settings: Any) -> Tensor:
        if any(few):
            k, v = (
                _of_own_heads(part, count, heads, group) if many else part
                for part, many in zip((k, v), few, strict=True)
            )
            settings["enable_gqa"] = not all(few)
        return group.move(call.func(q, k, v, mask, **settings), heads, rows or heads)

    moved = [operand.numel for operand in tensors if operand.layout is not None]
    return Outcome(
        (*needs, _mask_need(mask, heads, query.ndim)), settings, out=rows, run=run, random=bool(settings["dropout_p"]),
        collectives=(("all_to_all", moved[0] // call.size),),
    )  # fmt: skip


def _of_own_heads(part: Tensor, count: int, heads: Layout, group: TensorGroup) -> Tensor:
    repeated = part.repeat_interleave(count // part.shape[heads.dim], heads.dim)
    return heads.take(repeated, group.rank, group.size)


def _by_rows(call: Call, tensors: tuple[Operand, ...], mask: Operand | None, settings: dict[str, Any]) -> Outcome:
    query, key, value = tensors
    rows = query.layout or Layout(query.ndim - 2)
    start, stop = rows.run(query.shape[rows.dim], call.rank, call.size)
    causal = settings.pop("is_causal")

    def run(group: TensorGroup, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **settings: Any) -> Tensor:
        if causal and mask is None:
            mask, k, v = causal_rows(start, stop, k, v)
        result: Tensor = call.func(q, k, v, mask, **settings)
        return result

    needs = (query.keep(), key.gathered(), value.gathered(), _mask_need(mask, rows, query.ndim))
    return Outcome(needs, settings, out=rows, run=run, random=bool(settings["dropout_p"]))


def causal_rows(start: int, stop: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the causal mask of query rows ``start:stop``, and the keys and values that these rows attend to."""
    last = min(stop, k.shape[-2])
    k, v = k[..., :last, :], v[..., :last, :]
    columns = torch.arange(last, device=k.device)
    return columns <= torch.arange(start, stop, device=k.device).unsqueeze(1), k, v


def _mask_need(mask: Operand | None, layout: Layout, ndim: int) -> Need | None:
    if mask is None:
        return None
    dim = layout.dim - (ndim - mask.ndim)
    return mask.gathered() if dim < 0 or mask.shape[dim] == 1 else mask.moved(layout.at(dim))


def context_multi_head(call: Call, given: dict[str, Any]) -> Outcome:
    """Shard ``nn.MultiheadAttention`` whose queries are sharded along the sequence: projections are local to tokens."""
    query, key, value = (given[name] for name in ("query", "key", "value"))
    if given["bias_k"] is not None or given["add_zero_attn"] or given["static_k"] is not None:
        raise NoRule("extra keys")
    layouts = [operand.layout for operand in (query, key, value)]
    if layouts[0] is None or any(layout is not None and (layout.dim, layout.segments) != (0, 1) for layout in layouts):
        raise NoRule("split along another dim than the sequence")
    if key.layout != value.layout:
        raise NoRule("keys and values split in different ways")

    needs = {
        name: item.keep() if item in (query, key, value) and item.layout else map_only(Operand, Operand.gathered, item)
        for name, item in given.items()
    }
    rows = layouts[0]
    start, stop = rows.run(query.shape[0], call.rank, call.size)

    def run(group: TensorGroup, **given: Any) -> tuple[Tensor, Tensor | None]:
        return _attend(group, rows, layouts[1], (start, stop), given)

    weights = None
    if given["need_weights"]:
        weights = rows.at(1 if given["average_attn_weights"] else 2)
        weights = weights if query.ndim == 3 else weights.at(weights.dim - 1)
    sent = ("all_gather", 2 * key.numel) if given["need_weights"] else ("all_to_all", 4 * query.numel // call.size)
    return Outcome((), needs, out=[rows, weights], run=run, collectives=(sent,))


def _attend(
    group: TensorGroup, rows: Layout, columns: Layout | None, span: tuple[int, int], given: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    batched = given["query"].dim() == 3
    query, key, value = (given[name] if batched else given[name].unsqueeze(1) for name in ("query", "key", "value"))
    if given["query"] is given["key"] and given["key"] is given["value"]:
        key = value = query
    count = given["num_heads"]
    q, k, v = (
        part.reshape(part.shape[0], part.shape[1], count, -1).permute(1, 2, 0, 3)
        for part in project(query, key, value, given)
    )
    mask = added_mask(given, q)
    dropout = given["dropout_p"] if given["training"] else 0.0
    causal = bool(given["is_causal"]) and mask is None
    lie, weights = (rows.at(2), None if columns is None else columns.at(2)), None
    with rank_specific_rng(group, q, "multi_head_attention_forward") if dropout > 0 else nullcontext():
        if given["need_weights"] or count % group.size:
            mixed, weights = _mix_rows(group, (q, k, v), lie, mask, dropout, span if causal else None, given)
        else:
            mixed = _mix_heads(group, (q, k, v), lie, mask, dropout, causal)
    out = F.linear(mixed.permute(2, 0, 1, 3).flatten(2), given["out_proj_weight"], given["out_proj_bias"])
    if weights is not None and given["average_attn_weights"]:
        weights = weights.mean(1)
    if batched:
        return out, weights
    return out.squeeze(1), None if weights is None else weights.squeeze(0)


def _mix_heads(
    group: TensorGroup,
    tensors: tuple[Tensor, Tensor, Tensor],
    lie: tuple[Layout, Layout | None],
    mask: Tensor | None,
    dropout: float,
    causal: bool,
) -> Tensor:
    heads, (rows, columns) = Layout(1), lie
    q = group.move(tensors[0], rows, heads)
    k, v = (
        heads.take(part, group.rank, group.size) if columns is None else group.move(part, columns, heads)
        for part in tensors[1:]
    )
    if mask is not None and mask.shape[1] > 1:
        mask = heads.take(mask, group.rank, group.size)
    return group.move(F.scaled_dot_product_attention(q, k, v, mask, dropout, causal), heads, rows)


def _mix_rows(
    group: TensorGroup,
    tensors: tuple[Tensor, Tensor, Tensor],
    lie: tuple[Layout, Layout | None],
    mask: Tensor | None,
    dropout: float,
    causal: tuple[int, int] | None,
    given: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    q, (rows, columns) = tensors[0], lie
    k, v = (part if columns is None else group.gather_into_split(part, columns) for part in tensors[1:])
    if mask is not None and mask.shape[2] > 1:
        mask = rows.take(mask, group.rank, group.size)
    if not given["need_weights"]:
        if causal is not None:
            mask, k, v = causal_rows(*causal, k, v)
        return F.scaled_dot_product_attention(q, k, v, mask, dropout), None
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    weights = (scores if mask is None else scores + mask).softmax(-1)
    weights = F.dropout(weights, dropout) if dropout else weights
    return weights @ v, weights


# --- losses -----------------------------------------------------------------------------------------------------


def context_loss(call: Call) -> Outcome:
    """Shard ``cross_entropy`` and ``nll_loss`` over tokens: partial sums are reduced, then divided by the count."""
    given = _bound(call)
    scores, target, weight = given["input"], given["target"], given["weight"]
    classes = 1 if scores.ndim > 1 else 0
    smoothing = given.get("label_smoothing", 0.0)
    likely = target.dtype.is_floating_point
    if weight is not None and (smoothing or likely):
        raise NoRule("class weights with smoothed or soft targets")
    lie = scores.layout
    if lie is None:
        lie = target.layout if likely else target.layout.at(target.layout.dim + (target.layout.dim >= classes))
    if lie.dim == classes:
        raise NoRule("split along the classes")
    rows = lie if likely else drop_dims(lie, [classes])
    reduction, ignored, whole = given["reduction"], given["ignore_index"], target.layout is None
    samples = scores.numel // scores.shape[classes]
    others = {name: item for name, item in given.items() if name in ("ignore_index", "label_smoothing")}
    needs = (scores.moved(lie), target.moved(rows), None if weight is None else weight.gathered())
    if reduction == "none":
        return Outcome(
            needs[:2],
            {**others, "weight": needs[2], "reduction": "none"},
            out=drop_dims(lie, [classes]),
            run=_run_locally(call),
        )
    counted = Need(target, "raw", None) if whole else needs[1]

    def run(group: TensorGroup, scores: Tensor, target: Tensor, weight: Tensor | None, counted: Tensor) -> Tensor:
        total = group.reduce(call.func(scores, target, weight=weight, reduction="sum", **others))
        if reduction == "sum" or likely:
            return total if reduction == "sum" else total / samples
        count = _counted(counted, weight, ignored, torch.promote_types(total.dtype, torch.float32))
        return (total / (count if whole else group.all_reduce_(count))).to(total.dtype)

    return Outcome((*needs, counted), run=run, collectives=(("all_reduce", 1),))


def _counted(target: Tensor, weight: Tensor | None, ignored: int, dtype: torch.dtype) -> Tensor:
    counts = target != ignored
    if weight is None:
        return counts.sum().to(dtype)
    return (weight.detach()[target.masked_fill(~counts, 0)] * counts).sum().to(dtype)


_ELEMENT_LOSSES = (
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "kl_div", "soft_margin_loss",
    "binary_cross_entropy_with_logits", "poisson_nll_loss", "nll_loss",
)  # fmt: skip


@rule(*_ELEMENT_LOSSES)
def element_loss(call: Call) -> Outcome:
    """Shard elementwise losses: partial sums are reduced, then divided by the global number of elements."""
    if not call.context:
        raise NoRule("no sharding rule")
    if call.name == "nll_loss":
        return context_loss(call)
    given = _bound(call)
    if given.get("weight") is not None and not call.name.startswith("binary"):
        raise NoRule("elements with weights")
    tensors = {name: item for name, item in given.items() if isinstance(item, Operand)}
    shape = torch.broadcast_shapes(*(operand.shape for operand in tensors.values()))
    first = max((operand for operand in tensors.values() if operand.layout), key=lambda operand: operand.numel)
    lie = first.layout.at(first.layout.dim + len(shape) - first.ndim) if first.layout else Layout(0)
    if first.layout and shape[lie.dim] != first.shape[first.layout.dim]:
        raise NoRule("a split dim is broadcast")
    needs = {name: _aligned(operand, lie, len(shape)) for name, operand in tensors.items()}
    plain = {name: item for name, item in given.items() if name not in tensors and item is not None}
    reduction = plain.pop("reduction", "mean")
    if reduction == "none":
        return Outcome((), {**needs, **plain, "reduction": "none"}, out=lie, run=_run_locally(call))
    divisor = {"mean": math.prod(shape), "batchmean": shape[0], "sum": 1}[reduction]

    def run(group: TensorGroup, **given: Any) -> Tensor:
        total = group.reduce(call.func(**given, **plain, reduction="sum"))
        return total if reduction == "sum" else total / divisor

    return Outcome((), needs, run=run, collectives=(("all_reduce", 1),))


def _aligned(operand: Operand, lie: Layout, ndim: int) -> Need:
    dim = lie.dim - (ndim - operand.ndim)
    return operand.gathered() if dim < 0 or operand.shape[dim] == 1 else operand.moved(lie.at(dim))


def _bound(call: Call) -> dict[str, Any]:
    bound = inspect.signature(call.func).bind(*call.args, **call.kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    if given.pop("size_average", None) is not None or given.pop("reduce", None) is not None:
        raise NoRule("the deprecated size_average or reduce")
    given.pop("reduce", None)
    return given


def _run_locally(call: Call) -> Callable[..., Any]:
    """Return a ``run`` that calls the function itself on local shards."""
    return lambda group, *args, **kwargs: call.func(*args, **kwargs)


# --- the rest ---------------------------------------------------------------------------------------------------


@rule("gather", "take_along_dim")
def gather(call: Call) -> Outcome:
    """Shard a gather along a dim that is not the sharded one."""
    if not call.context:
        raise NoRule("no sharding rule")
    gathers = call.name == "gather"
    x = call.arg(0, "input")
    index = call.arg(2 if gathers else 1, "index" if gathers else "indices")
    dim = call.arg(1 if gathers else 2, "dim")
    if not isinstance(dim, int) or not isinstance(index, Operand) or index.ndim != x.ndim:
        raise NoRule("unusual arguments")
    dim %= x.ndim
    layout = x.layout or index.layout
    if layout is None or layout.dim == dim or x.shape[layout.dim] != index.shape[layout.dim]:
        raise NoRule(f"{call.name} along the split dim")
    needs = x.moved(layout), index.moved(layout)
    return Outcome((needs[0], dim, needs[1]) if gathers else (needs[0], needs[1], dim), {}, out=layout)
