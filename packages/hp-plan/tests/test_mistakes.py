"""Plans with a mistake: each is refused by its key, none is ignored, none ends in a traceback."""

from __future__ import annotations

import copy
import random
from dataclasses import fields
from typing import Literal, Union, get_args, get_origin, get_type_hints

import pytest

from hp_plan import OptimizerGroup, ParallelPlan, PlanError
from hp_plan.checks.checks import check_plan
from hp_plan.extend import override, read_plan, settings
from hp_plan.plan import SECTIONS

GOOD = {
    "styles": "auto",
    "model": {"config": "Qwen3Config", "overrides": {"vocab_size": 256}},
    "mesh": {"pp": 2, "dp_shard": 2, "tp": 2, "ep": 2},
    "experts": {"combine": "fast", "exchange": "all_to_all", "capacity": 64, "every": 10},
    "memory": {"recompute": ["model.layers.*.mlp"], "swap": ["model.layers.*.self_attn"]},
    "pipeline": {"schedule": "interleaved", "stages_per_rank": 2, "micro_batches": 4},
    "fsdp": {"groups": ["model.layers.*"], "reshard_after_forward": True, "param_dtype": "float32"},
    "optimizer": {"name": "muon", "lr": 1e-3, "betas": [0.9, 0.95], "muon": ["model.layers.*"], "muon_momentum": 0.9}
    | {"groups": [{"patterns": ["model.norm.weight"], "weight_decay": 0.0}]},
    "schedule": {"kind": "wsd", "warmup_steps": 2, "decay_steps": 3, "decay": "cosine", "final": 0.1},
    "data": {"sequence_length": 16, "batch_size": 16},
    "profile": {"start": 2, "steps": 2, "ranks": [0]},
    "metrics": {"sinks": ["tensorboard"], "peak_flops": 1e15},
    "run": {"steps": 10, "seed": 1, "dtype": "float32", "grad_clip": 1.0},
}
# Values that no key of that type takes; a number is out of range by being infinite or less than all minima.
WRONG = {
    int: ["4", 1.5, True, [1], {"x": 1}, -1],
    float: ["0.1", True, [0.1], {"x": 1}, -1.0, float("inf"), float("nan")],
    str: [3, True, ["x"], {"x": 1}],
    bool: ["true", 1.5, [True], {"x": True}],
    tuple: [3, {"x": 1}, [[1]], True],
    dict: [3, "x", ["x"], True],
}


def kinds(hint):
    """The types of WRONG that a hint has."""
    if get_origin(hint) is Literal:
        return {str}
    if get_origin(hint) is Union or type(hint).__name__ == "UnionType":
        return set().union(*(kinds(option) for option in get_args(hint))) - {None}
    if hint is type(None):
        return {None}
    origin = get_origin(hint) or hint
    return {origin if origin in WRONG else dict}


def wrong_values(hint):
    allowed = kinds(hint)
    values = [repr(value) for kind in allowed for value in WRONG[kind]]
    # A value that another alternative of a union takes is no mistake.
    return [value for kind in allowed for value in WRONG[kind] if values.count(repr(value)) == len(allowed)]


def typo(name, chance):
    """The name with two letters exchanged, one left out or one doubled."""
    place = chance.randrange(len(name) - 1)
    exchanged = name[:place] + name[place + 1] + name[place] + name[place + 2 :]
    choices = [exchanged, name[:place] + name[place + 1 :], name[:place] + name[place] + name[place:]]
    return chance.choice([choice for choice in choices if choice != name])


def mistakes(chance):
    """A plan with one mistake, and the keys by which it may be refused."""
    tables = copy.deepcopy(GOOD)
    kind = chance.choice(["value", "value", "value", "key", "section", "elsewhere", "choice", "unused", "group"])
    section = chance.choice(sorted(SECTIONS))
    hints = get_type_hints(SECTIONS[section])
    key = chance.choice(sorted(hints))
    table = tables.setdefault(section, {})
    if kind == "group":
        return of_a_group(tables, chance)
    if kind == "value":
        table[key] = chance.choice(wrong_values(hints[key]))
        return tables, {f"{section}.{key}"}
    if kind == "key":
        wrong = typo(key, chance)
        if wrong in hints:
            return mistakes(chance)
        table[wrong] = table.pop(key, 1)
        return tables, {f"{section}.{wrong}"}
    if kind == "section":
        wrong = typo(section, chance)
        tables[wrong] = tables.pop(section)
        return tables, {wrong}
    if kind == "elsewhere":
        if chance.random() < 0.5:
            tables[key] = 1
            return (tables, {key}) if key not in GOOD else mistakes(chance)
        other = chance.choice([name for name in sorted(SECTIONS) if key not in get_type_hints(SECTIONS[name])] or [""])
        if not other or other == section:
            return mistakes(chance)
        tables.setdefault(other, {})[key] = 1
        return tables, {f"{other}.{key}"}
    if kind == "choice":
        names = [name for name, hint in hints.items() if kinds(hint) & {str} and get_origin(hint) is Literal]
        if not names:
            return mistakes(chance)
        key = chance.choice(names)
        table[key] = typo(chance.choice(get_args(hints[key])), chance)
        return tables, {f"{section}.{key}"}
    return unused(tables, chance)


