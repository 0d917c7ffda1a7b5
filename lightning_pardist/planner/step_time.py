"""Simulation of traced steps on a device: duration, and waiting times by cause.

Each operator takes the longer of its arithmetic and its memory traffic (a roofline), each message the latency and
bandwidth of its slowest pair of ranks' link. The events are then simulated in the order in which a rank issued them:
the host issues one after the other, the device computes in order, messages of one group run one after the other
concurrently with compute, and an operator on memory of a pending message waits for it. Buckets that are sent during
backward and prefetched units therefore overlap as far as the order allows.

Stages of a pipeline are simulated together, each in the order in which it was traced, as in Varuna's simulator
(arXiv 2111.04007): a message arrives after the sending stage has computed and sent it. This accounts for uneven stages
and for any schedule.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from lightning_pardist.planner.errors import PlanError
from lightning_pardist.planner.ledger import Block, Event, FileTransfer, HostStep, HostWork, Message, Operator
from lightning_pardist.planner.operator_rates import rate_near, rate_of
from lightning_pardist.planner.profiles import DeviceProfile, Link


class Span(NamedTuple):
    """An interval of a step's timeline.

    Attributes:
        kind: ``"compute"``, ``"send"`` or ``"wait"``.
        begin: Start, in seconds from the start of the step.
        end: End, in seconds from the start of the step.
    """

    kind: str
    begin: float
    end: float


@dataclass(frozen=True)
class StepTime:
    """Durations of one rank's step, in seconds.

    Attributes:
        compute: Time in which the device computes.
        communication: Exposed communication: time in which the device waits for collectives.
        idle: Time in which the device waits for the host to issue operators, or for other stages.
        hidden: Communication that overlaps with compute.
        stages: The part of ``idle`` that is spent waiting for other stages of a pipeline.
        spans: Timeline of compute, communication and waits; adjacent spans of one kind are merged.
    """

    compute: float
    communication: float
    idle: float
    hidden: float
    stages: float = 0.0
    spans: tuple[Span, ...] = ()

    @property
    def step(self) -> float:
        """Duration of the whole step."""
        return self.compute + self.communication + self.idle


def time_step(events: Sequence[Event], profile: DeviceProfile, *, ranks_per_node: int) -> StepTime:
    """Simulate one rank's step.

    Args:
        events: Events of the step, in order.
        profile: Profile of the device.
        ranks_per_node: Ranks per node: ranks ``0 .. ranks_per_node - 1`` are on the first node, and so on.
    """
    return time_ranks({0: events}, profile, ranks_per_node=ranks_per_node)[0]


def time_ranks(
    steps: Mapping[int, Sequence[Event]], profile: DeviceProfile, *, ranks_per_node: int, host_factor: float = 1.0
) -> dict[int, StepTime]:
    """Simulate the steps of ranks that exchange messages. All of them end at the same time as the last.

    Args:
        steps: Events by global rank.
        profile: Profile of the device.
        ranks_per_node: See :func:`time_step`.
        host_factor: Time that the host takes for an operator of forward and backward, relative to an ordinary step.

    Raises:
        PlanError: If ranks wait for messages that none of them sends.
    """
    wires: dict[tuple[int, int], deque[float]] = {}
    players = {
        rank: _Player(rank, events, profile, ranks_per_node, wires, host_factor) for rank, events in steps.items()
    }
    waiting = set(players)
    for rank in players:
        for other in players:
            wires[rank, other] = deque()
    moved = True
    while waiting and moved:
        moved = False
        for rank in sorted(waiting):
            moved = players[rank].advance() or moved
            if players[rank].is_done:
                waiting.discard(rank)
    if waiting:
        stuck = ", ".join(f"rank {rank} for {players[rank].waits_for}" for rank in sorted(waiting))
        raise PlanError(f"ranks wait for messages that are never sent: {stuck}")
    end = max(player.end for player in players.values())
    return {rank: player.result(end) for rank, player in players.items()}


@dataclass(slots=True)
class _MessageInFlight:
    """A message in flight that occupies the processor from its begin to its end."""

    begin: float
    end: float
    stream: object
    touches: tuple[int, ...]


class _Cache:
    """Least recently used cache of a processor, by storages.

    A storage is in the cache if less than the cache's size was read and written since it was last used. New memory is
    that of the storage of equal size that was freed last, as allocators reuse it.
    """

    def __init__(self, size: float) -> None:
        self._size = size
        self._moved = 0.0
        self._used: dict[int, float] = {}
        self._sizes: dict[int, int] = {}
        self._freed: dict[int, list[float]] = {}

    def resize(self, block: Block, change: int) -> None:
        """Account for a change of a storage's size."""
        key, before = block.key, self._sizes.get(block.key, 0)
        self._sizes[key] = now = before + change
        if not before and now and (freed := self._freed.get(now)):
            self._used[key] = freed.pop()
        elif not now:
            del self._sizes[key]
            if (used := self._used.pop(key, None)) is not None:
                self._freed.setdefault(before, []).append(used)

    def missed(self, operator: Operator) -> float:
        """Account for an operator's reads and writes, and return the share of its bytes that are not in the cache."""
        keys = {*operator.reads, *operator.writes}
        cold = sum(self._sizes.get(key, 0) for key in keys if self._moved - self._used.get(key, -math.inf) > self._size)
        total = sum(self._sizes.get(key, 0) for key in keys)
        self._moved += operator.moved
        self._used.update(dict.fromkeys(keys, self._moved))
        return cold / total if total else 0.0


