"""Which strategy, does it fit, how fast."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_pardist.compat.pytree import tree_leaves
from lightning_pardist.engines.pipeline import CannotPipelineError
from lightning_pardist.mesh import AXES, ParallelDims
from lightning_pardist.planner.candidates import DEFAULT, PLANNED, Candidate, enumerate_candidates, with_checkpointing
from lightning_pardist.planner.ledger import Event, Message, Operator
from lightning_pardist.planner.planned_rank import Place, RankTrace, trace_rank
from lightning_pardist.planner.profiles import DeviceProfile, find_profile
from lightning_pardist.planner.step_time import StepTime, sent_bytes, time_step
from lightning_pardist.registry import TABLE

#: Rows within this share of the best are as fast.
_SAME = 0.005


class PlanError(ValueError):
    """Nothing can be planned as asked; the message is a sentence."""


@dataclass(frozen=True)
class Row:
    """One candidate, planned.

    Attributes:
        candidate: Which.
        dims: Degrees of parallelism.
        memory: Bytes of the fullest rank at its peak, by kind, and ``peak``, their sum.
        peak_in: What the step is at then.
        sent: Bytes that the rank sends in a step, by axis.
        time: Seconds of a step.
        samples_per_s: Of all ranks together; 0 if the batch's samples could not be counted.
        mfu: Share of the devices' peak that the model's own operations are.
        fits: Whether the peak and what a device reserves fit its memory.
        reason: Why it is not the best; of the best why it is.
        looked_at: Where the module looked at values, which were guessed.
    """

    candidate: Candidate
    dims: ParallelDims
    memory: Mapping[str, int]
    peak_in: str
    sent: Mapping[str, float]
    time: StepTime
    samples_per_s: float
    mfu: float
    fits: bool
    reason: str = ""
    looked_at: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values: bytes, seconds."""
        return {
            "strategy": self.candidate.strategy,
            "settings": dict(self.candidate.settings),
            "degrees": self.dims.layout,
            "memory": dict(self.memory),
            "peak_in": self.peak_in,
            "sent": {axis: round(size) for axis, size in self.sent.items()},
            "seconds": {
                "compute": self.time.compute,
                "communication": self.time.communication,
                "idle": self.time.idle,
                "step": self.time.step,
            },
            "samples_per_s": self.samples_per_s,
            "mfu": self.mfu,
            "fits": self.fits,
            "reason": self.reason,
            "trainer": self.candidate.line,
        }


@dataclass(frozen=True)
class Refused:
    """One candidate that the module cannot train under.

    Attributes:
        candidate: Which.
        reason: What its strategy says.
    """

    candidate: Candidate
    reason: str


