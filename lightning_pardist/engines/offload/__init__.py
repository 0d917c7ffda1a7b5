"""Optimizer state and step on the host, or with state in files (arXiv 2101.06840, 2104.07857)."""

from lightning_pardist.engines.offload.copies import HostCopies
from lightning_pardist.engines.offload.files import StateFile, require_folder
from lightning_pardist.engines.offload.settings import Offload
from lightning_pardist.engines.offload.step import HostStep

__all__ = ["HostCopies", "HostStep", "Offload", "StateFile", "require_folder"]
