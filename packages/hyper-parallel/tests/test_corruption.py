"""Runs with `[sdc]`: what is found of planted bit flips, who is named, and what follows."""

from __future__ import annotations

import gc
import json
import math
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from corrupted_runs import Fault, planted, random_faults, run_corrupted
from safetensors.numpy import load_file
from small_runs import DROPOUT, EXPERTS, TABLES, losses, run

from hp_fsdp.torch.groups.bucket import Bucket
from hp_plan import Corruption, CorruptionError, lint
from hp_testing import run_ranks
from hyper_parallel.run import Run
from hyper_parallel.torch.trainer import Trainer

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
    check(found(tmp_path / "0"), fault, lasting)


def check(corruptions, fault, lasting):
    first, *others = corruptions
    assert not others, others
    where = "wire" if fault.kind == "wire" else "compute"
    verdict = "persistent" if lasting else "transient"
    assert (first.step, first.ranks, first.where, first.verdict.value) == (fault.step, (fault.rank,), where, verdict)
    assert fault.kind == "wire" or first.name == f"{fault.kind} {fault.name}", first


def in_turns(ranks, folder, mesh, faults, sdc):
    """Train with each fault, a few in a task: it has a minute."""
    for first in range(0, len(faults), 8):
        some = faults[first : first + 8]
        run_ranks(ranks, run_corrupted, folder, mesh, some, sdc, 3, first=first, batch_size=6)


@pytest.mark.parametrize("count", [3, pytest.param(100, marks=thorough)])
def test_random_flips_of_what_ranks_compute_and_receive_are_named(tmp_path, count):
    wrong = random_faults(("forward", "backward", "gradient", "wire"), NAMES, 3, count, seed=count, bits=64)
    wrong = [replace(each, computations=None if number % 3 == 2 else (1,)) for number, each in enumerate(wrong)]
    in_turns(3, tmp_path, {"dp_shard": 3}, wrong, REPLAY)
    for number, fault in enumerate(wrong):
        own = [each for each in found(tmp_path / str(number)) if each.step == fault.step]
        check(own, fault, fault.computations is None)
    print(f"{count} of {count} flips in what ranks compute and receive named: rank, module, verdict")


@pytest.mark.parametrize(
    ("mesh", "model", "changed", "fault"),
    [
        ({"dp_shard": 3}, DROPOUT, {"batch_size": 6}, Fault("forward", 2, 2, "transformer.h.1.mlp.dropout")),
        ({"dp_shard": 2, "tp": 2}, None, {}, Fault("forward", 2, 3, "model.layers.1.mlp.down_proj")),
        ({"dp_shard": 2, "pp": 2}, None, {}, Fault("backward", 2, 3, "model.layers.1.mlp.up_proj")),
        ({"dp_shard": 2}, None, {"memory": {"recompute": ["model.layers.*"]}}, Fault("forward", 2, 0, MODULES[0])),
    ],
    ids=["dropout", "tp", "pp", "recompute"],
)
def test_a_flip_is_named_under(tmp_path, mesh, model, changed, fault):
    run_ranks(math.prod(mesh.values()), run_corrupted, tmp_path, mesh, [fault], REPLAY, 2, model, **changed)
    check(found(tmp_path / "0"), fault, lasting=False)


def test_two_copies_tell_what_lasts_but_not_who(tmp_path):
    wrong = Fault("forward", 2, 1, MODULES[0], computations=None)
    run_ranks(2, run_corrupted, tmp_path, {"dp_shard": 2}, [wrong, replace(wrong, computations=(1,))], REPLAY, 2)
    (lasting,), (once,) = found(tmp_path / "0"), found(tmp_path / "1")
    assert (lasting.ranks, lasting.verdict.value, once.ranks, once.verdict.value) == (
        (0, 1),
        "persistent",
        (1,),
        "transient",
    )


def test_one_rank_finds_what_does_not_last(tmp_path):
    wrong = Fault("forward", 2, 0, MODULES[0])
    run_ranks(1, run_corrupted, tmp_path, {}, [wrong, replace(wrong, computations=None)], REPLAY, 2)
    check(found(tmp_path / "0"), wrong, lasting=False)
    assert not found(tmp_path / "1")


STATE = ("weight", "exp_avg", "exp_avg_sq", "reduced")


