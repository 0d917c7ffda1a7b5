"""A readable refusal for Trainers of the separate ``pytorch_lightning`` package.

``lightning.pytorch`` and ``pytorch_lightning`` are the same code under two names, with classes and a registry of
strategies each. Ours are of the former. In the registry of the latter our names stand for the sentence that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, NoReturn

from lightning_pardist.compat.on_import import after_import

_MODULE = "pytorch_lightning.strategies"


def refuse_names(names: Iterable[str]) -> None:
    """Let ``pytorch_lightning`` explain each of ``names``, whether it is imported already or later. Imports nothing.

    Args:
        names: What a user may pass as ``Trainer(strategy=...)``.
    """
    names = tuple(names)
    after_import(_MODULE, lambda module: _register(module, names))


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
