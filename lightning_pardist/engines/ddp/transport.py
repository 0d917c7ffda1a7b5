"""Transports: how a bucket of gradients is reduced over a process group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from lightning_pardist.engines.ddp.bucket import Bucket
from lightning_pardist.engines.ddp.compression import CommunicationHook, HookBucket

#: Maps parameters whose gradients are summed over a different process group to that group.
Narrower = Mapping[nn.Parameter, dist.ProcessGroup]


class Transport(Protocol):
    """Interface that creates buckets and synchronises them over a process group.

    Attributes:
        group: The participating ranks.
        narrower: Parameters that not all ranks of ``group`` hold (experts of an expert-parallel layer), with the group
            of ranks that hold copies, over which their gradients are summed. It may include ranks outside of ``group``.
    """

    group: dist.ProcessGroup
    narrower: Narrower = MappingProxyType({})

    def group_of(self, param: nn.Parameter) -> dist.ProcessGroup:
        """Return the group over which a parameter's gradients are summed; the same for all parameters of a bucket."""
        return self.narrower.get(param, self.group)

    def scale_of(self, bucket: Bucket) -> float:
        """Return the factor applied to each rank's gradients of a bucket before the sum."""
        ...

    def make_bucket(self, params: Sequence[nn.Parameter]) -> Bucket:
        """Create a bucket for parameters."""
        ...

    def launch(self, bucket: Bucket, *, index: int, is_last: bool) -> Any:
        """Launch the reduction of a complete bucket, asynchronously. All ranks launch the same buckets in one order."""
        ...

    def finish(self, bucket: Bucket, work: Any) -> None:
        """Wait for the reduction started by :meth:`launch`, whose result is then in the bucket."""
        ...

    def finish_all(self, buckets: Sequence[Bucket]) -> None:
        """Complete the step, after all its buckets are finished. Collective."""
        ...


class AllReduce(Transport):
    """Mean by all-reduce; one collective per bucket sends gradients and used-parameter flags.

    Args:
        group: The data axis' process group.
        narrower: See :class:`Transport`.
    """

    def __init__(self, group: dist.ProcessGroup, narrower: Narrower | None = None) -> None:
        self.group = group
        self.narrower = narrower or {}
        self._scales = mean_scales(group, self.narrower)

    @override
    def scale_of(self, bucket: Bucket) -> float:
        return self._scales[self.group_of(bucket.params[0])]

    @override
    def make_bucket(self, params: Sequence[nn.Parameter]) -> Bucket:
        return Bucket(params)

    @override
    def launch(self, bucket: Bucket, *, index: int, is_last: bool) -> Any:
        return dist.all_reduce(bucket.buffer, group=self.group_of(bucket.params[0]), async_op=True)

    @override
    def finish(self, bucket: Bucket, work: Any) -> None:
        work.wait()

    @override
    def finish_all(self, buckets: Sequence[Bucket]) -> None:
        pass


class HookedAllReduce(Transport):
    """Mean by one of torch's DDP communication hooks, which divides by the number of ranks itself.

    Args:
        group: The data axis' process group.
        hook: ``hook(state, bucket) -> Future`` of the reduced flat gradients.
        state: The hook's first argument.
    """

    def __init__(self, group: dist.ProcessGroup, hook: CommunicationHook, state: Any) -> None:
        self.group = group
        self.hook = hook
        self.state = state

    @override
    def scale_of(self, bucket: Bucket) -> float:
        return 1.0

    @override
    def make_bucket(self, params: Sequence[nn.Parameter]) -> Bucket:
        return Bucket(params)

    @override
    def launch(self, bucket: Bucket, *, index: int, is_last: bool) -> Any:
        return self.hook(self.state, HookBucket(bucket, index=index, is_last=is_last))

    @override
    def finish(self, bucket: Bucket, work: Any) -> None:
        result = work.wait()
        if result.data_ptr() != bucket.gradients.data_ptr():
            bucket.gradients.copy_(result)

    @override
    def finish_all(self, buckets: Sequence[Bucket]) -> None:
        # The hook reduces the gradients only, so the flags are reduced separately.
        reduce_flags(buckets, group=self.group)


def mean_scales(group: dist.ProcessGroup, narrower: Narrower) -> dict[dist.ProcessGroup, float]:
    """Return, for each group that sums gradients, the factor on each rank's gradients. Not collective.

    Args:
        group: Ranks over whose samples gradients are averaged.
        narrower: See :class:`Transport`. If such a group contains ranks outside of ``group``, these process the samples
            of its ranks inside as well, and the factor is divided by the number of copies per inside rank.
    """
    members = set(dist.get_process_group_ranks(group))
    scales = {group: 1.0 / group.size()}
    for other in narrower.values():
        copies = other.size() // len(members.intersection(dist.get_process_group_ranks(other)))
        scales[other] = 1.0 / (group.size() * copies)
    return scales


def reduce_flags(buckets: Sequence[Bucket], *, group: dist.ProcessGroup) -> None:
    """Sum the flags of all buckets in one small all-reduce. Collective over ``group``."""
    if not buckets:
        return
    flags = torch.cat([bucket.flags.float() for bucket in buckets])
    dist.all_reduce(flags, group=group)
    for bucket, reduced in zip(buckets, flags.split([len(bucket.params) for bucket in buckets]), strict=True):
        bucket.flags.copy_(reduced)
