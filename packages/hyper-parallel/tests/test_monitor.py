"""Runs with `[monitor]`: what they write, where two of them differ, and where a NaN is born."""

from __future__ import annotations

import json
import math
import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from small_runs import EXPERTS, TABLES, losses, run
from typer.testing import CliRunner

from hp_dtensor.torch.extend import local_view
from hp_plan import compare_readings, lint, read_readings
from hp_platform import get_platform
from hp_testing import RankError, run_ranks
from hyper_parallel.commands.cli import app
from hyper_parallel.supervision.run_end import DivergedError
from hyper_parallel.torch.trainer import Trainer

PHASES = ["loss", "forward", "backward", "gradient", "moment", "weight"]
FULL = {"every": 1, "phases": PHASES, "numbers": ["norm", "range", "zeros", "bits"]}
thorough = pytest.mark.thorough


def train(folder, mesh, *, monitor=FULL, steps=3, model=None, **changed):
    folder.mkdir()
    run_ranks(math.prod(mesh.values()), run, folder, mesh, steps, model, changed={"monitor": monitor, **changed})
    return folder / "run"


MESHES = [{}, {"dp_shard": 2}, {"tp": 2}, {"pp": 2}]
MORE = [{"dp_replicate": 2}, {"cp": 2}, {"dp_shard": 2, "tp": 2}, {"dp_shard": 2, "pp": 2}]


@pytest.mark.parametrize("mesh", [*MESHES, *(pytest.param(each, marks=thorough) for each in MORE)], ids=str)
def test_readings_make_up_the_metrics(tmp_path, mesh):
    folder = train(tmp_path / "a", mesh)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    ranks = read_readings(folder)
    assert sorted(ranks) == list(range(math.prod(mesh.values())))
    for step in steps:
        squares, own = [], []
        for readings in ranks.values():
            for reading, record in zip(readings, readings.records, strict=True):
                if reading.step == step["step"] and reading.phase == "gradient" and record["flags"] & 1:
                    squares.append(reading.norm**2)
                if reading.step == step["step"] and reading.phase == "loss":
                    own.append(reading.low)
        assert math.sqrt(math.fsum(squares)) == pytest.approx(step["grad_norm"], rel=1e-12)
        assert sum(own) / len(own) == pytest.approx(step["loss"], rel=1e-12)
        assert (step["lowest_loss"], step["highest_loss"]) == (min(own), max(own))


@pytest.mark.parametrize("mesh", MESHES[1:], ids=str)
def test_reading_changes_nothing(tmp_path, mesh):
    train(tmp_path / "read", mesh)
    train(tmp_path / "off", mesh, monitor={})
    assert losses(tmp_path / "read") == losses(tmp_path / "off")
    assert not list((tmp_path / "off" / "run").glob("readings*"))


def test_layouts_do_not_diverge(tmp_path):
    one = train(tmp_path / "one", {})
    for number, mesh in enumerate([*MESHES[1:], *MORE[:2]]):
        comparison = compare_readings(one, train(tmp_path / str(number), mesh))
        assert comparison.first is None, str(comparison.first)
        assert comparison.readings > 400 and comparison.by == "norms"


def test_deterministic_runs_have_the_same_bits_on_any_number_of_ranks(tmp_path):
    changed = {"deterministic": True, "batch_size": 4}
    two = train(tmp_path / "two", {"dp_shard": 2}, accumulate=2, **changed)
    four = train(tmp_path / "four", {"dp_shard": 4}, **changed)
    comparison = compare_readings(two, four)
    assert comparison.first is None, str(comparison.first)
    assert comparison.by == "bits" and comparison.steps == 3


@dataclass(frozen=True)
class Plant:
    """Something that goes wrong: on a rank, in a step, in what a module returns or in the gradient of that."""

    step: int
    rank: int
    name: str
    phase: str
    value: float | None = None  # None adds a unit in the last place


def spoil(tensor, value):
    flat = local_view(tensor).view(-1)
    at = flat.abs().argmax() if value is None else len(flat) // 2
    flat[at] = torch.nextafter(flat[at], torch.tensor(math.inf, dtype=flat.dtype)) if value is None else value