class Plan:
    """What came out, the best first. Prints itself.

    Attributes:
        rows: Candidates that could be planned: those that fit, by speed, then the others, by memory.
        refused: Those that their strategy refuses.
        device: The profile that times and limits are of.
        devices: Ranks a node.
        num_nodes: Nodes.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        refused: Sequence[Refused],
        *,
        device: DeviceProfile,
        devices: int,
        num_nodes: int,
    ) -> None:
        self.rows = tuple(rows)
        self.refused = tuple(refused)
        self.device = device
        self.devices = devices
        self.num_nodes = num_nodes

    @property
    def best(self) -> Row | None:
        """The fastest that fits; None if none does."""
        return self.rows[0] if self.rows and self.rows[0].fits else None

    def why_nothing_fits(self) -> str:
        """What would have to change for the candidate that needs the least."""
        least = min(self.rows, key=lambda row: row.memory["peak"])
        needs = least.memory["peak"] + self.device.reserved_bytes
        return (
            f"No candidate fits {_gb(self.device.memory_bytes)}: the least is {least.candidate}, which needs devices of"
            f" {_gb(needs)} ({_gb(self.device.reserved_bytes)} of it reserved), or a smaller batch, or more devices."
        )

    def explain(self, row: Row | int) -> str:
        """What makes a row's memory and time.

        Args:
            row: It, or its number from 0.
        """
        row = self.rows[row] if isinstance(row, int) else row
        kinds = sorted((kind for kind in row.memory if kind != "peak"), key=lambda kind: -row.memory[kind])
        shares = ", ".join(f"{kind} {_gb(row.memory[kind])}" for kind in kinds)
        time = row.time
        lines = [
            f"{row.candidate}: {row.dims.describe()}",
            f"  The peak of {_gb(row.memory['peak'])} is in {row.peak_in}: {shares}.",
            f"  A step of {_s(time.step)}: compute {_s(time.compute)}, waiting for messages {_s(time.communication)}"
            f" ({_s(time.hidden)} more are hidden behind compute), for the host {_s(time.idle)}.",
            *(f"  Sent over {axis}: {_gb(size)} a step." for axis, size in row.sent.items()),
            f"  {row.reason}",
        ]
        if row.looked_at:
            lines.append(f"  Values were guessed where the module looks at them: {', '.join(row.looked_at)}.")
        return "\n".join(lines)

    def diff(self, first: Row | int, second: Row | int) -> str:
        """Where the second gains and loses against the first.

        Args:
            first: A row, or its number from 0.
            second: Another.
        """
        a, b = (self.rows[row] if isinstance(row, int) else row for row in (first, second))
        lines = [f"{b.candidate} against {a.candidate}:"]
        lines += [f"  {kind:14} {_signed_gb(b.memory[kind] - a.memory[kind])}" for kind in a.memory]
        times = {"compute": "compute", "communication": "communication", "idle": "idle", "step": "step"}
        for name, attribute in times.items():
            change = getattr(b.time, attribute) - getattr(a.time, attribute)
            lines.append(f"  {name:14} {'+' if change >= 0 else '-'}{_s(abs(change))}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {
            "device": self.device.to_json(),
            "devices": self.devices,
            "num_nodes": self.num_nodes,
            "candidates": [row.to_json() for row in self.rows],
            "refused": [
                {"strategy": each.candidate.strategy, "settings": dict(each.candidate.settings), "reason": each.reason}
                for each in self.refused
            ],
        }

    def save(self, path: str | Path) -> None:
        """Write :meth:`to_json` to a file."""
        Path(path).write_text(json.dumps(self.to_json(), indent=2) + "\n")

    def __str__(self) -> str:
        rates = "measured" if self.device.is_measured else "data sheet, efficiencies assumed"
        lines = [
            f"{self.devices} x {self.num_nodes} {self.device.name} ({_gb(self.device.memory_bytes)} each; {rates})",
            "",
            f"{'':2} {'strategy':52} {'memory':>9} {'step':>9} {'waits':>9} {'samples/s':>10} {'MFU':>5}  why",
        ]
        for number, row in enumerate(self.rows):
            lines.append(
                f"{number:2} {row.candidate!s:52} {_gb(row.memory['peak']):>9} {_s(row.time.step):>9}"
                f" {_s(row.time.communication):>9} {row.samples_per_s:>10.1f} {row.mfu:>5.0%}  {row.reason}"
            )
        lines += [f" - {each.candidate!s:52} refused: {each.reason}" for each in self.refused]
        if self.best is not None:
            nodes = f", num_nodes={self.num_nodes}" if self.num_nodes > 1 else ""
            lines += ["", f"Trainer(strategy={self.best.candidate.line}, devices={self.devices}{nodes})"]
        return "\n".join(lines)

    __repr__ = __str__


def plan(
    module: pl.LightningModule,
    data: Any,
    *,
    devices: int,
    num_nodes: int = 1,
    device: str | Path | DeviceProfile = "h100",
    memory_gb: float | None = None,
    strategies: Sequence[str] | None = None,
    **trainer_settings: Any,
) -> Plan:
    """Plan training without the devices: memory and time of every strategy, by running one rank of each.

    The module's own step runs under each strategy's own engines, with its batch and optimizers, as one rank of all.
    Operators compute nothing, and messages go nowhere: what is allocated, computed and sent is counted. Neither the
    module nor this process changes. Not collective.

    Args:
        module: As it is before training, with values or built on ``meta``.
        data: One rank's batch, a DataLoader, or a LightningDataModule.
        devices: ``Trainer(devices=)``.
        num_nodes: ``Trainer(num_nodes=)``.
        device: A name (``"h100"``), the path of a saved profile, or a profile.
        memory_gb: In place of the device's memory, in 10^9 bytes.
        strategies: Registered names; by default those whose engines differ.
        **trainer_settings: Further arguments of the Trainer that change a step: ``precision``,
            ``accumulate_grad_batches``, ``gradient_clip_val``.

    Returns:
        Every candidate, the best first.

    Raises:
        PlanError: If there is no batch or nothing in it, a strategy is not known, or the module's step fails.
        ProfileError: If the device is not known, or its profile is broken.
    """
    profile = find_profile(device, memory_gb=memory_gb)
    names = _known(strategies or DEFAULT)
    _positive(devices=devices, num_nodes=num_nodes)
    if str(trainer_settings.get("precision", "")) == "16-mixed":
        raise PlanError("precision='16-mixed' scales gradients by values, which a plan does not have; its memory and"
                        " time are those of 'bf16-mixed', which can be planned.")  # fmt: skip
    batch = first_batch(data)
    planner = _Planner(module, batch, profile, devices, num_nodes, trainer_settings)
    for candidate in enumerate_candidates(names, devices=devices, num_nodes=num_nodes):
        planner.add(candidate)
    return planner.ranked()


def first_batch(data: Any) -> Any:
    """The batch of a loader or a data module, or the batch that was given.

    Raises:
        PlanError: If there is none, or no tensor in it.
    """
    if isinstance(data, pl.LightningDataModule):
        data.prepare_data()
        data.setup("fit")
        data = data.train_dataloader()
    if hasattr(data, "__iter__") and not isinstance(data, (Tensor, Mapping, tuple, list, str)):
        data = next(iter(data), None)
    if data is None:
        raise PlanError("There is no batch: pass one, a DataLoader that has one, or a LightningDataModule.")
    if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(data)):
        raise PlanError(f"The batch, a {type(data).__name__}, has no tensor in it: nothing can be planned with it.")
    return data


class _Planner:
    """Traces candidates, and compares them."""

    def __init__(
        self,
        module: pl.LightningModule,
        batch: Any,
        profile: DeviceProfile,
        devices: int,
        num_nodes: int,
        settings: Mapping[str, Any],
    ) -> None:
        self._module, self._batch, self._profile = module, batch, profile
        self._devices, self._num_nodes, self._settings = devices, num_nodes, settings
        self._rows: list[Row] = []
        self._refused: list[Refused] = []
        self._samples = _samples_of(batch)
        # An error of the module's own comes up here, and is not taken for a refusal of every strategy.
        alone = self._traced_alone()
        self._model_flops = sum(event.flops for event in alone.events if isinstance(event, Operator))

    def add(self, candidate: Candidate) -> None:
        """Plan a candidate, and the same with activation checkpointing if it does not fit."""
        if candidate.strategy not in PLANNED:
            self._refused.append(Refused(candidate, f"{candidate.strategy} cannot be planned yet."))
            return
        try:
            row = self._row(candidate, self._trace(candidate))
        except (ValueError, MisconfigurationException, CannotPipelineError) as error:
            self._refused.append(Refused(candidate, _sentence(error)))
            return
        except Exception as error:
            reason = f"cannot be planned, which says nothing of training: {type(error).__name__}: {_sentence(error)}"
            self._refused.append(Refused(candidate, reason))
            return
        self._rows.append(row)
        if not row.fits and "activation_checkpointing" not in candidate.settings:
            self.add(with_checkpointing(candidate))

    def ranked(self) -> Plan:
        """All, the best first, each with its reason.

        Raises:
            PlanError: If every candidate is refused.
        """
        if not self._rows:
            reasons = "; ".join(f"{each.candidate}: {each.reason}" for each in self._refused)
            raise PlanError(f"Every candidate is refused. {reasons}")
        rows = sorted(self._rows, key=lambda row: (not row.fits, -row.samples_per_s if row.fits else 0,
                                                   row.memory["peak"]))  # fmt: skip
        best = rows[0] if rows[0].fits else None
        told = [_with_reason(row, best, self._profile) for row in rows]
        return Plan(told, self._refused, device=self._profile, devices=self._devices, num_nodes=self._num_nodes)

    def _trace(self, candidate: Candidate, rank: int = 0) -> RankTrace:
        place = Place(rank, self._devices, self._num_nodes, self._profile.backend)
        return trace_rank(self._module, self._batch, candidate.make, place, trainer_settings=self._settings)

    def _traced_alone(self) -> RankTrace:
        """One process, which no strategy has a reason to refuse.

        Raises:
            PlanError: If the module's own step fails.
        """
        try:
            place = Place(0, 1, 1, self._profile.backend)
            make = Candidate("pardist_ddp").make
            return trace_rank(self._module, self._batch, make, place, trainer_settings=self._settings)
        except Exception as error:
            raise PlanError(
                f"The module's step fails on this batch without values: {type(error).__name__}: {_sentence(error)}"
            ) from error

    def _row(self, candidate: Candidate, trace: RankTrace) -> Row:
        profile, dims = self._profile, trace.dims
        time = time_step(trace.events, profile, ranks_per_node=self._devices)
        peak = profile.flops_of(_main_dtype(trace.events)) / profile.matmul_efficiency
        replicas = dims.batch_size
        work = self._model_flops * replicas
        memory = {**trace.held.by_kind, "peak": trace.held.peak}
        return Row(
            candidate,
            dims,
            memory,
            trace.peak_in,
            _sent_by_axis(trace.events, dims, trace.rank),
            time,
            self._samples * replicas * self._accumulated / time.step if time.step else 0.0,
            work / (time.step * peak * dims.world_size) if time.step else 0.0,
            memory["peak"] + profile.reserved_bytes <= profile.memory_bytes,
            looked_at=tuple(trace.looked_at),
        )

    @property
    def _accumulated(self) -> int:
        return int(self._settings.get("accumulate_grad_batches", 1))


def _with_reason(row: Row, best: Row | None, profile: DeviceProfile) -> Row:
    room = profile.memory_bytes - profile.reserved_bytes
    if not row.fits:
        reason = f"does not fit: {_gb(row.memory['peak'] - room)} too much, the peak is in {row.peak_in}"
    elif row is best:
        reason = "the fastest that fits"
    else:
        reason = "" if best is None else _against(row, best)
    return replace(row, reason=reason)


def _against(row: Row, best: Row) -> str:
    """Where a row loses time against the best."""
    lost = 1 - row.samples_per_s / best.samples_per_s if best.samples_per_s else 0.0
    if lost < _SAME:
        return f"as fast, and holds {'more' if row.memory['peak'] > best.memory['peak'] else 'as much or less'}"
    changes = {
        "computes longer": row.time.compute - best.time.compute,
        "waits longer for messages": row.time.communication - best.time.communication,
        "waits longer for the host": row.time.idle - best.time.idle,
    }
    most = max(changes, key=lambda name: changes[name])
    replicas, of = row.dims.batch_size, best.dims.batch_size
    fewer = f", on {replicas} batches at a time in place of {of}" if replicas < of else ""
    longer = f": {most} ({_s(changes[most])} a step){fewer}" if changes[most] > 0 else fewer
    return f"{lost:.0%} fewer samples a second{longer}"


def _sent_by_axis(events: Sequence[Event], dims: ParallelDims, rank: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for event in events:
        if isinstance(event, Message) and len(event.ranks) > 1:
            places = [dims.coordinates(each) for each in event.ranks]
            axes = [axis for axis in AXES if len({place[axis] for place in places}) > 1]
            name = " x ".join(axes)
            found[name] = found.get(name, 0.0) + sent_bytes(event)
    return found


def _main_dtype(events: Sequence[Event]) -> str:
    """The dtype of most arithmetic."""
    by_dtype: dict[str, int] = {}
    for event in events:
        if isinstance(event, Operator) and event.flops:
            name = str(event.dtype).removeprefix("torch.")
            by_dtype[name] = by_dtype.get(name, 0) + event.flops
    most = max(by_dtype, key=lambda name: by_dtype[name]) if by_dtype else "float32"
    return "tf32" if most == "float32" and torch.get_float32_matmul_precision() != "highest" else most


def _samples_of(batch: Any) -> int:
    """The size that the first dims of most of a batch's tensors have."""
    sizes = [leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
    return max(set(sizes), key=sizes.count) if sizes else 0


def _known(names: Sequence[str]) -> Sequence[str]:
    known = {entry.name for entry in TABLE}
    for name in names:
        if name not in known:
            raise PlanError(f"There is no strategy {name!r}. `pardist strategies` lists them.")
    return names


def _positive(**values: Any) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise PlanError(f"{name}={value!r} is not a number of 1 or more.")


def _sentence(error: BaseException) -> str:
    return " ".join(str(error).partition("\n\n")[0].split()) or type(error).__name__


def _gb(size: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if size >= scale / 10:
            return f"{size / scale:.1f} {unit}"
    return f"{size / 1e3:.1f} KB"


def _signed_gb(size: float) -> str:
    return f"{'+' if size >= 0 else '-'}{_gb(abs(size))}"


def _s(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
