"""Memory that `propose` counts for a plan; `benchmarks/bench_estimates.py` compares it with peaks of real steps."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from hp_pipeline import Pipeline, check, placed
from hp_plan import ParallelPlan, build_model
from hp_plan.features.pipelines import ORDERS
from hp_plan.port import models
from hp_plan.proposal import _Counts, _in_flight

pytestmark = pytest.mark.framework("torch")  # transformers' models are PyTorch's

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
LENGTH, ROWS = 32, 8


def plan_of(mesh, config="LlamaConfig", **sections):
    overrides = {**SIZES, "intermediate_size": 80} if config == "LlamaConfig" else {**SIZES, "ffn_dim": 80}
    data = {"sequence_length": LENGTH, "batch_size": ROWS}
    return ParallelPlan.from_dict(
        {"model": {"config": config, "overrides": overrides}, "data": data, "mesh": mesh, **sections}
    )


def saved_by(plan):
    empty = build_model(plan, device="meta")
    return _Counts(empty, models().outline(empty), plan.run.dtype).estimate(plan).saved


@pytest.mark.parametrize("config", ["LlamaConfig", "OPTConfig"])
def test_what_backward_needs_is_what_a_forward_saves(config):
    plan = plan_of({}, config)
    model, kept = build_model(plan), {}
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = tensor.detach()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(input_ids=torch.zeros(ROWS, LENGTH, dtype=torch.int64), use_cache=False)
    real = sum(each.untyped_storage().nbytes() for each in kept.values())
    counted = saved_by(plan) - 3 * 4 * ROWS * LENGTH * SIZES["vocab_size"]  # but for logits and their loss
    assert out.logits.requires_grad
    assert 0.95 * real < counted < 1.15 * real


def test_hidden_states_are_whole_on_ranks_of_tp_and_parts_of_the_sequence_are_not():
    whole, tp, cp = (saved_by(plan_of(mesh)) for mesh in ({}, {"tp": 2}, {"cp": 2}))
    assert 0.6 * whole < tp < 0.9 * whole
    assert 0.5 * whole <= cp < 0.6 * whole


def test_a_stage_has_more_than_one_micro_batch_at_a_time():
    first, later = (saved_by(plan_of({"pp": 2}, pipeline={"schedule": name})) for name in ("1f1b", "zbv"))
    logits = 3 * 4 * LENGTH * SIZES["vocab_size"]  # of one sample, with their loss
    sample = saved_by(plan_of({})) / ROWS - logits
    assert first == pytest.approx(1.5 * sample, rel=0.01)
    assert later == pytest.approx(1.5 * sample + logits, rel=0.01), "the rank with the first stage has the last, too"


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("micros", [4, pytest.param(32, marks=pytest.mark.thorough)])
def test_as_many_micro_batches_are_counted_as_the_schedule_holds(name, micros):
    shape, write = ORDERS[name]
    pipeline = Pipeline(placed(shape, 8), micros)
    held = max(check(write(pipeline), pipeline)) / len(pipeline.placement)
    plan = plan_of({"pp": 8}, pipeline={"schedule": name, "micro_batches": micros})
    assert _in_flight(plan) == held + 1 / 8


def test_auto_is_counted_as_the_schedule_that_bounds_it():
    def counted(**pipeline):
        return _in_flight(plan_of({"pp": 4}, pipeline={"micro_batches": 16, **pipeline}))

    assert counted(schedule="auto") == counted(schedule="1f1b") == 5 / 4
    assert counted(schedule="auto", split=[1] * 8) == counted(schedule="interleaved") == 6.5 / 4
