"""PyTorch Lightning strategies for an unmodified LightningModule: data, ZeRO, tensor and pipeline parallelism.

``import lightning_pardist`` registers every strategy, so that ``Trainer(strategy="pardist_ddp")`` finds it.
"""

from lightning_pardist import _torchvision

# Before lightning, which imports torchmetrics, which imports torchvision.
_torchvision.mend()

from lightning_pardist import registry  # noqa: E402
from lightning_pardist._version import __version__  # noqa: E402
from lightning_pardist.callbacks import PipelineTimeline  # noqa: E402
from lightning_pardist.engines.checkpoint.errors import DamagedCheckpointError  # noqa: E402
from lightning_pardist.engines.data_parallel import PowerSGD  # noqa: E402
from lightning_pardist.engines.pipeline import CannotPipelineError  # noqa: E402
from lightning_pardist.engines.watchdog import PeerFailedError  # noqa: E402
from lightning_pardist.environments.manual import ManualEnvironment  # noqa: E402
from lightning_pardist.environments.mpi import MPIEnvironment  # noqa: E402
from lightning_pardist.environments.slurm import SLURMEnvironment  # noqa: E402
from lightning_pardist.environments.torchrun import TorchrunEnvironment  # noqa: E402
from lightning_pardist.mesh import ParallelDims  # noqa: E402
from lightning_pardist.strategies.base import PardistStrategy  # noqa: E402
from lightning_pardist.strategies.checkpoint_io import PardistCheckpointIO  # noqa: E402
from lightning_pardist.strategies.checkpoint_loading import load_from_checkpoint  # noqa: E402
from lightning_pardist.strategies.ddp import DDPStrategy  # noqa: E402
from lightning_pardist.strategies.fsdp import FSDPStrategy  # noqa: E402
from lightning_pardist.strategies.hybrid import HybridStrategy  # noqa: E402
from lightning_pardist.strategies.pipeline import PipelineStrategy  # noqa: E402
from lightning_pardist.strategies.tensor import TensorParallelStrategy  # noqa: E402
from lightning_pardist.strategies.zero import ZeroStrategy  # noqa: E402

registry.register()

__all__ = [
    "CannotPipelineError",
    "DDPStrategy",
    "DamagedCheckpointError",
    "FSDPStrategy",
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
