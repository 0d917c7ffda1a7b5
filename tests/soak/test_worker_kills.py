"""Workers killed at random while the servers continue without them."""

import random

import pytest

from tests.helpers.lost import WORKERS, check_replay, done, lose, told, trained
from tests.scripts.lose import BATCH, EPOCHS, STEPS


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shares", [False, True], ids=["report", "share"])
@pytest.mark.parametrize("seed", range(20))
def test_a_worker_may_go_at_any_moment(seed, shares, tmp_path):
    draw = random.Random(seed)
    rank, moment, servers = draw.choice([1, 2]), draw.uniform(0.01, 1.5), draw.choice([1, 2])
    settings = {"LOSE_SHARE": "1"} if shares else {}
    staleness = draw.choice([1, 2, None])
    finished = lose(tmp_path, f"in {moment}", rank, servers=servers, staleness=staleness, timeout_s=500.0, **settings)
    assert finished.code == 0, finished.output
    assert not finished.left
    found = done(finished)
    assert {0, 3 - rank, WORKERS} <= set(found)
    assert len({(each["val"], each["test_val"], each["sum"]) for each in found.values()}) == 1
    if told(finished):
        assert rank not in found
    check_replay(tmp_path)
    for epoch in range(EPOCHS if shares else 0):
        assert sorted(trained(tmp_path, epoch)) == list(range(BATCH * STEPS * WORKERS))
