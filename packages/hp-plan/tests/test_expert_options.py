"""`[experts]` of a plan: each option reaches the experts, trains the same weights, and is refused where it can't be."""

from __future__ import annotations

import dataclasses

import pytest
from expert_families import plan_of

from hp_moe import rebalance
from hp_plan import ExpertsSection, ParallelPlan, apply, build_model, lint, verify
from hp_plan.port import models
from hp_plan.structure.memory import training_bytes
from hp_testing import device_type, on_ranks

pytestmark = [
    pytest.mark.framework("torch"),  # transformers' models are PyTorch's
    pytest.mark.not_on("torch-npu-sim", "torch-npu", reason="reduces float64 over ranks, which HCCL does not"),
]
FEATURES = {"model.layers.*.mlp.experts": "expert_tensor_parallel"}


def with_options(mesh, styles="auto", **options) -> ParallelPlan:
    plan = plan_of("Qwen3MoeConfig", mesh, experts=8, styles=styles)
    return dataclasses.replace(plan, experts=ExpertsSection(**options))


def layers_of(model):
    return [module._expert_layer for module in model.modules() if hasattr(module, "_expert_layer")]


@on_ranks(2)
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"dp_shard": 2, "ep": 2}, {"combine": "exact"}),
        ({"dp_shard": 2, "ep": 2}, {"exchange": "all_gather"}),
        ({"tp": 2, "ep": 2}, {"chunks": 2}),
        ({"dp_shard": 2, "ep": 2}, {"capacity": 64}),
        ({"dp_shard": 2, "ep": 2}, {"slots": 1, "combine": "exact"}),
    ],
    ids=str,
)
def test_options_reach_the_experts_and_train_the_same_weights(mesh, options):
    plan = with_options(mesh, **options)
    result = verify(plan, tolerance=1e-10)
    assert result.passed, (result.first, result.largest)
    layers = layers_of(apply(build_model(plan).to(device_type()), plan))
    names = {"combine": "combine_tokens", "exchange": "token_dispatcher"}
    for name, value in options.items():
        assert layers and all(getattr(layer.style, names.get(name, name)) == value for layer in layers)


@on_ranks(4)
@pytest.mark.parametrize(
    ("mesh", "styles"), [({"dp_shard": 4, "ep": 2}, "auto"), ({"dp_shard": 2, "tp": 2, "ep": 2}, FEATURES)], ids=str
)
def test_replicas_train_the_same_weights(monkeypatch, mesh, styles):
    import hp_plan.torch.verify as module

    chosen, update = [], module._Run.update

    def and_rebalance(run, clip):
        update(run, clip)
        if layers_of(run._model):
            chosen.append(rebalance(run._model))

    monkeypatch.setattr(module._Run, "update", and_rebalance)
    result = verify(with_options(mesh, styles, slots=1), steps=3, tolerance=1e-10)
    assert result.passed, (result.first, result.largest)
    assert any(any(placement.replicas) for each in chosen for placement in each.values())


def test_replicas_are_in_the_estimate():
    outline = models().outline(build_model(with_options({"dp_shard": 2, "ep": 2}), device="meta"))
    without, with_one = (training_bytes(with_options({"dp_shard": 2, "ep": 2}, slots=n), outline) for n in (0, 1))
    assert with_one > without


EP = {"dp_shard": 2, "ep": 2}


@pytest.mark.parametrize(
    ("mesh", "styles", "options", "expected"),
    [
        (
            {"dp_shard": 2},
            "auto",
            {"chunks": 2},
            "experts: chunks would have no effect: mesh.ep is 1; leave [experts] out",
        ),
        (EP, "auto", {"combine": "exact", "chunks": 2}, "experts.chunks: got 2 with experts.combine = 'exact', but a"),
        (
            EP,
            "auto",
            {"combine": "exact", "exchange": "all_gather"},
            "experts.exchange: got 'all_gather' with experts.co",
        ),
        (
            EP,
            "auto",
            {"capacity": 4, "slots": 1},
            "experts.slots: got 1 with experts.capacity = 4, but a replica is for",
        ),
        (
            EP,
            "auto",
            {"exchange": "all_gather", "chunks": 2},
            "experts.chunks: got 2 with experts.exchange = 'all_gather'",
        ),
        (EP, "auto", {"every": 5}, "experts.every: got 5, which nothing uses without slots or a capacity"),
        (
            {"pp": 2, **EP},
            "auto",
            {"slots": 1},
            "experts.slots: got 1 with mesh.pp = 2, whose stages have different experts",
        ),
        (
            {"dp_shard": 2, "tp": 2, "ep": 2},
            FEATURES,
            {"chunks": 2},
            "experts.chunks: got 2, which 'expert_tensor_parallel' does not have; leave it out, or",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(mesh, styles, options, expected):
    texts = [str(diagnostic) for diagnostic in lint(with_options(mesh, styles, **options))]
    assert any(text.startswith(expected) for text in texts), texts
