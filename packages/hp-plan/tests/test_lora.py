"""`[adapter]` and `[model] freeze`: trained as by peft in one process, on every axis."""

from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file

from hp_checkpoint.extend import Ranks
from hp_dtensor import DTensor
from hp_plan import ParallelPlan, PlanError, build_model, build_optimizer, build_parallel_model, lint
from hp_plan.extend import data_parallel_place
from hp_plan.features.adapters import saved_name
from hp_plan.torch.compared import Float64
from hp_plan.torch.extend import backward_loss
from hp_plan.torch.library.adapters import adapter_texts
from hp_testing import device_type, on_ranks

SMALL = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
}
BASE = {"config": "LlamaConfig", "overrides": SMALL}
LORA = {"kind": "lora", "rank": 3, "alpha": 5.0}


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def plan_of(folder: Path, mesh: dict[str, int], *, adapter: Any = None, **sections: Any) -> ParallelPlan:
    tables: dict[str, Any] = {
        "model": {"path": str(folder / "model")},
        "adapter": {**LORA, **(adapter or {})},
        "mesh": mesh,
        "data": {"batch_size": 4, "sequence_length": 8},
        "run": {"dtype": "float64"},
        **({"fsdp": {"groups": ["model.layers.*"]}} if {"dp_shard", "cp"} & set(mesh) else {}),
    }
    for name, table in sections.items():
        tables[name] = table if isinstance(table, str) else {**tables.get(name, {}), **table}
    return ParallelPlan.from_dict(tables)


def write_folders(folder: Path, base: Any = BASE, **adapter: Any) -> None:
    """Write a model, and an adapter to go on from whose B is not 0; rank 0 does."""
    ranks = torch.distributed.is_initialized()
    if not ranks or torch.distributed.get_rank() == 0:
        _write(folder, base, adapter)
    if ranks:
        Ranks().gather(b" ")


