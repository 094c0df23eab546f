"""Pictures of a trace."""

from __future__ import annotations

import json
from xml.etree import ElementTree

from hp_pipeline import Pipeline, placed, schedules, simulate
from hp_pipeline.orders.simulation import to_chrome, to_svg, to_text

PIPELINE = Pipeline(placed("line", 2), 2)
TRACE = simulate(schedules.one_f_one_b(PIPELINE), PIPELINE)


def test_text():
    assert to_text(TRACE, 9).splitlines() == [
        "rank   0 |FF..BB.BB| 2 bytes",
        "rank   1 |.FBBFBB..| 1 bytes",
        "bubble 3 s of 9 s (33.3%)",
    ]


def test_svg_has_a_box_for_each_step():
    root = ElementTree.fromstring(to_svg(TRACE))
    boxes = root.findall("{http://www.w3.org/2000/svg}rect")
    assert [box[0].text for box in boxes[:2]] == ["0F0: 0 to 1 s", "0F1: 1 to 2 s"]
    assert len(boxes) == 8 and "bubble 3 s (33.3%)" in to_svg(TRACE)


def test_chrome():
    events = json.loads(to_chrome(TRACE))["traceEvents"]
    first = next(event for event in events if event["ph"] == "X")
    assert (first["name"], first["ts"], first["dur"], first["tid"]) == ("0F0", 0, 1e6, 0)
    assert len([event for event in events if event["ph"] == "X"]) == 8
