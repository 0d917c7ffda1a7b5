"""A torch function call as sharding rules see it: operands with shapes and layouts, no data.

The same rules serve the plan, which asks what would happen, and the step, which makes it happen: a rule looks at a
:class:`Call` and answers with an :class:`Outcome` (how each operand is needed and how the results lie) or raises
:class:`NoRule` (what stands in the way, and whose fault it is).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch

from lightning_pardist.compat import pytree
from lightning_pardist.engines.tensor.layout import Layout


@dataclass(eq=False)
class Operand:
    """A tensor argument.

    Attributes:
        shape: Global shape.
        layout: How it is split; None if every rank has all of it.
        dtype: Element type.
        tensor: Its number among the call's tensors at run time, something that identifies it while planning.
    """

    shape: tuple[int, ...]
    layout: Layout | None
    dtype: torch.dtype
    tensor: Any = None

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    def keep(self) -> Need:
        """Used as it lies."""
        return Need(self, "keep", self.layout)

    def whole(self) -> Need:
        """Used as a whole in a computation that is split."""
        return Need(self, "whole", None)

    def gathered(self) -> Need:
        """Used as a whole in a computation that is split, however it lies."""
        return self.whole() if self.layout is None else Need(self, "gather", None)

    def moved(self, layout: Layout) -> Need:
        """Used split like ``layout``, however it lies."""
        return self.part(layout) if self.layout in (None, layout) else Need(self, "move", layout)

    @property
    def numel(self) -> int:
        """Elements of the whole."""
        return math.prod(self.shape)

    def part(self, layout: Layout) -> Need:
        """Used split like ``layout``: nothing to do if it lies so, a slice of it if it is whole.

        Raises:
            NoRule: If it is split in another way.
        """
        if self.layout == layout:
            return self.keep()
        if self.layout is not None:
            raise NoRule(f"split along {self.layout.describe()} where {layout.describe()} is needed", [self])
        return Need(self, "part", layout)


@dataclass(eq=False)
class Need:
    """How an operand enters the local computation.

    ``keep``: as it lies. ``whole``: a whole tensor in a split computation. ``part``: a slice of a whole tensor.
    ``raw``: a whole tensor where all ranks compute the same. ``gather``: a split tensor, put together. ``move``: a
    split tensor, laid out in another way.
    """

    operand: Operand
    how: Literal["keep", "whole", "part", "raw", "gather", "move"]
    layout: Layout | None


class NoRule(Exception):
    """Raised where a call cannot run on local shards.

    Args:
        reason: What stands in the way.
        blame: Operands that would have to be whole; all split ones if not given.
        segments: If the split dim lay in this many segments it would work.
    """

    def __init__(self, reason: str, blame: list[Operand] | None = None, segments: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.blame = blame
        self.segments = segments


@dataclass(eq=False)
class Call:
    """A call of a torch function.

    Attributes:
        func: The function as intercepted.
        name: Its plain name, without dunders and the underscore of in-place variants.
        args: Positional arguments, tensors replaced by :class:`Operand`.
        kwargs: Keyword arguments, likewise.
        size: Number of tensor ranks.
        inplace: Whether the first operand is overwritten.
        sequence: Activations may be split along the sequence, to be gathered where features are split.
        planning: Nothing is run; parameters and buffers may still change their layout.
        rank: This rank among them.
        context: Activations are split, and parameters are whole: operands are moved rather than put together.
    """

    func: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    size: int
    inplace: bool = False
    planning: bool = False
    sequence: bool = False
    rank: int = 0
    context: bool = False

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """An argument given by position or by name."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    def operands(self) -> list[Operand]:
        """All tensor arguments, also those in lists, in order."""
        return list(iterate_operands((self.args, self.kwargs)))

    def split_operands(self) -> list[Operand]:
        """The tensor arguments that are split."""
        return [operand for operand in self.operands() if operand.layout is not None]

    def only_split(self) -> Operand:
        """The one split operand.

        Raises:
            NoRule: If there are several.
        """
        found = self.split_operands()
        if len(found) != 1:
            raise NoRule("several split operands", found[1:])
        return found[0]

    def meta(self) -> Any:
        """The results of the call on tensors without data: their global shapes.

        Raises:
            NoRule: If the shapes depend on values, such as a size that is a tensor.
        """
        args, kwargs = pytree.tree_map_only(
            Operand, lambda op: torch.empty(op.shape, dtype=op.dtype, device="meta"), (self.args, self.kwargs)
        )
        try:
            with torch.no_grad():
                return self.func(*args, **kwargs)
        except RuntimeError as error:
            raise NoRule("its shape depends on values") from error