def _write(folder: Path, base: Any, adapter: dict[str, Any]) -> None:
    plan = ParallelPlan.from_dict({"model": base, "run": {"dtype": "float64"}})
    build_model(plan).save_pretrained(folder / "model")
    model = build_model(plan_of(folder, {}, adapter=adapter))
    generator = torch.Generator().manual_seed(4)
    saved = {saved_name(name): p.detach() for name, p in model.named_parameters() if p.requires_grad}
    drawn = {name: torch.randn(p.shape, generator=generator, dtype=p.dtype) / 5 for name, p in saved.items()}
    (folder / "adapter").mkdir()
    save_file({str(name): value for name, value in drawn.items()}, folder / "adapter" / "adapter_model.safetensors")
    for name, content in adapter_texts(model).items():
        (folder / "adapter" / name).write_bytes(content)


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check(folder: Path, mesh: dict[str, int], *, base: Any = BASE, adapter: Any = None, **sections: Any) -> None:
    """Three steps of AdamW, each gradient compared with those of peft's own model."""
    write_folders(folder, base, **(adapter or {}))
    given = {**(adapter or {}), "weights": str(folder / "adapter")}
    plan = plan_of(folder, mesh, adapter=given, **sections)
    single = plan_of(folder, {}, adapter=given)
    own = {"model": {"path": str(folder / "model")}, "run": {"dtype": "float64"}}
    frozen = build_model(ParallelPlan.from_dict(own)).to(device_type())
    with warnings.catch_warnings():  # peft 0.21 reads a name that transformers 5.23 calls deprecated
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys", RuntimeWarning)  # its own
        options: Any = {"is_trainable": True, "autocast_adapter_dtype": False}
        reference: Any = PeftModel.from_pretrained(frozen, str(folder / "adapter"), **options)
    model = build_parallel_model(plan)
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    trained = {name.removeprefix("base_model.model."): p for name, p in reference.named_parameters() if p.requires_grad}
    assert names <= trained.keys() and names
    optimizers = [
        build_optimizer(single, list(trained.items())),
        build_optimizer(plan, [(name, p) for name, p in model.named_parameters()]),
    ]
    parts, place = plan.mesh.data_parallel, data_parallel_place(plan)
    for step in range(3):
        tokens = torch.randint(24, (4, 8), generator=torch.Generator().manual_seed(step)).to(device_type())
        labels = tokens.masked_fill(tokens % 3 == 0, -100)
        own = slice(place * 4 // parts, (place + 1) * 4 // parts)
        with Float64():
            reference(input_ids=tokens, labels=labels).loss.backward()
            backward_loss(plan, model, tokens[own], labels=labels[own])
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                torch.testing.assert_close(whole(parameter.grad), trained[name].grad, atol=1e-12, rtol=1e-10, msg=name)
            else:
                assert parameter.grad is None
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    states = optimizers[1].state
    assert len(states) == len(names), "of the adapter alone"


MESHES = {
    "fsdp": {"dp_shard": 2},
    "tp": {"tp": 2},
    "cp": {"cp": 2},
    "pp": {"pp": 2},
}


@on_ranks(2)
@pytest.mark.parametrize("mesh", list(MESHES))
def test_an_adapter_is_trained_as_by_peft(folder: Path, mesh: str):
    check(folder, MESHES[mesh])


@on_ranks(2)
def test_some_targets_with_a_module_that_is_trained_whole(folder: Path):
    adapter = {"targets": ["q_proj", "model.layers.*.mlp.down_proj"], "modules": ["lm_head"], "rslora": True}
    check(folder, {"dp_shard": 2}, adapter=adapter)


@on_ranks(2)
def test_sequence_parallel_and_recomputation(folder: Path):
    check(folder, {"tp": 2}, styles="auto-sequence", memory={"recompute": ["model.layers.*"]})


@on_ranks(4)
@pytest.mark.parametrize("mesh", [{"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}], ids=str)
def test_two_axes_with_frozen_inputs_computed_again(folder: Path, mesh: dict[str, int]):
    check(folder, mesh, memory={"recompute": ["model.layers.*"]})


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "decoder_sparse_step": 1}
MOE = {"config": "Qwen3MoeConfig", "overrides": {**SMALL, **EXPERTS}}


def tiers(*usual: dict[str, int]) -> list[Any]:
    """All meshes; those that are not named are for runs of all tests."""
    meshes = [{"dp_shard": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2}, {"dp_shard": 2, "ep": 2}, {"tp": 2, "ep": 2}]
    return [pytest.param(mesh, marks=() if mesh in usual else pytest.mark.thorough) for mesh in meshes]


@on_ranks(2)
@pytest.mark.parametrize("mesh", tiers({"cp": 2}, {"tp": 2, "ep": 2}), ids=str)
def test_attention_beside_experts(folder: Path, mesh: dict[str, int]):
    check(folder, mesh, base=MOE, adapter={"targets": ["q_proj", "v_proj"]})


@on_ranks(4)
@pytest.mark.parametrize("mesh", [{"dp_shard": 4, "ep": 2}, {"dp_shard": 2, "tp": 2, "ep": 4}], ids=str)
def test_attention_beside_experts_on_two_axes(folder: Path, mesh: dict[str, int]):
    check(folder, mesh, base=MOE, adapter={"targets": ["q_proj", "v_proj"]})


@on_ranks(2)
@pytest.mark.parametrize("mesh", tiers({"pp": 2}, {"dp_shard": 2, "ep": 2}), ids=str)
def test_experts_with_adapters(folder: Path, mesh: dict[str, int]):
    check(folder, mesh, base=MOE)


@on_ranks(4)
@pytest.mark.parametrize(
    "mesh", [{"dp_shard": 2, "tp": 2}, {"dp_shard": 4, "ep": 2}, {"dp_shard": 2, "tp": 2, "ep": 4}], ids=str
)
def test_experts_with_adapters_on_two_axes(folder: Path, mesh: dict[str, int]):
    check(folder, mesh, base=MOE, memory={"recompute": ["model.layers.*"]})


@on_ranks(4)
def test_experts_with_adapters_whose_features_are_sharded(folder: Path):
    names = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "colwise") | {"o_proj": "rowwise"}
    styles = {f"model.layers.*.self_attn.{name}": style for name, style in names.items()}
    styles |= {f"model.layers.*.self_attn.{name}": "replicate" for name in ("q_norm", "k_norm")}
    styles |= {"model.layers.*.mlp.gate": "plain", "model.layers.*.mlp.experts": "expert_tensor_parallel"}
    check(folder, {"dp_shard": 2, "tp": 2, "ep": 2}, base=MOE, styles=styles)


@on_ranks(2)
@pytest.mark.parametrize(
    ("mesh", "base"),
    [({"dp_shard": 2}, BASE), ({"tp": 2}, BASE), ({"tp": 2}, MOE), ({"dp_shard": 2, "ep": 2}, MOE)],
    ids=str,
)
def test_what_is_drawn_is_that_of_one_process(folder: Path, mesh: dict[str, int], base: Any):
    write_folders(folder, base)
    reference = dict(build_model(plan_of(folder, {})).named_parameters())
    for name, parameter in build_parallel_model(plan_of(folder, mesh)).named_parameters():
        assert torch.equal(whole(parameter).cpu(), reference[name]), name
    assert not reference["model.layers.0.self_attn.q_proj.lora_B.default.weight"].any()
    one, other = (reference[f"model.layers.{layer}.self_attn.q_proj.lora_A.default.weight"] for layer in (0, 1))
    assert 0.2 < one.abs().max() <= 0.25 and not torch.equal(one, other), "uniform within 1 / sqrt(16)"


@on_ranks(2)
@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"tp": 2}], ids=str)
def test_a_frozen_model_in_bfloat16_with_an_adapter_in_float32(folder: Path, mesh: dict[str, int]):
    write_folders(folder)
    plan = plan_of(folder, mesh, run={"dtype": "bfloat16"}, memory={"recompute": ["model.layers.*"]})
    model, reference = build_parallel_model(plan), build_model(plan_of(folder, {}, run={"dtype": "bfloat16"}))
    optimizer = build_optimizer(plan, model.named_parameters())
    tokens = torch.randint(24, (4, 8), generator=torch.Generator().manual_seed(0))
    own = tokens.chunk(plan.mesh.data_parallel)[torch.distributed.get_rank() % plan.mesh.data_parallel]
    backward_loss(plan, model, own.to(device_type()))
    reference.to(device_type())(input_ids=tokens.to(device_type()), labels=tokens.to(device_type())).loss.backward()
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.dtype is (torch.float32 if parameter.requires_grad else torch.bfloat16), name
        if parameter.requires_grad:
            difference = (whole(parameter.grad) - expected[name].grad).norm()
            assert parameter.grad.dtype is torch.float32 and difference <= 0.1 * expected[name].grad.norm(), name
    optimizer.step()


