"""Which strategy, does it fit, how fast."""

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
    """Plan training without the devices: memory and time of every strategy, by running ranks of each.

    The module's own step runs under each strategy's own engines, with its batch and optimizers, as the first rank of
    all, or as one rank of each stage of a pipeline. Operators compute nothing, and messages go nowhere: what is
    allocated, computed and sent is counted. Neither the module nor this process changes. Not collective.

    Args:
        module: As it is before training, with values or built on ``meta``.
        data: One rank's batch, a DataLoader, or a LightningDataModule.
        devices: ``Trainer(devices=)``.
        num_nodes: ``Trainer(num_nodes=)``.
        device: A name (``"h100"``), the path of a saved profile, or a profile.
        memory_gb: In place of the device's memory, in 10^9 bytes.
        strategies: Registered names, each of which is traced; by default those whose engines differ, as far as they
            can be the best.
        global_batch: Samples of an optimizer step over all ranks, divided among those with samples of their own. By
            default each of them gets the batch as it is.
        time_limit_s: Seconds after which no further candidate is traced once one fits; those that are left say so.
        activation_checkpointing: As strategies have it, of every candidate; where it is None, ``"auto"`` is tried for
            those that do not fit.
        **trainer_settings: Further arguments of the Trainer that change a step: ``precision``,
            ``accumulate_grad_batches``, ``gradient_clip_val``.

    Returns:
        Every candidate, the best first.

    Raises:
        PlanError: If there is no batch or nothing in it, a strategy is not known, or the module's step fails.
        ProfileError: If the device is not known, or its profile is broken.
    """
    profile = find_profile(device, memory_gb=memory_gb)
    names = known_names(DEFAULT if strategies is None else strategies)
    _positive(devices=devices, num_nodes=num_nodes, **({} if global_batch is None else {"global_batch": global_batch}))
    notes = []
    if str(trainer_settings.get("precision", "")) in ("16-mixed", "16"):
        trainer_settings["precision"] = "bf16-mixed"
        notes.append("Planned with bf16-mixed, which takes the same memory; the scaler's look at gradients that"
                     " 16-mixed has besides is not modelled.")  # fmt: skip
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
    """The same names.

    Raises:
        PlanError: If there is no strategy of a name.
    """
    known = {entry.name for entry in TABLE}
    for name in names:
        if name not in known:
            raise PlanError(f"There is no strategy {name!r}. `pardist strategies` lists them.")
    return names


def _positive(**values: Any) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise PlanError(f"{name}={value!r} is not a number of 1 or more.")