class _Player:
    """Simulation of one rank, see :func:`time_ranks`."""

    def __init__(
        self,
        rank: int,
        events: Sequence[Event],
        profile: DeviceProfile,
        ranks_per_node: int,
        wires: dict[tuple[int, int], deque[float]],
        host_factor: float,
    ) -> None:
        self._rank, self._events, self._profile, self._wires = rank, events, profile, wires
        self._ranks_per_node, self._host_factor = ranks_per_node, host_factor
        self._next = 0
        self._host = self._device = self._compute = self._waited = self._for_stages = self._on_wire = 0.0
        self._groups: dict[object, float] = {}
        self._done: dict[int, float] = {}
        #: Fraction of a message's time that it takes from the computing processor, see :meth:`_host_time_of_messages`.
        self._share = 0.0 if profile.asynchronous else profile.link_host_share
        self._on_way: list[_MessageInFlight] = []
        #: Storages last written by a message of another stage.
        self._received: set[int] = set()
        #: Bytes that operators read and wrote: all, all before the last work of the host, and the last one.
        self._moved = self._moved_before_work = self._last_moved = 0
        self._cache = _Cache(profile.cache_bytes) if profile.cache_bytes else None
        self._spans: list[Span] = []

    @property
    def is_done(self) -> bool:
        return self._next == len(self._events)

    @property
    def end(self) -> float:
        return max([self._device, self._host, *self._groups.values()])

    @property
    def waits_for(self) -> str:
        """Return a description of the event at which the simulation is blocked."""
        event = self._events[self._next]
        number = f"event {self._next} of {len(self._events)}"
        return f"{event.name} ({number})" if isinstance(event, Message) else number

    def advance(self) -> bool:
        """Simulate events until one needs a message that is not sent yet; return whether there was progress."""
        before = self._next
        while self._next < len(self._events):
            event = self._events[self._next]
            if isinstance(event, Operator):
                self._operate(event)
            elif isinstance(event, HostStep):
                profile = self._profile
                copies = event.copied / (profile.host_link_bytes_per_s * profile.link_efficiency)
                issues = event.operators * profile.host_s_per_update
                self._wait_for_host(copies + issues + event.moved / profile.host_bytes_per_s)
            elif isinstance(event, HostWork):
                self._host += event.operators * self._host_seconds(self._moved - self._moved_before_work)
                self._moved_before_work = self._moved
            elif isinstance(event, FileTransfer):
                self._wait_for_host(event.moved / self._profile.disk_bytes_per_s)
            elif isinstance(event, Message):
                if not self._send(event):
                    break
            elif self._cache is not None:
                self._cache.resize(*event)
            self._next += 1
        return self._next > before

    def result(self, end: float) -> StepTime:
        own = self.end
        waited = self._waited + max(0.0, own - max(self._device, self._host))
        stages = self._for_stages + end - own
        idle = max(0.0, end - self._compute - waited)
        return StepTime(self._compute, waited, idle, max(0.0, self._on_wire - waited), stages, tuple(self._spans))

    def _operate(self, event: Operator) -> None:
        profile = self._profile
        self._host += profile.host_s_per_update if event.is_quick else self._host_factor * self._host_seconds()
        self._moved, self._last_moved = self._moved + event.moved, event.moved
        took = operator_seconds(event, profile)
        if self._cache is not None:
            took = _with_misses(took, event, self._cache.missed(event), profile)
        ready, last = 0.0, -1
        for key in (*event.reads, *event.writes):
            if (at := self._done.get(key, 0.0)) > ready:
                ready, last = at, key
        start = max(self._host, self._device)
        if ready > start:
            if last in self._received:
                self._for_stages += ready - start
            else:
                self._waited += ready - start
            self._note("wait", start, ready)
        start = max(start, ready)
        stolen = self._host_time_of_messages(start, took) if self._on_way else 0.0
        self._device = start + took + stolen
        self._compute += took
        self._waited += stolen
        self._note("compute", start, self._device)
        for key in event.writes:
            self._done[key] = self._device
            self._received.discard(key)
        if not profile.asynchronous:
            self._host = self._device

    def _host_seconds(self, moved: int | None = None) -> float:
        """Return the seconds in which the host issues an operator; longer if its code and data have been evicted.

        Args:
            moved: Bytes that operators have read and written since the host last ran this code; by default those of the
                last operator.
        """
        profile = self._profile
        moved = self._last_moved if moved is None else moved
        cold = min(1.0, moved / profile.host_cache_bytes) if profile.host_cache_bytes else 0.0
        return profile.host_s_per_operator * (1 + cold * (profile.host_cold_factor - 1))

    def _wait_for_host(self, took: float) -> None:
        """Simulate a host step, between all other work; overlap of copies is not modelled."""
        start = self.end
        self._waited += start - max(self._device, self._host)
        self._host = self._device = start + took
        self._note("wait", start, self._device)

    def _host_time_of_messages(self, start: float, took: float) -> float:
        """Return the seconds that messages take from an operator if both use the same processor.

        The processor is shared evenly: while both run, each gets half of it, and a message is delayed accordingly.
        """
        self._on_way = [each for each in self._on_way if each.end > start]
        needs = [self._share * (each.end - max(start, each.begin)) for each in self._on_way]
        needs = [need if each.begin < start + took else 0.0 for need, each in zip(needs, self._on_way, strict=True)]
        stolen = left = min(took, sum(needs))
        for need, each in zip(needs, self._on_way, strict=True):
            got = min(need, left)
            left -= got
            if got < need:
                each.end = start + took + stolen + (need - got) / self._share
                self._arrives(each)
        return stolen

    def _arrives(self, message: _MessageInFlight) -> None:
        for key in message.touches:
            self._done[key] = max(self._done.get(key, 0.0), message.end)
        self._groups[message.stream] = max(self._groups.get(message.stream, 0.0), message.end)

    def _send(self, event: Message) -> bool:
        """Simulate a message; return False if it waits for its sender."""
        single = event.peer >= 0
        other = event.ranks[event.peer] if single else -1
        receives = single and event.name != "send"
        wire = self._wires.get((other, self._rank)) if receives else None
        if wire is not None and not wire:
            return False
        self._host += self._host_seconds()
        took = message_seconds(event, self._profile, ranks_per_node=self._ranks_per_node, rank=self._rank)
        ready = max((self._done.get(key, 0.0) for key in event.touches), default=0.0)
        stream: object = (other, event.name) if single else event.ranks
        start = max(self._host, ready, self._groups.get(stream, 0.0))
        if wire is not None:
            start = max(start, wire.popleft())
        end = start + took
        if self._share and took:
            touches = () if single and not receives else event.touches
            self._on_way.append(_MessageInFlight(start, end, stream, touches))
        if single and not receives:
            if (out := self._wires.get((self._rank, other))) is not None:
                out.append(start)
        else:
            for key in event.touches:
                self._done[key] = end
                (self._received.add if receives else self._received.discard)(key)
        if not receives:
            self._groups[stream] = end
            self._on_wire += took
            self._note("send", start, end)
        return True

    def _note(self, kind: str, begin: float, end: float) -> None:
        spans = self._spans
        if spans and spans[-1].kind == kind and begin - spans[-1].end <= 0.02 * (end - spans[-1].begin):
            spans[-1] = spans[-1]._replace(end=end)
        elif end > begin:
            spans.append(Span(kind, begin, end))