@on_ranks(2)
def test_dropout_of_an_adapter_is_that_of_all_ranks_together(folder: Path):
    write_folders(folder)
    losses = []
    for mesh in ({"tp": 2}, {"tp": 2}):
        plan = plan_of(folder, mesh, adapter={"dropout": 0.5, "weights": str(folder / "adapter")})
        model = build_parallel_model(plan)
        torch.manual_seed(3)
        tokens = torch.randint(24, (4, 8), generator=torch.Generator().manual_seed(0)).to(device_type())
        losses.append(float(backward_loss(plan, model, tokens)))
        gradients = [whole(p.grad) for p in model.parameters() if p.grad is not None]
        assert all(torch.isfinite(each).all() for each in gradients)
    assert losses[0] == losses[1]


@on_ranks(2)
def test_frozen_parameters_stay(folder: Path):
    tables = {"model": {**BASE, "freeze": ["model.embed_tokens", "model.layers.*.mlp.*.weight"]}}
    tables |= {"mesh": {"dp_shard": 2}, "fsdp": {"groups": ["model.layers.*"]}}
    plan = ParallelPlan.from_dict(tables)
    assert not lint(plan, 2)
    model = build_parallel_model(plan)
    names = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert names == {
        "model.embed_tokens.weight",
        *(f"model.layers.{layer}.mlp.{kind}_proj.weight" for layer in (0, 1) for kind in ("gate", "up", "down")),
    }
    before = {name: whole(p).clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer(plan, model.named_parameters())
    backward_loss(plan, model, torch.randint(24, (2, 8), device=device_type()))
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(whole(parameter), before[name]) is (name in names), name


def test_an_adapters_configuration_is_pefts_own(folder: Path):
    write_folders(folder)
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder / "model") and config["task_type"] == "CAUSAL_LM"
    assert (config["r"], config["lora_alpha"], config["inference_mode"]) == (3, 5.0, True)


@pytest.mark.parametrize(
    ("tables", "key", "message", "fix"),
    [
        ({"adapter": {"rank": 4}}, "adapter", "rank would have no effect: there is no adapter", 'write kind = "lora"'),
        (
            {"adapter": {**LORA, "targets": ["q_prj"]}},
            "adapter.targets[0]",
            "'q_prj' matches no Linear module",
            "'q_proj'",
        ),
        (
            {"adapter": {**LORA, "modules": ["head"]}},
            "adapter.modules[0]",
            "'head' matches no module with parameters",
            "'lm_head'",
        ),
        (
            {"adapter": LORA, "model": {**BASE, "freeze": ["lm_head"]}},
            *("model.freeze", "the adapter is trained in place of all", "leave it out, or [adapter]"),
        ),
        ({"model": {**BASE, "freeze": ["lm_haed"]}}, "model.freeze[0]", "matches no parameter or mod", "'lm_head'"),
        ({"model": {**BASE, "freeze": ["model", "lm_head"]}}, "model.freeze", "it freezes all", "leave some to train"),
    ],
)
def test_mistakes_are_named(tables: dict[str, Any], key: str, message: str, fix: str):
    (found,) = lint({"model": BASE, **tables})
    assert found.key == key and message in found.message and fix in found.fix


def test_an_adapter_that_does_not_fit_is_named(folder: Path):
    write_folders(folder)
    with pytest.raises(PlanError, match=r"has no 'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight' of"):
        build_model(plan_of(folder, {}, adapter={"rank": 2, "weights": str(folder / "adapter")}))
    with pytest.raises(PlanError, match="has no adapter_model.safetensors"):
        build_model(plan_of(folder, {}, adapter={"weights": str(folder)}))
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    build_model(plan_of(folder, {}, adapter={"rank": config["r"], "weights": str(folder / "adapter")}))
