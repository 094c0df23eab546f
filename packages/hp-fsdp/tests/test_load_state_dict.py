"""`load_state_dict` of a sharded model: whole tensors, parts and DTensors; what does not fit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from fsdp_models import Buffered, Net, batch, loss_of, other_values, pair, same_weights, seeded, train
from torch import nn

from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_fsdp import fully_shard
from hp_testing import device_type, on_ranks

pytestmark = [pytest.mark.device, pytest.mark.framework("torch")]


def _kinds(model: nn.Module, source: nn.Module) -> dict[str, dict]:
    """The source's state in every form that loads into ``model``."""
    whole = source.state_dict()
    mesh = next(model.parameters()).device_mesh
    moved = {n: distribute_tensor(t, mesh, [Shard(0) if t.dim() else Replicate()]) for n, t in whole.items()}
    laid = dict(model.state_dict(keep_vars=True))
    placed = {
        n: distribute_tensor(t, mesh, laid[n].placements) if isinstance(laid[n], DTensor) else t
        for n, t in whole.items()
    }
    parts = {n: t.to_local() if isinstance(t, DTensor) else t for n, t in placed.items()}
    return {"whole": whole, "moved": moved, "placed": placed, "parts": parts}


@pytest.mark.parametrize("assign", [False, True])
@on_ranks(2)
def test_load_state_dict_takes_whole_tensors_parts_and_dtensors(assign: bool) -> None:
    for kind in ("whole", "moved", "placed", "parts"):
        reference, model = pair(Buffered)
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (reference, model)]
        source = other_values(Buffered)
        state = _kinds(model, source)[kind]
        reference.load_state_dict(source.state_dict())
        result = model.load_state_dict(state, assign=assign)
        assert not result.missing_keys and not result.unexpected_keys and model.tied.weight is model.last.weight
        same_weights(model, reference)
        for net, x, optimizer in zip((reference, model), batch(), optimizers, strict=True):
            loss_of(net(x)).backward()
            optimizer.step()
        same_weights(model, reference)


@on_ranks(2)
def test_load_state_dict_of_tensors_that_do_not_fit_changes_nothing() -> None:
    reference, model = pair()
    whole = other_values().state_dict()
    wrong = {**whole, "last.weight": torch.zeros(2, 2)}
    text = (
        r"1 of .* tensors do not fit: 'last.weight' has shape \(2, 2\), the model's has \(3, 7\), of which this rank's"
    )
    with pytest.raises(RuntimeError, match=text):
        model.load_state_dict(wrong)
    mesh = next(model.parameters()).device_mesh
    moved = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    if dist.get_rank() == 0:  # all ranks stop before tensors are moved
        moved["last.weight"] = torch.zeros(2, 2)
    with pytest.raises(
        RuntimeError, match=text if dist.get_rank() == 0 else "another rank got tensors that do not fit"
    ):
        model.load_state_dict(moved)
    same_weights(model, reference)
    with pytest.raises(RuntimeError, match="Missing key.*last.bias"):
        model.load_state_dict({name: tensor for name, tensor in whole.items() if name != "last.bias"})
    result = model.load_state_dict({"last.bias": whole["last.bias"], "more": torch.zeros(1)}, strict=False)
    assert result.unexpected_keys == ["more"] and "first.weight" in result.missing_keys


@on_ranks(2)
def test_load_state_dict_into_a_model_on_meta() -> None:
    reference = seeded(Net)
    with torch.device("meta"):
        model = fully_shard(Net().to(torch.float64), init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",)))
    weight = model.first.weight
    with pytest.raises(RuntimeError, match=r"'first.weight' of the model is on the meta device\. Give it memory first"):
        model.load_state_dict(reference.state_dict())
    model.load_state_dict(reference.state_dict(), assign=True)
    assert model.first.weight is weight
    same_weights(model, reference)
    train(reference, model, steps=1)


@on_ranks(2)
def test_a_rank_without_elements_follows_materialising_and_casts() -> None:
    def sharded(device: str) -> nn.Module:
        with torch.device(device):
            model = nn.Linear(4, 4, bias=False)
        return fully_shard(model, init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",)))

    inputs, weight = torch.ones(1, 4, device=device_type()), torch.arange(16.0, device=device_type()).reshape(4, 4)
    assigned, emptied, cast = sharded("meta"), sharded("meta"), sharded(device_type())
    assert dist.get_rank() == 0 or assigned.weight.to_local().numel() == 0
    assigned.load_state_dict({"weight": weight}, assign=True)
    emptied.to_empty(device=device_type()).load_state_dict({"weight": weight})
    cast.load_state_dict({"weight": weight})
    for model in (assigned, emptied, cast):
        assert torch.equal(model(inputs), inputs @ weight.T)
    cast.reshard()
    cast.to(torch.float64)
    assert torch.equal(cast(inputs.double()), inputs.double() @ weight.T.double())
