"""Model states, whole and sharded, out of a model and into it."""

from __future__ import annotations

import numpy as np
import pytest
from fsdp_cells import Net, batch, close, data_mesh, double, pair, same_weights, seeded, train, world
from mindspore import Parameter, Tensor, nn

from hp_dtensor import (
    DTensor,
    RaggedShard,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    init_empty_weights,
)
from hp_dtensor.mindspore.dtensor import local_view
from hp_fsdp import (
    StateDictOptions,
    full_state_dict,
    fully_shard,
    get_model_state_dict,
    load_full_state_dict,
    set_model_state_dict,
)
from hp_platform import count_collectives
from hp_testing import device_type, on_ranks

FULL = StateDictOptions(full_state_dict=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class Buffered(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", Tensor(np.arange(3, dtype=np.float32)))
        self.tied = self.last

    def construct(self, x):
        return super().construct(x) + self.offset


@on_ranks(2, 4)
def test_round_trip():
    reference, model = pair(Buffered)
    with count_collectives() as counted:
        state = full_state_dict(model)
    pieces = {id(p): sum(map(bool, p.placements[0].units)) for p in model.get_parameters()}
    assert dict(counted) == {"broadcast": sum(pieces.values())}  # what ranks own, they send
    assert all(type(tensor) is Tensor for tensor in state.values())
    same_weights(model, reference, 0.0)
    assert state["tied.weight"] is state["last.weight"]
    scaled = {name: Tensor(tensor.asnumpy() * 2) for name, tensor in state.items()}
    load_full_state_dict(model, scaled)
    assert all(isinstance(parameter, DTensor) for parameter in model.get_parameters())
    for name, tensor in full_state_dict(model).items():
        close(tensor.asnumpy(), scaled[name].asnumpy(), name, 0.0)
    for name, value in reference.state_dict().items():
        if isinstance(value, Parameter) and not name.startswith("tied"):
            value.set_data(scaled[name])
    reference._buffers["offset"] = scaled["offset"]
    close(model(batch()[1]).asnumpy(), reference(batch()[1]).asnumpy(), "output")


@on_ranks(2)
def test_first_rank_only_and_strictness():
    _, model = pair()
    state = full_state_dict(model)
    assert bool(full_state_dict(model, rank0_only=True, cpu=True)) == (world()[0] == 0)
    missing = dict(state)
    missing["unknown"] = missing.pop("first.bias")
    with pytest.raises(ValueError, match=r"1 names are missing \(first.bias\), 1 are unexpected \(unknown\)"):
        load_full_state_dict(model, missing)
    load_full_state_dict(model, missing, strict=False)
    with pytest.raises(ValueError, match=r"'first.bias' has shape \(3,\), the model's is \(7,\)"):
        load_full_state_dict(model, {**state, "first.bias": Tensor(np.zeros(3, np.float32))})


@on_ranks(4)
def test_between_meshes():
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    _, source = pair()
    target = fully_shard(seeded(Net), mesh)
    doubled = {name: tensor * 2 for name, tensor in full_state_dict(source).items()}
    load_full_state_dict(target, doubled)
    for name, tensor in full_state_dict(target).items():
        close(tensor.asnumpy(), doubled[name].asnumpy(), name, 0.0)


# ---- HSDPModule.load_state_dict ----
def other_values(model):
    """Whole values, the same on all ranks, by all names of a model."""
    random = np.random.RandomState(3)
    made = {}
    for value in model.state_dict(keep_vars=True).values():
        made.setdefault(id(value), Tensor(random.randn(*value.shape).astype(np.float32)))
    return {name: made[id(value)] for name, value in model.state_dict(keep_vars=True).items()}


@on_ranks(2)
@pytest.mark.parametrize("kind", ["whole", "moved", "placed", "parts"])
def test_load_state_dict_takes_whole_tensors_parts_and_dtensors(kind: str):
    _, model = pair(Buffered)
    own, whole = dict(model.state_dict(keep_vars=True)), other_values(model)
    mesh = model.last.weight.device_mesh
    state = dict(whole)
    for name, target in own.items():
        if isinstance(target, DTensor) and kind != "whole":
            placements = [Shard(0)] if kind == "moved" else target.placements
            state[name] = distribute_tensor(whole[name], mesh, placements)
            state[name] = state[name].to_local() if kind == "parts" else state[name]
    addresses = {name: local_view(value).data_ptr() for name, value in own.items() if isinstance(value, DTensor)}
    result = model.load_state_dict(state)
    assert not result.missing_keys and not result.unexpected_keys and model.tied.weight is model.last.weight
    for name, value in full_state_dict(model).items():
        close(value.asnumpy(), whole[name].asnumpy(), name, 0.0)
    for name, address in addresses.items():
        assert not own[name].to_local().numel() or local_view(own[name]).data_ptr() == address, "optimizers hold it"


@on_ranks(2)
def test_what_does_not_fit_changes_nothing():
    reference, model = pair()
    whole = other_values(model)
    wrong = {**whole, "last.weight": Tensor(np.zeros((2, 2), np.float32))}
    text = r"1 of .* tensors do not fit: 'last.weight' has shape \(2, 2\), the model's has .* of which this rank's part"
    with pytest.raises(RuntimeError, match=text):
        model.load_state_dict(wrong)
    moved = {name: distribute_tensor(value, model.last.weight.device_mesh, [Shard(0)]) for name, value in whole.items()}
    if world()[0] == 0:
        moved["last.weight"] = wrong["last.weight"]
    with pytest.raises(RuntimeError, match=text if world()[0] == 0 else "another rank got tensors that do not fit"):
        model.load_state_dict(moved)
    less = {name: value for name, value in whole.items() if name != "last.bias"}
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: 'last.bias'\. Unexpected .*: 'more'"):
        model.load_state_dict({**less, "more": whole["last.bias"]})
    same_weights(model, reference, 0.0)
    result = model.load_state_dict({"last.bias": whole["last.bias"], "more": whole["last.bias"]}, strict=False)
    assert result.unexpected_keys == ["more"] and "first.weight" in result.missing_keys
    close(model.last.bias.full_tensor().asnumpy(), whole["last.bias"].asnumpy(), "bias", 0.0)
    model.last.register_load_state_dict_pre_hook(lambda *_: None)
    with pytest.raises(NotImplementedError, match=r"last, a Linear, changes a state before it is loaded \(a hook\)"):
        model.load_state_dict(whole)
    changed = {**whole, "last.bias": 2 * whole["last.bias"]}  # what the hook would do
    set_model_state_dict(model, changed, options=FULL)
    close(model.last.bias.full_tensor().asnumpy(), changed["last.bias"].asnumpy(), "bias", 0.0)


@on_ranks(4)
def test_parts_of_another_number_of_ranks_go_by_way_of_whole_tensors_or_a_checkpoint(tmp_path):
    reference, model = pair()
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    saved = fully_shard(seeded(Net), mesh)
    parts = {name: value.to_local() for name, value in saved.state_dict(keep_vars=True).items()}
    with pytest.raises(RuntimeError, match="A part of another number of ranks is loaded by way of a full state, or of"):
        model.load_state_dict(parts)
    with pytest.raises(ValueError, match="Shards of another number of ranks are loaded by way of full_state_dict=True"):
        set_model_state_dict(model, parts)
    for load in (model.load_state_dict, lambda state: set_model_state_dict(model, state, options=FULL)):
        load(get_model_state_dict(zeroed(saved), options=FULL))
        assert not any(value.asnumpy().any() for value in full_state_dict(model).values())
        load(get_model_state_dict(fully_shard(seeded(Net), mesh), options=FULL))
        same_weights(model, reference, 0.0)
    hp_checkpoint = pytest.importorskip("hp_checkpoint", reason="needs hp-checkpoint")
    hp_checkpoint.save({"model": get_model_state_dict(saved)}, checkpoint_id=tmp_path / "saved")
    hp_checkpoint.load({"model": get_model_state_dict(model)}, checkpoint_id=tmp_path / "saved")
    assert not any(value.asnumpy().any() for value in full_state_dict(model).values())


@on_ranks(2)
def test_a_cell_around_sharded_ones_loads_whole_tensors():
    model = nn.SequentialCell(fully_shard(seeded(Net), data_mesh()))
    whole = other_values(model)
    model.load_state_dict(whole)
    for name, value in full_state_dict(model).items():
        close(value.asnumpy(), whole[name].asnumpy(), name, 0.0)
    assert model[0].last.weight.to_local().ndim == 1, "still a part"


@on_ranks(2)
def test_load_state_dict_into_parameters_without_values():
    with init_empty_weights():
        model = Net()
    for block in model.blocks:
        fully_shard(block, data_mesh())
    fully_shard(model, data_mesh())
    whole = other_values(model)
    model.load_state_dict(whole)
    for name, value in full_state_dict(model).items():
        close(value.asnumpy(), whole[name].asnumpy(), name, 0.0)


def zeroed(model):
    for parameter in model.get_parameters():
        parameter._update_data(parameter.to_local() * 0.0)
    return model


@on_ranks(2, 3)
def test_sharded_states_are_what_ranks_own_and_load_in_any_layout():
    reference, model = pair(double(Buffered))
    state = get_model_state_dict(model)
    assert list(state) == list(reference.state_dict()) and state["tied.weight"] is state["last.weight"]
    parameters = {name: value for name, value in model.state_dict(keep_vars=True).items() if name != "offset"}
    for name, parameter in parameters.items():
        assert type(state[name]) is DTensor and state[name]._spec is parameter._spec
        assert isinstance(state[name].placements[0], RaggedShard)
        assert (
            state[name].to_local().data_ptr() == parameter.to_local().data_ptr() or not state[name].to_local().numel()
        )
    with count_collectives() as counted:
        host = get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))
        arrays = {
            name: value.asnumpy() if name == "offset" else value.to_local().asnumpy() for name, value in host.items()
        }
    assert not counted
    # What each rank wrote, taken up by a model on as many ranks.
    saved = {
        name: Tensor(array) if name == "offset"
        else DTensor.from_local(Tensor(array), host[name].device_mesh, host[name].placements, shape=host[name].shape)
        for name, array in arrays.items()
    }  # fmt: skip
    mesh = data_mesh()
    moved = {
        name: value.redistribute(mesh, [Shard(0) if i % 2 else Replicate()]) if name != "offset" else value
        for i, (name, value) in enumerate(host.items())
    }
    moved["tied.weight"] = moved["last.weight"]
    for given in (host, saved, moved):
        assert set_model_state_dict(zeroed(model), given) == ([], [])
        same_weights(model, reference, 0.0)
    train(*pair(double(Net)), steps=1)


