"""States in eight bits: codes, the same for any layout; losses and bytes; state dicts; what is refused."""

from __future__ import annotations

import copy
import functools
import importlib
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from optim_layouts import mesh_of
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hp_dtensor import DTensor, RaggedShard, Replicate, Shard, distribute_tensor
from hp_dtensor.extend import boxes
from hp_fsdp import fully_shard, get_optimizer_state_dict, set_optimizer_state_dict
from hp_optim import AdamW, AdamW8bit
from hp_optim.torch.states.quantized import (
    _compiled,
    decoded_mean,
    decoded_square,
    dithers,
    encoded_mean,
    encoded_square,
    leaves_blocks_whole,
    nearest,
)
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
CPU = torch.device("cpu")


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 256), nn.GELU(), nn.Linear(256, 40)).to(device_type())


def make(model: nn.Module, **options: Any) -> AdamW8bit:
    return AdamW8bit(model.named_parameters(), lr=3e-3, compiled=False, **options)


def train(model: nn.Module, optimizer: Any, first: int, last: int) -> list[float]:
    """Learn a fixed map; every rank has the same batch."""
    generator = torch.Generator().manual_seed(1)
    target, losses = torch.randn(40, 40, generator=generator), []
    for step in range(last):
        x = torch.randn(64, 40, generator=generator)
        if step >= first:
            loss = (model(x.to(device_type())) - (x @ target).tanh().to(device_type())).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


# ---- codes ----
def blocks(seed: int = 0) -> torch.Tensor:
    values = torch.randn(50, 256, generator=torch.Generator().manual_seed(seed))
    values *= torch.logspace(-6, 3, 50)[:, None]
    values[3] = 0
    values[4, ::2] = 0
    return values


def test_decoded_values_are_near_and_coded_alike_again():
    mean_rounding, root_rounding = nearest(CPU)
    values = blocks()
    codes, scales = encoded_mean(values, mean_rounding)
    again = decoded_mean(codes, scales)
    assert torch.equal(again.abs().amax(1), values.abs().amax(1)) and torch.equal(again == 0, codes == 0)
    large = values.abs() > 1e-4 * scales[:, None]
    assert ((again - values).abs() <= values.abs() / 16 * 1.001)[large].all() and (again[3] == 0).all()
    assert all(map(torch.equal, encoded_mean(again, mean_rounding), (codes, scales)))
    squares = values.square()
    codes, scales = encoded_square(squares, root_rounding)
    again = decoded_square(codes, scales)
    large = squares > 1e-8 * squares.amax(1, keepdim=True)
    assert ((again.sqrt() - values.abs()).abs() <= values.abs() / 32 * 1.001)[large].all()
    assert ((again > 0) == (squares.amax(1, keepdim=True) > 0)).all()  # never rounded to zero
    assert all(map(torch.equal, encoded_square(again, root_rounding)[:1], (codes,)))


def test_what_is_cut_off_comes_back_on_average():
    values = blocks()[10:11].repeat(1, 1)
    total = torch.zeros_like(values, dtype=torch.float64)
    for step in range(512):
        total += decoded_mean(*encoded_mean(values, dithers(torch.tensor(float(step)))[0]))
    large = values.abs() > 1e-2 * values.abs().amax()
    torch.testing.assert_close(total[large] / 512, values[large].double(), rtol=1e-3, atol=0)


# ---- layouts ----
def whole_blocks(shape: Any, placements: Any, mesh_shape: Any) -> bool:
    """The definition, element by element."""
    numbers = np.arange(np.prod(shape)).reshape(shape)
    for coordinate in product(*(range(1 if p.is_replicate() else n) for p, n in zip(placements, mesh_shape))):
        own: list[int] = []
        for box in boxes(shape, placements, mesh_shape, coordinate):
            own += numbers[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes))].reshape(-1).tolist()
        if placements and any(isinstance(p, Shard) and p.dim for p in placements):
            dim = next(p.dim for p in placements if isinstance(p, Shard) and p.dim)
            own = np.split(numbers, mesh_shape[0], dim)[coordinate[0]].reshape(-1).tolist()
        for at in range(0, len(own), 256):
            block = own[at : at + 256]
            first = block[0]
            if first % 256 or block != list(range(first, min(first + 256, numbers.size))):
                return False
    return True


@pytest.mark.parametrize(
    ("shape", "placement"),
    [
        ((6, 1024), Shard(0)),
        ((6, 1024), Shard(1)),
        ((6, 512), Shard(1)),
        ((6, 768), Shard(1)),
        ((6, 100), Shard(0)),
        ((512, 3), Shard(0)),
        ((4, 6, 256), Shard(1)),
        ((4, 6, 128), Shard(1)),
        ((4, 2, 256), Shard(2)),
        ((3, 300), RaggedShard((0, 1), (256, 644))),
        ((3, 300), RaggedShard((0, 1), (255, 645))),
        ((3, 300), RaggedShard((0, 1), (900, 0))),
        ((3, 300), RaggedShard((0, 1), (0, 900))),
        ((3, 300), Replicate()),
    ],
    ids=str,
)
def test_which_layouts_leave_blocks_whole(shape: Any, placement: Any):
    assert leaves_blocks_whole(shape, (placement,), (2,)) is whole_blocks(shape, (placement,), (2,))


