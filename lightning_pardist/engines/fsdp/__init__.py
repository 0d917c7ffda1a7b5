"""ZeRO-3, FSDP and HSDP on torch's ``fully_shard``, for unmodified modules."""

from lightning_pardist.engines.fsdp.fsdp_units import Unit, find_fsdp_units, format_units
from lightning_pardist.engines.fsdp.fully_sharded import FullySharded
from lightning_pardist.engines.fsdp.shard import shard
from lightning_pardist.engines.fsdp.sharded_data_engine import ShardedDataEngine

__all__ = ["FullySharded", "ShardedDataEngine", "Unit", "find_fsdp_units", "format_units", "shard"]
