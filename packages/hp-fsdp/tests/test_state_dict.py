"""Whole tensors out of a sharded model, and into it."""

from __future__ import annotations

import math
import time
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.utils._python_dispatch
from fsdp_models import Buffered, Net, batch, loss_of, other_values, pair, same_weights, seeded, train
from torch import nn

from hp_dtensor import DTensor, Replicate, Shard, init_device_mesh
from hp_fsdp import (
    StateDictOptions,
    full_state_dict,
    fully_shard,
    get_model_state_dict,
    get_state_dict,
    load_full_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from hp_platform import count_collectives
from hp_testing import device_type, on_ranks

pytestmark = [pytest.mark.device, pytest.mark.framework("torch")]
FULL = StateDictOptions(full_state_dict=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


@pytest.mark.smoke
@on_ranks(1, 2, 3)
def test_names_order_and_values_of_the_unsharded_model():
    reference, model = pair(Buffered)
    with count_collectives() as counts:
        state = full_state_dict(model)
    pieces = {id(p): sum(map(bool, p.placements[0].units)) for p in model.parameters()}  # what ranks own, they send
    assert dict(counts) == ({"broadcast": sum(pieces.values())} if dist.get_world_size() > 1 else {})
    expected = reference.state_dict()
    assert list(state) == list(expected)
    for name, tensor in expected.items():
        assert type(state[name]) is torch.Tensor and torch.equal(state[name], tensor) and not state[name].requires_grad
    assert state["tied.weight"] is state["last.weight"]
    state["first.weight"].zero_()
    same_weights(model, reference)


@on_ranks(2)
def test_only_the_first_rank_keeps_it():
    reference, model = pair()
    state = full_state_dict(model, rank0_only=True, cpu=True)
    assert list(state) == (list(reference.state_dict()) if dist.get_rank() == 0 else [])


@on_ranks(2)
def test_between_forward_and_backward():
    reference, model = pair()
    loss = loss_of(model(batch()[1]))
    same_weights(model, reference)
    assert not any(type(p) is nn.Parameter for p in model.parameters())
    loss.backward()
    train(*pair(), steps=1)


@on_ranks(2, 3)
def test_loads_whole_tensors():
    _, model = pair(Buffered)
    torch.manual_seed(5)
    other = Buffered().to(device_type(), torch.float64)
    load_full_state_dict(model, other.state_dict())
    same_weights(model, other)


@on_ranks(1)
def test_names_and_shapes_must_fit():
    _, model = pair()
    state = seeded(Net).state_dict()
    state["more"] = state.pop("last.bias")
    with pytest.raises(ValueError, match=r"1 names are missing \(last.bias\), 1 are unexpected \(more\)"):
        load_full_state_dict(model, state)
    load_full_state_dict(model, state, strict=False)
    state["last.weight"] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"'last.weight' has shape \(2, 2\), the model's is \(3, 7\)"):
        load_full_state_dict(model, state, strict=False)


@on_ranks(2)
def test_sharded_state_dict_round_trips():
    reference, model = pair()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(state)
    same_weights(model, reference)
    train(reference, model, steps=1)


@on_ranks(2)
def test_torchs_options_are_taken():
    from torch.distributed.checkpoint.state_dict import StateDictOptions as Torchs

    reference, model = pair(Buffered)
    state = get_model_state_dict(model, options=Torchs(full_state_dict=True, cpu_offload=True))
    assert list(state) == (list(reference.state_dict()) if dist.get_rank() == 0 else [])
    assert all(tensor.device.type == "cpu" for tensor in state.values())


@on_ranks(2)
def test_torchs_function_gives_no_parts_for_whole_tensors():
    from torch.distributed.checkpoint import state_dict as torchs

    _, model = pair(Buffered)
    with pytest.raises(TypeError, match="from hp_fsdp import get_model_state_dict"):
        torchs.get_model_state_dict(model, options=torchs.StateDictOptions(full_state_dict=True))
    assert set(torchs.get_model_state_dict(model)) == set(get_model_state_dict(model))


@on_ranks(2, 3)
def test_sharded_state_is_the_models_memory_and_loads_in_any_layout():
    reference, model = pair(Buffered)
    state = get_model_state_dict(model)
    assert list(state) == list(reference.state_dict()) and state["tied.weight"] is state["last.weight"]
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        assert type(state[name]) is DTensor and state[name]._spec is parameter._spec and not state[name].requires_grad
        assert state[name].to_local().data_ptr() == parameter.to_local().data_ptr()
    host = get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))
    assert all(value.device.type == "cpu" for value in host.values())
    mesh = state["first.weight"].device_mesh
    moved = {
        name: value.redistribute(mesh, [Shard(0) if i % 2 else Replicate()]) if name in parameters else value.clone()
        for i, (name, value) in enumerate(state.items())
    }
    moved["tied.weight"] = moved["last.weight"]
    for given in (host, moved):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert set_model_state_dict(model, given) == ([], [])
        same_weights(model, reference)