def spoiled(gradient, value):
    gradient = gradient.clone(memory_format=torch.contiguous_format)
    spoil(gradient, value)
    return gradient


def spoiling(plant: Plant, forward):
    """A forward with a fault on a rank; the others have the same graph."""
    here = plant.rank == get_platform().groups.rank()

    def run(*args, **kwargs):
        tensor = forward(*args, **kwargs)
        if not torch.is_grad_enabled():
            return tensor
        changed = tensor.clone(memory_format=torch.contiguous_format)
        if plant.phase == "backward":
            changed.register_hook(lambda gradient: spoiled(gradient, plant.value) if here else None)
        elif here:
            spoil(changed, plant.value)
        return changed

    return run


@contextmanager
def planted(plant: Plant | None) -> Iterator[None]:
    gradients, done = Trainer._backward, [0]

    def with_fault(self, rows, begins):
        done[0] += 1
        here = plant is not None and done[0] >= plant.step
        stages = getattr(self.model, "stages", {0: self.model}) if here else {}
        modules = {name: module for stage in stages.values() for name, module in stage.named_modules()}
        module = modules.get(plant.name) if plant is not None else None
        if module is None:
            return gradients(self, rows, begins)
        with mock.patch.object(module, "forward", spoiling(plant, module.forward)):
            return gradients(self, rows, begins)

    with mock.patch.object(Trainer, "_backward", with_fault):
        yield


def run_planted(folder, mesh, plants, model, changed):
    """Train once for each plant; of a NaN, write what the run ends with."""
    for number, plant in enumerate(plants):
        own = folder / str(number)
        own.mkdir(exist_ok=True)
        with planted(plant):
            try:
                run(own, mesh, 2, model, changed=changed)
            except DivergedError as error:
                (own / f"error-{get_platform().groups.rank()}").write_text(str(error))


LAYERS = [f"model.layers.{layer}." for layer in (0, 1)]
LEAVES = ["self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj", "mlp.up_proj", "post_attention_layernorm"]

SPARSE = {"forward": ["mlp.experts"], "backward": ["self_attn.o_proj", "mlp.experts", "input_layernorm"]}


def plants(ranks, count, seed, value=None, *, stage=False, sparse=False):
    drawn, chosen = random.Random(seed), []
    for number in range(count):
        rank = drawn.randrange(ranks)
        layer = LAYERS[rank if stage else drawn.randrange(2)]
        phase = ("forward", "backward")[number % 2]
        if sparse and phase == "forward":  # no router after it, which refuses a NaN itself
            layer = LAYERS[1]
        chosen.append(
            Plant(1 + number % 2, rank, layer + drawn.choice(SPARSE[phase] if sparse else LEAVES), phase, value)
        )
    return chosen


ULPS = [({"dp_shard": 2}, 3), pytest.param({"dp_shard": 2}, 25, marks=thorough)]
ULPS += [pytest.param({"tp": 2}, 13, marks=thorough), pytest.param({"pp": 2}, 12, marks=thorough)]


@pytest.mark.parametrize(("mesh", "count"), ULPS, ids=str)
def test_a_difference_of_one_unit_in_the_last_place_is_named(tmp_path, mesh, count):
    wrong = plants(2, count, count, stage="pp" in mesh)
    equal = 1 if count == 3 else 4
    run_ranks(2, run_planted, tmp_path, mesh, [*[None] * (1 + equal), *wrong], None, {"monitor": FULL})
    for number in range(1, 1 + equal):
        comparison = compare_readings(tmp_path / "0/run", tmp_path / f"{number}/run")
        assert comparison.first is None and comparison.by == "bits"
    for number, plant in enumerate(wrong, 1 + equal):
        first = compare_readings(tmp_path / "0/run", tmp_path / f"{number}/run").first
        assert first is not None, plant
        assert (first.step, first.phase, first.name, first.rank) == (plant.step, plant.phase, plant.name, plant.rank)


