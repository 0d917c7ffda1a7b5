"""Several ranks on one GPU, to test every strategy on CUDA with a single device.

NCCL refuses two ranks on one device; gloo accepts CUDA tensors and sends them through the host. Such runs compare
correctness, streams and memory, never speed.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.pytorch.accelerators import CUDAAccelerator


class SharedGPU(CUDAAccelerator):
    """Accelerator with any number of ranks on the first GPU, deterministic convolutions, and no TF32."""

    def setup_device(self, device: torch.device) -> None:
        super().setup_device(device)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        # By default cuDNN's backward of a convolution sums in another order in each run.
        torch.backends.cudnn.deterministic = True

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return list(range(int(devices)))

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("cuda", 0) for _ in devices]

    @staticmethod
    def auto_device_count() -> int:
        return 1


def accelerator() -> Any:
    """Return the accelerator of the runs: the CPU, or with PARDIST_TEST_DEVICE=gpu one GPU shared by all ranks."""
    return SharedGPU() if os.environ.get("PARDIST_TEST_DEVICE") == "gpu" else "cpu"
