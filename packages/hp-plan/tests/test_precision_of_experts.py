"""`[precision] experts`: grouped products in eight bits, over ranks and in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hp_plan.torch.models
from hp_dtensor import DTensor
from hp_plan import ParallelPlan, apply, build_model, lint, verify
from hp_plan.checks.precision import precision_notes
from hp_plan.port import models
from hp_testing import device_type, on_ranks

pytest.importorskip("torchao", reason="needs torchao: nox -s low_precision")

SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
HEADS = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}
MIXTRAL = {"config": "MixtralConfig", "overrides": {**HEADS, "num_local_experts": 4}}
QWEN = {
    "config": "Qwen3MoeConfig",
    "overrides": {**HEADS, "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 6, "num_experts_per_tok": 2},
}
DEEP = {**MIXTRAL, "overrides": {**MIXTRAL["overrides"], "num_hidden_layers": 4}}
SCHEDULES = ["gpipe", "interleaved", "zbv"]
FORMATS = ["float8-rowwise", "mxfp8"]


def plan_of(mesh: dict[str, int], form: str, *, model: Any = MIXTRAL, **sections: Any) -> ParallelPlan:
    data = {"sequence_length": 32, "batch_size": 12}
    precision = {"experts": form, "kernels": "emulated", **sections.pop("precision", {})}
    return ParallelPlan.from_dict({"model": model, "mesh": mesh, "data": data, "precision": precision, **sections})


def verified(mesh: dict[str, int], form: str, **sections: Any) -> None:
    result = verify(plan_of(mesh, form, **sections))
    assert result.passed, (mesh, form, result.largest, result.first)
    assert any(f"{form} was emulated" in note for note in result.notes)


CASES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp_shard": 2}, {}),
    ({"dp_shard": 2, "ep": 2}, {"memory": {"recompute": ["model.layers.*"]}}),
    ({"tp": 2, "ep": 2}, {"precision": {"linear": "float8-tensorwise"}}),
    ({"cp": 2, "ep": 2}, {}),
    ({"dp_shard": 2, "ep": 2}, {"run": {"accumulate": 2}, "experts": {"exchange": "all_gather"}}),
    ({"dp_shard": 2, "ep": 2}, {"experts": {"combine": "exact"}}),
]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("case", range(len(CASES)))
@on_ranks(2)
def test_experts_on_two_ranks_are_those_of_one_process(case: int, form: str):
    mesh, sections = CASES[case]
    verified(mesh, form, **sections)


ONE_AT_A_TIME: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp_shard": 2, "ep": 2}, {}),
    ({"dp_replicate": 2}, {}),
    ({"cp": 2}, {}),
    ({"dp_shard": 2}, {"run": {"deterministic": True}}),
    ({"dp_shard": 2}, {"memory": {"homes": {"model.layers.*": "host"}}}),
    ({"dp_shard": 2, "ep": 2}, {"memory": {"swap": ["model.layers.*"]}}),
    ({"dp_shard": 2, "ep": 2}, {"fsdp": {"offload": True}}),
    ({"dp_shard": 2, "ep": 2}, {"optimizer": {"name": "muon"}}),
    *(({"pp": 2}, {"model": DEEP, "pipeline": {"schedule": each, "micro_batches": 4}}) for each in SCHEDULES),
]


@pytest.mark.thorough
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("case", range(len(ONE_AT_A_TIME)))
@on_ranks(2)
def test_experts_with_one_thing_at_a_time(case: int, form: str):
    mesh, sections = ONE_AT_A_TIME[case]
    verified(mesh, form, **sections)


@on_ranks(2)
def test_a_capacity_goes_with_scales_of_rows():
    verified({"dp_shard": 2, "ep": 2}, "float8-rowwise", experts={"capacity": 200})


@pytest.mark.thorough
@pytest.mark.parametrize("form", FORMATS)
@on_ranks(4)
def test_experts_on_three_axes(form: str):
    verified({"tp": 2, "pp": 2, "ep": 2}, form)
    verified({"dp_shard": 2, "tp": 2, "ep": 4}, form)
    verified({"dp_shard": 2, "cp": 2, "ep": 4}, form)
    verified({"dp_shard": 2, "dp_replicate": 2, "ep": 2}, form)


@pytest.mark.parametrize("form", FORMATS)
@on_ranks(4)
def test_experts_on_four_ranks_are_those_of_one_process(form: str):
    verified({"dp_shard": 4, "ep": 2}, form)
    verified({"dp_shard": 4, "ep": 4}, form, model=QWEN)  # six experts: of some ranks two, of some one
    verified({"dp_shard": 2, "pp": 2, "ep": 2}, form)


REFUSED: list[tuple[dict[str, int], dict[str, Any], str]] = [
    ({"tp": 2}, {}, "with mesh.tp = 2, whose ranks have parts of model.layers.*.mlp.experts; make mesh.ep a multiple"),
    (
        {"dp_shard": 2, "ep": 2},
        {"experts": {"chunks": 2}},
        "experts.chunks = 2, which cuts an expert's tokens in parts",
    ),
    ({"dp_shard": 2, "ep": 2}, {"experts": {"slots": 1}}, "experts.slots = 1, which cuts an expert's tokens in parts"),
    ({}, {"precision": {"kernels": "auto"}}, "a CPU has no grouped product in eight bits; make precision.kernels"),
    (
        {},
        {"precision": {"exclude": ["lm_head"]}},
        "'lm_head' matches lm_head, and no experts to multiply in eight bits",
    ),
    ({}, {"precision": {"exclude": ["model.layers"]}}, "got 'mxfp8', but all experts are left out"),
    (
        {},
        {"compile": {"blocks": ["model.layers.*"]}},
        "an expert's tokens are counted on the host, which is not traced",
    ),
    ({}, {"optimizer": {"name": "adamw8bit"}}, "with adamw8bit, whose states are cut in blocks"),
]


@pytest.mark.parametrize(("mesh", "sections", "text"), REFUSED, ids=[each[-1][:24] for each in REFUSED])
def test_what_does_not_go_together_is_refused(mesh: dict[str, int], sections: dict[str, Any], text: str):
    found = "\n".join(str(each) for each in lint(plan_of(mesh, "mxfp8", **sections)))
    assert text in found, found


def test_kernels_in_float16_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hp_plan.torch.models, "lacks_products", lambda *_: None)
    plan = plan_of({}, "mxfp8", precision={"kernels": "auto"}, fsdp={"param_dtype": "float16"})
    (found,) = (each for each in lint(plan) if each.key == "precision.experts")
    assert "whose grouped kernels take float32 and bfloat16, with float16; write 'bfloat16'" in str(found)


def test_shapes_and_models_without_experts_are_named():
    odd = {**MIXTRAL, "overrides": {**MIXTRAL["overrides"], "intermediate_size": 48}}
    assert not lint(plan_of({}, "float8-rowwise", model=odd))
    (found,) = lint(plan_of({}, "mxfp8", model=odd))
    assert "model.layers.*.mlp.experts of shape [4, 64, 48] can't be multiplied in mxfp8, whose dims are" in str(found)
    dense = {"config": "LlamaConfig", "overrides": HEADS}
    (found,) = lint(plan_of({}, "mxfp8", model=dense))
    assert "got 'mxfp8', but LlamaForCausalLM has no experts; leave precision.experts out" in str(found)


def test_layers_stay_where_experts_alone_are_named():
    plan = plan_of({}, "mxfp8", precision={"exclude": ["model.layers.0"]})
    model: Any = build_model(plan)
    outline = models().outline(model)
    (note,) = precision_notes(plan, outline)
    assert note.endswith("dtype: model.layers.0.mlp.experts")
    apply(model, plan)
    assert [hasattr(layer.mlp.experts, "grouped_product") for layer in model.model.layers] == [False, True]


@pytest.mark.parametrize("form", FORMATS)
def test_products_differ_from_the_models_own_and_master_weights_do_not(form: str):
    """By the figure of eight bits: a format that nothing casts to would pass every comparison."""
    plan = plan_of({}, form)
    model = build_model(plan).to(device_type())
    before = {name: value.clone() for name, value in model.named_parameters()}
    tokens = torch.arange(32, device=device_type())[None]
    with torch.no_grad():
        expected = model(tokens).logits
        logits = apply(model, plan)(tokens).logits
    assert 1e-4 < (logits - expected).abs().max() / expected.abs().max() < 0.1
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        assert whole.dtype is torch.float32 and torch.equal(whole, before[name])
