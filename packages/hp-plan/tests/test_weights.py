from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from hp_plan import ParallelPlan, PlanError, apply, build_model, lint
from hp_plan.torch.extend import begin, finish
from hp_platform import get_platform
from hp_testing import on_ranks

SMALL = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


def plan_of(seed=0, **model):
    tables = {"model": {"config": "LlamaConfig", "overrides": SMALL, **model}, "run": {"seed": seed}}
    return ParallelPlan.from_dict(tables)


def state(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_weights_are_read_by_name(tmp_path):
    source = state(build_model(plan_of(seed=3)))
    save_file(source, tmp_path / "model.safetensors")
    model = build_model(plan_of(weights=str(tmp_path)))
    assert all(torch.equal(parameter, source[name]) for name, parameter in model.named_parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not [diagnostic for diagnostic in lint(plan_of(weights=str(tmp_path))) if "weights" in diagnostic.key]


def test_weights_of_another_model(tmp_path):
    source = state(build_model(plan_of()))
    source["model.norm.weigt"] = source.pop("model.norm.weight")
    source["model.embed_tokens.weight"] = source["model.embed_tokens.weight"][:3].clone()
    path = str(tmp_path / "w.safetensors")
    save_file(source, path)
    with pytest.raises(PlanError) as raised:
        build_model(plan_of(weights=path))
    assert {diagnostic.message.replace(path, "FILE") for diagnostic in raised.value.diagnostics} == {
        "'model.embed_tokens.weight' has shape (3, 16) in FILE, but (16, 16) in the model",
        "FILE has no 'model.norm.weight'",
        "FILE has 'model.norm.weigt', but the model does not",
    }
    assert "did you mean 'model.norm.weight'" in str(raised.value)
    assert "use the [model.overrides] that the file was written with" in str(raised.value)
    source["model.norm.weight"] = source.pop("model.norm.weigt")
    source.pop("model.layers.0.mlp.up_proj.weight")
    save_file(source, path)
    written = plan_of(weights=path, overrides={**SMALL, "vocab_size": 3})
    with pytest.raises(PlanError, match="up_proj.weight'; did you mean") as raised:
        build_model(written)
    assert len(raised.value.diagnostics) == 1, "the overrides are right"
    save_file({"x": torch.ones(1)}, path)
    with pytest.raises(PlanError, match="has no 'model.norm.weight'; give weights of this model, or leave weights out"):
        build_model(written)
    build_model(plan_of(overrides={**SMALL, "vocab_size": 3}))
    save_file(state(build_model(written_without := plan_of(overrides={**SMALL, "vocab_size": 3}))), path)
    assert build_model(written).lm_head.weight.shape == build_model(written_without).lm_head.weight.shape


def test_weights_that_are_not_there(tmp_path):
    (diagnostic,) = lint(plan_of(weights=str(tmp_path)))
    assert str(diagnostic) == (
        f"model.weights: the file {tmp_path / 'model.safetensors'} does not exist; give a safetensors file, or a "
        "folder with a model.safetensors"
    )


def test_a_plan_for_another_framework():
    (diagnostic,) = lint({"run": {"platform": "mindspore"}, "model": {"function": "nowhere:model"}})
    assert str(diagnostic) == (
        "run.platform: the plan is for mindspore, but this process runs torch; set HYPER_PARALLEL_PLATFORM=mindspore "
        "before anything is imported"
    )


@on_ranks(2)
def test_a_tensor_that_one_rank_has_not_set_is_named_on_all(monkeypatch, tmp_path):
    rank = get_platform().groups.rank()
    monkeypatch.setattr("hp_plan.torch.build._is_unset", lambda local: rank == 1)
    plan = ParallelPlan.from_dict(
        {
            "model": {"config": "LlamaConfig", "overrides": SMALL},
            "mesh": {"dp_shard": 2},
            "fsdp": {"groups": ["model.layers.*"]},
        }
    )
    with pytest.raises(PlanError, match="nothing sets .* tensors of the model where its weights are drawn"):
        finish(apply(begin(plan), plan), plan)
    if rank == 0:
        save_file(state(build_model(plan)), tmp_path / "model.safetensors")
    get_platform().collectives.barrier()
    section = {"config": "LlamaConfig", "overrides": SMALL, "weights": str(tmp_path)}
    given = ParallelPlan.from_dict({**plan.to_dict(), "model": section})
    finish(apply(begin(given), given), given)
