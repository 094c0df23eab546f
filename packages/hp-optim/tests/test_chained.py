"""Several optimizers as one, parameters by patterns, and schedules that are restored."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from optim_models import net, whole_gradients
from torch import nn

from hp_optim import AdamW, ChainedOptimizer, Muon, get_hyper_lr_scheduler, get_hyper_optimizer
from hp_optim.chained import default_patterns

pytestmark = pytest.mark.framework("torch")
MATRICES = ["first.weight", "experts.*", "qkv.weight", "out.weight"]
OTHERS: list[Any] = ["last.weight", {"params": ["*.bias"], "weight_decay": 0.0, "lr": 0.5}]


def give(model: nn.Module, step: int) -> None:
    for name, gradient in whole_gradients(step, model).items():
        parameter = model.get_parameter(name)
        parameter.grad = gradient.to(parameter.dtype) if parameter.requires_grad else None


def made(model: nn.Module, **options: Any) -> ChainedOptimizer:
    return get_hyper_optimizer(
        model, MATRICES, OTHERS, {"muon_lr": 0.03, "momentum": 0.9}, {"adamw_lr": 0.01}, **options
    )


def test_patterns_divide_the_parameters():
    model, truth = net(), net()
    optimizer = made(model)
    assert isinstance(optimizer.optimizers["muon"], Muon) and isinstance(optimizer.optimizers["adamw"], AdamW)
    assert [group["lr"] for group in optimizer.param_groups] == [0.03, 0.01, 0.5]
    assert [len(group["params"]) for group in optimizer.param_groups] == [5, 1, 3]
    named = dict(truth.named_parameters())
    muon = Muon([p for n, p in named.items() if n.split(".")[0] in ("first", "experts", "qkv", "out") and p.dim() > 1])
    muon.param_groups[0].update(lr=0.03, momentum=0.9)
    biases = [parameter for name, parameter in named.items() if name.endswith("bias")]
    adamw = AdamW(
        [{"params": [named["last.weight"]]}, {"params": biases, "weight_decay": 0.0, "lr": 0.5}],
        lr=0.01,
    )
    for step in range(3):
        give(model, step), give(truth, step)
        optimizer.step(), muon.step(), adamw.step()
        optimizer.zero_grad()
    assert optimizer.iteration == 3 and all(parameter.grad is None for parameter in model.parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, named[name]), name


def test_an_empty_list_leaves_an_optimizer_out():
    model = net()
    assert list(get_hyper_optimizer(model, [], ["*"]).optimizers) == ["adamw"]
    with pytest.raises(ValueError, match=r"first.bias' of shape \(8,\) has 1 dims, .* adamw_params of get_hyper"):
        get_hyper_optimizer(model, ["*"], [])
    assert list(get_hyper_optimizer(model, ["*.weight", "experts.*"], ["*.bias"]).optimizers) == ["muon", "adamw"]
    with pytest.raises(ValueError, match="muon_params and adamw_params are empty"):
        get_hyper_optimizer(model, [], [])


@pytest.mark.parametrize(
    ("muon", "adamw", "text"),
    [
        (["firts.weight"], ["*"], r"'firts.weight' of muon_params matches no parameter; near it are first.weight"),
        (
            ["first.*"],
            ["*.bias"],
            r"'first.bias' is matched by 'first.\*' of muon_params and by '\*.bias' of .*; make one of",
        ),
        (
            ["first.weight"],
            ["*.bias"],
            r"5 parameters are trained and match no pattern \(experts.up, .* Add patterns, or freeze",
        ),
        (["*.weight", "experts.*"], [{"params": []}], r"a group of adamw_params has no patterns: \{'params': \[\]\}"),
    ],
)
def test_patterns_that_are_refused(muon: list[Any], adamw: list[Any], text: str):
    with pytest.raises(ValueError, match=text):
        get_hyper_optimizer(net(), muon, adamw)
    model = net().requires_grad_(False)
    model.first.requires_grad_(True)
    get_hyper_optimizer(model, ["first.weight"], ["first.bias"])  # what is frozen needs no pattern
    assert list(made(net()).optimizers) == ["muon", "adamw"]


def test_lists_that_are_none():
    with pytest.raises(TypeError, match=r"muon_params must be a list of patterns, got 'first.weight'"):
        get_hyper_optimizer(net(), "first.weight", ["*"])
    with pytest.raises(TypeError, match=r"adamw_params has 3; expected a name, a pattern, or a mapping"):
        get_hyper_optimizer(net(), ["first.weight"], [3])  # type: ignore[list-item]


def test_hidden_matrices_are_muons():
    model = nn.Sequential()
    model.add_module("embed_tokens", nn.Embedding(4, 8))
    model.add_module("up", nn.Linear(8, 8))
    model.add_module("lm_head", nn.Linear(8, 4, bias=False))
    assert default_patterns(model) == (["up.weight"], ["embed_tokens.weight", "up.bias", "lm_head.weight"])


def test_what_a_chain_refuses():
    model = net()
    named = dict(model.named_parameters())
    weight = AdamW([named["first.weight"]])
    with pytest.raises(ValueError, match="no optimizers"):
        ChainedOptimizer(model, {})
    ChainedOptimizer(model, {"a": AdamW(model.parameters())})
    with pytest.raises(ValueError, match=r"'first.weight' is in 'a' and in 'b'; give it to one"):
        ChainedOptimizer(model, {"a": weight, "b": AdamW(model.parameters())})
    rest = AdamW([each for name, each in named.items() if name != "first.weight"])
    assert len(ChainedOptimizer(model, {"a": weight, "b": rest}).param_groups) == 2
    with pytest.raises(ValueError, match=r"8 of 10 parameters are trained and in no optimizer \(first.bias"):
        ChainedOptimizer(model, {"a": weight})
    frozen = net().requires_grad_(False)
    frozen.first.weight.requires_grad_(True)
    ChainedOptimizer(frozen, {"a": AdamW([frozen.first.weight])})
    with pytest.raises(ValueError, match=r"parameter 0 of a group of 'a', of shape \(2, 2\), is not the model's"):
        ChainedOptimizer(model, {"a": AdamW([nn.Parameter(torch.zeros(2, 2))])})
    optimizer = made(model)
    give(model, 0)
    for gradients in ({}, {"other": torch.zeros(1)}, [each.grad for each in model.parameters()]):
        with pytest.raises(TypeError, match=r"on PyTorch the gradients are the parameters' .grad; call step\(\)"):
            optimizer.step(gradients)  # type: ignore[arg-type]
    optimizer.step()
    assert optimizer.iteration == 1


@pytest.mark.parametrize("flatten", [False, True])
def test_states_by_name_load_into_another_order(flatten: bool):
    model, other = net(torch.float32), net(torch.float32)
    named = dict(other.named_parameters())
    first = ChainedOptimizer(model, made(model).optimizers, flatten)
    muon = [(name, named[name]) for name in ("qkv.weight", "out.weight", "experts.down", "experts.up", "first.weight")]
    rest = [(name, named[name]) for name in ("out.bias", "last.bias", "first.bias")]
    second = ChainedOptimizer(
        other,
        {"adamw": AdamW([{"params": rest}, {"params": [("last.weight", named["last.weight"])]}]), "muon": Muon(muon)},
        flatten,
    )
    for step in range(5):
        give(model, step)
        first.step()
        if step == 2:
            saved = copy.deepcopy(first.state_dict())
            keys = set(saved) if flatten else set(saved["state"]["first.bias"])
            assert {"state.first.bias.exp_avg", "param_groups.first.bias.lr"} <= keys or "exp_avg" in keys
            second.load_state_dict(saved)
            other.load_state_dict(model.state_dict())
            assert second.iteration == 3 and second.param_groups[0]["lr"] == 0.5
        elif step > 2:
            give(other, step)
            second.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, named[name]), name


def test_states_that_do_not_fit():
    model = net(torch.float32)
    optimizer = made(model)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["params"][0] = "other.weight"
    with pytest.raises(ValueError, match=r"1 parameters are missing in the state \(first.weight\), 1 in it are"):
        optimizer.load_state_dict(saved)
    saved = optimizer.state_dict()
    one = get_hyper_optimizer(model, MATRICES, ["last.weight", "*.bias"])
    with pytest.raises(ValueError, match=r"was saved with .*others|Group the parameters as they were"):
        one.load_state_dict(saved)
    made(model).load_state_dict(saved)
    rates = get_hyper_lr_scheduler(optimizer, 10).state_dict()
    with pytest.raises(ValueError, match=r"the state has 2 groups, the optimizer 1. Group the parameters as they were"):
        get_hyper_lr_scheduler(one, 10).load_state_dict(rates)
    get_hyper_lr_scheduler(made(model), 10).load_state_dict(rates)


def test_each_optimizer_keeps_its_learning_rate_times_the_factor():
    optimizer = made(net())
    container = get_hyper_lr_scheduler(optimizer, 10, warmup_steps=2, decay_style="linear", lr=1.0, lr_min=0.0)
    rates = []
    for _ in range(11):
        rates.append([group["lr"] for group in optimizer.param_groups])
        assert container.get_last_lr() == rates[-1]
        container.step()
    factors = [0.0, 0.5, *(1 - at / 8 for at in range(9))]
    expected = torch.tensor(factors, dtype=torch.float64)[:, None] * torch.tensor(
        [0.03, 0.01, 0.5], dtype=torch.float64
    )
    torch.testing.assert_close(torch.tensor(rates, dtype=torch.float64), expected, rtol=0, atol=1e-15)


def test_a_schedule_is_restored_and_another_one_refused():
    def scheduled(total: int = 20, **options: Any) -> tuple[Any, Any]:
        optimizer = made(net())
        return optimizer, get_hyper_lr_scheduler(optimizer, total, warmup_steps=3, lr=1e-3, **options)

    first, container = scheduled()
    for _ in range(7):
        container.step()
    saved = copy.deepcopy(container.state_dict())
    second, restored = scheduled()
    restored.load_state_dict(saved)
    for _ in range(3):
        container.step(), restored.step()
        assert [g["lr"] for g in first.param_groups] == [g["lr"] for g in second.param_groups]
    _, other = scheduled(40)
    with pytest.raises(ValueError, match=r"saved with another schedule: total_steps = 20 \(here 40\). Use its options"):
        other.load_state_dict(saved)
    third, other = scheduled(40, override_opt_param_scheduler=True)
    other.load_state_dict(saved)
    _, truth = scheduled(40)
    for _ in range(7):
        truth.step()
    assert other.get_last_lr() == truth.get_last_lr() == [g["lr"] for g in third.param_groups]
    single = AdamW(net().parameters())
    with pytest.raises(ValueError, match=r"the state is of optimizers \['adamw', 'muon'\], these are \['optimizer'\]"):
        get_hyper_lr_scheduler(single, 20).load_state_dict(saved)


def test_a_tensor_as_learning_rate_is_written():
    lr = torch.tensor(0.5)
    optimizer = AdamW(net().parameters(), lr=lr)
    container = get_hyper_lr_scheduler(optimizer, 10, decay_style="linear", lr=1.0, lr_min=0.0)
    container.step()
    assert optimizer.param_groups[0]["lr"] is lr and float(lr) == pytest.approx(0.45)


def test_parameters_that_come_later_are_in_the_state():
    model, other = net(), net()
    optimizers = []
    for each in (model, other):
        each.last.requires_grad_(False)
        muon = Muon([each.first.weight, each.qkv.weight, each.out.weight])
        adamw = AdamW([each.first.bias, each.out.bias])
        for name in ("up", "down"):
            getattr(each.experts, name).requires_grad_(False)
        optimizers.append(ChainedOptimizer(each, {"muon": muon, "adamw": adamw}))
    for each, optimizer in zip((model, other), optimizers):
        each.requires_grad_(True)
        optimizer.optimizers["muon"].add_param_group({"params": [each.experts.up], "lr": 0.1})
        optimizer.optimizers["adamw"].add_param_group({"params": list(each.last.parameters())})
    one, second = optimizers
    for step in range(2):
        give(model, step)
        one.step()
    state = one.state_dict()
    assert {"experts.up", "last.weight", "last.bias"} < state["state"].keys() and "experts.down" not in state["state"]
    second.load_state_dict(copy.deepcopy(state))
    other.load_state_dict(model.state_dict())
    give(model, 2), give(other, 2)
    one.step(), second.step()
    for parameter, truth in zip(other.parameters(), model.parameters()):
        assert torch.equal(parameter, truth)
    made_alike, copied = copy.deepcopy((model, one))
    give(model, 3), give(made_alike, 3)
    one.step(), copied.step()
    for parameter, truth in zip(made_alike.parameters(), model.parameters()):
        assert torch.equal(parameter, truth)
    one.optimizers["adamw"].add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(ValueError, match=r"parameter 0 of a group of 'adamw', of shape \(2,\), is not the model's"):
        one.state_dict()
    model.frozen.requires_grad_(False)
    assert len(made(model).state_dict()["state"]) == 9
