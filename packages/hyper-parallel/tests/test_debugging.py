"""A terminal for one rank: `hp_platform.breakpoint()` under torchrun, and `train --debug-rank`."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from terminal import PROMPT, in_terminal

pytestmark = [
    pytest.mark.framework("torch"),
    pytest.mark.not_on("torch-npu-sim", reason="starts its own ranks; nothing of the device in it"),
]

SCRIPT = """
import torch
import hp_platform
from hp_platform import get_platform

hp_platform.init_process_group()
groups = get_platform().groups
number = 20 + groups.rank()
hp_platform.breakpoint(1)
number = number + 1
total = torch.tensor(number)
get_platform().collectives.all_reduce(total, group=groups.default_group())
print("total", total.item(), flush=True)
hp_platform.destroy_process_group()
"""


def test_one_rank_is_debugged_while_the_others_wait(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py")
    with in_terminal(*torchrun, folder=tmp_path) as (terminal, process):
        assert "rank 1 of 2; the others wait" in terminal.until(PROMPT)
        assert "'number is', 21" in terminal.say("p 'number is', number")
        terminal.say("number = 100")
        assert "number = number + 1" in terminal.say("next")
        terminal.say("next")
        assert "\n101\n" in terminal.say("p number")
        terminal.give("continue")
        shown = terminal.rest()
        assert process.wait() == 0 and shown.count("122") == 2, shown


MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head, self.calls = nn.Embedding(256, 9), nn.Linear(9, 256), 0

    def forward(self, input_ids, labels):
        self.calls += 1
        if self.calls == 2:
            breakpoint()
        if self.calls == 3:
            raise LookupError("the third call")
        logits = self.head(self.embed(input_ids[:, :-1]))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())}
"""
PLAN = """
[model]
function = "own:Model"
[mesh]
dp_shard = 2
[data]
sequence_length = 16
batch_size = 8
paths = ["text"]
[run]
steps = 4
hang_after = 1.0
"""


def test_train_gives_a_rank_the_terminal(tmp_path):
    for name, text in (("own.py", MODEL), ("plan.toml", PLAN), ("text", "to be or not to be, " * 20)):
        (tmp_path / name).write_text(text)
    command = ("-m", "hyper_parallel", "train", "plan.toml", "--out", "run", "--debug-rank", "1")
    with in_terminal(*command, folder=tmp_path) as (terminal, process):
        assert "rank 1 of 2; the others go on" in terminal.until(PROMPT)
        assert "\n2\n" in terminal.say("p self.calls")
        terminal.say("import time; time.sleep(3)")  # longer than run.hang_after
        terminal.give("continue")
        assert re.search(r"LookupError: the third call\s+rank 1 of 2 has failed", terminal.until(PROMPT))
        assert "\n3\n" in terminal.say("p self.calls")
        terminal.give("quit")
        assert "the third call" in terminal.rest()
        assert process.wait() == 1


def test_a_rank_that_there_is_not(tmp_path):
    (tmp_path / "own.py").write_text(MODEL)
    (tmp_path / "plan.toml").write_text(PLAN)
    command = (sys.executable, "-m", "hyper_parallel", "train", "plan.toml", "--debug-rank", "2")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == "error: --debug-rank 2: the 2 ranks are 0 to 1\n"
