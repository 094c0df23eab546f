"""Runs that go on from saved states: on fewer ranks, from files, by the keys of torch.distributed.checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from optim_layouts import give, mesh_of
from optim_models import net
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_state_dict

from hp_dtensor import DeviceMesh, DTensor
from hp_fsdp import StateDictOptions, fully_shard, get_optimizer_state_dict, set_optimizer_state_dict
from hp_optim import (
    AdamW,
    AdamW8bit,
    ChainedOptimizer,
    Muon,
    SwapOptimizerConfig,
    get_hyper_optimizer,
    swap_optimizer,
)
from hp_platform import get_platform
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
FULL = StateDictOptions(full_state_dict=True)
Make = Callable[[nn.Module], Any]


class Wide(nn.Module):
    """Parameters large enough for states of eight bits, and others."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(40, 256)
        self.down = nn.Linear(256, 37, bias=False)


def wide() -> nn.Module:
    torch.manual_seed(0)
    return Wide()


def float_net() -> nn.Module:
    return net(torch.float32)


def matrices(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.ndim > 1]


def adamw(model: nn.Module) -> Any:
    return AdamW(model.named_parameters(), lr=0.01, amsgrad=True)


def muon(model: nn.Module) -> Any:
    return Muon([(name, each) for name, each in model.named_parameters() if name in matrices(model)])


def chained(model: nn.Module) -> Any:
    return get_hyper_optimizer(model, matrices(model), ["*.bias"], {"lr": 0.03}, {"lr": 0.01})


def swapped(model: nn.Module) -> Any:
    return swap_optimizer(chained(model), SwapOptimizerConfig(swap_times=3, min_numel=16))


def eight_bit(model: nn.Module) -> Any:
    return AdamW8bit(model.named_parameters(), lr=0.01, compiled=False)


def each(optimizer: Any) -> list[Any]:
    return list(optimizer) if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def steps(model: nn.Module, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        give(model, step, torch.float32)
        optimizer.step()


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
        for name, parameter in model.named_parameters()
    }


CASES = [
    (float_net, adamw, False),
    (float_net, muon, False),
    (float_net, chained, False),
    (float_net, swapped, False),
    (wide, eight_bit, True),
]


@on_ranks(4)
@pytest.mark.parametrize(("build", "make", "deterministic"), CASES, ids=["adamw", "muon", "chained", "swapped", "8bit"])
def test_five_steps_on_four_ranks_and_five_on_fewer(
    tmp_path: Path, build: Callable[[], nn.Module], make: Make, deterministic: bool
):
    """The bits of ten steps in one process, on three ranks and on one, from one file."""
    torch.set_num_threads(1)
    model = fully_shard(build().to(device_type()), mesh_of(4), deterministic=deterministic)
    optimizer = make(model)
    steps(model, optimizer, 0, 5)
    names = [sorted(one.state_dict()["state"]) for one in each(optimizer)]
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, names)
    assert everyone == [names] * 4  # those of ranks without elements of a parameter, too
    state = get_optimizer_state_dict(model, each(optimizer), options=FULL)
    weights = whole(model)
    if dist.get_rank() == 0:
        torch.save({"model": weights, "optimizer": state}, tmp_path / "state.pt")
    get_platform().collectives.barrier()
    truth = build().to(device_type())
    steps(truth, make(truth), 0, 10)
    for ranks in (3, 1):
        if dist.get_rank() < ranks:
            saved = torch.load(tmp_path / "state.pt")
            model = build().to(device_type())
            model.load_state_dict(saved["model"])
            if ranks > 1:
                mesh = DeviceMesh(device_type(), list(range(ranks)), mesh_dim_names=("dp",))
                fully_shard(model, mesh, deterministic=deterministic)
            optimizer = make(model)
            set_optimizer_state_dict(model, each(optimizer), saved["optimizer"], options=FULL)
            steps(model, optimizer, 5, 10)
            for name, parameter in whole(model).items():
                assert torch.equal(parameter, truth.get_parameter(name).detach()), (name, ranks)
        get_platform().collectives.barrier()


@on_ranks(2)
@pytest.mark.parametrize("make", [adamw, chained])
def test_files_of_torchs_checkpoints(tmp_path: Path, make: Make):
    """Sharded states written by two ranks, read by two in another order of groups."""
    torch.set_num_threads(1)
    models = []
    for saves in (True, False):
        model = fully_shard(float_net().to(device_type()), mesh_of(2))
        optimizer = make(model)
        if saves:
            steps(model, optimizer, 0, 3)
            state = get_optimizer_state_dict(model, each(optimizer))
            dcp.save({"optimizer": state["state"], "model": model.state_dict()}, checkpoint_id=tmp_path)
            steps(model, optimizer, 3, 5)
        else:
            state, weights = get_optimizer_state_dict(model, each(optimizer)), model.state_dict()
            dcp.load({"optimizer": state["state"], "model": weights}, checkpoint_id=tmp_path)
            model.load_state_dict(weights)
            set_optimizer_state_dict(model, each(optimizer), state)
            steps(model, optimizer, 3, 5)
        models.append(model)
    for one, other in zip(models[0].parameters(), models[1].parameters()):
        assert torch.equal(one.full_tensor(), other.full_tensor())


def test_keys_of_torchs_functions_on_plain_modules():
    model, other = wide(), wide()
    pairs = [(adamw, lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, amsgrad=True)), (eight_bit, None)]
    for make, torchs in pairs:
        ours, theirs = make(model), (torchs or (lambda m: torch.optim.AdamW(m.parameters(), lr=0.01)))(other)
        steps(model, ours, 0, 2), steps(other, theirs, 0, 2)
        got, truth = (torch_state_dict.get_optimizer_state_dict(*pair) for pair in ((model, ours), (other, theirs)))
        assert {name: set(state) for name, state in got["state"].items()} == {
            name: set(state) for name, state in truth["state"].items()
        }
        before = copy.deepcopy(got)
        steps(model, ours, 2, 3)
        torch_state_dict.set_optimizer_state_dict(model, ours, copy.deepcopy(before))
        again = torch_state_dict.get_optimizer_state_dict(model, ours)
        for name, state in before["state"].items():
            for key, value in state.items():  # type: ignore[union-attr]
                assert torch.equal(again["state"][name][key], value), (name, key)  # type: ignore[index]
        torch_state_dict.set_optimizer_state_dict(other, theirs, before)
        assert float(theirs.state[next(other.parameters())]["step"]) == 2


def test_muons_keys_by_torchs_functions():
    model = wide()
    optimizer = muon(model)
    steps(model, optimizer, 0, 2)
    state = torch_state_dict.get_optimizer_state_dict(model, optimizer)["state"]
    assert {name: set(own) for name, own in state.items()} == {  # type: ignore[arg-type]
        "up.weight": {"momentum_buffer"},
        "down.weight": {"momentum_buffer"},
    }
