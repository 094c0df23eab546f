"""Parameters that are tied, frozen, unused, on meta, or changed from outside."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fsdp_models import (
    Net,
    batch,
    close,
    data_mesh,
    groups_of,
    loss_of,
    pair,
    same_gradients,
    same_weights,
    seeded,
    train,
)
from torch import nn

from hp_dtensor import DTensor, RaggedShard, init_empty_weights, init_parameters
from hp_fsdp import StateDictOptions, full_state_dict, fully_shard, load_full_state_dict, set_model_state_dict
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.device


class Tied(nn.Module):
    """Tied inside a block, and between the first and the last module, which both fall to the root."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))])
        self.blocks[0][2].weight = self.blocks[0][0].weight
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed((x[:, :3].abs() * 1e3).long() % 13)
        return self.head(self.blocks[0](h))


@on_ranks(1, 2, 3)
def test_tied_parameters_stay_tied():
    reference, model = pair(Tied)
    train(reference, model)
    assert model.head.weight is model.embed.weight
    assert model.blocks[0][2].weight is model.blocks[0][0].weight
    assert len(list(model.parameters())) == len(list(reference.parameters())) == 4


@on_ranks(2)
def test_a_parameter_tied_to_another_group_is_an_error():
    model = seeded(Tied)
    fully_shard(model.embed, data_mesh())
    with pytest.raises(ValueError, match=r"'head.weight' of Tied belongs to a group already: 'weight' of Embedding"):
        fully_shard(model, data_mesh())
    whole = seeded(Tied)  # neither of the two that share it is a group of its own
    for block in whole.blocks:
        fully_shard(block, data_mesh())
    fully_shard(whole, data_mesh())
    listed = seeded(Tied)
    fully_shard([listed.embed, listed.head], data_mesh())
    fully_shard(listed, data_mesh())
    for model in (whole, listed):
        loss_of(model(batch()[1])).backward()
        assert model.head.weight is model.embed.weight


def freeze(net: nn.Module) -> None:
    for name, parameter in net.named_parameters():
        parameter.requires_grad_("up" not in name and "blocks.1" not in name)


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        freeze(self)


@on_ranks(1, 2, 3)
def test_frozen_parameters_are_gathered_and_not_reduced():
    reference, model = pair(Frozen)
    train(reference, model)
    assert [len(group.buckets) for group in groups_of(model)] == [1, 2, 1, 2]
    assert not model.blocks[1].norm.weight.requires_grad


@on_ranks(2)
def test_parameters_frozen_later():
    reference, model = pair()
    train(reference, model, steps=1)
    freeze(reference)
    freeze(model)
    train(reference, model, steps=2)


@on_ranks(1, 2)
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}, {"deterministic": True}], ids=str)
@pytest.mark.parametrize("grad", [False, True])
def test_parameters_frozen_for_a_forward_between_another_and_its_backward(grad: bool, options: dict[str, Any]):
    # As by peft's disable_adapter, of which trl's DPOTrainer makes the reference model; or a discriminator's.
    reference, model = pair(**options)
    for _ in range(2):
        for net, x in zip((reference, model), batch(), strict=True):
            output = net(x)
            net.requires_grad_(False)
            with torch.set_grad_enabled(grad):
                other = net(x)
            assert not other.requires_grad
            net.requires_grad_(True)
            loss_of(output - other / 2).backward()
            assert all(parameter.grad is not None for parameter in net.parameters())
        same_gradients(model, reference)
        model.zero_grad()
        reference.zero_grad()


@on_ranks(2)
def test_parameters_frozen_between_forward_and_backward_get_no_gradients():
    reference, model = pair()
    for net, x in zip((reference, model), batch(), strict=True):
        output = net(x)
        freeze(net)
        loss_of(output).backward()
    same_gradients(model, reference)
    assert any(parameter.grad is None for parameter in model.parameters())


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(5, 3)
        self.blocks[1].spare = nn.Linear(2, 2)


