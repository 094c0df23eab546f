"""Nothing of a step under a style waits for Python's collector."""

from __future__ import annotations

from typing import Any

import pytest
import sparse_model
import torch
import torch.nn.functional as F
from context_models import SIZE, Model, context_mesh, loss_of, random_batch

from hp_dtensor import Replicate
from hp_styles import (
    AsyncContextParallel,
    ColwiseParallel,
    ContextParallel,
    DSAIndexerContextParallel,
    DSAIndexerLossContextParallel,
    DSASparseAttentionContextParallel,
    RowwiseParallel,
    context_parallel,
    context_parallel_shard,
    loss_parallel,
    parallelize_module,
)
from hp_testing import device_type, on_ranks
from hp_testing.leftovers import leftovers

pytestmark = pytest.mark.framework("torch")

STYLES: dict[str, Any] = {
    "heads": ContextParallel(load_balance=True),
    "ring": ContextParallel(ulysses_degree=1),
    "early": AsyncContextParallel(q_proj="q", k_proj="k", v_proj="v", head_size=SIZE),
}


@on_ranks(2)
@pytest.mark.parametrize("recompute", ["", "reentrant", "not reentrant"])
@pytest.mark.parametrize("kind", STYLES)
def test_context_parallel_attention_leaves_nothing_to_the_collector(kind: str, recompute: str) -> None:
    mesh, model, style = context_mesh(), Model(recompute=recompute), STYLES[kind]
    parallelize_module(model, mesh, {"layers.*": style})
    part = context_parallel_shard(random_batch(), mesh, load_balance=kind == "heads")
    assert leftovers(lambda: loss_of(model(part["ids"], part["places"]), part["targets"]).backward()) == []


@on_ranks(2)
def test_a_context_parallel_block_leaves_nothing_to_the_collector() -> None:
    mesh, model, data = context_mesh(), Model(), random_batch()

    def step() -> None:
        with context_parallel(mesh, buffers=list(data.values()), buffer_seq_dims=[1, 1, 1]):
            loss_of(model(data["ids"], data["places"]), data["targets"]).backward()

    assert leftovers(step) == []


@on_ranks(2)
def test_sparse_attention_leaves_nothing_to_the_collector() -> None:
    mesh, model = context_mesh(), sparse_model.Model()
    keys = ("key", "value", "key_rope")
    plan = {
        "layers.*.indexer": DSAIndexerContextParallel(),
        "layers.*.core": DSASparseAttentionContextParallel(keys=keys, positions=None),
        "layers.*.loss": DSAIndexerLossContextParallel(),
    }
    parallelize_module(model, mesh, plan)
    part = context_parallel_shard(sparse_model.batch(), mesh, load_balance=True)

    def step() -> None:
        logits, _, loss = model(part["ids"], part["places"])
        sparse_model.total(logits, part["targets"], loss).backward()

    assert leftovers(step) == []


@on_ranks(2)
def test_sharded_classes_leave_nothing_to_the_collector() -> None:
    mesh = context_mesh()
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 6), torch.nn.Linear(6, 8))
    model.to(device_type())
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh, {**plan, "3": ColwiseParallel(use_local_output=False)})
    rows, targets = torch.ones(4, 6, device=device_type()), torch.arange(4, device=device_type())

    def step() -> None:
        with loss_parallel(z_loss=1e-4):
            F.cross_entropy(model(rows), targets).backward()

    assert leftovers(step) == []
