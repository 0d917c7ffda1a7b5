"""Temporary replacements of torch functions, active only while a step of this package runs.

Replacements in Lightning are in ``lightning_patches``, and ``data`` of watched parameters in ``parameter_data``.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch.distributed.tensor import DTensor

from lightning_pardist.compat.contract import Private
from lightning_pardist.compat.dtensor import local_tensor_of
from lightning_pardist.compat.tensors import storage_key

NAMES = (
    Private("torch.autograd._engine_run_backward",
            "modes in backward: activation checkpointing under tensor parallelism, reversible layers under ZeRO-3",
            "refuse use_reentrant=False there, and reversible layers"),
    Private("torch.utils.checkpoint._checkpoint_without_reentrant_generator",
            "activation checkpointing by the user under pipelines", "the function that checkpoint() calls",
            until="2.14"),
    Private("torch.utils.checkpoint._checkpoint_without_reentrant_generator_impl",
            "activation checkpointing by the user under pipelines", "the function that checkpoint() calls",
            since="2.14"),
    Private("torch.jit._builtins._get_builtin_table", "scripting a module while counts of losses are watched",
            "leave torch's functions alone, and replace methods of tensors only"),
    Private("torch.autograd.function._SingleLevelFunction",
            "custom autograd functions under tensor parallelism, however they are called",
            "replace apply of torch.autograd.Function, and refuse references to it"),
    Private("torch._dynamo.trace_rules.clear_lru_cache", "torch.compile while counts of losses are watched",
            "leave torch's functions alone, and replace methods of tensors only"),
    Private("torch._dynamo.trace_rules.get_torch_obj_rule_map", "torch.compile while counts of losses are watched",
            "leave torch's functions alone, and replace methods of tensors only"),
    Private("torch.autograd.function.FunctionMeta",
            "custom autograd functions under tensor parallelism, however they are called",
            "replace apply of torch.autograd.Function, and leave other references without a check"),
    Private("torch._VF", "time of recurrent layers in plans", "plan their operators as those of Python code"),
    Private("torch.utils.checkpoint._StopRecomputationError", "activation checkpointing by the user under pipelines",
            "the exception that ends a recomputation early"),
)  # fmt: skip

#: Exception that ends a recomputation early, raised inside it.
StopRecomputation: type[Exception] = torch.utils.checkpoint._StopRecomputationError


@contextlib.contextmanager
def custom_functions(call: Callable[..., Any], held: _Named | None = None) -> Iterator[None]:
    """Return a context in which calls of custom autograd functions go through ``call``.

    Custom autograd functions are not torch functions: neither modes nor tensor subclasses see them. Their calls are
    found whatever refers to their ``apply`` (``scan = Scan.apply``). Since torch 2.15 that is a function in C, which is
    replaced under global names and in ``held``. A call by another reference raises a ``RuntimeError`` if gradients are
    wanted and ``call`` passes on other arguments than it got.

    Args:
        call: ``(autograd function class, its original apply, args, kwargs) -> result``.
        held: Result of :func:`held_functions`.
    """
    with _through_base(call) if _APPLY_IS_PYTHON else _through_names(call, held or []):
        yield


_Named = list[tuple[dict[str, Any], str, Any]]
#: Whether ``apply`` looks up the ``apply`` of the base of ``Function`` when it is called, whatever refers to it.
_APPLY_IS_PYTHON = isinstance(torch.autograd.Function.__dict__["apply"], classmethod)


def held_functions(modules: Iterable[Any]) -> _Named:
    """Return the attributes of these modules that are ``apply`` of an autograd function."""
    return [] if _APPLY_IS_PYTHON else _applies_in(modules)


def apply_directly(cls: Any, *args: Any) -> Any:
    """Apply an autograd function of this package, past :func:`custom_functions`."""
    return super(torch.autograd.function._SingleLevelFunction, cls).apply(*args)


@contextlib.contextmanager
def _through_base(call: Callable[..., Any]) -> Iterator[None]:
    base: Any = torch.autograd.function._SingleLevelFunction
    before = base.__dict__.get("apply")

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        original = super(base, cls).apply if before is None else before.__get__(None, cls)
        # Transforms of functions make classes of this base of their own.
        return call(cls, original, args, kwargs) if issubclass(cls, torch.autograd.Function) else original(*args)

    base.apply = classmethod(apply)
    try:
        yield
    finally:
        if before is None:
            del base.apply
        else:
            base.apply = before


@contextlib.contextmanager
def _through_names(call: Callable[..., Any], held: _Named) -> Iterator[None]:
    function: Any = torch.autograd.Function
    before = function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return call(cls, functools.partial(_known_to_run, cls, before.__get__(None, cls)), args, kwargs)

    function.apply = classmethod(apply)
    named = [place for place in _named_applies() + held if place[0].get(place[1]) is place[2]]
    for names, name, bound in named:
        names[name] = functools.partial(_applied, bound.__self__)
    try:
        with _unknown_calls(call):
            yield
    finally:
        function.apply = before
        for names, name, bound in named:
            names[name] = bound


def _applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
    return cls.apply(*args, **kwargs)


#: Modules whose functions get no split tensors by other ways than their own.
_OWN = ("torch.", "lightning_pardist.")
#: Autograd functions whose calls that run now have been intercepted.
_known: list[Any] = []


def _known_to_run(cls: Any, apply: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    _known.append(cls)
    try:
        return apply(*args, **kwargs)
    finally:
        _known.remove(cls)


@contextlib.contextmanager
def _unknown_calls(call: Callable[..., Any]) -> Iterator[None]:
    """Return a context in which ``forward`` goes through ``call`` if its function's call has not been intercepted.

    ``apply`` looks up ``_backward_cls``, makes the node, disables gradients, and then looks up ``forward``.
    """
    meta: Any = torch.autograd.function.FunctionMeta
    before = meta.__dict__.get("__getattribute__")
    look_up = before or type.__getattribute__
    begun: list[Any] = []

    def found(cls: Any, name: str) -> Any:
        value = look_up(cls, name)
        if look_up(cls, "__module__").startswith(_OWN):
            return value
        if name == "_backward_cls" and cls not in _known and torch.is_grad_enabled():
            begun[:] = [cls]
        elif name == "forward" and begun == [cls] and not torch.is_grad_enabled():
            begun.clear()
            return functools.partial(_forward, cls, value, call)
        return value

    meta.__getattribute__ = found
    try:
        yield
    finally:
        if before is None:
            del meta.__getattribute__
        else:
            meta.__getattribute__ = before


def _forward(cls: Any, forward: Callable[..., Any], call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    node = args[:1] if isinstance(args[0], torch.autograd.function.BackwardCFunction) else ()
    given = args[len(node) :]

    def apply(*now: Any, **kwargs: Any) -> Any:
        if len(now) != len(given) or any(one is not other for one, other in zip(now, given, strict=True)):
            raise RuntimeError(
                f"{cls.__qualname__}.apply was called by a reference that is neither a global name nor an attribute of"
                " a module. Its inputs are split, and would get no gradients. Call it as"
                f" {cls.__qualname__}.apply(...)."
            )
        return forward(*node, *now, **kwargs)

    return call(cls, apply, given, kwargs)


#: Number of modules that :func:`_named_applies` has searched, and what it found in them.
_SEARCHED: tuple[int, _Named] = (0, [])


def _named_applies() -> _Named:
    """Return the global names of autograd functions' ``apply``, each with its module's names and the bound method."""
    global _SEARCHED
    # In a notebook, __main__ gets new names between runs.
    main = sys.modules.get("__main__")
    if _SEARCHED[0] != len(sys.modules):
        others = [module for module in list(sys.modules.values()) if module is not main]
        _SEARCHED = len(sys.modules), _applies_in(others)
    return _SEARCHED[1] + _applies_in([main])


def _applies_in(holders: Iterable[Any]) -> _Named:
    return [
        (names, name, value)
        for names in [getattr(holder, "__dict__", {}) for holder in holders]
        for name, value in list(names.items())
        if type(value) in (types.MethodType, types.BuiltinMethodType)
        and value.__name__ == "apply"
        and isinstance(value.__self__, type)
        and issubclass(value.__self__, torch.autograd.Function)
        and not value.__self__.__module__.startswith("torch.")
    ]


@contextlib.contextmanager
def backward_inside(context: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    """Return a context in which the autograd engine runs inside ``context``.

    torch leaves the context (a mode, for example) that surrounds a call of backward before it calls the engine.

    Args:
        context: Reusable: it is entered once per backward.
    """
    module: Any = torch.autograd
    before = module._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with context:
            return before(*args, **kwargs)

    module._engine_run_backward = run_backward
    try:
        yield
    finally:
        module._engine_run_backward = before


@contextlib.contextmanager
def recomputed_functions(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Return a context that wraps functions passed to activation checkpointing, whatever name it was imported by.

    Args:
        wrap: Maps a function to its replacement, which runs in forward and in the recomputation.
    """
    module: Any = torch.utils.checkpoint
    name = "_checkpoint_without_reentrant_generator"
    if hasattr(module, f"{name}_impl"):
        name = f"{name}_impl"
    before = getattr(module, name)

    def generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return before(wrap(function), *args, **kwargs)

    setattr(module, name, generator)
    try:
        yield
    finally:
        setattr(module, name, before)


