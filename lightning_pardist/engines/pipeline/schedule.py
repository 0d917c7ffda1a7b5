"""Pipeline schedules as data: torch's order of forwards and backwards, lowered to sends and receives, and validated.

The orders come from the schedule classes of ``torch.distributed.pipelining``, which compute them for all ranks; their
runtime is not used. See :mod:`~lightning_pardist.engines.pipeline.schedule_runtime` for the reasons.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch.distributed.pipelining import (
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from lightning_pardist.compat.pipelining import ComputationType, TorchAction, add_send_recv, stage_to_rank

SCHEDULES = ("mp", "gpipe", "1f1b", "interleaved", "interleaved_zb", "zbv")
#: Schedules that delay the parameters' half of backward.
SPLIT_BACKWARD = ("interleaved_zb", "zbv")


class Kind(str, Enum):
    """Type of an action; the values are torch's abbreviations."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_FORWARD = "SEND_F"
    RECV_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECV_BACKWARD = "RECV_B"


SENDS = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
RECEIVES = (Kind.RECV_FORWARD, Kind.RECV_BACKWARD)
COMPUTES = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


class Action(NamedTuple):
    """One action of a rank in a schedule.

    Attributes:
        kind: Type of the action.
        stage_index: Index of the stage.
        microbatch_index: Index of the micro-batch.
    """

    kind: Kind
    stage_index: int
    microbatch_index: int

    def __str__(self) -> str:
        return f"{self.stage_index}{self.kind.value}{self.microbatch_index}"


@dataclass(frozen=True)
class ActionLists:
    """A schedule: the ordered actions of all ranks.

    Attributes:
        name: One of :data:`SCHEDULES`, or ``"forward"`` for evaluation.
        num_microbatches: Micro-batches per step.
        stage_ranks: Rank (within the pipeline) of each stage.
        actions: Per rank, its actions in order.
        has_backward: Whether it contains backwards; False for evaluation.
    """

    name: str
    num_microbatches: int
    stage_ranks: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    has_backward: bool = True

    @property
    def num_stages(self) -> int:
        """Number of stages over all ranks."""
        return len(self.stage_ranks)

    @property
    def num_ranks(self) -> int:
        """Number of ranks in the pipeline."""
        return len(self.actions)

    @cached_property
    def all_actions(self) -> frozenset[Action]:
        """Set of the actions of all ranks."""
        return frozenset(action for actions in self.actions for action in actions)

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a rank, in ascending order."""
        return [stage for stage, owner in enumerate(self.stage_ranks) if owner == rank]


def stage_ranks(name: str, num_ranks: int, chunks_per_rank: int = 1) -> tuple[int, ...]:
    """Return the rank of each stage.

    Args:
        name: One of :data:`SCHEDULES`.
        num_ranks: Ranks in the pipeline.
        chunks_per_rank: Stages per rank; 1 for ``"mp"``, ``"gpipe"`` and ``"1f1b"``, 2 for ``"zbv"``.

    Raises:
        ValueError: If the schedule does not exist or does not allow that many chunks.
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule={name!r} does not exist. Use one of {', '.join(SCHEDULES)}.")
    if name in ("mp", "gpipe", "1f1b") and chunks_per_rank != 1:
        raise ValueError(f"schedule={name!r} runs one stage a rank, not {chunks_per_rank}. Use 'interleaved'.")
    if name == "zbv" and chunks_per_rank != 2:
        raise ValueError(f"schedule='zbv' runs two stages a rank, not {chunks_per_rank}. Set chunks_per_rank=2.")
    style = "v" if name == "zbv" else "loop"
    mapping = stage_to_rank(num_ranks, num_ranks * chunks_per_rank, style=style)
    return tuple(mapping[stage] for stage in range(num_ranks * chunks_per_rank))


