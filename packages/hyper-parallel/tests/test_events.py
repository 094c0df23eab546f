from __future__ import annotations

import contextlib

from hyper_parallel.events import EventReader, EventWriter, Tail
from hyper_parallel.output import Step, Summary

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
