"""Detect parameters that a step sets from each rank's own samples, and reset them to the first rank's values."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_pardist.engines.common.fingerprint import FINGERPRINT_SIZE, fingerprint
from lightning_pardist.engines.ddp.buffers import broadcast_tensors


class SetParameters:
    """Detects parameters that one step sets to different values on the ranks.

    A layer that is initialized from its first batch (ActNorm, data-dependent weight normalization) makes replicas
    diverge permanently, because gradients are averaged and values are not.

    Args:
        module: The module, before the step. Sharded parameters are ignored.
        group: Ranks that hold the same parameters and process different samples.
    """

    def __init__(self, module: nn.Module, *, group: dist.ProcessGroup) -> None:
        self._group = group
        named = dict(module.named_parameters())
        self._parameters = {name: each for name, each in named.items() if _is_replicated(each)}
        self._before = self._sums()

    def end(self) -> list[str]:
        """Broadcast the first rank's values of parameters that the step made differ. Collective over the group.

        Returns:
            The names of these parameters.
        """
        if not self._parameters:
            return []
        now = self._sums()
        changed = (now != self._before).any(1, keepdim=True).to(now)
        largest = torch.cat([now, -now, changed], 1).nan_to_num()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        highest, lowest, was_set = largest.split([FINGERPRINT_SIZE, FINGERPRINT_SIZE, 1], dim=1)
        differ = (highest != -lowest).any(1) & (was_set.squeeze(1) > 0)
        names = [name for name, flag in zip(self._parameters, differ.tolist(), strict=True) if flag]
        # Write through .data: the step's graph, whose backward has not run yet, may have saved the parameter.
        broadcast_tensors([self._parameters[name].data for name in names], group=self._group)
        return names

    def _sums(self) -> Tensor:
        """Return the fingerprints of the parameters, shape ``[parameters, 3]``."""
        rows = [fingerprint(each.detach()) for each in self._parameters.values()]
        return torch.stack(rows) if rows else torch.zeros(0, FINGERPRINT_SIZE)


def _is_replicated(parameter: nn.Parameter) -> bool:
    if isinstance(parameter, DTensor) or parameter.layout is not torch.strided:
        return False
    return not (parameter.is_meta or parameter.is_complex()) and parameter.numel() > 0


def differing_values(names: list[str]) -> str:
    """Return the message about parameters that were set to different values on the ranks."""
    return (
        f"The training step sets parameters from each rank's own samples ({', '.join(names)}), but a single process"
        " would set them from all samples. The first rank's values are used on all ranks. Combine the samples'"
        " contributions over ranks in the step, for example with self.all_gather(...)."
    )


def cast_parameter(name: str, before: torch.dtype, now: torch.dtype) -> str:
    """Return the message about a parameter whose dtype a step has changed (``layer.to(dtype)`` in ``forward``)."""
    return (
        f"{name} is {before} and a step casts it to {now}, after memory for its gradients was allocated on all"
        " ranks. Keep one dtype (set another precision=, or cast only the layer's inputs), or use pardist_tp or"
        " pardist_pp."
    )
