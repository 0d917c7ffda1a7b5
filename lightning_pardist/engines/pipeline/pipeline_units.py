"""Selection of units, the modules between which a pipeline may be cut.

A *unit* is a module with parameters that one stage runs as a whole. By default it is an item of a ``ModuleList``,
``ModuleDict`` or ``Sequential`` (a transformer block, a residual block) or, outside of these, a single layer.
Everything else (the root, containers, dropout, the loss) is *free* code, which every stage that reaches it runs again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from torch import nn
from torch.nn.utils import parametrize


@dataclass(frozen=True)
class Grain:
    """Granularity of units: corrections to the default rule, found from recorded runs or set by the user.

    Attributes:
        whole: Names of modules to take as one unit although the rule would split them.
        opened: Names of modules to split although the rule would take them as one unit.
        shut: Names of modules that are never split.
    """

    whole: frozenset[str] = field(default_factory=frozenset)
    opened: frozenset[str] = field(default_factory=frozenset)
    shut: frozenset[str] = field(default_factory=frozenset)

    @classmethod
    def around(cls, names: Iterable[str]) -> Grain:
        """Return the default rule with some modules that are always one unit, whatever recorded runs show."""
        shut = frozenset(names)
        return cls(whole=shut, shut=shut)

    def take_whole(self, name: str) -> Grain:
        """Return a grain with one more module as a single unit."""
        return replace(self, whole=self.whole | {name})

    def open(self, name: str) -> Grain:
        """Return a grain with one more module split into smaller units."""
        return replace(self, opened=self.opened | {name})


def find_pipeline_units(root: nn.Module, grain: Grain = Grain()) -> dict[str, nn.Module]:
    """Return the units of a module by name, in order of registration, without nested units or duplicates.

    Args:
        root: The module to split. It is never a unit itself.
        grain: Corrections to the rule.
    """
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def visit(module: nn.Module, name: str, is_item: bool) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        if name and name not in grain.opened and _is_unit(module, name, is_item, grain):
            found[name] = module
            return
        items = _is_list(module)
        for child_name, child in module.named_children():
            visit(child, f"{name}.{child_name}" if name else child_name, items)

    visit(root, "", False)
    return found


def can_open(module: nn.Module) -> bool:
    """Return whether a unit contains smaller units."""
    return any(_has_parameters(child) for child in module.children()) and not parametrize.is_parametrized(module)


def _is_unit(module: nn.Module, name: str, is_item: bool, grain: Grain) -> bool:
    if name in grain.whole:
        return True
    if not _has_parameters(module) or _is_list(module):
        return False
    if is_item:
        return True
    owns = next(module.parameters(recurse=False), None) is not None
    return parametrize.is_parametrized(module) or (owns and not can_open(module))


def _is_list(module: nn.Module) -> bool:
    """Return whether a module only stores or chains its children."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return True
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