def build_schedule(name: str, num_ranks: int, num_microbatches: int, *, chunks_per_rank: int = 1) -> ActionLists:
    """Build and validate a schedule for training.

    Args:
        name: ``"mp"`` (one micro-batch, every rank waits for the previous one), ``"gpipe"``, ``"1f1b"``,
            ``"interleaved"`` (1F1B over several chunks per rank), ``"interleaved_zb"`` (ZB1P of arXiv 2401.10241, which
            is ZB-H1 for one chunk per rank) or ``"zbv"``.
        num_ranks: Ranks in the pipeline.
        num_microbatches: Micro-batches per step; must be 1 for ``"mp"``.
        chunks_per_rank: Stages per rank.

    Raises:
        ValueError: If the schedule does not exist for these numbers.
        RuntimeError: From :func:`check_schedule`.
    """
    ranks = stage_ranks(name, num_ranks, chunks_per_rank)
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches={num_microbatches} is not positive. Use 1 or more.")
    if name == "mp" and num_microbatches != 1:
        raise ValueError(
            f"schedule='mp' takes no micro-batches, but num_microbatches={num_microbatches}. Use 'gpipe' or '1f1b'."
        )
    compute = _torch_order(name, num_ranks, num_microbatches, chunks_per_rank)
    lists = _with_messages(name, compute, ranks, num_microbatches, has_backward=True)
    check_schedule(lists)
    return lists


