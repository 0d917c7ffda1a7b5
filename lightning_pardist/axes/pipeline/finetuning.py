"""Support for Lightning's fine-tuning callbacks if each rank holds the parameters of its own stages only."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_pardist.local_tensors import local_shard

_REPLACED = "filter_on_optimizer"


class FinetuningAcrossStages:
    """While attached, ``BaseFinetuning`` finds the same parameters to be already in an optimizer on every rank.

    The original compares values (``torch.equal``), but no rank holds all parameters: digests of them are all-gathered.

    Args:
        group: Process group of the pipeline.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._column = dist.get_global_rank(group, 0)
        self._before: Any = None

    def attach(self) -> None:
        """Replace ``BaseFinetuning.filter_on_optimizer``. Not collective."""
        self._before = BaseFinetuning.__dict__[_REPLACED]
        setattr(BaseFinetuning, _REPLACED, staticmethod(self._filter))

    def detach(self) -> None:
        """Restore ``filter_on_optimizer``. Not collective."""
        if self._before is not None:
            setattr(BaseFinetuning, _REPLACED, self._before)
            self._before = None

    def _filter(self, optimizer: Optimizer, params: Iterable[Tensor]) -> list[Tensor]:
        """Return the parameters that are not in an optimizer yet. Collective over the world.

        Args:
            optimizer: The optimizer; its parameters, and those with the same values, are left out.
            params: The candidates.
        """
        wanted = list(params)
        known = [param for group in optimizer.param_groups for param in group["params"]]
        digests = self._digests([*wanted, *known])
        there = {_kind(param) + (digest,) for param, digest in zip(known, digests[len(wanted) :], strict=True)}
        found = [_kind(p) + (digest,) in there for p, digest in zip(wanted, digests[: len(wanted)], strict=True)]
        if any(found):
            rank_zero_warn(
                "Some of the parameters to be trained are in a group of the optimizer already, or have the values of"
                " one that is; they are left where they are. Give the optimizer the parameters that require gradients:"
                f" {type(optimizer).__name__}(filter(lambda p: p.requires_grad, self.parameters()), ...)."
            )
        return [param for param, is_there in zip(wanted, found, strict=True) if not is_there]

    def _digests(self, params: Sequence[Tensor]) -> list[str]:
        """Return a digest of each parameter over all ranks, equal for two parameters if their values are equal."""
        own = {index: _digest(param) for index, param in enumerate(params) if not param.is_meta}
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, (self._column, own))
        parts: list[dict[int, str]] = [{} for _ in params]
        for column, of_rank in everybody:
            for index, digest in of_rank.items():
                # Ranks of one pipeline that hold the same parameter hold the same values; other pipelines may hold
                # other parts.
                parts[index][column] = digest
        return [repr(sorted(of_param.items())) for of_param in parts]


def _kind(param: Tensor) -> tuple[Any, ...]:
    return tuple(param.shape), param.dtype


def _digest(param: Tensor) -> str:
    values = local_shard(param.detach()).cpu().contiguous().view(-1)
    return hashlib.blake2b(values.view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()
