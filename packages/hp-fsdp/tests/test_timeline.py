"""The time line of a step, from its trace: spans, totals, chart, unsharded memory; no framework."""

from __future__ import annotations

import doctest
import json
import re
import sys

import pytest

from hp_fsdp.explanation import timeline
from hp_fsdp.explanation.explain import Explanation, check_path
from hp_fsdp.explanation.memory import Event, GroupFacts, MemoryRow, memory_timeline, simulate
from hp_fsdp.explanation.timeline import Span, timeline_of

MS = 1_000_000
# Milliseconds; "a" contains "b". The gather of b runs behind a's computation but for 2 ms, its reduction but for 1 ms.
STEP = [
    ("gather", "a", 0),
    ("wait", "a", 1),
    ("gather", "b", 2),
    ("run", "a", 4),
    ("wait", "b", 10),
    ("run", "b", 12),
    ("left", "b", 20),
    ("free", "b", 20),
    ("left", "a", 24),
    ("backward", None, 30),
    ("gather", "b", 30),
    ("wait", "a", 30),
    ("run", "a", 30),
    ("wait", "b", 40),
    ("run", "b", 41),
    ("left", "b", 60),
    ("free", "b", 60),
    ("reduce", "b", 61),
    ("left", "a", 70),
    ("reduced", "b", 71),
    ("free", "a", 71),
    ("reduce", "a", 72),
    ("reduced", "a", 80),
    ("end", None, 80),
]
START = 5_000_000_000


def trace(step=STEP):
    return [(kind, group, START + at * MS) for kind, group, at in step]


