"""Memory that `propose` counts for a plan; `benchmarks/bench_estimates.py` compares it with peaks of real steps."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from hp_plan import ParallelPlan, build_model
from hp_plan.port import models
from hp_plan.proposal import _Counts

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
    sample = (saved_by(plan_of({})) - 3 * 4 * ROWS * LENGTH * SIZES["vocab_size"]) / ROWS
    assert first == pytest.approx(1.5 * sample, rel=0.01) and later == pytest.approx(1.5 * sample, rel=0.01)
