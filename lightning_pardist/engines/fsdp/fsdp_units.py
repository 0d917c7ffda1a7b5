"""FSDP units: submodules whose parameters are gathered together, found or named by a policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

#: A policy: class names, or a function ``module -> bool`` as torch's wrap policies have it.
UnitPolicy = Collection[str] | Callable[[nn.Module], bool]

#: Modules below this are not worth a collective of their own and stay with their parent, in bytes.
MIN_UNIT_BYTES = 256 * 1024
#: A repeated block above this share of the model is split at its own repeated blocks, if it has any.
MAX_UNIT_SHARE = 0.5


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together, right before their module runs, and freed right after.

    Attributes:
        name: The module's name from the root; empty for the root itself.
        module: The module whose call gathers the unit.
        reason: ``"block"`` (repeated), ``"large"`` (one big layer), ``"policy"``, ``"dtype"``, ``"stage"`` (what a
            pipeline runs as one) or ``"root"``.
        parameters: Names of the parameters, from the root.
        numel: Elements in all of them.
        nbytes: Bytes of all of them, whole.
    """

    name: str
    module: nn.Module = field(repr=False, compare=False)
    reason: str
    parameters: tuple[str, ...]
    numel: int
    nbytes: int

    @property
    def class_name(self) -> str:
        """Class of the module as its author wrote it."""
        return original_class(self.module).__name__


def find_fsdp_units(
    module: nn.Module,
    *,
    policy: UnitPolicy | None = None,
    min_unit_bytes: int = MIN_UNIT_BYTES,
    max_unit_share: float = MAX_UNIT_SHARE,
    ignored: Collection[nn.Parameter] = (),
    boundaries: Collection[nn.Module] | None = None,
    closed: Collection[nn.Module] = (),
) -> list[Unit]:
    """Split a module into units; what no unit owns belongs to the root, which comes last. Not collective.

    Repeated blocks (items of ``ModuleList``, ``ModuleDict`` or ``Sequential`` whose class occurs more than once) and
    single layers above ``min_unit_bytes`` become units. A parameter that two units would own goes to the innermost
    unit around both, in most models the root. Where a unit mixes dtypes, submodules of the rarer one become units.

    Args:
        module: Any module, on any device, ``meta`` included.
        policy: Class names, or a function that says of a module whether it is a unit; replaces the search.
        min_unit_bytes: Candidates with fewer bytes stay with their parent. Not applied to a policy.
        max_unit_share: A repeated block with more than this share of all bytes is split at its inner blocks.
        ignored: Parameters that are nobody's (kept whole on every rank).
        boundaries: If given, units are these modules, or lie inside of one of them.
        closed: Modules inside of which there are no units: what they own belongs to a unit around.

    Returns:
        Units in the order of ``module.named_modules()``, inner before outer, the root last.

    Raises:
        ValueError: If the policy names classes that do not occur, or chooses modules that cannot be called.
    """
    skip, inside = set(ignored), _below(closed) - {*closed}
    if policy is None:
        chosen = _by_search(module, skip, min_unit_bytes, max_unit_share, inside)
    else:
        chosen = {unit: why for unit, why in _by_policy(module, policy).items() if unit not in inside}
    if boundaries is not None:
        _keep_inside(chosen, boundaries, skip, None if policy is not None else min_unit_bytes)
    _dissolve_tied(module, chosen, skip)
    _split_dtypes(module, chosen, skip, boundaries, inside)
    return describe_units(module, chosen, skip)