def coded(weight: torch.Tensor, placement: Any) -> list[torch.Tensor]:
    """Three steps; the codes of the whole parameter."""
    parameter: Any = nn.Parameter(weight.clone())
    if placement is not None:
        parameter = nn.Parameter(distribute_tensor(weight, mesh_of(2), [placement]))
    optimizer = AdamW8bit([("w", parameter)], compiled=False)
    for step in range(3):
        gradient = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step)).to(weight.device)
        parameter.grad = gradient if placement is None else distribute_tensor(gradient, mesh_of(2), [placement])
        optimizer.step()
    state = optimizer.state[parameter]
    found = [parameter.detach(), state["exp_avg_code"], state["exp_avg_sq_code"]]
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in found]


@on_ranks(2)
def test_codes_do_not_depend_on_the_layout():
    torch.set_num_threads(1)
    weight = torch.randn(6, 1024, generator=torch.Generator().manual_seed(7)).to(device_type())
    truth = coded(weight, None)
    for placement in (Shard(0), Shard(1), RaggedShard((0, 1), (1, 5)), Replicate()):
        assert all(map(torch.equal, coded(weight, placement), truth)), placement


@on_ranks(2, 3)
@pytest.mark.parametrize("deterministic", [False, True])
def test_fully_shard_has_the_bits_of_one_process(deterministic: bool):
    torch.set_num_threads(1)
    model, truth = mlp(), mlp()
    reference = make(truth)
    fully_shard(model, mesh_of(torch.distributed.get_world_size()), deterministic=deterministic)
    optimizer = make(model)
    generator = torch.Generator().manual_seed(0)
    for step in range(4):
        for parameter, own in zip(truth.parameters(), model.parameters()):
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(device_type())
            spec: Any = own._spec
            whole = distribute_tensor(parameter.grad, spec.mesh, [Replicate()])
            own.grad = whole.redistribute(spec.mesh, spec.placements)
        reference.step(), optimizer.step()
        if step == 1:  # by name, in float32
            state = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
            optimizer = make(model)
            set_optimizer_state_dict(model, optimizer, state)
    for parameter, own in zip(truth.parameters(), model.parameters()):
        assert torch.equal(parameter, own.full_tensor())