@dataclass(eq=False)
class Outcome:
    """How a call runs on local shards.

    Attributes:
        args: Positional arguments, operands replaced by :class:`Need` and sizes by local ones.
        kwargs: Keyword arguments, likewise.
        out: Layout of the result, or of each result of a tuple or list.
        reduce: The local results are parts of a sum, ``"mean"`` of a mean; ``out`` is then None.
        random: Draws random numbers, which have to differ between ranks.
        run: What to run in place of the function, given the tensor group and the resolved arguments.
        after: Applied to the result after the reduction, given the result and ``after_needs``.
        after_needs: Operands of ``after``.
        collectives: What ``run`` sends, as ``(kind, number of elements)``, for the plan.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    out: Layout | list[Layout | None] | None = None
    reduce: Literal["", "sum", "mean"] = ""
    random: bool = False
    run: Callable[..., Any] | None = None
    after: Callable[..., Any] | None = None
    after_needs: tuple[Need, ...] = ()
    collectives: tuple[tuple[str, int], ...] = ()


Rule = Callable[[Call], Outcome]
_RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule under the plain names of torch functions and tensor methods."""

    def register(function: Rule) -> Rule:
        for name in names:
            _RULES[name] = function
        return function

    return register


def find_rule(name: str) -> Rule | None:
    """The rule for a function of this plain name."""
    return _RULES.get(name)


def map_only(kind: type | tuple[type, ...], function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply ``function`` to every ``kind`` in nested tuples, lists and dicts: a lean ``tree_map_only``."""
    if isinstance(tree, kind):
        return function(tree)
    if isinstance(tree, (tuple, list)):
        items = [map_only(kind, function, item) for item in tree]
        if hasattr(tree, "_fields"):
            return type(tree)(*items)
        return items if type(tree) is list else tuple(items) if type(tree) is tuple else type(tree)(items)
    if isinstance(tree, dict):
        return {key: map_only(kind, function, item) for key, item in tree.items()}
    return tree


def leaves_of(tree: Any) -> list[Any]:
    """Everything in nested tuples, lists and dicts, in order: a lean ``tree_leaves``."""
    found: list[Any] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[Any]) -> None:
    if isinstance(tree, (tuple, list)):
        for item in tree:
            _collect(item, found)
    elif isinstance(tree, dict):
        for item in tree.values():
            _collect(item, found)
    else:
        found.append(tree)


def iterate_operands(tree: Any) -> Iterator[Operand]:
    """Operands in nested tuples, lists and dicts, in order."""
    if isinstance(tree, Operand):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from iterate_operands(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from iterate_operands(item)


@cache
def plain_name(func: Callable[..., Any]) -> tuple[str, bool]:
    """Name of a torch function without dunders and suffixes, and whether it overwrites its first argument.

    Property reads come as ``get:shape``, writes as ``set:data``.
    """
    name = getattr(func, "__name__", None) or type(func).__name__
    if name in ("__get__", "__set__", "__delete__"):
        owner = getattr(func, "__self__", None)
        return f"{name.strip('_')}:{getattr(owner, '__name__', '')}", False
    if name.startswith("__") and name.endswith("__"):
        plain = name[2:-2]
        if plain == "setitem":
            return plain, True
        if plain[0] in "ir" and plain[1:] in _OPERATORS and plain != "rmatmul":
            return _OPERATORS[plain[1:]], plain[0] == "i"
        return _OPERATORS.get(plain, plain), False
    if name.endswith("_") and not name.endswith("__"):
        return name.rstrip("_"), True
    return name, False


_OPERATORS = {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "div": "div", "floordiv": "floor_divide",
    "mod": "remainder", "pow": "pow", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift", "invert": "bitwise_not", "neg": "neg",
    "pos": "positive", "abs": "abs", "eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge",
    "matmul": "matmul", "getitem": "getitem",
}  # fmt: skip

#: Answered by the global view alone, for parameters and split tensors.
GLOBAL_PROPERTIES = frozenset([
    "size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex",
    "is_signed", "get_device", "len", "hash", "get:shape", "get:dtype", "get:device", "get:ndim", "get:layout",
    "get:is_cuda", "get:is_sparse", "get:is_quantized", "get:is_meta", "get:itemsize", "get:nbytes", "get:names",
    "has_names", "get:is_nested", "get:is_cpu", "get:is_mps", "get:is_xpu", "get:is_mkldnn", "is_inference",
    "is_conj", "is_neg", "get:name", "is_same_size", "result_type", "can_cast",
])  # fmt: skip
#: Answered by this rank's part.
LOCAL_PROPERTIES = frozenset(
    [
        "get:requires_grad",
        "get:grad_fn",
        "get:is_leaf",
        "get:_version",
        "is_contiguous",
        "stride",
        "storage_offset",
        "get:output_nr",
        "untyped_storage",
        "get:_base",
        "data_ptr",
    ]
)
#: On a parameter these mean the DTensor itself.
PARAMETER_METHODS = frozenset([
    "detach", "get:data", "get:grad", "register_hook", "register_post_accumulate_grad_hook", "retain_grad",
    "requires_grad", "get:_local_tensor", "deepcopy", "reduce_ex", "format", "repr", "get:is_leaf",
    "get:requires_grad", "get:grad_fn", "get:_version", "is_contiguous", "stride", "storage_offset", "data_ptr",
    "untyped_storage", "get:retains_grad", "is_shared", "share_memory", "get:_backward_hooks", "get:_spec",
])  # fmt: skip