@on_ranks(1, 2, 3)
def test_parameters_without_a_gradient_keep_none():
    # Weight decay would move them if they had zeros.
    train(*pair(Unused), make=lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1))


class Optional(Unused):
    uses = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        return output + self.spare(x) if self.uses else output


@on_ranks(2, 3, 4)
def test_a_parameter_without_a_gradient_on_some_ranks_gets_that_of_the_others(ranks: int):
    reference, model = pair(Optional)
    whole, own = batch()
    losses = []
    for rank, part in enumerate(whole.chunk(ranks)):
        reference.uses = rank == 1
        losses.append(loss_of(reference(part)))
    torch.stack(losses).mean().backward()
    model.uses = dist.get_rank() == 1
    loss_of(model(own)).backward()
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        units = parameter.placements[0].units
        start = sum(units[: dist.get_rank()])
        part = slice(start, start + units[dist.get_rank()])
        if part.stop > part.start:  # who owns nothing of it cannot know
            grad = expected[name].grad
            mine = None if parameter.grad is None else parameter.grad.to_local()
            close(mine, None if grad is None else grad.flatten()[part], name)


@on_ranks(2)
def test_sharded_parameters_are_ragged_dtensors_of_the_global_shape():
    reference, model = pair()
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters()):
        assert isinstance(parameter, nn.Parameter) and isinstance(parameter, DTensor), name
        assert parameter.shape == expected.shape and isinstance(parameter.placements[0], RaggedShard)
        assert parameter.to_local().dim() == 1 and parameter.is_leaf
        assert sum(parameter.placements[0].units) == expected.numel()
    group = groups_of(model)[1]
    assert len({p.sharded.to_local().untyped_storage().data_ptr() for p in group.parameters}) == 1


