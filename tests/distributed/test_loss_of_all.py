"""An optimizer that reads the loss gets one process's on all ranks, whatever the ranks' own losses are."""

import math

import pytest
import torch
import torch.distributed as dist

from lightning_pardist.engines.common.loss_of_all import OwnLoss, loss_of_all
from tests.helpers.ranks import run_ranks

NAN = math.nan
#: By name: each rank's value, weight, samples and whether its batch counts; whether terms are the same; the result.
CASES = {
    "means": ([(1.0, 30.0, 4.0, True), (2.0, 10.0, 4.0, True)], True, 1.25),
    "sums": ([(1.0, None, 4.0, True), (2.0, None, 2.0, True)], True, 3.0),
    "a sum and a mean": ([(1.0, None, 4.0, True), (3.0, 10.0, 2.0, True)], False, 2.0),
    "other terms": ([(1.0, 30.0, 6.0, True), (2.0, 10.0, 2.0, True)], False, 1.25),
    "a mean of nothing": ([(1.0, 30.0, 4.0, True), (NAN, 0.0, 4.0, True)], True, 1.0),
    "none on one": ([(1.0, 30.0, 4.0, True), (None, 4.0, 4.0, True)], True, 0.5),
    "a sum and none": ([(None, 1.0, 4.0, True), (3.0, None, 4.0, True)], True, 3.0),
    "a filler": ([(1.0, 30.0, 4.0, True), (7.0, 30.0, 4.0, False)], True, 1.0),
    "fillers": ([(1.0, 30.0, 4.0, False), (2.0, None, 4.0, False)], True, 1.5),
    "none": ([(None, 30.0, 4.0, True), (None, 1.0, 4.0, False)], True, None),
}


def _found():
    found = {}
    for name, (ranks, agreed, _) in CASES.items():
        value, weight, samples, counts = ranks[dist.get_rank()]
        own = OwnLoss(weight, samples, torch.tensor(agreed))
        loss = None if value is None else torch.tensor(value)
        found[name] = loss_of_all(loss, own, counts=counts, group=dist.group.WORLD, device=torch.device("cpu"))
    return found


def test_all_ranks_come_to_the_same_loss():
    one, other = run_ranks(2, _found)
    assert one == other
    for name, (_, _, want) in CASES.items():
        assert one[name] == (want if want is None else pytest.approx(want, rel=1e-12)), name
