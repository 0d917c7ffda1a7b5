"""Drawings of a timeline contain every computation, and are valid SVG and Chrome traces."""

import json
from xml.etree import ElementTree

import pytest

from lightning_pardist.engines.pipeline import build_schedule, expected_idle_share
from lightning_pardist.engines.pipeline.drawing import chrome_trace, timeline_svg
from tests.helpers.clock import simulate

CASES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved_zb", 1), ("zbv", 2)]


def _timeline(name, chunks):
    return simulate(build_schedule(name, 2, 8, chunks_per_rank=chunks))


@pytest.mark.parametrize(("name", "chunks"), CASES)
def test_one_box_a_computation(name, chunks):
    timeline = _timeline(name, chunks)
    expected = expected_idle_share(name, 2, 8, chunks_per_rank=chunks)
    root = ElementTree.fromstring(timeline_svg(timeline, title="a < b", expected_idle=expected))
    titles = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == len(timeline.events)
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "a < b" in texts
    assert f"idle {timeline.idle_share:.1%}, by the formula {expected:.1%}" in texts
    right_edge = max(
        float(box.get("x")) + float(box.get("width"))
        for group in root.iter("{http://www.w3.org/2000/svg}g")
        for box in group.iter("{http://www.w3.org/2000/svg}rect")
    )
    assert right_edge == pytest.approx(1064, abs=1)


@pytest.mark.parametrize(("name", "chunks"), CASES)
def test_chrome_trace(name, chunks):
    timeline = _timeline(name, chunks)
    events = json.loads(json.dumps(chrome_trace(timeline)))["traceEvents"]
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {"rank 0", "rank 1"}
    boxes = [event for event in events if event["ph"] == "X"]
    assert len(boxes) == len(timeline.events)
    for rank in (0, 1):
        busy = sum(event["dur"] for event in boxes if event["pid"] == rank)
        assert busy == pytest.approx(timeline.busy(rank) * 1e6)
