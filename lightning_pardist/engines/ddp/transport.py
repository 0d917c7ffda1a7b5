"""Ways to reduce a bucket of gradients."""

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

#: Parameters whose gradients are summed over other ranks than those of the rest, and over which.
Narrower = Mapping[nn.Parameter, dist.ProcessGroup]


class Transport(Protocol):
    """Makes buckets and synchronises them over a group.

    Attributes:
        group: Who takes part.
        narrower: Parameters that others of the group do not hold (experts on ranks of their own): their gradients are
            summed over fewer ranks, and over those that are not of the group and hold copies.
    """

    group: dist.ProcessGroup
    narrower: Narrower = MappingProxyType({})

    def group_of(self, param: nn.Parameter) -> dist.ProcessGroup:
        """Over which ranks a parameter's gradients are summed. Parameters of one bucket have the same."""
        return self.narrower.get(param, self.group)

    def scale_of(self, bucket: Bucket) -> float:
        """Factor on each rank's gradients of a bucket before they are summed."""
        ...

    def make_bucket(self, params: Sequence[nn.Parameter]) -> Bucket:
        """A bucket for these parameters."""
        ...

    def launch(self, bucket: Bucket, *, index: int, is_last: bool) -> Any:
        """Send a complete bucket. Every rank launches the same buckets in the same order; returns without waiting."""
        ...

    def finish(self, bucket: Bucket, work: Any) -> None:
        """Wait until what :meth:`launch` began is in the bucket."""
        ...

    def finish_all(self, buckets: Sequence[Bucket]) -> None:
        """All buckets of the step are finished. Collective."""
        ...


class AllReduce(Transport):
    """All-reduce mean; one collective a bucket carries gradients and used-parameter flags.

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
    """The mean by one of torch's DDP communication hooks, which divides by itself.

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
        # A hook may only be given the gradients.
        reduce_flags(buckets, group=self.group)


def mean_scales(group: dist.ProcessGroup, narrower: Narrower) -> dict[dist.ProcessGroup, float]:
    """For each group that sums gradients, the factor on those of a rank. Not collective.

    Args:
        group: Ranks over whose samples gradients are means.
        narrower: See :class:`Transport`. Where ranks of a group are not of ``group``, each of those that are has as
            many copies, which see its samples.
    """
    members = set(dist.get_process_group_ranks(group))
    scales = {group: 1.0 / group.size()}
    for other in narrower.values():
        copies = other.size() // len(members.intersection(dist.get_process_group_ranks(other)))
        scales[other] = 1.0 / (group.size() * copies)
    return scales


def reduce_flags(buckets: Sequence[Bucket], *, group: dist.ProcessGroup) -> None:
    """Sum the flags of all buckets in one small reduction. Collective over ``group``."""
    if not buckets:
        return
    flags = torch.cat([bucket.flags.float() for bucket in buckets])
    dist.all_reduce(flags, group=group)
    for bucket, reduced in zip(buckets, flags.split([len(bucket.params) for bucket in buckets]), strict=True):
        bucket.flags.copy_(reduced)
