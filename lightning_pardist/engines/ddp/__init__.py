"""DDP engine: bucketed gradient all-reduce, overlapped with backward."""

from lightning_pardist.engines.ddp.buffers import BufferSync
from lightning_pardist.engines.ddp.compression import PowerSGD, compression_hook
from lightning_pardist.engines.ddp.reducer import GradientReducer
from lightning_pardist.engines.ddp.transport import AllReduce, HookedAllReduce

__all__ = ["AllReduce", "BufferSync", "GradientReducer", "HookedAllReduce", "PowerSGD", "compression_hook"]
