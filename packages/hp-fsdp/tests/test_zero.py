"""The short forms: hsdp by level, modules by size."""

from __future__ import annotations

import copy

import pytest
import torch
from fsdp_models import Block, Net, batch, close, compared, loss_of, same_gradients, same_weights, seeded, train
from torch import nn

from hp_dtensor import RaggedShard, Replicate
from hp_fsdp import clip_grad_norm_, full_state_dict, fully_shard, hsdp, hsdp_sync_stream, modules_by_size
from hp_platform import count_collectives
from hp_testing import on_ranks

pytestmark = pytest.mark.framework("torch")


def made(level: str, threshold: int = 0, shard_size: int = -1, **options):
    reference = seeded(Net)
    model = copy.deepcopy(reference)
    options = {"comm_fusion": True, **options}
    for block in model.blocks:
        hsdp(block, shard_size, threshold, level, **options)
    return reference, hsdp(model, shard_size, threshold, level, **options)


@pytest.mark.smoke
@on_ranks(2)
@pytest.mark.parametrize(("level", "gathers"), [("level1", (4, 0)), ("level2", (4, 0)), ("level3", (7, 7))])
def test_levels_say_how_often_parameters_are_gathered(level, gathers):
    """Four groups; level 3 gathers the blocks anew for backward, and everything for each micro-batch."""
    reference, model = made(level)
    counted = []
    for _ in range(2):
        with count_collectives() as counts:
            loss_of(model(batch()[1])).backward()
        counted.append(counts["all_gather"])
        assert counts["reduce_scatter"] == 4
    assert tuple(counted) == gathers
    model.zero_grad()
    train(reference, model, steps=2)


@on_ranks(4)
@pytest.mark.parametrize("threshold", [0, 1])
def test_fewer_ranks_than_all_are_replicas(threshold: int):
    reference, model = made("level2", threshold, 2)
    if threshold:
        assert model.first.weight.placements == (Replicate(), Replicate())
    assert model.blocks[0].up.weight.device_mesh.shape == (2, 2)
    train(reference, model, steps=2)


@on_ranks(2)
def test_one_rank_a_shard_is_plain_data_parallelism():
    reference, model = made("level3", shard_size=1)
    for name, parameter in model.named_parameters():
        assert parameter.placements == (Replicate(),) and parameter.to_local().shape == parameter.shape, name
    compared(model)
    with count_collectives() as counts:
        loss_of(model(batch()[1])).backward()
    assert dict(counts) == {"all_reduce": 4}
    model.zero_grad()
    train(reference, model, steps=2)


