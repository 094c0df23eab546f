# /// program
# ranks = 0
# alone = false
# reports = false
# ///
"""A rank is killed, a spare takes its place, and the losses are those of one process that nothing happened to."""

import json
import subprocess
import sys
from pathlib import Path

from hp_plan import ParallelPlan

MODEL = """
import os, signal
from transformers import LlamaConfig, LlamaForCausalLM

calls = 0


def dies(module, arguments):
    global calls
    calls += 1
    if calls == 4 and os.environ["RANK"] == "1" and not os.path.exists("died"):
        open("died", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)


def model(fatal=False):
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    made = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    if fatal:
        made.register_forward_pre_hook(dies)
    return made
"""
STEPS = 8
Path("declared.py").write_text(MODEL)
Path("text").write_text("the quick brown fox jumps over the lazy dog\n" * 60)


def losses(name: str, mesh: dict[str, int], *options: str) -> list[float]:
    tables = {
        "model": {"function": "declared:model", "overrides": {"fatal": True} if mesh else {}},
        "mesh": mesh,
        "data": {"paths": ["text"], "sequence_length": 32, "batch_size": 4},
        "run": {"steps": STEPS, "dtype": "float64"},
    }
    Path(f"{name}.toml").write_text(ParallelPlan.from_dict(tables).to_toml())
    train = [sys.executable, "-m", "hyper_parallel", "train", f"{name}.toml", "--out", name, "--json", *options]
    done = subprocess.run(train, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
    print(done.stderr)
    assert ("rank 1 failed: killed by SIGKILL" in done.stderr) == ("--recover" in options)
    return [json.loads(line)["loss"] for line in Path(name, "metrics.jsonl").read_text().splitlines()]


recovered, alone = losses("recovered", {"dp_shard": 2}, "--recover"), losses("alone", {})
assert Path("died").exists()
assert len(recovered) == len(alone) == STEPS
# The model's norms and its loss compute in float32, whatever its weights are.
assert all(abs(one - other) < 1e-6 * other for one, other in zip(recovered, alone)), (recovered, alone)
