"""Programs that replace what an optimizer has: its groups, parameters, their memory, states; and copies of it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_layouts import mesh_of
from torch import nn

from hp_fsdp import fully_shard
from hp_optim import AdamW, AdamW8bit, Muon, SwapOptimizerConfig, swap_optimizer
from hp_testing import on_ranks

pytestmark = pytest.mark.framework("torch")
Make = Callable[[list[Any]], Any]


def small_8bit(parameters: list[Any]) -> AdamW8bit:
    """Its parameters have fewer elements than are coded."""
    return AdamW8bit(parameters, lr=0.1, compiled=False)


def swapped(parameters: list[Any]) -> AdamW:
    return swap_optimizer(AdamW(parameters, lr=0.1), SwapOptimizerConfig(swap_times=2, min_numel=8))


MAKES: dict[str, Make] = {
    "AdamW": lambda parameters: AdamW(parameters, lr=0.1),
    "swapped": swapped,
    "AdamW8bit": small_8bit,
}


def parameters() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 3), (3, 4), (4,), (1,)]
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in shapes]


def train(optimizer: Any, first: int, last: int) -> None:
    """Give gradients to what is in the groups now, and step."""
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for group in optimizer.param_groups:
            for each in group["params"]:
                each.grad = torch.randn(each.shape, generator=generator, dtype=each.dtype)
        optimizer.step()


def other_list(optimizer: Any) -> None:
    optimizer.param_groups[0]["params"] = [
        nn.Parameter(each.detach() * 2) for each in optimizer.param_groups[0]["params"]
    ]


def other_parameter(optimizer: Any) -> None:
    optimizer.param_groups[0]["params"][1] = nn.Parameter(torch.ones(6, 2, dtype=torch.float64))


def equal_parameter(optimizer: Any) -> None:
    """Of one element, of the same value: only its identity tells that it is another one."""
    listed = optimizer.param_groups[0]["params"]
    listed[3] = nn.Parameter(listed[3].detach().clone())


def other_group(optimizer: Any) -> None:
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.5}


def appended_group(optimizer: Any) -> None:
    last = optimizer.param_groups[0]["params"].pop()
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [last], "lr": 0.5})


def swapped_order(optimizer: Any) -> None:
    optimizer.param_groups[0]["params"].reverse()


def emptied(optimizer: Any) -> None:
    optimizer.param_groups[0]["params"] = []


def cleared(optimizer: Any) -> None:
    optimizer.state.clear()


def other_state(optimizer: Any) -> None:
    first, second = optimizer.param_groups[0]["params"][:2]
    del optimizer.state[first]
    state = {"exp_avg": torch.full_like(second, 0.3), "exp_avg_sq": torch.full_like(second, 0.7)}
    del optimizer.state[second]
    optimizer.state[second] = {"step": torch.tensor(7.0), **{key: value.detach() for key, value in state.items()}}


def exchanged_states(optimizer: Any) -> None:
    one, other = (optimizer.state[each] for each in optimizer.param_groups[0]["params"][2:4])
    for key in ("exp_avg", "exp_avg_sq"):
        one[key], other[key] = other[key].expand(4).clone(), one[key][:1]


def equal_counter(optimizer: Any) -> None:
    """A counter of its own, equal to the one that there was."""
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    state["step"] = state["step"].clone()


def other_memory(optimizer: Any) -> None:
    for each in optimizer.param_groups[0]["params"]:
        each.data = each.detach().clone()


def pruned(optimizer: Any) -> None:
    """As splats and tokens are added and dropped: another parameter, with its states, under its own key."""
    group = optimizer.param_groups[0]
    old = group["params"][0]
    state = optimizer.state.pop(old)
    new = nn.Parameter(torch.cat([old.detach()[1:], torch.ones(3, 3, dtype=torch.float64)]))
    for key in ("exp_avg", "exp_avg_sq"):
        state[key] = torch.cat([state[key][1:], torch.zeros(3, 3, dtype=torch.float64)])
    optimizer.state[new] = state
    group["params"][0] = new


FORMS = [
    other_list,
    other_parameter,
    equal_parameter,
    other_group,
    appended_group,
    swapped_order,
    emptied,
    cleared,
    other_state,
    exchanged_states,
    equal_counter,
    other_memory,
    pruned,
]


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("form", FORMS)
def test_a_step_is_that_of_torch_after_what_was_there_is_replaced(form: Callable[[Any], None], make: str):
    ours, theirs = MAKES[make](parameters()), torch.optim.AdamW(parameters(), lr=0.1, foreach=False)
    before = [ours.param_groups[0]["params"], theirs.param_groups[0]["params"]]
    for optimizer in (ours, theirs):
        train(optimizer, 0, 3), form(optimizer), train(optimizer, 3, 6)
    tolerance = 1e-5 if make == "AdamW8bit" else 1e-12  # its numbers are in float32
    for own, others in ((ours.param_groups, theirs.param_groups), ([{"params": each}] for each in before)):
        for mine, torchs in zip(own, others):
            for parameter, truth in zip(mine["params"], torchs["params"]):
                torch.testing.assert_close(parameter, truth, rtol=0, atol=tolerance)
    for mine, torchs in zip(ours.param_groups, theirs.param_groups):
        for parameter, truth in zip(mine["params"], torchs["params"]):
            assert float(ours.state[parameter]["step"]) == float(theirs.state[truth]["step"])


@pytest.mark.parametrize("how", ["grown", "reshaped", "view", "pruned in place"])
@pytest.mark.parametrize("make", MAKES)
def test_another_shape_is_refused_by_name_once_steps_were_counted(how: str, make: str):
    weights = {
        "grown": lambda p: torch.cat([p.data, p.data]),
        "reshaped": lambda p: p.data.reshape(3, 5).clone(),
        "view": lambda p: p.data[:2].clone(),
        "pruned in place": lambda p: p.data[:2],
    }
    listed = parameters()
    optimizer = MAKES[make](listed)
    listed[0].data = weights[how](listed[0])
    train(optimizer, 0, 1)  # as torch's, whose states are not there yet
    truth = torch.optim.AdamW([other := nn.Parameter(weights[how](parameters()[0]).clone())], lr=0.1, foreach=False)
    generator = torch.Generator().manual_seed(0)
    other.grad = torch.randn(other.shape, generator=generator, dtype=torch.float64)
    truth.step()
    torch.testing.assert_close(listed[0], other, rtol=0, atol=1e-5 if make == "AdamW8bit" else 1e-12)
    before = listed[1].detach().clone()
    shapes = rf"{tuple(listed[1].shape)}".replace("(", r"\(").replace(")", r"\)")
    listed[1].data = torch.zeros(7, 2, dtype=torch.float64)
    weight = listed[0].detach().clone()
    text = (
        rf"parameter 'params\[1\] of group 0' has shape \(7, 2\), and its states have {shapes}, from the steps before"
    )
    with pytest.raises(RuntimeError, match=text):
        train(optimizer, 1, 2)
    assert torch.equal(listed[0], weight)
    listed[1].data = before
    train(optimizer, 1, 2)
    assert float(optimizer.state[listed[1]]["step"]) == 2
    listed[1].data = torch.zeros(7, 2, dtype=torch.float64)
    if how == "grown":
        del optimizer.state[listed[1]]
    else:
        states = {key: torch.zeros(7, 2, dtype=torch.float64) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[listed[1]].update(states)
    train(optimizer, 2, 3)
    assert float(optimizer.state[listed[1]]["step"]) == (1 if how == "grown" else 3) and bool(listed[1].all())


def test_a_gradient_of_the_shape_before_is_refused_by_name():
    weight = nn.Parameter(torch.zeros(4, 2))
    weight.grad = torch.ones(4, 2)
    for optimizer in (AdamW([("w", weight)]), Muon([("w", weight)])):
        weight.data = torch.zeros(3, 2)
        with pytest.raises(RuntimeError, match=r"the gradient of 'w' .*\(4, 2\).*, the parameter .*\(3, 2\)"):
            optimizer.step()
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert bool((weight < 0).all())
        weight.data, weight.grad = torch.zeros(4, 2), torch.ones(4, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_model_that_is_converted_before_the_first_step(dtype: torch.dtype):
    """States exist from construction; they follow the parameters."""
    ours, theirs = nn.Linear(5, 3).double(), nn.Linear(5, 3).double()
    theirs.load_state_dict(ours.state_dict())
    one, other = AdamW(ours.parameters(), lr=0.1), torch.optim.AdamW(theirs.parameters(), lr=0.1, fused=True)
    ours.to(dtype), theirs.to(dtype)
    train(one, 0, 3), train(other, 0, 3)
    for parameter, truth in zip(ours.parameters(), theirs.parameters()):
        assert torch.equal(parameter, truth) and one.state[parameter]["exp_avg"].dtype == dtype


def matrices() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in ((5, 3), (3, 4))]


@pytest.mark.parametrize("swap", [False, True], ids=["Muon", "swapped"])
def test_momenta_follow_a_model_that_is_converted(swap: bool):
    models = [nn.Linear(5, 3, bias=False).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizer = Muon(models[0].parameters())
    if swap:
        swap_optimizer(optimizer, SwapOptimizerConfig(min_numel=2))
    for model in models:
        model.to(torch.bfloat16)
    truth = Muon(models[1].parameters())
    train(optimizer, 0, 3), train(truth, 0, 3)
    assert torch.equal(models[0].weight, models[1].weight)
    one, other = (each.state_dict()["state"][0]["momentum_buffer"] for each in (optimizer, truth))
    assert one.dtype == torch.bfloat16 and torch.equal(one, other)


def test_momenta_of_another_shape_are_refused_by_name_once_there_are_some():
    listed = matrices()
    optimizer = Muon(listed)
    listed[0].data = torch.ones(2, 3, dtype=torch.float64)
    train(optimizer, 0, 1)
    listed[0].data = torch.ones(1, 3, dtype=torch.float64)
    before = listed[1].detach().clone()
    text = r"Muon: parameter 'params\[0\] of group 0' has shape \(1, 3\), and its states have \(2, 3\), from the steps"
    with pytest.raises(RuntimeError, match=text):
        train(optimizer, 1, 2)
    assert torch.equal(listed[1], before)
    del optimizer.state[listed[0]]
    train(optimizer, 1, 2)
    assert optimizer.state[listed[0]]["momentum_buffer"].shape == (1, 3) and not torch.equal(listed[1], before)
    train(optimizer, 1, 2)


def fresh_momentum(optimizer: Any) -> None:
    optimizer.state[optimizer.param_groups[0]["params"][0]] = {}


def set_momentum(optimizer: Any) -> None:
    parameter = optimizer.param_groups[0]["params"][0]
    optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, 0.3).detach()


def dropped_momenta(optimizer: Any) -> None:
    for state in optimizer.state.values():
        state.clear()


@pytest.mark.parametrize("swap", [False, True], ids=["Muon", "swapped"])
@pytest.mark.parametrize(
    "form", [other_list, other_parameter, other_group, cleared, fresh_momentum, set_momentum, dropped_momenta]
)
def test_a_step_of_muon_is_that_of_a_new_one_with_what_is_there(form: Callable[[Any], None], swap: bool):
    config = SwapOptimizerConfig(min_numel=2)
    optimizer: Any = Muon(matrices(), lr=0.1)
    if swap:
        swap_optimizer(optimizer, config)
    train(optimizer, 0, 2)
    form(optimizer)
    group = optimizer.param_groups[0]
    listed = [nn.Parameter(each.detach().clone()) for each in group["params"]]
    truth = Muon(listed, lr=group["lr"])
    for mine, own in zip(listed, group["params"]):
        if "momentum_buffer" in optimizer.state[own]:
            truth.state[mine]["momentum_buffer"].copy_(optimizer.state[own]["momentum_buffer"])
    train(optimizer, 2, 5), train(truth, 2, 5)
    for parameter, expected in zip(group["params"], listed):
        assert torch.equal(parameter, expected)


@pytest.mark.parametrize("how", ["copy.deepcopy", "pickle"])
@pytest.mark.parametrize("make", [*MAKES, "coded", "Muon", "swapped Muon"])
def test_a_copy_goes_on_bit_for_bit(make: str, how: str):
    makes: dict[str, Make] = {
        **MAKES,
        "coded": lambda listed: AdamW8bit(listed, lr=0.1, compiled=False),
        "Muon": lambda listed: Muon(listed, ns_steps=3),
        "swapped Muon": lambda listed: swap_optimizer(Muon(listed, ns_steps=3), SwapOptimizerConfig(min_numel=8)),
    }
    listed = [nn.Parameter(torch.randn(80, 80)), nn.Parameter(torch.randn(5, 3))] if make == "coded" else matrices()
    optimizer = makes[make](listed)
    train(optimizer, 0, 2)
    made = copy.deepcopy(optimizer) if how == "copy.deepcopy" else pickle.loads(pickle.dumps(optimizer))
    first = made.state_dict()["state"]
    for number, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(first[number][key], value) for key, value in state.items())
    train(made, 2, 4), train(optimizer, 2, 4)
    for parameter, expected in zip(made.param_groups[0]["params"], optimizer.param_groups[0]["params"]):
        assert parameter is not expected and torch.equal(parameter, expected)
    assert type(made._places) is type(optimizer._places)


def test_a_copy_of_a_model_and_its_optimizer_are_of_each_other():
    model = nn.Linear(4, 3)
    optimizer = AdamW(model.parameters(), skip_nonfinite=True)
    train(optimizer, 0, 1)
    other, made = copy.deepcopy((model, optimizer))
    assert made.param_groups[0]["params"][0] is other.weight and made.skip_nonfinite
    train(made, 1, 2)
    assert not torch.equal(other.weight, model.weight)


def test_pickles_have_each_state_once():
    small, large = (len(pickle.dumps(AdamW([nn.Parameter(torch.zeros(100)) for _ in range(n)]))) for n in (10, 100))
    assert large < 11 * small


@pytest.mark.parametrize("make", [*MAKES, "coded", "Muon", "swapped Muon"])
def test_a_state_of_another_shape_is_refused_by_name_and_nothing_is_loaded(make: str):
    makes: dict[str, Make] = {
        **MAKES,
        "coded": lambda listed: AdamW8bit(listed, compiled=False),
        "Muon": lambda listed: Muon(listed),
        "swapped Muon": lambda listed: swap_optimizer(Muon(listed), SwapOptimizerConfig(min_numel=8)),
    }
    shape, other = ((80, 80), (80,)) if make == "coded" else ((5, 5), (1, 5))
    optimizer = makes[make]([("w", nn.Parameter(torch.randn(shape)))])
    train(optimizer, 0, 2)
    before = copy.deepcopy(optimizer.state_dict())
    wrong = copy.deepcopy(before)
    key = "momentum_buffer" if "Muon" in make else "exp_avg"
    wrong["state"][0][key] = torch.ones(other)
    wrong["param_groups"][0]["lr"] = 7.0
    with pytest.raises(ValueError, match=rf"state '{key}' of 'w' has shape .*, and the parameter "):
        optimizer.load_state_dict(wrong)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert all(torch.equal(after["state"][0][key], value) for key, value in before["state"][0].items())
    train(optimizer, 2, 3)
    optimizer.load_state_dict(copy.deepcopy(before))
    assert torch.equal(optimizer.state_dict()["state"][0][key], before["state"][0][key])
    weight = optimizer.param_groups[0]["params"][0]
    optimizer.state[weight].update({key: wrong["state"][0][key]})
    with pytest.raises((ValueError, RuntimeError), match=r"'w' has shape .* delete optimizer.* to begin anew"):
        train(optimizer, 3, 4)
    del optimizer.state[weight]
    train(optimizer, 3, 4)
    assert optimizer.state_dict()["state"][0][key].shape == weight.shape


def test_values_beside_codes_are_taken_before_a_step_and_before_a_save():
    """As a checkpoint sets them; no other state of the block changes."""
    sizes = [(80, 80), (70, 70)]
    one, other = (AdamW8bit([nn.Parameter(torch.zeros(s)) for s in sizes], compiled=False) for _ in range(2))
    train(one, 0, 2)
    truth = one.state_dict()["state"]
    for parameter, state in zip(other.param_groups[0]["params"], truth.values()):
        other.state[parameter].update({key: value.clone() for key, value in state.items()})
    for number, state in other.state_dict()["state"].items():
        assert all(torch.equal(state[key], value) for key, value in truth[number].items())
    parameter = other.param_groups[0]["params"][1]
    other.state[parameter]["exp_avg"] = torch.full((70, 70), 0.5)  # of the last parameter alone
    assert torch.equal(other.state_dict()["state"][1]["exp_avg"], torch.full((70, 70), 0.5))
    assert torch.equal(other.state_dict()["state"][0]["exp_avg"], truth[0]["exp_avg"])


@on_ranks(2)
@pytest.mark.parametrize("kind", [AdamW, Muon])
@pytest.mark.parametrize("early", [False, True])
def test_parameters_of_fully_shard_are_put_into_an_optimizer_that_was_made_before(kind: Any, early: bool):
    """As a loop does that makes the optimizer first; with or without a step before."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 5, bias=False)).double()

    torch.set_num_threads(1)
    models = made(), made()
    sharded, plain = models
    one, other = kind(sharded.parameters(), lr=0.1), kind(plain.parameters(), lr=0.1)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def step(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()

    if early:
        step(sharded, one), step(plain, other)
    sharded.zero_grad()
    fully_shard(sharded, mesh_of(2))
    one.param_groups[0]["params"] = list(sharded.parameters())
    one.state.clear(), other.state.clear()
    for _ in range(3):
        step(sharded, one), step(plain, other)
    for parameter, truth in zip(sharded.parameters(), plain.parameters()):
        torch.testing.assert_close(parameter.full_tensor(), truth, rtol=0, atol=1e-12)
