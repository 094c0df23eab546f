from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hp_plan
from hp_plan import MeshSection, OptimizerSection, ParallelPlan, PlanError, RunSection
from hp_plan.extend import json_schema
from hp_plan.plan import SECTIONS
from hp_plan.reading.tables import SYNONYMS

NAMES = st.text("abcxyz_.*0", min_size=1, max_size=8)
VALUES = st.recursive(
    st.booleans()
    | st.integers(-(2**31), 2**31)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=4,
)
POSITIVE = st.floats(1e-12, 1e3)
BETA = st.floats(0.0, 1.0, exclude_max=True)
GROUPS = st.lists(
    st.fixed_dictionaries({"patterns": st.lists(NAMES, max_size=2)}, optional={"weight_decay": BETA}), max_size=2
)
PLANS = st.fixed_dictionaries(
    {
        "model": st.fixed_dictionaries(
            {"overrides": st.dictionaries(NAMES, VALUES, max_size=3)},
            optional={"config": NAMES, "function": NAMES, "folder": NAMES},
        ),
        "mesh": st.fixed_dictionaries(
            {}, optional={axis: st.integers(1, 8) for axis in ("dp_shard", "tp", "pp", "ep")}
        ),
        "styles": st.sampled_from(["auto", "auto-sequence"]) | st.dictionaries(NAMES, NAMES, max_size=3),
        "fsdp": st.fixed_dictionaries(
            {"groups": st.lists(NAMES, max_size=3)},
            optional={"reshard_after_forward": st.booleans() | st.integers(1, 4), "param_dtype": st.just("bfloat16")},
        ),
        "optimizer": st.fixed_dictionaries(
            {"lr": POSITIVE}, optional={"name": st.just("sgd"), "betas": st.tuples(BETA, BETA), "groups": GROUPS}
        ),
        "schedule": st.fixed_dictionaries({}, optional={"kind": st.sampled_from(["constant", "linear", "cosine"])}),
        "data": st.fixed_dictionaries({"paths": st.lists(NAMES, max_size=2)}),
        "run": st.fixed_dictionaries({}, optional={"grad_clip": POSITIVE, "steps": st.integers(1, 9)}),
    }
)


def diagnostics(tables):
    with pytest.raises(PlanError) as raised:
        ParallelPlan.from_dict(tables)
    return {diagnostic.key: f"{diagnostic.message}; {diagnostic.fix}" for diagnostic in raised.value.diagnostics}


@settings(deadline=None)
@given(tables=PLANS)
def test_a_plan_survives_toml_dictionaries_and_its_repr(tmp_path_factory, tables):
    plan = ParallelPlan.from_dict(tables)
    path = tmp_path_factory.mktemp("plan") / "plan.toml"
    path.write_text(plan.to_toml(), encoding="utf-8")
    assert ParallelPlan.from_toml(path) == plan
    assert ParallelPlan.from_dict(plan.to_dict()) == plan
    assert eval(repr(plan), vars(hp_plan)) == plan


def test_every_fault_is_found_at_once():
    found = diagnostics(
        {
            "styles": "atuo",
            "steps": 3,
            "optimzer": {},
            "optimizer": {"name": "adam", "lr": 0, "betas": [1], "steps": 3, "lrr": 1},
            "mesh": {"tp": "2", "pp": 0},
            "fsdp": 3,
            "run": {"grad_clip": "x", "dtype": 16, "steps": True},
        }
    )
    assert found == {
        "styles": "got 'atuo', expected 'auto', 'auto-sequence' or a table of pattern = style; did you mean 'auto'?",
        "steps": "'steps' stands outside every section; it belongs to [run] or [profile]: move it there",
        "optimzer": "there is no section or key 'optimzer'; did you mean 'optimizer'?",
        "optimizer.name": "got 'adam' (str), expected one of adamw, sgd, muon, adamw8bit; did you mean 'adamw' or "
        "'adamw8bit'?",
        "optimizer.lr": "got 0 (int), expected a number more than 0.0; write a number more than 0.0",
        "optimizer.betas": "got [1] (list), expected a list of 2 numbers; write a list of 2 numbers",
        "optimizer.steps": "[optimizer] has no key 'steps'; 'steps' belongs to [run] or [profile]: move it there",
        "optimizer.lrr": "[optimizer] has no key 'lrr'; did you mean 'lr'?",
        "mesh.tp": "got '2' (str), expected an integer; write an integer",
        "mesh.pp": "got 0 (int), expected a number of at least 1; write a number of at least 1",
        "fsdp": "got 3 (int), expected a table; write it as [fsdp] with one key a line",
        "run.grad_clip": "got 'x' (str), expected a number; write a number",
        "run.dtype": "got 16 (int), expected one of float64, float32, bfloat16, float16; write one of float64, "
        "float32, "
        "bfloat16, float16",
        "run.steps": "got True (bool), expected an integer; write an integer",
    }


def test_the_fix_of_a_slip_can_be_copied():
    found = diagnostics(
        {
            "model": {"config": "LlamaConfig", "paths": "x"},
            "data": {"paths": "texts"},
            "metrics": {"sinks": "wandb"},
            "memory": {"budget": 20},
        }
    )
    assert found == {
        "model.paths": (
            "[model] has no key 'paths'; did you mean 'path'? "
            "Else 'paths' belongs to [data] or [validation]: move it there"
        ),
        "data.paths": "got 'texts' (str), expected a list of strings; write [\"texts\"]",
        "metrics.sinks": "got 'wandb' (str), expected a list of some of tensorboard, wandb; write [\"wandb\"]",
        "memory.budget": 'got 20 (int), expected a string; write "20", in quotes',
    }


