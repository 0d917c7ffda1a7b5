"""PyTorch Lightning strategies for an unmodified LightningModule: data, ZeRO, tensor and pipeline parallelism.

``import lightning_pardist`` registers every strategy name, for example ``Trainer(strategy="pardist_ddp")``. It imports
neither torch nor Lightning: if Lightning is not imported yet, the names are registered on its import.
"""

import importlib
from typing import TYPE_CHECKING, Any

from lightning_pardist import registry
from lightning_pardist._version import __version__
from lightning_pardist.compat import versions
from lightning_pardist.compat.on_import import before_import
from lightning_pardist.compat.other_lightning import alias_pytorch_lightning
from lightning_pardist.runtime.environments.program import asks_for_alias

if TYPE_CHECKING:
    from lightning_pardist.callbacks import GlobalBatchSize, PipelineTimeline, StepProfile
    from lightning_pardist.checkpoint.errors import DamagedCheckpointError
    from lightning_pardist.engines.ddp import PowerSGD
    from lightning_pardist.engines.pipeline import CannotPipelineError, MicroBatch
    from lightning_pardist.mesh import ParallelDims
    from lightning_pardist.planner import plan
    from lightning_pardist.planner.auto import AutoStrategy
    from lightning_pardist.runtime.environments.manual import ManualEnvironment
    from lightning_pardist.runtime.environments.mpi import MPIEnvironment
    from lightning_pardist.runtime.environments.slurm import SLURMEnvironment
    from lightning_pardist.runtime.environments.torchrun import TorchrunEnvironment
    from lightning_pardist.runtime.watchdog import PeerFailedError
    from lightning_pardist.strategies.context import ContextParallelStrategy
    from lightning_pardist.strategies.data_parallel import DataParallelStrategy
    from lightning_pardist.strategies.ddp import DDPStrategy
    from lightning_pardist.strategies.expert import ExpertParallelStrategy
    from lightning_pardist.strategies.fsdp import FSDPStrategy
    from lightning_pardist.strategies.hybrid import HybridStrategy
    from lightning_pardist.strategies.local_sgd import LocalSGDStrategy
    from lightning_pardist.strategies.parameter_server import ParameterServerStrategy
    from lightning_pardist.strategies.pipeline import PipelineStrategy
    from lightning_pardist.strategies.strategy import PardistStrategy
    from lightning_pardist.strategies.tensor import TensorParallelStrategy
    from lightning_pardist.strategies.zero import ZeroStrategy
    from lightning_pardist.trainer.checkpoint_io import PardistCheckpointIO
    from lightning_pardist.trainer.checkpoint_loading import load_from_checkpoint

#: Modules of the public names, which are imported on first use to keep `import lightning_pardist` cheap.
_HOMES = {
    "AutoStrategy": "lightning_pardist.planner.auto",
    "CannotPipelineError": "lightning_pardist.engines.pipeline",
    "ContextParallelStrategy": "lightning_pardist.strategies.context",
    "ExpertParallelStrategy": "lightning_pardist.strategies.expert",
    "DDPStrategy": "lightning_pardist.strategies.ddp",
    "DamagedCheckpointError": "lightning_pardist.checkpoint.errors",
    "DataParallelStrategy": "lightning_pardist.strategies.data_parallel",
    "FSDPStrategy": "lightning_pardist.strategies.fsdp",
    "GlobalBatchSize": "lightning_pardist.callbacks",
    "HybridStrategy": "lightning_pardist.strategies.hybrid",
    "LocalSGDStrategy": "lightning_pardist.strategies.local_sgd",
    "ParameterServerStrategy": "lightning_pardist.strategies.parameter_server",
    "MPIEnvironment": "lightning_pardist.runtime.environments.mpi",
    "MicroBatch": "lightning_pardist.engines.pipeline",
    "ManualEnvironment": "lightning_pardist.runtime.environments.manual",
    "ParallelDims": "lightning_pardist.mesh",
    "PardistCheckpointIO": "lightning_pardist.trainer.checkpoint_io",
    "PardistStrategy": "lightning_pardist.strategies.strategy",
    "PeerFailedError": "lightning_pardist.runtime.watchdog",
    "PipelineStrategy": "lightning_pardist.strategies.pipeline",
    "PipelineTimeline": "lightning_pardist.callbacks",
    "StepProfile": "lightning_pardist.callbacks",
    "PowerSGD": "lightning_pardist.engines.ddp",
    "SLURMEnvironment": "lightning_pardist.runtime.environments.slurm",
    "TensorParallelStrategy": "lightning_pardist.strategies.tensor",
    "TorchrunEnvironment": "lightning_pardist.runtime.environments.torchrun",
    "ZeroStrategy": "lightning_pardist.strategies.zero",
    "plan": "lightning_pardist.planner",
    "load_from_checkpoint": "lightning_pardist.trainer.checkpoint_loading",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


def _declare_torchvision_operators() -> None:
    from lightning_pardist.compat import torchvision

    torchvision.declare_operators()


versions.require_supported()
# Lightning imports torchmetrics, which imports torchvision.
before_import("torchvision", _declare_torchvision_operators)
registry.register()
if asks_for_alias():
    alias_pytorch_lightning()

__all__ = [
    "AutoStrategy",
    "CannotPipelineError",
    "ContextParallelStrategy",
    "DDPStrategy",
    "DamagedCheckpointError",
    "DataParallelStrategy",
    "ExpertParallelStrategy",
    "FSDPStrategy",
    "GlobalBatchSize",
    "HybridStrategy",
    "LocalSGDStrategy",
    "MPIEnvironment",
    "ManualEnvironment",
    "MicroBatch",
    "ParallelDims",
    "ParameterServerStrategy",
    "PardistCheckpointIO",
    "PardistStrategy",
    "PeerFailedError",
    "PipelineStrategy",
    "PipelineTimeline",
    "PowerSGD",
    "SLURMEnvironment",
    "StepProfile",
    "TensorParallelStrategy",
    "TorchrunEnvironment",
    "ZeroStrategy",
    "__version__",
    "alias_pytorch_lightning",
    "load_from_checkpoint",
    "plan",
]