@on_ranks(1, 3)
def test_rank_0_sends_one_tensor_at_a_time():
    _, model = pair(Buffered)
    other = other_values(Buffered)
    state = other.state_dict() if dist.get_rank() == 0 else {}
    with count_collectives() as counts:
        set_model_state_dict(model, state, options=BROADCAST)
    assert dict(counts) == ({"broadcast": len(other.state_dict())} if dist.get_world_size() > 1 else {})
    same_weights(model, other)
    if dist.get_world_size() > 1:
        with pytest.raises(TypeError, match="rank 0 must have full plain tensors"):
            set_model_state_dict(model, get_model_state_dict(model), options=BROADCAST)
        set_model_state_dict(model, get_model_state_dict(model))
        same_weights(model, other)
    with pytest.raises(ValueError, match="1 names are missing"):
        set_model_state_dict(model, {k: v for k, v in state.items() if k != "last.bias"}, options=BROADCAST)


@on_ranks(2)
def test_frozen_parameters_may_be_left_out():
    _, model = pair()
    for parameter in model.first.parameters():
        parameter.requires_grad_(False)
    options = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
    state = get_model_state_dict(model, options=options)
    assert "first.weight" not in state and "last.weight" in state
    assert set_model_state_dict(model, state, options=options) == ([], [])
    with pytest.raises(ValueError, match="2 names are missing"):
        set_model_state_dict(model, state, options=FULL)
    missing, unexpected = set_model_state_dict(
        model, state, options=StateDictOptions(full_state_dict=True, strict=False)
    )
    assert (sorted(missing), list(unexpected)) == (["first.bias", "first.weight"], [])


class Extra(nn.Linear):
    def get_extra_state(self):
        return {"seen": getattr(self, "seen", 0)}

    def set_extra_state(self, state):
        self.seen = state["seen"]


@on_ranks(2)
def test_extra_state_and_wrappers_names():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(checkpoint_wrapper(Extra(3, 5)), nn.Linear(5, 2)).to(device_type())
    fully_shard(model)
    inner = model[0]._checkpoint_wrapped_module
    inner.seen = 4
    state = get_model_state_dict(model, options=FULL)
    assert list(state) == ["0.weight", "0.bias", "0._extra_state", "1.weight", "1.bias"]
    state["0._extra_state"] = {"seen": 9}
    set_model_state_dict(model, state if dist.get_rank() == 0 else {}, options=BROADCAST)
    assert inner.seen == 9


@on_ranks(2)
def test_parameters_on_meta_are_refused():
    with torch.device("meta"):
        model = Net()
    fully_shard(model, init_device_mesh(device_type(), (2,)))
    state = Net().state_dict()
    with pytest.raises(RuntimeError, match=r"'first.weight' is still on the meta device.*to_empty"):
        set_model_state_dict(model, state, options=FULL)
    model.to_empty(device=device_type())
    set_model_state_dict(model, state, options=BROADCAST)
    assert all(
        torch.equal(value.cpu(), state[name] if dist.get_rank() == 0 else value.cpu())
        for name, value in get_model_state_dict(model, options=FULL).items()
    )


@on_ranks(4)
def test_on_two_axes_of_data_and_over_tensor_parallel():
    from hp_styles import ColwiseParallel, RowwiseParallel, parallelize_module

    reference, model = pair(mesh=init_device_mesh(device_type(), (2, 2), ("replicate", "shard")))
    same_weights(model, reference)
    set_model_state_dict(model, other_values().state_dict() if dist.get_rank() == 0 else {}, options=BROADCAST)
    same_weights(model, other_values())
    mesh = init_device_mesh(device_type(), (2, 2), ("dp", "tp"))
    model = seeded(Net)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh["dp"])
    fully_shard(model, mesh["dp"])
    same_weights(model, reference)
    set_model_state_dict(model, get_model_state_dict(model))
    load_full_state_dict(model, other_values().state_dict())
    same_weights(model, other_values())


