"""`fully_shard([one, other])`: several modules in one group."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fsdp_models import Net, batch, compared, data_mesh, groups_of, loss_of, rows, same_gradients, seeded, train
from torch import nn

from hp_fsdp import clip_grad_norm_, explain, full_state_dict, fully_shard, watch_activations
from hp_platform import count_collectives
from hp_testing import device_type, on_ranks


class Tied(nn.Module):
    """Norm and head in one group; the head shares the embedding's weight; a branch that a call may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor, *, head: bool = True) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        x = self.norm(x)
        return self.head(x) if head else x


def sharded(make: Any = Tied, **options: Any) -> tuple[Any, Any]:
    reference: Any = seeded(make)
    model: Any = copy.deepcopy(reference)
    mesh = data_mesh()
    for block in model.blocks:
        fully_shard(block, mesh, **options)
    pair = [model.norm, model.head]
    assert fully_shard(pair, mesh, **options) is pair
    return reference, fully_shard(model, mesh, **options)


@on_ranks(2, 3)
@pytest.mark.parametrize("reshard", [True, False])
def test_training_is_that_of_one_process(reshard: bool):
    train(*sharded(reshard_after_forward=reshard))


@on_ranks(2)
def test_one_group_of_two_modules_gathers_and_reduces_once():
    _, model = sharded()
    compared(model)
    assert model.norm._hsdp_group is model.head._hsdp_group
    assert [group.name for group in groups_of_model(model)] == ["Tied", "blocks.0", "blocks.1", "norm, head"]
    for _ in range(2):
        with count_collectives() as counts:
            loss_of(model(batch()[1])).backward()
        assert dict(counts) == {"all_gather": 2 * 3 + 1, "reduce_scatter": 4}
    assert set(full_state_dict(model)) == set(Tied().state_dict())


def groups_of_model(model: nn.Module) -> list[Any]:
    return list(dict.fromkeys(groups_of(model)))


@on_ranks(2)
def test_modules_that_did_not_run_in_the_forward_run_later():
    """Losses by chunks: the model's forward ends with the norm, the head is called for each part."""
    reference, model = sharded()
    whole, own = batch()
    for net, x in ((reference, whole), (model, own)):
        hidden = net(x, head=False)
        losses = [loss_of(net.head(part)) for part in hidden.chunk(2)]
        (sum(losses) / 2).backward()  # type: ignore[union-attr]
    same_gradients(model, reference)
    assert not any(group.unsharded for group in groups_of(model))
    train(reference, model, steps=1)


@on_ranks(2)
def test_a_tied_parameter_of_two_modules():
    class Net2(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(11, 6)
            self.blocks = nn.ModuleList([nn.Linear(6, 6)])
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.blocks[0](self.embedding(x))))

    reference, mesh = seeded(Net2), data_mesh()
    model: Any = copy.deepcopy(reference)
    fully_shard(model.blocks[0], mesh)
    fully_shard([model.embedding, model.head], mesh)
    fully_shard(model, mesh)
    ids = torch.randint(0, 11, (12, 4), generator=torch.Generator().manual_seed(0)).to(device_type())
    for net, x in ((reference, ids), (model, rows(ids))):
        loss_of(net(x)).backward()
    same_gradients(model, reference)
    assert model.embedding.weight is model.head.weight


@on_ranks(2)
def test_an_error_in_one_of_them_leaves_the_next_step_right():
    reference, model = sharded()
    compared(model)
    failing = model.head.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyError("in the head")))
    with pytest.raises(KeyError, match="in the head"):
        model(batch()[1])
    failing.remove()
    train(reference, model, steps=1)


@on_ranks(2)
def test_clipping_and_no_sync():
    reference, model = sharded()
    for net, x in ((reference, batch()[0]), (model, batch()[1])):
        if net is model:
            model.set_requires_gradient_sync(False)
            loss_of(model(x)).backward()
            model.set_requires_gradient_sync(True)
        else:
            loss_of(net(x)).backward()
        loss_of(net(x)).backward()
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    assert torch.allclose(clip_grad_norm_(model.parameters(), 0.1), expected)
    same_gradients(model, reference)


@on_ranks(1)
def test_what_cannot_be_one_group():
    model: Any = seeded(Tied)
    with pytest.raises(ValueError, match="at least one module, got an empty list"):
        fully_shard([])
    with pytest.raises(TypeError, match=r"a list of torch.nn.Module, number 1 is a str"):
        fully_shard([model.norm, "head"])
    inner = fully_shard([model.first, model.first], data_mesh())
    assert inner == [model.first, model.first]
    with pytest.raises(ValueError, match="this Linear is sharded already"):
        fully_shard([model.first, model.head])
    fully_shard([model.norm, model.head], data_mesh())
    with pytest.raises(RuntimeError, match=r"one of the group \[LayerNorm, Linear\] runs, and no sharded"):
        model.head(torch.ones(2, 7, dtype=torch.float64, device=device_type()))
    holder = fully_shard(nn.Sequential(model.first, model.norm), data_mesh())
    with pytest.raises(RuntimeError, match=r"Linear is in one group with modules of Sequential, but not in"):
        holder(torch.ones(2, 5, dtype=torch.float64, device=device_type()))
    x = batch()[0]
    torch.testing.assert_close(fully_shard(model, data_mesh())(x), seeded(Tied)(x))  # it holds all of them
    model.head(model(x, head=False))
    # A module inside of another one of the list is in its group anyway.
    net: Any = seeded(Net)
    fully_shard([net, net.first], data_mesh())
    assert type(net.first) is nn.Linear


@on_ranks(1)
def test_explain_refuses_such_groups():
    _, model = sharded()
    with pytest.raises(NotImplementedError, match="explain: LayerNorm, Linear are one group, .*with watch_activations"):
        explain(model)
    with watch_activations(model) as activations:
        loss_of(model(batch()[1])).backward()
    assert activations.peak > 0
