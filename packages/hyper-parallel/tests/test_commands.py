"""Every command once, on what those before it have written."""

from __future__ import annotations

import json
import sys

import pytest
from command_process import CommandProcess, program
from launched_commands import LIMIT, end, start

SIZES = {
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
RUN = {"run.steps": 4, "run.checkpoint_every": 2, "schedule.warmup_steps": 1, "data.sequence_length": 16}


def settings(values: dict[str, int]) -> list[str]:
    return [argument for name, value in values.items() for argument in ("--set", f"{name}={value}")]


@pytest.mark.smoke
@pytest.mark.framework("torch")
@pytest.mark.not_on("torch-npu-sim", reason="starts its own ranks; nothing of the device in it")
def test_from_no_plan_to_a_page(tmp_path):
    process = start(tmp_path, sys.executable, "-c", program(""))
    commands = CommandProcess(process, tmp_path)

    def command(*arguments: str) -> str:
        commands.begin(*arguments)
        status, out, err = commands.finish(LIMIT)
        assert status == 0, f"{arguments}: {err}"
        return out

    (tmp_path / "text").write_text("To be, or not to be, that is the question. " * 40)
    try:
        assert json.loads(command("schema"))["properties"]
        command("doctor", "--json")
        sizes = {f"model.overrides.{name}": size for name, size in SIZES.items()}
        command("init", "--model", "LlamaConfig", "--ranks", "2", "--out", "plan.toml", *settings({**sizes, **RUN}))
        assert "nothing wrong was found" in command("lint", "plan.toml", "--set", 'data.paths=["text"]')
        assert "run.steps" in command("show", "plan.toml")
        assert "#SBATCH --nodes=2" in command("slurm", "plan.toml", "--nodes", "2", "--gpus-per-node", "0")
        assert json.loads(command("verify", "plan.toml", "--json"))["passed"]

        command("data", "prepare", "text", "--out", "tokens")
        data = 'data.paths=["tokens.bin"]'
        assert "To be, or not to be" in command("data", "show", "plan.toml", "--set", data)
        command("train", "plan.toml", "--out", "run", "--until", "2", "--json", "--set", data)
        lines = [
            *map(
                json.loads,
                command("train", "plan.toml", "--out", "run", "--resume", "auto", "--json", "--set", data).splitlines(),
            )
        ]
        assert [line["step"] for line in lines if "loss" in line] == [3, 4]
        evaluated = json.loads(command("evaluate", "plan.toml", "run", "--data", "tokens.bin", "--json"))
        assert evaluated["loss"] < 6

        assert json.loads(command("checkpoint", "inspect", "run", "--json"))["step"] == 4
        command("checkpoint", "verify", "run")
        command("checkpoint", "convert", "run", "model")
        command("checkpoint", "prune", "run", "--last", "1")
        command("report", "run")
        assert "<svg" in (tmp_path / "run" / "report.html").read_text()
        assert "bubble" in command("schedule", "plan.toml", "--set", "mesh.pp=2", "--set", "mesh.dp_shard=1")
    finally:
        end(process)