NANS = [({"dp_shard": 2}, 3, {}), ({"tp": 2}, 2, {}), ({"pp": 2}, 4, {})]
NANS += [({"dp_shard": 2, "ep": 2}, 2, {})]
NANS += [({"dp_shard": 2}, 2, {"memory": {"recompute": ["model.layers.*"]}})]
MANY = [(mesh, 14, changed) for mesh, _, changed in NANS]


@pytest.mark.parametrize(
    ("mesh", "count", "changed"), [*NANS, *(pytest.param(*each, marks=thorough) for each in MANY)], ids=str
)
def test_the_birth_of_a_nan_is_named(tmp_path, mesh, count, changed):
    sparse = "ep" in mesh
    wrong = plants(2, count, count, math.nan if count % 2 else math.inf, stage="pp" in mesh, sparse=sparse)
    monitor = {"every": 1, "phases": ["gradient"]}
    run_ranks(2, run_planted, tmp_path, mesh, wrong, EXPERTS if sparse else None, {"monitor": monitor, **changed})
    for number, plant in enumerate(wrong):
        texts = {path.read_text() for path in (tmp_path / str(number)).glob("error-*")}
        assert len(texts) == 1, (plant, texts)
        text = texts.pop()
        assert f" of step {plant.step} " in text and f"{plant.phase} of {plant.name} on rank {plant.rank}" in text, (
            plant,
            text,
        )


def hooks(folder, mesh, monitor):
    """Count the hooks that a step has, on modules and on what they return."""
    counted = []

    def count(self, rows, begins):
        modules = list(self.model.modules())
        counted.append(sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in modules))
        return original(self, rows, begins)

    original = Trainer._backward
    with mock.patch.object(Trainer, "_backward", count):
        run(folder, mesh, 3, changed={"monitor": monitor})
    (folder / "hooks").write_text(json.dumps(counted))


def test_steps_that_are_not_read_have_no_hooks(tmp_path):
    found = {}
    for name, monitor in {"off": {}, "second": {"every": 2, "phases": ["forward"]}, "gradients": {"every": 1}}.items():
        (tmp_path / name).mkdir()
        run_ranks(1, hooks, tmp_path / name, {}, monitor)
        found[name] = json.loads((tmp_path / name / "hooks").read_text())
    assert found["gradients"] == found["off"]
    assert found["second"][1] == found["off"][1]
    assert found["second"][0] == found["second"][2] > found["off"][0]
    steps = read_readings(tmp_path / "second" / "run")[0].records["step"]
    assert set(steps.tolist()) == {1, 3}


def end_by_kill(folder):
    def kill(self):
        if len(done) == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        done.append(1)
        update(self)

    update, done = Trainer.update, []
    with mock.patch.object(Trainer, "update", kill):
        run(folder, {}, 9, changed={"monitor": FULL})


def test_readings_are_whole_after_a_kill(tmp_path):
    whole, killed = train(tmp_path / "whole", {}, steps=9), tmp_path / "killed"
    killed.mkdir()
    with pytest.raises(RankError, match="SIGKILL|killed|-9"):
        run_ranks(1, end_by_kill, killed)
    own = read_readings(killed / "run")[0]
    steps = own.records["step"].tolist()
    assert sorted(set(steps)) == [1, 2, 3, 4]  # the fifth's were on their way, one step late
    expected = [reading for reading in read_readings(whole)[0] if reading.step <= 4]
    assert list(own) == expected
    path = killed / "run" / "readings-0.bin"
    path.write_bytes(path.read_bytes()[:-100])  # as if the last write had been cut off
    assert set(read_readings(killed / "run")[0].records["step"].tolist()) == {1, 2, 3}


def resumed(folder, mesh):
    changed = {"monitor": FULL}
    run(folder, mesh, 4, changed=changed, until=3)
    run(folder, mesh, 4, changed=changed, resume="auto")


