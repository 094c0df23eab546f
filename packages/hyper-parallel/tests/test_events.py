from __future__ import annotations

import contextlib

import pytest
from launched_commands import PLAN
from terminal import in_terminal, screen

from hyper_parallel.reports.events import EventReader, EventWriter, Tail
from hyper_parallel.reports.output import Step, Summary

STEPS = [Step(i, 5.0 / i, 1.25, 1e-3, 12345.6, 300 << 20, 0.5) for i in (1, 2)]
SUMMARY = Summary(2, 5.0, 2.5, 1000, 20.0, (300 << 20, 200 << 20), "runs/x", "runs/x/checkpoint", None)


class Recorder:
    def __init__(self):
        self.seen = []

    @contextlib.contextmanager
    def running(self, title, *, steps):
        self.seen.append((title, steps))
        yield
        self.seen.append("over")

    def step(self, step):
        self.seen.append(step)

    def finished(self, summary):
        self.seen.append(summary)


def test_a_run_is_shown_by_another_process_as_by_its_own(tmp_path):
    recorder = Recorder()
    with EventReader(tmp_path / "events", recorder) as reader:
        reader.poll()
        assert recorder.seen == []
        writer = EventWriter(tmp_path / "events")
        with writer.running("a model", steps=2):
            for step in STEPS:
                writer.step(step)
                reader.poll()
                assert recorder.seen[-1] == step
        writer.finished(SUMMARY)
        reader.poll()
    assert recorder.seen == [("a model", 2), *STEPS, "over", SUMMARY]


def test_a_file_is_read_as_it_grows(tmp_path):
    tail = Tail(tmp_path / "output")
    assert tail.read() == ""
    with open(tmp_path / "output", "wb", buffering=0) as file:
        seen = []
        for part in (b"one\nt", b"wo \xc3", b"\xa4\n"):
            file.write(part)
            seen.append(tail.read())
    assert seen == ["one\nt", "wo ", "ä\n"]
    assert tail.read() == ""


def test_half_a_line_waits_for_its_end_and_the_display_is_closed_whatever_happens(tmp_path):
    recorder = Recorder()
    with contextlib.suppress(KeyboardInterrupt), EventReader(tmp_path / "events", recorder) as reader:
        with open(tmp_path / "events", "w") as file:
            file.write('{"running": {"title": "a model", ')
            file.flush()
            reader.poll()
            assert recorder.seen == []
            file.write('"steps": 2}}\n')
            file.flush()
        reader.poll()
        raise KeyboardInterrupt
    assert recorder.seen == [("a model", 2), "over"]


LOUD = """
import os
import torch
from hp_platform import get_platform
from torch import nn

class Loud(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head, self.calls = nn.Embedding(256, 9), nn.Linear(9, 256), 0

    def forward(self, input_ids, labels):
        self.calls += 1
        os.write(2, f"native line {self.calls} of rank {get_platform().groups.rank()}\\n".encode())
        print("printed", self.calls, flush=True)
        logits = self.head(self.embed(input_ids[:, :-1]))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())}
"""


@pytest.mark.framework("torch")
@pytest.mark.not_on("torch-npu-sim", reason="starts its own ranks; nothing of the device in it")
def test_what_ranks_write_by_themselves_stands_above_the_live_table(tmp_path):
    plan = PLAN.replace("bigram:bigram", "loud:Loud").replace("[model.overrides]", "")
    for name, text in (("loud.py", LOUD), ("plan.toml", plan), ("text", "to be or not to be, " * 20)):
        (tmp_path / name).write_text(text)
    command = ("-m", "hyper_parallel", "train", "plan.toml", "--data", "text", "--out", "run")
    with in_terminal(*command, folder=tmp_path) as (terminal, process):
        terminal.rest()
        assert process.wait() == 0, terminal.raw
    lines = screen(terminal.raw)
    assert lines[0] == "starting 2 ranks"
    table = next(number for number, line in enumerate(lines) if line.split()[:3] == ["step", "loss", "grad"])
    assert [line.split()[0] for line in lines[table + 1 : table + 5]] == ["1", "2", "3", "4"], "\n".join(lines)
    for call in range(1, 5):
        assert lines.count(f"printed {call}") == 2, "\n".join(lines)
        for rank in range(2):
            assert lines.count(f"native line {call} of rank {rank}") == 1, "\n".join(lines)
    assert not any("native" in line for line in lines[table:]), "\n".join(lines)