@on_ranks(2)
def test_small_parameters_stay_whole_and_are_averaged_and_clipped():
    """Weights of 1600 bytes and a bias of 320."""
    reference, model = seeded(Wide), seeded(Wide)
    hsdp(model, threshold=1, comm_fusion=True)
    assert model.up.weight.to_local().dim() == 1 and isinstance(model.up.weight.placements[0], RaggedShard)
    assert model.up.bias.placements == (Replicate(),) and model.up.bias.to_local().shape == (40,)
    compared(model)
    with count_collectives() as counts:
        loss_of(model(batch()[1])).backward()
    assert counts["all_reduce"] == 1 and counts["reduce_scatter"] == 1
    model.zero_grad()
    train(reference, model, steps=2)
    whole, own = batch()
    loss_of(reference(whole)).backward()
    loss_of(model(own)).backward()
    norm = clip_grad_norm_(model.parameters(), 0.01)
    close(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.01), "norm")
    for name, tensor in full_state_dict(model).items():
        close(tensor, reference.state_dict()[name], name)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 40), nn.Linear(40, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


@on_ranks(2)
@pytest.mark.parametrize(
    ("options", "buckets"),
    [
        ({}, 3),
        ({"comm_fusion": True}, 1),
        ({"comm_fusion": True, "bucket_size": 2}, 2),
        ({"comm_fusion": True, "bucket_size": 0}, 3),
    ],
)
def test_fusion_and_bucket_size_say_what_is_communicated_as_one(options, buckets):
    """Weights of 1600 bytes and a bias of 320: in 2 KiB, one weight and the bias."""
    reference, model = seeded(Wide), seeded(Wide)
    hsdp(model, threshold=0, optimizer_level="level3", **options)
    compared(model)
    with count_collectives() as counts:
        loss_of(model(batch()[1])).backward()
    assert counts["all_gather"] == counts["reduce_scatter"] == buckets
    model.zero_grad()
    train(reference, model, steps=1)


@on_ranks(2)
def test_accumulation_waits_for_a_sync_that_is_asked_for():
    reference, model = made("level2", enable_grad_accumulation=True)
    compared(model)
    with count_collectives() as counts:
        loss_of(model(batch(0)[1])).backward()
    assert not counts["reduce_scatter"] and all(p.grad is None for p in model.parameters())
    model.set_requires_gradient_sync(True)
    loss_of(model(batch(1)[1])).backward()
    for step in range(2):
        loss_of(reference(batch(step)[0])).backward()
    same_gradients(model, reference)


@on_ranks(1, 2)
@pytest.mark.parametrize("shard_size", [1, -1])
def test_gradients_are_scaled(ranks: int, shard_size: int):
    reference, model = made("level2", shard_size=shard_size, grad_scale=0.25)
    whole, own = batch()
    (loss_of(reference(whole)) * 0.25).backward()
    loss_of(model(own)).backward()
    same_gradients(model, reference)
    model.zero_grad()
    model.set_gradient_divide_factor(4 * ranks, recurse=True)  # of the sum: the scale stays
    loss_of(model(own)).backward()
    reference.zero_grad()
    (loss_of(reference(whole)) * 0.0625).backward()
    same_gradients(model, reference)


@on_ranks(2)
def test_gradients_are_reduced_in_a_dtype():
    _, model = made("level2", reduce_dtype=torch.float32)
    _, exact = made("level2")
    for net in (model, exact):
        loss_of(net(batch()[1])).backward()
    both = zip(model.parameters(), exact.parameters(), strict=True)
    pairs = [(p.grad.full_tensor(), q.grad.full_tensor()) for p, q in both]
    assert all(a.dtype == torch.float64 and torch.equal(a, a.float().double()) for a, _ in pairs)
    assert 0 < max((a - b).abs().max().item() for a, b in pairs) < 1e-6


@on_ranks(2)
def test_asynchronous_reductions_are_waited_for_by_what_reads_them():
    reference, model = made("level2", comm_async=True)
    whole, own = batch()
    loss_of(reference(whole)).backward()
    loss_of(model(own)).backward()
    assert model._hsdp_group.context.reductions, "the last ones are under way"
    hsdp_sync_stream()
    assert not model._hsdp_group.context.reductions
    same_gradients(model, reference)
    model.zero_grad()
    reference.zero_grad()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (reference, model)]
    for step in range(2):
        whole, own = batch(step)
        loss_of(reference(whole)).backward()
        loss_of(model(own)).backward()
        for optimizer in optimizers:
            optimizer.step()  # waits
            optimizer.zero_grad()
    same_weights(model, reference)


@on_ranks(2)
def test_arguments_are_checked():
    for options, error, text in (
        ({"optimizer_level": "level4"}, ValueError, "level1, level2, level3, got 'level4'"),
        ({"shard_size": 3}, ValueError, "divide the 2 ranks of data parallelism, got 3"),
        ({"shard_size": 0}, ValueError, "-1 or a number of ranks, got 0"),
        ({"threshold": -1}, ValueError, "KiB, 0 or more, got -1"),
        ({"bucket_size": -2}, ValueError, "-1 .no limit. or a number of KiB, got -2"),
        ({"bucket_size": 4}, ValueError, "bucket_size=4 limits.*Use comm_fusion=True"),
        ({"grad_scale": float("nan")}, ValueError, "grad_scale must be a finite number above 0, got nan"),
        ({"enable_grad_accumulation": 1}, TypeError, "enable_grad_accumulation must be True or False, got 1"),
        ({"reduce_dtype": "float32"}, TypeError, "reduce_dtype must be a dtype or None, got 'float32'"),
    ):
        with pytest.raises(error, match=text):
            hsdp(nn.Linear(2, 2), **options)
    for way in ({"bucket_size": 4, "comm_fusion": True}, {}):
        hsdp(nn.Linear(2, 2), **way)
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module, got int"):
        hsdp(3)


def names(model: nn.Module, max_bytes: int) -> list[str]:
    chosen = modules_by_size(model, max_bytes)
    by_module = {module: name for name, module in model.named_modules()}
    return [by_module[module] for module in chosen]


def test_modules_by_size():
    model = Net(blocks=2)
    block = sum(p.nbytes for p in Block().parameters())
    assert names(model, 100_000) == [""]
    assert names(model, block) == ["first", "blocks.0", "blocks.1", "last", ""]
    assert names(model, block - 4) == [
        "first",
        "blocks.0.norm",
        "blocks.0.up",
        "blocks.0.down",
        "blocks.1.norm",
        "blocks.1.up",
        "blocks.1.down",
        "last",
        "",
    ]
    model.last.weight = model.first.weight  # neither of the two that share it
    assert names(model, block) == ["blocks.0", "blocks.1", ""]
    with pytest.raises(ValueError, match="at least 1, got 0"):
        modules_by_size(model, 0)


@on_ranks(2)
def test_groups_by_size_train():
    reference = seeded(Net)
    model = copy.deepcopy(reference)
    for module in modules_by_size(model, 2000):
        fully_shard(module)
    train(reference, model, steps=2)
    same_weights(model, reference)
