"""What a plan may show of a run."""

from __future__ import annotations

import pytest

from hp_plan import ParallelPlan
from hp_plan.checks.checks import check_plan
from hp_plan.checks.unused_keys import check_unused_keys
from hp_testing import device_type


@pytest.mark.framework("torch")
def test_stages_are_not_validated_and_no_key_is_ignored():
    plan = ParallelPlan.from_dict({"mesh": {"pp": 2}, "validation": {"paths": ["text"]}})
    keys = {each.key: each.message for each in check_plan(plan)}
    assert "pp = 2" in keys["validation.paths"]
    plan = ParallelPlan.from_dict({"validation": {"every": 5}})
    assert "validation.every" in {each.key for each in check_plan(plan)}


@pytest.mark.framework("torch")
@pytest.mark.parametrize(
    ("section", "key", "text"),
    [
        ({"start": 9, "steps": 3}, "profile.start", "steps 9 to 11 are profiled, but the run has 10"),
        ({"start": 1, "ranks": [0, 2]}, "profile.ranks", "rank 2 is profiled, but the mesh has ranks 0 to 1"),
        ({"steps": 4}, "profile.steps", "nothing uses without profile.start"),
    ],
    ids=str,
)
def test_profiles_that_can_not_be_are_refused(section, key, text):
    plan = ParallelPlan.from_dict({"profile": section, "run": {"steps": 10}, "mesh": {"dp_shard": 2}})
    found = {each.key: each.message for each in check_plan(plan)}
    if device_type() == "npu" and "start" in section:
        assert "profiles on NPUs are not supported" in found["profile.start"]
    else:
        assert text in found[key]


@pytest.mark.framework("torch")
@pytest.mark.parametrize(
    ("tables", "text"),
    [
        ({"mesh": {"pp": 2}}, "with pp = 2 a model does not generate"),
        ({"mesh": {"cp": 2}}, "with cp = 2 a model does not generate"),
        ({"model": {"function": "a:b"}}, "a function's model"),
        ({"model": {"config": "T5Config", "task": "seq2seq-lm"}}, "seq2seq-lm"),
    ],
    ids=str,
)
def test_prompts_that_nothing_goes_on_with_are_refused(tables, text):
    plan = ParallelPlan.from_dict({"validation": {"prompts": ["to be"]}, **tables})
    assert text in {each.key: each.message for each in check_plan(plan)}["validation.prompts"]


@pytest.mark.framework("torch")
def test_the_best_of_checkpoints_without_a_loss_are_refused():
    validated = {"validation": {"paths": ["text"], "every": 4}}
    for tables, text in (
        ({"run": {"keep_best": 1, "checkpoint_every": 4}}, "got 1, but nothing is validated"),
        ({"run": {"keep_best": 2}, **validated}, "got 2, which nothing uses without run.checkpoint_every"),
        (
            {"run": {"keep_best": 2, "checkpoint_every": 6}, **validated},
            "got 2, but checkpoints are every 6 steps and validated every 4",
        ),
    ):
        (found,) = check_plan(ParallelPlan.from_dict(tables))
        assert found.key == "run.keep_best" and found.message.startswith(text)
    assert not check_plan(ParallelPlan.from_dict({"run": {"keep_best": 2, "checkpoint_every": 8}, **validated}))


@pytest.mark.framework("torch")
def test_no_key_of_validation_is_ignored():
    for section, key in (({"every": 3}, "every"), ({"prompt_tokens": 3}, "prompt_tokens"), ({"batches": 3}, "batches")):
        others = {} if key == "every" else {"paths": ["x"]} if key == "prompt_tokens" else {"prompts": ["x"]}
        plan = ParallelPlan.from_dict({"validation": {**section, **others}})
        assert [each.key for each in check_unused_keys(plan)] == [f"validation.{key}"]
