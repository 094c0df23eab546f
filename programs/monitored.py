# /// program
# ranks = 2
# tolerance = 1e-6  # the model's norms and loss compute in float32
# constant = false  # three models, one after the other
# ///
"""Two monitored runs of a plan and one with another seed, compared reading by reading."""

from pathlib import Path

from hp_plan import ParallelPlan, compare_readings
from hp_platform import destroy_process_group, init_process_group
from hyper_parallel.run import Run
from reporting import ALONE, RANK, report_step, report_weights

sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
text = Path(f"text-{RANK}.txt")
text.write_text("the quick brown fox jumps over the lazy dog\n" * 60)


def plan(seed: int) -> ParallelPlan:
    return ParallelPlan.from_dict(
        {
            "model": {
                "config": "LlamaConfig",
                "overrides": {**sizes, "num_attention_heads": 4, "num_key_value_heads": 2},
            },
            "mesh": {} if ALONE else {"dp_shard": 2},
            "data": {"paths": [str(text)], "sequence_length": 32, "batch_size": 4},
            "run": {"steps": 4, "dtype": "float64", "seed": seed},
            "monitor": {"every": 1, "phases": ["loss", "forward", "backward", "gradient"], "numbers": ["norm", "bits"]},
        }
    )


def train(name: str, seed: int) -> None:
    Path("runs", name).mkdir(parents=True, exist_ok=True)
    with Run(plan(seed), Path("runs", name)) as run:
        for step in run.steps():
            report_step(step.loss)
    if name == "first":
        report_weights(run.trainer.model)


init_process_group()
for name, seed in {"first": 0, "again": 0, "other": 1}.items():
    train(name, seed)

equal, other = compare_readings("runs/first", "runs/again"), compare_readings("runs/first", "runs/other")
assert equal.first is None and equal.by == "bits", equal.first
assert other.first is not None and other.first.step == 1 and other.first.name == "model.embed_tokens", other.first
destroy_process_group()