@contextlib.contextmanager
def refuse_reentrant(message: str) -> Iterator[None]:
    """Return a context in which reentrant activation checkpointing raises a ``RuntimeError``."""

    class Refused:
        @staticmethod
        def apply(*args: Any) -> Any:
            raise RuntimeError(message)

    module: Any = torch.utils.checkpoint
    before = module.CheckpointFunction
    module.CheckpointFunction = Refused
    try:
        yield
    finally:
        module.CheckpointFunction = before


@contextlib.contextmanager
def keep_unchanged_parameters() -> Iterator[None]:
    """Return a context in which ``module.to(...)`` keeps ``DTensor`` parameters that it does not change.

    torch swaps each of them with a new tensor on the same memory, which separates the parameter from autograd graphs
    that already use it.
    """
    module: Any = torch.utils
    before = module.swap_tensors

    def swap_tensors(first: torch.Tensor, second: torch.Tensor) -> None:
        if not _is_alias(first, second):
            before(first, second)

    module.swap_tensors = swap_tensors
    try:
        yield
    finally:
        module.swap_tensors = before


_Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
#: Replacements by their purpose and the class or module and name that they are for. They are the same in each context:
#: making them takes longer than putting them in place.
_REPLACEMENTS: dict[tuple[str, Any, str], Any] = {}
#: What an attribute was that its owner inherits.
_INHERITED = object()


