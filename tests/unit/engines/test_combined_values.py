"""Values of several ranks in one message: by name, and kept where names share a slot."""

from __future__ import annotations

import itertools
import zlib

import pytest
import torch

from lightning_pardist.engines.common import combined_values
from lightning_pardist.engines.common.combined_values import Value, ValueNames, ValueSlots
from lightning_pardist.engines.common.mean_counts import MeanPart

HOST = torch.device("cpu")


def _mean(name, value, items, parts=()):
    return Value(name, MeanPart(value, items), tuple(MeanPart(*part) for part in parts))


def _combined(*ranks, present=None, names=None):
    slots = [
        ValueSlots(values, names or ValueNames(), present=here, device=HOST)
        for values, here in zip(ranks, present or [True] * len(ranks), strict=True)
    ]
    messages = [each.message() for each in slots]
    assert {len(each) for each in messages} == {slots[0].length}
    total = [sum(numbers) for numbers in zip(*messages, strict=True)]
    return [[(each.value, each.ranks) for each in rank.combined(total)] for rank in slots]


def test_means_weigh_as_much_as_they_have_items():
    assert _combined([_mean("a", 1.0, 1.0)], [_mean("a", 4.0, 2.0)]) == [[(3.0, 2)], [(3.0, 2)]]


def test_a_value_of_some_ranks_leaves_the_others_alone():
    first, second = _combined([_mean("b", 5.0, 3.0), _mean("a", 1.0, 1.0)], [_mean("a", 4.0, 2.0)])
    assert first == [(5.0, 1), (3.0, 2)]
    assert second == [(3.0, 2)]


def test_summands_have_their_own_items():
    rank = [_mean("a", 3.0, 1.0, [(1.0, 1.0), (2.0, 1.0)])], [_mean("a", 6.0, 1.0, [(4.0, 2.0), (2.0, 3.0)])]
    assert _combined(*rank) == [[(5.0, 2)], [(5.0, 2)]]


def test_summands_that_differ_are_not_used():
    parted, whole = [_mean("a", 3.0, 1.0, [(1.0, 5.0), (2.0, 1.0)])], [_mean("a", 6.0, 2.0)]
    assert _combined(parted, whole) == [[(5.0, 2)], [(5.0, 2)]]


def test_a_rank_whose_batch_does_not_count():
    found = _combined([_mean("a", 1.0, 1.0)], [_mean("a", 4.0, 2.0)], present=[True, False])
    assert found == [[(1.0, 1)], [(1.0, 1)]]


def test_a_mean_over_no_items_is_that_of_the_others():
    assert _combined([_mean("a", float("nan"), 0.0)], [_mean("a", 4.0, 2.0)]) == [[(4.0, 2)], [(4.0, 2)]]


def test_names_in_one_slot_on_different_ranks_stay_apart():
    names = (f"name_{number}" for number in itertools.count())
    slot = zlib.crc32(b"name_0") % 10
    one, other = itertools.islice((name for name in names if zlib.crc32(name.encode()) % 10 == slot), 2)
    found = _combined([_mean(one, 1.0, 1.0), _mean("a", 1.0, 1.0)], [_mean(other, 4.0, 2.0), _mean("a", 4.0, 2.0)])
    assert found == [[(1.0, 0), (3.0, 2)], [(4.0, 0), (3.0, 2)]]
    # On one rank they are neighbours, on all ranks the same ones in any order.
    values = [_mean(one, 1.0, 1.0), _mean(other, 4.0, 2.0)]
    assert _combined(values, values[::-1]) == [[(1.0, 2), (4.0, 2)], [(4.0, 2), (1.0, 2)]]


def test_values_beyond_the_message_are_kept():
    ranks = [[_mean(f"v{place}", value, 1.0) for place in range(40)] for value in (1.0, 3.0)]
    first, second = _combined(*ranks)
    assert sorted(value for value, _ in first) == [1.0] * 32 + [2.0] * 8
    assert sorted(value for value, _ in second) == [2.0] * 8 + [3.0] * 32


class Group:
    """Ranks that have the same new names."""

    def size(self):
        return 2


def test_known_names_have_slots_of_their_own(monkeypatch):
    def gather(told, own, group):
        told[:] = [own, ["of another rank"]]

    monkeypatch.setattr(combined_values.dist, "all_gather_object", gather)
    names = ValueNames()
    ranks = [[_mean(f"v{place}", value, 1.0) for place in range(0, 60, step)] for value, step in ((1.0, 1), (3.0, 2))]
    _combined(*ranks, names=names)
    assert names.has_new
    names.learn(Group())
    assert not names.has_new
    assert len(names.slots) == 61
    first, second = _combined(*ranks, names=names)
    assert first == [(2.0, 2), (1.0, 1)] * 30
    assert second == [(2.0, 2)] * 30


@pytest.mark.parametrize("ranks", [2, 1000])
def test_many_ranks(ranks):
    found = _combined(*([_mean("a", float(rank), 1.0)] for rank in range(ranks)))
    assert found == [[((ranks - 1) / 2, ranks)]] * ranks