def closest_schedule(name: str, num_ranks: int, num_microbatches: int, *, chunks_per_rank: int = 1) -> ActionLists:
    """Build a schedule for at most ``num_microbatches`` micro-batches over the same stages, for short or odd batches.

    Uses the largest number of micro-batches that the schedule supports, if that is at least half of the maximum;
    otherwise all forwards and then all backwards, which supports any number.

    Args:
        name: As in :func:`build_schedule`.
        num_ranks: Ranks in the pipeline.
        num_microbatches: Maximum number of micro-batches.
        chunks_per_rank: Stages per rank.
    """
    for count in range(num_microbatches, (num_microbatches + 1) // 2 - 1, -1):
        try:
            return build_schedule(name, num_ranks, count, chunks_per_rank=chunks_per_rank)
        except (ValueError, RuntimeError):
            continue
    return forwards_first_schedule(name, stage_ranks(name, num_ranks, chunks_per_rank), num_microbatches)


def forwards_first_schedule(name: str, ranks: Sequence[int], num_microbatches: int) -> ActionLists:
    """Build a schedule of all forwards and then all backwards, for any number of micro-batches.

    Args:
        name: Name of the schedule.
        ranks: Rank of each stage.
        num_microbatches: Micro-batches per step.
    """
    lists = _with_messages(name, _breadth_first(ranks, num_microbatches, True), tuple(ranks), num_microbatches, True)
    check_schedule(lists)
    return lists


def forward_schedule(ranks: Sequence[int], num_microbatches: int) -> ActionLists:
    """Build a forward-only schedule for evaluation, in which each stage runs the micro-batches in order.

    Args:
        ranks: Rank of each stage.
        num_microbatches: Micro-batches per step.
    """
    order = _breadth_first(ranks, num_microbatches, False)
    lists = _with_messages("forward", order, tuple(ranks), num_microbatches, has_backward=False)
    check_schedule(lists)
    return lists


def _breadth_first(ranks: Sequence[int], num_microbatches: int, backward: bool) -> dict[int, list[Any]]:
    order: dict[int, list[Any]] = {rank: [] for rank in range(max(ranks) + 1)}
    for stage, rank in enumerate(ranks):
        order[rank] += [TorchAction(stage, ComputationType.FORWARD, index) for index in range(num_microbatches)]
    if backward:
        for stage, rank in reversed(list(enumerate(ranks))):
            order[rank] += [
                TorchAction(stage, ComputationType.FULL_BACKWARD, index) for index in range(num_microbatches)
            ]
    return order


def _torch_order(name: str, num_ranks: int, num_microbatches: int, chunks_per_rank: int) -> dict[int, list[Any]]:
    """Return the compute actions of torch's schedule; its constructors only read the stages' positions."""
    stages: Any = [
        SimpleNamespace(
            stage_index=chunk * num_ranks,
            num_stages=num_ranks * chunks_per_rank,
            group_size=num_ranks,
            group_rank=0,
            is_first=chunk == 0,
            is_last=False,
            has_backward=True,
            submod=None,
        )
        for chunk in range(chunks_per_rank)
    ]
    made: Any
    if name in ("mp", "gpipe"):
        made = ScheduleGPipe(stages[0], num_microbatches)
    elif name == "1f1b":
        return {rank: _one_f_one_b(rank, num_ranks, num_microbatches) for rank in range(num_ranks)}
    else:
        kinds: dict[str, Any] = {
            "interleaved": ScheduleInterleaved1F1B,
            "interleaved_zb": ScheduleInterleavedZeroBubble,
            "zbv": ScheduleZBVZeroBubble,
        }
        made = kinds[name](stages, num_microbatches)
    return {
        rank: [action for action in actions if action is not None and action.is_compute_op]
        for rank, actions in made.pipeline_order.items()
    }


def _one_f_one_b(rank: int, num_ranks: int, num_microbatches: int) -> list[Any]:
    """Return the order in which ``Schedule1F1B`` runs; its ``pipeline_order`` differs (last rank starts at index 1)."""
    warmup = min(num_microbatches, num_ranks - rank)
    order = [TorchAction(rank, ComputationType.FORWARD, index) for index in range(warmup)]
    for index in range(num_microbatches):
        order.append(TorchAction(rank, ComputationType.FULL_BACKWARD, index))
        if warmup + index < num_microbatches:
            order.append(TorchAction(rank, ComputationType.FORWARD, warmup + index))
    return order


def _with_messages(
    name: str, compute: dict[int, list[Any]], ranks: tuple[int, ...], num_microbatches: int, has_backward: bool
) -> ActionLists:
    try:
        lowered = add_send_recv(
            {rank: list(actions) for rank, actions in compute.items()},
            stage_to_rank=lambda stage: ranks[stage],
            num_stages=len(ranks),
        )
    except AssertionError as error:
        raise RuntimeError(
            f"Schedule {name!r} does not exist for {num_microbatches} micro-batches: {error}."
        ) from error
    actions = tuple(
        tuple(
            Action(Kind(action.computation_type.value), action.stage_index, int(action.microbatch_index or 0))
            for action in lowered[rank]
        )
        for rank in sorted(lowered)
    )
    return ActionLists(name, num_microbatches, ranks, actions, has_backward)


def check_schedule(lists: ActionLists) -> None:
    """Check by simulation that a schedule does not deadlock, and runs each micro-batch through each stage once per way.

    Three properties are checked: each stage runs one forward and one backward (full, or input and weight) of every
    micro-batch; any two ranks exchange the same messages in the same order, as NCCL requires; and all lists run to
    their end if every receive waits for its send, and every computation for its inputs.

    Args:
        lists: The schedule.

    Raises:
        RuntimeError: If a check fails; the message names the first action that is missing, superfluous or stuck, or
            the two ranks whose messages do not match.
    """
    _check_counts(lists)
    _check_message_order(lists)
    _check_progress(lists)


def _check_counts(lists: ActionLists) -> None:
    for rank, actions in enumerate(lists.actions):
        seen = set(actions)
        if len(seen) != len(actions):
            twice = next(action for action in actions if actions.count(action) > 1)
            raise RuntimeError(f"Schedule {lists.name!r}: rank {rank} does {twice} twice.")
        wrong = next((action for action in actions if lists.stage_ranks[action.stage_index] != rank), None)
        if wrong is not None:
            raise RuntimeError(f"Schedule {lists.name!r}: rank {rank} does {wrong}, a stage of another rank.")
        expected = {action for stage in lists.stages_of(rank) for action in _expected(lists, stage, seen)}
        for action in sorted(expected ^ seen):
            what = "misses" if action in expected else "has a superfluous"
            raise RuntimeError(f"Schedule {lists.name!r}: rank {rank} {what} {action}.")


def _expected(lists: ActionLists, stage: int, seen: set[Action]) -> list[Action]:
    """Return all actions that a stage has to run."""
    ranks, last = lists.stage_ranks, lists.num_stages - 1
    kinds = [Kind.FORWARD]
    if stage > 0 and ranks[stage - 1] != ranks[stage]:
        kinds += [Kind.RECV_FORWARD] + ([Kind.SEND_BACKWARD] if lists.has_backward else [])
    if stage < last and ranks[stage + 1] != ranks[stage]:
        kinds += [Kind.SEND_FORWARD] + ([Kind.RECV_BACKWARD] if lists.has_backward else [])
    found = [Action(kind, stage, index) for kind in kinds for index in range(lists.num_microbatches)]
    if lists.has_backward:
        for index in range(lists.num_microbatches):
            whole = Action(Kind.BACKWARD, stage, index)
            parts = [Action(Kind.BACKWARD_INPUT, stage, index), Action(Kind.BACKWARD_WEIGHT, stage, index)]
            found += [whole] if whole in seen or not seen & set(parts) else parts
    return found


def peer_of(action: Action, ranks: Sequence[int]) -> int:
    """Return the peer rank of a message.

    Args:
        action: A send or a receive.
        ranks: Rank of each stage.
    """
    up = action.kind in (Kind.SEND_FORWARD, Kind.RECV_BACKWARD)
    return ranks[action.stage_index + 1 if up else action.stage_index - 1]


def _message(action: Action) -> tuple[str, int, int]:
    """Return direction, lower stage and micro-batch of a message, equal for a send and its receive."""
    direction = "F" if action.kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD) else "B"
    lower = action.stage_index - (action.kind in (Kind.RECV_FORWARD, Kind.SEND_BACKWARD))
    return direction, lower, action.microbatch_index


