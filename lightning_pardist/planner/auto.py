"""``strategy="pardist_auto"``: a strategy chosen at the start of ``fit`` from the module, its data and the devices."""

from __future__ import annotations

import json
import platform
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_debug, rank_zero_info, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_pardist.axes.by_name import data_parallel_axis
from lightning_pardist.compat.lightning_loops import data_source
from lightning_pardist.compat.pytree import tree_map_only
from lightning_pardist.planner.candidates import Candidate
from lightning_pardist.planner.errors import PlanError
from lightning_pardist.planner.measuring import measure_rank
from lightning_pardist.planner.plan_result import Plan
from lightning_pardist.planner.planning import known_names, plan
from lightning_pardist.planner.profiles import DeviceProfile
from lightning_pardist.planner.words import sentence, size_text, time_text
from lightning_pardist.runtime.job_counts import next_call_number
from lightning_pardist.runtime.process_group import job_store
from lightning_pardist.settings import positive
from lightning_pardist.strategies.strategy import PardistStrategy
from lightning_pardist.trainer.sample_batches import NoSampleError, SampleBatches, undisturbed_random

#: Without a plan, maximum fraction of a device's memory that unsharded states may take.
_SMALL = 0.5
#: The chosen candidate, and the lines that report it.
_Answer = tuple[Candidate, list[str]]


