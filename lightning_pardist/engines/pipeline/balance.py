"""Contiguous partition of a sequence of costs that minimises the maximum cost of a part."""

from __future__ import annotations

from collections.abc import Sequence

#: Among partitions whose maximum is within this fraction of the optimum, the one with the smallest cut costs is chosen.
SLACK = 0.01


def balance(
    costs: Sequence[float], num_parts: int, *, cut_costs: Sequence[float], allowed: Sequence[bool]
) -> tuple[int, ...] | None:
    """Return the best contiguous partition, by dynamic programming over (parts, end of the last part).

    First the smallest possible maximum is found, then, among the partitions within :data:`SLACK` of it, the one with
    the smallest sum of cut costs.

    Args:
        costs: Cost of each item.
        num_parts: Number of parts, each of them non-empty.
        cut_costs: ``cut_costs[i]``: cost of a cut before item ``i``, for instance bytes sent; entry 0 is not used.
        allowed: Whether a cut before item ``i`` is allowed.

    Returns:
        ``num_parts + 1`` bounds from 0 to ``len(costs)``; None if there are too few allowed cuts.
    """
    starts = [0] + [i for i in range(1, len(costs)) if allowed[i]] + [len(costs)]
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)
    worst = _smallest_maximum(starts, prefix, num_parts)
    if worst is None:
        return None
    return _fewest_bytes(starts, prefix, num_parts, cut_costs, worst * (1 + SLACK))


def _smallest_maximum(starts: list[int], prefix: list[float], num_parts: int) -> float | None:
    infinity = float("inf")
    best = [0.0] + [infinity] * (len(starts) - 1)
    for _ in range(num_parts):
        after = [infinity] * len(starts)
        for end in range(1, len(starts)):
            for begin in range(end - 1, -1, -1):
                part = prefix[starts[end]] - prefix[starts[begin]]
                if part >= after[end]:
                    break
                after[end] = min(after[end], max(best[begin], part))
        best = after
    return None if best[-1] == infinity else best[-1]


def _fewest_bytes(
    starts: list[int], prefix: list[float], num_parts: int, cut_costs: Sequence[float], limit: float
) -> tuple[int, ...]:
    infinity = float("inf")
    best = [0.0] + [infinity] * (len(starts) - 1)
    choices: list[list[int]] = []
    for _ in range(num_parts):
        after, choice = [infinity] * len(starts), [-1] * len(starts)
        for end in range(1, len(starts)):
            for begin in range(end - 1, -1, -1):
                if prefix[starts[end]] - prefix[starts[begin]] > limit:
                    break
                total = best[begin] + (cut_costs[starts[begin]] if begin else 0.0)
                if total < after[end]:
                    after[end], choice[end] = total, begin
        best = after
        choices.append(choice)
    bounds, end = [len(starts) - 1], len(starts) - 1
    for choice in reversed(choices):
        end = choice[end]
        bounds.append(end)
    return tuple(starts[index] for index in reversed(bounds))
