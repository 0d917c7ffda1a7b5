"""The separate ``pytorch_lightning`` package: readable errors for our strategy names, or an alias of Lightning's.

``lightning.pytorch`` and ``pytorch_lightning`` are the same code under two names, each with its own classes and
strategy registry. Our strategies derive from the former. In the registry of the latter, our names raise an error that
explains this, until :func:`alias_pytorch_lightning` makes both names one package.
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
#: Inherited by child processes, which may import the packages in another order.
_VARIABLE = "PARDIST_ALIAS_PYTORCH_LIGHTNING"
#: Aliases and the modules they import; a longer name comes before its prefix.
_ALIASES = {
    "pytorch_lightning.__about__": "lightning.__about__",
    "pytorch_lightning.__version__": "lightning.__version__",
    "pytorch_lightning": "lightning.pytorch",
    "lightning_fabric.__about__": "lightning.__about__",
    "lightning_fabric.__version__": "lightning.__version__",
    "lightning_fabric": "lightning.fabric",
}


def refuse_names(names: Iterable[str]) -> None:
    """Register ``names`` in ``pytorch_lightning`` as explained errors, now or when it is imported. Imports nothing.

    Args:
        names: Strategy names that a user may pass as ``Trainer(strategy=...)``.
    """
    names = tuple(names)
    if _alias() is None:
        after_import(_REGISTRY, lambda module: _register(module, names))


def alias_pytorch_lightning() -> None:
    """Make ``import pytorch_lightning`` return ``lightning.pytorch``, for programs written for the former.

    ``lightning_fabric`` becomes ``lightning.fabric`` in the same way. From then on both names refer to the same modules
    and classes, in this process and its child processes, so a LightningModule of one trains in a Trainer of the other.
    Call it before anything imports ``pytorch_lightning``; ``PARDIST_ALIAS_PYTORCH_LIGHTNING=1`` does the same at
    ``import lightning_pardist``. A second call changes nothing. A child process that imports ``pytorch_lightning``
    before ``lightning_pardist`` keeps two packages.

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
    """Import finder that resolves an aliased module name to the module of the original name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        alias = next((each for each in _ALIASES if fullname == each or fullname.startswith(f"{each}.")), None)
        if alias is None:
            return None
        name = _ALIASES[alias] + fullname.removeprefix(alias)
        if importlib.util.find_spec(name) is None:
            # Loading the file of the other package would define its classes again.
            raise ModuleNotFoundError(f"No module named {name!r} (for {fullname!r})", name=fullname)
        return ModuleSpec(fullname, self, loader_state=name)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(spec.loader_state)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec, which the import system has replaced; its code has already run."""
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
