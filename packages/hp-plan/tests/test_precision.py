"""`[precision]`: which layers multiply in eight bits, what is refused, and what a run under a plan is."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hp_dtensor.debugging.debug import CommDebugMode
from hp_plan import ParallelPlan, PlanError, apply, build_model, lint, verify
from hp_plan.checks.precision import low_precision_layers, precision_notes
from hp_plan.port import models
from hp_testing import device_type, on_ranks

pytest.importorskip("torchao", reason="needs torchao: nox -s low_precision")

SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
LLAMA = {"config": "LlamaConfig", "overrides": {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}}
MIXTRAL = {"config": "MixtralConfig", "overrides": {**LLAMA["overrides"], "num_local_experts": 4}}
GATHERED = {"linear": "float8-tensorwise", "all_gather": "float8", "kernels": "emulated"}


def plan_of(mesh: dict[str, int], precision: dict[str, Any], **sections: Any) -> ParallelPlan:
    data = {"sequence_length": 32, "batch_size": 12}
    precision = {"kernels": "emulated", **precision}
    return ParallelPlan.from_dict({"model": LLAMA, "mesh": mesh, "data": data, "precision": precision, **sections})


def messages(plan: ParallelPlan) -> str:
    return "\n".join(str(each) for each in lint(plan))


# ---- which layers ----
def test_output_layer_and_routers_stay_by_default():
    plan = plan_of({}, {"linear": "float8-rowwise"}, model=MIXTRAL)
    outline = models().outline(build_model(plan, device="meta"))
    names = low_precision_layers(plan, outline)
    assert {name.rpartition(".")[2] for name in names} == {"q_proj", "k_proj", "v_proj", "o_proj"} and len(names) == 8
    assert precision_notes(plan, outline) == ["[precision] leaves these layers in the model's own dtype: lm_head"]
    plan = plan_of({}, {"linear": "float8-rowwise", "exclude": ["model.layers.0", "lm_head"]})
    outline = models().outline(build_model(plan, device="meta"))
    assert all(name.startswith("model.layers.1.") for name in low_precision_layers(plan, outline))
    (note,) = precision_notes(plan, outline)
    assert "dtype: model.layers.0.self_attn.q_proj, " in note and "*" not in note and note.endswith(", lm_head")
    plan = plan_of({}, {"linear": "float8-rowwise", "exclude": []})
    assert "lm_head" in low_precision_layers(plan, outline)


def test_patterns_that_match_nothing_are_refused():
    """A list of names that match nothing converted everything, and nobody saw it: a complaint about other trainers."""
    text = messages(plan_of({}, {"linear": "float8-tensorwise", "exclude": ["lm_heads", "model.norm"]}))
    assert "precision.exclude[0]: 'lm_heads' matches no module; did you mean 'lm_head'" in text
    assert "precision.exclude[1]: 'model.norm' matches model.norm, and no Linear layer" in text


def test_shapes_that_cannot_be_multiplied_are_named():
    odd = {**LLAMA, "overrides": {**LLAMA["overrides"], "intermediate_size": 72}}
    text = messages(plan_of({}, {"linear": "float8-tensorwise"}, model=odd))
    assert (
        "model.layers.*.mlp.gate_proj, model.layers.*.mlp.up_proj of shape [72, 64]; model.layers.*.mlp.down_proj"
        in text
    )
    assert "of shape [64, 72] can't be multiplied" in text and text.count("\n") == 0
    assert "add 'model.layers.*.mlp.gate_proj', 'model.layers.*.mlp.up_proj', 'model.layers.*.mlp.down_proj'" in text
    exclude = ["lm_head", "model.layers.*.mlp"]
    assert not lint(plan_of({}, {"linear": "float8-tensorwise", "exclude": exclude}, model=odd))
    text = messages(plan_of({"tp": 2}, {"linear": "mxfp8"}))
    assert "k_proj, model.layers.*.self_attn.v_proj of shape [32, 64] over tp = 2 ranks can't be multiplied" in text


REFUSED = [
    ({}, {"linear": None, "all_gather": "float8"}, {}, "precision: .*all_gather.* would have no effect"),
    ({"dp_shard": 2}, {"linear": "float8-rowwise", "all_gather": "float8"}, {}, "a scale for each row in two"),
    ({"tp": 2}, {"linear": "float8-tensorwise", "all_gather": "float8"}, {}, "the mesh tp 2 gathers no weights"),
    ({}, {"linear": "mxfp8", "kernels": "auto"}, {}, "a CPU has no product of blocks with scales; make .*emulated"),
    (
        {"tp": 2},
        {"linear": "float8-rowwise"},
        {"styles": "auto-sequence", "communication": {"async_tensor_parallel": "auto"}},
        "'float8-rowwise' with communication.async_tensor_parallel",
    ),
    ({}, {"linear": "float8-tensorwise"}, {"adapter": {"kind": "lora", "targets": ["all-linear"]}}, "with an adapter"),
    ({}, {"linear": "float8-tensorwise"}, {"data": {"sequence_length": 9, "batch_size": 1}}, "multiplies 9 tokens at"),
    (
        {"dp_shard": 2},
        GATHERED,
        {"compile": {"blocks": ["model.layers.*"]}},
        "weights that are gathered as bytes are not traced",
    ),
    (
        {},
        {"linear": "mxfp8"},
        {"compile": {"blocks": ["model.layers.*"]}},
        "emulated products of blocks are not traced",
    ),
    ({"dp_shard": 2}, GATHERED, {"memory": {"budget": "1 GB"}}, "with memory.budget, whose plan of what is computed"),
    ({"dp_shard": 2}, GATHERED, {"optimizer": {"name": "adamw8bit"}}, "states are cut in blocks of 256 elements"),
]


@pytest.mark.parametrize(("mesh", "precision", "sections", "text"), REFUSED, ids=[each[-1][:24] for each in REFUSED])
def test_what_does_not_go_together_is_refused(mesh: Any, precision: Any, sections: Any, text: str):
    import re

    found = messages(plan_of(mesh, {key: value for key, value in precision.items() if value}, **sections))
    assert re.search(text, found), found


def test_a_tied_weight_is_not_gathered_as_bytes():
    tied = {**LLAMA, "overrides": {**LLAMA["overrides"], "tie_word_embeddings": True}}
    assert not lint(plan_of({"dp_shard": 2}, GATHERED, model=tied))
    text = messages(plan_of({"dp_shard": 2}, {**GATHERED, "exclude": []}, model=tied))
    assert "the weight of lm_head is tied to another layer's" in text


# ---- runs ----
def layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for module in model.modules() if type(module).__name__ == "Float8Linear"]


@on_ranks(2)
def test_parameters_and_modules_stay_the_same_objects():
    plan = plan_of({"dp_shard": 2}, GATHERED)
    model = build_model(plan).to(device_type())
    parameters, modules = list(model.parameters()), list(model.modules())
    apply(model, plan)
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert all(one is other for one, other in zip(modules, model.modules(), strict=True)) and len(layers(model)) == 14
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())


MESHES = [
    ({"dp_shard": 2}, GATHERED),
    ({"tp": 2}, {"linear": "float8-rowwise"}),
    ({"pp": 2}, {"linear": "float8-tensorwise"}),
    ({"cp": 2}, GATHERED),
    ({"dp_shard": 3}, GATHERED),
    ({"dp_shard": 2, "dp_replicate": 2}, GATHERED),
    ({"dp_shard": 2, "tp": 2}, GATHERED),
    ({"dp_shard": 2, "pp": 2}, GATHERED),
    ({"tp": 2, "pp": 2}, {"linear": "float8-rowwise"}),
    ({"dp_shard": 2, "ep": 2}, {**GATHERED, "model": MIXTRAL}),
]


def verified(mesh: dict[str, int], precision: dict[str, Any]) -> None:
    precision = dict(precision)
    model = precision.pop("model", LLAMA)
    styles = "auto-sequence" if "tp" in mesh else "auto"
    result = verify(plan_of(mesh, precision, model=model, styles=styles))
    assert result.passed, (mesh, precision, result.largest, result.first)
    assert any("what is cast to eight bits is multiplied in float64" in note for note in result.notes)


@on_ranks(2)
@pytest.mark.parametrize("case", range(4))
def test_a_plan_on_two_ranks_is_that_of_one_process(case: int):
    verified(*MESHES[case])


@on_ranks(3)
def test_a_plan_on_three_ranks_is_that_of_one_process():
    verified(*MESHES[4])


@on_ranks(4)
@pytest.mark.parametrize("case", range(5, 9))
def test_a_plan_on_four_ranks_is_that_of_one_process(case: int):
    verified(*MESHES[case])


@on_ranks(2)
def test_experts_beside_layers_in_eight_bits():
    verified(*MESHES[9])


def gathered_bytes(precision: dict[str, Any], dtype: str | None = None) -> int:
    fsdp = {} if dtype is None else {"param_dtype": dtype}
    plan = plan_of({"dp_shard": 2}, precision, fsdp=fsdp)
    if not precision:
        plan = dataclasses.replace(plan, precision=type(plan.precision)())
    model = apply(build_model(plan).to(device_type()), plan)
    tokens = torch.zeros(1, 32, dtype=torch.int64, device=device_type())
    with torch.no_grad():
        model(tokens)
        with CommDebugMode() as comm:
            model(tokens)
    return sum(event.bytes for event in comm.events if event.kind == "all_gather" and "layers" in event.module)


@on_ranks(2)
def test_a_gather_carries_a_quarter_of_float32s_bytes():
    """Norms, which are not multiplied, travel as they are."""
    norms = 2 * 2 * 64
    encoded, full, half = gathered_bytes(GATHERED), gathered_bytes({}), gathered_bytes({}, "bfloat16")
    assert encoded - norms * 4 == (full - norms * 4) / 4 == (half - norms * 2) / 2


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("linear", ["float8-tensorwise", "float8-rowwise"])
@on_ranks(2)
def test_compiled_blocks_have_the_same_bits(linear: str):
    results = []
    for blocks in ({}, {"compile": {"blocks": ["model.layers.*"], "backend": "aot_eager"}}):
        plan = plan_of({"dp_shard": 2}, {"linear": linear}, **blocks)
        model: Any = apply(build_model(plan).to(device_type()), plan)
        tokens = torch.arange(32, device=device_type())[None]
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        results.append([loss.detach(), *(each.grad.full_tensor() for each in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@on_ranks(2)
def test_products_without_torchao_are_refused_on_all_ranks(monkeypatch: pytest.MonkeyPatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "torchao" else find(name))
    with pytest.raises(PlanError, match="torchao is not installed; pip install 'torchao>="):
        plan = plan_of({"dp_shard": 2}, GATHERED)
        apply(build_model(plan), plan)
    assert dist.get_world_size() == 2