def without_spans(time: StepTime) -> StepTime:
    """Return the step time without its timeline."""
    return replace(time, spans=())


def mixed(usual: StepTime, other: StepTime, share: float) -> StepTime:
    """Return the mean of two kinds of steps, of which ``other`` has a given share, with ``usual``'s timeline."""
    parts = ("compute", "communication", "idle", "hidden", "stages")
    means = {name: (1 - share) * getattr(usual, name) + share * getattr(other, name) for name in parts}
    return replace(usual, **means)


def operator_seconds(operator: Operator, profile: DeviceProfile) -> float:
    """Return the seconds of one operator on the device."""
    dtype = str(operator.dtype).removeprefix("torch.")
    if dtype == "float32" and torch.get_float32_matmul_precision() != "highest" and "tf32" in profile.flops:
        dtype = "tf32"
    if (rate := rate_of(operator, profile.rates)) is not None:
        rate *= profile.operator_efficiency
        if not operator.flops:
            return profile.operator_s + operator.moved / rate
        # Rates by size were measured in fp32.
        return profile.operator_s + operator.flops / rate * profile.flops_of("float32") / profile.flops_of(dtype)
    moving = profile.operator_s + operator.moved / (profile.bytes_per_s * profile.memory_efficiency)
    if not operator.flops:
        return moving
    return max(moving, profile.operator_s + operator.flops / profile.flops_of(dtype))


