"""Data model of the sharding rules: a torch function call as operands with shapes and layouts, without data.

Planning and execution share the same rules. A rule takes a :class:`Call` and returns an :class:`Outcome` (the layout
in which each operand is needed and the layout of the results), or raises :class:`NoRule` with the reason and the
operands that prevent local execution.
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
    """A tensor argument of a call.

    Attributes:
        shape: Global shape.
        layout: Sharding over the tensor ranks; None if replicated.
        dtype: Element type.
        tensor: Index among the call's tensors at run time; an identifying object while planning.
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
        """Return a need for the operand in its present layout."""
        return Need(self, "keep", self.layout)

    def whole(self) -> Need:
        """Return a need for the replicated operand in a sharded computation."""
        return Need(self, "whole", None)

    def gathered(self) -> Need:
        """Return a need for the full operand in a sharded computation; gathered first if it is sharded."""
        return self.whole() if self.layout is None else Need(self, "gather", None)

    def moved(self, layout: Layout) -> Need:
        """Return a need for the operand sharded by ``layout``; redistributed if it has another layout."""
        return self.part(layout) if self.layout in (None, layout) else Need(self, "move", layout)

    @property
    def numel(self) -> int:
        """Number of elements of the full tensor."""
        return math.prod(self.shape)

    def part(self, layout: Layout) -> Need:
        """Return a need for the operand sharded by ``layout``: kept if it has that layout, sliced if it is replicated.

        Raises:
            NoRule: If it is sharded in another way.
        """
        if self.layout == layout:
            return self.keep()
        if self.layout is not None:
            raise NoRule(f"split along {self.layout.describe()} where {layout.describe()} is needed", [self])
        return Need(self, "part", layout)


@dataclass(eq=False)
class Need:
    """How an operand enters the local computation.

    ``keep``: in its present layout. ``whole``: a replicated tensor in a sharded computation. ``part``: a slice of a
    replicated tensor. ``raw``: a replicated tensor in a computation that is the same on all ranks. ``gather``: a
    sharded tensor, gathered. ``move``: a sharded tensor, redistributed to another layout.
    """

    operand: Operand
    how: Literal["keep", "whole", "part", "raw", "gather", "move"]
    layout: Layout | None


class NoRule(Exception):
    """Raised if a call cannot run on local shards.

    Args:
        reason: What prevents local execution.
        blame: Operands that would have to be replicated; all sharded ones if not given.
        segments: Number of segments with which the call would work, if any (see the layout module's note on segments).
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
        args: Positional arguments, with tensors replaced by :class:`Operand`.
        kwargs: Keyword arguments, likewise.
        size: Number of tensor ranks.
        inplace: Whether the first operand is overwritten.
        sequence: Whether activations may be sharded along the sequence, to be gathered before feature-sharded layers.
        planning: Whether nothing is executed; parameters and buffers may still change their layout.
        rank: Rank in the tensor group.
        context: Whether activations are sharded and parameters replicated: operands are redistributed, not gathered.
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
        """Return an argument given by position or by name."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    def operands(self) -> list[Operand]:
        """Return all tensor arguments in order, including those in lists."""
        return list(iterate_operands((self.args, self.kwargs)))

    def split_operands(self) -> list[Operand]:
        """Return the sharded tensor arguments."""
        return [operand for operand in self.operands() if operand.layout is not None]

    def only_split(self) -> Operand:
        """Return the only sharded operand.

        Raises:
            NoRule: If there is not exactly one.
        """
        found = self.split_operands()
        if len(found) != 1:
            raise NoRule("several split operands", found[1:])
        return found[0]

    def meta(self) -> Any:
        """Return the results of the call on meta tensors, which have the global shapes.

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
        args: Positional arguments, with operands replaced by :class:`Need` and sizes by local ones.
        kwargs: Keyword arguments, likewise.
        out: Layout of the result, or of each result of a tuple or list.
        reduce: ``"sum"`` or ``"mean"`` if the local results are partial and have to be reduced; ``out`` is then None.
        random: Whether the call draws random numbers, which have to differ between ranks.
        run: Callable that replaces the function; called with the tensor group and the resolved arguments.
        after: Callable applied after the reduction; called with the result and ``after_needs``.
        after_needs: Operands of ``after``.
        collectives: Collectives issued by ``run``, as ``(kind, number of elements)``, for the plan.
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
    """Return the rule registered for a plain function name, or None."""
    return _RULES.get(name)


def map_only(kind: type | tuple[type, ...], function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply ``function`` to every ``kind`` in nested tuples, lists and dicts; a faster ``tree_map_only``."""
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
    """Return all leaves of nested tuples, lists and dicts in order; a faster ``tree_leaves``."""
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
    """Yield the operands in nested tuples, lists and dicts in order."""
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
    """Return a torch function's name without dunders and suffixes, and whether it overwrites its first argument.

    Property reads are named ``get:shape``, writes ``set:data``.
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

#: Properties evaluated on the global tensor, for parameters and split tensors.
GLOBAL_PROPERTIES = frozenset([
    "size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex",
    "is_signed", "get_device", "len", "hash", "get:shape", "get:dtype", "get:device", "get:ndim", "get:layout",
    "get:is_cuda", "get:is_sparse", "get:is_quantized", "get:is_meta", "get:itemsize", "get:nbytes", "get:names",
    "has_names", "get:is_nested", "get:is_cpu", "get:is_mps", "get:is_xpu", "get:is_mkldnn", "is_inference",
    "is_conj", "is_neg", "get:name", "is_same_size", "result_type", "can_cast",
])  # fmt: skip
#: Properties evaluated on the local shard.
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
#: Methods that are applied to the DTensor itself if called on a parameter.
PARAMETER_METHODS = frozenset([
    "detach", "get:data", "get:grad", "register_hook", "register_post_accumulate_grad_hook", "retain_grad",
    "requires_grad", "get:_local_tensor", "deepcopy", "reduce_ex", "format", "repr", "get:is_leaf",
    "get:requires_grad", "get:grad_fn", "get:_version", "is_contiguous", "stride", "storage_offset", "data_ptr",
    "untyped_storage", "get:retains_grad", "is_shared", "share_memory", "get:_backward_hooks", "get:_spec",
])  # fmt: skip