@pytest.mark.parametrize("count", [4, pytest.param(200, marks=thorough)])
def test_random_flips_of_state_are_named_in_their_step(tmp_path, count):
    wrong = random_faults(STATE, NAMES, 3, count, seed=count, bits=64)
    sdc = {"replicas": True, "on_fault": "report"}
    in_turns(3, tmp_path, {"dp_replicate": 3}, wrong, sdc)
    unseen = []
    for number, fault in enumerate(wrong):
        own = [each for each in found(tmp_path / str(number)) if each.step == fault.step]
        if not own:
            unseen.append(fault)
            continue
        assert {each.ranks for each in own} == {(fault.rank,)}, (fault, own)
        assert {each.name.partition("/")[0] for each in own} == {fault.name}, (fault, own)
    assert all(each.kind == "reduced" for each in unseen)  # a gradient's low bits may be lost in rounding
    assert len(unseen) < count / 4
    named = f"{count - len(unseen)} of {count} flips in state named in their step: rank, parameter"
    print(named, "" if not unseen else "; the others are in gradients, where rounding may lose them", sep="")


@pytest.mark.parametrize(
    ("mesh", "name", "told"),
    [
        ({"tp": 2}, "model.norm.weight", "model.norm.weight"),
        ({"pp": 2}, "lm_head.weight", "model.embed_tokens.weight"),
    ],
    ids=["tp", "tied"],
)
def test_what_tp_leaves_whole_and_what_stages_share_is_compared(tmp_path, mesh, name, told):
    sdc = {"replicas": True, "on_fault": "report"}
    run_ranks(2, run_corrupted, tmp_path, mesh, [Fault("weight", 2, 1, name)], sdc, 2)  # stages refuse the third
    first, *_ = found(tmp_path / "0")
    assert (first.step, first.name, first.ranks, first.verdict.value) == (2, told, (0, 1), "undecided")


def restored(tmp_path, mesh, faults, sdc):
    in_turns(3, tmp_path, mesh, [None, *faults], sdc)
    clean = weights(tmp_path / "0", 3)
    for number, fault in enumerate(faults, 1):
        assert found(tmp_path / str(number)), fault
        assert all(each.verdict.value == "transient" for each in found(tmp_path / str(number)))
        assert equal(weights(tmp_path / str(number), 3), clean), fault


@pytest.mark.parametrize("count", [2, pytest.param(20, marks=thorough)])
def test_a_transient_flip_leaves_the_weights_of_a_clean_run(tmp_path, count):
    faults = random_faults(("forward", "gradient"), NAMES, 3, count, seed=count, bits=62)
    restored(tmp_path, {"dp_shard": 3}, faults, {"replay_every": 1})


@pytest.mark.parametrize("count", [3, pytest.param(20, marks=thorough)])
def test_state_is_taken_from_another_rank(tmp_path, count):
    faults = random_faults(STATE[:3], NAMES, 3, count, seed=count, bits=62)
    restored(tmp_path, {"dp_replicate": 3}, faults, {"replicas": True})


FORWARD, STATE_OF = Fault("forward", 2, 2, MODULES[0]), Fault("weight", 2, 1, "model.norm.weight")
SHARDED, COPIED = {"replay_every": 1}, {"replicas": True}
ENDS = [
    ({"dp_shard": 3}, replace(FORWARD, computations=None), SHARDED, "persistent"),
    ({"dp_shard": 3}, replace(FORWARD, computations=(1, 4, 7, 10)), SHARDED, "3 times"),
    ({"dp_replicate": 2}, STATE_OF, COPIED, "nobody knows which is right"),
    ({"dp_shard": 3}, replace(FORWARD, step=1), SHARDED, "is not reproducible on this device"),
    ({"dp_replicate": 3}, replace(STATE_OF, step=1), COPIED, "differ after the first step"),
]


@pytest.mark.parametrize(("mesh", "fault", "sdc", "text"), ENDS, ids=["lasting", "often", "two", "first", "copies"])
def test_a_run_that_cannot_go_on_ends_on_all_ranks_by_name(tmp_path, mesh, fault, sdc, text):
    ranks = math.prod(mesh.values())
    run_ranks(ranks, run_corrupted, tmp_path, mesh, [fault], sdc, 3, batch_size=6)
    errors = {path.read_text() for path in (tmp_path / "0").glob("error-*")}
    assert len(list((tmp_path / "0").glob("error-*"))) == ranks and len(errors) == 1
    error = errors.pop()
    assert all(each in error for each in (text, f"step {fault.step}", fault.name)), error
    steps = [path.name for path in (tmp_path / "0" / "run" / "checkpoints").glob("step-*")]
    assert not steps, steps  # of a step that may be wrong


