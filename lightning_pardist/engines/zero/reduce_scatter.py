"""Reduce-scatter of flat buckets, by the method that is fastest on the backend."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lightning_pardist.collectives import reduce_scatter_flat
from lightning_pardist.engines.common.block_quantization import Compression
from lightning_pardist.engines.common.quantized_exchange import (
    ErrorFeedback,
    QuantizedReduction,
    is_quantizable,
    reduce_scatter_quantized,
)
from lightning_pardist.engines.common.slice_exchange import Reduction, exchanges_directly, scatter_slices
from lightning_pardist.engines.ddp.bucket import Bucket
from lightning_pardist.engines.ddp.transport import Narrower, Transport, mean_scales, reduce_flags
from lightning_pardist.engines.zero.host_slice import HostSlice
from lightning_pardist.engines.zero.sharded_bucket import ShardedBucket

#: Maximum number of buckets in flight: their receive buffers are memory beyond what ZeRO accounts for.
_IN_FLIGHT = 2


class ReduceScatter(Transport):
    """Reduces the mean of each slice to the rank that owns it. Sends ``Psi (N-1)/N`` per rank.

    gloo's own reduce-scatter sends as much as an all-reduce. On gloo, every rank instead sends its peers their slices
    and sums what it receives, see :func:`~lightning_pardist.engines.common.slice_exchange.scatter_slices`.

    Args:
        group: The data axis' process group.
        keep_full: Whether full gradients are kept between steps (ZeRO-1).
        make_host: See :class:`~lightning_pardist.engines.zero.sharded_bucket.ShardedBucket`.
        gather: See ``compression`` there.
        reduce: Codes for gradients; uncompressed if None.
        error_feedback: Compression errors, which are added to the next gradients.
        narrower: See :class:`~lightning_pardist.engines.ddp.transport.Transport`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        keep_full: bool,
        make_host: Callable[[Tensor], HostSlice] | None = None,
        gather: Compression | None = None,
        reduce: Compression | None = None,
        error_feedback: ErrorFeedback | None = None,
        narrower: Narrower | None = None,
    ) -> None:
        self.group = group
        self.gather, self.reduce, self.error_feedback = gather, reduce, error_feedback
        self.narrower = narrower or {}
        self.make_host = make_host
        self._scales = mean_scales(group, self.narrower)
        self.keep_full = keep_full
        self._numbers = itertools.count()
        self._in_flight: deque[tuple[ShardedBucket, Reduction | QuantizedReduction | tuple[Any, Tensor]]] = deque()

    @override
    def scale_of(self, bucket: Bucket) -> float:
        return self._scales[self.group_of(bucket.params[0])]

    @override
    def make_bucket(self, params: Sequence[nn.Parameter]) -> Bucket:
        return ShardedBucket(
            params,
            group=self.group_of(params[0]),
            keep_full=self.keep_full,
            make_host=self.make_host,
            compression=self.gather,
            number=next(self._numbers),
        )

    @override
    def launch(self, bucket: Bucket, *, index: int, is_last: bool) -> Any:
        if not isinstance(bucket, ShardedBucket):
            raise TypeError("ReduceScatter launches the buckets that it makes")
        while len(self._in_flight) >= _IN_FLIGHT:
            self._finish_oldest()
        full = bucket.full_gradients
        if self.reduce is not None and is_quantizable(full):
            reduction = reduce_scatter_quantized(
                full, group=bucket.group, kind=self.reduce, error_feedback=self.error_feedback, key=bucket.number
            )
            self._in_flight.append((bucket, reduction))
            return None
        if exchanges_directly(full, bucket.group):
            self._in_flight.append((bucket, scatter_slices(full, group=bucket.group)))
            return None
        received = full.new_empty(bucket.shard_numel)
        work = reduce_scatter_flat(received, full, group=bucket.group, async_op=True)
        self._in_flight.append((bucket, (work, received)))
        return None

    @override
    def finish(self, bucket: Bucket, work: Any) -> None:
        while any(flying is bucket for flying, _ in self._in_flight):
            self._finish_oldest()

    @override
    def finish_all(self, buckets: Sequence[Bucket]) -> None:
        for group in dict.fromkeys((self.group, *self.narrower.values())):
            reduce_flags([b for b in buckets if self.group_of(b.params[0]) is group], group=group)

    def _finish_oldest(self) -> None:
        bucket, flying = self._in_flight.popleft()
        if isinstance(flying, (Reduction, QuantizedReduction)):
            bucket.take(flying.finish(bucket.sum_into))
            return
        work, received = flying
        work.wait()
        bucket.take(received)
