"""AdamW against torch's and the formula in float64; states, groups, interchange."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from optim_models import net, whole_gradients
from torch import nn

from hp_optim import AdamW, AdamW8bit

pytestmark = pytest.mark.framework("torch")


def give(model: nn.Module, step: int, without: tuple[str, ...] = ()) -> None:
    for name, gradient in whole_gradients(step, model).items():
        parameter = model.get_parameter(name)
        parameter.grad = gradient.to(parameter.dtype) if parameter.requires_grad and name not in without else None


def groups(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [{"params": parameters[::2]}, {"params": parameters[1::2], "weight_decay": 0.0, "lr": 0.05}]


def formula(parameter: torch.Tensor, gradients: list[torch.Tensor], **options: Any) -> torch.Tensor:
    """AdamW in float64 as Loshchilov and Hutter write it."""
    lr, (b1, b2), eps, decay = options["lr"], options["betas"], options["eps"], options["weight_decay"]
    m = v = largest = torch.zeros_like(parameter)
    for step, gradient in enumerate(gradients, 1):
        gradient = -gradient if options.get("maximize") else gradient
        m, v = b1 * m + (1 - b1) * gradient, b2 * v + (1 - b2) * gradient**2
        largest = torch.maximum(largest, v)
        second = (largest if options.get("amsgrad") else v) / (1 - b2**step)
        parameter = parameter * (1 - lr * decay) - lr * (m / (1 - b1**step)) / (second.sqrt() + eps)
    return parameter


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True, "weight_decay": 0.5}], ids=str)
@pytest.mark.parametrize("kernel", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_ten_steps_equal_the_formula(options: dict[str, Any], kernel: dict[str, Any]):
    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1, **options}
    model = net()
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = AdamW(model.parameters(), **settings, **kernel)
    for step in range(10):
        give(model, step)
        optimizer.step()
    for name, parameter in model.named_parameters():
        gradients = [whole_gradients(step, model)[name] for step in range(10)] if parameter.requires_grad else []
        truth = formula(start[name], gradients, **settings)
        torch.testing.assert_close(parameter.detach(), truth, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "make", [AdamW, lambda parameters, **options: AdamW8bit(parameters, compiled=False, **options)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float64, marks=pytest.mark.thorough)])
def test_the_default_dtype_changes_no_step(make: Any, dtype: torch.dtype):
    """Models are often built under another one; a counter in bfloat16 would stop at 256."""
    weights = [nn.Parameter(torch.linspace(-1, 1, 5000)) for _ in range(2)]
    for weight, default in zip(weights, (torch.get_default_dtype(), dtype)):
        before = torch.get_default_dtype()
        torch.set_default_dtype(default)
        try:
            optimizer = make([weight], lr=1e-3)
            for step in range(260):
                weight.grad = torch.full((5000,), 1.0 / (1 + step), dtype=torch.float32)
                optimizer.step()
        finally:
            torch.set_default_dtype(before)
        assert optimizer.state[weight]["step"] == 260
    assert torch.equal(*weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", [{"foreach": True}, {"fused": True}], ids=str)
def test_two_groups_and_missing_gradients_as_torch_does_it(dtype: torch.dtype, kernel: dict[str, Any]):
    ours, theirs = net(dtype), net(dtype)
    one, other = AdamW(groups(ours), lr=0.02, **kernel), torch.optim.AdamW(groups(theirs), lr=0.02, **kernel)
    for step in range(6):
        without = ("out.weight", "first.bias") if step in (0, 3) else ()
        give(ours, step, without), give(theirs, step, without)
        one.step(), other.step()
    for name, parameter in ours.named_parameters():
        tolerance = 1e-6 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(parameter, theirs.get_parameter(name), rtol=0, atol=tolerance)


def test_a_tensor_as_learning_rate_is_read_at_each_step():
    ours, theirs = net(), net()
    lr = torch.tensor(0.1, dtype=torch.float64)
    one, other = AdamW(ours.parameters(), lr=lr), torch.optim.AdamW(theirs.parameters(), lr=0.1)
    for step in range(3):
        give(ours, step), give(theirs, step)
        one.step(), other.step()
        lr.mul_(0.5)
        other.param_groups[0]["lr"] *= 0.5
    for parameter, truth in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(parameter, truth, rtol=0, atol=1e-12)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_states_are_torchs_in_both_directions(amsgrad: bool):
    first, second = net(torch.float32), net(torch.float32)
    pairs = [(AdamW, torch.optim.AdamW), (torch.optim.AdamW, AdamW)]
    for ours, theirs in pairs:
        models = copy.deepcopy(first), copy.deepcopy(second)
        options: dict[str, Any] = {"lr": 0.1, "amsgrad": amsgrad, "fused": True}
        one, other = ours(models[0].parameters(), **options), theirs(models[1].parameters(), lr=1.0, fused=True)
        for step in range(3):
            give(models[0], step)
            one.step()
        other.load_state_dict(copy.deepcopy(one.state_dict()))
        models[1].load_state_dict(models[0].state_dict())
        for step in range(3, 6):
            give(models[0], step), give(models[1], step)
            one.step(), other.step()
        for parameter, truth in zip(models[1].parameters(), models[0].parameters()):
            torch.testing.assert_close(parameter, truth, rtol=0, atol=1e-6)
        trained = [parameter for parameter in models[0].parameters() if parameter.requires_grad]
        assert all(float(one.state[parameter]["step"]) == 6 for parameter in trained)


def test_every_parameter_has_its_state_from_construction():
    model = net(torch.float32)
    optimizer = AdamW(model.named_parameters(), amsgrad=True)
    saved = optimizer.state_dict()
    assert len(saved["state"]) == len(list(model.parameters()))
    for state in saved["state"].values():
        assert list(state) == ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"] and float(state["step"]) == 0
    assert saved["param_groups"][0]["param_names"][0] == "first.weight"


def test_states_that_are_set_from_outside_are_taken():
    ours, theirs = net(torch.float32), net(torch.float32)
    one, other = AdamW(ours.parameters(), fused=True), torch.optim.AdamW(theirs.parameters(), fused=True)
    for step in range(4):
        give(ours, step), give(theirs, step)
        if step == 2:
            for mine, torchs in (
                (one.state[a], other.state[b]) for a, b in zip(ours.parameters(), theirs.parameters())
            ):
                mine["exp_avg"] = torch.full_like(mine["exp_avg"], 0.5)
                if torchs:
                    torchs["exp_avg"] = torch.full_like(torchs["exp_avg"], 0.5)
        one.step(), other.step()
    for parameter, truth in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(parameter, truth, rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [1, 5, 63, 64, 65, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_cuts_change_no_bits(size: int, dtype: torch.dtype):
    """One tensor of 260 elements, and the same in pieces that touch, in pieces that don't, in two groups."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(260, generator=generator).to(dtype)
    gradients = [torch.randn(260, generator=generator).to(dtype) for _ in range(5)]

    def run(pieces: list[torch.Tensor], optimizer: Any, apart: bool) -> torch.Tensor:
        for gradient in gradients:
            for piece, part in zip(pieces, gradient.clone().split([piece.numel() for piece in pieces])):
                piece.grad = part.clone() if apart else part
            optimizer.step()
        return torch.cat([piece.detach() for piece in pieces])

    options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
    one = [start.clone().requires_grad_()]
    truth = run(one, AdamW(one, **options), False)
    for apart in (False, True):
        memory = start.clone()
        pieces = [nn.Parameter(part.clone() if apart else part) for part in memory.split(size)]
        assert torch.equal(run(pieces, AdamW(pieces, **options), apart), truth)
        pieces = [nn.Parameter(part) for part in start.clone().split(size)]
        halves = [{"params": pieces[::2]}, {"params": pieces[1::2]}]
        assert torch.equal(run(pieces, AdamW([each for each in halves if each["params"]], **options), apart), truth)


