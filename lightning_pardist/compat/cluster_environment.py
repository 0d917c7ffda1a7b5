"""Trainers with a strategy of ours find their cluster environment in our way, and names like ours are checked.

Lightning makes its own environment before it makes a strategy that was chosen by name, and its own SLURM class refuses
``--ntasks`` there. A strategy that is not ours sees no difference. An unknown name is told Lightning's names alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from lightning_pardist.compat.contract import Private

_CONNECTOR = "lightning.pytorch.trainer.connectors.accelerator_connector._AcceleratorConnector"
_CLUSTERS = "cluster environments of a strategy that is chosen by name"
_GIVEN = "pass the strategy as an object, whose environment Lightning takes"
NAMES = (
    Private(_CONNECTOR, _CLUSTERS, _GIVEN),
    Private(f"{_CONNECTOR}._check_config_and_set_final_flags", "names of strategies that are mistyped",
            "Lightning's own sentence"),
    Private(f"{_CONNECTOR}._choose_and_init_cluster_environment", _CLUSTERS, _GIVEN),
    Private(f"{_CONNECTOR}._cluster_environment_flag", _CLUSTERS, _GIVEN),
    Private(f"{_CONNECTOR}._strategy_flag", _CLUSTERS, _GIVEN),
)  # fmt: skip


def choose_for(connectors: ModuleType, is_ours: Callable[[Any], bool], find: Callable[[], Any]) -> None:
    """Patch Lightning's choice of an environment. Harmless when called again.

    Args:
        connectors: ``lightning.pytorch.trainer.connectors.accelerator_connector``, imported.
        is_ours: Whether ``Trainer(strategy=...)``, lower-cased if a name, is one of ours.
        find: Returns the environment that this process is part of. Called when a Trainer is made.
    """
    connector_class = connectors._AcceleratorConnector
    choose = connector_class._choose_and_init_cluster_environment
    choose = getattr(choose, "__wrapped__", choose)

    @wraps(choose)
    def choose_or_find(connector: Any) -> Any:
        given = connector._cluster_environment_flag
        if isinstance(given, connectors.ClusterEnvironment) or not is_ours(connector._strategy_flag):
            return choose(connector)
        return find()

    connector_class._choose_and_init_cluster_environment = choose_or_find


def check_names(connectors: ModuleType, check: Callable[[str], None]) -> None:
    """Look at the name of a strategy before Lightning does. Harmless when called again.

    Args:
        connectors: ``lightning.pytorch.trainer.connectors.accelerator_connector``, imported.
        check: Raises where a name is refused.
    """
    connector_class = connectors._AcceleratorConnector
    take_flags = connector_class._check_config_and_set_final_flags
    take_flags = getattr(take_flags, "__wrapped__", take_flags)

    @wraps(take_flags)
    def check_and_take(connector: Any, strategy: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(strategy, str):
            check(strategy)
        take_flags(connector, strategy, *args, **kwargs)

    connector_class._check_config_and_set_final_flags = check_and_take
