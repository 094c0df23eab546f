"""Muon in one process, against its formula in float64."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from optim_models import MuonFormula, net, whole_gradients
from torch import nn

from hp_optim import MatrixRule, Muon, get_hyper_optimizer

pytestmark = pytest.mark.framework("torch")
HEADS = {"head_wise": True, "head_dim": 4, "head_wise_patterns": ["qkv.weight"]}


def matrices(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.dim() > 1]


def give(model: nn.Module, step: int, without: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    gradients = {
        name: gradient
        for name, gradient in whole_gradients(step, model).items()
        if name not in without and model.get_parameter(name).requires_grad
    }
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name].to(parameter.dtype) if name in gradients else None
    return gradients


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False, "momentum": 0.5},
        {"ns_variant": "legacy", "weight_decay": 0.0},
        {"ns_variant": "polar_express", "lr": torch.tensor(0.03, dtype=torch.float64)},
        {"lr": 0.5},
        HEADS,
    ],
    ids=["default", "plain", "legacy", "polar_express", "lr", "heads"],
)
def test_ten_steps_equal_the_formula(options: dict[str, Any]):
    model = net()
    truth = {name: parameter.detach().clone() for name, parameter in matrices(model)}
    optimizer = Muon(matrices(model), **options)
    given = {
        "lr": "lr",
        "weight_decay": "decay",
        "momentum": "momentum",
        "nesterov": "nesterov",
        "ns_variant": "variant",
    }
    settings = {given[name]: float(v) if name == "lr" else v for name, v in options.items() if name in given}
    formula, heads = MuonFormula(**settings), MuonFormula(**settings, rows=4)
    for step in range(10):
        without = ("out.weight",) if step == 3 else ()
        gradients = give(model, step, without)
        optimizer.step()
        for name in truth:
            if name in gradients:
                chosen = heads if name == "qkv.weight" and "head_wise" in options else formula
                truth[name] = chosen.step(name, truth[name], gradients[name])
    for name, parameter in matrices(model):
        torch.testing.assert_close(parameter.detach(), truth[name], rtol=0, atol=1e-12)


def test_states_exist_from_construction_for_every_parameter():
    model = net(torch.float32)
    optimizer = Muon(matrices(model))
    keys = [list(state) for state in optimizer.state_dict()["state"].values()]
    assert keys == [["momentum_buffer"]] * len(matrices(model))


def test_states_load_and_go_on():
    def run(restart: bool) -> list[torch.Tensor]:
        model = net(torch.float32)
        optimizer = Muon(matrices(model))
        for step in range(4):
            if step == 2 and restart:
                saved = optimizer.state_dict()
                assert saved["param_groups"][0]["param_names"][0] == "first.weight"
                optimizer = Muon(matrices(model), lr=1.0)
                optimizer.load_state_dict(saved)
            give(model, step)
            optimizer.step()
        return [parameter.detach() for _, parameter in matrices(model)]

    assert all(map(torch.equal, run(False), run(True)))


def test_a_convolution_by_rule_and_the_refusal_of_a_bias():
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 8, 2, dtype=torch.float64)
    optimizer = Muon([("weight", conv.weight)], rules=[MatrixRule("weight", "o (i kh kw)")])
    before = conv.weight.detach().clone()
    conv.weight.grad = torch.randn_like(conv.weight)
    optimizer.step()
    truth = MuonFormula().step("w", before.view(8, 12), conv.weight.grad.view(8, 12))
    torch.testing.assert_close(conv.weight.detach().view(8, 12), truth, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r"parameter 'bias' of shape \(8,\) has 1 dims, and only matrices"):
        Muon(conv.named_parameters(), rules=[MatrixRule("weight", "o (i kh kw)")])
    get_hyper_optimizer(conv, ["weight"], ["bias"], {"rules": [MatrixRule("weight", "o (i kh kw)")]})
    with pytest.raises(ValueError, match=r"parameter 'params\[1\] of group 0' of shape \(8,\)"):
        Muon(conv.parameters())


def test_bfloat16_is_computed_in_float32():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(8, 8, dtype=torch.bfloat16))
    before, gradient = weight.detach().double(), torch.randn(8, 8, dtype=torch.bfloat16)
    weight.grad = gradient
    Muon([weight]).step()
    truth = MuonFormula().step("w", before, gradient.double())
    torch.testing.assert_close(weight.detach().double(), truth, rtol=0, atol=2e-2)


def test_a_gradient_that_is_not_finite_is_named_and_the_step_skipped():
    model = net(torch.float32)
    optimizer = Muon(matrices(model))
    give(model, 0)
    optimizer.step()
    before = [(p.detach().clone(), optimizer.state[p]["momentum_buffer"].clone()) for _, p in matrices(model)]
    give(model, 1)
    model.out.weight.grad[2, 3] = float("nan")  # type: ignore[index]
    model.experts.up.grad[0, 0, 0] = float("inf")  # type: ignore[index]
    with pytest.warns(RuntimeWarning, match=r"gradients of 'experts.up', 'out.weight' have values that are infinite"):
        optimizer.step()
    for (_, parameter), (weight, buffer) in zip(matrices(model), before):
        assert torch.equal(parameter.detach(), weight)
        assert torch.equal(optimizer.state[parameter]["momentum_buffer"], buffer)
    give(model, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_zero_gradients_change_nothing_but_the_decay():
    weight = nn.Parameter(torch.ones(3, 4, dtype=torch.float64))
    weight.grad = torch.zeros(3, 4, dtype=torch.float64)
    Muon([weight], lr=0.1, weight_decay=0.5).step()
    assert torch.equal(weight.detach(), torch.full((3, 4), 1 - 0.1 * 0.5, dtype=torch.float64))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": -0.1}, r"Muon: lr must be at least 0, got -0.1"),
        ({"weight_decay": float("nan")}, r"Muon: weight_decay must be at least 0, got nan"),
        ({"momentum": 1.0}, r"Muon: momentum must be at least 0 and less than 1, got 1.0"),
        ({"ns_variant": "quintic"}, r"ns_variant must be one of asym5, legacy, polar_express, got 'quintic'"),
        ({"head_wise": True}, r"head_wise=True needs head_dim, the rows of a head, got None"),
        ({"head_dim": 4}, r"head_dim and head_wise_patterns need head_wise=True"),
        ({**HEADS, "head_dim": 5}, r"'qkv.weight' of shape \(24, 8\): .*dim 0 of size 24 is not a multiple of 5"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], text: str):
    with pytest.raises(ValueError, match=text):
        Muon(matrices(net()), **options)
    if "head" in text:
        Muon(matrices(net()), head_wise=True, head_dim=4)
    if "qkv" in text:
        Muon(matrices(net()), **HEADS)


def test_rules_are_a_list():
    text = r"rules must be a list of MatrixRule, such as rules=\[MatrixRule\(...\)\], got "
    for rules, shown in ((MatrixRule("*"), "MatrixRule"), (["*"], r"\['\*'\]"), ("*", r"'\*'")):
        with pytest.raises(TypeError, match=text + shown):
            Muon(matrices(net()), rules=rules)
    Muon(matrices(net()), rules=[MatrixRule("first.weight")])


def test_groups_that_are_refused():
    weight, bias = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=r"Muon: group 1 has no parameters; leave it out"):
        Muon([{"params": [weight]}, {"params": []}])
    with pytest.raises(ValueError, match="more than one parameter group"):
        Muon([{"params": [weight]}, {"params": [weight]}])
    with pytest.raises(ValueError, match=r"rules and head_wise go by names, and the parameters have none. Pass m"):
        Muon([weight], rules=[MatrixRule("*")])
    for named in ([("w", weight)], [{"params": [("w", weight)]}], nn.ParameterDict({"w": weight}).named_parameters()):
        Muon(named, rules=[MatrixRule("*")])
    optimizer = Muon([weight])
    with pytest.raises(ValueError, match=r"params\[0\] of group 1' of shape \(2,\)"):
        optimizer.add_param_group({"params": [bias]})
    assert len(optimizer.param_groups) == 1
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = Muon(embedding.named_parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"the gradient of 'weight' is sparse"):
        optimizer.step()
