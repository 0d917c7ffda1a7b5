"""What a strategy is made of: one part for every kind of parallelism, none of which knows the others."""

from lightning_pardist.strategies.parts.data import DataParallel, data_part
from lightning_pardist.strategies.parts.part import DataPart, Part
from lightning_pardist.strategies.parts.replicated import Replicated
from lightning_pardist.strategies.parts.sharded import FullyShardedData
from lightning_pardist.strategies.parts.tensor import TensorParallel
from lightning_pardist.strategies.parts.zero import ZeroSharded

__all__ = [
    "DataParallel",
    "DataPart",
    "FullyShardedData",
    "Part",
    "Replicated",
    "TensorParallel",
    "ZeroSharded",
    "data_part",
]