def test_neighbours_are_one_run():
    memory = torch.randn(640)
    pieces = [nn.Parameter(part) for part in memory.split(64)]
    optimizer = AdamW(pieces)
    gradient = torch.randn(640)
    for piece, part in zip(pieces, gradient.split(64)):
        piece.grad = part
    optimizer.step()
    assert optimizer._blocks[0].runs.sizes == [640]
    pieces[3].grad = None
    optimizer.step()
    assert optimizer._blocks[0].runs.sizes == [192, 384]
    for piece, part in zip(pieces, gradient.split(64)):
        piece.grad = part
    optimizer.step()
    assert optimizer._blocks[0].runs.sizes == [192, 64, 384]  # one of them is a step behind
    assert [float(optimizer.state[piece]["step"]) for piece in pieces] == [3, 3, 3, 2, 3, 3, 3, 3, 3, 3]


def touching(values: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """Tensors next to each other in memory, each with a storage of its own, as an allocator of a device puts them."""
    memory = bytearray(values.numpy().tobytes())
    size = values.numel() // parts
    return [torch.frombuffer(memory, dtype=values.dtype, count=size, offset=4 * size * n) for n in range(parts)]


@pytest.mark.parametrize(("apart", "sizes"), [("parameters", [64] * 4), ("gradients", [64] * 4), ("neither", [256])])
def test_neighbours_with_storages_of_their_own_are_runs_of_their_own(apart: str, sizes: list[int]):
    generator = torch.Generator().manual_seed(0)
    start, gradient = torch.randn(256, generator=generator), torch.randn(256, generator=generator)
    own = touching(start, 4) if apart == "parameters" else start.clone().split(64)
    pieces = [nn.Parameter(each) for each in own]
    truth = nn.Parameter(start.clone())
    one, other = AdamW(pieces), AdamW([truth])
    truth.grad = gradient
    for step in range(3):
        together = gradient.clone().split(64)
        gradients = touching(gradient, 4) if apart == "gradients" and step else together
        for piece, part in zip(pieces, gradients):
            piece.grad = part
        one.step(), other.step()
    assert one._blocks[0].runs.sizes == sizes
    assert torch.equal(torch.cat(pieces), truth)


def test_transposed_memory_and_new_memory():
    ours = nn.Parameter(torch.randn(5, 7).T)
    theirs = nn.Parameter(ours.detach().clone())
    one, other = AdamW([ours]), torch.optim.AdamW([theirs], foreach=False)
    for step in range(4):
        gradient = torch.randn(7, 5)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        one.step(), other.step()
        if step == 1:
            ours.data = ours.detach().clone(memory_format=torch.contiguous_format)
            theirs.data = theirs.detach().clone()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_a_grad_scaler_skips_the_step():
    weight = nn.Parameter(torch.ones(70))
    optimizer = AdamW([weight], fused=True)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(1.0)  # type: ignore[attr-defined]
    weight.grad = torch.full((70,), float("inf"))
    optimizer.step()
    assert torch.equal(weight.detach(), torch.ones(70)) and float(optimizer.state[weight]["step"]) == 0
    optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
    weight.grad = torch.full((70,), 4.0)
    optimizer.step()
    other = nn.Parameter(torch.ones(70))
    other.grad = torch.ones(70)
    AdamW([other]).step()
    assert torch.equal(weight.detach(), other.detach())


def test_a_gradient_that_is_not_finite_is_named_and_the_step_skipped():
    model = net(torch.float32)
    optimizer = AdamW(model.named_parameters(), skip_nonfinite=True)
    give(model, 0)
    optimizer.step()
    before = copy.deepcopy([(p.detach(), optimizer.state[p]) for p in model.parameters()])
    give(model, 1)
    model.qkv.weight.grad[0, 0] = float("inf")  # type: ignore[index]
    with pytest.warns(RuntimeWarning, match=r"AdamW: the gradients of 'qkv.weight' have values that are infinite"):
        optimizer.step()
    for parameter, (weight, state) in zip(model.parameters(), before):
        assert torch.equal(parameter, weight)
        assert all(torch.equal(optimizer.state[parameter][key], value) for key, value in state.items())
    give(model, 1)
    model.qkv.weight.grad[0, 0] = 1e30  # type: ignore[index]
    optimizer.step()
    assert not torch.equal(model.first.weight, before[0][0])


def test_what_is_refused():
    weight = nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match=r"AdamW: group 1 has no parameters; leave it out"):
        AdamW([{"params": [weight]}, {"params": []}])
    with pytest.raises(ValueError, match="more than one parameter group"):
        AdamW([{"params": [weight]}, {"params": [weight]}])
    with pytest.warns(UserWarning, match="duplicate"), pytest.raises(ValueError, match=r"parameter 'params\[1\] of g"):
        AdamW([weight, weight])
    with pytest.raises(ValueError, match=r"Invalid learning rate: -1"):
        AdamW([weight], lr=-1)
    with pytest.raises(ValueError, match=r"AdamW: lr must be at least 0, got -1"):
        AdamW([{"params": [weight], "lr": -1}])
    phases = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(
        TypeError, match=r"1\] of group 0' is of torch.complex64, .* Leave it out, or give it to torch.o"
    ):
        AdamW([weight, phases])
    AdamW([weight]), torch.optim.AdamW([phases])
    apart = nn.Parameter(torch.zeros(6)[::2])
    optimizer = AdamW([("odd", apart)])
    apart.grad = torch.ones(3)
    with pytest.raises(
        RuntimeError, match=r"elements of parameter 'odd' are not next to each other in .* Make it contiguous"
    ):
        optimizer.step()
    apart.data = apart.data.contiguous()
    optimizer.step()
    torch.testing.assert_close(apart.detach(), torch.full((3,), -1e-3))
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = AdamW(embedding.named_parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"AdamW: the gradient of 'weight' is sparse, and AdamW updates every"):
        optimizer.step()
