"""Find the batch dimension of intermediate results from the autograd graph of a loss.

[Note: which dim is the batch]
A reduction is over the batch only if it reduces the batch dimension: in ``x.mean(0).sum()`` that is the mean, in
``x.mean(1).sum()`` the sum, and ``weight.pow(2).sum()`` does not depend on the batch. The dimension of a node's result
is derived from its inputs through elementwise operations, views, transpositions, reductions and matrix products. For
any other operation the result is assumed to have the batch as its first dimension, or as the one of the batch's size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.autograd.graph import Node

from lightning_pardist.compat.autograd_graph import (
    inputs_of,
    is_parameter,
    is_python_number,
    kept,
    kind_of,
    saved,
    shape_of,
)
from lightning_pardist.engines.common.held_tensors import is_held

#: Values for results without a batch dim: the batch was reduced, or the result does not depend on the batch.
REDUCED, CONSTANT = -1, -2
#: Number of operations through which the batch dim is followed; beyond it, the dim is inferred from the shape.
REACH = 24
ADDITIONS = {"Add", "Sub", "Rsub", "Stack", "Cat"}
#: Operation that writes into a part of a tensor, as in ``terms[0] = loss``; which one it was is not recorded.
WRITE = "CopySlices"
SAME = {"Neg", "ToCopy", "Clone", "Alias", "View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze", "Expand"}
SAME |= {"Select", "Slice", "T", "Transpose", "Permute", "Diagonal", "Index", "MaskedFill"}
#: Operations that only rearrange elements.
VIEWS = {"View", "UnsafeView", "ReshapeAlias", "Squeeze"}
#: Matrix products, which may sum over the batch dim.
CONTRACTIONS = {"Mm", "Mv", "Dot", "Vdot", "Bmm"}
#: The all-reduce over ranks that share a batch: its input is this rank's part, its output the full result.
SAME |= {"Function._Reduce"}
REDUCTIONS = {"Sum", "Mean", "Nansum"}
STATISTICS = {"Std", "Var", "LinalgVectorNorm", "Norm", "Max", "Min", "Amax", "Amin", "Logsumexp", "Prod", "Median"}
STATISTICS |= {"StdMean", "VarMean"}
#: Loss functions that are one operation in torch; ``reduction`` is 1 for the mean and 2 for the sum.
LOSSES = {"NllLoss", "NllLoss2D", "MseLoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy"}
LOSSES |= {"BinaryCrossEntropyWithLogits", "SoftMarginLoss", "MultiMarginLoss", "MultilabelMarginLoss", "KlDiv"}
#: Operations that select single samples or parts from a batch.
PICKS = {"Unbind", "Select", "Split", "SplitWithSizes"}
CURVES = {"Sqrt", "Rsqrt", "Exp", "Exp2", "Expm1", "Log", "Log1P", "Log2", "Log10", "Pow", "Square", "Reciprocal"}
CURVES |= {"Abs", "Relu", "Sigmoid", "LogSigmoid", "Tanh", "Softplus", "Clamp", "ClampMin", "ClampMax", "NanToNum"}
ELEMENTWISE = CURVES | {"Mul", "Div", "Add", "Sub", "Rsub", "Neg", "ToCopy", "Clone", "Alias", "Maximum", "Minimum"}
ELEMENTWISE |= {"Where", "MaskedFill", "Lerp", "Addcmul", "Addcdiv", "Sin", "Cos", "Erf", "Gelu", "Silu", "Elu"}
ELEMENTWISE |= {"Expand", "LeakyRelu", "MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropyWithLogits"}
#: Operations whose number of result items depends on the batch's values.
PICKED = {"Index", "MaskedSelect"}
#: Operations that look up rows of a parameter: their indices are not inputs in the graph.
LOOK_UPS = {"Embedding", "EmbeddingBag", "Index", "IndexSelect", "Gather", "Take"}
#: Names of saved operands, used to distinguish tensors held by the module from data.
_OPERANDS = {"Mm": ("self", "mat2"), "Bmm": ("self", "mat2"), "Mv": ("self", "vec"), "Addmm": ("", "mat1", "mat2")}
_OPERANDS |= dict.fromkeys(("Convolution", "NativeLayerNorm", "NativeGroupNorm"), ("input", "weight", "bias"))
#: Maximum depth at which a gather is searched below a result: samples are compared soon after they are gathered.
GATHER_REACH = 16
#: Gathers between ranks that share samples, which assemble the parts of one result.
_OF_PARTS = {"Function._Gather", "Function._GatherCopy", "Function._Gathered"}


class BatchDims:
    """Batch dims of the nodes of one autograd graph.

    Args:
        samples: Number of samples in the batch, which identifies its dim; if None, the order of dims is used.
    """

    def __init__(self, samples: int | None) -> None:
        self.samples = samples
        #: The batch dim of a node, and the depth to which the graph below it was searched.
        self._dims: dict[Node, tuple[int, int]] = {}
        #: Constants computed from tensors that the module holds.
        self._of_held: set[Node] = set()
        self._depth = 0
        self._cut = False

    def is_of_held(self, node: Node) -> bool:
        """Return whether a node is a constant computed from tensors that the module holds."""
        return self.of(node) == CONSTANT and node in self._of_held

    def of(self, node: Node) -> int:
        """Return the batch dim of a node's result, ``REDUCED`` or ``CONSTANT``."""
        known, reach = self._dims.get(node, (0, -1))
        left = REACH - self._depth
        if reach >= left:
            return known
        if not left:
            self._cut = True
            return self._by_shape(node)
        cut, self._cut = self._cut, False
        self._depth += 1
        found = self._find_dim(node)
        self._depth -= 1
        if found == CONSTANT and any(child in self._of_held for child in inputs_of(node)):
            self._of_held.add(node)
        # A search that was not cut off is final.
        self._dims[node] = found, left if self._cut else REACH
        self._cut = cut or self._cut
        return found

    def _by_shape(self, node: Node) -> int:
        sizes = shape_of(node)
        if sizes is None or not sizes:
            return REDUCED
        samples = self.samples
        if samples and sizes[0] % samples and samples in sizes:
            return sizes.index(samples)
        # A time-first layout, as in recurrent layers, rather than several results of each sample.
        return int(len(sizes) > 2 and sizes[0] != samples == sizes[1])

    def _find_dim(self, node: Node) -> int:
        kind, sides = kind_of(node), inputs_of(node)
        inputs = [child for child in sides if child is not None]
        if kind == "AccumulateGrad":
            # A leaf received from another pipeline stage may be independent of the batch.
            if is_held(getattr(node, "variable", None)):
                self._of_held.add(node)
                return CONSTANT
            return CONSTANT if is_parameter(node) else self._by_shape(node)
        if kind in REDUCTIONS | STATISTICS and inputs:
            return self._dim_after_reduction(node, inputs[0])
        if kind in CONTRACTIONS and len(sides) == 2:
            return self._dim_of_matrix_product(node, kind, sides)
        if kind in ("Stack", "Cat"):
            return self._dim_of_stack(node, kind, inputs)
        if kind == "AsStrided" and inputs and self.of(inputs[0]) < 0:
            return self.of(inputs[0])
        if kind == WRITE and inputs:
            # A tensor without gradient into which samples are written may have its own order of dims.
            dim = max(self.of(child) for child in inputs)
            return dim if dim < 0 else self._by_shape(node)
        if kind in ("T", "Transpose", "Permute", "Unsqueeze", "Select", "Unbind") and inputs:
            return _moved(node, kind, self.of(inputs[0]), shape_of(inputs[0]))
        if kind in LOSSES and saved(node, "reduction") in (1, 2):
            return REDUCED
        if kind in ELEMENTWISE and inputs:
            return self._dim_of_elements(node, inputs, len(inputs) < len(sides))
        if kind in PICKED and inputs and self.of(inputs[0]) == 0:
            # Selected items are in the first dim, regardless of their number and that of their features.
            return 0
        if kind in VIEWS and inputs:
            return self._dim_of_view(node, inputs[0])
        if kind in SAME and inputs and kind != "Index":
            dim, sizes, before = self.of(inputs[0]), shape_of(node), shape_of(inputs[0])
            if dim < 0 or kind == "Diagonal" or sizes is None or before is None:
                return dim if dim < 0 else self._by_shape(node)
            return dim + len(sizes) - len(before)
        unknown = kind in LOOK_UPS or not sides or not self._has_known_operands(node, kind, sides)
        return self._by_shape(node) if unknown or any(self.of(child) != CONSTANT for child in inputs) else CONSTANT

    def _has_known_operands(self, node: Node, kind: str, sides: Sequence[Node | None]) -> bool:
        """Return whether all operands of an operation that need no gradient are held by the module."""
        missing = [place for place, side in enumerate(sides) if side is None]
        if not missing:
            return True
        names = _OPERANDS.get(kind, ())
        known = {place for place, name in enumerate(names) if place in missing and is_held(kept(node, name))}
        # A bias is not saved; it is taken as held if the weight is.
        known |= {0} if known and kind == "Addmm" else set()
        if not known.issuperset(missing):
            return False
        self._of_held.add(node)
        return True

    def _dim_after_reduction(self, node: Node, child: Node) -> int:
        dim = self.of(child)
        dims = reduced_dims(node, shape_of(child))
        if dim < 0:
            return dim
        if dim in dims:
            return REDUCED
        return dim if saved(node, "keepdim") else dim - sum(each < dim for each in dims)

    def _dim_of_view(self, node: Node, child: Node) -> int:
        dim, sizes, before = self.of(child), shape_of(node), shape_of(child)
        if dim < 0 or sizes is None or before is None:
            return dim if dim < 0 else self._by_shape(node)
        places = _viewed(before, sizes, dim)
        samples = self.samples
        if samples and samples > 1:
            # einsum adds dims of size 1 before a dim that it flattens.
            places = [place for place in places if sizes[place] > 1] or places
        if samples and len(places) > 1 and sizes[places[0]] % samples:
            return next((place for place in places if sizes[place] == samples), places[0])
        return places[0] if places else self._by_shape(node)

    def _dim_of_matrix_product(self, node: Node, kind: str, sides: Sequence[Node | None]) -> int:
        # An operand that needs no gradient is data or a constant; the other operand decides which.
        left, right = (CONSTANT if side is None else self.of(side) for side in sides)
        both_known = self._has_known_operands(node, kind, sides)
        if left == right == CONSTANT:
            return CONSTANT if both_known else self._by_shape(node)
        if kind in ("Dot", "Vdot"):
            return REDUCED
        first = int(kind == "Bmm")
        if first and 0 in (left, right):
            # With one sample, a sum over all of its elements.
            return REDUCED if math.prod(shape_of(node) or (0,)) == 1 else 0
        if left == first + 1 or right == first:
            return REDUCED if both_known or left >= 0 or right >= 0 else self._by_shape(node)
        if left == first:
            return first
        if right == first + 1:
            return first + 1
        return self._by_shape(node) if CONSTANT in (left, right) else REDUCED

    def _dim_of_stack(self, node: Node, kind: str, inputs: Sequence[Node]) -> int:
        dims = [self.of(child) for child in inputs]
        dim = max(dims, default=REDUCED)
        if kind == "Stack" and dim >= 0:
            return dim + (int(saved(node, "dim") or 0) <= dim)
        return dim

    def _dim_of_elements(self, node: Node, inputs: Sequence[Node], other_operands: bool) -> int:
        sizes = shape_of(node) or ()
        best, best_child = max(((self.of(child), child) for child in inputs), key=lambda pair: pair[0])
        if best >= 0:
            return best + len(sizes) - len(shape_of(best_child) or sizes)
        if best == REDUCED and other_operands and not self._may_be_expanded(sizes, shape_of(best_child) or ()):
            return best
        # A product with samples that need no gradient depends on the batch.
        if (
            other_operands
            and sizes
            and (sizes != shape_of(best_child) or self._may_combine_with_batch(node, best_child))
        ):
            return self._by_shape(node)
        return best

    def _may_be_expanded(self, sizes: tuple[int, ...], before: tuple[int, ...]) -> bool:
        """Return whether a result of this shape may hold samples although an operand of that shape holds none."""
        if sizes == before or not self.samples:
            return True
        aligned = (1,) * (len(sizes) - len(before)) + before
        return any(size != was and size % self.samples == 0 for size, was in zip(sizes, aligned, strict=True))

    def _may_combine_with_batch(self, node: Node, child: Node) -> bool:
        """Return whether a result of held tensors may be combined with data here, such as targets at fixed points."""
        number = any(is_python_number(kept(node, name)) for name in ("other", "self", "exponent"))
        return child in self._of_held and not number


