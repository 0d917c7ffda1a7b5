"""Ranks that are far apart stop before the same step."""

import random

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