def describe_units(module: nn.Module, chosen: dict[nn.Module, str], ignored: Collection[nn.Parameter]) -> list[Unit]:
    """Turn chosen modules into units, each parameter given to its owner.

    Args:
        module: The root.
        chosen: Module -> reason; the root is added.
        ignored: Parameters that are nobody's.
    """
    reasons = {**chosen, module: "root"}
    names = {child: name for name, child in module.named_modules()}
    owned: dict[nn.Module, list[tuple[str, nn.Parameter]]] = {unit: [] for unit in reasons}
    owners = parameter_owners(module, reasons)
    for name, parameter in module.named_parameters():
        if parameter not in ignored:
            owned[owners[parameter]].append((name, parameter))
    inner_first = [unit for unit in _post_order(module) if unit in reasons]
    return [
        Unit(
            name=names[unit],
            module=unit,
            reason=reasons[unit],
            parameters=tuple(name for name, _ in owned[unit]),
            numel=sum(parameter.numel() for _, parameter in owned[unit]),
            nbytes=sum(_nbytes(parameter) for _, parameter in owned[unit]),
        )
        for unit in inner_first
        if owned[unit] or unit is module
    ]


def parameter_owners(module: nn.Module, units: Collection[nn.Module]) -> dict[nn.Parameter, nn.Module]:
    """The innermost unit around every place where a parameter is registered.

    Args:
        module: The root, itself one of ``units``.
        units: Modules that are units.
    """
    paths: dict[nn.Parameter, list[nn.Module]] = {}
    for path, owner in _walk(module):
        around = [step for step in path if step in units]
        for parameter in owner.parameters(recurse=False):
            known = paths.get(parameter)
            if known is None:
                paths[parameter] = around
            else:
                paths[parameter] = [a for a, b in zip(known, around, strict=False) if a is b]
    return {parameter: around[-1] for parameter, around in paths.items()}


def format_units(units: Sequence[Unit]) -> str:
    """The plan as a table: one line a unit, equal neighbours folded."""
    lines = [f"{'unit':<32} {'class':<24} {'why':<7} {'parameters':>12} {'MB':>9}"]
    run: list[Unit] = []
    for unit in [*units, None]:
        if run and (unit is None or _kind(unit) != _kind(run[-1])):
            name = run[0].name or "(root)"
            if len(run) > 1:
                name = f"{name} .. {run[-1].name} ({len(run)}x)"
            first, megabytes = run[0], run[0].nbytes / 2**20
            lines.append(f"{name:<32} {first.class_name:<24} {first.reason:<7} {first.numel:>12,} {megabytes:>9.2f}")
            run = []
        if unit is not None:
            run.append(unit)
    return "\n".join(lines)


def can_be_called(module: nn.Module) -> bool:
    """Whether a module has a ``forward`` (``ModuleList`` and ``ModuleDict`` have none)."""
    return type(module).forward is not nn.Module.forward and not isinstance(module, torch.jit.ScriptModule)


def original_class(module: nn.Module) -> type:
    """The class before ``fully_shard`` put its own in front."""
    from torch.distributed.fsdp import FSDPModule

    cls = type(module)
    return cls.__mro__[2] if issubclass(cls, FSDPModule) else cls


def _kind(unit: Unit) -> tuple[str, str, int]:
    return (unit.class_name, unit.reason, unit.nbytes)


def _nbytes(parameter: torch.Tensor) -> int:
    return parameter.numel() * parameter.element_size()


def _walk(module: nn.Module, path: tuple[nn.Module, ...] = ()) -> Iterator[tuple[tuple[nn.Module, ...], nn.Module]]:
    """Every place in the tree, shared modules once for each place, with the modules around it."""
    path = (*path, module)
    yield path, module
    for child in module.children():
        if child not in path:
            yield from _walk(child, path)


def _post_order(module: nn.Module, seen: set[nn.Module] | None = None) -> Iterator[nn.Module]:
    """Children before parents, in the order of registration, each once."""
    seen = set() if seen is None else seen
    if module in seen:
        return
    seen.add(module)
    for child in module.children():
        yield from _post_order(child, seen)
    yield module


def _size(module: nn.Module, skip: set[nn.Parameter]) -> int:
    return sum(_nbytes(parameter) for parameter in module.parameters() if parameter not in skip)