def facts(name: str, gathered: int, after_forward: int = 0) -> GroupFacts:
    return GroupFacts(name, 1, gathered // 2, gathered, gathered * 2, after_forward, 0)


def milliseconds(spans: list[Span]) -> list[tuple[str, str, str, float, float]]:
    return [(s.phase, s.kind, s.group, round(s.start * 1e3, 6), round(s.seconds * 1e3, 6)) for s in spans]


def test_spans_of_a_step():
    spans = milliseconds(timeline_of(trace()).spans)
    assert [span for span in spans if span[2] == "b"] == [
        ("forward", "gather", "b", 2, 10),
        ("forward", "wait", "b", 10, 2),
        ("forward", "compute", "b", 12, 8),
        ("backward", "gather", "b", 30, 11),
        ("backward", "wait", "b", 40, 1),
        ("backward", "compute", "b", 41, 19),
        ("backward", "reduce", "b", 61, 10),
        ("backward", "wait", "b", 70, 1),
    ]
    assert ("forward", "compute", "a", 4, 20) in spans and ("backward", "compute", "a", 30, 40) in spans


def test_examples_in_docstrings():
    assert doctest.testmod(timeline).failed == 0


def test_totals():
    told = timeline_of(trace())
    assert told.seconds == pytest.approx(0.080) and told.backward == pytest.approx(0.030)
    assert told.waiting_for_gathers == pytest.approx(0.006)  # 3 + 2 forward, 0 + 1 backward
    assert told.waiting_for_reductions == pytest.approx(0.009)  # 1 of b's, all 8 of a's
    assert told.computing == pytest.approx(0.020 - 0.002 + 0.040 - 0.001)  # between forward and backward is the loss
    under_way = 4 + 10 + 11 + 10 + 8
    assert told.overlapped == pytest.approx(1 - 15 / under_way)


def test_a_reduction_ends_with_its_last_bucket_or_comes_from_the_pass_before():
    step = [("backward", None, 0), ("reduce", "a", 1), ("reduced", "a", 4), ("reduced", "a", 6), ("end", None, 6)]
    assert milliseconds(timeline_of(trace(step)).spans) == [
        ("backward", "reduce", "a", 1, 5),
        ("backward", "wait", "a", 1, 3),
        ("backward", "wait", "a", 4, 2),
    ]
    assert [each.gradients for each in memory_timeline(trace(step), [facts("a", 10)])] == [20, 0]
    step = [("backward", None, 0), ("left", "b", 2), ("reduced", "a", 3), ("end", None, 3)]
    assert ("backward", "reduce", "a", 0, 3) in milliseconds(timeline_of(trace(step)).spans)


def test_what_stays_open_is_closed():
    step = [("gather", "a", 0), ("wait", "b", 1), ("run", "b", 2), ("free", "a", 3), ("end", None, 4)]
    assert milliseconds(timeline_of(trace(step)).spans) == [
        ("forward", "gather", "a", 0, 3),
        ("forward", "wait", "b", 1, 1),
        ("forward", "compute", "b", 2, 2),
    ]
    assert timeline_of(trace([("run", "a", 0), ("left", "a", 1)])).overlapped is None


def test_errors():
    with pytest.raises(ValueError, match="expected the trace of a step, got none"):
        timeline_of([])
    with pytest.raises(ValueError, match="expected one of gather, wait, .* got 'ran' of 'a'"):
        timeline_of([("ran", "a", 0)])


@pytest.mark.parametrize("count", [1, 40])
def test_the_chart_has_a_row_for_every_group(count):
    step = [("gather", "root", 0), ("wait", "root", 0), ("run", "root", 10)]
    names = [f"model.layers.with_a_rather_long_name.{i}" for i in range(count)]
    for at, name in enumerate(names):
        step += [("run", name, 100 + 100 * at), ("left", name, 160 + 100 * at)]
    step += [
        ("left", "root", 200 + 100 * count),
        ("backward", None, 200 + 100 * count),
        ("end", None, 300 + 100 * count),
    ]
    lines = str(timeline_of(trace(step))).split("\n")
    rows = lines[1:-2]
    assert len(rows) == 1 + count and all("#" in row for row in rows) and all(len(row) <= 100 for row in lines[:-2])
    assert all(row.startswith("..." + name[-25:]) for row, name in zip(rows[1:], names))
    assert "-" in rows[0].partition("|")[2] and "forward" in lines[0] and "backward" in lines[0]
    assert lines[-1].startswith("4.3 s by the host's clock" if count == 40 else "400 ms by the host's clock")


def test_what_was_held():
    groups = [facts("a", 100, after_forward=100), facts("b", 10)]
    memory = memory_timeline(trace(), groups)
    assert [(round(each.at * 1e3), each.parameters, each.gradients) for each in memory] == [
        (0, 100, 0),
        (2, 110, 0),
        (20, 100, 0),
        (30, 110, 0),
        (60, 100, 0),
        (61, 100, 20),
        (71, 100, 0),
        (71, 0, 0),
        (72, 0, 200),
        (80, 0, 0),
    ]
    assert memory[1].groups == ("a", "b")
    inside = lambda one, other: (one.name, other.name) == ("b", "a")  # noqa: E731
    events = list(simulate(groups, groups, inside))
    assert max(event.unsharded for event in events) == max(each.parameters for each in memory)
    assert max(event.gradients for event in events) == max(each.gradients for each in memory)


def test_what_is_kept_between_forward_and_backward():
    step = [("gather", "b", 0), ("run", "b", 1), ("left", "b", 2), ("free", "b", 2), ("backward", None, 3)]
    step += [("gather", "b", 4), ("run", "b", 5), ("left", "b", 6), ("free", "b", 6)]
    group = facts("b", 10, after_forward=5)
    assert [each.parameters for each in memory_timeline(trace(step), [group])] == [10, 5, 15, 0]
    events = list(simulate([group], [group], lambda one, other: False))
    assert max(event.unsharded for event in events) == 15
    # Gathered when the step began, and gradients that wait for a later reduction.
    step = [("run", "b", 0), ("left", "b", 1), ("backward", None, 2), ("run", "b", 3), ("left", "b", 4)]
    memory = memory_timeline(trace(step), [group], accumulating={"b"})
    assert [(each.parameters, each.gradients) for each in memory] == [(10, 0), (10, 20)]


def explanation(timed: bool = True) -> Explanation:
    groups = (facts("a", 100, after_forward=100), facts("b", 10))
    events = (Event("forward", "gather", "a", 100, 0), Event("forward", "run", "a", 100, 0))
    rows = (MemoryRow("activations", 2048, None, "nobody watched"),)
    if not timed:
        return Explanation(groups, False, events, rows)
    return Explanation(groups, True, events, rows, timeline_of(trace()), memory_timeline(trace(), groups))


def test_text():
    text = str(explanation())
    assert "activations: nobody watched" in text and re.search(r"activations\W+2 KiB\W+-", text)
    assert "80 ms by the host's clock: computing 57 ms, waiting for gathers 6 ms, for reductions 9 ms" in text
    assert "by the host's clock" not in str(explanation(timed=False))


def test_trace(tmp_path):
    explanation().write(tmp_path / "step.json")
    made = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    rows = {each["tid"]: each["args"]["name"] for each in made if each["ph"] == "M"}
    spans = [each for each in made if each["ph"] == "X"]
    assert sorted(rows.values()) == ["compute", "gather", "gather", "reduce", "wait"]  # two gathers overlap
    assert {
        ("gather", "b", 2000, 10000),
        ("compute", "b", 41000, 19000),
        ("reduce", "a", 72000, 8000),
    } <= {(rows[each["tid"]], each["name"], round(each["ts"]), round(each["dur"])) for each in spans}
    for row in rows:  # a row's spans lie in one another or apart
        ends = []
        for each in sorted((s for s in spans if s["tid"] == row), key=lambda s: (s["ts"], -s["dur"])):
            ends = [end for end in ends if end > each["ts"] + 1e-6]
            assert all(each["ts"] + each["dur"] <= end + 1e-6 for end in ends)
            ends.append(each["ts"] + each["dur"])
    counters = [each["args"] for each in made if each["ph"] == "C"]
    assert counters[1] == {"parameters": 110, "gradients": 0} and len(counters) == 10
    explanation(timed=False).write(tmp_path / "order.json")
    made = json.loads((tmp_path / "order.json").read_text())["traceEvents"]
    assert [each["ts"] for each in made if each["ph"] == "X"] == [0, 1]


def test_picture(tmp_path):
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib draws the time line")
    explanation().write(tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        explanation().picture(tmp_path / "step.svg")
    text = (tmp_path / "step.svg").read_text()
    assert "80 ms by the host" in text and "unsharded gradients" in text and "#8ecae6" in text
    with pytest.raises(RuntimeError, match="needs the times of a step, and none was run yet"):
        explanation(timed=False).picture(tmp_path / "none.png")


def test_files_are_refused_before_anything_is_written(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"ends in .json, .png, .svg, .pdf, got '.*step.txt'"):
        explanation().write(tmp_path / "step.txt")
    with pytest.raises(ValueError, match=r"ends in .png, .svg, .pdf, got"):
        explanation().picture(tmp_path / "step.json")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"needs matplotlib: pip install 'hp-fsdp\[plot\]'"):
        explanation().picture(tmp_path / "step.png")
    assert check_path("a/STEP.PDF") == ".pdf" and not list(tmp_path.iterdir())