# ---- training ----
def test_loss_and_bytes():
    model, truth = mlp(), mlp()
    optimizer = make(model)
    own, other = train(model, optimizer, 0, 120), train(truth, AdamW(truth.parameters(), lr=3e-3), 0, 120)
    assert sum(own[-20:]) == pytest.approx(sum(other[-20:]), rel=0.01)
    weight = nn.Parameter(torch.zeros(1000, 1000, device=device_type()))
    state = AdamW8bit([weight], compiled=False).state[weight]
    assert sum(each.nbytes for each in state.values()) <= 2.1 * weight.numel()
    states = [optimizer.state[parameter] for parameter in model.parameters()]
    assert ["exp_avg_code" in state for state in states] == [True, False, True, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_and_sizes_that_are_no_multiples(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(83, 61, generator=generator, dtype=torch.float64)
    pairs = [nn.Parameter(start.to(device_type(), dtype).clone()) for _ in range(2)]
    optimizers = [AdamW8bit(pairs[:1], lr=0.01, compiled=False), AdamW(pairs[1:], lr=0.01)]
    for _ in range(5):
        gradient = torch.randn(83, 61, generator=generator, dtype=torch.float64).to(device_type(), dtype)
        for parameter, optimizer in zip(pairs, optimizers):
            parameter.grad = gradient
            optimizer.step()
    moved = (pairs[1] - start.to(pairs[1])).abs().mean()
    assert 0 < (pairs[0] - pairs[1]).abs().mean() < 0.1 * moved


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of the compiler's imports
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.thorough)])
def test_compiled_and_not(monkeypatch: pytest.MonkeyPatch, backend: str):
    """One graph of any number of blocks; inductor makes code of it, in half a minute."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    monkeypatch.setattr("hp_optim.torch.states.quantized._compiled", functools.cache(_compiled.__wrapped__))
    torch._dynamo.reset()
    counters = importlib.import_module("torch._dynamo.utils").counters
    counters.clear()
    weights = [nn.Parameter(torch.linspace(-1, 1, 5000)) for _ in range(2)]
    optimizers = [AdamW8bit([each], compiled=compiled) for each, compiled in zip(weights, (True, False))]
    for step in range(2):
        for weight, optimizer in zip(weights, optimizers):
            weight.grad = torch.sin(torch.arange(5000) + step)
            with FlopCounterMode(display=False):  # torch refuses to compile one graph for a dispatch mode
                optimizer.step()
    assert counters["stats"]["unique_graphs"] > 0
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of the compiler's imports
def test_a_machine_without_a_compiler_says_how_to_be_silent(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any) -> None:
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=fail))
    monkeypatch.setattr("hp_optim.torch.states.quantized._compiled", functools.cache(_compiled.__wrapped__))
    torch._dynamo.reset()
    weights = [nn.Parameter(torch.linspace(-1, 1, 5000)) for _ in range(2)]
    for weight in weights:
        weight.grad = torch.ones(5000)
    with pytest.warns(RuntimeWarning, match="torch.compile failed, .*; compiled=False is silent"):
        AdamW8bit(weights[:1]).step()
    AdamW8bit(weights[1:], compiled=False).step()  # a warning is an error
    assert torch.equal(*weights)


# ---- state dicts ----
def test_states_of_torchs_adamw_and_codes():
    model = mlp()
    optimizer = make(model)
    train(model, optimizer, 0, 3)
    saved, codes = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer.state_dict(coded=True))
    assert list(saved["state"][0]) == ["exp_avg", "exp_avg_sq", "step"]
    assert saved["state"][0]["exp_avg"].shape == (256, 40) and saved["state"][0]["exp_avg"].dtype == torch.float32
    followers = []
    for state in (saved, codes):
        other = copy.deepcopy(model)
        follower = make(other)
        follower.load_state_dict(state)
        train(other, follower, 3, 5)
        followers.append(other)
    train(model, optimizer, 3, 5)
    for other in followers:
        assert all(map(torch.equal, other.parameters(), model.parameters()))
    torchs = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torchs.load_state_dict(saved)
    train(model, torchs, 5, 6)
    optimizer.load_state_dict(torchs.state_dict())
    assert float(optimizer.state[next(model.parameters())]["step"]) == 4
    assert train(model, optimizer, 6, 7)[0] > 0


# ---- bad input ----
@on_ranks(2)
def test_layouts_that_cut_blocks_are_refused():
    weight = distribute_tensor(torch.zeros(40, 300, device=device_type()), mesh_of(2), [Shard(1)])
    text = r"'w' of shape \(40, 300\), placed .* is cut inside of blocks of 256 .*fully_shard cuts large"
    with pytest.raises(ValueError, match=text):
        AdamW8bit([("w", nn.Parameter(weight))])
    plain = nn.Linear(300, 40, bias=False).to(device_type())
    fully_shard(plain, mesh_of(2))
    wide = torch.zeros(40, 512, device=device_type())
    columns, rows = (distribute_tensor(wide, mesh_of(2), [Shard(dim)]) for dim in (1, 0))
    for each in (plain.weight, nn.Parameter(columns), nn.Parameter(rows)):
        each.grad = torch.ones_like(each)
        AdamW8bit([("w", each)], compiled=False).step()
    refused = nn.Parameter(weight)
    refused.grad = torch.ones_like(refused)
    AdamW([refused]).step()
    torch.testing.assert_close(refused.full_tensor(), torch.full((40, 300), -1e-3, device=device_type()))


@on_ranks(2)
def test_states_of_another_layout_come_by_set_optimizer_state_dict():
    torch.set_num_threads(1)
    models = mlp(), mlp()
    fully_shard(models[0], mesh_of(2))
    sharded, plain = map(make, models)
    train(models[0], sharded, 0, 1)
    for coded, text in ((True, r"has 0 blocks, and this rank 40: it is of another layout. "), (False, r"has shape .*")):
        with pytest.raises(
            ValueError, match=text + "hp_fsdp.set_optimizer_state_dict loads what get_optimizer_state_d"
        ):
            plain.load_state_dict(sharded.state_dict(coded=coded))
    set_optimizer_state_dict(models[1], plain, get_optimizer_state_dict(models[0], sharded))
    one, other = (get_optimizer_state_dict(each, own)["state"] for each, own in zip(models, (sharded, plain)))
    for name, state in other.items():
        assert float(state["step"]) == 1 and torch.equal(one[name]["exp_avg"].full_tensor(), state["exp_avg"])


def test_what_is_refused():
    weight = nn.Parameter(torch.zeros(64, 128))
    with pytest.raises(ValueError, match=r"AdamW8bit: group 0 has amsgrad=True, which takes one more state; use AdamW"):
        AdamW8bit([{"params": [weight], "amsgrad": True}])
    assert "max_exp_avg_sq" in AdamW([{"params": [weight], "amsgrad": True}]).state[weight]
    with pytest.raises(ValueError, match=r"AdamW8bit: group 0 has no parameters"):
        AdamW8bit([{"params": []}])
    with pytest.raises(
        RuntimeError, match=r"'w' of shape \(128, 64\) and strides \(1, 128\) is not contiguous, .* Make it"
    ):
        AdamW8bit([("w", nn.Parameter(weight.detach().T))])
    AdamW8bit([("w", nn.Parameter(weight.detach().T.contiguous()))]), AdamW([nn.Parameter(weight.detach().T)])