def _by_policy(module: nn.Module, policy: UnitPolicy) -> dict[nn.Module, str]:
    if callable(policy):
        chosen = [child for child in module.modules() if child is not module and policy(child)]
        _refuse_silent(module, chosen, "units")
    else:
        chosen = chosen_by_name(module, policy, argument="units")
    return dict.fromkeys(chosen, "policy")


def chosen_by_name(module: nn.Module, classes: Collection[str], *, argument: str) -> list[nn.Module]:
    """Modules below ``module`` whose class has one of these names, with or without that of its Python module.

    Args:
        module: The root.
        classes: Names.
        argument: What the user set, for errors.

    Raises:
        ValueError: If a name does not occur, or means modules that cannot be called.
    """
    wanted = {classes} if isinstance(classes, str) else set(classes)
    known = {name for child in module.modules() for name in _class_names(child)}
    if unknown := sorted(wanted - known):
        raise ValueError(
            f"{argument} names {', '.join(unknown)}, but the module's classes are"
            f" {', '.join(sorted({type(child).__name__ for child in module.modules()}))}. Use some of these."
        )
    chosen = [c for c in module.modules() if c is not module and not wanted.isdisjoint(_class_names(c))]
    _refuse_silent(module, chosen, argument)
    return chosen


def _refuse_silent(module: nn.Module, chosen: Collection[nn.Module], argument: str) -> None:
    names = {child: name for name, child in module.named_modules()}
    if silent := [names[child] for child in chosen if not can_be_called(child)]:
        raise ValueError(
            f"{argument} chooses {', '.join(silent)}, which cannot be called (containers such as ModuleList have no"
            " forward). Name the class of their items."
        )


def _class_names(module: nn.Module) -> set[str]:
    return {type(module).__name__, f"{type(module).__module__}.{type(module).__qualname__}"}


def _by_search(
    module: nn.Module, skip: set[nn.Parameter], min_unit_bytes: int, max_unit_share: float, closed: set[nn.Module]
) -> dict[nn.Module, str]:
    chosen: dict[nn.Module, str] = {}
    limit = max_unit_share * _size(module, skip)

    def visit(parent: nn.Module) -> None:
        repeated = _repeated_items(parent)
        for child in parent.children():
            if child in chosen or child in closed:
                continue
            size = _size(child, skip)
            fits = size >= max(1, min_unit_bytes) and can_be_called(child)
            if fits and child in repeated and not (size > limit and _has_inner_blocks(child, closed)):
                chosen[child] = "block"
            elif fits and (_owns_large(child, skip, min_unit_bytes) or is_torch_composite(child)):
                chosen[child] = "large"
            elif not is_torch_composite(child):
                visit(child)

    visit(module)
    return chosen


def _keep_inside(
    chosen: dict[nn.Module, str],
    boundaries: Collection[nn.Module],
    skip: set[nn.Parameter],
    min_unit_bytes: int | None,
) -> None:
    """Take back units that span several boundaries; one that was inside of such a unit becomes a unit itself."""
    inside = _below(boundaries)
    for unit in list(chosen):
        if unit not in inside:
            del chosen[unit]
    if min_unit_bytes is None:
        return
    for boundary in boundaries:
        has_units = any(inner in chosen for inner in boundary.modules())
        if not has_units and can_be_called(boundary) and _size(boundary, skip) >= max(1, min_unit_bytes):
            chosen[boundary] = "stage"


def _below(modules: Collection[nn.Module]) -> set[nn.Module]:
    return {inner for module in modules for inner in module.modules()}


