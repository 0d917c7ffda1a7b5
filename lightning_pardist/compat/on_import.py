"""Callbacks before or after the import of another package, without importing it.

``import lightning_pardist`` loads neither torch nor Lightning; its patches of them are applied when they are imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def before_import(name: str, action: Callable[[], None]) -> None:
    """Call ``action`` just before module ``name`` is imported or looked up; never if it is imported already.

    Args:
        name: Full name of the module.
        action: Called once. A second call of this function for the same name replaces the first.
    """
    forget(name)
    if name not in sys.modules:
        sys.meta_path.insert(0, _Before(name, action))


def after_import(name: str, action: Callable[[ModuleType], None]) -> None:
    """Call ``action`` with module ``name`` once it has been imported, at once if it is imported already.

    Args:
        name: Full name of the module.
        action: Called once. A second call of this function for the same name replaces the first.
    """
    forget(name)
    if (module := sys.modules.get(name)) is not None:
        action(module)
    else:
        sys.meta_path.insert(0, _After(name, action))


def forget(name: str) -> None:
    """Remove the callback for the import of module ``name``."""
    sys.meta_path[:] = [f for f in sys.meta_path if not (isinstance(f, _Before | _After) and f.name == name)]


class _Before(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self.name = name
        self._action = action

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname == self.name:
            forget(self.name)
            self._action()


class _After(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self.name = name
        self._action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        # Stays until the module has been executed: looking up a spec is not an import.
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((found for found in specs if found is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                forget(self.name)
                self._action(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
