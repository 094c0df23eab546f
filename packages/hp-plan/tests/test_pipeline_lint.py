"""What lint says of a pipeline."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest

from hp_plan import ParallelPlan, PipelineSection, PlanError, lint
from hp_plan.features.pipelines import ORDERS

pytestmark = pytest.mark.framework("torch")  # transformers' models are PyTorch's

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
EIGHT_BLOCKS = {"num_hidden_layers": 8}  # hanayo has four stages a rank


def texts(mesh, pipeline=(), **sections):
    model = {"config": "LlamaConfig", "overrides": SMALL}
    tables = {"model": model, "data": {"sequence_length": 32}, "mesh": mesh, "pipeline": dict(pipeline), **sections}
    return [str(diagnostic) for diagnostic in lint(tables)]


@pytest.mark.parametrize("schedule", [*ORDERS, "auto"])
def test_nothing_is_wrong_with_a_pipeline(schedule):
    fsdp, model = {"groups": ["model.layers.*"]}, {"config": "LlamaConfig", "overrides": SMALL | EIGHT_BLOCKS}
    assert texts({"pp": 2}, {"schedule": schedule}, model=model) == []
    mesh, pipeline = {"pp": 2, "dp_shard": 2, "tp": 2}, {"schedule": schedule, "micro_batches": 4}
    assert texts(mesh, pipeline, fsdp=fsdp, model=model) == []


def test_a_plan_names_every_schedule_that_has_an_order():
    named = get_args(get_type_hints(PipelineSection)["schedule"])
    assert sorted(named) == sorted([*ORDERS, "auto"])


@pytest.mark.parametrize(
    ("pipeline", "expected"),
    [
        (
            {"schedule": "1f1"},
            "pipeline.schedule: got '1f1' (str), expected one of 1f1b, gpipe, interleaved, looped-bfs, zb1p, zb2p, "
            "zbv, v-half, v-min, dualpipev, hanayo, auto; did you mean '1f1b'?",
        ),
        (
            {"micro_batch": 2},
            "pipeline.micro_batch: [pipeline] has no key 'micro_batch'; did you mean 'micro_batches'?",
        ),
        (
            {"micro_batches": 0},
            "pipeline.micro_batches: got 0 (int), expected a number of at least 1; write a number of at least 1",
        ),
        (
            {"split": "evn"},
            "pipeline.split: got 'evn' (str), expected one of auto, even or a list of numbers; did you mean 'even'?",
        ),
        (
            {"split": [4, 0]},
            "pipeline.split: got [4, 0] (list), expected a list of 2 numbers, each at least 1; write a list of 2 "
            "numbers, each at least 1",
        ),
        (
            {"micro_batches": 3},
            "pipeline.micro_batches: 8 samples do not divide into 3 micro-batches; make it one of 1, 2, 4, 8, or "
            "data.batch_size a multiple of 3",
        ),
        (
            {"split": [2, 1, 1]},
            "pipeline.split: got 3 stages, but '1f1b' on pp = 2 ranks has 2: 1 a rank; list 2 numbers of blocks",
        ),
        (
            {"schedule": "auto", "split": [2, 1, 1]},
            "pipeline.split: got 3 stages, which pp = 2 ranks do not divide; list 2 or 4 numbers of blocks",
        ),
        (
            {"schedule": "zbv", "split": [2, 2]},
            "pipeline.split: got 2 stages, but 'zbv' on pp = 2 ranks has 4: 2 a rank; list 4 numbers of blocks",
        ),
        (
            {"schedule": "zbv", "stages_per_rank": 3},
            "pipeline.stages_per_rank: got 3, but 'zbv' has 2 stages a rank; leave it out, or write schedule = "
            "'interleaved' or 'looped-bfs'",
        ),
        (
            {"schedule": "auto", "stages_per_rank": 2},
            "pipeline.stages_per_rank: got 2, but 'auto' chooses it; leave it out, or write schedule = 'interleaved' "
            "or 'looped-bfs'",
        ),
    ],
)
def test_numbers_that_make_no_pipeline(pipeline, expected):
    assert texts({"pp": 2}, pipeline) == [expected]


def test_a_part_of_the_batch_that_micro_batches_do_not_divide():
    fsdp = {"groups": ["model.layers.*"]}
    assert texts({"pp": 2, "dp_shard": 2}, {"micro_batches": 8}, fsdp=fsdp) == [
        "pipeline.micro_batches: 8 samples over 2 parts = 4 a rank do not divide into 8 micro-batches; make it one of "
        "1, 2, 4, or data.batch_size a multiple of 16"
    ]
    assert texts({"pp": 2, "dp_shard": 3}, {"micro_batches": 8}, fsdp=fsdp)[0].startswith("data.batch_size: ")


def test_a_pipeline_of_one_rank_is_refused():
    assert texts({"tp": 2}, {"schedule": "zbv", "micro_batches": 2}) == [
        "pipeline: schedule, micro_batches would have no effect: the mesh tp 2 has no pp axis; leave [pipeline] out, "
        "or make mesh.pp at least 2"
    ]


@pytest.mark.parametrize(
    ("mesh", "pipeline", "expected"),
    [
        (
            {"pp": 8},
            {},
            "mesh.pp: 8 stages, 1 on each of 8 ranks, of the model's 4 blocks; make mesh.pp at most 4, take fewer "
            "stages a rank, or more blocks",
        ),
        (
            {"pp": 2},
            {"schedule": "hanayo"},
            "mesh.pp: 8 stages, 4 on each of 2 ranks, of the model's 4 blocks; leave pp out, take fewer stages a rank, "
            "or more blocks",
        ),
        (
            {"pp": 2},
            {"split": [2, 1]},
            "pipeline.split: 2 + 1 = 3 blocks, but the model has 4; list 2 numbers that sum to 4",
        ),
    ],
)
def test_stages_that_the_model_cannot_have(mesh, pipeline, expected):
    assert texts(mesh, pipeline) == [expected]


def test_a_model_that_is_no_line_of_blocks():
    linear = {"function": "torch.nn:Linear", "overrides": {"in_features": 4, "out_features": 4}}
    (text,) = lint({"model": linear, "mesh": {"pp": 2}}, run_model_code=True)
    assert text.key == "mesh.pp" and text.message.startswith("Linear ")
    assert text.fix == "leave pp out, or write the stages yourself, for hp_pipeline's schedules"


def test_a_tied_weight_in_two_groups_of_one_rank_is_refused():
    overrides = {**SMALL, "tie_word_embeddings": True}
    sections = {"model": {"config": "LlamaConfig", "overrides": overrides}, "fsdp": {"groups": ["model.layers.*"]}}
    mesh = {"pp": 2, "dp_shard": 2}
    assert texts(mesh, {"schedule": "zbv"}, **sections) == [
        "pipeline.schedule: stages 0 and 3 share model.embed_tokens.weight, and are on one rank, whose groups of "
        "dp_shard can't share it; take a schedule without stages there and back, such as 'interleaved', or "
        "tie_word_embeddings = false"
    ]
    assert texts(mesh, {"schedule": "interleaved"}, **sections) == []


def test_a_budget_with_stages_is_refused():
    assert texts({"pp": 2}, memory={"budget": "20GiB"}) == [
        "memory.budget: got a budget with mesh.pp = 2, which this version does not support; leave [memory] out; a "
        "schedule such as 'v-half' or 'v-min' saves memory (hyper-parallel schedule)"
    ]


def test_the_constructor_checks_as_the_file_does():
    with pytest.raises(PlanError, match=r"pipeline.split: got \[2, 0\]"):
        ParallelPlan(pipeline=PipelineSection(split=(2, 0)))
    plan = ParallelPlan(pipeline=PipelineSection(schedule="interleaved", split=(1, 1, 1, 1)))
    assert ParallelPlan.from_dict(plan.to_dict()) == plan