def test_a_run_that_goes_on_goes_on_reading(tmp_path):
    whole = train(tmp_path / "whole", {"dp_shard": 2}, steps=4)
    (tmp_path / "two").mkdir()
    run_ranks(2, resumed, tmp_path / "two", {"dp_shard": 2})
    assert list(read_readings(tmp_path / "two" / "run")[1]) == list(read_readings(whole)[1])


COMPILED = {"compile": {"blocks": ["model.layers.*"], "backend": "eager"}}
UNITED = [COMPILED, {"memory": {"recompute": ["model.layers.*"]}}]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks at it
@pytest.mark.parametrize("changed", UNITED, ids=str)
def test_what_changes_how_blocks_run_changes_no_reading(tmp_path, changed):
    changed = {"dtype": "float32", **changed}
    plain = train(tmp_path / "plain", {"dp_shard": 2}, dtype="float32")
    other = train(tmp_path / "other", {"dp_shard": 2}, **changed)
    comparison = compare_readings(plain, other)
    names = {each.name for each in read_readings(other)[0]}
    if "compile" in changed:
        assert "model.layers.0" in names and "model.layers.0.mlp.up_proj" not in names
        assert all(each.kind == "missing" for each in comparison.largest)
        named = {"every": 1, "phases": PHASES, "names": ["model.layers.*"], "numbers": ["norm", "bits"]}
        (tmp_path / "named").mkdir()
        plain = train(tmp_path / "named" / "plain", {"dp_shard": 2}, monitor=named, dtype="float32")
        comparison = compare_readings(plain, train(tmp_path / "named" / "x", {"dp_shard": 2}, monitor=named, **changed))
    assert comparison.first is None, str(comparison.first)


def test_commands_show_and_compare_runs(tmp_path):
    runs = [str(train(tmp_path / name, {}, seed=seed)) for name, seed in (("a", 0), ("b", 0), ("c", 1))]
    picture = tmp_path / "norms.png"
    command = CliRunner().invoke(
        app, ["monitor", "show", runs[0], "--name", "*.down_proj.weight", "--png", str(picture)]
    )
    assert command.exit_code == 0 and "model.layers.1.mlp." in command.output, command.output
    assert "up_proj" not in command.output and picture.read_bytes().startswith(b"\x89PNG")
    command = CliRunner().invoke(app, ["monitor", "show", runs[0], "--phase", "loss", "--json"])
    assert json.loads(command.output)["steps"] == [1, 2, 3]
    command = CliRunner().invoke(app, ["monitor", "compare", *runs[:2]])
    assert command.exit_code == 0 and "by bits\nequal" in command.output, command.output
    command = CliRunner().invoke(app, ["monitor", "compare", runs[0], runs[2], "--tolerance", "1e-9", "--json"])
    result = json.loads(command.output)
    assert command.exit_code == 1 and result["first"]["name"] == "model.embed_tokens" and len(result["largest"]) == 5
    command = CliRunner().invoke(app, ["monitor", "show", runs[0], "--name", "*.none"])
    assert command.exit_code == 1 and "no name of phase 'gradient' matches '*.none'" in command.output


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        ({"monitor": {"every": 1, "names": ["model.layer.*"]}}, "'model.layer.*' matches no module"),
        ({"monitor": {"every": 1, "phases": []}}, "got no phase"),
        ({"monitor": {"numbers": ["bits"]}}, "which nothing uses without monitor.every"),
        ({"monitor": {"every": 1, "phases": ["moment"]}, "optimizer": {"name": "adamw8bit"}}, "eight bits"),
        ({"monitor": {"every": 1, "phases": ["forward"]}, "memory": {"budget": "1GiB"}}, "more than once to plan"),
        (
            {
                "monitor": {"every": 1, "phases": ["forward"], "names": ["model.layers.*.mlp"]},
                "compile": {"blocks": ["model.layers.*"]},
            },
            "inside of model.layers.0, which [compile] makes one graph",
        ),
    ],
)
def test_lint_names_what_cannot_be_read(tables, text):
    assert any(text in str(each) for each in lint({**TABLES, "fsdp": {}, **tables}))