class Meter(torch.utils._python_dispatch.TorchDispatchMode):
    """The most bytes that tensors made under it held at one time.

    A backend's thread lets go of a collective's tensors some time after its waiter goes on. So more than ``limit`` is
    waited for to go away before it counts: what the program itself holds stays, while this waits.
    """

    def __init__(self, known, limit):
        super().__init__()
        self.known, self.limit, self.peak = {v.untyped_storage()._cdata for v in known}, limit, 0
        self.alive = {}  # one operation each to add and to remove: threads do both

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.known and storage._cdata not in self.alive:
                self.alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, storage._cdata)
                self.peak = max(self.peak, self.held())
        return made

    def held(self):
        until = time.monotonic() + 20
        while (now := sum(list(self.alive.values()))) > self.limit and time.monotonic() < until:
            time.sleep(0.001)
        return now


@on_ranks(3)
def test_one_parameter_at_a_time_is_held_beside_the_result():
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6))).to(device_type())
    fully_shard(model)
    one = 64 * 64 * 4
    own = [value.to_local() for value in get_model_state_dict(model).values()]
    with Meter(own, limit=7 * one) as meter:
        state = get_model_state_dict(model, options=FULL)
    assert sum(v.nbytes for v in state.values()) == 6 * one and 6 * one <= meter.peak <= 7 * one, meter.peak
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    del state
    with Meter(own, limit=2 * one if dist.get_rank() else math.inf) as meter:
        get_model_state_dict(model, options=options)
    if dist.get_rank():
        assert one <= meter.peak <= 2 * one, meter.peak
    whole = {f"{i}.weight": torch.ones(64, 64) for i in range(6)} if dist.get_rank() == 0 else {}
    with Meter([*own, *whole.values()], limit=2 * one) as meter:
        set_model_state_dict(model, whole, options=BROADCAST)
    assert meter.peak <= 2 * one, meter.peak


# ---- models and optimizers in one call ----
@pytest.mark.parametrize(
    "options",
    [StateDictOptions(), StateDictOptions(cpu_offload=True), FULL, StateDictOptions(flatten_optimizer_state_dict=True)],
    ids=["sharded", "host", "whole", "flat"],
)
@on_ranks(2)
def test_get_state_dict_and_set_state_dict_round_trip(options: StateDictOptions) -> None:
    reference, model = pair()
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in (reference, model)]

    def step(number: int) -> None:
        for net, x, optimizer in zip((reference, model), batch(number), optimizers, strict=True):
            loss_of(net(x)).backward()
            optimizer.step()
            optimizer.zero_grad()

    step(0)
    states = get_state_dict(model, optimizers[1], options=options)
    assert (type(states[0]["last.bias"]) is DTensor) is not options.full_state_dict
    model = pair()[1]
    optimizers[1] = torch.optim.AdamW(model.parameters(), lr=0.5)
    result = set_state_dict(
        model, optimizers[1], model_state_dict=states[0], optim_state_dict=states[1], options=options
    )
    assert not result.missing_keys and not result.unexpected_keys and optimizers[1].param_groups[0]["lr"] == 0.01
    step(1)
    same_weights(model, reference)


@on_ranks(2)
def test_what_get_state_dict_refuses() -> None:
    _, model = pair()
    with pytest.raises(
        NotImplementedError, match=r"submodules is not supported.* call get_model_state_dict\(submodule\)"
    ):
        get_state_dict(model, (), submodules={model.first})
    part = get_model_state_dict(model.first)
    whole = get_model_state_dict(model)
    names = {name.removeprefix("first.") for name in whole if name.startswith("first.")}
    assert set(part) == names
    state, nothing = get_state_dict(model, ())
    assert nothing == {"state": {}, "param_groups": []}
    set_state_dict(model, (), model_state_dict=state, optim_state_dict=nothing)
    model.first.__dict__["_fqn_modifiers"] = dict
    with pytest.raises(
        NotImplementedError, match="Linear renames its keys by a method _fqn_modifiers.*; remove the met"
    ):
        get_state_dict(model, ())
    del model.first.__dict__["_fqn_modifiers"]
    assert set(get_state_dict(model, ())[0]) == set(whole)
