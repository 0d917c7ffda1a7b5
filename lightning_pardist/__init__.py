"""PyTorch Lightning strategies for an unmodified LightningModule: data, ZeRO, tensor and pipeline parallelism."""

from lightning_pardist import _torchvision

_torchvision.mend()

from lightning_pardist._version import __version__  # noqa: E402

__all__ = ["__version__"]
