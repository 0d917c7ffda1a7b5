"""All-gather and reduce-scatter of units: asynchronous on gloo, at half the traffic of its reduce-scatter."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from lightning_pardist.collectives import all_gather_flat, reduce_scatter_flat
from lightning_pardist.engines.common.block_quantization import Compression
from lightning_pardist.engines.common.quantized_exchange import (
    ErrorFeedback,
    QuantizedReduction,
    all_gather_quantized,
    is_quantizable,
    reduce_scatter_quantized,
)
from lightning_pardist.engines.common.slice_exchange import Reduction, exchanges_directly, gather_slices, scatter_slices

#: Maximum reductions in flight on gloo; each holds a unit's gradients and the peers' slices of them.
MAX_PENDING_REDUCTIONS = 3


@dataclass
class UnitCompression:
    """Compression of units' collectives, with its error feedback.

    Attributes:
        gather: Codes for parameters in all-gathers; uncompressed if None.
        reduce: Codes for gradients in reductions; uncompressed if None.
        error_feedback: Compression errors of gradients, which are added to the next ones; discarded if None.
        exact: Whether parameters are gathered uncompressed for now, outside of training.
    """

    gather: Compression | None = None
    reduce: Compression | None = None
    error_feedback: ErrorFeedback | None = field(default_factory=ErrorFeedback)
    exact: bool = False


@dataclass
class PendingReduction:
    """Reduction of one unit that is still to be summed into ``output``."""

    exchange: Reduction | QuantizedReduction
    output: torch.Tensor
    mean_over: int

    def finish(self) -> None:
        """Wait for the slices and sum them in rank order, so that every run gives the same result."""
        self.exchange.finish(self.output)
        if self.mean_over > 1:
            self.output.mul_(1.0 / self.mean_over)


class _Allocate:
    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate a buffer for one collective."""
        return torch.empty(*size, dtype=dtype, device=device)


class UnitAllGather(_Allocate):
    """All-gather of one unit; on gloo it returns at once and ``fully_shard`` waits where it reads the result.

    Args:
        announce: Called right before the collective starts.
        conclude: Called right after it has started.
        compression: Compression of the collective.
    """

    def __init__(
        self, announce: Callable[[], None], conclude: Callable[[], None], compression: UnitCompression
    ) -> None:
        self.before = announce
        self.after = conclude
        self.compression = compression

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather every rank's ``input_tensor`` into ``output_tensor``. Collective over ``group``."""
        self.before()
        work: dist.Work | None
        kind = None if self.compression.exact or group.size() == 1 else self.compression.gather
        # Parameters of several dtypes are packed into one buffer of bytes, which has no codes.
        if kind is not None and is_quantizable(input_tensor):
            work = all_gather_quantized(output_tensor, input_tensor, group=group, kind=kind)
            if output_tensor.device.type != "cpu":
                # Wait on the stream that fully_shard synchronises with.
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
    """Reduce-scatter of one unit's gradients; on gloo, slices are sent to their owners and summed when needed.

    Args:
        announce: Called right before the collective starts.
        may_defer: Returns whether the output is not read before ``pending`` is drained.
        pending: Reductions in flight, drained by the engine at the end of backward.
        compression: Compression of the collective.
        members: Identifies the reduced parameters, so that compression errors are added to the same ones' gradients.
    """

    def __init__(
        self,
        announce: Callable[[], None],
        may_defer: Callable[[], bool],
        pending: list[PendingReduction],
        compression: UnitCompression,
        members: Callable[[], Hashable],
    ) -> None:
        self.before = announce
        self.may_defer = may_defer
        self.pending = pending
        self.compression = compression
        self.members = members

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce ``input_tensor`` and write this rank's slice to ``output_tensor``. Collective over ``group``."""
        self.before()
        return self._start(output_tensor, input_tensor, group, op, async_op)

    def _start(
        self, output: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup, op: Any, async_op: bool
    ) -> dist.Work | None:
        mean = bool(op == dist.ReduceOp.AVG)
        is_sum = mean or bool(op == dist.ReduceOp.SUM)
        kind = self.compression.reduce if is_sum and group.size() > 1 and is_quantizable(whole) else None
        if kind is None and not (is_sum and exchanges_directly(whole, group)):
            work: dist.Work | None = reduce_scatter_flat(output, whole, group=group, op=op, async_op=async_op)
            return work
        on_host = whole.device.type == "cpu"
        deferred = on_host and mean and self.may_defer()
        # Reductions of one parameter accumulate in order: one that is read now comes after all earlier ones.
        while self.pending and (not deferred or len(self.pending) >= MAX_PENDING_REDUCTIONS):
            self.pending.pop(0).finish()
        exchange: Reduction | QuantizedReduction
        if kind is None:
            exchange = scatter_slices(whole, group=group)
        else:
            exchange = reduce_scatter_quantized(
                whole,
                group=group,
                kind=kind,
                error_feedback=self.compression.error_feedback,
                key=(id(self), self.members()),
            )
        reduction = PendingReduction(exchange, output, group.size() if mean else 1)
        if deferred:
            self.pending.append(reduction)
        else:
            reduction.finish()
        return None
