"""Profile of ranks on hosts with different numbers of ranks, which are not contiguous."""

from unittest import mock

import torch

from lightning_pardist.planner import measuring
from tests.helpers.ranks import run_ranks


def _measure(hosts):
    rates = dict.fromkeys(("_flops", "_memory_rate"), lambda *_, **__: 1e9)
    rates["_operator_seconds"] = lambda *_: (1e-5, 1e-6)
    rates["measure_operators"] = lambda *_: {"mm": [(64.0, 1e6, 1e10 / (1 + torch.distributed.get_rank()))]}
    with mock.patch.multiple(measuring, **rates):
        return measuring.measure_rank(torch.device("cpu"), hosts=hosts).to_json()


def test_every_rank_makes_the_same_groups():
    found = run_ranks(3, _measure, ["a", "b", "a"])
    assert found[0] == found[1] == found[2]
    assert found[0]["assumed_links"] == ()
    # The slowest rank's rate; messages between pairs and in a group of one have no rates in common.
    assert found[0]["rates"] == {"mm": [(64.0, 1e6, 1e10 / 3)]}
    assert found[0]["message_rates"] == {}
    assert found[0]["inside"] != found[0]["between"]


def test_messages_are_as_fast_as_they_are_measured():
    found, *_ = run_ranks(2, _measure, ["a", "a"])
    assert set(found["message_rates"]) == {"reduce", "gather", "send"}
    assert all(rate > 0 for points in found["message_rates"].values() for _, _, rate in points)
    assert 0 < found["link_host_share"] <= 1