def irreproducible(folder):
    """Train a model one of whose products has other bits each time."""
    calls = [0]

    def run_linear(self, x):
        calls[0] += 1
        return torch.nn.functional.linear(x, self.weight) * (1 + (self is target[0]) * calls[0] * 2.0**-50)

    target = [None]
    original = torch.nn.Linear.forward

    def choose(self, x):
        if target[0] is None and self.out_features == 20:
            target[0] = self
        return run_linear(self, x) if self is target[0] else original(self, x)

    with mock.patch.object(torch.nn.Linear, "forward", choose), pytest.raises(CorruptionError) as caught:
        run(folder, {"dp_shard": 2}, 2, changed={"sdc": {"replay_every": 200}})
    (folder / "error").write_text(str(caught.value))


def test_a_module_that_is_not_reproducible_is_refused_in_the_first_step(tmp_path):
    run_ranks(2, irreproducible, tmp_path)
    text = (tmp_path / "error").read_text()
    assert "forward model.layers.0.mlp.gate_proj is not reproducible on this device" in text and "step 1" in text


def dirty_padding(folder):
    """Train with garbage in the padding of one replica's shards; write how many elements that is."""

    def spoil(self):
        dirty = 0
        for each in gc.get_objects():
            if isinstance(each, Bucket) and self.ranks.rank >= 2:
                padding = torch.ones(len(each.shard), dtype=torch.bool)
                for index in range(len(each.parameters)):
                    padding[slice(*each.layout.place(index, each.axes.shard_rank))] = False
                with torch.no_grad():
                    each.shard[padding] = 7.0
                dirty += int(padding.sum())
        (folder / f"dirty-{self.ranks.rank}").write_text(str(dirty))
        begin(self)

    begin = Run._begin
    with mock.patch.object(Run, "_begin", spoil):
        run(folder, {"dp_replicate": 2, "dp_shard": 2}, 2, changed={"sdc": {"replicas": True}})


def test_padding_of_shards_is_not_compared(tmp_path):
    run_ranks(4, dirty_padding, tmp_path)
    assert sum(int(path.read_text()) for path in tmp_path.glob("dirty-*"))
    assert not found(tmp_path)


LONG = [({"dp_replicate": 3}, DROPOUT, {"batch_size": 6}), ({"dp_shard": 2, "pp": 2}, None, {})]
LONG += [({"dp_shard": 2, "ep": 2}, EXPERTS, {}), ({"dp_shard": 2, "tp": 2}, None, RECOMPUTE)]


@thorough
@pytest.mark.parametrize(("mesh", "model", "changed"), LONG, ids=str)
def test_no_alarm_in_250_clean_steps(tmp_path, mesh, model, changed):
    sdc = {"sdc": {"replicas": True, "replay_every": 10}, "validation": {}}
    run_ranks(ranks_of(mesh), run, tmp_path, mesh, 250, model, changed={**sdc, **changed}, timeout=600)
    assert not found(tmp_path) and len(losses(tmp_path)) == 500


def failing_in_step_4(folder, fault):
    """Train until all ranks raise, beside a fault that nobody has heard of then."""
    (folder / "run").mkdir(parents=True, exist_ok=True)
    gradients, done = Trainer.gradients, []

    def fails(self, rows):
        done.append(rows)
        if len(done) == 4:
            raise RuntimeError("planted")
        return gradients(self, rows)

    with mock.patch.object(Trainer, "gradients", fails), planted(fault), pytest.raises(RuntimeError, match="planted"):
        run(folder, {"dp_replicate": 2}, 6, changed={"sdc": {"replicas": True}})


@pytest.mark.parametrize("wrong", [False, True])
def test_last_words_do_not_save_what_was_found_to_be_wrong(tmp_path, wrong):
    fault = Fault("weight", 3, 1, "model.norm.weight") if wrong else None
    run_ranks(2, failing_in_step_4, tmp_path, fault)
    steps = [2] if wrong else [2, 3]
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")) == [
        f"step-{step:08d}" for step in steps
    ]
    assert len(losses(tmp_path)) == 2 * steps[-1]


def resumed(folder):
    options = {"changed": {"sdc": BOTH}}
    run(folder, {"dp_shard": 2}, 4, until=2, **options)
    run(folder, {"dp_shard": 2}, 4, resume="auto", **options)


def test_a_run_goes_on_with_its_checks(tmp_path):
    run_ranks(2, resumed, tmp_path)
    assert len(losses(tmp_path)) == 8 and not found(tmp_path)


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        ({"sdc": {"replicas": True}}, "on one rank there is one copy"),
        ({"sdc": {"on_fault": "report"}}, "which nothing uses without sdc.replay_every"),
        ({"sdc": {"replay_every": 2}, "memory": {"budget": "1GiB"}}, "more than once to plan"),
    ],
)
def test_lint_names_what_cannot_be_compared(tables, text):
    assert any(text in str(each) for each in lint({**TABLES, "fsdp": {}, **tables}))
