"""Commands that tell what a plan needs before a rank is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hp_testing import device_type
from hyper_parallel.commands import cli

pytestmark = [
    pytest.mark.framework("torch"),
    pytest.mark.skipif(device_type() != "cpu", reason="no device is used"),
]

PLAN = """
[model]
config = "LlamaConfig"
[model.overrides]
vocab_size = 64
hidden_size = 32
intermediate_size = 48
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
[mesh]
dp_shard = 2
[data]
sequence_length = 32
batch_size = 4
"""


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    return int(ended.value.code or 0)


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("plan.toml").write_text(PLAN)
    return "plan.toml"


def test_dryrun_and_fit_agree(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("dryrun", plan, "--ranks", "64", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    peak = max(each["peak"]["live"] for each in told["ranks"])
    assert (
        told["world_size"] == 64
        and sum(told["ranks"][0]["peak"]["by_kind"].values()) == told["ranks"][0]["peak"]["live"]
    )
    assert command("fit", plan, "--ranks", "64", "--memory", f"{peak}B", "--most", "8", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["value"] == 2 and found["peak"] == peak and found["beyond"][1] > peak
    assert command("fit", plan, "--memory", "1KiB", "--most", "1") == 1
    assert "too much" in capsys.readouterr().out


def test_what_can_not_be_played_is_said_in_a_line(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("dryrun", plan, "--rank", "9") == 1
    assert "rank 9 is none of 2 ranks" in capsys.readouterr().err
    assert command("tune", plan, "--ranks", "2", "--hardware", "h100") == 1
    assert "h100-8" in capsys.readouterr().err
    assert command("fit", plan, "--memory", "plenty") == 1
    assert "plenty" in capsys.readouterr().err


def test_a_probed_machine_is_one_that_plans_are_compared_with(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("probe", "--out", "own.txt") == 1
    assert "give it a name that ends in .toml" in capsys.readouterr().err
    assert command("probe", "--out", "own.toml", "--ranks", "2") == 0
    assert "own.toml is written" in capsys.readouterr().out
    assert command("dryrun", plan, "--hardware", "own.toml") == 0
    assert "has for a plan" in capsys.readouterr().out
    assert command("dryrun", plan, "--hardware", "h100") == 1
    assert "did you mean 'h100-8'" in capsys.readouterr().err


def test_train_simulates_a_rank_of_a_cluster(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    simulated = ("train", plan, "--simulate-ranks", "64")
    assert command(*simulated, "--rank", "3", "--steps", "2", "--hardware", "h100-8", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["rank"], told["world_size"], told["steps"], told["hardware"]) == (3, 64, 1, "h100-8")
    assert told["peak"] > 0 and told["measured"]["cpu"] > 0 and not Path("runs").exists()
    for option in (
        ("--resume", "auto"),
        ("--until", "3"),
        ("--out", "here"),
        ("--data", "text"),
        ("--nproc", "2"),
        ("--weights", "w.safetensors"),
        ("--debug-rank", "0"),
    ):
        assert command(*simulated, *option) == 1
        assert f"{option[0]} does not go with --simulate-ranks" in capsys.readouterr().err
    assert command("train", plan, "--rank", "3") == 1
    assert "--rank and --hardware are of --simulate-ranks" in capsys.readouterr().err
    assert command(*simulated, "--steps", "1") == 1
    assert "takes 2 steps or more" in capsys.readouterr().err
