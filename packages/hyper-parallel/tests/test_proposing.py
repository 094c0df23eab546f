"""`hyper-parallel init`: plans that lint clean, and fit the memory that they are for."""

from __future__ import annotations

import dataclasses
import importlib.util
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import hp_plan
from hp_offload.extend import size
from hp_plan import ParallelPlan, PlanError, build_model, dry_run, lint
from hp_plan.extend import Estimate, Play, Proposal
from hyper_parallel.commands import cli
from hyper_parallel.commands.proposing import plan_text, proposal_of

pytestmark = pytest.mark.framework("torch")


def _sweep() -> Any:
    path = Path(__file__).parents[1] / "benchmarks" / "sweep_init.py"
    specification = importlib.util.spec_from_file_location("sweep_init", path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


SWEEP = _sweep()


def unplayed(plan: ParallelPlan) -> Any:
    raise NotImplementedError("an operator has no kernel on meta")


@pytest.mark.parametrize("family", SWEEP.FAMILIES)
def test_plans_of_families_lint_clean(family: str) -> None:
    proposal = proposal_of(family, 4, play=unplayed, assignments=SWEEP.assignments(family))
    tables = tomllib.loads(plan_text(proposal))
    assert lint(tables, 4) == () and ParallelPlan.from_dict(tables) == proposal.plan
    assert proposal.plan.mesh.dp_shard == 4 and proposal.plan.mesh.ep == (4 if "Mo" in family or "Mix" in family else 1)


@pytest.mark.thorough
@pytest.mark.parametrize("family", SWEEP.FAMILIES)
def test_plans_of_families_are_played(family: str) -> None:
    estimate = proposal_of(family, 4, play=dry_run, assignments=SWEEP.assignments(family)).estimate
    assert not estimate.unplayed and estimate.by_kind["saved"] > 0
    assert sum(number for kind, number in estimate.by_kind.items() if kind != "host") == estimate.total


def proposed(play: Play, memory: str, *more: str) -> Proposal:
    assignments = ["model.overrides.num_hidden_layers=4", *more]
    proposal = proposal_of("LlamaConfig", 8, play=play, memory=memory, assignments=assignments)
    assert memory in plan_text(proposal, memory=memory)
    return proposal


@pytest.mark.thorough
def test_memory_decides() -> None:
    """Four of Llama 7B's layers in float32."""
    best = proposed(dry_run, "64GiB")
    assert best.plan.mesh.axes == {"dp_shard": 8} and not best.plan.memory.recompute
    recomputed = proposed(dry_run, f"{best.estimate.total - 1}B")
    assert recomputed.plan.mesh.axes == {"dp_shard": 8} and recomputed.plan.memory.recompute == ("model.layers.*",)
    split = proposed(dry_run, f"{recomputed.estimate.total - 1}B")
    assert split.plan.mesh.tp > 1 and split.plan.mesh.world_size == 8
    assert best.estimate.total > recomputed.estimate.total > split.estimate.total
    given = proposed(dry_run, "64GiB", "mesh.tp=4", "mesh.dp_shard=2", "data.sequence_length=64").plan
    assert given.mesh.axes["tp"] == 4


def test_memory_that_is_too_little_or_no_size() -> None:
    with pytest.raises(PlanError, match=r"8 ranks of 1 GiB can't train the model: weights, .* alone take 1\.\d+ GiB"):
        proposed(unplayed, "1GiB")
    with pytest.raises(PlanError, match=r"--memory: .*; write for example --memory 64GiB"):
        proposed(unplayed, "a lot")


def test_the_file_says_what_a_rank_needs_or_why_that_is_not_known() -> None:
    overrides = [*SWEEP.assignments("LlamaConfig"), "fsdp.offload=true"]
    known = proposal_of("LlamaConfig", 2, play=unplayed, assignments=overrides)
    head = plan_text(known, memory="1GiB").partition("\n\n")[0].replace("\n# ", " ")
    assert "of 1GiB on each of 2 ranks for weights, gradients and optimizer states, counted from shapes" in head
    assert "can't be played without memory. an operator has no kernel on meta" in head
    played = Estimate(3 * 2**20, {"weights": 2**20, "saved": 2**21, "temporary": 0, "host": 2**30})
    text = plan_text(dataclasses.replace(known, estimate=played))
    told = "3 MiB at the peak of a step, on the fullest of 2 ranks: weights 1 MiB, saved 2 MiB, and 1 GiB of the host's"
    assert told in text.replace("\n# ", " ")
    assert all(line.startswith("# ") for line in text.partition("\n\n")[0].splitlines())
    assert ParallelPlan.from_dict(tomllib.loads(text)) == known.plan


def test_the_command(tmp_path, monkeypatch):
    small = {key: value for key, value in SWEEP.FAMILIES["LlamaConfig"].items() if key != "max_position_embeddings"}
    model = build_model(ParallelPlan.from_dict({"model": {"config": "LlamaConfig", "overrides": small}}))
    model.save_pretrained(tmp_path / "model")
    out = tmp_path / "plan.toml"
    arguments = ["init", "--model", str(tmp_path / "model"), "--ranks", "2", "--out", str(out)]
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 0 and "is written; next: hyper-parallel lint" in done.output
    assert "data.paths or train --data names other text" in out.read_text()
    peak = size(dry_run(ParallelPlan.from_toml(out)).peak)
    assert out.read_text().startswith(f"# {peak} at the peak of a step, on the fullest of 2 ranks: weights ")
    assert "lr = 2e-05" in out.read_text()
    monkeypatch.setattr(hp_plan, "dry_run", unplayed)
    assert CliRunner().invoke(cli.app, ["lint", str(out)]).exit_code == 0
    assert tomllib.loads(out.read_text())["model"]["path"] == str(tmp_path / "model")
    again = CliRunner().invoke(cli.app, arguments)
    assert again.exit_code == 1 and "exists; remove it" in again.output
    unknown = CliRunner().invoke(cli.app, ["init", "--model", "LamaConfig", "--ranks", "2"])
    assert unknown.exit_code == 1 and "LlamaConfig" in unknown.output
    nothing = CliRunner().invoke(cli.app, ["init", "--model", "llama", "--ranks", "2"])
    assert nothing.exit_code == 1 and "'llama' is no folder here" in nothing.output
    with pytest.raises(PlanError, match="give a folder with a config.json, or such as LlamaConfig"):
        proposal_of("llama", 2, play=unplayed)
    assert proposal_of("LlamaConfig", 2, play=unplayed).plan.mesh.world_size == 2
    assert CliRunner().invoke(cli.app, [*arguments[:-1], str(tmp_path / "another.toml")]).exit_code == 0
    monkeypatch.chdir(tmp_path)
    Path("plans").mkdir()
    for name, path in (("own.toml", "model"), ("plans/there.toml", "../model")):
        done = CliRunner().invoke(cli.app, ["init", "--model", "model", "--ranks", "2", "--out", name])
        assert done.exit_code == 0, done.output
        assert tomllib.loads(Path(name).read_text())["model"]["path"] == path
        assert CliRunner().invoke(cli.app, ["lint", name]).exit_code == 0
