"""Detects figures: numbers that a step reduces from all samples of its batch without a gradient, and uses in its loss.

Examples are class weights by frequency in the batch, advantages normalized over it, ``weights / weights.sum()``. If
each rank has a part of the samples, each computes its own figure, and the autograd graph does not show it, since no
gradient passes through it. So the functions that the first step calls are traced from the batch: a result that reduces
over samples is a figure, and so is everything computed from one, until a result with a gradient is computed with it.

[Note: what is no figure]
A sum that a result is divided by is a count, and losses are weighted by counts. The maximum of integers is a length,
and a boolean is a condition. Sorting and cumulative sums along the batch order samples or give their offsets, and do
not change any sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_pardist.engines.common.batch_dim import REDUCED, BatchDims
from lightning_pardist.engines.fsdp.fsdp_units import original_class
from lightning_pardist.engines.pipeline.nested import tensors_in

_SUMS = {"sum", "nansum", "count_nonzero", "bincount"}
_EXTREMES = {"max", "min", "amax", "amin"}
_OVER_DIM = {"softmax", "log_softmax"}
#: Reductions, and the position of their ``dim`` argument.
DIM_AT = dict.fromkeys(
    (*_SUMS, *_EXTREMES, *_OVER_DIM, "mean", "nanmean", "std", "var", "std_mean", "var_mean", "median", "nanmedian")
    + ("prod", "logsumexp"),
    1,
) | dict.fromkeys(("norm", "quantile", "linalg_norm", "linalg_vector_norm"), 2)
_HISTOGRAMS = {"bincount", "histc"}
#: Functions that keep a count a count, and the reciprocal of a count a reciprocal.
_KEEPING = {"clamp", "clamp_min", "clip", "maximum", "max", "to", "float", "double", "long", "type_as", "type", "clone"}
_KEEPING |= {"detach", "squeeze", "unsqueeze", "view", "reshape", "expand", "add", "__add__", "__radd__", "half", "int"}
_KEEPING |= {
    "mul",
    "__mul__",
    "__rmul__",
    "contiguous",
    "bfloat16",
    "cpu",
    "cuda",
    "as_tensor",
    "__get__",
    "item",
    "add_",
    "clamp_",
}
_READING = {"item", "tolist", "__float__", "numpy"}
_DIVISIONS = {"div", "__truediv__", "true_divide", "divide", "div_", "__itruediv__"}
_OVER_IT = {"reciprocal", "__rtruediv__", "__rdiv__", *_DIVISIONS}
_PRODUCTS = {"mul", "__mul__", "__rmul__", "multiply", "mul_", "__imul__"}
_DIFFERENCES = {"sub", "__sub__", "subtract"}
#: Functions that take numbers as sizes and indices.
_PLACING = {"arange", "zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "linspace", "__getitem__"}
_PLACING |= {"repeat_interleave", "narrow", "split", "pack_padded_sequence", "one_hot", "index_select", "gather"}
_PLACING |= {"zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"}
#: Functions that may be applied to additive figures before these are summed over ranks.
_SUMMING = {"add", "__add__", "__radd__", "add_", "__iadd__", "sub", "__sub__", "__rsub__", "rsub", "sub_", "__isub__"}
#: Functions that tell which counts are not zero, if they compare them with zero.
_PRESENCE = {"gt", "__gt__", "greater", "ne", "__ne__", "not_equal"}
_ASKING = {"any", "all", "eq", "equal", "allclose", "isnan", "isinf", "isfinite", "is_nonzero", "__bool__"}


@dataclass(frozen=True)
class _Mark:
    """Trace record of a tensor without a gradient that was computed from the batch.

    Attributes:
        dim: Dim that holds samples; None for a figure, or a tensor that was computed with one.
        what: Description of how the figure was computed.
        adds_up: Whether the figures of parts of a batch add up to that of the batch, as counts do.
        is_over: Whether it is the reciprocal of such a figure.
        is_largest: Whether it is a maximum, which may be subtracted before exponentials without changing the result.
        is_presence: Whether it tells which counts are not zero.
        is_mean: Whether it is a mean, by which another mean may be divided like a sum by a count.
    """

    dim: int | None
    what: str = ""
    adds_up: bool = False
    is_over: bool = False
    is_largest: bool = False
    is_presence: bool = False
    is_mean: bool = False


class BatchFigures(TorchFunctionMode):
    """Torch function mode that traces the functions of a step from its batch.

    Args:
        batch: Batch of the step.
        samples: Number of samples in it.

    Attributes:
        found: Description of the first figure that a result with a gradient was computed with; None if there is none.
        was_read: Whether a figure or a loss was read as a Python number, which may be a part of the loss.
    """

    def __init__(self, batch: Any, samples: int) -> None:
        super().__init__()
        self.found: str | None = None
        self.was_read = False
        self._samples = samples
        self._lengths = {each.shape[0] for each in tensors_in(batch) if each.dim()}
        self._marks: Any = WeakTensorKeyDictionary()
        for each in tensors_in(batch):
            if type(each) is Tensor and each.shape[:1] == (samples,):
                self._marks[each] = _Mark(0)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if self.found is None:
            self._follow(getattr(func, "__name__", ""), args, kwargs, output)
        return output

    def _follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given = given_tensors((args, kwargs))
        results = [each for each in given_tensors(output) if type(each) is Tensor]
        if name == "detach" and given and given[0].requires_grad and not given[0].dim() and results:
            return self._detached(given[0], results[0])
        if name in _READING and not self.was_read and given and not given[0].dim():
            self.was_read = given[0] in self._marks or self._is_reduced(given[0])
        if not results:
            return None
        marked = [(each, self._marks[each]) for each in given if type(each) is Tensor and each in self._marks]
        if not marked and not any(each.requires_grad for each in results):
            marked = self._with_graphs(given)
        if not marked:
            return None
        figures = [(each, mark) for each, mark in marked if mark.dim is None]
        if figures:
            return self._computed(name, args, figures, results)
        for each in results:
            if each.requires_grad:
                continue
            mark = self._of_samples(name, args, kwargs, marked, each)
            if mark is not None:
                self._marks[each] = mark
        return None

    def _detached(self, given: Tensor, result: Tensor) -> None:
        """Mark a detached loss as a figure."""
        if self._is_reduced(given):
            self._marks[result] = _Mark(None, "a loss without its graph")

    def _is_reduced(self, given: Tensor) -> bool:
        return given.grad_fn is not None and BatchDims(self._samples).of(given.grad_fn) == REDUCED

    def _with_graphs(self, given: Sequence[Tensor]) -> list[tuple[Tensor, _Mark]]:
        """Return marks for tensors with a graph that hold samples, as their gradient-free results do as well.

        A dim of several items for each sample (tokens, pixels) holds samples too.
        """
        dims = BatchDims(self._samples)
        found = [(each, dims.of(each.grad_fn)) for each in given if each.grad_fn is not None and type(each) is Tensor]
        return [(each, _Mark(dim)) for each, dim in found if dim >= 0 and each.shape[dim] % self._samples == 0]

    def _computed(
        self, name: str, args: tuple[Any, ...], figures: Sequence[tuple[Tensor, _Mark]], results: Sequence[Tensor]
    ) -> None:
        figure, mark = figures[0]
        if name in _PLACING | _ASKING and not (name == "__getitem__" and figure is not args[0] and figure.dim()):
            return
        if name == "nonzero" and mark.is_presence:
            # A loop over the groups that have samples (a mixture's experts).
            return
        own = [each for each in results if each.requires_grad]
        if not own:
            for each in results:
                self._marks[each] = self._kept(name, args, figure, mark)
            return
        divides = name in _DIVISIONS and len(args) > 1 and args[1] is figure
        is_divisor = divides and (mark.adds_up or (mark.is_mean and self._are_sums(args, own)))
        is_factor = name in _PRODUCTS and mark.is_over and not figure.dim()
        is_shift = name in _DIFFERENCES and len(args) > 1 and args[1] is figure and mark.is_largest
        is_added = name in _SUMMING and mark.adds_up and self._are_sums(args, own)
        if not (is_divisor or is_factor or is_shift or is_added):
            self.found = mark.what

    def _are_sums(self, args: tuple[Any, ...], results: Sequence[Tensor]) -> bool:
        """Return whether a figure is added to reductions over samples with a gradient, so that both are additive."""
        others = [each.grad_fn for each in given_tensors(args) if each.requires_grad]
        dims = BatchDims(self._samples)
        return bool(results) and all(node is not None and dims.of(node) == REDUCED for node in others)

    def _kept(self, name: str, args: tuple[Any, ...], figure: Tensor, mark: _Mark) -> _Mark:
        """Return the mark of a result without a gradient that was computed with a figure."""
        others = [each for each in args if isinstance(each, Tensor) and each is not figure and each.dim()]
        if name in _KEEPING and not others:
            return mark
        if name in _OVER_IT and not others and mark.adds_up:
            divided = name in _DIVISIONS and args[0] is figure
            return mark if divided else replace(mark, adds_up=False, is_over=True, is_mean=False)
        is_presence = name in _PRESENCE and mark.adds_up and len(args) > 1 and type(args[1]) is int and args[1] == 0
        return replace(mark, adds_up=False, is_over=False, is_largest=False, is_presence=is_presence, is_mean=False)

    def _of_samples(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        marked: Sequence[tuple[Tensor, _Mark]],
        result: Tensor,
    ) -> _Mark | None:
        """Return the mark of a result that was computed from tensors that hold samples; None if it has none."""
        source, mark = marked[0]
        dim = mark.dim or 0
        if name in _HISTOGRAMS:
            # Sorted values are group indices of the rows, and the result is each group's size (nodes of a graph).
            in_order = bool((source[1:] >= source[:-1]).all()) if source.dim() == 1 else False
            return None if in_order or len(result) in self._lengths else self._figure(name, source)
        if name in DIM_AT and not (name in _EXTREMES and len(args) > 1 and isinstance(args[1], Tensor)):
            whole = name in _EXTREMES and not source.is_floating_point()
            if dim in reduced_dims(name, args, kwargs, source.dim()):
                return (
                    None if whole or (source.dtype == torch.bool and name not in _SUMS) else self._figure(name, source)
                )
        size = source.shape[dim]
        places = [place for place, length in enumerate(result.shape) if length == size]
        if places:
            return _Mark(dim if dim in places else places[0])
        if name == "__getitem__" and not isinstance(args[1], int):
            return _Mark(0) if result.dim() and dim == 0 else None
        kept_order = name in ("flatten", "view", "reshape", "cat", "masked_select", "repeat_interleave")
        return _Mark(0) if kept_order and result.dim() and dim == 0 else None

    def _figure(self, name: str, source: Tensor) -> _Mark:
        what = f"{name} of a tensor of shape {list(source.shape)} over samples"
        return _Mark(None, what, name in _SUMS, is_largest=name in ("max", "amax"), is_mean=name == "mean")


def given_tensors(tree: Any) -> list[Tensor]:
    """Return the tensors in the arguments or the output of a function."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    return [each for part in tree for each in given_tensors(part)] if isinstance(tree, list | tuple) else []


def reduced_dims(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], ndim: int) -> set[int]:
    """Return the dims over which a call of a reduction reduces."""
    place = DIM_AT[name]
    found = kwargs.get("dim", kwargs.get("axis", args[place] if len(args) > place else None))
    if isinstance(found, bool) or found is None or found == ():
        return set(range(max(ndim, 1)))
    found = args[place:] if isinstance(found, int) and "dim" not in kwargs and name in ("sum", "mean") else found
    dims = [found] if isinstance(found, int) else [each for each in found if not isinstance(each, bool)]
    return {each % max(ndim, 1) for each in dims if isinstance(each, int)}


def figures_of_ranks(module: pl.LightningModule, found: str) -> str:
    """Return the warning for a figure that each rank computes from its own samples.

    Args:
        module: The user's module.
        found: Description of the figure.
    """
    return (
        f"{original_class(module).__name__}.training_step computes its loss with a value that is reduced over the batch"
        f" without a gradient ({found}). Each rank computes this value from its own samples only, so training differs"
        " from that of a single process. Compute it from self.all_gather(...), or choose a strategy whose ranks see"
        " whole batches (pardist_tp, pardist_mp). check_samples=False disables this check."
    )
