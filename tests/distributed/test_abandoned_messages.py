"""Messages that a failed step leaves behind do not block the process group."""

import pytest
import torch
import torch.distributed as dist

from lightning_pardist.collectives import irecv, isend, world_group
from lightning_pardist.engines.common.slice_exchange import gather_slices, scatter_slices
from tests.helpers.ranks import run_ranks


def _begin(kind):
    if kind == "gather":
        return gather_slices(torch.ones(8), group=world_group())
    if kind == "scatter":
        return scatter_slices(torch.ones(8), group=world_group())
    if dist.get_rank() == 0:
        return irecv(torch.zeros(8), 1, group=world_group())
    return isend(torch.ones(8), 0, group=world_group())


def _abandon(kind):
    group = world_group()
    if dist.get_rank() == 0:
        _begin(kind)  # Dropped, as by an error, before the other rank sends.
        group.barrier().wait()
    else:
        group.barrier().wait()
        kept = _begin(kind)  # noqa: F841  (the other side of the message)
    total = torch.ones(1)
    dist.all_reduce(total)
    return float(total)


@pytest.mark.parametrize("kind", ["receive", "gather", "scatter"])
def test_a_message_that_is_dropped_does_not_block_what_follows(kind):
    assert run_ranks(2, _abandon, kind, timeout_s=20) == [2.0, 2.0]
