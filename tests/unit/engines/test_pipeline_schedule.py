"""Action lists: validation of broken ones, and durations against the formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_pardist.engines.pipeline import (
    Action,
    ActionLists,
    Kind,
    build_schedule,
    check_schedule,
    expected_idle_share,
    forward_schedule,
    stage_ranks,
)
from lightning_pardist.engines.pipeline.schedule import closest_schedule
from tests.helpers.clock import peak_activations, simulate

ALL = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("interleaved_zb", 1), ("interleaved_zb", 2)]


@pytest.mark.parametrize(("name", "chunks"), [*ALL, ("zbv", 2)])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("num_microbatches", [8, 16])
def test_idle_share_equals_the_formula(name: str, chunks: int, num_ranks: int, num_microbatches: int) -> None:
    lists = build_schedule(name, num_ranks, num_microbatches, chunks_per_rank=chunks)
    expected = expected_idle_share(name, num_ranks, num_microbatches, chunks_per_rank=chunks)
    assert simulate(lists).idle_share == pytest.approx(expected, rel=0.05)


def test_formulas() -> None:
    assert expected_idle_share("1f1b", 4, 8) == pytest.approx(3 / 11)
    assert expected_idle_share("gpipe", 2, 4) == pytest.approx(1 / 5)
    assert expected_idle_share("mp", 4, 1) == pytest.approx(3 / 4)
    relative = [expected_idle_share(name, 4, 8) for name in ("1f1b", "interleaved_zb")]
    assert relative[1] / (1 - relative[1]) == pytest.approx(relative[0] / (1 - relative[0]) / 3)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_activations_kept(num_ranks: int) -> None:
    gpipe = simulate(build_schedule("gpipe", num_ranks, 8))
    assert [peak_activations(gpipe, rank) for rank in range(num_ranks)] == [8] * num_ranks
    one = simulate(build_schedule("1f1b", num_ranks, 8))
    assert [peak_activations(one, rank) for rank in range(num_ranks)] == list(range(num_ranks, 0, -1))


@pytest.mark.parametrize(("name", "chunks"), [*ALL, ("zbv", 2)])
def test_every_number_of_microbatches_finds_a_schedule(name: str, chunks: int) -> None:
    for num_ranks in (1, 2, 4):
        for count in range(1, 12):
            lists = closest_schedule(name, num_ranks, count, chunks_per_rank=chunks)
            assert (count + 1) // 2 <= lists.num_microbatches <= count


def test_forward_schedule_has_no_backward() -> None:
    lists = forward_schedule(stage_ranks("zbv", 2, 2), 3)
    kinds = {action.kind for actions in lists.actions for action in actions}
    assert kinds == {Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECV_FORWARD}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "dual", "num_ranks": 2, "num_microbatches": 4}, "does not exist"),
        ({"name": "1f1b", "num_ranks": 2, "num_microbatches": 4, "chunks_per_rank": 2}, "one stage a rank"),
        ({"name": "zbv", "num_ranks": 2, "num_microbatches": 4}, "chunks_per_rank=2"),
        ({"name": "mp", "num_ranks": 2, "num_microbatches": 4}, "no micro-batches"),
        ({"name": "gpipe", "num_ranks": 2, "num_microbatches": 0}, "not positive"),
        ({"name": "interleaved", "num_ranks": 2, "num_microbatches": 5, "chunks_per_rank": 2}, "multiple"),
    ],
)
def test_settings_that_do_not_exist(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_schedule(**arguments)  # type: ignore[arg-type]


def changed(lists: ActionLists, rank: int, actions: list[Action]) -> ActionLists:
    rows = list(lists.actions)
    rows[rank] = tuple(actions)
    return replace(lists, actions=tuple(rows))


def test_broken_lists_are_found() -> None:
    lists = build_schedule("1f1b", 2, 3)
    first, second = list(lists.actions[0]), list(lists.actions[1])
    with pytest.raises(RuntimeError, match="misses 0B2"):
        check_schedule(changed(lists, 0, [a for a in first if a != Action(Kind.BACKWARD, 0, 2)]))
    with pytest.raises(RuntimeError, match="misses 1RECV_F1"):
        check_schedule(changed(lists, 1, [a for a in second if a != Action(Kind.RECV_FORWARD, 1, 1)]))
    with pytest.raises(RuntimeError, match="twice"):
        check_schedule(changed(lists, 0, [*first, first[0]]))
    with pytest.raises(RuntimeError, match="another rank"):
        check_schedule(changed(lists, 0, [*first, Action(Kind.FORWARD, 1, 0)]))
    with pytest.raises(RuntimeError, match="superfluous"):
        check_schedule(changed(lists, 0, [*first, Action(Kind.FORWARD, 0, 3)]))
    sends = [i for i, a in enumerate(first) if a.kind is Kind.SEND_FORWARD]
    swapped = list(first)
    swapped[sends[0]], swapped[sends[1]] = first[sends[1]], first[sends[0]]
    with pytest.raises(RuntimeError, match="same messages in the same order"):
        check_schedule(changed(lists, 0, swapped))


def test_deadlock_is_found() -> None:
    lists = build_schedule("gpipe", 2, 1)
    first = list(lists.actions[0])
    backward = next(i for i, a in enumerate(first) if a.kind is Kind.BACKWARD)
    received = next(i for i, a in enumerate(first) if a.kind is Kind.RECV_BACKWARD)
    first[backward], first[received] = first[received], first[backward]
    with pytest.raises(RuntimeError, match="waits for ever at 0B0"):
        check_schedule(changed(lists, 0, first))
