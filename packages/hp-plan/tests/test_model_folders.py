"""A model's folder as `[model] path`: each rank reads its shards, and has what transformers loads."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import hp_plan
from hp_dtensor import DTensor
from hp_pipeline import PipelinedModel
from hp_plan import ParallelPlan, PlanError, build_model, build_parallel_model, lint
from hp_plan.torch.build import begin
from hp_plan.torch.extend import backward_loss
from hp_platform import get_platform
from hp_testing import on_ranks

pytestmark = pytest.mark.framework("torch")  # transformers' models are PyTorch's

SMALL = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
TOKENS = torch.arange(64).view(8, 8) % 24


def plan_of(mesh=(), model=(), **run) -> ParallelPlan:
    data = {"batch_size": 8, "sequence_length": 8}
    return ParallelPlan.from_dict({"model": dict(model), "mesh": dict(mesh), "data": data, "run": run})


def write(folder, config="LlamaConfig", dtype="float64", shard="1KB", **overrides) -> str:
    """Write a small model as transformers does; rank 0."""
    if get_platform().groups.rank() == 0:
        model = build_model(plan_of(model={"config": config, "overrides": {**SMALL, **overrides}}, seed=5))
        model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard)
    get_platform().collectives.barrier()
    return str(folder)


def whole(model) -> dict[str, torch.Tensor]:
    return {
        name: each.full_tensor() if isinstance(each, DTensor) else each.detach()
        for name, each in model.named_parameters()
    }


@on_ranks(4, timeout=240)
@pytest.mark.parametrize(
    ("mesh", "config", "overrides"),
    [
        ({"dp_shard": 2, "tp": 2}, "LlamaConfig", {"tie_word_embeddings": True}),
        ({"pp": 2, "dp_shard": 2}, "LlamaConfig", {"tie_word_embeddings": True}),
        ({"pp": 2, "tp": 2}, "Qwen3Config", {"head_dim": 4}),
    ],
    ids=["tied", "stages", "tensor-parallel stages"],
)
def test_each_rank_reads_its_shards(mesh, config, overrides, tmp_path):
    folder = write(tmp_path / "model", config, **overrides)
    plan = plan_of(mesh, {"path": folder}, dtype="float64")
    assert all(parameter.is_meta for parameter in begin(plan).parameters()), "no rank has a whole model"
    model = build_parallel_model(plan)
    truth = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float64).train()
    for name, value in whole(model).items():
        assert torch.equal(value, truth.get_parameter(name)), name
    buffers = dict(truth.named_buffers())
    for name, value in model.named_buffers():
        assert not value.is_meta and torch.equal(value, buffers[name]), name
    tokens = TOKENS[hp_plan.plan.data_parallel_rows(plan)]
    expected = truth(input_ids=tokens, labels=tokens).loss.item()
    got = backward_loss(plan, model, tokens)
    assert got is None or abs(got - expected) < 1e-6  # transformers' losses are float32
    if not isinstance(model, PipelinedModel):
        assert torch.allclose(model(input_ids=tokens).logits, truth(input_ids=tokens).logits, rtol=0, atol=1e-12)


@on_ranks(2)
@pytest.mark.parametrize("weights", [None, "random"])
def test_dtypes_are_converted_and_weights_drawn(weights, tmp_path):
    folder = write(tmp_path / "model", dtype="bfloat16")
    model = {"path": folder, **({"weights": weights} if weights else {})}
    plan = plan_of({"dp_shard": 2}, model, seed=5)
    built = whole(build_parallel_model(plan))
    truth = dict(build_model(plan).named_parameters())
    assert built.keys() == truth.keys()
    assert all(value.dtype == torch.float32 and torch.equal(value, truth[name]) for name, value in built.items())
    saved = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(built[name], saved.get_parameter(name)) == (weights is None)


@on_ranks(2)
@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"tp": 2}], ids=str)
def test_weights_that_an_initialiser_copies(mesh):
    small = {"vocab_size": 24, "hidden_size": 16, "state_size": 8, "num_hidden_layers": 2, "num_heads": 4}
    plan = plan_of(mesh, {"config": "Mamba2Config", "overrides": {**small, "head_dim": 8, "n_groups": 1}})
    assert all(parameter.is_meta for parameter in begin(plan).parameters()), "no rank has a whole model"
    truth = dict(build_model(plan).named_parameters())
    assert all(torch.equal(value, truth[name]) for name, value in whole(build_parallel_model(plan)).items())


@on_ranks(2)
def test_buffers_of_a_folders_model_that_are_computed_again(tmp_path):
    part = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}
    pictures = {**part, "image_size": 8, "patch_size": 4, "model_type": "clip_vision_model"}
    text = {**part, "vocab_size": 24, "max_position_embeddings": 8, "model_type": "clip_text_model"}
    model = {"config": "CLIPConfig", "task": "CLIPModel"}
    model["overrides"] = {"projection_dim": 16, "text_config": text, "vision_config": pictures}
    truth = build_model(plan_of(model=model, seed=5))
    if get_platform().groups.rank() == 0:
        truth.save_pretrained(tmp_path / "model")
    get_platform().collectives.barrier()
    read = build_parallel_model(plan_of({"tp": 2}, {"path": str(tmp_path / "model"), "task": "CLIPModel"}))
    for name, value in read.named_buffers():
        value = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(value, truth.get_buffer(name)), name
    assert all(torch.equal(value, truth.get_parameter(name)) for name, value in whole(read).items())


@on_ranks(2)
def test_buffers_of_a_constructor_alone_need_the_configuration(tmp_path, monkeypatch):
    made = LlamaRMSNorm.__init__

    def with_buffer(self, *args, **options):
        made(self, *args, **options)
        self.register_buffer("kept", torch.arange(3.0), persistent=False)

    monkeypatch.setattr(LlamaRMSNorm, "__init__", with_buffer)
    model = {"config": "LlamaConfig", "overrides": SMALL}
    truth = build_model(plan_of(model=model, seed=5))
    if get_platform().groups.rank() == 0:
        truth.save_pretrained(tmp_path / "model")
    get_platform().collectives.barrier()
    with pytest.raises(PlanError, match=r"the buffer '.*kept' .*; name the folder's settings by \[model\] config"):
        build_parallel_model(plan_of({"tp": 2}, {"path": str(tmp_path / "model")}))
    read = build_parallel_model(plan_of({"tp": 2}, {**model, "weights": str(tmp_path / "model")}))
    assert torch.equal(read.get_buffer("model.norm.kept"), torch.arange(3.0))
    assert all(torch.equal(value, truth.get_parameter(name)) for name, value in whole(read).items())


@on_ranks(2)
def test_drawn_weights_of_a_family_that_is_not_alike():
    small = {"vocab_size": 24, "n_embd": 16, "n_layer": 2, "n_head": 2}
    plan = plan_of({"dp_shard": 2}, {"config": "GPT2Config", "overrides": small})
    truth = dict(build_model(plan).named_parameters())
    assert all(torch.equal(value, truth[name]) for name, value in whole(build_parallel_model(plan)).items())


@on_ranks(4)
@pytest.mark.parametrize("mesh", [{"dp_shard": 4, "ep": 2}, {"dp_shard": 2, "tp": 2, "ep": 2}], ids=str)
def test_experts(mesh, tmp_path):
    """Those of a folder are merged by transformers: each rank reads its own where they are; and drawn ones."""
    folder = write(tmp_path / "model", "MixtralConfig", **EXPERTS)
    for model in ({"path": folder}, {"config": "MixtralConfig", "overrides": {**SMALL, **EXPERTS}}):
        plan = plan_of(mesh, model, dtype="float64")
        truth = dict(build_model(plan).named_parameters())
        assert all(parameter.is_meta for parameter in begin(plan).parameters()), "no rank has a whole model"
        for name, value in whole(build_parallel_model(plan)).items():
            assert torch.equal(value, truth[name]), name


@pytest.fixture
def folder(tmp_path) -> str:
    model = build_model(plan_of(model={"config": "LlamaConfig", "overrides": SMALL}, seed=5))
    model.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def messages(folder: str, **model) -> list[str]:
    return [str(each).replace(folder, "FOLDER") for each in lint(plan_of(model={"path": folder, **model}))]


def test_a_good_folder(folder):
    assert messages(folder) == []
    assert messages(folder, weights="random", overrides={"num_hidden_layers": 1}) == []
    assert type(build_model(plan_of(model={"path": folder}))).__name__ == "LlamaForCausalLM"


def test_a_task_and_the_class_that_a_folder_names(folder):
    classifier = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
    classifier.save_pretrained(folder)
    assert messages(folder) == []
    assert type(build_model(plan_of(model={"path": folder}))).__name__ == "LlamaForSequenceClassification"
    (missing, unexpected) = messages(folder, task="causal-lm")
    assert missing == "model.path: FOLDER has no 'lm_head.weight'; did you mean 'score.weight'?"
    assert unexpected.startswith("model.path: FOLDER has 'score.weight', but the model does not")
    with pytest.raises(PlanError, match=r"has no 'lm_head\.weight'"):
        build_model(plan_of(model={"path": folder, "task": "causal-lm"}))


def test_mistakes(folder, tmp_path):
    """What each finding says to do is done at once, to the plan or to the folder."""
    (missing,) = lint(plan_of(model={"path": f"{folder}s"}))
    assert str(missing) == f"model.path: the folder {folder}s does not exist; did you mean '{folder}'?"
    (nowhere,) = lint(plan_of(model={"path": "no/such"}))
    assert nowhere.fix == "give a folder on this machine: nothing is downloaded"
    more = {"num_hidden_layers": 3}
    assert messages(folder, overrides=more)[0].endswith("or write weights = 'random' to draw the weights anew")
    assert messages(folder, overrides=more, weights="random") == []
    (misspelt,) = messages(folder, overrides={"hiden_size": 8})
    assert misspelt.startswith("model.overrides.hiden_size: LlamaConfig has no setting 'hiden_size'; did you mean 'h")
    shaped = messages(folder, overrides={"intermediate_size": 24})
    assert len(shaped) == 5 and shaped[0] == (
        "model.path: 'model.layers.0.mlp.down_proj.weight' has shape (16, 20) in FOLDER, but (16, 24) in the model; "
        "leave out the [model.overrides] that change it"
    )
    both = messages(folder, config="LlamaConfig")
    assert both == [
        "model: [model] has 'config' and 'path'; give one: config = \"Qwen3Config\", "
        'path = "folder/of/a/model" or function = "package.module:function"'
    ]
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weigth"] = tensors.pop("model.norm.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    lacking, beyond = messages(folder)
    assert lacking == "model.path: FOLDER has no 'model.norm.weight'; did you mean 'model.norm.weigth'?"
    assert beyond.startswith("model.path: FOLDER has 'model.norm.weigth', but the model does not; did you mean")
    tensors["model.norm.weight"] = tensors.pop("model.norm.weigth")
    save_file(tensors, file, metadata={"format": "pt"})
    assert messages(folder) == [], "as both findings say"
    file.unlink()
    (none,) = messages(folder)
    assert "has neither manifest.json nor model.safetensors" in none
    assert none.endswith("; download the safetensors, or write weights = 'random'")
    assert messages(folder, weights="random") == []
    save_file(tensors, file, metadata={"format": "pt"})
    config = tmp_path / "model" / "config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps({**settings, "model_type": "lama"}))
    (unknown,) = messages(folder)
    assert "has model_type 'lama', which transformers does not have; did you mean 'llama'" in unknown
    config.write_text("{")
    assert messages(folder)[0].endswith("; download it again")
    config.write_text(json.dumps({**settings, "num_attention_heads": "four"}))
    assert messages(folder)[0].endswith("; correct it, or download it again")
    config.write_text(json.dumps(settings))
    assert messages(folder) == []
    config.unlink()
    (bare,) = messages(folder)
    assert bare.startswith("model.path: FOLDER has no config.json; give a folder that save_pretrained wrote")


def test_a_runs_folder_names_the_checkpoint_that_has_the_model(tmp_path):
    newest = tmp_path / "checkpoints" / "step-00000020"
    newest.mkdir(parents=True)
    plan = ParallelPlan.from_dict({"model": {"path": str(tmp_path)}})
    (newest / "manifest.json").write_text("{}")
    (newest / "config.json").write_text("{}")
    assert [each.fix for each in lint(plan)] == [f"it has checkpoints: {newest}"]
    (newest / "config.json").rename(newest / "adapter_config.json")
    assert "it has checkpoints: it is an adapter: write it as adapter.weights" in lint(plan)[0].fix