@on_ranks(1, 3)
def test_rank_0_sends_one_tensor_at_a_time():
    reference, model = pair(double(Buffered))
    zeroed(model)
    whole = {name: Tensor(value.asnumpy()) for name, value in reference.state_dict().items()}
    state = whole if world()[0] == 0 else {}
    with count_collectives() as counted:
        set_model_state_dict(model, state, options=BROADCAST)
    if world()[1] > 1:
        assert dict(counted) == {"broadcast": len(whole) + 2}  # and what there is: its length, and itself
        with pytest.raises(TypeError, match="rank 0 must have full plain tensors"):
            set_model_state_dict(model, get_model_state_dict(model), options=BROADCAST)
    same_weights(model, reference, 0.0)
    with pytest.raises(ValueError, match="1 names are missing"):
        set_model_state_dict(model, {k: v for k, v in state.items() if k != "last.bias"}, options=BROADCAST)
    with pytest.raises(TypeError, match="'last.bias' must be a tensor, got float"):
        set_model_state_dict(model, {**whole, "last.bias": 1.0}, options=FULL)


@on_ranks(2)
def test_frozen_parameters_may_be_left_out():
    reference, model = seeded(Net), seeded(Net)
    for cell in (reference, model):
        for parameter in cell.first.get_parameters():
            parameter.requires_grad = False
    fully_shard(model, data_mesh())
    options = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
    state = get_model_state_dict(model, options=options)
    assert [name for name in reference.state_dict() if name not in state] == ["first.weight", "first.bias"]
    result = set_model_state_dict(zeroed(model), state, options=options)
    assert result == ([], []) and result.missing_keys == result.unexpected_keys == []
    close(get_model_state_dict(model, options=FULL)["last.weight"].asnumpy(), reference.last.weight.asnumpy(), "last")
    with pytest.raises(ValueError, match="2 names are missing"):
        set_model_state_dict(model, state, options=FULL)


class Extra(Net):
    seen = 0

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


@on_ranks(2)
def test_extra_states_and_rank_0_only():
    _, model = pair(Extra)
    model.seen = 4
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert bool(state) == (world()[0] == 0)
    if state:
        assert state["_extra_state"] == {"seen": 4}
        state["_extra_state"] = {"seen": 9}
    set_model_state_dict(model, state, options=BROADCAST)
    assert model.seen == 9


@on_ranks(1)
def test_a_cell_that_is_not_sharded():
    cell = seeded(Net)
    state = get_model_state_dict(cell)
    assert list(state) == list(cell.state_dict())
    set_model_state_dict(cell, {name: value * 2 for name, value in state.items()})
    same_weights(cell, cell)
    close(cell.last.bias.asnumpy(), 2 * seeded(Net).last.bias.asnumpy(), "last.bias", 0.0)