class AutoStrategy(PardistStrategy):
    """Automatic choice: uses the fastest strategy that fits, chosen when ``fit`` begins; before, ``pardist_ddp``.

    The ranks measure their devices and links, which takes seconds. Then the first rank plans: it runs one rank of each
    strategy on the module and its first batch without computing anything (see ``pardist plan``), and sends the result
    to the other ranks. The choice, the reason and the setting that keeps it are logged. Each batch of the loader
    remains the batch of one data-parallel rank. A strategy whose ranks share batches therefore trains on fewer samples
    per step, and strategies are compared by samples per second.

    If no candidate fits, the one that needs the least memory is used. If no plan is possible, because the module's step
    needs tensor values, the choice is ``pardist_ddp`` if states take less than half of a device's memory, else
    ``pardist_zero3``.

    Args:
        strategies: Names to choose from; by default those whose engines differ.
        memory_gb: Memory of a device, in 10^9 bytes; by default the device's own.
        planning_s: Seconds after which no further candidate is planned.
        **kwargs: See :class:`~lightning_pardist.strategies.strategy.PardistStrategy`.

    Attributes:
        chosen: The chosen candidate; None before ``fit``.

    Raises:
        ValueError: If a name is unknown, or a setting is out of range.
    """

    def __init__(
        self,
        *,
        strategies: Sequence[str] | None = None,
        memory_gb: float | None = None,
        planning_s: float = 120.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(axes=[data_parallel_axis("ddp")], **kwargs)
        self._names = None if strategies is None else known_names(strategies)
        self._memory_gb = (
            None if memory_gb is None else positive("memory_gb", memory_gb, "Set the memory of a device in 10^9 bytes.")
        )
        self._planning_s = positive("planning_s", planning_s, "Set the time limit of planning in seconds.")
        self.chosen: Candidate | None = None

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if self.chosen is None and trainer.state.fn == TrainerFn.FITTING:
            self._choose(trainer)
        super().setup(trainer)

    def _choose(self, trainer: pl.Trainer) -> None:
        """Plan on the first rank, and adopt the chosen strategy. Collective over the world.

        Raises:
            TimeoutError: If the first rank does not send its choice in time.
        """
        if self.world_size == 1:
            self.chosen = Candidate("pardist_ddp")
            rank_zero_info(
                "pardist_auto: pardist_ddp, because there is only one rank. To keep it: strategy='pardist_ddp'"
            )
            return
        begin = time.perf_counter()
        with undisturbed_random():
            keeps = self.keep_freed_memory
            profile = measure_rank(self.root_device, hosts=self._hosts(), keeps_memory=keeps, by_size=False)
            measured_s = time.perf_counter() - begin
            answer = self._planned(trainer, profile) if self.global_rank == 0 else None
        self.chosen, lines = self._told(answer)
        took = f"pardist_auto measured for {measured_s:.1f} s and planned for"
        rank_zero_info("\n".join(lines))
        rank_zero_debug(f"{took} {time.perf_counter() - begin - measured_s:.1f} s.")
        if self.chosen != Candidate("pardist_ddp"):
            made: PardistStrategy = self.chosen.make()
            self.adopt_axes(made)

    def _hosts(self) -> list[str]:
        """Return the host of every rank. Collective over the world."""
        hosts = [""] * self.world_size
        dist.all_gather_object(hosts, platform.node())
        return hosts

    def _told(self, answer: _Answer | None) -> _Answer:
        """Return the first rank's choice on every rank, over the store, without the timeout of training's collectives.

        Raises:
            TimeoutError: If it does not arrive in time.
        """
        store, key = job_store(), f"pardist/auto/{next_call_number('choices')}"
        if answer is not None:
            chosen, lines = answer
            store.set(key, json.dumps([chosen.strategy, dict(chosen.settings), lines]))
            return answer
        # The search ends after planning_s, plus the time of the current candidate.
        wait = timedelta(seconds=2 * self._planning_s + 60)
        try:
            store.wait([key], wait)
        except dist.DistStoreError as error:
            raise TimeoutError(
                f"Rank 0 did not choose a strategy within {wait.total_seconds():.0f} s. Set planning_s higher than"
                f" {self._planning_s:g}, or set the strategy that `pardist plan` shows as the best."
            ) from error
        strategy, settings, lines = json.loads(store.get(key))
        return Candidate(strategy, settings), lines

    def _planned(self, trainer: pl.Trainer, profile: DeviceProfile) -> _Answer:
        settings: dict[str, Any] = {"precision": str(trainer.precision)}
        for name in ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm"):
            if (value := getattr(trainer, name, None)) is not None:
                settings[name] = value
        module = trainer.lightning_module
        try:
            made = plan(
                module,
                iter([self._sample(trainer)]),
                devices=self.num_processes,
                num_nodes=self.num_nodes,
                device=profile,
                memory_gb=self._memory_gb,
                strategies=self._names,
                time_limit_s=self._planning_s,
                activation_checkpointing=self.activation_checkpointing,
                **settings,
            )
        except (PlanError, NoSampleError) as error:
            return _fallback_choice(module, self._memory_gb or profile.memory_bytes / 1e9, sentence(error))
        except Exception as error:
            # Any error: the other ranks wait, and a run without a plan is better than none.
            rank_zero_warn(f"pardist_auto could not make a plan:\n{''.join(traceback.format_exception(error))}")
            return _fallback_choice(module, self._memory_gb or profile.memory_bytes / 1e9, sentence(error))
        row = made.rows[0] if made.best is not None else min(made.rows, key=lambda each: each.memory["peak"])
        return row.candidate, _why(made, made.rows.index(row))

    def _sample(self, trainer: pl.Trainer) -> Any:
        """Return the first batch on the host; a loader created by a module's hook is created again after the choice."""
        samples = SampleBatches(trainer)
        try:
            batch = tree_map_only(Tensor, lambda leaf: leaf.cpu(), samples.first())
        except BaseException:
            samples.detach()
            raise
        if data_source(trainer.fit_loop).is_module():
            samples.detach()
        else:
            self.context.sample_batches = samples
        return batch


def _fallback_choice(module: pl.LightningModule, memory_gb: float, why: str) -> _Answer:
    """Choose without a plan: ``pardist_ddp`` if its states are small for a device, else ``pardist_zero3``."""
    states = 4 * sum(param.numel() * param.element_size() for param in module.parameters())
    name = "pardist_ddp" if states < _SMALL * memory_gb * 1e9 else "pardist_zero3"
    return Candidate(name), [
        f"pardist_auto: {name}, chosen without a plan: {why}.",
        f"  Why: parameters, gradients and two optimizer states per parameter take {size_text(states)} on one device"
        f" of {memory_gb:.1f} GB.",
        f"  To keep it: strategy={name!r}",
    ]


def _why(made: Plan, index: int) -> list[str]:
    """Describe the choice in five lines."""
    row = made.rows[index]
    others = [each for each in made.rows if each is not row][:2]
    beside = "; ".join(f"{each.candidate}: {each.reason}" for each in others) or "no other candidate can be planned"
    fits = "the fastest that fits" if row.fits else "none fits, and this one needs the least memory"
    return [
        f"pardist_auto: {row.candidate} on {made.headline}",
        f"  Why: {fits}, of {len(made.rows)} planned and {len(made.refused)} left out or refused.",
        f"  Expected: {size_text(row.memory['peak'])} on the fullest rank, {time_text(row.time.step)} a step,"
        f" {row.samples_per_s:.1f} samples/s on {row.dims.batch_size} batches at a time.",
        f"  Alternatives: {beside}.",
        f"  To keep it: strategy={row.candidate.line}",
    ]
