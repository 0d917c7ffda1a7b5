"""Detection of the modules of a step that are experts chosen by a router.

Detection uses what happens in a step, not class names. A module calls the members of a ``ModuleList`` of equal parts,
or computes with parameters that are stacked along an expert dim. Near it, a score is computed for each expert
(``topk``, ``softmax``, ...), which later weighs the experts' results or selects their inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_pardist.compat import pytree
from lightning_pardist.compat.modules import own_parameters
from lightning_pardist.engines.experts.score_flow import ScoreFlow

#: Functions by which a router scores or chooses, by plain name.
_CHOOSING = frozenset(
    ["topk", "softmax", "log_softmax", "sigmoid", "argmax", "max", "sort", "argsort", "multinomial", "gumbel_softmax"]
)
#: Functions that a step may apply to parameters stacked along an expert dim.
_STACKED_USES = frozenset(
    ["__getitem__", "select", "index_select", "unbind", "bmm", "baddbmm", "matmul", "__matmul__", "__rmatmul__"]
    + ["einsum", "grouped_mm", "_grouped_mm", "transpose", "permute", "__get__", "to", "chunk", "split", "__iter__"]
    + ["view", "reshape", "unsqueeze", "expand", "flatten", "float", "half", "bfloat16"]
    + ["dim", "size", "data_ptr", "contiguous", "is_contiguous", "stride", "numel", "__len__", "grouped_mm_fallback"]
)
#: Those of them that do not compute.
_LOOKS = frozenset(["__get__", "dim", "size", "data_ptr", "is_contiguous", "stride", "numel", "__len__"])


@dataclass
class ExpertLayer:
    """Experts that one module chooses among.

    Attributes:
        name: Name of the list of experts, or of the module that owns stacked parameters.
        runner: Name of the module whose forward computes with them; the same as ``name`` for stacked parameters.
        count: Number of experts.
        stacked: Names of the runner's own parameters that hold all experts along their first dim.
        lists: Names of lists whose member ``e`` belongs to expert ``e``; empty if stacked.
        call: Arguments of the runner's first call in the step.
        inputs: For lists, the arguments of the first member that was called.
        output: For lists, that member's result; for stacked parameters, the runner's.
        outside: Whether experts of a list are called outside of any module's forward.
        unsplit_reason: Reason why they cannot be distributed; empty if they can.
    """

    name: str
    runner: str
    count: int
    stacked: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    call: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
    inputs: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
    output: Any = None
    outside: bool = False
    unsplit_reason: str = ""

    def forget_batch(self) -> None:
        """Release the tensors of the batch with which the layer was found."""
        self.call, self.inputs, self.output = ((), {}), ((), {}), None

    def parameter_names(self, module: nn.Module) -> list[str]:
        """Return the full names of the parameters of all experts."""
        if self.stacked:
            # The root module itself may be the runner, with an empty name.
            return [f"{self.runner}.{name}".lstrip(".") for name in self.stacked]
        return [
            f"{prefix}.{name}" for prefix in self.lists for name, _ in module.get_submodule(prefix).named_parameters()
        ]

    def experts(self, module: nn.Module) -> list[list[nn.Module]]:
        """Return the modules of each expert; empty if parameters are stacked."""
        lists = [module.get_submodule(name) for name in self.lists]
        return [[each[index] for each in lists] for index in range(self.count)] if lists else []  # type: ignore[index]


@dataclass
class _Seen:
    """Observations of one candidate module in a step."""

    callers: list[str | None] = field(default_factory=list)
    around: set[str] = field(default_factory=set)
    call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    output: Any = None


def find_layers(
    module: nn.Module,
    step: Callable[[], Any],
    *,
    chosen: Sequence[str] | None = None,
    left: list[ExpertLayer] | None = None,
) -> list[ExpertLayer]:
    """Find layers of experts by running a step. Not collective.

    Args:
        module: The user's module, not distributed.
        step: Runs the module on a batch.
        chosen: Name patterns (``*`` for any part) of the only layers to take as experts; by default, those near
            which the step computes a score with one entry per expert.
        left: Extended with the layers that cannot be distributed, each with the reason.

    Returns:
        The layers, in the order of the module's names.
    """
    watch = _Watch(module)
    with watch.running():
        step()
    found: dict[str, ExpertLayer] = {}
    for name, child in module.named_modules():
        layer = watch.stacked(name, child) if not isinstance(child, nn.ModuleList) else watch.listed(name, child)
        if layer is None:
            continue
        if chosen is None and not watch.is_routed(layer):
            continue
        if chosen is not None and not any(fnmatchcase(layer.name, pattern) for pattern in chosen):
            continue
        before = next((each for each in found.values() if each.runner == layer.runner), None)
        around = next((each.name for each in found.values() if layer.name.startswith(f"{each.name}.")), None)
        if around is not None:
            layer.unsplit_reason = f"they are parts of the experts {around!r}"
        elif layer.unsplit_reason:
            pass
        elif before is None:
            found[layer.name] = layer
        elif layer.lists and before.lists and before.count == layer.count:
            # One expert has parts in several lists, such as lists of first and of second linear layers.
            before.lists += layer.lists
        else:
            layer.unsplit_reason = f"{layer.runner!r} also computes with {before.name!r}, which are distributed"
        if left is not None and layer.unsplit_reason:
            left.append(layer)
    return list(found.values())


class _Watch:
    """Records module calls and the use of possibly stacked parameters in one run."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.names = {child: name for name, child in module.named_modules()}
        self.seen: dict[str, _Seen] = {name: _Seen() for name in self.names.values()}
        self.stack: list[str] = []
        self.uses: dict[int, set[str]] = {}
        several: dict[int, int] = {}
        for _, parameter in module.named_parameters(remove_duplicate=False):
            several[id(parameter)] = several.get(id(parameter), 0) + 1
        #: Ids of parameters that are used in several places of the module, and cannot be distributed in one of them.
        self.tied = {number for number, times in several.items() if times > 1}
        #: Names of modules whose arguments may be needed.
        self.kept = self._candidates()
        #: Member name -> name of its list of modules.
        self.list_of: dict[str, str] = {}
        counts: set[int] = set()
        for child, name in self.names.items():
            if isinstance(child, nn.ModuleList) and len(child) > 1:
                counts.add(len(child))
                self.list_of.update({f"{name}.{key}" if name else key: name for key, _ in child.named_children()})
            counts.update(p.shape[0] for p in own_parameters(child).values() if p is not None and p.dim() >= 3)
        self.flow = ScoreFlow(counts)
        for child, name in self.names.items():
            own = [value for value in own_parameters(child).values() if value is not None and value.dim() >= 2]
            if any(value.dim() >= 3 for value in own):
                self.flow.own(own, name)

    def _candidates(self) -> set[str]:
        kept: set[str] = set()
        for child, name in self.names.items():
            if any(p is not None and p.dim() >= 3 for p in own_parameters(child).values()):
                kept.add(name)
            if isinstance(child, nn.ModuleList) and _equal_parts(child):
                parts = name.split(".") if name else []
                kept.update(".".join(parts[:length]) for length in range(len(parts)))
                kept.update(f"{name}.{key}" if name else key for key, _ in child.named_children())
        return kept

    @contextmanager
    def running(self) -> Iterator[None]:
        handles = []
        for child, name in self.names.items():
            handles.append(child.register_forward_pre_hook(self._enter(name), with_kwargs=True, prepend=True))
            handles.append(child.register_forward_hook(self._leave(name), always_call=True))
        for child in self.names:
            for parameter in own_parameters(child).values():
                if parameter is not None and parameter.dim() >= 2:
                    self.uses[id(parameter)] = set()
        try:
            with _Functions(self):
                yield
        finally:
            for handle in handles:
                handle.remove()
            self.stack.clear()

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen = self.seen[name]
            seen.callers.append(self.stack[-1] if self.stack else None)
            seen.around.update(self.stack)
            if seen.call is None and name in self.kept:
                seen.call = pytree.tree_map(_detached, (args, kwargs))
            caller = self.stack[-1] if self.stack else None
            self.flow.enter(name, self.list_of.get(name), (args, kwargs), caller=caller)
            self.stack.append(name)

        return hook

    def _leave(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self.seen[name].output is None and name in self.kept:
                self.seen[name].output = pytree.tree_map(_detached, output)
            self.flow.leave(name, self.list_of.get(name), output)
            if self.stack:
                self.stack.pop()

        return hook

    def note(self, name: str, tensors: Sequence[Tensor], result: Any) -> Any:
        """Record a function call, and return its result."""
        for tensor in tensors:
            if id(tensor) in self.uses:
                self.uses[id(tensor)].add(name)
        scores = name in _CHOOSING and bool(tensors)
        place = (self.stack[-1], self.stack[-2] if len(self.stack) > 1 else None) if self.stack else None
        return self.flow.called(name, tensors, result, place=place, scores=scores)

    def stacked(self, name: str, child: nn.Module) -> ExpertLayer | None:
        """Return the layer formed by this module's stacked parameters, or None."""
        call = self.seen[name].call
        own = {key: value for key, value in own_parameters(child).items() if value is not None}
        large = [value for value in own.values() if value.dim() >= 3]
        if call is None or not large or large[0].shape[0] < 2:
            return None
        count = large[0].shape[0]
        names, others = [], set()
        for key, value in own.items():
            uses = self.uses.get(id(value), set())
            if value.dim() < 2 or value.shape[0] != count or not uses - _LOOKS:
                continue
            if id(value) in self.tied:
                others.add("they are tied: the module has them in several places")
            elif not uses <= _STACKED_USES:
                others.add(f"{', '.join(sorted(uses - _STACKED_USES))} uses all of them at once")
            else:
                names.append(key)
        layer = ExpertLayer(name, name, count, stacked=tuple(names), call=call, output=self.seen[name].output)
        if not any(own[key].dim() >= 3 for key in names):
            if not others:
                return None
            layer.unsplit_reason = " and ".join(sorted(others))
        return layer

    def listed(self, name: str, child: nn.ModuleList) -> ExpertLayer | None:
        """Return the layer formed by the experts of this list, or None."""
        members = [f"{name}.{key}" if name else key for key, _ in child.named_children()]
        callers = {caller for member in members for caller in self.seen[member].callers}
        if len(members) < 2 or not callers:
            return None
        why = _unequal_reason(child)
        if not why and any(id(parameter) in self.tied for parameter in child.parameters()):
            why = "some of their parameters are tied: the module has them in several places"
        if not why and len(callers) > 1:
            why = f"several modules call them ({', '.join(sorted(repr(caller or 'the step') for caller in callers))})"
        called = [member for member in members if self.seen[member].call is not None]
        runner = sorted(callers, key=lambda caller: caller or "")[0]
        if why:
            return ExpertLayer(name, runner or "", len(members), lists=(name,), unsplit_reason=why)
        first = self.seen[called[0]]
        # If no module's forward is running, the step itself calls them.
        call = ((), {}) if runner is None else self.seen[runner].call
        if call is None or first.call is None:
            return None
        return ExpertLayer(
            name,
            runner or "",
            len(members),
            lists=(name,),
            call=call,
            inputs=first.call,
            output=first.output,
            outside=runner is None,
        )

    def is_routed(self, layer: ExpertLayer) -> bool:
        """Return whether a score with one entry per expert is computed near the layer, for it and outside of it."""
        places: set[str | None] = {layer.runner}
        if layer.stacked:
            # The router is a sibling of the module, or its caller chooses.
            places |= set(self.seen[layer.name].callers)
        inside = {name for name in self.seen for each in (layer.lists or (layer.name,)) if name.startswith(f"{each}.")}
        scores = {score.place for score in self.flow.reached(layer.name) if score.count == layer.count}
        direct = {name for name in self.seen if places & set(self.seen[name].callers)}
        return bool(scores & (places | direct) - inside)


class _Functions(TorchFunctionMode):
    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        result = func(*args, **(kwargs or {}))
        return self.watch.note(getattr(func, "__name__", str(func)), tensors, result)


def _equal_parts(modules: nn.ModuleList) -> bool:
    """Return whether there are several members, with own parameters of equal names and shapes, and no buffers."""
    return len(modules) > 1 and not _unequal_reason(modules)


def _unequal_reason(modules: nn.ModuleList) -> str:
    """Return the reason why members cannot be distributed over ranks; empty if they can."""
    shapes = [[(key, tuple(p.shape), p.dtype) for key, p in member.named_parameters()] for member in modules]
    if not shapes[0] or any(each != shapes[0] for each in shapes):
        return "they have no parameters, or parameters of different names, shapes or dtypes"
    owned = [id(parameter) for member in modules for parameter in member.parameters()]
    if len(set(owned)) != len(owned):
        return "they share parameters"
    return "they have buffers" if any(True for _ in modules.buffers()) else ""


def _detached(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) and type(leaf) in (Tensor, nn.Parameter) else leaf
