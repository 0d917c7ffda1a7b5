"""Finds parameters that a step itself sets, by each rank's own samples, and makes them the first rank's again."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_pardist.engines.common.fingerprint import FINGERPRINT_SIZE, fingerprint
from lightning_pardist.engines.ddp.buffers import broadcast_tensors


class SetParameters:
    """Watches one step for parameters that it gives other values on each rank.

    A layer that is initialized by the first batch it sees (ActNorm, weight normalization by data) leaves replicas that
    no later step brings together again: gradients are averaged, values are not.

    Args:
        module: Before the step. Parameters that ranks hold parts of are left alone.
        group: Ranks that hold the same parameters and see different samples.
    """

    def __init__(self, module: nn.Module, *, group: dist.ProcessGroup) -> None:
        self._group = group
        named = dict(module.named_parameters())
        self._parameters = {name: each for name, each in named.items() if _is_replicated(each)}
        self._before = self._sums()

    def end(self) -> list[str]:
        """Take the first rank's values of what the step has set to different ones. Collective over the group.

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
        # By .data: the step's graph may hold what is overwritten, and its backward is still to come.
        broadcast_tensors([self._parameters[name].data for name in names], group=self._group)
        return names

    def _sums(self) -> Tensor:
        """What tells values from others; shape ``[parameters, 3]``."""
        rows = [fingerprint(each.detach()) for each in self._parameters.values()]
        return torch.stack(rows) if rows else torch.zeros(0, FINGERPRINT_SIZE)


def _is_replicated(parameter: nn.Parameter) -> bool:
    if isinstance(parameter, DTensor) or parameter.layout is not torch.strided:
        return False
    return not (parameter.is_meta or parameter.is_complex()) and parameter.numel() > 0


def differing_values(names: list[str]) -> str:
    """What is to be said of parameters that ranks have set to different values."""
    return (
        f"The training step sets parameters by each rank's own samples ({', '.join(names)}), where one process"
        " would set them by those of all. The first rank's values are taken, so that all ranks have the same."
        " Combine what they are made from in the step, by self.all_gather(...)."
    )


def cast_parameter(name: str, before: torch.dtype, now: torch.dtype) -> str:
    """What is to be said of a parameter that a step has cast (``layer.to(dtype)`` in ``forward``)."""
    return (
        f"{name} is {before} and a step casts it to {now}: ranks have agreed on memory for its gradients by then. Keep"
        " one dtype (another precision=, or float() of the layer's inputs alone), or use pardist_tp or pardist_pp."
    )
