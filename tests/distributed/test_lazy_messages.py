"""Messages of tensors that torch conjugates or negates lazily."""

import torch
import torch.distributed as dist

from lightning_pardist.collectives import irecv, isend, world_group
from tests.helpers.ranks import run_ranks


def _values():
    z = torch.tensor([1 + 2j, 3 - 4j])
    return [z.conj(), z[:1].conj().imag, torch._neg_view(torch.arange(3.0))]


def _exchange():
    for tag, value in enumerate(_values()):
        if dist.get_rank() == 0:
            isend(value, 1, group=world_group(), tag=tag).wait()
        else:
            found = torch.empty(value.shape, dtype=value.dtype)
            irecv(found, 0, group=world_group(), tag=tag).wait()
            torch.testing.assert_close(found, value.resolve_conj().resolve_neg(), rtol=0, atol=0)


def test_values_arrive_conjugated_and_negated():
    assert all(value.is_conj() or value.is_neg() for value in _values())
    run_ranks(2, _exchange)