class Odd(Net):
    """Parameters of no dim, of no element, and not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.first.weight = nn.Parameter(torch.randn(5, 7).T)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale + self.empty.sum()


@on_ranks(1, 2, 3)
def test_parameters_of_odd_shapes():
    train(*pair(Odd))


@on_ranks(2)
def test_ignored_parameters_stay_as_they_are():
    model = seeded(Net)
    ignored = set(model.last.parameters())
    fully_shard(model, data_mesh(), ignored_params=ignored)
    assert set(model.last.parameters()) == ignored
    assert isinstance(model.first.weight, DTensor)


@on_ranks(2)
def test_attributes_of_a_parameter_stay_on_it():
    model = seeded(Net)
    model.first.weight.no_decay = True
    fully_shard(model, data_mesh())
    assert model.first.weight.no_decay


class Initialised(Net):
    """Drawn in float64: a cast afterwards would not be repeated by ``init_parameters``."""

    def __init__(self) -> None:
        torch.set_default_dtype(torch.float64)
        try:
            super().__init__()
        finally:
            torch.set_default_dtype(torch.float32)


@on_ranks(2, 3)
def test_a_model_on_meta_is_sharded_and_filled_in_later():
    with torch.device(device_type()):  # drawn where init_parameters draws
        reference = seeded(Initialised)
    with init_empty_weights():
        model = Initialised()
    for block in model.blocks:
        fully_shard(block, data_mesh())
    fully_shard(model, data_mesh())
    with pytest.raises(RuntimeError, match=r"parameter 'first.weight' of Initialised is still on the meta device"):
        model(batch()[1])
    torch.manual_seed(1)
    init_parameters(model)
    same_weights(model, reference)
    train(reference, model)


@on_ranks(2)
def test_a_model_on_meta_is_emptied_onto_a_device():
    with torch.device(device_type()):  # drawn where init_parameters draws
        reference = seeded(Initialised)
    with init_empty_weights():
        model = fully_shard(Initialised(), data_mesh())
    with pytest.raises(RuntimeError, match=r"still on the meta device.*model.to_empty\(device='") as refused:
        model(batch()[1])
    named = str(refused.value).split("to_empty(device='")[1].split("'")[0]
    assert named == device_type()
    model.to_empty(device=named)
    from hp_fsdp import load_full_state_dict

    load_full_state_dict(model, reference.state_dict())
    train(reference, model)


class Rotary(nn.Module):
    """A buffer that is no part of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 4)
        self.register_buffer("inv_freq", 1.0 / torch.arange(1.0, 5.0, dtype=torch.float64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.inv_freq


@on_ranks(2)
def test_buffers_that_no_state_has_are_named_after_to_empty():
    reference = nn.Sequential(seeded(Rotary), nn.Linear(4, 3).double())
    with init_empty_weights():
        model = nn.Sequential(Rotary(), nn.Linear(4, 3)).double()
    fully_shard(model[0], data_mesh())
    fully_shard(model, data_mesh())
    model.to_empty(device=device_type())
    set_model_state_dict(model, reference.state_dict(), options=StateDictOptions(full_state_dict=True))
    with pytest.raises(RuntimeError, match=r"to_empty gave 1 buffers of \w+ memory and no values.*: 0.inv_freq\. Comp"):
        model(batch()[1])
    model[0].inv_freq.copy_(reference[0].inv_freq)
    train(reference.to(device_type()), model)


@on_ranks(2)
def test_a_gradient_is_read_through_the_module_while_its_parameters_stay_gathered():
    for name in ("set_reshard_after_forward", "set_reshard_after_backward"):
        reference, model = pair()
        getattr(model, name)(False)
        for step in range(2):
            loss_of(reference(batch(step)[0])).backward()
            loss_of(model(batch(step)[1])).backward()
            for module, expected in ((model.last, reference.last), (model.blocks[0].up, reference.blocks[0].up)):
                assert torch.allclose(module.weight.grad.full_tensor(), expected.weight.grad, atol=1e-12), (name, step)
                assert module.weight is dict(module.named_parameters())["weight"]


@on_ranks(2)
def test_values_set_from_outside_are_used():
    reference, model = pair()
    train(reference, model, steps=1)
    with torch.no_grad():
        for net in (reference, model):
            for parameter in net.parameters():
                parameter.mul_(0.5)
            net.last.weight.data = net.last.weight.data * 2.0
    train(reference, model, steps=2)


@on_ranks(2)
def test_a_replaced_parameter_is_an_error():
    reference, model = pair()
    state, sharded = full_state_dict(model), model.first.weight
    model.first.weight = nn.Parameter(torch.zeros(7, 5, dtype=torch.float64))
    with pytest.raises(RuntimeError, match=r"'first.weight' of Net was replaced by Parameter that is not laid out as"):
        model(batch()[1])
    model.first.weight = sharded
    state["first.weight"] = torch.zeros_like(state["first.weight"])
    load_full_state_dict(model, state)
    nn.init.zeros_(reference.first.weight)
    train(reference, model, steps=1)


@on_ranks(2)
def test_evaluation_without_no_grad_before_a_fused_step():
    reference, model = pair()
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.1, fused=True) for net in (reference, model)]
    for step in range(3):
        whole, own = batch(step)
        loss_of(reference(whole)).backward()
        loss_of(model(own)).backward()
        same_gradients(model, reference)
        model(own)  # leaves the root gathered; the fused step below writes without a trace
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same_weights(model, reference)


@on_ranks(3)
def test_padding_of_a_shard_is_zero_whatever_was_in_its_memory():
    empty = torch.empty
    model = seeded(lambda: nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)))
    with mock.patch("torch.empty", lambda *sizes, **options: empty(*sizes, **options).fill_(7)):
        fully_shard(model, data_mesh())
    (bucket,) = groups_of(model)[0].buckets
    filled = sum(each.sharded.to_local().count_nonzero() for each in bucket.parameters)
    owned = sum(each.sharded.to_local().numel() for each in bucket.parameters)
    assert dist.get_rank() < 2 or owned < bucket.shard.numel()  # the last rank has padding
    assert bucket.shard.count_nonzero() == filled