def _with_misses(took: float, operator: Operator, missed: float, profile: DeviceProfile) -> float:
    """Return the seconds of an operator of which a share of the bytes comes from memory instead of the cache."""
    memory = missed * operator.moved / (profile.bytes_per_s * profile.memory_efficiency)
    if operator.flops:
        return took + memory
    return max(took, (1 - missed) * took + memory)


def link_of(ranks: Sequence[int], profile: DeviceProfile, *, ranks_per_node: int) -> Link:
    """Return the slowest link that a group uses."""
    return profile.inside if len({rank // ranks_per_node for rank in ranks}) == 1 else profile.between


def message_seconds(message: Message, profile: DeviceProfile, *, ranks_per_node: int, rank: int | None = None) -> float:
    """Return the seconds of one message, with a ring's bandwidth and a tree's latency.

    An all-reduce of s bytes over n ranks sends 2 s (n - 1) / n, an all-gather, reduce-scatter or all-to-all half of
    that, each after log2 n (an all-reduce twice as many) hops of latency.
    """
    single = message.peer >= 0
    ends = message.ranks if not single or rank is None else (rank, message.ranks[message.peer])
    link = link_of(ends, profile, ranks_per_node=ranks_per_node)
    size = len(message.ranks)
    if size == 1:
        return 0.0
    hops = 1 if single else math.ceil(math.log2(size))
    if "reduce" in message.name and not _halves(message):
        hops *= 2
    sent = float(message.size) if single else sent_bytes(message)
    rate = link.bytes_per_s * profile.link_efficiency
    kind = "send" if single else "gather" if _halves(message) else "reduce" if "reduce" in message.name else "send"
    if points := profile.message_rates.get(kind):
        rate = rate_near(points, sent, sent) * link.bytes_per_s / profile.inside.bytes_per_s
    return hops * link.latency_s + sent / rate


def sent_bytes(message: Message) -> float:
    """Return the bytes that this rank sends."""
    size = len(message.ranks)
    if message.peer >= 0:
        return float(message.size) if message.name == "send" else 0.0
    if _halves(message):
        return message.size * (size - 1) / size
    if "reduce" in message.name:
        return 2 * message.size * (size - 1) / size
    return float(message.size)


def _halves(message: Message) -> bool:
    return any(word in message.name for word in ("gather", "scatter", "alltoall", "all_to_all"))
