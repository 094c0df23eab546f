"""Backwards in two halves: what is held in between, hooks, tied weights, and layers that are computed again."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import scaled_dot_product_attention, silu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hp_pipeline import PipelineStage, Schedule1F1B, ScheduleZB1P
from hp_pipeline.torch.port import backward, deferring, prepare_split
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")

WIDTH = 128


class Norm(nn.Module):
    """The norm of Llama, by its root mean square."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class Block(nn.Module):
    """A layer as Llama's; counts how often it is computed."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.then = Norm(width), Norm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 8 * width // 3, bias=False) for _ in range(2))
        self.down = nn.Linear(8 * width // 3, width)
        self.times = 0

    def forward(self, x):
        self.times += 1
        y = self.norm(x)
        heads = (part(y).unflatten(-1, (2, -1)).transpose(1, 2) for part in (self.query, self.key, self.value))
        mixed = scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.then(x)
        return x + self.down(silu(self.gate(y)) * self.up(y))


def test_less_than_four_fifths_of_what_forward_saved_is_held_between_the_halves():
    model = nn.Sequential(*(Block(WIDTH) for _ in range(2)))
    own = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes(), StorageWeakRef(storage)
        return tensor

    prepare_split(model)
    deferred, context = deferring(model)
    with context, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(torch.randn(2, 32, WIDTH, requires_grad=True))
    gradient = torch.ones_like(out)
    backward(model, [], [out], [gradient], deferred)
    del out
    held = {}
    for _, compute in deferred._queue:
        for tensor in (compute.args[0], compute.args[1]()):
            storage = tensor.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
    before = sum(size for size, _ in saved.values())
    freed = sum(size for pointer, (size, storage) in saved.items() if storage.expired() or pointer not in held)
    assert 0.5 < sum(held.values()) / before <= 0.8
    alive = sum(size for pointer, (size, storage) in saved.items() if not storage.expired() and pointer not in held)
    assert freed > 0.5 * before and alive <= 0.05 * before  # the input, which the caller has
    assert len(deferred) == 14


def recompute(kind, block, x):
    if kind == "none":
        return block(x)
    if kind == "full":
        return checkpoint(block, x, use_reentrant=False)
    keep = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.linear.default]

    def policy(context, operation, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if operation in keep else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(block, x, use_reentrant=False, context_fn=contexts)


class Model(nn.Module):
    """Two blocks that share weights, and a head; the loss."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.blocks, self.head = kind, nn.ModuleList(Block(8) for _ in range(2)), nn.Linear(8, 3)
        self.blocks[1].up.weight = self.blocks[0].up.weight

    def forward(self, x):
        for block in self.blocks:
            x = recompute(self.kind, block, x)
        return self.head(x).square().mean()


@on_ranks(1)
@pytest.mark.parametrize("kind", ["none", "full", "selective"])
def test_hooks_run_once_and_no_layer_is_computed_twice_again(kind):
    x = torch.randn(6, 5, 8, dtype=torch.float64, device=device_type())
    models, fired = [], []
    for schedule in (Schedule1F1B, ScheduleZB1P):
        model = Model(kind).double().to(device_type())
        fired.append(dict.fromkeys((name for name, _ in model.named_parameters()), 0))
        for name, parameter in model.named_parameters():

            def hook(_, name=name, counts=fired[-1]):
                counts[name] += 1

            parameter.register_post_accumulate_grad_hook(hook)
        schedule(PipelineStage(model, 0, 1), 3).run(x)
        models.append(model)
    plain, split = models
    assert fired[0] == fired[1] == dict.fromkeys(fired[0], 3)
    assert [block.times for block in split.blocks] == [block.times for block in plain.blocks]
    assert plain.blocks[0].times == (3 if kind == "none" else 6)
    for one, other in zip(plain.parameters(), split.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
