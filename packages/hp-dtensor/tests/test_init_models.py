"""init_parameters of whole models, and of modules that bring their own ways."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

from hp_dtensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    init_empty_weights,
    init_on_device,
    init_parameters,
)
from hp_platform import manual_seed
from hp_testing import device_type, on_ranks


class Scaled(nn.Module):
    """A module of the user's with its own reset_parameters, a buffer and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 5, bias=False))
        self.scale = nn.Parameter(torch.empty(5))
        self.decays = nn.Parameter(torch.empty(5))
        self.frozen = nn.Parameter(torch.empty(3, 5), requires_grad=False)
        self.register_buffer("steps", torch.empty(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.scale, 0.5, 1.5)
        self.frozen.data.normal_(std=0.1)
        with torch.no_grad():
            self.decays.copy_(torch.arange(1.0, 6.0).log())
        with torch.no_grad():
            self.steps.fill_(3.0)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5, padding_idx=1)
        self.blocks = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(5), "mlp": Scaled()}) for _ in range(2))
        self.convolution = nn.Conv1d(5, 4, 3)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 11)


def _shard(model: nn.Module, mesh: Any) -> None:
    """Every parameter on the last dim that is larger than one, every other buffer replicated."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                placement = Shard(parameter.dim() - 1) if len(name) % 2 else Shard(0)
                made = distribute_tensor(parameter, mesh, [placement])
                module._parameters[name] = nn.Parameter(made, requires_grad=parameter.requires_grad)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.dim():
                module._buffers[name] = distribute_tensor(buffer, mesh, [Replicate()])


def _equal(model: nn.Module, reference: nn.Module) -> None:
    theirs = {**dict(reference.named_parameters()), **dict(reference.named_buffers())}
    mine = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert not whole.is_meta and torch.equal(whole, theirs[name]), name
        assert tensor.requires_grad == theirs[name].requires_grad and tensor.is_leaf, name


@on_ranks(2, 3)
@pytest.mark.parametrize("sharded", [True, False])
def test_modules_of_every_kind(sharded: bool, ranks: int) -> None:
    mesh = init_device_mesh(device_type(), (ranks,))
    manual_seed(21)
    with init_on_device(device_type()):
        reference = Stack()
    after = torch.rand(3)
    with init_empty_weights():
        model = Stack()
    if sharded:
        _shard(model, mesh)
    manual_seed(21)
    init_parameters(model, device=device_type())
    _equal(model, reference)
    assert torch.equal(torch.rand(3), after), "as many numbers were drawn"
    manual_seed(21)
    init_parameters(model)  # again: the same values into memory that is there
    _equal(model, reference)


@on_ranks(2)
@pytest.mark.parametrize("tie", [False, True])
def test_a_transformers_model(tie: bool) -> None:
    transformers = pytest.importorskip("transformers", reason="the models are those of transformers")
    os.environ["HF_HUB_OFFLINE"] = "1"
    config = transformers.LlamaConfig(
        vocab_size=34,
        hidden_size=12,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tie,
    )
    mesh = init_device_mesh(device_type(), (2,))
    manual_seed(4)
    with init_on_device(device_type()):
        reference = transformers.LlamaForCausalLM(config)
    with init_empty_weights():
        model = transformers.LlamaForCausalLM(config)
    seen: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                if id(parameter) not in seen:
                    seen[id(parameter)] = parameter, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)]))
                module._parameters[name] = seen[id(parameter)][1]
    manual_seed(4)
    init_parameters(model)
    _equal(model, reference)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tie
    for name, buffer in model.named_buffers():  # the rotary frequencies too, which are in no state dict
        assert torch.equal(buffer, dict(reference.named_buffers())[name]), name


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))


def test_modules_that_nobody_initialises() -> None:
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(Bare()))
    with pytest.raises(RuntimeError, match=r"Bare \(1\.0\) holds \['gain'\] on meta and has no reset_parameters"):
        init_parameters(model)
    assert model[0].weight.is_meta, "nothing was touched"
    with init_empty_weights():
        bare = Bare()
    with pytest.raises(RuntimeError, match=r"Bare \(the module itself\)"):
        init_parameters(bare)
    assert init_parameters(Bare()).gain.eq(1).all(), "what holds values keeps them where nothing resets it"


@pytest.mark.device
def test_init_on_device() -> None:
    with init_on_device("meta"):
        assert nn.Linear(2, 2).weight.is_meta and torch.empty(2).is_meta
    assert not nn.Linear(2, 2).weight.is_meta
    with init_empty_weights():
        linear = nn.Linear(2, 2)
    made = init_parameters(linear)
    assert made is linear and not linear.weight.is_meta and linear.weight.is_leaf