class _Replaced:
    """Attributes that are replaced, to be restored. Contexts of each training step replace some twenty of them.

    Args:
        purpose: Name that tells apart replacements of one attribute.
    """

    def __init__(self, purpose: str) -> None:
        self._purpose = purpose
        self._before: list[tuple[Any, str, Any]] = []
        self._dynamo_knows = False

    def replace(self, name: str, wrap: _Wrap, *, of_torch: bool) -> None:
        """Replace a method of tensors, and the function of the same name in ``torch`` if there is one."""
        self._prepare()
        own = torch.Tensor.__dict__.get(name, _INHERITED)
        setattr(torch.Tensor, name, _replacement(self._purpose, torch.Tensor, name, wrap))
        self._before.append((torch.Tensor, name, own))
        if of_torch and hasattr(torch, name):
            self.replace_in(torch, name, wrap)

    def replace_in(self, module: Any, name: str, wrap: _Wrap) -> None:
        """Replace a function of a module."""
        self._prepare()
        before = getattr(module, name)
        setattr(module, name, _replacement(self._purpose, module, name, wrap))
        self._before.append((module, name, before))

    def _prepare(self) -> None:
        if not self._before:
            self._dynamo_knows = _make_known_to_dynamo()

    def restore(self) -> None:
        """Restore all attributes."""
        while self._before:
            owner, name, before = self._before.pop()
            if before is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        if not self._dynamo_knows and (rules := sys.modules.get(_DYNAMO_RULES)) is not None:
            # It was imported inside, and has recorded the replacements.
            rules.clear_lru_cache()


