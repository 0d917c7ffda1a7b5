"""Entry point of the planner: which strategies fit, and how fast they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_pardist.engines.common.activation_checkpointing import Checkpointing
from lightning_pardist.planner.batches import first_batch, samples_of
from lightning_pardist.planner.candidates import DEFAULT, enumerate_candidates, with_checkpointing
from lightning_pardist.planner.errors import PlanError
from lightning_pardist.planner.plan_result import Plan
from lightning_pardist.planner.profiles import DeviceProfile, find_profile
from lightning_pardist.planner.search import Job, Search
from lightning_pardist.registry import TABLE


def plan(
    module: pl.LightningModule,
    data: Any,
    *,
    devices: int,
    num_nodes: int = 1,
    device: str | Path | DeviceProfile = "h100",
    memory_gb: float | None = None,
    strategies: Sequence[str] | None = None,
    global_batch: int | None = None,
    time_limit_s: float | None = None,
    activation_checkpointing: Checkpointing | None = None,
    **trainer_settings: Any,
) -> Plan:
    """Plan training without the devices: estimate memory and step time of every strategy.

    The module's own step runs under each strategy's own engines, with its batch and optimizers, as the first rank of
    the world, or as one rank of each stage of a pipeline. Operators are not computed and messages are not sent; memory,
    operations and messages are counted. Neither the module nor this process changes. Not collective.

    Args:
        module: The module before training, with values or built on ``meta``.
        data: One rank's batch, a DataLoader, or a LightningDataModule.
        devices: ``Trainer(devices=)``.
        num_nodes: ``Trainer(num_nodes=)``.
        device: A name (``"h100"``), the path of a saved profile, or a profile.
        memory_gb: Override of the device's memory, in 10^9 bytes.
        strategies: Registered names, all of which are traced; by default those whose engines differ, unless they
            cannot be the best.
        global_batch: Samples of an optimizer step over all ranks, divided over the ranks with different samples. By
            default each of these ranks gets the given batch.
        time_limit_s: Seconds after which no further candidate is traced once one fits; the rest are reported as such.
        activation_checkpointing: Setting of the same name for every candidate. With None, ``"auto"`` is tried for
            those that do not fit.
        **trainer_settings: Further arguments of the Trainer that change a step: ``precision``,
            ``accumulate_grad_batches``, ``gradient_clip_val``.

    Returns:
        The plan with every candidate, the best first.

    Raises:
        PlanError: If there is no batch or no tensor in it, a strategy is unknown, or the module's step fails.
        ProfileError: If the device is unknown, or its profile is invalid.
    """
    profile = find_profile(device, memory_gb=memory_gb)
    names = known_names(DEFAULT if strategies is None else strategies)
    _positive(devices=devices, num_nodes=num_nodes, **({} if global_batch is None else {"global_batch": global_batch}))
    notes = []
    if str(trainer_settings.get("precision", "")) in ("16-mixed", "16"):
        trainer_settings["precision"] = "bf16-mixed"
        notes.append("Planned with bf16-mixed, which takes the same memory; the check of"
                     " gradients by 16-mixed's scaler is not modelled.")  # fmt: skip
    batch = first_batch(data)
    if global_batch is not None and not samples_of(batch):
        raise PlanError("global_batch needs a batch whose tensors have samples along their first dim.")
    job = Job(devices, num_nodes, trainer_settings, global_batch)
    search = Search(module, batch, profile, job, leave_out=strategies is None, time_limit_s=time_limit_s)
    candidates = enumerate_candidates(names, devices=devices, num_nodes=num_nodes)
    if activation_checkpointing is None:
        search.add_all(candidates)
    else:
        search.add_all(with_checkpointing(each, activation_checkpointing) for each in candidates)
    if strategies is None:
        search.leave_out(entry.name for entry in TABLE if entry.name not in names)
    return search.plan(notes)


def known_names(names: Sequence[str]) -> Sequence[str]:
    """Check that strategy names are registered, and return them.

    Raises:
        PlanError: If a name is unknown.
    """
    known = {entry.name for entry in TABLE}
    for name in names:
        if name not in known:
            raise PlanError(f"There is no strategy {name!r}. `pardist strategies` lists them.")
    return names


def _positive(**values: Any) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise PlanError(f"{name}={value!r} is not a positive integer.")
