"""The data axis with whole parameters on every rank: gradients averaged in buckets while backward runs."""

from lightning_pardist.engines.data_parallel.buffers import BufferSync
from lightning_pardist.engines.data_parallel.compression import PowerSGD, compression_hook
from lightning_pardist.engines.data_parallel.reducer import GradientReducer
from lightning_pardist.engines.data_parallel.transport import AllReduce, HookedAllReduce

__all__ = ["AllReduce", "BufferSync", "GradientReducer", "HookedAllReduce", "PowerSGD", "compression_hook"]