_DYNAMO_RULES = "torch._dynamo.trace_rules"


def _make_known_to_dynamo() -> bool:
    """Let dynamo record torch's own functions before they are replaced; return whether it has been imported."""
    rules = sys.modules.get(_DYNAMO_RULES)
    if rules is not None:
        rules.get_torch_obj_rule_map()
    return rules is not None


def _replacement(purpose: str, owner: Any, name: str, wrap: _Wrap) -> Any:
    """Return what replaces an attribute; a new replacement if somebody else has replaced the attribute since."""
    before = getattr(owner, name)
    known = _REPLACEMENTS.get((purpose, owner, name))
    if known is not None and known.__wrapped__ is before:
        return known
    after = _REPLACEMENTS[purpose, owner, name] = wrap(before)
    # TorchScript has to recognise the replacement as well.
    scripted = torch.jit._builtins._get_builtin_table()
    if known is not None:
        scripted.pop(id(known), None)
    if id(before) in scripted:
        scripted[id(after)] = scripted[id(before)]
    return after


#: Functions that bound a number from below.
_FLOORS = ("clamp", "clamp_", "clamp_min", "clamp_min_", "clip", "clip_", "maximum")
_CASTS = ("float", "double", "to", "type", "type_as")
#: Not in place: optimizers count their steps so.
_SUMS: tuple[str, ...] = ("add", "__add__", "__radd__")
_DIFFERENCES: tuple[str, ...] = ("sub", "__sub__")
_FLOOR, _CAST = range(2)
_NUMBERS = (int, float)
_Note = Callable[[torch.Tensor, torch.Tensor], None]
_NoteSum = Callable[[torch.Tensor, torch.Tensor, float], None]
#: What :func:`report_scalar_casts` replaces, and the callbacks of the active contexts: for
#: floors, for casts, for sums with Python numbers, and for casts of masks.
_NOTING = _Replaced("casts")
_NOTING_USERS: list[tuple[_Note, _Note, _NoteSum | None, _Note | None]] = []
_NOTING_LOCK = threading.Lock()


