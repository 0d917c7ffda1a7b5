"""Redistribution of batches over workers when some are lost."""

import random

import pytest

from lightning_pardist.engines.servers.batch_assignment import BatchAssignment

SIZE = 6


def share_of(number, of):
    """Return a worker's batches of two samples each, of ``SIZE`` times six batches in total."""
    every = [[2 * place, 2 * place + 1] for place in range(SIZE * 6)]
    return every[number::of]


def test_who_is_here_gets_what_is_left_in_equally_many_turns():
    dealt = BatchAssignment([0, 1, 2], share_of, own=12)
    assert dealt.is_plain
    assert dealt.reassign({}) == 0
    assert dealt.count_left({1: 7}, 12) == 5
    assert dealt.reassign({1: 7}) == 3
    mine = share_of(1, 3)[7:]
    assert dealt.taken_over_by(0) == [mine[0], mine[2], mine[4]]
    assert dealt.taken_over_by(2) == [mine[1], mine[3], None]
    assert dealt.here == (0, 2)
    assert not dealt.is_plain
    # A lost worker with nothing left has nothing to redistribute; a turn without a batch is assigned to no worker.
    assert dealt.reassign({1: 7, 2: 14}) == 0
    assert dealt.here == (0,)


def test_a_second_loss_leaves_what_was_given():
    dealt = BatchAssignment([0, 1, 2, 3], share_of, own=9)
    assert dealt.reassign({3: 0}) == 3
    given = list(dealt.taken_over_by(1))
    assert dealt.reassign({3: 0, 1: 10}) == 1
    assert [dealt.taken_over_by(0)[-1], dealt.taken_over_by(2)[-1]] == given[1:]


@pytest.mark.parametrize("seed", range(20))
def test_every_batch_is_trained_on_once_whoever_is_lost_and_wherever_a_run_goes_on(seed):
    draw = random.Random(seed)
    count = draw.choice([2, 3, 4])
    own = SIZE * 6 // count
    dealt, trained, done = BatchAssignment(range(count), share_of, own=own), [], 0
    sequence = {worker: list(share_of(worker, count)) for worker in range(count)}
    turns, gone = own, {}
    for _ in range(8):
        for worker in list(dealt.here[1:]):
            if worker not in gone and draw.random() < 0.3 and len(dealt.here) - len(gone) > 1:
                gone[worker] = draw.randint(done, done + turns)
        if draw.random() < 0.5:
            # A checkpoint in between, from which the remaining workers resume.
            at = draw.randint(done, done + turns)
            gone = {worker: min(behind, at) for worker, behind in gone.items()}
            for worker in dealt.here:
                trained += sequence[worker][: gone.get(worker, at) - done]
            left = dealt.count_left(gone, at)
            state = dealt.state(gone, at)
            count, done = draw.choice([1, 2, 5]), draw.choice([at, at + 3])
            dealt = BatchAssignment.from_remaining(range(count), share_of, state=state, begun=done)
            assert dealt.count_left({}, done) == left
            turns, gone = len(dealt.taken_over_by(0)), {}
        else:
            for worker in dealt.here:
                trained += sequence[worker][: gone.get(worker, done + turns) - done]
            done += turns
            turns, gone = dealt.reassign(gone), {}
        sequence = {
            worker: list(dealt.taken_over_by(worker))[len(dealt.taken_over_by(worker)) - turns :]
            for worker in dealt.here
        }
    while turns:
        for worker in dealt.here:
            trained += sequence[worker]
        turns = dealt.reassign({})
    assert sorted(batch for batch in trained if batch is not None) == sorted(share_of(0, 1))
