"""Sinks of metrics, and that none holds up a run."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import warnings

import pytest
from small_runs import run

from hp_testing import run_ranks
from hyper_parallel.reports.sinks import Background, JsonLines, TensorBoard, WeightsAndBiases


class Recording:
    def __init__(self):
        self.calls = []

    def write(self, step, metrics):
        self.calls.append((step, metrics))

    def text(self, name, value):
        self.calls.append((name, value))

    def close(self):
        self.calls.append("closed")


def test_a_background_sink_gets_everything_in_order():
    sink = Recording()
    background = Background("recording", lambda: sink)
    background.text("plan", "x = 1")
    metrics = {"loss": 3.0}
    for step in range(1, 200):
        background.write(step, metrics)
        metrics["loss"] += 1  # the run goes on with its own numbers
    background.close()
    assert sink.calls == [("plan", "x = 1"), *((step, {"loss": step + 2.0}) for step in range(1, 200)), "closed"]


@pytest.mark.parametrize("where", ["open", "write", "close"])
def test_what_a_sink_raises_is_a_warning(where):
    sink = Recording()

    def fail(*_):
        raise OSError("no space left")

    if where != "open":
        setattr(sink, where, fail)
    background = Background("poor", fail if where == "open" else lambda: sink)
    with pytest.warns(RuntimeWarning, match="the sink poor failed and gets no more metrics: OSError: no space") as seen:
        background.write(1, {"loss": 1.0})
        background._thread.join(None if where != "close" else 0)
        background.write(2, {"loss": 1.0})
        background.close()
    assert len(seen) == 1
    assert all(call[0] != 2 for call in sink.calls if call != "closed") or where == "close"


def test_a_sink_that_blocks_is_left_behind():
    gate = threading.Event()
    sink = Recording()

    def blocked(step, metrics):
        gate.wait()
        sink.calls.append(step)

    sink.write = blocked
    background = Background("slow", lambda: sink, limit=10, patience=0.0)
    for step in range(100):
        background.write(step, {})
    with pytest.warns(RuntimeWarning) as seen:
        background.close()
    texts = [str(warning.message) for warning in seen]
    assert any("the sink slow still blocks after 0 s; 10 calls are not written" in text for text in texts)
    assert any("the sink slow was too slow: " in text for text in texts)
    gate.set()
    background._thread.join()
    assert sink.calls[-11:-1] == list(range(90, 100))
    assert sink.calls[-1] == "closed"


def test_lines_of_a_killed_run_are_whole(tmp_path):
    program = (
        "import sys; from pathlib import Path; from hyper_parallel.reports.sinks import JsonLines\n"
        "lines = JsonLines(Path(sys.argv[1]))\n"
        "step = 0\n"
        "while True:\n"
        "    step += 1\n"
        "    lines.write(step, {'loss': 1 / step})\n"
        "    if step == 100: print('ready', flush=True)\n"
    )
    path = tmp_path / "metrics.jsonl"
    run = subprocess.Popen(
        [sys.executable, "-c", program, path],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert run.stdout.readline() == b"ready\n"
    run.send_signal(signal.SIGKILL)
    run.wait()
    run.stdout.close()
    text = path.read_text()
    assert text.endswith("\n")
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert len(lines) >= 100
    again = JsonLines(path)  # a run that goes on
    again.write(1, {})
    again.close()
    assert path.read_text() == text + '{"step": 1}\n'


def test_a_line_that_is_taken_in_parts_is_written_whole(tmp_path, monkeypatch):
    write = os.write
    lines = JsonLines(tmp_path / "metrics.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, line: write(file, line[:5]))
        lines.write(1, {"loss": 2.5})
    lines.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 2.5}\n'


def test_a_metric_that_is_no_number_is_null(tmp_path):
    metrics = {"loss": 2.5, "validation_loss": float("nan"), "perplexity": float("inf")}
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.write(1, metrics)
    lines.close()
    expected = '{"step": 1, "loss": 2.5, "validation_loss": null, "perplexity": null}'
    assert (tmp_path / "metrics.jsonl").read_text() == expected + "\n"


def test_tensorboard_reads_the_curves_back(tmp_path):
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed: nox -s sinks")
    reading = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed: nox -s sinks"
    )
    sink = TensorBoard(tmp_path)
    sink.text("plan", "[mesh]\ntp = 2")
    for step in (1, 2, 3):
        sink.write(step, {"loss": 1 / step, "norm": 2.0})
    sink.close()
    events = reading.EventAccumulator(str(tmp_path))
    events.Reload()
    assert curve(events, "loss") == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert "tp = 2" in events.Tensors("plan/text_summary")[0].tensor_proto.string_val[0].decode()


def curve(events, name):
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_wandb_reads_an_offline_run_back(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed: nox -s sinks")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sink = WeightsAndBiases(tmp_path, name="run-1", config={"mesh.tp": 2})
        for step in (1, 2):
            sink.write(step, {"loss": 1 / step})
        sink.text("plan", "x")
        sink.close()
    assert [step["loss"] for step in logged(tmp_path, 2)] == [1.0, 0.5]


def logged(folder, count):
    """So many steps in the file of a run that was offline, which wandb's own process may still write to."""
    deadline = time.monotonic() + 30
    while len(steps := in_file(folder)) < count and time.monotonic() < deadline:
        time.sleep(0.1)
    return steps


def in_file(folder):
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.rglob("*.wandb")
    data, place, steps, started = file.read_bytes(), 7, [], b""
    assert data.startswith(b":W&B")
    while place + 7 <= len(data):  # records: checksum, length, kind: whole, or the first, a middle or the last part
        if (left := 32768 - place % 32768) < 7:  # blocks, whose last bytes no header fits into
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        part = data[place + 7 : place + 7 + length]
        started = part if kind in (1, 2) else started + part
        if kind in (1, 4):
            items = wandb_internal_pb2.Record.FromString(started).history.item
            values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}
            steps += [values] if "loss" in values else []
        place += 7 + length
    return steps


@pytest.mark.framework("torch")
def test_all_sinks_of_a_plan_get_equal_values(tmp_path, monkeypatch):
    reading = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed: nox -s sinks"
    )
    for library in ("tensorboardX", "wandb"):
        pytest.importorskip(library, reason=f"{library} is not installed: nox -s sinks")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    sinks = {"metrics": {"sinks": ["tensorboard", "wandb"], "peak_flops": 1e9}}
    run_ranks(2, run, tmp_path, {"dp_shard": 2}, 4, changed=sinks)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = logged(tmp_path / "run", 4)
    events = reading.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert len(lines) == len(steps) == 4
    for name in lines[0].keys() - {"step"}:
        expected = [(line["step"], line[name]) for line in lines if name in line]
        assert [(step["_step"], step[name]) for step in steps if name in step] == expected, name
        assert curve(events, name) == [(step, pytest.approx(value, rel=1e-6)) for step, value in expected], name
    assert '"dp_shard": 2' in events.Tensors("run/text_summary")[0].tensor_proto.string_val[0].decode()


@pytest.mark.parametrize(("kind", "extra"), [(TensorBoard, "tensorboard"), (WeightsAndBiases, "wandb")])
def test_a_library_that_is_missing_is_named(kind, extra, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    options = {"name": "x", "config": {}} if kind is WeightsAndBiases else {}
    with pytest.raises(ImportError, match=rf"pip install 'hyper-parallel\[{extra}\]'"):
        kind(tmp_path, **options)