@contextlib.contextmanager
def report_scalar_casts(
    floored: _Note, cast: _Note, *, added: _NoteSum | None = None, mask: _Note | None = None
) -> Iterator[None]:
    """Return a context that reports clamps and casts of zero-dim tensors without gradient, in eager code.

    It is process-wide: each active context is told of all threads' calls.

    Args:
        floored: Called with the clamped tensor and the result.
        cast: Called with the tensor that was cast and the result.
        added: Called with a tensor to which a Python number was added, the result and the number.
        mask: Called with a boolean tensor that has dims and was cast, and the result.
    """

    def noting(function: Callable[..., Any], kind: int, *, in_place: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            first = args[0] if args else None
            if type(first) is not torch.Tensor or first.requires_grad or torch.compiler.is_compiling():
                return function(*args, **kwargs)
            if first.dim() and (kind != _CAST or first.dtype != torch.bool):
                return function(*args, **kwargs)
            before = first
            if in_place:
                before = first.clone()
                before.__dict__.update(first.__dict__)
            result = function(*args, **kwargs)
            for floored, cast, _, mask in tuple(_NOTING_USERS):
                if not first.dim():
                    (floored if kind == _FLOOR else cast)(before, result)
                elif mask is not None:
                    mask(before, result)
            return result

        return functools.wraps(function)(call)

    def noting_sums(function: Callable[..., Any], sign: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            # Most sums are of two tensors.
            if len(args) != 2 or type(args[1]) not in _NUMBERS or kwargs or type(args[0]) is not torch.Tensor:
                return result
            if not (args[0].dim() or args[0].requires_grad or torch.compiler.is_compiling()):
                for *_, added, _ in tuple(_NOTING_USERS):
                    if added is not None:
                        added(args[0], result, sign * args[1])
            return result

        return functools.wraps(function)(call)

    notes = floored, cast, added, mask
    with _NOTING_LOCK:
        # Ranks that run as threads of one process enter and exit in any order.
        if not _NOTING_USERS:
            for kind, names in ((_FLOOR, _FLOORS), (_CAST, _CASTS)):
                for name in names:
                    wrap = functools.partial(noting, kind=kind, in_place=name.endswith("_"))
                    _NOTING.replace(name, wrap, of_torch=kind == _FLOOR)
            for sign, sums in ((1, _SUMS), (-1, _DIFFERENCES)):
                for name in sums:
                    wrap = functools.partial(noting_sums, sign=sign)
                    _NOTING.replace(name, wrap, of_torch=not name.startswith("__"))
        _NOTING_USERS.append(notes)
    try:
        yield
    finally:
        with _NOTING_LOCK:
            _NOTING_USERS.remove(notes)
            if not _NOTING_USERS:
                _NOTING.restore()


#: Functions of tensors that count or average, by the name that they are reported under.
_REDUCTIONS = {
    **{name: name for name in ("mean", "sum", "count_nonzero", "div")},
    **dict.fromkeys(("true_divide", "__truediv__"), "div"),
}
#: Further arithmetic of numbers.
_ARITHMETIC = {
    **dict.fromkeys(("add", "add_", "__add__", "__radd__", "__iadd__"), "add"),
    **dict.fromkeys(("sub", "sub_", "__sub__", "__isub__"), "sub"),
    **dict.fromkeys(("mul", "mul_", "__mul__", "__rmul__", "__imul__"), "mul"),
    **dict.fromkeys(("div_", "__itruediv__"), "div"),
    **dict.fromkeys(("neg", "__neg__"), "neg"),
    "__rsub__": "rsub",
}
#: Losses of ``torch.nn.functional`` that average by default, over labels or over elements.
LABEL_LOSSES = ("cross_entropy", "nll_loss")
ELEMENT_LOSSES = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
)
#: What :func:`report_reductions` replaces, the names of it, and the callbacks by
#: thread; None inside of a call.
_REDUCING = _Replaced("reductions")
_REDUCING_NAMES: set[str] = set()
_REDUCING_USERS: dict[int, Callable[..., None] | None] = {}


@contextlib.contextmanager
def report_reductions(note: Callable[..., None], *, arithmetic: bool) -> Iterator[None]:
    """Return a context that reports calls of this thread that reduce tensors to one number, or compute with numbers.

    Only eager code is seen. Functions are found under their names in ``torch``, ``torch.Tensor`` and
    ``torch.nn.functional``: a function that was imported by name before is not seen.

    Args:
        note: Called with the name (``"div"`` for the operator, too), the arguments, the keyword arguments and the
            result of a call that returns a plain tensor without dims, or with one dim if the name is ``"stack"``. The
            keyword argument ``before`` is the first argument's value if the call wrote to it, else None. Writes of an
            element (``terms[0] = loss``) are reported as ``"write"``, with the tensor of one dim as the result.
        arithmetic: Whether more arithmetic than quotients is reported, and stacks and writes.
    """

    def noting(function: Callable[..., Any], name: str, writes: bool = False) -> Callable[..., Any]:
        dims = 1 if name == "stack" else 0

        def call(*args: Any, **kwargs: Any) -> Any:
            # First, since a compiler traces what follows.
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            thread = threading.get_ident()
            user = _REDUCING_USERS.get(thread)
            if user is None:
                return function(*args, **kwargs)
            # Calls inside of the function, of a torch function mode and of the callback are not reported.
            _REDUCING_USERS[thread] = None
            try:
                before = args[0].clone() if writes and type(args[0]) is torch.Tensor and not args[0].dim() else None
                result = function(*args, **kwargs)
                if type(result) is torch.Tensor and result.dim() == dims:
                    user(name, args, kwargs, result, before=before)
                return result
            finally:
                _REDUCING_USERS[thread] = user

        return functools.wraps(function)(call)

    def noting_writes(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: Any, index: Any, value: Any) -> None:
            function(tensor, index, value)
            if torch.compiler.is_compiling():
                return
            user = _REDUCING_USERS.get(threading.get_ident())
            if type(index) is not int or user is None:
                return
            if type(tensor) is torch.Tensor and tensor.dim() == 1:
                user("write", (tensor, index, value), {}, tensor, before=None)

        return functools.wraps(function)(call)

    thread = threading.get_ident()
    with _NOTING_LOCK:
        outer = _REDUCING_USERS.get(thread)
        for name, kind in (_REDUCTIONS | _ARITHMETIC if arithmetic else _REDUCTIONS).items():
            if name not in _REDUCING_NAMES:
                is_operator = name.startswith("__")
                writes = name.startswith("__i") if is_operator else name.endswith("_")
                wrap = functools.partial(noting, name=kind, writes=writes)
                _REDUCING.replace(name, wrap, of_torch=not (is_operator or writes))
                _REDUCING_NAMES.add(name)
        if arithmetic and "__setitem__" not in _REDUCING_NAMES:
            _REDUCING.replace("__setitem__", noting_writes, of_torch=False)
            _REDUCING_NAMES.add("__setitem__")
        functions = [(torch.nn.functional, name) for name in (*LABEL_LOSSES, *ELEMENT_LOSSES)]
        for module, name in [*functions, (torch, "stack")] if arithmetic else functions:
            if name not in _REDUCING_NAMES:
                _REDUCING.replace_in(module, name, functools.partial(noting, name=name))
                _REDUCING_NAMES.add(name)
        _REDUCING_USERS[thread] = note
    try:
        yield
    finally:
        with _NOTING_LOCK:
            if outer is None:
                del _REDUCING_USERS[thread]
            else:
                _REDUCING_USERS[thread] = outer
            if not _REDUCING_USERS:
                _REDUCING.restore()
                _REDUCING_NAMES.clear()


#: Functions that compute a recurrent layer or cell, on CPU by many operators that they issue from C++.
_RECURRENT = [f"{kind}{end}" for kind in ("gru", "lstm", "rnn_tanh", "rnn_relu") for end in ("", "_cell")]


def replace_recurrent(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Replace the functions that recurrent layers call; return a function that restores them."""
    before = {name: getattr(torch._VF, name) for name in _RECURRENT}
    for name, function in before.items():
        setattr(torch._VF, name, wrap(function))

    def restore() -> None:
        for name, function in before.items():
            setattr(torch._VF, name, function)

    return restore


def original_function(value: Any) -> Any:
    """Return torch's own function if a value is one that replaces it, as ``torch.sum`` in a step; else the value."""
    while isinstance(value, types.FunctionType) and value in _REPLACEMENTS.values():
        value = value.__wrapped__  # type: ignore[attr-defined]
    return value


@contextlib.contextmanager
def original_reductions() -> Iterator[None]:
    """Return a context in which ``torch.mean`` and ``torch.sum`` are torch's own: Lightning's ``log`` compares them."""
    now = {name: getattr(torch, name) for name in ("mean", "sum")}
    replaced = {name: function for name, function in now.items() if original_function(function) is not function}
    for name, function in replaced.items():
        setattr(torch, name, original_function(function))
    try:
        yield
    finally:
        for name, function in replaced.items():
            setattr(torch, name, function)


def _is_alias(first: torch.Tensor, second: torch.Tensor) -> bool:
    if not isinstance(first, DTensor) or not isinstance(second, DTensor):
        return False
    ours, theirs = local_tensor_of(first), local_tensor_of(second)
    # Compared by storage, which an empty shard and a meta tensor also have: the result is the same on all ranks.
    return (
        first.placements == second.placements
        and ours.dtype == theirs.dtype
        and ours.shape == theirs.shape
        and ours.stride() == theirs.stride()
        and storage_key(ours) == storage_key(theirs)
    )


def cell_of(function: Callable[..., Any]) -> types.CellType:
    """Return the closure cell that holds the function wrapped by torch's ``no_grad``, whatever its imported name."""
    for cell in getattr(function, "__closure__", None) or ():
        if callable(cell.cell_contents):
            found: types.CellType = cell
            return found
    raise RuntimeError(
        f"torch {torch.__version__} defines {getattr(function, '__name__', function)} in a form that lightning_pardist"
        " does not know."
    )
