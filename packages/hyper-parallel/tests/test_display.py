from __future__ import annotations

import dataclasses
import io
import itertools
import json

from rich.console import Console

from hp_plan import ModuleDifference, VerifyResult
from hp_platform import get_platform
from hyper_parallel.reports.display import JsonReporter, LineReporter, RichReporter, verify_table
from hyper_parallel.reports.output import Curve, Step, Summary, draw_loss

MEMORY = "peak resident" if get_platform().devices.kind == "cpu" else "peak memory"
STEPS = [Step(i, 5.0 / i, 1.25, 1e-3, 12345.6, 300 << 20, 0.5) for i in range(1, 41)]
SUMMARY = Summary(40, 5.0, 0.13, 1000, 20.0, (300 << 20, 200 << 20), "runs/x", "runs/x/checkpoint", "def [bold]f():")
SUMMARY = dataclasses.replace(SUMMARY, averaged=4, files=("metrics.jsonl", "loss.png"))


def shown(reporter, stream) -> str:
    with reporter.running("a model", steps=len(STEPS)):
        for step in STEPS:
            reporter.step(step)
    reporter.finished(SUMMARY)
    return stream.getvalue()


def test_a_run_that_is_stopped_is_not_finished():
    for reporter in (LineReporter, RichReporter):
        for steps, end in ((40, "finished"), (100, "stopped after step 40 of 100")):
            stream = io.StringIO()
            display = reporter(Console(file=stream, width=100))
            with display.running("a model", steps=steps):
                display.step(STEPS[-1])
            display.finished(SUMMARY)
            assert end in stream.getvalue()


def test_a_run_without_a_step_left_says_so():
    stream = io.StringIO()
    display = LineReporter(Console(file=stream, width=100))
    with display.running("a model", steps=40):
        pass
    display.finished(dataclasses.replace(SUMMARY, peak_memory=()))
    assert "finished before: no step was left" in stream.getvalue()
    assert "(by rank)" not in stream.getvalue()


def curve(steps):
    result = Curve()
    for step in steps:
        result.add(step)
    return result


def test_json_is_a_line_a_step_and_one_for_the_run():
    stream = io.StringIO()
    lines = [json.loads(line) for line in shown(JsonReporter(stream), stream).splitlines()]
    assert [line["step"] for line in lines[:-1]] == list(range(1, 41))
    assert lines[0] == {
        "step": 1,
        "loss": 5.0,
        "grad_norm": 1.25,
        "lr": 1e-3,
        "tokens_per_second": 12345.6,
        "peak_memory": 300 << 20,
        "seconds": 0.5,
        "data_wait": 0.0,
    }
    assert lines[-1]["checkpoint"] == "runs/x/checkpoint"
    assert lines[-1]["peak_memory"] == [300 << 20, 200 << 20]


def test_lines_where_there_is_no_terminal():
    """The first ten steps, then one every five seconds, each validated one, and the last."""
    stream, seconds = io.StringIO(), itertools.count()
    reporter = LineReporter(Console(file=stream, width=100), clock=lambda: float(next(seconds)))
    steps = [dataclasses.replace(each, **({"validation_loss": 2.0} if each.step == 23 else {})) for each in STEPS]
    with reporter.running("a model", steps=len(steps)):
        for step in steps:
            reporter.step(step)
    reporter.finished(SUMMARY)
    lines = stream.getvalue().splitlines()
    assert lines[1].split() == f"step loss grad norm tokens/s {MEMORY}".split()
    assert lines[2].split() == ["1", "5.0000", "1.250", "12,346", "300", "MiB"]
    numbers = [*range(1, 11), 15, 20, 23, 28, 33, 38, 40]
    assert [line.split()[0] for line in lines[2 : 2 + len(numbers)]] == list(map(str, numbers))
    text = stream.getvalue()
    assert "def [bold]f():" in text
    assert "300 MiB, 200 MiB" in text
    assert "0.1300 at the end (mean of 4 steps)" in text and "metrics.jsonl, loss.png" in text


def test_what_a_validation_finds_and_a_model_writes_stays_on_the_screen():
    step = dataclasses.replace(STEPS[0], validation_loss=2.5, perplexity=12.2, texts=("to be\x07\nor", "not"))
    written = ["written after step 1, prompt 1:", "  to be\ufffd", "  or", "written after step 1, prompt 2:", "  not"]
    for terminal, reporter in ((False, LineReporter), (True, RichReporter)):
        stream = io.StringIO()
        display = reporter(Console(file=stream, width=80, force_terminal=terminal, highlight=False))
        with display.running("a model", steps=40):
            for each in (step, *STEPS[1:]):
                display.step(each)
        text = stream.getvalue()
        if terminal:
            assert text.count("step 1: loss 5.0000, validation loss 2.5000 (perplexity 12.2)") == 1
        places = [text.index(line) for line in written]
        assert places == sorted(places) and "\x07" not in text


def test_a_live_display_on_a_terminal():
    stream = io.StringIO()
    text = shown(RichReporter(Console(file=stream, width=100, force_terminal=True)), stream)
    assert "step 40/40" in text
    assert "0.1250" in text
    assert "written by the model" in text


def test_the_end_of_the_curve_is_a_mean():
    assert curve(STEPS[:5]).last_loss == STEPS[4].loss
    assert curve(STEPS).last_loss == sum(step.loss for step in STEPS[-4:]) / 4


def test_the_curve_is_a_png(tmp_path):
    validated = [dataclasses.replace(each, validation_loss=each.loss) for each in STEPS]
    draw_loss(curve(validated), tmp_path / "loss.png", title="x")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_module_that_differs_stands_in_the_table():
    rows = (ModuleDifference("embed", 0.0, 1e-3, 0.0), ModuleDifference("head", 1e-4, 0.0, 0.0))
    result = VerifyResult((rows,), (0.0,), 1e-9, 2)
    stream = io.StringIO()
    Console(file=stream, width=100).print(verify_table(result))
    assert "embed" in stream.getvalue()
    assert "1.0e-03" in stream.getvalue()
    assert result.first == "head"
