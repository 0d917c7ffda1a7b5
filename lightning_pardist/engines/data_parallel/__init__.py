"""The data axis with whole parameters on every rank: gradients averaged in buckets while backward runs."""

from lightning_pardist.engines.data_parallel.buffers import BufferSync
from lightning_pardist.engines.data_parallel.compression import PowerSGD, compression_hook
from lightning_pardist.engines.data_parallel.reducer import GradientReducer

__all__ = ["BufferSync", "GradientReducer", "PowerSGD", "compression_hook"]
