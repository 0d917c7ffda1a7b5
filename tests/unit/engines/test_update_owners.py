"""Ownership of whole-tensor updates, the boxes exchanged for them, and the number of rounds."""

import pytest
import torch

from lightning_pardist.engines.common.owner_plan import OwnerPlan, Owners, TensorLayout, rounds_of, update_cost


def test_owners_are_balanced_by_cost():
    owners = Owners(2)
    # A long and thin matrix has more elements than a square one, but costs less.
    shapes = {0: (64, 64), 1: (8, 800), 2: (64, 64), 3: (64,)}
    assert update_cost(shapes[1]) < update_cost(shapes[0])
    owners.assign(shapes)
    assert owners.of(0) != owners.of(2)
    before = [owners.of(number) for number in shapes]
    owners.assign(shapes | {4: (128, 128)})
    assert [owners.of(number) for number in shapes] == before
    assert owners.of(4) is not None
    assert owners.of(5) is None


def test_among_tensors_of_one_cost_each_stays_where_most_of_it_is():
    owners = Owners(2)
    shapes = dict.fromkeys(range(6), (8, 8)) | {6: (16, 16)}
    # Four are on rank 0, which gets three; the last of these has the least there.
    held = {0: {0: 64}, 1: {0: 64}, 2: {0: 64}, 3: {0: 40, 1: 24}, 4: {1: 64}, 6: {1: 256}}
    owners.assign(shapes, held)
    plain = Owners(2)
    plain.assign(shapes)
    assert owners.loads == plain.loads
    counts = [[plain.of(n) for n in range(6)].count(rank) for rank in range(2)]
    assert [[owners.of(n) for n in range(6)].count(rank) for rank in range(2)] == counts
    assert owners.of(6) == plain.of(6)
    first = [n for n in range(6) if owners.of(n) == 0]
    assert first == list(range(counts[0])) if counts[0] < 4 else set(range(4)) <= set(first)


def _layout(*boxes):
    return TensorLayout(boxes, boxes, boxes, torch.float32)


def test_replicas_are_taken_once_and_written_everywhere():
    low, high = ((0, 0), (2, 4)), ((2, 0), (2, 4))
    plan = OwnerPlan([{0: _layout(low)}, {0: _layout(high)}, {0: _layout(low)}, {0: _layout(high)}], {0: (4, 4)})
    moves = plan.gather(0, "grads", 2)
    assert {(move.source, move.box) for move in moves} == {(2, low), (3, high)}
    assert [move.target for move in plan.scatter(0, 2)] == [0, 1, 2, 3]


def test_missing_parts_are_no_update():
    plan = OwnerPlan([{0: _layout(((0, 0), (2, 4)))}, {}], {0: (4, 4)})
    with pytest.raises(RuntimeError, match="8 of 16 elements"):
        plan.gather(0, "reads", 0)


def test_rounds_are_bounded():
    shapes = {0: (10,), 1: (30,), 2: (20,), 3: (100,)}
    owner_of = {0: 0, 1: 0, 2: 0, 3: 1}
    rounds = list(rounds_of([0, 1, 2, 3], owner_of, shapes, round_elements=30))
    assert sorted(number for numbers in rounds for number in numbers) == [0, 1, 2, 3]
    assert rounds[0] == [1, 3]
    assert rounds[1] == [2, 0]


def test_tensors_that_some_ranks_know_are_given_to_these():
    owners = Owners(2)
    owners.assign({0: (4, 4), 1: (4, 4), 2: (4, 4)}, known={0: [1], 1: [1], 2: [0, 1]})
    assert [owners.of(number) for number in range(3)] == [1, 1, 0]
