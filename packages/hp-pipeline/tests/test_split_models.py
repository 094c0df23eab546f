"""Unmodified models of transformers in stages: loss, every gradient and every weight are those of one process."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from pipeline_transformers import batch, build, pipelined, reference
from torch import nn

import hp_pipeline
from hp_dtensor import init_device_mesh
from hp_fsdp import fully_shard
from hp_styles import ColwiseParallel, RowwiseParallel, parallelize_module
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")  # transformers' models are PyTorch's

FAMILIES = ["Llama", "Qwen3", "Gemma2", "Mixtral", "Qwen3Moe", "GPT2"]


def close(tensor, expected, name):
    assert torch.allclose(tensor, expected, rtol=1e-12, atol=1e-12), f"{name}: {(tensor - expected).abs().max():.1e}"


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "placements") else tensor


def compare(family, schedule, micro_batches=4, ignored=False, *, group=None, part=0, parts=1, **options):
    """Train in stages and in one process; this rank's pipeline has a part of the rows."""
    torch.set_num_threads(1)
    whole = build(family).to(device_type())
    kind = getattr(hp_pipeline, schedule)
    model = pipelined(copy.deepcopy(whole), kind, micro_batches, group or dist.group.WORLD, **options)
    rows = 2 * micro_batches * parts
    expected = reference(whole, rows, micro_batches * parts, ignored)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for loss in expected:
        optimizer.zero_grad()
        ids, labels = (each.chunk(parts)[part] for each in batch(rows, ignored, device_type()))
        losses = model.run(ids, labels=labels)
        assert len(losses) == (micro_batches if len(model.schedule.pipeline.placement) - 1 in model.stages else 0)
        if losses and parts == 1:
            close(torch.stack(losses).mean(), loss, "loss")
        optimizer.step()
    named = dict(whole.named_parameters(remove_duplicate=False))
    own = dict(model.named_parameters())
    assert own
    for name, parameter in own.items():
        close(full(parameter.grad), named[name].grad, f"gradient of {name}")
        close(full(parameter), named[name], name)
    owners: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(owners, sorted(own))
    names = {name for name, _ in whole.named_parameters()}
    assert names <= {name for each in owners for name in each} <= set(named)


@pytest.mark.smoke
@on_ranks(2)
@pytest.mark.parametrize(
    ("family", "schedule"),
    [*((family, "Schedule1F1B") for family in FAMILIES), ("Gemma2", "ScheduleZBV"), ("Mixtral", "ScheduleZBV")],
)
def test_two_ranks_equal_one_process(family, schedule):
    compare(family, schedule, ignored=True)


@on_ranks(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_three_ranks_equal_one_process(family):
    compare(family, "Schedule1F1B", split="even")


@on_ranks(2)
@pytest.mark.parametrize(
    "schedule",
    [
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("ScheduleZB1P", "ScheduleVHalf")),
        "ScheduleInterleaved1F1B",
    ],
)
def test_other_schedules_equal_one_process(schedule):
    compare("Gemma2", schedule, ignored=True)


@on_ranks(4)
@pytest.mark.parametrize(("family", "schedule"), [("Gemma2", "Schedule1F1B"), ("Qwen3", "ScheduleZBV")])
def test_stages_whose_parameters_are_sharded(family, schedule):
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("pp", "dp"))

    def shard(stage):
        groups = [each for each in stage.modules() if type(each).__name__.endswith("DecoderLayer")]
        # A weight that another stage has too is a group of its own.
        groups += [each for name, each in stage.named_modules() if name in ("model.embed_tokens", "lm_head")]
        for each in (*(group for group in groups if any(True for _ in group.parameters())), stage):
            fully_shard(each, mesh=mesh["dp"])

    group, part = mesh["pp"].get_group(), mesh["dp"].get_local_rank()
    compare(family, schedule, 2, group=group, part=part, parts=2, prepare=shard)


