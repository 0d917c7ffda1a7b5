"""PyTorch Lightning strategies for an unmodified LightningModule: data, ZeRO, tensor and pipeline parallelism.

``import lightning_pardist`` registers every strategy, so that ``Trainer(strategy="pardist_ddp")`` finds it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from lightning_pardist import _torchvision

# Before lightning, which imports torchmetrics, which imports torchvision.
_torchvision.mend()

from lightning_pardist import registry  # noqa: E402
from lightning_pardist._version import __version__  # noqa: E402

if TYPE_CHECKING:
    from lightning_pardist.callbacks import GlobalBatchSize, PipelineTimeline
    from lightning_pardist.engines.checkpoint.errors import DamagedCheckpointError
    from lightning_pardist.engines.data_parallel import PowerSGD
    from lightning_pardist.engines.pipeline import CannotPipelineError
    from lightning_pardist.engines.watchdog import PeerFailedError
    from lightning_pardist.environments.manual import ManualEnvironment
    from lightning_pardist.environments.mpi import MPIEnvironment
    from lightning_pardist.environments.slurm import SLURMEnvironment
    from lightning_pardist.environments.torchrun import TorchrunEnvironment
    from lightning_pardist.mesh import ParallelDims
    from lightning_pardist.strategies.base import PardistStrategy
    from lightning_pardist.strategies.checkpoint_io import PardistCheckpointIO
    from lightning_pardist.strategies.checkpoint_loading import load_from_checkpoint
    from lightning_pardist.strategies.ddp import DDPStrategy
    from lightning_pardist.strategies.fsdp import FSDPStrategy
    from lightning_pardist.strategies.hybrid import HybridStrategy
    from lightning_pardist.strategies.pipeline import PipelineStrategy
    from lightning_pardist.strategies.tensor import TensorParallelStrategy
    from lightning_pardist.strategies.zero import ZeroStrategy

#: Where the public names are. They are imported when they are used, so that the import costs next to nothing.
_HOMES = {
    "CannotPipelineError": "lightning_pardist.engines.pipeline",
    "DDPStrategy": "lightning_pardist.strategies.ddp",
    "DamagedCheckpointError": "lightning_pardist.engines.checkpoint.errors",
    "FSDPStrategy": "lightning_pardist.strategies.fsdp",
    "GlobalBatchSize": "lightning_pardist.callbacks",
    "HybridStrategy": "lightning_pardist.strategies.hybrid",
    "MPIEnvironment": "lightning_pardist.environments.mpi",
    "ManualEnvironment": "lightning_pardist.environments.manual",
    "ParallelDims": "lightning_pardist.mesh",
    "PardistCheckpointIO": "lightning_pardist.strategies.checkpoint_io",
    "PardistStrategy": "lightning_pardist.strategies.base",
    "PeerFailedError": "lightning_pardist.engines.watchdog",
    "PipelineStrategy": "lightning_pardist.strategies.pipeline",
    "PipelineTimeline": "lightning_pardist.callbacks",
    "PowerSGD": "lightning_pardist.engines.data_parallel",
    "SLURMEnvironment": "lightning_pardist.environments.slurm",
    "TensorParallelStrategy": "lightning_pardist.strategies.tensor",
    "TorchrunEnvironment": "lightning_pardist.environments.torchrun",
    "ZeroStrategy": "lightning_pardist.strategies.zero",
    "load_from_checkpoint": "lightning_pardist.strategies.checkpoint_loading",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


registry.register()

__all__ = [
    "CannotPipelineError",
    "DDPStrategy",
    "DamagedCheckpointError",
    "FSDPStrategy",
    "GlobalBatchSize",
    "HybridStrategy",
    "MPIEnvironment",
    "ManualEnvironment",
    "ParallelDims",
    "PardistCheckpointIO",
    "PardistStrategy",
    "PeerFailedError",
    "PipelineStrategy",
    "PipelineTimeline",
    "PowerSGD",
    "SLURMEnvironment",
    "TensorParallelStrategy",
    "TorchrunEnvironment",
    "ZeroStrategy",
    "__version__",
    "load_from_checkpoint",
]
