"""Runs with `[sdc]`: what is found of planted bit flips, who is named, and what follows."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from corrupted_runs import Fault, run_corrupted
from safetensors.numpy import load_file
from small_runs import DROPOUT, EXPERTS, losses, run

from hp_plan import Corruption
from hp_testing import run_ranks

pytestmark = pytest.mark.framework("torch")
thorough = pytest.mark.thorough
REPLAY = {"replay_every": 1, "on_fault": "report"}
BOTH = {"replicas": True, "replay_every": 1}
LAYERS = [f"model.layers.{layer}." for layer in (0, 1)]
LINEAR = [f"{layer}{name}" for layer in LAYERS for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj")]
MODULES = [
    *LINEAR,
    *(f"{layer}post_attention_layernorm" for layer in LAYERS),
    *(f"{each}mlp.down_proj" for each in LAYERS),
]
NAMES = {
    "forward": MODULES,
    "backward": MODULES,
    "gradient": [f"{name}.weight" for name in LINEAR],
    "wire": ["0", "1", "2"],
    **dict.fromkeys(("weight", "exp_avg", "exp_avg_sq", "reduced"), [f"{name}.weight" for name in MODULES]),
}


def train(folder, mesh, *, sdc=BOTH, steps=3, model=None, **changed):
    folder.mkdir()
    run_ranks(math.prod(mesh.values()), run, folder, mesh, steps, model, changed={"sdc": sdc, **changed})


def found(folder) -> list[Corruption]:
    path = folder / "run" / "corruptions.jsonl"
    return [Corruption.from_dict(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def weights(folder, step):
    files = sorted((folder / "run" / "checkpoints" / f"step-{step:08d}").glob("model*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def equal(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


RECOMPUTE = {"memory": {"recompute": ["model.layers.*"]}}
CLEAN = [
    ({"dp_replicate": 3}, None, {"batch_size": 6}),
    ({"dp_shard": 3}, DROPOUT, {"batch_size": 6}),
    ({"dp_shard": 2, "tp": 2}, None, RECOMPUTE),
    ({"dp_shard": 2, "pp": 2}, None, {}),
    ({"dp_shard": 2, "ep": 2}, EXPERTS, {}),
]
MORE = [
    ({"dp_replicate": 2, "dp_shard": 2}, None, {"accumulate": 2, "batch_size": 8}),
    ({"dp_shard": 2, "cp": 2}, None, {}),
    ({"dp_replicate": 2, "dp_shard": 2, "ep": 2}, EXPERTS, {}),
    ({"tp": 2}, None, {}),
    ({"dp_shard": 3}, None, {"batch_size": 6, "deterministic": True}),
]


def ranks_of(mesh):
    return math.prod(size for axis, size in mesh.items() if axis != "ep")


@pytest.mark.parametrize(
    ("mesh", "model", "changed"), [*CLEAN, *(pytest.param(*each, marks=thorough) for each in MORE)], ids=str
)
def test_clean_steps_raise_no_alarm_and_change_nothing(tmp_path, mesh, model, changed):
    for name, sdc in {"watched": BOTH, "plain": {}}.items():
        (tmp_path / name).mkdir()
        run_ranks(ranks_of(mesh), run, tmp_path / name, mesh, 3, model, changed={"sdc": sdc, **changed})
    assert losses(tmp_path / "watched") == losses(tmp_path / "plain")
    assert not found(tmp_path / "watched")
    lines = (tmp_path / "watched" / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["corruptions"] for line in lines] == [0, 0, 0]


@pytest.mark.parametrize("kind", ["forward", "backward", "gradient", "wire"])
@pytest.mark.parametrize("lasting", [False, True], ids=["transient", "persistent"])
def test_a_flip_is_named_by_rank_module_and_verdict(tmp_path, kind, lasting):
    fault = Fault(kind, 2, 1, NAMES[kind][-1], computations=None if lasting else (1,))
    run_ranks(3, run_corrupted, tmp_path, {"dp_shard": 3}, [fault], REPLAY, 2, batch_size=6)
    check(tmp_path / "0", fault, lasting)


def check(folder, fault, lasting):
    first, *others = found(folder)
    assert not others, others
    where = "wire" if fault.kind == "wire" else "compute"
    verdict = "persistent" if lasting else "transient"
    assert (first.step, first.ranks, first.where, first.verdict.value) == (fault.step, (fault.rank,), where, verdict)
    assert fault.kind == "wire" or first.name == f"{fault.kind} {fault.name}", first