class GatheredResults:
    """Results of one graph that were computed from gathered samples only, and so are equal on all ranks.

    Args:
        dims: Batch dims of the same graph.
    """

    def __init__(self, dims: BatchDims) -> None:
        self._dims = dims
        self._known: dict[Node, bool | None] = {}

    def has(self, node: Node) -> bool:
        """Return whether all inputs of a result are gathered, so that every rank has the same result."""
        return self._state(node, GATHER_REACH) is True

    def _state(self, node: Node, left: int) -> bool | None:
        """Return True as in :meth:`has`, False if local samples are involved, None if the result has no samples."""
        if node in self._known:
            return self._known[node]
        if not left:
            return False
        children = [child for child in inputs_of(node) if child is not None]
        if not children:
            return None if self._dims.of(node) == CONSTANT else False
        kind = kind_of(node)
        if "Gather" in kind and kind not in LOOK_UPS | _OF_PARTS:
            found = None if all(self._dims.of(child) == CONSTANT for child in children) else True
        else:
            found = None
            for child in children:
                state = self._state(child, left - 1)
                found = state if state is not None else found
                if state is False:
                    break
            if found is None and self._dims.of(node) != CONSTANT:
                found = False
        # Cached even if the search was cut off below.
        self._known[node] = found
        return found


