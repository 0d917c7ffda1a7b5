"""A profile of ranks on hosts with different numbers of them, which are not neighbours."""

from unittest import mock

import torch

from lightning_pardist.planner import measuring
from tests.helpers.ranks import run_ranks


def _measure(hosts):
    rates = dict.fromkeys(("_flops", "_memory_rate", "_operator_seconds"), lambda *_, **__: 1e9)
    with mock.patch.multiple(measuring, **rates):
        return measuring.measure_rank(torch.device("cpu"), hosts=hosts).to_json()


def test_every_rank_makes_the_same_groups():
    found = run_ranks(3, _measure, ["a", "b", "a"])
    assert found[0] == found[1] == found[2]
    assert found[0]["assumed_links"] == ()
    assert found[0]["inside"] != found[0]["between"]