def test_the_constructor_checks_as_the_file_does():
    with pytest.raises(PlanError, match="run.steps: got 0 "):
        ParallelPlan(run=RunSection(steps=0))
    with pytest.raises(PlanError, match="run: got {'steps': 3}, expected a RunSection"):
        ParallelPlan(run={"steps": 3})  # type: ignore[arg-type]


def test_values_become_what_the_section_says():
    plan = ParallelPlan(optimizer=OptimizerSection(lr=1, betas=[0.8, 0.9]))  # type: ignore[arg-type]
    assert plan.optimizer.betas == (0.8, 0.9)
    assert type(plan.optimizer.lr) is float


def test_a_file_that_is_not_toml_names_the_line(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text("[mesh\ntp = 2\n")
    with pytest.raises(PlanError, match=r"plan.toml: is not TOML: .*line 1"):
        ParallelPlan.from_toml(path)


def test_null_has_no_toml():
    plan = ParallelPlan.from_dict({"model": {"overrides": {"sliding_window": None}}})
    with pytest.raises(PlanError, match="model.overrides: can't be written as TOML: .*TOML has no null"):
        plan.to_toml()


@pytest.mark.parametrize(
    ("sizes", "axes"),
    [
        ({}, {"dp_shard": 1}),
        ({"tp": 2}, {"tp": 2}),
        ({"tp": 2, "dp_shard": 3}, {"dp_shard": 3, "tp": 2}),
        ({"dp_replicate": 2}, {"dp_replicate": 2, "dp_shard": 1}),
        ({"dp_replicate": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 1, "tp": 2}),
        ({"dp_shard": 2, "pp": 3}, {"pp": 3, "dp_shard": 2}),
    ],
)
def test_axes_of_one_rank_are_left_out(sizes, axes):
    mesh = MeshSection(**sizes)
    assert mesh.axes == axes
    assert list(mesh.axes) == list(axes)


def test_ranks_of_one_stage_are_neighbours():
    mesh = MeshSection(pp=2, dp_replicate=2, tp=2)
    assert list(mesh.axes) == ["pp", "dp_replicate", "dp_shard", "tp"]
    assert [tuple(mesh.coordinate(rank).values()) for rank in (0, 1, 2, 4, 7)] == [
        (0, 0, 0, 0),
        (0, 0, 0, 1),
        (0, 1, 0, 0),
        (1, 0, 0, 0),
        (1, 1, 0, 1),
    ]


def test_a_plan_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ParallelPlan().run = RunSection()  # type: ignore[misc]


def test_the_schema_for_editors_describes_every_key_and_agrees_with_the_reader():
    schema = json_schema()["properties"]
    assert schema.keys() == {"styles", *SECTIONS}
    for name, section in SECTIONS.items():
        assert schema[name]["properties"].keys() == set(section.__dataclass_fields__)
        for key, entry in schema[name]["properties"].items():
            assert len(entry["description"]) > 5, (name, key)
    tp, betas = schema["mesh"]["properties"]["tp"], schema["optimizer"]["properties"]["betas"]
    assert (tp["type"], tp["minimum"], tp["default"]) == ("integer", 1, 1)
    assert (betas["minItems"], betas["items"]["exclusiveMaximum"], betas["default"]) == (2, 1.0, [0.9, 0.999])
    assert "bfloat16" in schema["run"]["properties"]["dtype"]["enum"]
    assert schema["run"]["properties"]["grad_clip"]["exclusiveMinimum"] == 0.0
    split = schema["pipeline"]["properties"]["split"]["anyOf"]
    assert {"enum": ["auto", "even"]} in split
    for name, section in schema.items():  # what the schema names as defaults and choices, the reader takes
        for key, entry in section.get("properties", {}).items():
            for value in [*entry.get("enum", ()), *([entry["default"]] if "default" in entry else [])]:
                ParallelPlan.from_dict({name: {key: value}})


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({"schedule": {"name": "cosine"}}, "schedule.name: [schedule] has no key 'name'; did you mean 'kind'?"),
        ({"mesh": {"dp": 2}}, "mesh.dp: [mesh] has no key 'dp'; did you mean 'dp_shard' or 'dp_replicate'?"),
        ({"optimizer": {"learning_rate": 1.0}}, "[optimizer] has no key 'learning_rate'; did you mean 'lr'?"),
        (
            {"run": {"learning_rate": 1.0}},
            "run.learning_rate: [run] has no key 'learning_rate'; did you mean optimizer.lr?",
        ),
        ({"lora": {"r": 8}}, "lora: there is no section or key 'lora'; did you mean [adapter]?"),
        ({"adapter": {"r": 8}}, "adapter.r: [adapter] has no key 'r'; did you mean 'rank'?"),
    ],
)
def test_names_of_other_libraries_are_known(tables, expected):
    with pytest.raises(PlanError) as caught:
        ParallelPlan.from_dict(tables)
    assert expected in str(caught.value)


def test_synonyms_name_keys_that_there_are():
    keys = {item.name for section in SECTIONS.values() for item in dataclasses.fields(section)}
    assert all(set(meant) <= keys for meant in SYNONYMS.values())
