"""Third-party Muon under the parallelism it is written for: hand-written ``fully_shard`` and DDP.

``dion`` (github.com/microsoft/dion, not on PyPI) exchanges matrices in all-to-alls under ``fully_shard`` and
all-gathers updates under DDP. Its own ``torch.compile`` is disabled (``TORCHDYNAMO_DISABLE=1``): on CPU it takes longer
than the run. The package ``dtensor-muon`` (PyPI, 0.1.0) is not included because its kernels need CUDA, nor is
DeepSpeed's Muon, which has a launcher, an engine and a data type of its own.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

#: Hand-written strategies and their optimizers; the first optimizer is the baseline.
PEERS = {"fully_shard": ("AdamW", "dion Muon"), "torch_ddp": ("AdamW", "dion Muon")}


def peers(strategy: str) -> list[str]:
    """Return the installed optimizers of a hand-written strategy."""
    return [kind for kind in PEERS[strategy] if kind == "AdamW" or importlib.util.find_spec(kind.split()[0])]


def make(params: Sequence[nn.Parameter], mesh: Any = None) -> torch.optim.Optimizer:
    """Return dion's Muon with the Newton-Schulz iteration of torch's Muon; ``mesh`` is what it communicates over."""
    from dion import Muon

    found: torch.optim.Optimizer = Muon(params, distributed_mesh=mesh, use_polar_express=False)
    return found


class ByHand:
    """Stand-in for an engine of this package: a no-op, as torch's hooks reduce gradients.

    Args:
        strategy: ``"fully_shard"`` or ``"torch_ddp"``.
        module: The GPT of the recipe.
    """

    def __init__(self, strategy: str, module: Any) -> None:
        self.mesh: Any = None
        self.forward: Any = module
        if strategy == "fully_shard":
            from torch.distributed.fsdp import fully_shard

            _exchange_lists()
            self.mesh = _mesh()
            for block in module.blocks:
                fully_shard(block, mesh=self.mesh)
            fully_shard(module, mesh=self.mesh)
        else:
            self.mesh = dist.group.WORLD
            self.forward = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)

    def backward(self, loss: Tensor) -> AbstractContextManager[None]:
        """Return a null context."""
        return nullcontext()

    def step_done(self) -> None:
        """Do nothing."""

    def detach(self) -> None:
        """Do nothing."""


@functools.cache
def _mesh() -> Any:
    """Return one mesh for all runs: torch caches layouts by equal meshes, and dion requires its mesh's very group."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (dist.get_world_size(),))


def _exchange_lists() -> None:
    """Emulate the list all-to-all for gloo before torch 2.13, which adds it."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13):
        return

    class Exchange:
        def __init__(self, outputs: list[Tensor], inputs: list[Tensor], group: Any) -> None:
            self._outputs = outputs
            message = torch.cat([_bytes(each.contiguous()) for each in inputs])
            self._received = torch.empty(sum(each.numel() * each.element_size() for each in outputs), dtype=torch.uint8)
            self._work = dist.all_to_all_single(
                self._received,
                message,
                [each.numel() * each.element_size() for each in outputs],
                [each.numel() * each.element_size() for each in inputs],
                group=group,
                async_op=True,
            )

        def wait(self) -> None:
            self._work.wait()
            start = 0
            for output in self._outputs:
                stop = start + output.numel() * output.element_size()
                output.copy_(self._received[start:stop].clone().view(output.dtype).view(output.shape))
                start = stop

    def all_to_all(outputs: list[Tensor], inputs: list[Tensor], group: Any = None, async_op: bool = False) -> Any:
        work = Exchange(outputs, inputs, group)
        return work if async_op else work.wait()

    dist.all_to_all = all_to_all


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
