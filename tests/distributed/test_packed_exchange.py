"""Exchange of boxes of several dtypes in one all-to-all."""

import torch
import torch.distributed as dist

from lightning_pardist.collectives import world_group
from lightning_pardist.engines.common.packed_exchange import BoxTransfer, PackedExchange
from tests.helpers.ranks import run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int8)


def _values(source, target):
    generator = torch.Generator().manual_seed(10 * source + target)
    return [
        torch.randint(100, (source + 1, target + 2, 3), generator=generator).to(dtype).transpose(0, 1)
        for dtype in DTYPES
    ]


def _exchanged():
    rank, size = dist.get_rank(), dist.get_world_size()
    outgoing = [BoxTransfer(target, values) for target in range(size) for values in _values(rank, target)]
    places = {source: [torch.empty_like(values) for values in _values(source, rank)] for source in range(size)}
    incoming = [BoxTransfer(source, place) for source in range(size) for place in places[source]]
    PackedExchange(outgoing, incoming, group=world_group(), device=torch.device("cpu")).finish()
    return all(
        torch.equal(place, values)
        for source in range(size)
        for place, values in zip(places[source], _values(source, rank), strict=True)
    )


def test_everything_arrives():
    assert all(run_ranks(3, _exchanged))
