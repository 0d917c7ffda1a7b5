"""Synchronization of the plan, random state and batches over the ranks of a pipeline."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from lightning_pardist.axes.first_batch import batch_checksum, broadcast_batch, warn_of_different_batches
from lightning_pardist.axes.pipeline.pipeline_settings import PipelineSettings
from lightning_pardist.axes.pipeline.recording import Recorded
from lightning_pardist.collectives import all_gather_flat, table_device
from lightning_pardist.engines.common.devices import random_state, set_random_state


def agree_on(recorded: Recorded) -> Recorded:
    """Synchronize the recorded plans: all ranks take the first rank's. Collective over the world.

    Records may differ, since data ranks record different samples. The loss makeup is taken from a rank that has found
    several counts, if there is one.
    """
    made_plans = [*recorded.plans.items(), *([] if recorded.owners is None else [("owners", recorded.owners)])]
    plans = [(key, made.bounds, made.parameter_stages) for key, made in made_plans]
    own = recorded.microbatching
    cut = None if own is None else (sorted(own.whole), own.least)
    parts = (plans, recorded.rules, sorted(recorded.written), sorted(recorded.unstaged), sorted(recorded.steady), cut)
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, (hashlib.sha256(repr(parts).encode()).hexdigest(), recorded.loss))
    recorded = replace(recorded, loss=max((loss for _, loss in everybody), key=lambda loss: loss.several_counts))
    if len({digest for digest, _ in everybody}) == 1:
        return recorded
    # Settings may hold functions, which cannot be pickled; they are the same on all ranks.
    box = [recorded if own is None else replace(recorded, microbatching=replace(own, settings=PipelineSettings()))]
    dist.broadcast_object_list(box, src=0)
    told = box[0]
    if own is None or told.microbatching is None:
        return told
    return replace(told, microbatching=replace(told.microbatching, settings=own.settings))


def share_random_state(group: dist.ProcessGroup, device: torch.device) -> None:
    """Broadcast the first rank's random state, so that loaders shuffle equally. Collective over the pipeline."""
    box: list[Any] = [random_state(device)]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    set_random_state(box[0], device)


class SameBatches:
    """Gives every rank of a pipeline the same batches.

    As long as the loaders yield equal batches, this costs one small all-gather of checksums per step. From the first
    batch that differs (random augmentation, a loader with its own shuffling) the first rank's batches are broadcast.

    Args:
        group: Process group of the pipeline.
        device: Device of this rank's tensors.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device
        self._differ = False

    def __call__(self, batches: list[Any], *, most: int = 1) -> list[Any]:
        """Return the batches that all ranks use, as many as every rank has. Collective over the pipeline.

        Args:
            batches: This rank's batches, one or more.
            most: Largest number of batches on any rank.
        """
        if self.group.size() == 1:
            return batches
        if not self._differ or most > 1:
            prints = [0] * len(batches) if self._differ else [batch_checksum(batch) for batch in batches]
            row = [len(batches), *prints, *[0] * (most - len(batches))]
            mine = torch.tensor(row, dtype=torch.int64, device=table_device(self.group, self.device))
            everybody = mine.new_empty(self.group.size() * (most + 1))
            all_gather_flat(everybody, mine, group=self.group)
            rows = everybody.view(self.group.size(), most + 1)
            count = int(rows[:, 0].min())
            batches, rows = batches[:count], rows[:, 1 : count + 1]
            differ = self._differ or bool((rows != rows[0]).any())
            if not differ:
                return batches
            if not self._differ:
                self._differ = True
                if self.group.rank() == 0:
                    warn_of_different_batches("a pipeline")
        shared: list[Any] = broadcast_batch(batches, group=self.group, device=self.device)
        return shared
