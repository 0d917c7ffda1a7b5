"""Expert parallelism: each rank holds some experts of every layer, and tokens are dispatched to them by all-to-all."""

from lightning_pardist.engines.experts.finding import ExpertLayer, find_layers
from lightning_pardist.engines.experts.holding import HeldExperts
from lightning_pardist.engines.experts.runtime import ExpertRuntime
from lightning_pardist.engines.experts.sharding import ExpertSharding
from lightning_pardist.engines.experts.trial import assume_routes, choose_routes

__all__ = [
    "ExpertLayer",
    "ExpertRuntime",
    "ExpertSharding",
    "HeldExperts",
    "assume_routes",
    "choose_routes",
    "find_layers",
]
