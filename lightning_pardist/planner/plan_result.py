"""Result of a plan: rows in order of preference, explanations, differences and "what if" queries."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_pardist.mesh import ParallelDims
from lightning_pardist.planner.candidates import Candidate
from lightning_pardist.planner.pictures import memory_bars, page
from lightning_pardist.planner.profiles import DeviceProfile, find_profile
from lightning_pardist.planner.step_time import StepTime
from lightning_pardist.planner.words import change_text, size_text, time_text

#: Relative difference in speed below which a row counts as fast as the best one.
_SAME = 0.005


@dataclass(frozen=True)
class Row:
    """A planned candidate.

    Attributes:
        candidate: The candidate.
        dims: Degrees of parallelism.
        memory: Bytes by kind of the rank with the highest peak, at its peak, and ``peak``, their sum.
        peak_in: Part of the step in which the peak occurs.
        fullest_rank: Rank with the highest peak; for a pipeline one rank of each stage is traced.
        sent: Bytes that a rank sends per step, by axis; for a pipeline of the rank that sends most.
        time: Step time of the rank that computes longest, in seconds.
        idle_share: Time for which ranks of a pipeline wait for each other, as a fraction of the time of all ranks.
        samples: Samples per rank and step; 0 if they could not be counted.
        samples_per_s: Samples per second over all ranks; 0 if the batch's samples could not be counted.
        tokens_per_s: Tokens per second over all ranks; 0 if the batch has no 2-dim integer tensor.
        mfu: Fraction of the devices' peak that the model's own operations use.
        fits: Whether the peak and the device's reserved memory fit its memory.
        reason: Why it is the best, or why it is not.
        looked_at: Places at which the module reads tensor values, which were guessed.
        timelines: Step times of the traced ranks.
        on_host: Bytes of the same rank in host memory, not included in ``memory``.
        in_files: Bytes of its optimizer state in files; only its resident part is included in the other two.
    """

    candidate: Candidate
    dims: ParallelDims
    memory: Mapping[str, int]
    peak_in: str
    fullest_rank: int
    sent: Mapping[str, float]
    time: StepTime
    idle_share: float
    samples: float
    samples_per_s: float
    tokens_per_s: float
    mfu: float
    fits: bool
    reason: str = ""
    looked_at: tuple[str, ...] = ()
    timelines: Mapping[int, StepTime] = field(default_factory=dict, repr=False)
    on_host: int = 0
    in_files: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the row as plain values in bytes and seconds."""
        return {
            "strategy": self.candidate.strategy,
            "settings": dict(self.candidate.settings),
            "degrees": self.dims.layout,
            "memory": dict(self.memory),
            "on_host": self.on_host,
            "in_files": self.in_files,
            "peak_in": self.peak_in,
            "fullest_rank": self.fullest_rank,
            "sent": {axis: round(size) for axis, size in self.sent.items()},
            "seconds": {
                "compute": self.time.compute,
                "communication": self.time.communication,
                "idle": self.time.idle,
                "step": self.time.step,
            },
            "idle_share": self.idle_share,
            "samples_per_rank": self.samples,
            "samples_per_s": self.samples_per_s,
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "fits": self.fits,
            "reason": self.reason,
            "trainer": self.candidate.line,
        }


@dataclass(frozen=True)
class Refused:
    """A candidate without estimates.

    Attributes:
        candidate: The candidate.
        reason: Error of its strategy, or why it was not traced.
    """

    candidate: Candidate
    reason: str


