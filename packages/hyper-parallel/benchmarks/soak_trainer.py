"""Ten thousand steps of a run, with checkpoints and validation: memory, files and threads stay flat, no line is lost.

A second run is killed by SIGKILL: its metrics.jsonl has whole lines only, one for each step. Linux.

python packages/hyper-parallel/benchmarks/soak_trainer.py [--steps N]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PLAN = """
[model]
function = "tiny:model"
[fsdp]
groups = ["hidden"]
[data]
paths = ["text"]
sequence_length = 16
batch_size = 4
[validation]
paths = ["text"]
every = 250
batches = 2
[run]
steps = {steps}
checkpoint_every = 500
"""
MODEL = """
from torch import nn

class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(256, 16), nn.Linear(16, 16), nn.Linear(16, 256)

    def forward(self, input_ids, labels):
        logits = self.head(self.hidden(self.embed(input_ids[:, :-1])).relu())
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())}

def model():
    return Tiny()
"""


def start(folder: Path, out: str) -> subprocess.Popen[bytes]:
    """Start a run of one rank, which is the process itself."""
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    environment = {**os.environ, **rank, "PYTHONPATH": os.pathsep.join(sys.path), "HYPER_PARALLEL_DEVICE": "cpu"}
    command = [sys.executable, "-m", "hyper_parallel", "train", "plan.toml", "--out", out, "--json"]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL)


def steps_of(path: Path) -> int:
    """Count the lines of a metrics file."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def state(process: int) -> tuple[int, int, int]:
    """Return the resident KiB, open files and threads of a process."""
    status = Path(f"/proc/{process}/status").read_text()
    values = dict(line.split(":", 1) for line in status.splitlines())
    files = len(os.listdir(f"/proc/{process}/fd"))
    return int(values["VmRSS"].split()[0]), files, int(values["Threads"])


def whole(path: Path) -> list[int]:
    """Return the steps of a metrics file, every line of which is whole."""
    text = path.read_text()
    assert text.endswith("\n"), "the last line is half"
    return [json.loads(line)["step"] for line in text.splitlines()]


def watch(folder: Path, steps: int) -> None:
    """Follow a run to its end, and compare what it takes after a fifth of it with what it takes at its end."""
    process, seen = start(folder, "whole"), []
    marks = [steps * part // 10 for part in (2, 4, 6, 8)] + [steps - 100]
    while marks and process.poll() is None:
        if steps_of(folder / "whole" / "metrics.jsonl") >= marks[0]:
            seen.append((marks.pop(0), *state(process.pid)))
            print("after {} steps: {} KiB, {} files, {} threads".format(*seen[-1]), flush=True)
        time.sleep(0.05)
    assert process.wait() == 0
    assert whole(folder / "whole" / "metrics.jsonl") == list(range(1, steps + 1))
    (_, memory, files, threads), (_, last_memory, last_files, last_threads) = seen[0], seen[-1]
    assert last_memory < memory * 1.02 + 1024, "memory grew"
    # A checkpoint may be under way at one of them.
    assert abs(last_files - files) <= 8 and abs(last_threads - threads) <= 2, "files or threads grew"


def kill(folder: Path, after: int) -> None:
    """Kill a run, and look at its lines."""
    process = start(folder, "killed")
    while steps_of(folder / "killed" / "metrics.jsonl") < after:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    steps = whole(folder / "killed" / "metrics.jsonl")
    assert steps == list(range(1, len(steps) + 1))
    print(f"killed after {len(steps)} steps: every line is whole")


def main(steps: int) -> None:
    """Run both."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "plan.toml").write_text(PLAN.format(steps=steps))
        (folder / "tiny.py").write_text(MODEL)
        (folder / "text").write_bytes(bytes(place * place % 251 for place in range(100_000)))
        watch(folder, steps)
        kill(folder, steps // 10)
    print(f"flat over {steps} steps")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    main(parser.parse_args().steps)
