"""FSDP units: submodules whose parameters are gathered together, found or named by a policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

#: A policy: class names, or a function ``module -> bool`` like torch's wrap policies.
UnitPolicy = Collection[str] | Callable[[nn.Module], bool]

#: Minimum size of a unit, in bytes. Smaller modules are not worth a collective and stay with their parent.
MIN_UNIT_BYTES = 256 * 1024
#: A repeated block above this share of the model is split into its own repeated blocks, if it has any.
MAX_UNIT_SHARE = 0.5


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together right before their module runs, and freed right after.

    Attributes:
        name: The module's name from the root; empty for the root itself.
        module: The module whose call gathers the unit.
        reason: ``"block"`` (repeated), ``"large"`` (one big layer), ``"policy"``, ``"dtype"``, ``"stage"`` (a module
            that a pipeline runs as a whole) or ``"root"``.
        parameters: Names of the parameters, from the root.
        numel: Elements in all of them.
        nbytes: Bytes of all of them, unsharded.
    """

    name: str
    module: nn.Module = field(repr=False, compare=False)
    reason: str
    parameters: tuple[str, ...]
    numel: int
    nbytes: int

    @property
    def class_name(self) -> str:
        """Name of the module's class before ``fully_shard``."""
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
    """Split a module into units; parameters outside all units belong to the root, which comes last. Not collective.

    Repeated blocks (items of ``ModuleList``, ``ModuleDict`` or ``Sequential`` whose class occurs more than once) and
    single layers above ``min_unit_bytes`` become units. A parameter that two units would own goes to the innermost
    unit around both, in most models the root. If a unit mixes dtypes, submodules of the rarer dtype become units.

    Args:
        module: Any module, on any device, ``meta`` included.
        policy: Class names, or a function that returns whether a module is a unit; replaces the search.
        min_unit_bytes: Candidates with fewer bytes stay with their parent. Not applied to a policy.
        max_unit_share: A repeated block with more than this share of all bytes is split at its inner blocks.
        ignored: Parameters that no unit owns (kept whole on every rank).
        boundaries: If given, every unit is one of these modules or inside one of them.
        closed: Modules without inner units: what they own belongs to themselves or to a unit around them.

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
    """Build units from chosen modules, and assign each parameter to its owner.

    Args:
        module: The root.
        chosen: Module -> reason; the root is added.
        ignored: Parameters that no unit owns.
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
    """Return for each parameter the innermost unit around all places where it is registered.

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
    """Format the plan as a table: one line per unit, equal neighbours folded."""
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
    """Return whether a module has a ``forward`` (``ModuleList`` and ``ModuleDict`` have none)."""
    return type(module).forward is not nn.Module.forward and not isinstance(module, torch.jit.ScriptModule)


def original_class(module: nn.Module) -> type:
    """Return a module's class without the one that ``fully_shard`` puts in front."""
    from lightning_pardist.compat.fsdp2 import unsharded_class

    return unsharded_class(type(module))


def _kind(unit: Unit) -> tuple[str, str, int]:
    return (unit.class_name, unit.reason, unit.nbytes)


def _nbytes(parameter: torch.Tensor) -> int:
    return parameter.numel() * parameter.element_size()


def _walk(module: nn.Module, path: tuple[nn.Module, ...] = ()) -> Iterator[tuple[tuple[nn.Module, ...], nn.Module]]:
    """Yield every place in the module tree with its path of modules; shared modules occur once per place."""
    path = (*path, module)
    yield path, module
    for child in module.children():
        if child not in path:
            yield from _walk(child, path)


def _post_order(module: nn.Module, seen: set[nn.Module] | None = None) -> Iterator[nn.Module]:
    """Yield each module once, children before parents, in order of registration."""
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
    """Return modules below ``module`` whose class has one of these names, with or without its Python module's name.

    Args:
        module: The root.
        classes: Class names.
        argument: Name of the user's argument, for errors.

    Raises:
        ValueError: If a name does not occur, or matches modules that cannot be called.
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
    """Drop units outside of all boundaries; a boundary without inner units becomes a unit if it is large enough."""
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
    """Return whether a module is one large layer; modules with children are searched, as they may run in part."""
    own = [parameter for parameter in module.parameters(recurse=False) if parameter not in skip]
    return not any(True for _ in module.children()) and sum(map(_nbytes, own)) >= max(1, min_unit_bytes)


def is_torch_composite(module: nn.Module) -> bool:
    """Return whether a PyTorch module reads its children's parameters directly (attention, encoder layers)."""
    if not type(module).__module__.startswith(("torch.nn", "torch.ao")) or not can_be_called(module):
        return False
    # Containers, and the like of nn.TransformerEncoder, only iterate over their items: those are found as blocks.
    holds_list = any(isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential)) for child in module.modules())
    return not holds_list and any(True for _ in module.children())


def _dissolve_tied(module: nn.Module, chosen: dict[nn.Module, str], skip: set[nn.Parameter]) -> None:
    """Drop units until every owner can reach its parameters without passing through another unit.

    ``fully_shard`` collects a unit's parameters from modules below it that are in no inner unit. A parameter tied
    between two inner units has no such place: the smaller of the two is dissolved into the unit around it.
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
    """Make units of submodules with a unit's rarer dtypes: ``fully_shard`` reduces one dtype per unit."""
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
    """Return whether a parameter can be sharded: scalars and empty parameters stay whole on every rank."""
    return parameter.dim() > 0 and parameter.numel() > 0


def _places(module: nn.Module, parameter: nn.Parameter) -> int:
    return sum(1 for _, place in _walk(module) for own in place.parameters(recurse=False) if own is parameter)
