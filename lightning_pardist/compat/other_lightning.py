"""The separate ``pytorch_lightning`` package: its Trainers refuse our names readably, or it is taken for Lightning's.

``lightning.pytorch`` and ``pytorch_lightning`` are the same code under two names, with classes and a registry of
strategies each. Ours are of the former. In the registry of the latter our names stand for the sentence that says so,
until :func:`alias_pytorch_lightning` makes both names one package.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from lightning_pardist.compat.on_import import after_import, forget

_REGISTRY = "pytorch_lightning.strategies"
#: Set for the processes that this one starts, which may import the packages in another order.
_VARIABLE = "PARDIST_ALIAS_PYTORCH_LIGHTNING"
#: What is imported in place of what; the longest name that fits comes first.
_ALIASES = {
    "pytorch_lightning.__about__": "lightning.__about__",
    "pytorch_lightning.__version__": "lightning.__version__",
    "pytorch_lightning": "lightning.pytorch",
    "lightning_fabric.__about__": "lightning.__about__",
    "lightning_fabric.__version__": "lightning.__version__",
    "lightning_fabric": "lightning.fabric",
}


def refuse_names(names: Iterable[str]) -> None:
    """Let ``pytorch_lightning`` explain each of ``names``, whether it is imported already or later. Imports nothing.

    Args:
        names: What a user may pass as ``Trainer(strategy=...)``.
    """
    names = tuple(names)
    if _alias() is None:
        after_import(_REGISTRY, lambda module: _register(module, names))


def alias_pytorch_lightning() -> None:
    """Let ``import pytorch_lightning`` give ``lightning.pytorch``, for programs that are written for the former.

    ``lightning_fabric`` gives ``lightning.fabric`` in the same way. From then on both names stand for the same modules
    and classes, in this process and those it starts, so a LightningModule of the one trains in a Trainer of the other.
    Called before anything imports ``pytorch_lightning``; ``PARDIST_ALIAS_PYTORCH_LIGHTNING=1`` does the same at
    ``import lightning_pardist``. A second call changes nothing. Where a process that this one starts has imported
    ``pytorch_lightning`` before ``lightning_pardist``, it keeps two packages.

    Raises:
        RuntimeError: If ``pytorch_lightning`` or ``lightning_fabric`` is imported already.
    """
    if _alias() is not None:
        return
    if early := [name for name in ("pytorch_lightning", "lightning_fabric") if name in sys.modules]:
        raise RuntimeError(
            f"{early[0]} is imported already, so it cannot become another name of {_ALIASES[early[0]]}. Import"
            f" lightning_pardist and call alias_pytorch_lightning() (or set {_VARIABLE}=1) before anything imports it."
        )
    forget(_REGISTRY)
    sys.meta_path.insert(0, _Alias())
    os.environ.setdefault(_VARIABLE, "inherited")


def _alias() -> _Alias | None:
    return next((finder for finder in sys.meta_path if isinstance(finder, _Alias)), None)


class _Alias(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules under a second name, and hands out the ones that the first name has."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        alias = next((each for each in _ALIASES if fullname == each or fullname.startswith(f"{each}.")), None)
        if alias is None:
            return None
        name = _ALIASES[alias] + fullname.removeprefix(alias)
        if importlib.util.find_spec(name) is None:
            # The file of the other package would bring its classes back.
            raise ModuleNotFoundError(f"No module named {name!r} (for {fullname!r})", name=fullname)
        return ModuleSpec(fullname, self, loader_state=name)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(spec.loader_state)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back, which the import system has replaced; its code has run."""
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state


def _register(module: ModuleType, names: Iterable[str]) -> None:
    for name in names:
        module.StrategyRegistry.register(name, _refusal(name), description="needs lightning.pytorch", override=True)


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(**_: Any) -> NoReturn:
        raise ValueError(
            f"strategy={name!r} belongs to lightning.pytorch, but this Trainer comes from the separate"
            " pytorch_lightning package. Use `import lightning.pytorch as pl` in place of"
            " `import pytorch_lightning as pl`, or in a program that is not yours"
            " `lightning_pardist.alias_pytorch_lightning()` before it is imported."
        )

    return refuse
