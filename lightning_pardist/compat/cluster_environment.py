"""Hooks into the Trainer's setup for our strategies: choice of the cluster environment, and checks of strategy names.

Lightning creates its cluster environment before it creates a strategy that was chosen by name, and its SLURM class
refuses ``--ntasks`` there. Other strategies are not affected. For an unknown name, Lightning lists only its own names.
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
    """Patch Lightning's choice of a cluster environment. Idempotent.

    Args:
        connectors: The imported module ``lightning.pytorch.trainer.connectors.accelerator_connector``.
        is_ours: Whether a value of ``Trainer(strategy=...)``, lower-cased if it is a name, is one of ours.
        find: Returns the environment of this process. Called when a Trainer is created.
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
    """Patch the Trainer to check a strategy's name before Lightning does. Idempotent.

    Args:
        connectors: The imported module ``lightning.pytorch.trainer.connectors.accelerator_connector``.
        check: Called with the name; raises if it is refused.
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
