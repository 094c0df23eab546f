"""What a plan may validate on."""

from __future__ import annotations

import re

import pytest

from hp_plan import ParallelPlan
from hp_plan.extend import examine, read_plan
from hp_testing import device_type
from hyper_parallel.checking import check_run
from hyper_parallel.data import write_tokens


def problems(tables):
    plan, diagnostics = read_plan(tables)
    return [(each.key, f"{each.message}; {each.fix}") for each in [*diagnostics, *check_run(plan)]]


@pytest.mark.parametrize(
    ("section", "model", "text"),
    [
        ({"batches": 3}, {}, "100 samples, but 3 batches of data.batch_size = 40 take 120; .* at most 2"),
        ({"paths": ["nowhere"]}, {}, "nowhere does not exist"),
        ({}, {"overrides": {"vocab_size": 100}}, "knows 100 tokens"),
        ({"every": 0}, {}, "at least 1"),
    ],
    ids=str,
)
def test_validation_that_can_not_be_is_refused_before_the_launch(tmp_path, section, model, text):
    (tmp_path / "text").write_bytes(b"x" * 1000)
    data = {"paths": [str(tmp_path / "text")], "sequence_length": 10, "batch_size": 40}
    tables = {"model": model, "data": data, "validation": {"paths": [str(tmp_path / "text")], "batches": 2, **section}}
    ((_, found),) = [each for each in problems(tables) if each[0].startswith(("validation", "model"))]
    assert re.search(text, found)


def test_bytes_do_not_validate_a_model_of_tokens(tmp_path):
    (tmp_path / "text").write_bytes(b"x" * 1000)
    write_tokens(tmp_path / "corpus", [[1, 2, 3] * 100], vocabulary=300)
    paths = {"text": [str(tmp_path / "text")], "tokens": [str(tmp_path / "corpus.bin")]}
    for trained, validated in (("text", "tokens"), ("tokens", "text")):
        data = {"paths": paths[trained], "sequence_length": 10, "batch_size": 2}
        tables = {"data": data, "validation": {"paths": paths[validated], "batches": 1}}
        (found,) = [text for key, text in problems(tables) if key == "validation.paths"]
        assert f"is trained on {'text as bytes' if trained == 'text' else 'token files'} and would be" in found


@pytest.mark.framework("torch")
def test_stages_are_not_validated_and_no_key_is_ignored():
    plan = ParallelPlan.from_dict({"mesh": {"pp": 2}, "validation": {"paths": ["text"]}})
    keys = {each.key: each.message for each in examine(plan, []).diagnostics}
    assert "pp = 2" in keys["validation.paths"]
    plan = ParallelPlan.from_dict({"validation": {"every": 5}})
    assert "validation.every" in {each.key for each in examine(plan, []).diagnostics}


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
    found = {each.key: each.message for each in examine(plan, []).diagnostics}
    if device_type() == "npu" and "start" in section:
        assert "profiles on NPUs are not supported" in found["profile.start"]
    else:
        assert text in found[key]
