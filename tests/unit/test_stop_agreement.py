"""Ranks that are at different steps stop before the same step."""

import random
import threading
import time

from lightning_pardist.compat.process_groups import HashStore, PrefixStore
from lightning_pardist.trainer.stop_agreement import StopAgreement


def test_all_stop_before_the_same_step():
    draw = random.Random(0)
    for trial in range(50):
        store = PrefixStore(str(trial), HashStore())
        ranks = [StopAgreement(store, rank=rank, world_size=4) for rank in range(4)]
        steps, stopped = [0] * 4, {}
        while len(stopped) < 4:
            rank = draw.choice([rank for rank in range(4) if rank not in stopped])
            steps[rank] += 1
            if found := ranks[rank].before_step(2 if rank == 0 and steps[0] > trial % 7 else 0):
                assert found == 2
                stopped[rank] = steps[rank]
        assert len(set(stopped.values())) == 1


def test_the_steps_of_who_is_gone_do_not_count():
    store = HashStore()
    ranks = [StopAgreement(store, rank=rank, world_size=3) for rank in range(3)]
    for _ in range(9):
        ranks[2].before_step(0)
    assert ranks[1].before_step(0) == 0
    assert ranks[0].before_step(2, lost=[2]) == 0
    assert [rank.before_step(0) for rank in ranks[:2]] == [2, 2]


def test_nobody_ends_before_the_first_and_nobody_waits_for_ever():
    store = HashStore()
    first, second = (StopAgreement(store, rank=rank, world_size=2) for rank in range(2))
    began = time.monotonic()
    second.wait_for_first_rank(0.2)
    assert 0.2 <= time.monotonic() - began < 5
    other = threading.Thread(target=second.wait_for_first_rank, args=(60.0,))
    other.start()
    other.join(0.2)
    assert other.is_alive()
    first.wait_for_first_rank(60.0)
    other.join(5)
    assert not other.is_alive()