def _check_message_order(lists: ActionLists) -> None:
    between: dict[tuple[int, int], list[tuple[str, int, int]]] = {}
    for rank, actions in enumerate(lists.actions):
        for action in actions:
            if action.kind in SENDS + RECEIVES:
                between.setdefault((rank, peer_of(action, lists.stage_ranks)), []).append(_message(action))
    for (rank, peer), messages in between.items():
        if messages != between.get((peer, rank)):
            raise RuntimeError(
                f"Schedule {lists.name!r}: ranks {rank} and {peer} do not exchange the same messages in the same order."
            )


def _check_progress(lists: ActionLists) -> None:
    done: set[Action] = set()
    next_index = [0] * lists.num_ranks
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(lists.actions):
            while next_index[rank] < len(actions) and needs_of(actions[next_index[rank]], lists) <= done:
                done.add(actions[next_index[rank]])
                next_index[rank] += 1
                moved = True
    for rank, actions in enumerate(lists.actions):
        if next_index[rank] < len(actions):
            stuck = actions[next_index[rank]]
            missing = sorted(map(str, needs_of(stuck, lists) - done))
            raise RuntimeError(f"Schedule {lists.name!r}: rank {rank} waits for ever at {stuck}, for {missing}.")


def needs_of(action: Action, lists: ActionLists) -> set[Action]:
    """Return the actions that must have finished before this one can start.

    Args:
        action: Any action of the schedule.
        lists: The schedule.
    """
    kind, stage, index = action
    ranks, last = lists.stage_ranks, lists.num_stages - 1
    if kind is Kind.RECV_FORWARD:
        return {Action(Kind.SEND_FORWARD, stage - 1, index)}
    if kind is Kind.RECV_BACKWARD:
        return {Action(Kind.SEND_BACKWARD, stage + 1, index)}
    if kind is Kind.SEND_FORWARD:
        return {Action(Kind.FORWARD, stage, index)}
    if kind is Kind.SEND_BACKWARD:
        return {_input_backward(stage, index, lists)}
    if kind is Kind.BACKWARD_WEIGHT:
        return {Action(Kind.BACKWARD_INPUT, stage, index)}
    if kind is Kind.FORWARD:
        if stage == 0:
            return set()
        local = ranks[stage - 1] == ranks[stage]
        return {Action(Kind.FORWARD, stage - 1, index) if local else Action(Kind.RECV_FORWARD, stage, index)}
    needs = {Action(Kind.FORWARD, stage, index)}
    if stage < last:
        local = ranks[stage + 1] == ranks[stage]
        needs.add(_input_backward(stage + 1, index, lists) if local else Action(Kind.RECV_BACKWARD, stage, index))
    return needs


def _input_backward(stage: int, index: int, lists: ActionLists) -> Action:
    whole = Action(Kind.BACKWARD, stage, index)
    return whole if whole in lists.all_actions else Action(Kind.BACKWARD_INPUT, stage, index)
