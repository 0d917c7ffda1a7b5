"""Timelines of a pipeline step as SVG (one row per rank, one box per computation) and as a Chrome trace."""

from __future__ import annotations

from html import escape
from typing import Any

from lightning_pardist.engines.pipeline.clock import TimedAction, Timeline
from lightning_pardist.engines.pipeline.schedule import Kind

_COLOURS = {
    Kind.FORWARD: "#4e79a7",
    Kind.BACKWARD: "#59a14f",
    Kind.BACKWARD_INPUT: "#8cd17d",
    Kind.BACKWARD_WEIGHT: "#f1ce63",
}
_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward of inputs",
    Kind.BACKWARD_WEIGHT: "backward of weights",
}
_WIDTH, _ROW, _GAP, _LEFT, _TOP = 1000, 34, 8, 64, 64


def timeline_svg(timeline: Timeline, *, title: str, expected_idle: float | None = None) -> str:
    """Render a timeline as SVG; boxes are labelled with their micro-batch, and a rank's later stages are paler.

    Args:
        timeline: Simulated or measured timeline; measured times are in seconds.
        title: Heading of the picture.
        expected_idle: Idle share by the formula, printed next to the timeline's own.

    Returns:
        The content of the SVG file.
    """
    begin = min((event.begin for event in timeline.events), default=0.0)
    scale = _WIDTH / (timeline.total or 1.0) if timeline.events else 1.0
    height = _TOP + timeline.num_ranks * (_ROW + _GAP) + 40
    idle = f"idle {timeline.idle_share:.1%}" if timeline.events else "nothing ran"
    if expected_idle is not None:
        idle += f", by the formula {expected_idle:.1%}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 16}" height="{height}"'
        ' font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="15">{escape(title)}</text>',
        f'<text x="{_LEFT}" y="44" fill="#555">{escape(idle)}</text>',
    ]
    for rank in range(timeline.num_ranks):
        top = _TOP + rank * (_ROW + _GAP)
        parts.append(f'<text x="8" y="{top + 22}">rank {rank}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{top}" width="{_WIDTH}" height="{_ROW}" fill="#f3f3f3"/>')
        own = [event for event in timeline.events if event.rank == rank]
        stages = sorted({event.action.stage_index for event in own})
        parts += [_box(event, begin, scale, top, stages.index(event.action.stage_index)) for event in own]
    parts += _legend(timeline, height - 24)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _box(event: TimedAction, begin: float, scale: float, top: int, chunk: int) -> str:
    action = event.action
    left, width = _LEFT + (event.begin - begin) * scale, max((event.end - event.begin) * scale, 0.5)
    told = f"stage {action.stage_index}, micro-batch {action.microbatch_index}: {_NAMES[action.kind]}"
    opacity = max(0.35, 1 - 0.3 * chunk)
    box = (
        f'<g><title>{told}, {event.begin:.6g} to {event.end:.6g}</title><rect x="{left:.2f}" y="{top}"'
        f' width="{width:.2f}" height="{_ROW}" fill="{_COLOURS[action.kind]}" fill-opacity="{opacity}"'
        ' stroke="white" stroke-width="0.5"/>'
    )
    if width >= 10:
        centre = f'x="{left + width / 2:.2f}" y="{top + 22}" text-anchor="middle"'
        box += f'<text {centre} fill="black">{action.microbatch_index}</text>'
    return box + "</g>"


def _legend(timeline: Timeline, y: int) -> list[str]:
    shown = {event.action.kind for event in timeline.events}
    parts, x = [], _LEFT
    for kind, name in _NAMES.items():
        if kind in shown:
            parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{_COLOURS[kind]}"/>')
            parts.append(f'<text x="{x + 18}" y="{y + 10}">{name}</text>')
            x += 30 + 7 * len(name)
    return parts


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Convert a timeline to the format of ``chrome://tracing`` and Perfetto: a process per rank, a thread per stage.

    Args:
        timeline: Timeline with times in seconds.

    Returns:
        The trace, to be written as JSON.
    """
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
        for rank in range(timeline.num_ranks)
    ]
    for event in sorted(timeline.events, key=lambda event: (event.rank, event.begin)):
        action = event.action
        events.append(
            {
                "name": f"{_NAMES[action.kind]} {action.microbatch_index}",
                "cat": _NAMES[action.kind],
                "ph": "X",
                "pid": event.rank,
                "tid": action.stage_index,
                "ts": event.begin * 1e6,
                "dur": (event.end - event.begin) * 1e6,
                "args": {"stage": action.stage_index, "micro-batch": action.microbatch_index},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
