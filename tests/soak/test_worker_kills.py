"""Workers killed at random while servers go on without them."""

import random

import pytest

from tests.helpers.lost import WORKERS, check_replay, done, lose, told


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(20))
def test_a_worker_may_go_at_any_moment(seed, tmp_path):
    draw = random.Random(seed)
    rank, moment, servers = draw.choice([1, 2]), draw.uniform(0.01, 1.5), draw.choice([1, 2])
    finished = lose(tmp_path, f"in {moment}", rank, servers=servers, staleness=draw.choice([1, 2, None]))
    assert finished.code == 0, finished.output
    assert not finished.left
    found = done(finished)
    assert {0, 3 - rank, WORKERS} <= set(found)
    assert len({(each["val"], each["test_val"], each["sum"]) for each in found.values()}) == 1
    if told(finished):
        assert rank not in found
    check_replay(tmp_path)
