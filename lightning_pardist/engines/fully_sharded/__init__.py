"""ZeRO-3, FSDP and HSDP on torch's ``fully_shard``, for modules that know nothing of it."""

from lightning_pardist.engines.fully_sharded.apply import shard
from lightning_pardist.engines.fully_sharded.data_engine import ShardedDataEngine
from lightning_pardist.engines.fully_sharded.engine import FullySharded
from lightning_pardist.engines.fully_sharded.units import Unit, find_units, format_units

__all__ = ["FullySharded", "ShardedDataEngine", "Unit", "find_units", "format_units", "shard"]
