"""Trainers with a strategy of ours find their cluster environment in our way.

Lightning makes its own environment before it makes a strategy that was chosen by name, and its own SLURM class refuses
``--ntasks`` there. A strategy that is not ours sees no difference.
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
    Private(f"{_CONNECTOR}._choose_and_init_cluster_environment", _CLUSTERS, _GIVEN),
    Private(f"{_CONNECTOR}._cluster_environment_flag", _CLUSTERS, _GIVEN),
    Private(f"{_CONNECTOR}._strategy_flag", _CLUSTERS, _GIVEN),
)


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