def _repeated_items(parent: nn.Module) -> set[nn.Module]:
    if not isinstance(parent, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        return set()
    classes = Counter(type(item) for item in parent.children())
    return {item for item in parent.children() if classes[type(item)] > 1}


def _has_inner_blocks(module: nn.Module, closed: set[nn.Module]) -> bool:
    return any(_repeated_items(child) - closed for child in module.modules())


def _owns_large(module: nn.Module, skip: set[nn.Parameter], min_unit_bytes: int) -> bool:
    """One layer that is big by itself. Modules with children are left to the search, they may be called in part."""
    own = [parameter for parameter in module.parameters(recurse=False) if parameter not in skip]
    return not any(True for _ in module.children()) and sum(map(_nbytes, own)) >= max(1, min_unit_bytes)


def is_torch_composite(module: nn.Module) -> bool:
    """PyTorch's own modules with children (attention, encoder layers) read their children's parameters directly."""
    if not type(module).__module__.startswith(("torch.nn", "torch.ao")) or not can_be_called(module):
        return False
    # Containers, and nn.TransformerEncoder and its like, only iterate over their items: those are found as blocks.
    holds_list = any(isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential)) for child in module.modules())
    return not holds_list and any(True for _ in module.children())


def _dissolve_tied(module: nn.Module, chosen: dict[nn.Module, str], skip: set[nn.Parameter]) -> None:
    """Take back units until every parameter can be reached by its owner without passing through another unit.

    ``fully_shard`` finds a unit's parameters in modules below it that are in no inner unit. A parameter tied between
    two inner units has no such place: the smaller of the two is dissolved into what is around it.
    """
    while True:
        units = {*chosen, module}
        owners = parameter_owners(module, units)
        reachable: dict[nn.Parameter, set[nn.Module]] = {}
        holders: dict[nn.Parameter, list[nn.Module]] = {}
        for path, place in _walk(module):
            innermost = [step for step in path if step in units][-1]
            for parameter in place.parameters(recurse=False):
                reachable.setdefault(parameter, set()).add(innermost)
                if innermost not in holders.setdefault(parameter, []):
                    holders[parameter].append(innermost)
        lost = [
            parameter
            for parameter, owner in owners.items()
            if parameter not in skip and owner not in reachable[parameter]
        ]
        if not lost:
            break
        inner = [unit for unit in holders[lost[0]] if unit is not module]
        del chosen[min(inner, key=lambda unit: _size(unit, skip))]
    owned = set(owners.values())
    for unit in list(chosen):
        if unit not in owned:
            del chosen[unit]


def _split_dtypes(
    module: nn.Module,
    chosen: dict[nn.Module, str],
    skip: set[nn.Parameter],
    boundaries: Collection[nn.Module] | None,
    closed: Collection[nn.Module],
) -> None:
    """Make submodules of a unit's rarer dtypes units: ``fully_shard`` reduces one dtype a unit."""
    inside = _below([module] if boundaries is None else boundaries)
    for unit in [*chosen, module]:
        owners = parameter_owners(module, {*chosen, module})
        tally: Counter[torch.dtype] = Counter()
        for parameter, owner in owners.items():
            if owner is unit and parameter not in skip and shardable(parameter):
                tally[parameter.dtype] += _nbytes(parameter)
        if len(tally) < 2:
            continue
        main = tally.most_common(1)[0][0]
        for child in list(unit.modules()):
            own = [parameter for parameter in child.parameters(recurse=False) if parameter not in skip]
            alone = all(owners[parameter] is unit and parameter.dtype != main for parameter in own)
            tied = any(_places(module, parameter) > 1 for parameter in own)
            one_dtype = len({parameter.dtype for parameter in own}) == 1
            single = can_be_called(child) and not any(True for _ in child.children())
            free = child is not unit and child not in chosen and child in inside and child not in closed
            if free and own and alone and one_dtype and not tied and single:
                chosen[child] = "dtype"


def shardable(parameter: torch.Tensor) -> bool:
    """Whether there is anything to shard: scalars and empty parameters stay whole on every rank."""
    return parameter.dim() > 0 and parameter.numel() > 0


def _places(module: nn.Module, parameter: nn.Parameter) -> int:
    return sum(1 for _, place in _walk(module) for own in place.parameters(recurse=False) if own is parameter)
