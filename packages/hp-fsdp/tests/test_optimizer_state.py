"""Optimizer states: whole, sharded, by name, against the optimizer of a single process."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_models import Net, batch, close, data_mesh, loss_of, pair, same_weights
from torch import nn

from hp_dtensor.torch.extend import local_view
from hp_fsdp import (
    CPUOffloadPolicy,
    StateDictOptions,
    fully_shard,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
FULL = StateDictOptions(full_state_dict=True)
MAKE = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "plain": lambda p: torch.optim.SGD(p, lr=0.1),
}


class Partly(Net):
    """With a frozen parameter, one that is never used, a scalar, and a tied one."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.first.bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3, 5))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.tied = nn.Linear(7, 3)
        self.tied.weight = self.last.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def trained(kind: str, steps: int = 2, **options: Any) -> tuple[Any, Any, Any, Any]:
    reference, model = pair(Partly, **options)
    first, second = MAKE[kind](reference.parameters()), MAKE[kind](model.parameters())
    for step in range(steps):
        more(reference, first, model, second, step)
    return reference, first, model, second


def more(reference: Any, first: Any, model: Any, second: Any, step: int) -> None:
    whole, own = batch(step)
    for net, optimizer, x in ((reference, first, whole), (model, second, own)):
        loss_of(net(x)).backward()
        optimizer.step()
        optimizer.zero_grad()