def of_a_group(tables, chance):
    """A mistake in a table of a list of tables."""
    group, key = tables["optimizer"]["groups"][0], "optimizer.groups[0]"
    which = chance.choice(["value", "key", "table", "patterns", "nothing"])
    if which == "value":
        hints = get_type_hints(OptimizerGroup)
        name = chance.choice(sorted(hints))
        group[name] = chance.choice(wrong_values(hints[name]))
        return tables, {f"{key}.{name}"}
    if which == "key":
        wrong = typo(chance.choice(["patterns", "weight_decay", "lr_multiple"]), chance)
        group[wrong] = 1
        return tables, {f"{key}.{wrong}"}
    if which == "table":
        tables["optimizer"]["groups"][0] = chance.choice([3, "model.norm.weight", ["x"], True])
        return tables, {key}
    del group["patterns" if which == "patterns" else "weight_decay"]
    return tables, {f"{key}.patterns" if which == "patterns" else key}


def unused(tables, chance):
    """A value that nothing of the plan reads."""
    which = chance.choice(
        ["momentum", "betas", "muon", "decay", "final", "stages", "bandwidth", "experts", "compile", "fsdp", "pipeline"]
    )
    if which == "momentum":
        tables["optimizer"]["momentum"] = 0.9
        return tables, {"optimizer.momentum"}
    if which in ("betas", "muon"):
        tables["optimizer"] = {"name": chance.choice(["sgd"] if which == "betas" else ["adamw", "sgd", "adamw8bit"])}
        tables["optimizer"] |= {"betas": [0.5, 0.5]} if which == "betas" else {"muon": ["x"]}
        return tables, {f"optimizer.{which}"}
    if which in ("decay", "final"):
        value = {"decay": "cosine"} if which == "decay" else {"final": 0.5}
        tables["schedule"] = {
            "kind": chance.choice(["linear", "constant"] if which == "decay" else ["constant"]),
            **value,
        }
        return tables, {f"schedule.{which}"}
    if which == "stages":
        tables["pipeline"]["schedule"] = "1f1b"
        return tables, {"pipeline.stages_per_rank"}
    if which == "bandwidth":
        tables["memory"]["bandwidth"] = 1e9
        return tables, {"memory.bandwidth"}
    if which == "compile":
        tables["compile"] = {"backend": "eager"}
        return tables, {"compile.backend"}
    if which == "experts":
        tables["mesh"].pop("ep")
        return tables, {which}
    tables["mesh"].pop("dp_shard" if which == "fsdp" else "pp")
    return tables, {which}


def refusals(tables):
    plan, diagnostics = read_plan(tables)
    return [*diagnostics, *check_plan(plan)]


@pytest.mark.framework("torch")
def test_five_hundred_mistakes_are_each_refused_by_their_key():
    assert refusals(GOOD) == []
    for seed in range(500):
        tables, keys = mistakes(random.Random(seed))
        found = refusals(tables)
        named = {diagnostic.key for diagnostic in found}
        assert any(name.startswith(key) for key in keys for name in named), (seed, keys, named)
        for diagnostic in found:
            assert diagnostic.message, seed
            assert diagnostic.fix, seed


def test_values_of_the_command_line_are_those_of_a_file():
    tables = {"mesh": {"tp": 2}, "run": {"steps": 3}, "styles": "auto"}
    assignments = [
        "mesh.tp=4",
        "run.dtype=bfloat16",
        "optimizer.lr = 1e-4",
        "data.paths=['a.txt', 'b']",
        "model.overrides.hidden_size=64",
        'styles."model.norm"=sequence',
        "fsdp.reshard_after_forward=false",
        "run.grad_clip=1",
    ]
    changed = override(tables, assignments)
    assert tables == {"mesh": {"tp": 2}, "run": {"steps": 3}, "styles": "auto"}
    plan = ParallelPlan.from_dict(changed)
    assert (plan.mesh.tp, plan.run.dtype, plan.optimizer.lr, plan.data.paths) == (4, "bfloat16", 1e-4, ("a.txt", "b"))
    assert plan.model.overrides == {"hidden_size": 64}
    assert plan.styles == {"model.norm": "sequence"}
    assert (plan.fsdp.reshard_after_forward, plan.run.grad_clip, plan.run.steps) == (False, 1.0, 3)
    origins = {setting.key: (setting.value, setting.origin) for setting in settings(plan, tables, assignments)}
    assert origins["mesh.tp"] == (4, "command line")
    assert origins["run.steps"] == (3, "file")
    assert origins["run.seed"] == (0, "default")
    assert origins['styles."model.norm"'] == ("sequence", "command line")
    assert origins["model.overrides.hidden_size"] == (64, "command line")
    listed = {key for key in origins if not key.startswith(("styles", "model.overrides"))}
    known = {f"{name}.{item.name}" for name, section in SECTIONS.items() for item in fields(section)}
    assert listed == known - {"model.overrides", "communication.wire", "memory.homes"}  # tables, which are empty


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("mesh.tp", "--set mesh.tp: is no key=value; write such as mesh.tp=4"),
        ("=4", "--set =4: is no key=value"),
        ("mesh..tp=4", "--set mesh..tp=4: is no key=value"),
        ("mesh.=4", "--set mesh.=4: is no key=value"),
        ("data.paths=[1", "--set data.paths=[1: has a value that is not TOML: "),
        ("run.steps.x=1", "--set run.steps.x=1: run.steps is 3, not a table; set run.steps itself"),
    ],
)
def test_an_assignment_that_is_none_is_refused(assignment, message):
    with pytest.raises(PlanError) as raised:
        override({"run": {"steps": 3}}, [assignment])
    assert message in str(raised.value)


def test_a_wrong_value_of_the_command_line_is_refused_like_one_of_a_file():
    with pytest.raises(PlanError, match=r"mesh\.tp: got 'four' \(str\), expected an integer"):
        ParallelPlan.from_dict(override({}, ["mesh.tp=four"]))
    with pytest.raises(PlanError, match=r"mesh\.tpp: \[mesh\] has no key 'tpp'; did you mean 'tp'"):
        ParallelPlan.from_dict(override({}, ["mesh.tpp=4"]))
