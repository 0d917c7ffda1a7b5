"""Static HTML page of a plan: memory and its limit, timelines by rank, and scaling over devices."""

from __future__ import annotations

import html
from typing import Any

from lightning_pardist.planner.ledger import KINDS
from lightning_pardist.planner.words import size_text, time_text

_COLOURS = dict(zip(KINDS, ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#b0b0b0"), strict=True))
_SPANS = {"compute": "#4c78a8", "send": "#f58518", "wait": "#e0e0e0"}
_WIDTH, _LABEL, _LINE = 560, 330, 20
_MOST_ROWS = 16


def page(plan: Any) -> str:
    """Return the HTML page.

    Args:
        plan: Plan to show.
    """
    rows = "".join(_table_row(number, row) for number, row in enumerate(plan.rows))
    refused = "".join(f"<li><b>{_text(each.candidate)}</b>: {_text(each.reason)}</li>" for each in plan.refused)
    notes = "".join(f"<p>{_text(note)}</p>" for note in plan.notes)
    explained = "".join(f"<pre>{_text(plan.explain(row))}</pre>" for row in plan.rows[:_MOST_ROWS])
    sources = "".join(f"<li>{_text(source)}</li>" for source in plan.device.sources)
    scaling = plan.scaling()
    curve = f"<h2>More devices, pardist_ddp</h2>{_curve(plan)}" if len(scaling) > 1 else ""
    heads = "<tr><th></th><th>strategy</th><th>memory</th><th>step</th><th>samples/s</th><th>MFU</th><th>why</th></tr>"
    return (
        "<!doctype html><html><head><meta charset='utf-8'><title>pardist plan</title><style>"
        "body{font:14px sans-serif;margin:2em;max-width:1000px}table{border-collapse:collapse}"
        "td,th{padding:2px 8px;text-align:left;border-bottom:1px solid #ddd}pre{background:#f6f6f6;padding:6px}"
        f"</style></head><body><h1>{_text(plan.headline)}</h1>{notes}<pre>{_text(plan.trainer_line)}</pre>"
        f"<table>{heads}{rows}</table>"
        f"<h2>Memory of the fullest rank</h2>{memory_bars(plan)}"
        f"<h2>Steps by rank</h2>{''.join(timeline(row) for row in plan.rows[:4])}{curve}"
        f"<h2>Why</h2>{explained}<h2>Not traced or refused</h2><ul>{refused}</ul>"
        f"<h2>Sources of the device profile</h2><ul>{sources}</ul></body></html>"
    )


def memory_bars(plan: Any) -> str:
    """Return an SVG of each row's memory by kind, with the limit."""
    rows = plan.rows[:_MOST_ROWS]
    room = plan.device.memory_bytes - plan.device.reserved_bytes
    most = max(row.memory["peak"] for row in rows)
    # A limit that is far away would make the bars invisible.
    shown = most * 1.1 if room > 4 * most else max(most, room) * 1.05
    parts = []
    for number, row in enumerate(rows):
        x, y = float(_LABEL), 4 + number * _LINE
        parts.append(_label(f"{row.candidate}  {size_text(row.memory['peak'])}", y))
        for kind in KINDS:
            width = _WIDTH * row.memory[kind] / shown
            title = f"<title>{kind} {size_text(row.memory[kind])}</title>"
            parts.append(f"<rect x='{x:.1f}' y='{y}' width='{width:.1f}' height='14' fill='{_COLOURS[kind]}'>"
                         f"{title}</rect>")  # fmt: skip
            x += width
    bottom = 4 + len(rows) * _LINE
    if room <= shown:
        at = _LABEL + _WIDTH * room / shown
        parts.append(f"<line x1='{at:.1f}' y1='0' x2='{at:.1f}' y2='{bottom}' stroke='red' stroke-width='2'/>")
    parts.append(_legend(_COLOURS, bottom, f"limit {size_text(room)}{'' if room <= shown else ', beyond the chart'}"))
    return _svg(parts, bottom + 24)


def timeline(row: Any) -> str:
    """Return an SVG timeline of compute, communication and waits of each traced rank in a step."""
    total = max((time.step for time in row.timelines.values()), default=0.0)
    if not total:
        return ""
    parts = []
    for number, (rank, time) in enumerate(row.timelines.items()):
        y = 4 + number * _LINE
        parts.append(_label(f"rank {rank}", y))
        for span in time.spans:
            x, width = _LABEL + _WIDTH * span.begin / total, _WIDTH * (span.end - span.begin) / total
            if width < 0.05:
                continue
            offset, height = (9, 5) if span.kind == "send" else (0, 14)
            parts.append(f"<rect x='{x:.1f}' y='{y + offset}' width='{max(width, 0.3):.1f}' height='{height}'"
                         f" fill='{_SPANS[span.kind]}'/>")  # fmt: skip
    bottom = 4 + len(row.timelines) * _LINE
    parts.append(_legend(_SPANS, bottom, "white: idle"))
    return f"<h3>{_text(row.candidate)}, {time_text(total)}</h3>{_svg(parts, bottom + 24)}"


def _curve(plan: Any) -> str:
    points = plan.scaling()
    best = max(rate for _, rate in points)
    lines = []
    for number, (devices, rate) in enumerate(points):
        y = 4 + number * _LINE
        width = _WIDTH * rate / best
        ideal = min(1.0, points[0][1] * devices / best) * _WIDTH
        share = rate / (points[0][1] * devices)
        lines.append(_label(f"{devices} devices: {rate:.1f} samples/s, {share:.0%} of linear scaling", y))
        lines.append(f"<rect x='{_LABEL}' y='{y}' width='{ideal:.1f}' height='14' fill='#eee'/>")
        lines.append(f"<rect x='{_LABEL}' y='{y}' width='{width:.1f}' height='14' fill='#4c78a8'/>")
    return _svg(lines, 8 + len(points) * _LINE)


def _table_row(number: int, row: Any) -> str:
    cells = (number, row.candidate, size_text(row.memory["peak"]), time_text(row.time.step),
             f"{row.samples_per_s:.1f}", f"{row.mfu:.0%}", row.reason)  # fmt: skip
    return f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in cells)}</tr>"


def _label(text: str, y: int) -> str:
    return f"<text x='0' y='{y + 11}' font-size='11'>{_text(text)}</text>"


def _legend(colours: dict[str, str], y: int, more: str) -> str:
    parts, x = [], _LABEL
    for name, colour in colours.items():
        parts.append(f"<rect x='{x}' y='{y + 4}' width='10' height='10' fill='{colour}'/>"
                     f"<text x='{x + 13}' y='{y + 13}' font-size='11'>{name}</text>")  # fmt: skip
        x += 85
    return "".join(parts) + f"<text x='{x}' y='{y + 13}' font-size='11'>{_text(more)}</text>"


def _svg(parts: list[str], height: int) -> str:
    width = _LABEL + _WIDTH + 10
    return f"<svg width='{width}' height='{height}' font-family='sans-serif'>{''.join(parts)}</svg>"


def _text(value: object) -> str:
    return html.escape(str(value))
