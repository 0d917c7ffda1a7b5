"""Detect losses that compare samples of a batch with each other, which cannot be computed on parts of the batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set

from torch import Tensor
from torch.autograd.graph import Node

from lightning_pardist.compat.autograd_graph import (
    inputs_of,
    is_python_number,
    kept,
    kind_of,
    saved,
    scalar,
    shape_of,
)
from lightning_pardist.engines.common.batch_dim import (
    ADDITIONS,
    CONSTANT,
    ELEMENTWISE,
    LOOK_UPS,
    REDUCED,
    REDUCTIONS,
    SAME,
    STATISTICS,
    BatchDims,
    GatheredResults,
)
from lightning_pardist.engines.common.divisor_counts import divisors_inside
from lightning_pardist.engines.common.held_tensors import is_held
from lightning_pardist.engines.common.masked_sums import SMALL, elements, mask_of

_SCATTERS = {"IndexAdd", "ScatterAdd", "ScatterReduce"}
#: Operations that are additive over parts of a batch.
_ADDING = (ADDITIONS | SAME | {"Sum"}) - {"Cat", "Stack", "Index"}
#: Operations that couple all elements along a dim.
_OVER_DIM = {"Topk", "Sort", "Kthvalue", "Softmax", "LogSoftmax", "Cumsum", "Cumprod", "Logcumsumexp"}
#: Products of two vectors, and the names of their saved operands.
_DOTS = {"Dot": ("self", "tensor"), "Vdot": ("self", "other")}
#: Operations that may combine each sample with a result of all samples.
_COMBINING = {"Add", "Sub", "Rsub", "Mul", "Div"}
#: Maximum number of operations between such a result and the reduction over samples.
_SHORT = 6
_SHARES = "a sum over samples with weights that add up to 1"


def couplings(loss: Tensor, *, samples: int | None, gathers: bool = False) -> Iterator[str]:
    """Find places in the graph where samples of a batch are compared with each other, as in a contrastive loss.

    Args:
        loss: A tensor that requires a gradient.
        samples: Number of samples in the batch.
        gathers: Whether a gather in the step returns all samples that those of the batch are compared with.

    Yields:
        A description of each place, for a message.
    """
    if loss.grad_fn is None or not samples or samples < 2:
        return
    all_dims = BatchDims(samples)
    gathered = GatheredResults(all_dims)
    waiting: list[Node] = [loss.grad_fn]
    # The node above each visited node, on the path by which it was first reached.
    above: dict[Node, Node | None] = {loss.grad_fn: None}
    # Nodes that follow the last layer.
    outside = {loss.grad_fn}
    while waiting:
        node = waiting.pop()
        kind = kind_of(node)
        inputs = [child for child in inputs_of(node) if child is not None]
        if ("Gather" in kind and kind not in LOOK_UPS) or (gathers and gathered.has(node)):
            continue
        sizes = shape_of(node)
        with_all = gathers and any(map(gathered.has, inputs))
        if kind in ("Mm", "Cdist") and sizes is not None and len(inputs) == 2 == len(sizes) and not with_all:
            dims = BatchDims(samples)
            left, right = (dims.of(child) for child in inputs)
            if (left == 0 and right == (1 if kind == "Mm" else 0)) or (kind == "Mm" and left == 1 and right == 0):
                yield f"a {'product' if kind == 'Mm' else 'distance'} between samples, of shape {list(sizes)}"
        if reason := _mixed(node, kind, inputs, samples):
            yield reason
        combines = kind in _COMBINING and len(inputs) == 2 and node in outside and not with_all
        if combines and _combines(node, kind, inputs, all_dims, above, samples):
            yield f"{kind} of each sample and a result of all samples"
        if kind in _SCATTERS and not _only_adds_up(node, above) and _adds_by_class(node, samples):
            yield f"{kind} sums samples by class, and the loss is not additive in the result"
        is_outside = node in outside and not any(_is_weight(child, all_dims) for child in inputs)
        for child in inputs:
            if child not in above:
                above[child] = node
                waiting.append(child)
                if is_outside:
                    outside.add(child)


def _mixed(node: Node, kind: str, inputs: Sequence[Node], samples: int) -> str:
    """Return a description of how an operation couples samples; empty if it does not."""
    if kind in _OVER_DIM and inputs:
        sizes = shape_of(inputs[0]) or ()
        dim = int(saved(node, "dim") or 0) % len(sizes) if sizes else 0
        # A shorter dim holds the features of one sample, in a loss that is computed sample by sample.
        over_samples = sizes and sizes[dim] >= samples and BatchDims(samples).of(inputs[0]) == dim
        return f"{kind} over the samples" if over_samples else ""
    if kind == "Sum" and inputs:
        weighed = next((each for each in elements(node) if mask_of(each) is not None), None)
        weights = None if weighed is None else mask_of(weighed)
        if weighed is None or weights is None or samples not in weights.shape:
            return ""
        # Each weight counts for the features that it multiplies.
        times = math.prod(shape_of(weighed) or ()) / max(weights.numel(), 1)
        return _SHARES if _add_up_to_one(weights, times) else ""
    if kind in _DOTS:
        # The operand that needs no gradient is saved.
        operands = (kept(node, name) for name in _DOTS[kind])
        weights = next((each for each in operands if isinstance(each, Tensor)), None)
        return _SHARES if weights is not None and len(weights) % samples == 0 and _add_up_to_one(weights) else ""
    return ""


def _is_weight(node: Node, dims: BatchDims) -> bool:
    return math.prod(shape_of(node) or ()) > 1 and dims.of(node) == CONSTANT


def _combines(
    node: Node,
    kind: str,
    inputs: Sequence[Node],
    dims: BatchDims,
    above: Mapping[Node, Node | None],
    samples: int,
) -> bool:
    """Return whether an operation combines each sample with a result of all samples, as in ``losses / losses.sum()``.

    Not counted are sums of a mean and losses that are only added up afterwards.
    """
    for one, other in (inputs, inputs[::-1]):
        if dims.of(one) == REDUCED and dims.of(other) >= 0 and _is_of_all(one, dims, _SHORT):
            added_up = kind not in ("Mul", "Div") and _only_adds_up(node, above, _ADDING | {"Mean"})
            # A sum over samples that is added to each sample counts as often as there are samples.
            return not added_up or _is_sum(one, dims, samples)
    return False


def _is_sum(node: Node, dims: BatchDims, samples: int) -> bool:
    """Return whether a result is a sum over samples without weights, which nothing has multiplied or divided."""
    while kind_of(node) in SAME | {"Neg"}:
        (node,) = _operands(node)
    if kind_of(node) != "Sum":
        return False
    (summed,) = _operands(node)
    at, sizes = dims.of(summed), shape_of(summed) or ()
    is_over_samples = 0 <= at < len(sizes) and sizes[at] == samples
    weighted = any(divisors_inside(node)) or any(mask_of(each) is not None for each in elements(node))
    return is_over_samples and not weighted


def _operands(node: Node) -> list[Node]:
    return [child for child in inputs_of(node) if child is not None]


def _is_of_all(node: Node, dims: BatchDims, left: int) -> bool:
    """Return whether a result was reduced over samples a few operations before."""
    kind, inputs = kind_of(node), [child for child in inputs_of(node) if child is not None]
    if kind in REDUCTIONS | STATISTICS:
        return bool(inputs) and dims.of(inputs[0]) >= 0
    if not left or kind not in ELEMENTWISE | SAME:
        return False
    return any(dims.of(child) == REDUCED and _is_of_all(child, dims, left - 1) for child in inputs)


def _add_up_to_one(weights: Tensor, times: float = 1.0) -> bool:
    """Return whether weights were divided by their sum; a mask with one item was not."""
    if not weights.is_floating_point() or not 1 < weights.numel() <= SMALL or bool((weights == 1).any()):
        return False
    return math.isclose((scalar(weights.sum()) or 0.0) * times, 1.0, rel_tol=1e-6)


def _only_adds_up(node: Node, above: Mapping[Node, Node | None], adding: Set[str] = _ADDING) -> bool:
    """Return whether the loss is additive in a result: only sums, and products with constants that the module holds."""
    at = above[node]
    while at is not None:
        kind = kind_of(at)
        is_weighed = kind in ("Mul", "Div") and any(_is_constant(kept(at, name)) for name in ("other", "self"))
        if not is_weighed and kind not in adding:
            return False
        at = above[at]
    return True


def _is_constant(factor: object) -> bool:
    return is_python_number(factor) or is_held(factor)


def _adds_by_class(node: Node, samples: int) -> bool:
    """Return whether a scatter sums samples by a key that several of them share, such as a class.

    Not counted as such: sorted indices, indices that group the rows of single samples (edges of a sample's graph),
    indices without duplicates, and scatters that return tokens to their positions.
    """
    source, sizes, index = inputs_of(node)[-1], shape_of(node), kept(node, "index")
    dim = int(saved(node, "dim") or 0) % len(sizes or (1,))
    if source is None or not sizes or not isinstance(index, Tensor) or index.dim() <= dim or index.numel() > SMALL:
        return False
    index = index.movedim(dim, 0).flatten(1)[:, 0] if index.dim() > 1 else index
    places, rows = sizes[dim], len(index)
    if rows % samples or (rows >= places and places % samples == 0) or BatchDims(samples).of(source) != dim:
        return False
    in_order = bool((index[1:] >= index[:-1]).all())
    ends = index.cummax(0).values[:-1] < index.flip(0).cummin(0).values.flip(0)[1:]
    return not in_order and len(index.unique()) < rows and int(ends.sum()) < samples - 1
