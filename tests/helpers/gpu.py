"""Ranks that share one GPU: every strategy on CUDA where there is a single device.

NCCL refuses two ranks on one device, gloo does not: it takes CUDA tensors and sends them through the host. What is
compared so is correctness, streams and memory, never speed.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.pytorch.accelerators import CUDAAccelerator


class SharedGPU(CUDAAccelerator):
    """Any number of ranks, all of them on the first GPU, with matrix products and convolutions in full fp32."""

    def setup_device(self, device: torch.device) -> None:
        super().setup_device(device)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False

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
    """What runs train on: the CPU, or with PARDIST_TEST_DEVICE=gpu one GPU that all ranks share."""
    return SharedGPU() if os.environ.get("PARDIST_TEST_DEVICE") == "gpu" else "cpu"
