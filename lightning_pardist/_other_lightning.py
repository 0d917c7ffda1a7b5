"""A readable refusal for Trainers of the separate ``pytorch_lightning`` package.

``lightning.pytorch`` and ``pytorch_lightning`` are the same code under two names, with classes and a registry of
strategies each. Ours are of the former. In the registry of the latter our names stand for the sentence that says so.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, NoReturn

_MODULE = "pytorch_lightning.strategies"


def refuse_names(names: Iterable[str]) -> None:
    """Let ``pytorch_lightning`` explain each of ``names``, whether it is imported already or later. Imports nothing.

    Args:
        names: What a user may pass as ``Trainer(strategy=...)``.
    """
    names = tuple(names)
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    module = sys.modules.get(_MODULE)
    if module is not None and hasattr(module, "StrategyRegistry"):
        _register(module, names)
    else:
        sys.meta_path.insert(0, _Finder(names))


def _register(module: ModuleType, names: Iterable[str]) -> None:
    for name in names:
        module.StrategyRegistry.register(name, _refusal(name), description="needs lightning.pytorch", override=True)


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(**_: Any) -> NoReturn:
        raise ValueError(
            f"strategy={name!r} belongs to lightning.pytorch, but this Trainer comes from the separate"
            " pytorch_lightning package. Use `import lightning.pytorch as pl` in place of"
            " `import pytorch_lightning as pl`."
        )

    return refuse


class _Finder(importlib.abc.MetaPathFinder):
    """Registers the names as soon as ``pytorch_lightning.strategies`` has been imported by somebody."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _register(module, self._names)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
