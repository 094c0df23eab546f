"""Optimizers of PyTorch that are saved and loaded: what each keeps, or an error that names it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hp_checkpoint import Checkpointer
from hp_optim import AdamW, AdamW8bit


def trained(optimizer_of, *, layers=1, steps=0, size=80):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(size, size) for _ in range(layers)))
    optimizer = optimizer_of(model.parameters())
    for step in range(steps):
        one_step(model, optimizer, step)
    return model, optimizer


def one_step(model, optimizer, step):
    x = torch.randn(4, model[0].in_features, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def eight_bit(parameters):
    return AdamW8bit(parameters, compiled=False)


@pytest.mark.parametrize("layers", [1, 2])
def test_eight_bits_go_on_with_the_moments_that_were_saved(tmp_path, layers):
    """One parameter of at least 4,096 elements in the group, or several; also saved again before a step."""
    checkpoints = Checkpointer(tmp_path, background=False)
    model, optimizer = trained(eight_bit, layers=layers, steps=2)
    checkpoints.save(1, model, optimizer)
    truth = optimizer.state_dict()["state"]
    other, new = trained(eight_bit, layers=layers)
    checkpoints.load(other, new, step=1)
    checkpoints.save(2, other, new)
    third, again = trained(eight_bit, layers=layers)
    checkpoints.load(third, again, step=2)
    for each in (new, again):
        for number, state in each.state_dict()["state"].items():
            assert state.keys() == truth[number].keys()
            assert all(torch.equal(state[key], value) for key, value in truth[number].items())
    assert truth[0]["exp_avg"].abs().max() > 0
    for run in ((model, optimizer), (other, new), (third, again)):
        one_step(*run, 2)
    for own, one, two in zip(model.parameters(), other.parameters(), third.parameters()):
        assert torch.equal(own, one) and torch.equal(own, two)


@pytest.mark.parametrize("kind", [AdamW, torch.optim.AdamW])
@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("loaded", [True, False])
def test_a_learning_rate_may_be_a_tensor(tmp_path, kind, saved, loaded):
    def optimizer_of(as_tensor, value):
        return lambda parameters: kind(parameters, lr=torch.tensor(value) if as_tensor else value)

    checkpoints = Checkpointer(tmp_path, background=False)
    model, optimizer = trained(optimizer_of(saved, 0.25), steps=2, size=4)
    checkpoints.save(1, model, optimizer)
    other, new = trained(optimizer_of(loaded, 0.5), size=4)
    rate = new.param_groups[0]["lr"]
    checkpoints.load(other, new)
    now = new.param_groups[0]["lr"]
    assert now == 0.25 and (now is rate if loaded else type(now) is float)
    for run in ((model, optimizer), (other, new)):
        one_step(*run, 2)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_states_that_are_lists_are_refused_by_the_save(tmp_path):
    model = nn.Linear(3, 3)
    optimizer = torch.optim.LBFGS(model.parameters())

    def loss():
        optimizer.zero_grad()
        value = model(torch.ones(2, 3)).square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    with pytest.raises(TypeError, match="state 'al' of 'weight' in LBFGS is a list, and only tensors and numbers"):
        Checkpointer(tmp_path / "run", background=False).save(1, model, optimizer)
    assert not (tmp_path / "run").exists()
    Checkpointer(tmp_path / "run", background=False).save(1, model)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    other = nn.Linear(3, 3)
    new = torch.optim.LBFGS(other.parameters())
    Checkpointer(tmp_path / "run", background=False).load(other)
    new.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    optimizer.step(loss)
    expected, model, optimizer = model, other, new
    optimizer.step(loss)
    assert all(map(torch.equal, model.parameters(), expected.parameters()))


def test_parameters_of_another_model_or_another_group(tmp_path):
    checkpoints, model = Checkpointer(tmp_path, background=False), nn.Linear(3, 3)
    optimizer = AdamW(model.parameters())
    model.weight = nn.Parameter(model.weight.detach() * 2)
    with pytest.raises(ValueError, match=r"\(3, 3\), is not the model's. What replaces parameters .* comes before the"):
        checkpoints.save(1, model, optimizer)

    def grouped(weight, bias):
        return AdamW([{"params": [model.weight], "lr": weight}, {"params": [model.bias], "lr": bias}])

    checkpoints.save(1, model, grouped(0.25, 0.5))
    with pytest.raises(ValueError, match="'lr' .* 0.25 for 'weight' and as 0.5 for 'bias', .* here; group the param"):
        checkpoints.load(model, AdamW(model.parameters()))
    checkpoints.load(model, new := grouped(0.0, 0.0))
    assert [group["lr"] for group in new.param_groups] == [0.25, 0.5]
