"""Parameters of tensor subclasses that say which bytes travel in an all-gather."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from encoded import RowBytes, WholeBytes, Wrapping, encode, run_decoded
from fsdp_models import Net, batch, compared, data_mesh, loss_of, same_gradients, same_weights, seeded
from torch import nn

from hp_dtensor import DTensor, Shard, init_device_mesh
from hp_dtensor.debugging.debug import CommDebugMode
from hp_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, clip_grad_norm_, full_state_dict, fully_shard
from hp_testing import device_type, on_ranks

KINDS = [RowBytes, WholeBytes]


def sharded(kind: type[Wrapping], mesh: Any = None, **options: Any) -> tuple[nn.Module, nn.Module]:
    reference = seeded(Net)
    model = encode(copy.deepcopy(reference), kind)
    for block in model.blocks:
        fully_shard(block, mesh or data_mesh(), **options)
    return reference, fully_shard(model, mesh or data_mesh(), **options)


def train(reference: nn.Module, model: nn.Module, kind: type[Wrapping], steps: int = 3, limit: float = 1e-10) -> None:
    make = lambda net: torch.optim.AdamW(net.parameters(), lr=0.05)  # noqa: E731
    optimizers = [make(reference), make(model)]
    for step in range(steps):
        whole, own = batch(step)
        loss_of(run_decoded(reference, whole, kind)).backward()
        loss_of(model(own)).backward()
        same_gradients(model, reference, limit)
        for net, optimizer in zip((reference, model), optimizers):
            clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        same_weights(model, reference, limit)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(1, 2, 3, 4, 8)
def test_training_is_that_of_one_process(kind: type[Wrapping]):
    """Rows of 5, 7 and 11 elements, on up to 8 ranks, some of which have no row of some parameters."""
    train(*sharded(kind), kind)


def by_rows(parameter: torch.Tensor) -> Shard:
    return Shard(0)


@pytest.mark.parametrize(
    "options",
    [{"reshard_after_forward": False}, {"reshard_after_forward": 2}, {"comm_fusion": False}]
    + [{"deterministic": True}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}]
    + [{"shard_placement_fn": by_rows}],
    ids=lambda options: "-".join(options),
)
@on_ranks(4)
def test_options_of_groups(options: dict[str, Any]):
    for kind in KINDS:
        train(*sharded(kind, **options), kind)


@on_ranks(4)
def test_replicas():
    mesh = init_device_mesh(device_type(), (2, 2), ("replicate", "shard"))
    for kind in KINDS:
        train(*sharded(kind, mesh=mesh), kind)


@on_ranks(3)
def test_a_group_of_encoded_parameters_is_one_gather_and_a_step_one_reduction():
    _, model = sharded(WholeBytes)
    compared(model)
    for step in range(2):
        with CommDebugMode() as comm:
            loss_of(model(batch(step)[1])).backward()
        kinds = [(event.module, event.kind) for event in comm.events if event.phase == "forward"]
        # Of a block the weights of its layers are encoded, and the norm and a bias are not.
        assert [kind for _, kind in kinds].count("all_reduce") == 1
        assert all(kinds.count((f"Net.blocks.{index}", "all_gather")) == 2 for index in range(3))
        backward = [event.kind for event in comm.events if event.phase == "backward"]
        assert "all_reduce" not in backward


def gathered_bytes(model: nn.Module) -> int:
    """Bytes that the gathers of a forward bring together."""
    with CommDebugMode() as comm, torch.no_grad():
        model(torch.ones(2, 64, device=device_type()))
    return sum(event.bytes for event in comm.events if event.kind == "all_gather")


@on_ranks(4)
def test_bytes_of_a_gather_are_those_of_the_encoding():
    def layers(dtype: torch.dtype | None) -> nn.Module:
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
        if dtype is None:
            return fully_shard(encode(model, WholeBytes), data_mesh())
        return fully_shard(model, data_mesh(), mp_policy=MixedPrecisionPolicy(param_dtype=dtype))

    encoded, full, half = map(gathered_bytes, map(layers, (None, torch.float32, torch.bfloat16)))
    assert encoded * 4 == full and encoded * 2 == half


@on_ranks(2)
def test_the_sharded_parameters_are_plain():
    reference, model = sharded(RowBytes)
    weight = model.blocks[0].up.weight
    assert isinstance(weight, DTensor) and weight.dtype is torch.float64 and not isinstance(weight.to_local(), Wrapping)
    full = full_state_dict(model)
    for name, value in reference.state_dict().items():
        if full:
            assert torch.equal(full[name], value), name
    other = sharded(RowBytes)[1]
    other.load_state_dict(model.state_dict())
    whole, own = batch()
    assert torch.equal(model(own), other(own))


@on_ranks(2)
def test_scales_follow_weights_that_were_changed_by_hand():
    """A scale that is too small would cut what is larger."""
    reference, model = sharded(WholeBytes)
    compared(model)
    for net in (reference, model):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(100)
    whole, own = batch()
    for gather_first in (False, True):
        if gather_first:
            model.unshard()
        expected = loss_of(run_decoded(reference, whole, WholeBytes))
        expected.backward()
        loss_of(model(own)).backward()
        same_gradients(model, reference, 1e-9)
        for net in (reference, model):
            net.zero_grad()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.mul_(0.01)


class OneForAll(RowBytes):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (torch.ones(1),), ()


class TwoInside(RowBytes):
    def __tensor_flatten__(self) -> Any:
        return ["plain", "plain"], None


@on_ranks(2)
def test_what_cannot_be_gathered_is_refused():
    model = encode(nn.Linear(4, 6), TwoInside)
    with pytest.raises(TypeError, match="'weight' is a .*TwoInside with an all-gather extension.*one plain tensor"):
        fully_shard(model, data_mesh())
    model = fully_shard(encode(nn.Linear(4, 6), OneForAll), data_mesh())
    with pytest.raises(NotImplementedError, match=r"OneForAll made a tensor of shape \[1\] from \d rows.*as metadata"):
        model(torch.ones(2, 4))
    model = encode(nn.Linear(4, 6), RowBytes)
    with pytest.raises(NotImplementedError, match="'weight', which has an all-gather extension: it encodes whole rows"):
        fully_shard(model, data_mesh(), shard_placement_fn=lambda parameter: Shard(parameter.dim() - 1))


@on_ranks(2)
def test_a_freed_parameter_is_not_computed_with():
    """Backward by a tensor that is no output of the module finds the parameter freed, and says so."""
    model = fully_shard(encode(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), WholeBytes), data_mesh())
    kept: list[torch.Tensor] = []
    model[0].register_forward_hook(lambda module, args, output: kept.append(output.sin()))
    outer = fully_shard(nn.Sequential(model), data_mesh())
    x = torch.ones(2, 4, requires_grad=True)
    first, second = outer(x), outer(x)
    with pytest.raises(RuntimeError, match="fully_shard: backward needs parameters that are freed"):
        torch.autograd.grad(kept[0].sum(), x)
    del first, second