def by_name(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """A single process's state, by torch's own function."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    return (
        get_optimizer_state_dict(copy.deepcopy(model), ())
        if optimizer is None
        else get_optimizer_state_dict(model, optimizer)
    )


def same_state(state: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(state["state"]) == set(expected["state"])
    for name, inside in expected["state"].items():
        assert set(state["state"][name]) == set(inside), name
        for key, value in inside.items():
            got = state["state"][name][key]
            got = got.full_tensor() if hasattr(got, "full_tensor") else got
            assert type(got) is type(value)
            if isinstance(value, torch.Tensor):
                close(got.to(value.device), value, f"{name}.{key}")
    assert state["param_groups"] == expected["param_groups"]


@on_ranks(2, 3)
@pytest.mark.parametrize("kind", ["adamw", "foreach", "fused", "momentum"])
def test_full_states_are_those_of_a_single_process(kind):
    reference, first, model, second = trained(kind)
    state = get_optimizer_state_dict(model, second, options=FULL)
    same_state(state, by_name(reference, first))
    assert "unused" not in state["state"] and "unused" in state["param_groups"][0]["params"]
    assert "first.bias" not in state["state"] and "first.bias" in state["param_groups"][0]["params"]
    only = get_optimizer_state_dict(model, second, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank():
        assert only == {}
    else:
        assert {v.device.type for inside in only["state"].values() for v in inside.values()} == {"cpu"}
        same_state(only, by_name(reference, first))


@on_ranks(3)
@pytest.mark.parametrize("kind", ["adamw", "fused", "momentum"])
@pytest.mark.parametrize("way", ["full", "sharded", "flat", "broadcast"])
def test_a_loaded_optimizer_goes_on_as_the_saved_one(kind, way):
    reference, first, model, second = trained(kind)
    if way == "broadcast":
        state = get_optimizer_state_dict(
            model, second, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        assert bool(state) == (dist.get_rank() == 0)
    else:
        options = StateDictOptions(full_state_dict=way == "full", flatten_optimizer_state_dict=way == "flat")
        state = copy.deepcopy(get_optimizer_state_dict(model, second, options=options))
    lr = second.param_groups[0]["lr"]
    second = MAKE[kind](model.parameters())
    second.param_groups[0]["lr"] = 7.0
    set_optimizer_state_dict(model, second, state, options=options)
    assert second.param_groups[0]["lr"] == lr
    for step in range(2, 4):
        more(reference, first, model, second, step)
    same_weights(model, reference)
    loaded = get_optimizer_state_dict(model, second, options=FULL)
    expected = by_name(reference, first)
    if way in ("sharded", "flat"):  # a sharded state lists what trains but has not stepped
        more_states = [loaded["state"].pop(name) for name in ("unused", "tied.bias")]
        assert not any(value.any() for state in more_states for value in state.values())
    same_state(loaded, expected)


@on_ranks(2)
@pytest.mark.parametrize("kind", list(MAKE))
def test_an_optimizer_that_has_not_stepped_gets_states_and_goes_on_as_if_not(kind):
    reference, model = pair(Partly)
    optimizers = MAKE[kind](reference.parameters()), MAKE[kind](model.parameters())
    loss_of(model(batch()[1])).backward()  # gradients that are there stay
    before = [p.grad for p in model.parameters()]
    state = get_optimizer_state_dict(model, optimizers[1], options=FULL)
    assert all(a is b for a, b in zip(before, [p.grad for p in model.parameters()]))
    assert all(not value.any() for inside in state["state"].values() for value in inside.values())
    assert len(state["state"]) == (0 if kind == "plain" else len(list(model.parameters())) - 1)  # one is frozen
    same_weights(model, reference)
    optimizers[1].zero_grad()
    for step in range(2):
        more(reference, optimizers[0], model, optimizers[1], step)
    same_weights(model, reference)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.filterwarnings("ignore:HCCL doesn't support gather")
@pytest.mark.filterwarnings("ignore:get_optimizer_state_dict. AdamW has not stepped, so this state lists none")
@on_ranks(2)
@pytest.mark.parametrize("way", ["full", "rank 0", "sharded", "files"])
def test_states_go_from_the_host_to_the_device_and_back(way: str, tmp_path: Path):
    """Saved by an offloaded model and loaded by one that is not, which saves for a third that is."""
    offloaded = {"offload_policy": CPUOffloadPolicy()}
    reference, first, model, second = trained("adamw", **offloaded)
    for step, options in ((2, {}), (3, offloaded)):
        given = StateDictOptions(full_state_dict=way in ("full", "rank 0"), cpu_offload=way == "rank 0")
        taken = StateDictOptions(full_state_dict=given.full_state_dict, broadcast_from_rank0=way == "rank 0")
        states = get_model_state_dict(model, options=given), get_optimizer_state_dict(model, second, options=given)
        other = pair(Partly, **options)[1]
        optimizer = MAKE["adamw"](other.parameters())
        if way == "files":
            dcp, path = importlib.import_module("torch.distributed.checkpoint"), str(tmp_path / str(step))
            dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=path)
            states = get_model_state_dict(other), get_optimizer_state_dict(other, optimizer)
            dcp.load({"model": states[0], "optimizer": states[1]}, checkpoint_id=path)
        set_model_state_dict(other, states[0], options=taken)
        set_optimizer_state_dict(other, optimizer, states[1], options=taken)
        same_weights(other, reference)
        kinds = {"cpu"} if options else {device_type()}
        assert {p.to_local().device.type for p in other.parameters()} == kinds
        assert {s["exp_avg"].to_local().device.type for s in optimizer.state.values()} == kinds
        more(reference, first, other, optimizer, step)
        same_weights(other, reference)
        model, second = other, optimizer


@on_ranks(2)
def test_a_template_without_states_of_frozen_parameters_says_so():
    _, model = pair()
    model.first.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.warns(UserWarning, match=r"lists none for its 2 frozen parameters \(first.weight, first.bias\)"):
        state = get_optimizer_state_dict(model, optimizer)
    assert "first.weight" not in state["state"]
    get_optimizer_state_dict(model, optimizer, options=FULL)  # no template: no warning


@on_ranks(2)
def test_a_parameter_unfrozen_before_a_save_is_saved_with_a_state_of_zeros():
    reference, model = pair()
    for net in (reference, model):
        net.first.requires_grad_(False)
    first, second = MAKE["adamw"](reference.parameters()), MAKE["adamw"](model.parameters())
    more(reference, first, model, second, 0)
    for net in (reference, model):
        net.first.requires_grad_(True)
    state = get_optimizer_state_dict(model, second)
    names = [name for name, parameter in model.named_parameters() if parameter.to_local().numel()]
    assert [name for name in names if name in state["state"]] == names
    for name in ("first.weight", "first.bias"):
        if name in names:
            zeros = state["state"][name]
            assert zeros.keys() == {"step", "exp_avg", "exp_avg_sq"}
            assert not any(local_view(value).any() for value in zeros.values())
    again = MAKE["adamw"](model.parameters())
    set_optimizer_state_dict(model, again, state, options=StateDictOptions(strict=False))
    for step in (1, 2):
        more(reference, first, model, again, step)
    same_weights(model, reference)


@on_ranks(2)
def test_a_step_without_any_gradient_warns():
    _, model = pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model(batch()[1])
    with pytest.warns(UserWarning, match=r"SGD steps, but none of its \d+ sharded parameters has a gradient"):
        optimizer.step()
    loss_of(model(batch()[1])).backward()
    optimizer.step()
    model.requires_grad_(False)
    optimizer.zero_grad()
    optimizer.step()  # nothing is meant to train


@on_ranks(2)
def test_names_groups_and_optimizers_may_be_cut_in_another_way():
    reference, first, model, second = trained("adamw")
    state = get_optimizer_state_dict(model, second, options=FULL)
    parameters = list(model.parameters())
    parts = [torch.optim.AdamW(part, lr=3.0) for part in (parameters[:4], parameters[4:])]
    set_optimizer_state_dict(model, parts, state, options=FULL)
    again = get_optimizer_state_dict(model, parts, options=FULL)
    same_state({**again, "param_groups": state["param_groups"]}, by_name(reference, first))
    assert [len(group["params"]) for group in again["param_groups"]] == [4, len(parameters) - 4]
    assert {group["lr"] for group in again["param_groups"]} == {0.01}
    mixed = copy.deepcopy(state)
    mixed["param_groups"] = [
        {**state["param_groups"][0], "params": [n], "lr": float(i)}
        for i, n in enumerate(state["param_groups"][0]["params"])
    ]
    with pytest.raises(ValueError, match="was saved with .* others of its group with"):
        set_optimizer_state_dict(model, second, mixed, options=FULL)
    apart = torch.optim.AdamW([{"params": [parameter]} for parameter in parameters])
    set_optimizer_state_dict(model, apart, mixed, options=FULL)
    assert [group["lr"] for group in apart.param_groups] == [float(i) for i in range(len(parameters))]


@on_ranks(1, 2)
def test_what_does_not_fit_is_refused():
    _, _, model, second = trained("adamw", steps=1)
    state = get_optimizer_state_dict(model, second, options=FULL)
    wrong = copy.deepcopy(state)
    wrong["param_groups"][0]["params"].remove("unused")
    wrong["param_groups"][0]["params"].append("other")
    with pytest.raises(ValueError, match=r"1 parameters .* missing in the state \(unused\), 1 in it .* \(other\)"):
        set_optimizer_state_dict(model, second, wrong, options=FULL)
    set_optimizer_state_dict(model, second, wrong, options=StateDictOptions(full_state_dict=True, strict=False))
    state["state"]["last.weight"]["exp_avg"] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"'last.weight.exp_avg' has shape \(2, 2\), the model's is \(3, 7\)"):
        set_optimizer_state_dict(model, second, state, options=FULL)
    early = fully_shard(Net().to(device_type()), data_mesh())
    optimizer = torch.optim.AdamW(Net().parameters())
    with pytest.raises(ValueError, match=r"parameters of AdamW are not the model's, the first of shape \(7, 5\)"):
        get_optimizer_state_dict(early, optimizer)
    get_optimizer_state_dict(early, torch.optim.AdamW(early.parameters()))
