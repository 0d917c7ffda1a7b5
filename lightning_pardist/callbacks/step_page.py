"""HTML page with pictures of training steps: the average step of each rank by kind, and one step in its order."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from lightning_pardist.trainer.step_clock import CHECKPOINT, COMPUTE, DATA, HOST, Span

_COLOURS = {COMPUTE: "#4e79a7", DATA: "#59a14f", CHECKPOINT: "#b07aa1", HOST: "#bab0ac"}
_WAITS = ("#e15759", "#f28e2b", "#edc948", "#ff9da7", "#9c755f")
_WIDTH, _ROW, _GAP, _LEFT = 1000, 22, 4, 72
#: Fraction of a step: a shorter span is drawn as part of the span before it.
_SHORTEST = 1e-3


def step_page(shown: str, ranks: Sequence[Mapping[str, float]], spans: Sequence[Sequence[Span]]) -> str:
    """Return the page as HTML, without external resources or scripts.

    Args:
        shown: The table, as text.
        ranks: Average seconds of one step by kind, for each rank.
        spans: The same step for each rank; times of all ranks by one clock, in seconds.
    """
    kinds = list(dict.fromkeys(kind for rank in ranks for kind in rank))
    colours = _colours(kinds)
    longest = max(sum(rank.values()) for rank in ranks)
    begin = min((each[0][1] for each in spans if each), default=0.0)
    length = max((each[-1][2] for each in spans if each), default=begin) - begin
    means = [[(kind, *_between(rank, kinds, kind)) for kind in kinds if rank.get(kind)] for rank in ranks]
    step = [[(kind, since - begin, until - begin) for kind, since, until in each] for each in spans]
    legend = "".join(
        f'<span><i style="background:{colour}"></i>{html.escape(kind)}</span>' for kind, colour in colours.items()
    )
    return (
        "<!doctype html><html><head><meta charset='utf-8'><title>Training steps</title><style>"
        "body{font-family:sans-serif;margin:2em}i{display:inline-block;width:12px;height:12px;margin:0 6px}"
        "</style></head><body><h1>Training steps</h1>"
        f"<pre>{html.escape(shown)}</pre><p>{legend}</p>"
        f"<h2>A step on average, of {1e3 * longest:.1f} ms</h2>{_rows(means, longest, colours)}"
        f"<h2>The last step that was measured, {1e3 * length:.1f} ms</h2>{_rows(step, length, colours)}"
        "</body></html>\n"
    )


def coarse(spans: Sequence[Span]) -> list[Span]:
    """Merge the spans of a step as far as a picture needs: equal neighbours, and the shortest with their predecessor.

    Args:
        spans: Spans in order, without gaps.
    """
    if not spans:
        return []
    shortest = _SHORTEST * (spans[-1][2] - spans[0][1])
    found = [spans[0]]
    for kind, since, until in spans[1:]:
        last = found[-1]
        if kind == last[0] or until - since < shortest:
            found[-1] = (last[0], last[1], until)
        else:
            found.append((kind, since, until))
    return found


def _colours(kinds: Sequence[str]) -> dict[str, str]:
    waits = [kind for kind in kinds if kind not in _COLOURS]
    return {kind: _COLOURS.get(kind) or _WAITS[waits.index(kind) % len(_WAITS)] for kind in kinds}


def _between(rank: Mapping[str, float], kinds: Sequence[str], kind: str) -> tuple[float, float]:
    since = sum(rank.get(each, 0.0) for each in kinds[: kinds.index(kind)])
    return since, since + rank[kind]


def _rows(rows: Sequence[Sequence[Span]], length: float, colours: Mapping[str, str]) -> str:
    """Draw one row per rank, with a box for each span, as SVG."""
    scale = _WIDTH / (length or 1.0)
    height = len(rows) * (_ROW + _GAP)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH}" height="{height}" font-size="12">']
    for rank, spans in enumerate(rows):
        top = rank * (_ROW + _GAP)
        parts.append(f'<text x="0" y="{top + 15}">rank {rank}</text>')
        for kind, since, until in spans:
            parts.append(
                f'<rect x="{_LEFT + since * scale:.2f}" y="{top}" width="{(until - since) * scale:.2f}" height="{_ROW}"'
                f' fill="{colours.get(kind, _WAITS[0])}"><title>{html.escape(kind)}: {1e3 * since:.2f} to'
                f" {1e3 * until:.2f} ms</title></rect>"
            )
    return "".join([*parts, "</svg>"])