class Plan:
    """Result of planning, the best candidate first; has a text and a notebook representation.

    Attributes:
        rows: Candidates that could be planned: those that fit, by speed, then the others, by memory.
        refused: Candidates that their strategy refuses, that cannot be planned, or that cannot be the best.
        device: Device profile for times and limits.
        devices: Ranks per node.
        num_nodes: Number of nodes.
        notes: Deviations from the requested settings.
        untraced: For a result of :meth:`what_if`, candidates without estimates that may be the best.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        refused: Sequence[Refused],
        *,
        device: DeviceProfile,
        devices: int,
        num_nodes: int,
        notes: Sequence[str] = (),
        untraced: Sequence[Candidate] = (),
        again: Callable[[DeviceProfile], Plan] | None = None,
        scaling: Callable[[], list[tuple[int, float]]] = list,
    ) -> None:
        self.rows = tuple(rows)
        self.refused = tuple(refused)
        self.device = device
        self.devices = devices
        self.num_nodes = num_nodes
        self.untraced = tuple(untraced)
        self.notes = (*notes, *([self._make_another] if untraced else []))
        self._again = again
        self._scaling = scaling

    @property
    def best(self) -> Row | None:
        """Fastest row that fits; None if no row fits."""
        return self.rows[0] if self.rows and self.rows[0].fits else None

    def what_if(
        self,
        *,
        device: str | Path | DeviceProfile | None = None,
        memory_gb: float | None = None,
        links: float = 1.0,
    ) -> Plan:
        """Return the plan of the same candidates for another device, memory or link bandwidth, without tracing again.

        Candidates that this plan did not trace may be the best there, in particular with less memory. A note then lists
        them (``untraced``); a new plan is needed to compare them.

        Args:
            device: Device in place of the plan's own, as for :func:`~lightning_pardist.plan`; of the same backend.
            memory_gb: Override of the device's memory, in 10^9 bytes.
            links: Factor on the bandwidth of links inside and between nodes.

        Raises:
            ValueError: If the device uses another collective backend, on which engines depend.
        """
        profile = find_profile(self.device if device is None else device, memory_gb=memory_gb)
        if profile.backend != self.device.backend or self._again is None:
            raise ValueError(
                f"{profile.name} communicates with {profile.backend}, but this plan was made for"
                f" {self.device.backend}, with which engines run differently. Make a new plan for {profile.name}."
            )
        inside, between = (replace(link, bytes_per_s=link.bytes_per_s * links) for link in
                           (profile.inside, profile.between))  # fmt: skip
        return self._again(replace(profile, inside=inside, between=between))

    def scaling(self) -> list[tuple[int, float]]:
        """Return numbers of devices with the samples per second of ``pardist_ddp`` on them, with one batch each.

        More devices help as long as exposed communication is short compared to compute.
        Empty if ``pardist_ddp`` is not among the rows.
        """
        return self._scaling()

    def why_nothing_fits(self) -> str:
        """Return what would have to change for the candidate that needs the least memory."""
        if self.untraced:
            return (
                f"No traced candidate fits {size_text(self.device.memory_bytes)}, but not all candidates were"
                f" traced. {self._make_another}"
            )
        least = min(self.rows, key=lambda row: row.memory["peak"])
        needs = least.memory["peak"] + self.device.reserved_bytes
        return (
            f"No candidate fits {size_text(self.device.memory_bytes)}. {least.candidate} needs the least memory,"
            f" {size_text(needs)} per device ({size_text(self.device.reserved_bytes)} of it reserved). Use larger"
            " devices, a smaller batch or more devices."
        )

    @property
    def _make_another(self) -> str:
        names = ", ".join(map(str, self.untraced[:4])) + (", ..." if len(self.untraced) > 4 else "")
        return (
            f"Not traced, but may be the best for this device: {names}. Make a new plan() for {self.device.name}"
            " with these settings."
        )

    def explain(self, row: Row | int) -> str:
        """Return a breakdown of a row's memory and time.

        Args:
            row: The row, or its index from 0.
        """
        row = self.rows[row] if isinstance(row, int) else row
        kinds = sorted((kind for kind in row.memory if kind != "peak"), key=lambda kind: -row.memory[kind])
        shares = ", ".join(f"{kind} {size_text(row.memory[kind])}" for kind in kinds)
        time = row.time
        host = time.idle - time.stages
        waits = f"for the host {time_text(max(0.0, host))}"
        if row.dims.pipeline_parallel > 1:
            waits += f", for other stages {time_text(time.stages)} ({row.idle_share:.0%} of all ranks' time)"
        lines = [
            f"{row.candidate}: {row.dims.describe()}",
            f"  The peak of {size_text(row.memory['peak'])} is in {row.peak_in}, on rank {row.fullest_rank}: {shares}.",
            f"  A step of {time_text(time.step)}: compute {time_text(time.compute)}, waiting for messages"
            f" {time_text(time.communication)} ({time_text(time.hidden)} more are hidden behind compute), {waits}.",
            *(f"  Sent over {axis}: {size_text(size)} a step." for axis, size in row.sent.items()),
            f"  {row.reason}",
        ]
        if row.in_files:
            lines.insert(2, f"  Files hold another {size_text(row.in_files)}, which each step reads and writes.")
        if row.on_host:
            lines.insert(2, f"  The host holds another {size_text(row.on_host)}, and the optimizer steps there.")
        if row.dims.expert_parallel > 1:
            lines.append(
                "  Assumed: tokens are sent instead of expert weights where possible, and all experts get the same"
                " number of tokens."
            )
        if row.looked_at:
            lines.append(
                "  Values of tensors that a plan does not compute were assumed where the module reads them:"
                f" {', '.join(row.looked_at)}."
            )
        return "\n".join(lines)

    def diff(self, first: Row | int, second: Row | int) -> str:
        """Return the differences in memory, time and communication of the second row to the first.

        Args:
            first: A row, or its index from 0.
            second: Another row or index.
        """
        a, b = (self.rows[row] if isinstance(row, int) else row for row in (first, second))
        lines = [f"{b.candidate} against {a.candidate}:"]
        lines += [f"  {kind:14} {change_text(b.memory[kind] - a.memory[kind])}" for kind in a.memory]
        for name in ("compute", "communication", "idle", "step"):
            change = getattr(b.time, name) - getattr(a.time, name)
            lines.append(f"  {name:14} {'+' if change >= 0 else '-'}{time_text(abs(change))}")
        for axis in dict.fromkeys((*a.sent, *b.sent)):
            lines.append(f"  sent, {axis}: {change_text(b.sent.get(axis, 0.0) - a.sent.get(axis, 0.0))}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        return {
            "device": self.device.to_json(),
            "devices": self.devices,
            "num_nodes": self.num_nodes,
            "notes": list(self.notes),
            "candidates": [row.to_json() for row in self.rows],
            "refused": [
                {"strategy": each.candidate.strategy, "settings": dict(each.candidate.settings), "reason": each.reason}
                for each in self.refused
            ],
        }

    def save(self, path: str | Path) -> None:
        """Write :meth:`to_json` to a file."""
        Path(path).write_text(self.to_json_text())

    def to_json_text(self) -> str:
        """Return :meth:`to_json` as JSON text."""
        return json.dumps(self.to_json(), indent=2) + "\n"

    def to_html(self) -> str:
        """Return a standalone HTML page with the table, memory by kind, and steps by rank."""
        return page(self)

    def _repr_html_(self) -> str:
        return f"{memory_bars(self)}<pre>{html.escape(str(self))}</pre>"

    @property
    def headline(self) -> str:
        """Devices of the plan, and the source of their rates."""
        where = f"{self.devices} x {self.num_nodes} {self.device.name}"
        return f"{where} ({size_text(self.device.memory_bytes)} each; {self.device.rates_text})"

    @property
    def trainer_line(self) -> str:
        """Trainer expression of the best row; empty if nothing fits."""
        if self.best is None:
            return ""
        nodes = f", num_nodes={self.num_nodes}" if self.num_nodes > 1 else ""
        return f"Trainer(strategy={self.best.candidate.line}, devices={self.devices}{nodes})"

    def __str__(self) -> str:
        lines = [
            self.headline,
            *self.notes,
            "",
            f"{'':2} {'strategy':52} {'memory':>9} {'step':>9} {'waits':>9} {'samples/s':>10} {'MFU':>5}  why",
        ]
        for number, row in enumerate(self.rows):
            lines.append(
                f"{number:2} {row.candidate!s:52} {size_text(row.memory['peak']):>9} {time_text(row.time.step):>9}"
                f" {time_text(row.time.communication + row.time.stages):>9} {row.samples_per_s:>10.1f}"
                f" {row.mfu:>5.0%}  {row.reason}"
            )
        reasons: dict[str, list[str]] = {}
        for each in self.refused:
            reasons.setdefault(each.reason, []).append(str(each.candidate))
        lines += [f" - {', '.join(names):52} {reason}" for reason, names in reasons.items()]
        if self.best is not None:
            lines += ["", self.trainer_line]
        return "\n".join(lines)

    __repr__ = __str__


def ranked(rows: Sequence[Row], profile: DeviceProfile, *, all_traced: bool = True) -> list[Row]:
    """Sort rows, the best first, and set their reasons.

    Args:
        rows: Rows in any order.
        profile: Device profile of their times and limits.
        all_traced: Whether no untraced candidate could be the best.
    """
    ordered = sorted(rows, key=lambda row: (not row.fits, -row.samples_per_s if row.fits else 0, row.memory["peak"]))
    best = ordered[0] if ordered and ordered[0].fits else None
    return [_with_reason(row, best, profile, all_traced) for row in ordered]


def _with_reason(row: Row, best: Row | None, profile: DeviceProfile, all_traced: bool) -> Row:
    room = profile.memory_bytes - profile.reserved_bytes
    if not row.fits:
        over = size_text(row.memory["peak"] - room)
        reason = f"does not fit: {over} too much, the peak is in {row.peak_in}"
    elif row is best:
        reason = "the fastest that fits" if all_traced else "the fastest traced candidate that fits"
    else:
        reason = "" if best is None else _against(row, best)
    return replace(row, reason=reason)


def _against(row: Row, best: Row) -> str:
    """Return where a row loses time compared to the best."""
    lost = 1 - row.samples_per_s / best.samples_per_s if best.samples_per_s else 0.0
    if lost < _SAME:
        return f"as fast, with {'more' if row.memory['peak'] > best.memory['peak'] else 'no more'} memory"
    changes = {
        "computes longer": row.time.compute - best.time.compute,
        "waits longer for messages": row.time.communication - best.time.communication,
        "waits longer for other stages": row.time.stages - best.time.stages,
        "waits longer for the host": row.time.idle - row.time.stages - best.time.idle + best.time.stages,
    }
    most = max(changes, key=lambda name: changes[name])
    replicas, of = row.dims.batch_size, best.dims.batch_size
    fewer = f", with {replicas} batches at a time instead of {of}" if replicas < of else ""
    longer = f": {most} ({time_text(changes[most])} a step){fewer}" if changes[most] > 0 else fewer
    return f"{lost:.0%} fewer samples a second{longer}"