@on_ranks(4)
@pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleZBV"])
def test_tensor_parallel_stages(schedule):
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("pp", "tp"))
    columns = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ColwiseParallel())
    styles = {**columns, **dict.fromkeys(("o_proj", "down_proj"), RowwiseParallel())}

    def parallelize(stage):
        plan = {name: styles[end] for name, _ in stage.named_modules() if (end := name.rpartition(".")[2]) in styles}
        parallelize_module(stage, mesh["tp"], plan)

    compare("Llama", schedule, 2, group=mesh["pp"].get_group(), prepare=parallelize)


class Encoder(nn.Module):
    """Features of an image, in the LLM's width."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(8)
        self.patches, self.project = nn.Linear(5, 12), nn.Linear(12, 16)

    def forward(self, pixels):
        return self.project(torch.tanh(self.patches(pixels)))


class Embedded(nn.Module):
    """The LLM's first stage: features take the places of its first tokens."""

    def __init__(self, first):
        super().__init__()
        self.first = first

    def forward(self, features, input_ids, **inputs):
        return self.first(inputs_embeds=join(self.first, features, input_ids), **inputs)


class Added(nn.Module):
    """A later stage of the LLM: features are added to the hidden states of its first tokens."""

    def __init__(self, later):
        super().__init__()
        self.later = later

    def forward(self, features, hidden, **inputs):
        return self.later(add(features, hidden), **inputs)


def join(model, features, ids):
    return torch.cat([features, model.get_input_embeddings()(ids)[:, features.shape[1] :]], 1)


def add(features, hidden):
    return torch.cat([hidden[:, :2] + features, hidden[:, 2:]], 1)


def encode_and_train(way, encoder, model, pixels, ids, labels, micro_batches):
    """Train in one process."""
    optimizer = torch.optim.SGD([*encoder.parameters(), *model.parameters()], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        for part, own, goal in zip(*(each.chunk(micro_batches) for each in (pixels, ids, labels)), strict=True):
            features = encoder(part)
            if way == "embeds":
                loss = model(inputs_embeds=join(model, features, own), labels=goal).loss
            else:
                hook = model.model.layers[1].register_forward_pre_hook(
                    lambda block, args, features=features: (add(features, args[0]), *args[1:])
                )
                loss = model(own, labels=goal).loss
                hook.remove()
            (loss / micro_batches).backward()
        optimizer.step()


@on_ranks(4)
@pytest.mark.parametrize(
    ("way", "boundaries"), [("embeds", [(0, 1), (1, 2), (2, 3)]), ("adds", [(0, 2), (1, 2), (2, 3)])]
)
def test_an_encoder_on_one_rank_and_a_language_model_on_three(way, boundaries):
    torch.set_num_threads(1)
    rank, micro_batches = dist.get_rank(), 4
    encoder, whole = Encoder().double().to(device_type()), build("Llama").to(device_type())
    ids, labels = batch(8, device=device_type())
    pixels = torch.randn(8, 2, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64).to(device_type())
    split = hp_pipeline.split_model(copy.deepcopy(whole), 3, split=[1, 2, 1])
    module = copy.deepcopy(encoder) if rank == 0 else split.stage(rank - 1)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    joined = {("embeds", 1): Embedded, ("adds", 2): Added}.get((way, rank), lambda module: module)(module)
    stage = hp_pipeline.PipelineStage(joined, rank, 4)
    schedule = hp_pipeline.Schedule1F1B(stage, micro_batches, boundaries=boundaries)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        inputs = {0: {"pixels": pixels}, 1: {"input_ids": ids}, 3: {"labels": labels}}
        schedule.run(**inputs.get(rank, {}))
        optimizer.step()
    encode_and_train(way, encoder, whole, pixels, ids, labels, micro_batches)
    expected = dict((whole if rank else encoder).named_parameters())
    for parameter in module.parameters():
        name = names[id(parameter)]
        close(parameter.grad, expected[name].grad, f"gradient of {name}")
        close(parameter, expected[name], name)
