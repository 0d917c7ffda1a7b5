"""All-gather and reduce-scatter of units: asynchronous on gloo, at half the traffic of its reduce-scatter."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from lightning_pardist.collectives import all_gather_flat, reduce_scatter_flat
from lightning_pardist.engines.common.block_codes import Compression
from lightning_pardist.engines.common.coded_exchange import (
    CodedReduction,
    Remainders,
    gather_coded,
    has_codes,
    scatter_coded,
)
from lightning_pardist.engines.common.slice_exchange import Reduction, exchanges_directly, gather_slices, scatter_slices

#: Reductions in flight on gloo; each holds a unit's gradients and the peers' parts of them.
MAX_PENDING_REDUCTIONS = 3


@dataclass
class UnitCodes:
    """How units travel, and what that leaves behind.

    Attributes:
        gather: Codes that parameters travel as; numbers as they are if None.
        reduce: Codes that gradients travel as.
        remainders: What codes leave behind of gradients is added to the next ones; lost if None.
        exact: Whether parameters travel as they are for now: nobody trains with them.
    """

    gather: Compression | None = None
    reduce: Compression | None = None
    remainders: Remainders | None = field(default_factory=Remainders)
    exact: bool = False


@dataclass
class PendingReduction:
    """A reduction of one unit that is yet to be summed into ``output``."""

    exchange: Reduction | CodedReduction
    output: torch.Tensor
    mean_over: int

    def finish(self) -> None:
        """Wait for the pieces and sum them, in rank order, so that every run adds alike."""
        self.exchange.finish(self.output)
        if self.mean_over > 1:
            self.output.mul_(1.0 / self.mean_over)


class _Allocate:
    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer for one collective."""
        return torch.empty(*size, dtype=dtype, device=device)


class UnitAllGather(_Allocate):
    """All-gather of one unit; on gloo it returns at once and ``fully_shard`` waits where it reads the result.

    Args:
        announce: Called right before the collective.
        conclude: Called right after it was started.
        codes: How units travel.
    """

    def __init__(self, announce: Callable[[], None], conclude: Callable[[], None], codes: UnitCodes) -> None:
        self.before = announce
        self.after = conclude
        self.codes = codes

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather ``input_tensor`` of every rank into ``output_tensor``. Collective over ``group``."""
        self.before()
        work: dist.Work | None
        kind = None if self.codes.exact or group.size() == 1 else self.codes.gather
        # Parameters of several dtypes travel together as bytes.
        if kind is not None and has_codes(input_tensor):
            work = gather_coded(output_tensor, input_tensor, group=group, kind=kind)
            if output_tensor.device.type != "cpu":
                # On the stream that fully_shard waits for.
                work.wait()
                work = None
        elif exchanges_directly(output_tensor, group):
            own = output_tensor.chunk(group.size())[group.rank()]
            if own.data_ptr() != input_tensor.data_ptr():
                own.copy_(input_tensor)
            work = gather_slices(output_tensor, group=group)
        else:
            on_host = output_tensor.device.type == "cpu"
            work = all_gather_flat(output_tensor, input_tensor, group=group, async_op=async_op or on_host)
        self.after()
        return work


class UnitReduceScatter(_Allocate):
    """Reduce-scatter of one unit's gradients; on gloo, slices to their owners that are summed when they are needed.

    Args:
        announce: Called right before the collective.
        may_defer: Whether nobody reads the output before ``pending`` is drained.
        pending: Reductions in flight, drained by the engine at the end of backward.
        codes: How units travel.
        members: Which parameters' gradients are reduced, so that what is left is added to those of the same ones.
    """

    def __init__(
        self,
        announce: Callable[[], None],
        may_defer: Callable[[], bool],
        pending: list[PendingReduction],
        codes: UnitCodes,
        members: Callable[[], Hashable],
    ) -> None:
        self.before = announce
        self.may_defer = may_defer
        self.pending = pending
        self.codes = codes
        self.members = members

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce ``input_tensor`` and keep this rank's part in ``output_tensor``. Collective over ``group``."""
        self.before()
        return self._start(output_tensor, input_tensor, group, op, async_op)

    def _start(
        self, output: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup, op: Any, async_op: bool
    ) -> dist.Work | None:
        mean = bool(op == dist.ReduceOp.AVG)
        is_sum = mean or bool(op == dist.ReduceOp.SUM)
        kind = self.codes.reduce if is_sum and group.size() > 1 and has_codes(whole) else None
        if kind is None and not (is_sum and exchanges_directly(whole, group)):
            work: dist.Work | None = reduce_scatter_flat(output, whole, group=group, op=op, async_op=async_op)
            return work
        on_host = whole.device.type == "cpu"
        deferred = on_host and mean and self.may_defer()
        # Reductions of one parameter add up in order: one that is read now comes after all before it.
        while self.pending and (not deferred or len(self.pending) >= MAX_PENDING_REDUCTIONS):
            self.pending.pop(0).finish()
        exchange: Reduction | CodedReduction
        if kind is None:
            exchange = scatter_slices(whole, group=group)
        else:
            exchange = scatter_coded(
                whole, group=group, kind=kind, remainders=self.codes.remainders, key=(id(self), self.members())
            )
        reduction = PendingReduction(exchange, output, group.size() if mean else 1)
        if deferred:
            self.pending.append(reduction)
        else:
            reduction.finish()
        return None
