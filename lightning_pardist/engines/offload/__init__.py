"""Offload of optimizer state and steps to host memory or files (arXiv 2101.06840, 2104.07857)."""

from lightning_pardist.engines.offload.copies import HostCopies
from lightning_pardist.engines.offload.host_step import HostStep
from lightning_pardist.engines.offload.hosted_state import HostedState
from lightning_pardist.engines.offload.mapped_files import StateFile, require_folder
from lightning_pardist.engines.offload.offload_settings import Offload

__all__ = ["HostCopies", "HostStep", "HostedState", "Offload", "StateFile", "require_folder"]
