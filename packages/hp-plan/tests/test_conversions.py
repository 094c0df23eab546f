"""Tensors that transformers merges, cuts and permutes on a load, read where they are in a folder's files."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModel, core_model_loading

from hp_checkpoint.extend import Entry, Kind
from hp_dtensor import DTensor
from hp_plan import ParallelPlan, build_model, build_parallel_model
from hp_plan.torch.build import begin
from hp_plan.torch.library.folders import saved_tensors
from hp_plan.torch.library.placed import NotPlacedError, Placed, conversions_of
from hp_platform import get_platform
from hp_testing import on_ranks

pytestmark = pytest.mark.framework("torch")  # transformers' models are PyTorch's

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**SMALL, "vocab_size": 24, "intermediate_size": 20, "num_key_value_heads": 2}
EXPERTS = {**TEXT, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 4}
PICTURES = {**SMALL, "image_size": 8, "patch_size": 4}
FAMILIES = {
    "merged": ("Qwen3MoeConfig", EXPERTS, {}, {"tp": 2}, "MergeModulelist"),
    "cut": ("Dinov2Config", {**PICTURES, "use_swiglu_ffn": True}, {"task": "image-classification"}, {}, "Chunk"),
    "renamed": ("ViTConfig", PICTURES, {"task": "image-classification"}, {}, ""),
}


def plan_of(model, mesh=()) -> ParallelPlan:
    return ParallelPlan.from_dict({"model": model, "mesh": dict(mesh), "data": {"batch_size": 4, "sequence_length": 8}})


def written(folder, config, overrides, task) -> str:
    """Write a small model as transformers does; rank 0."""
    if get_platform().groups.rank() == 0:
        build_model(plan_of({"config": config, "overrides": overrides, **task})).save_pretrained(folder)
    get_platform().collectives.barrier()
    return str(folder)


@on_ranks(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_rank_reads_its_shards_of_what_transformers_loads(family, tmp_path):
    config, overrides, task, mesh, operation = FAMILIES[family]
    folder = written(tmp_path / "model", config, overrides, task)
    plan = plan_of({"path": folder}, {"dp_shard": 2 // mesh.get("tp", 1), **mesh})
    assert all(parameter.is_meta for parameter in begin(plan).parameters())
    built, own = build_parallel_model(plan), build_model(plan)
    assert any(operation in str(each.operations) for each in conversions_of(own)[1]) or not operation
    assert saved_tensors(folder).keys() != own.state_dict().keys()
    for name, value in built.named_parameters():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(whole, own.get_parameter(name)), name


@on_ranks(2)
def test_what_is_transposed_is_built_whole_and_told(tmp_path, monkeypatch):
    converter = core_model_loading.WeightConverter(
        "q_proj.weight", "q_proj.weight", [core_model_loading.Transpose(0, 1)]
    )
    folder = written(tmp_path / "model", "LlamaConfig", TEXT, {})
    assert all(parameter.is_meta for parameter in begin(plan_of({"path": folder})).parameters())
    monkeypatch.setattr("hp_plan.torch.library.placed.conversions_of", lambda model: ([], [converter]))
    with pytest.warns(UserWarning, match=r"builds the whole model, for 'model.layers.0.*q_proj.weight'.* transposed"):
        model = begin(plan_of({"path": folder}))
    truth = AutoModel.from_pretrained(folder, local_files_only=True).layers[1].self_attn.q_proj.weight
    assert torch.equal(model.model.layers[1].self_attn.q_proj.weight, truth)


FILES = {name: torch.arange(3000, dtype=torch.int32) + 10_000 * number for number, name in enumerate("abc")}


def read(x: Placed) -> torch.Tensor:
    """Read the elements where they are said to be."""
    found, count = torch.full(tuple(x.shape), -1, dtype=torch.int32), 0
    for chunk in x.chunks:
        box = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes))
        found[box] = torch.as_strided(FILES[chunk.file], chunk.sizes, chunk.strides, chunk.offset // 4)
        count += math.prod(chunk.sizes)
    assert count == found.numel()
    return found


def placed(shape, file="a", start=0) -> tuple[torch.Tensor, Placed]:
    own = FILES[file][start : start + math.prod(shape)].reshape(shape)
    return own, Placed.of(Entry("x", Kind("I32", tuple(shape)), file, start * 4))


def random_move(choice: random.Random, x: torch.Tensor):
    dim = choice.randrange(x.dim())
    size = x.shape[dim]
    start = choice.randrange(size)
    length, part, order = choice.randint(1, size - start), choice.randint(1, size), list(range(x.dim()))
    choice.shuffle(order)
    factor = choice.choice([each for each in range(1, x.numel() + 1) if x.numel() % each == 0])
    other = choice.choice([each for each in range(1, factor + 1) if factor % each == 0])
    return choice.choice(
        [
            lambda x: torch.stack([x, x], dim),
            lambda x: torch.cat([x, x], dim),
            lambda x: x.narrow(dim, start, length),
            lambda x: torch.split(x, part, dim)[-1],
            lambda x: torch.chunk(x, part, dim)[0],
            lambda x: torch.split(x, [start, size - start], dim)[1],
            lambda x: x.select(dim, start),
            lambda x: torch.unbind(x, dim)[start],
            lambda x: x.unsqueeze(dim),
            lambda x: x.squeeze(dim),
            lambda x: x.permute(order).contiguous(),
            lambda x: x.transpose(dim, order[0]),
            lambda x: x.reshape(other, factor // other, -1),
            lambda x: x.flatten(),
        ]
    )


def test_places_move_as_elements_do():
    """Random chains of functions on elements, and on their places."""
    choice = random.Random(7)
    for trial in range(800):
        shape = [choice.choice([1, 2, 3, 4, 6]) for _ in range(choice.randint(1, 3))]
        own, places = placed(shape, choice.choice("abc"), choice.randrange(100))
        for _ in range(choice.randint(1, 6)):
            if own.dim() and own.numel() < 1000:
                move = random_move(choice, own)
                own, places = move(own), move(places)
        assert torch.equal(read(places), own), trial


@pytest.mark.parametrize(
    ("operations", "shapes", "targets"),
    [
        ([core_model_loading.MergeModulelist(0), core_model_loading.Concatenate(1)], [(3, 4), (3, 4)], ["z"]),
        ([core_model_loading.PermuteForRope()], [(16, 5)], ["z"]),
        ([core_model_loading.PermuteForRope(inverse=True)], [(16,)], ["z"]),
        ([core_model_loading.Chunk(1), core_model_loading.PermuteForRope()], [(8, 6)], ["y", "z"]),
        ([core_model_loading.Interleave(1)], [(2, 8, 3)], ["z"]),
        ([core_model_loading.Conv3dToLinear(3, (2, 2, 2))], [(4, 3, 2, 2, 2)], ["z"]),
    ],
    ids=str,
)
def test_operations_of_transformers(operations, shapes, targets):
    config = SimpleNamespace(num_attention_heads=2)
    sources = [f"x{number}" for number in range(len(shapes))]
    results = []
    for kind in (0, 1):
        values = {
            name: [placed(shape, "abc"[at], 100 * number)[kind] for number in range(3 if len(shapes) > 1 else 1)]
            for at, (name, shape) in enumerate(zip(sources, shapes))
        }
        for operation in operations:
            values = operation.convert(values, source_patterns=sources, target_patterns=targets, config=config)
        results.append({name: each[0] if isinstance(each, list) else each for name, each in values.items()})
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(read(results[1][name]), own) for name, own in results[0].items())


def test_what_is_no_move_is_refused():
    own, places = placed((4, 6))
    with pytest.raises(NotPlacedError, match="aten.add"):
        places + 1
    with pytest.raises(NotPlacedError, match="every other"):
        places[::2]
    with pytest.raises(NotPlacedError, match="of several dtypes"):
        torch.cat([places, Placed.of(Entry("x", Kind("F32", (4, 6)), "a", 0))])
    with pytest.raises(NotPlacedError, match="a transposed tensor"):
        places.transpose(0, 1).entry("x")
    assert places.entry("x").kind == Kind("I32", (4, 6))
