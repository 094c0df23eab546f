# /// program
# ranks = 0
# alone = false
# reports = false
# ///
"""A rank is killed, or computes wrongly from a step on: a spare takes its place, with the losses of one process."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from hp_plan import ParallelPlan

MODEL = """
import os, signal, torch
from transformers import LlamaConfig, LlamaForCausalLM

calls = 0


def happens_to(name):
    # Tell whether this process is the one that it happens to: rank 1 in its fourth forward, and what follows.
    global calls
    calls += 1
    if calls == 4 and os.environ["RANK"] == "1" and not os.path.exists(name):
        with open(name, "w") as file:
            file.write(str(os.getpid()))
    return calls >= 4 and os.path.exists(name) and open(name).read() == str(os.getpid())


def dies(module, arguments):
    if happens_to("killed"):
        os.kill(os.getpid(), signal.SIGKILL)


def is_wrong(module, arguments, output):
    if happens_to("wrong"):
        output = output.clone()
        output.detach().view(-1).view(torch.int64)[7] ^= 1 << 51
    return output


def model(fault=""):
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    made = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    if fault == "killed":
        made.register_forward_pre_hook(dies)
    elif fault == "wrong":
        made.model.layers[1].mlp.up_proj.register_forward_hook(is_wrong)
    return made
"""
STEPS = 8
Path("declared.py").write_text(MODEL)
Path("text").write_text("the quick brown fox jumps over the lazy dog\n" * 60)


def losses(name: str, mesh: dict[str, int], *options: str, said: str = "", **sections: Any) -> list[float]:
    tables = {
        "model": {"function": "declared:model", "overrides": {"fault": name}},
        "mesh": mesh,
        "data": {"paths": ["text"], "sequence_length": 32, "batch_size": 6},
        "run": {"steps": STEPS, "dtype": "float64"},
        **sections,
    }
    Path(f"{name}.toml").write_text(ParallelPlan.from_dict(tables).to_toml())
    train = [sys.executable, "-m", "hyper_parallel", "train", f"{name}.toml", "--out", f"run-{name}", "--json"]
    done = subprocess.run([*train, *options], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
    print(done.stderr)
    assert said in done.stderr and done.stderr.count("recovered in") == bool(said)
    return [json.loads(line)["loss"] for line in Path(f"run-{name}", "metrics.jsonl").read_text().splitlines()]


alone = losses("alone", {})
killed = losses("killed", {"dp_shard": 2}, "--recover", said="rank 1 failed: killed by SIGKILL")
# Each step is computed on two ranks, and on a third one where these differ.
looks = {"replay_every": 1, "on_fault": "replace"}
wrong = losses("wrong", {"dp_shard": 3}, "--recover", said="its process ends itself", sdc=looks)
for recovered in (killed, wrong):
    assert len(recovered) == len(alone) == STEPS
    # The model's norms and its loss compute in float32, whatever its weights are.
    assert all(abs(one - other) < 1e-6 * other for one, other in zip(recovered, alone)), (recovered, alone)
