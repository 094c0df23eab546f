# /// program
# ranks = 3
# tolerance = 1e-5  # the model's norms and loss compute in float32
# ///
"""A bit flips in what one of three ranks computes: the step is computed again, and trains as if nothing had been."""

import json
from pathlib import Path

import torch

from hp_plan import ParallelPlan
from hp_platform import destroy_process_group, init_process_group
from hyper_parallel.run import Run
from reporting import ALONE, RANK, report_step, report_weights

sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
text = Path(f"text-{RANK}.txt")
text.write_text("the quick brown fox jumps over the lazy dog\n" * 60)
plan = ParallelPlan.from_dict(
    {
        "model": {"config": "LlamaConfig", "overrides": {**sizes, "num_attention_heads": 4, "num_key_value_heads": 2}},
        "mesh": {} if ALONE else {"dp_shard": 3},
        "data": {"paths": [str(text)], "sequence_length": 32, "batch_size": 6},
        "run": {"steps": 4, "dtype": "float64"},
        "sdc": {} if ALONE else {"replay_every": 2},
    }
)
calls = [0]


def flip_once(module: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor | None:
    """Flip a bit on rank 1 in its own part of step 3, after two computations of step 1, one of 2 and one of 3."""
    calls[0] += 1
    if ALONE or RANK != 1 or calls[0] != 5:
        return None
    wrong = output.clone()
    wrong.view(-1).view(torch.int64)[7] ^= 1 << 51
    return wrong


init_process_group()
Path("run").mkdir(exist_ok=True)
with Run(plan, Path("run")) as run:
    run.trainer.model.model.layers[1].mlp.up_proj.register_forward_hook(flip_once)
    for step in run.steps():
        report_step(step.loss)
report_weights(run.trainer.model)

if not ALONE:
    (found,) = [json.loads(line) for line in Path("run/corruptions.jsonl").read_text().splitlines()]
    assert (found["step"], found["ranks"], found["name"], found["verdict"]) == (
        3,
        [1],
        "forward model.layers.1.mlp.down_proj",  # the module after the hook, which is code between modules
        "transient",
    ), found
destroy_process_group()
