"""How long a traced step takes on a device, and what it waits for.

Each operator takes the longer of its arithmetic and its memory traffic (a roofline), each message the latency and
bandwidth of the link that its slowest pair of ranks has. Then the order in which the rank issued them is played: the
host issues one after the other, the device computes in order, messages of one group go one behind the other beside
that, and whatever touches memory that a message is still on waits for it. So buckets that leave during backward and
units gathered ahead overlap as far as the order lets them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_pardist.planner.ledger import Event, Message, Operator
from lightning_pardist.planner.profiles import DeviceProfile, Link


@dataclass(frozen=True)
class StepTime:
    """Seconds of one rank's step.

    Attributes:
        compute: The device computes.
        communication: It waits for messages, after all overlap.
        idle: It waits for the host to issue operators.
        hidden: Messages that were on their way while it computed.
        step: From the start to the end: the sum of the first three.
    """

    compute: float
    communication: float
    idle: float
    hidden: float

    @property
    def step(self) -> float:
        """From the start to the end."""
        return self.compute + self.communication + self.idle


def time_step(events: Sequence[Event], profile: DeviceProfile, *, ranks_per_node: int) -> StepTime:
    """Play the order of a step.

    Args:
        events: Of one rank's step.
        profile: The device.
        ranks_per_node: Ranks ``0 .. ranks_per_node - 1`` are on the first node, and so on.
    """
    host = device = compute = waited = on_wire = 0.0
    groups: dict[tuple[int, ...], float] = {}
    done: dict[int, float] = {}
    for event in events:
        if isinstance(event, Operator):
            host += profile.host_s_per_operator
            took = operator_seconds(event, profile)
            ready = max((done.get(key, 0.0) for key in (*event.reads, *event.writes)), default=0.0)
            start = max(host, device)
            waited += max(0.0, ready - start)
            device = max(start, ready) + took
            compute += took
            for key in event.writes:
                done[key] = device
            if not profile.asynchronous:
                host = device
        elif isinstance(event, Message):
            host += profile.host_s_per_operator
            took = message_seconds(event, profile, ranks_per_node=ranks_per_node)
            ready = max((done.get(key, 0.0) for key in event.touches), default=0.0)
            end = max(host, ready, groups.get(event.ranks, 0.0)) + took
            groups[event.ranks] = end
            on_wire += took
            for key in event.touches:
                done[key] = end
    end = max([device, host, *groups.values()])
    waited += max(0.0, end - max(device, host))
    return StepTime(compute, waited, max(0.0, end - compute - waited), max(0.0, on_wire - waited))


def operator_seconds(operator: Operator, profile: DeviceProfile) -> float:
    """Seconds of one operator on the device."""
    moving = operator.moved / (profile.bytes_per_s * profile.memory_efficiency)
    if not operator.flops:
        return moving
    dtype = str(operator.dtype).removeprefix("torch.")
    if dtype == "float32" and torch.get_float32_matmul_precision() != "highest" and "tf32" in profile.flops:
        dtype = "tf32"
    return max(moving, operator.flops / profile.flops_of(dtype))


def link_of(ranks: Sequence[int], profile: DeviceProfile, *, ranks_per_node: int) -> Link:
    """The slower of the links that a group needs."""
    return profile.inside if len({rank // ranks_per_node for rank in ranks}) == 1 else profile.between


def message_seconds(message: Message, profile: DeviceProfile, *, ranks_per_node: int) -> float:
    """Seconds of one message from its start to its end: a ring's bandwidth, a tree's latency.

    An all-reduce of s bytes over n ranks sends 2 s (n - 1) / n, an all-gather, reduce-scatter or all-to-all half of
    that, each after log2 n (an all-reduce twice as many) hops of latency.
    """
    link = link_of(message.ranks, profile, ranks_per_node=ranks_per_node)
    size = len(message.ranks)
    if size == 1:
        return 0.0
    hops = 1 if message.peer >= 0 else math.ceil(math.log2(size))
    if "reduce" in message.name and not _halves(message):
        hops *= 2
    return hops * link.latency_s + sent_bytes(message) / (link.bytes_per_s * profile.link_efficiency)


def sent_bytes(message: Message) -> float:
    """Bytes that this rank sends."""
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