def reduced_dims(node: Node, sizes: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the dims of its argument that a reduction reduces."""
    ndim = len(sizes or ())
    dims = saved(node, "dim")
    if dims is None or dims == ():
        return tuple(range(ndim))
    dims = [dims] if isinstance(dims, int) else dims
    return tuple(each % ndim for each in dims) if ndim else ()


def _moved(node: Node, kind: str, dim: int, sizes: tuple[int, ...] | None) -> int:
    """Return the position of a dim after an operation that moves dims."""
    if dim < 0:
        return dim
    ndim = len(sizes or ())

    def place(name: str, among: int) -> int:
        return int(saved(node, name) or 0) % max(among, 1)

    if kind == "T":
        return 1 - dim if ndim == 2 else dim
    if kind == "Transpose":
        first, second = place("dim0", ndim), place("dim1", ndim)
        return second if dim == first else first if dim == second else dim
    if kind == "Permute":
        return [each % ndim for each in saved(node, "dims")].index(dim)
    position = place("dim", ndim + (kind == "Unsqueeze"))
    if kind == "Unsqueeze":
        return dim + (position <= dim)
    return REDUCED if position == dim else dim - (position < dim)


def _viewed(before: tuple[int, ...], after: tuple[int, ...], dim: int) -> list[int]:
    """Return the dims of a view that hold the elements of a dim of its base, by runs of dims of equal size."""
    left = right = 0
    while left < len(before) and right < len(after):
        begin = left, right
        sizes = [before[left], after[right]]
        left, right = left + 1, right + 1
        while sizes[0] != sizes[1]:
            if sizes[0] < sizes[1] and left < len(before):
                sizes[0] *= before[left]
                left += 1
            elif sizes[1] < sizes[0] and right < len(after):
                sizes[1] *= after[right]
                right += 1
            else:
                return []
        if begin[0] <= dim < left:
            return list(range(begin[1], right))
    return []
