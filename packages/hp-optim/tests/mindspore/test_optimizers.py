"""Muon, AdamW, chains and schedules on MindSpore: formulas in float64, the same values for any layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from hp_dtensor import DTensor, RaggedShard, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_dtensor.mindspore.dtensor import local_view
from hp_fsdp import fully_shard
from hp_optim import (
    NS_VARIANTS,
    AdamW,
    AdamW8bit,
    MatrixRule,
    Muon,
    get_hyper_lr_scheduler,
    get_hyper_optimizer,
    swap_optimizer,
)
from hp_platform import count_collectives
from hp_platform.extend import own_rank
from hp_testing import device_type, on_ranks

R = Replicate()
SHAPES = {"up": (12, 5), "down": (5, 12), "square": (6, 6), "experts": (4, 3, 8), "heads": (8, 6)}
RULES = [MatrixRule("heads", "(h o) i", {"o": 4})]


class Net(nn.Cell):
    def __init__(self, dtype: Any = np.float64) -> None:
        super().__init__()
        rng = np.random.default_rng(0)
        for name, shape in SHAPES.items():
            setattr(self, name, Parameter(Tensor(rng.normal(size=shape).astype(dtype)), name=name))
        self.bias = Parameter(Tensor(rng.normal(size=7).astype(dtype)), name="bias")


def gradient(step: int, name: str, shape: tuple[int, ...], dtype: Any = np.float64) -> np.ndarray:
    return np.random.default_rng([step, *name.encode()]).normal(size=shape).astype(dtype)


def orthogonal(matrix: np.ndarray) -> np.ndarray:
    """Newton-Schulz as papers write it."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (np.linalg.norm(x) + 1e-10)
    for a, b, c in NS_VARIANTS["asym5"]:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def formula(name: str, weight: np.ndarray, steps: int, lr: float, decay: float) -> np.ndarray:
    buffer = np.zeros_like(weight)
    rows = 4 if name == "heads" else weight.shape[-2]
    for step in range(steps):
        g = gradient(step, name, weight.shape)
        buffer = 0.95 * buffer + g
        update = (0.95 * buffer + g).reshape(-1, rows, weight.shape[-1])
        scale = 0.2 * max(rows, weight.shape[-1]) ** 0.5
        made = np.stack([scale * orthogonal(each) for each in update]).reshape(weight.shape)
        weight = weight * (1 - lr * decay) - lr * made
    return weight


def matrices(net: nn.Cell) -> list[tuple[str, Parameter]]:
    return [(name, getattr(net, name)) for name in SHAPES]


def near_float32(value: float) -> float:
    """What MindSpore keeps of a learning rate."""
    return float(np.float32(value))


def test_ten_steps_equal_the_formula():
    net = Net()
    start = {name: parameter.asnumpy().copy() for name, parameter in matrices(net)}
    optimizer = Muon(matrices(net), lr=0.02, weight_decay=0.1, rules=RULES)
    for step in range(10):
        assert optimizer([Tensor(gradient(step, name, SHAPES[name])) for name in SHAPES])
    for name, parameter in matrices(net):
        truth = formula(name, start[name], 10, near_float32(0.02), 0.1)
        np.testing.assert_allclose(parameter.asnumpy(), truth, rtol=0, atol=1e-12)


def rows(mesh: Any, name: str) -> list[Any]:
    return [Shard(0)]


def last_dim(mesh: Any, name: str) -> list[Any]:
    return [Shard(len(SHAPES[name]) - 1)]


def ragged(mesh: Any, name: str) -> list[Any]:
    size = int(np.prod(SHAPES[name]))
    first = size // 3
    units = [first, size - first] + [0] * (mesh.size() - 2)
    return [RaggedShard(tuple(range(len(SHAPES[name]))), tuple(units))]


def replicated(mesh: Any, name: str) -> list[Any]:
    return [R]


def trained(kind: str, lay: Callable[..., list[Any]] | None, ranks: int, dtype: Any) -> dict[str, np.ndarray]:
    net = Net(dtype)
    mesh = init_device_mesh(device_type(), (ranks,), mesh_dim_names=("dp",)) if lay else None
    if lay:
        for name, parameter in matrices(net):
            placed = distribute_tensor(parameter, mesh, lay(mesh, name))
            setattr(net, name, placed if isinstance(placed, Parameter) else Parameter(placed, name=name))
    muon = kind == "muon"
    optimizer = Muon(matrices(net), rules=RULES) if muon else AdamW(matrices(net), lr=0.02)
    for step in range(10):
        gradients = []
        for name, shape in SHAPES.items():
            whole = Tensor(gradient(step, name, shape, dtype))
            gradients.append(distribute_tensor(whole, mesh, lay(mesh, name)) if lay else whole)
        with count_collectives() as counts:
            optimizer(gradients)
        expected = 2 + (step == 0)  # the first one also compares the ranks
        assert sum(counts.values()) == (expected if lay and muon else 0), counts
    return {
        name: (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).asnumpy()
        for name, parameter in matrices(net)
    }


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "lay"),
    [
        ("muon", ragged),
        ("adamw", ragged),
        *(pytest.param("muon", lay, marks=pytest.mark.thorough) for lay in (rows, last_dim, replicated)),
        *(pytest.param("adamw", lay, marks=pytest.mark.thorough) for lay in (rows, last_dim, replicated)),
    ],
)
def test_bits_do_not_depend_on_the_layout(lay: Callable[..., list[Any]], kind: str, ranks: int):
    for dtype in (np.float32, np.float64):
        truth, result = trained(kind, None, ranks, dtype), trained(kind, lay, ranks, dtype)
        for name in truth:
            assert not np.array_equal(truth[name], getattr(Net(dtype), name).asnumpy())
            np.testing.assert_array_equal(result[name], truth[name], err_msg=f"{name} {dtype}")


@on_ranks(2)
def test_a_broken_gradient_on_one_rank_stops_all():
    net = Net(np.float32)
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    up = distribute_tensor(net.up, mesh, [Shard(0)])
    net.up = up if isinstance(up, Parameter) else Parameter(up, name="up")
    optimizer = Muon([net.up])
    before = local_view(net.up).asnumpy().copy()
    bad = gradient(0, "up", SHAPES["up"], np.float32)
    bad[-1, -1] = np.nan
    with pytest.warns(RuntimeWarning, match="Muon: the gradients of 'up' have values that are infinite"):
        assert not optimizer([distribute_tensor(Tensor(bad), mesh, [Shard(0)])])
    np.testing.assert_array_equal(local_view(net.up).asnumpy(), before)


@on_ranks(2)
@pytest.mark.parametrize(("key", "value"), [("ns_steps", 3), ("ns_steps", -1), ("momentum", "x")])
def test_what_one_rank_changes_all_ranks_refuse(key: str, value: Any):
    net = Net(np.float32)
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    up = distribute_tensor(net.up, mesh, [Shard(0)])
    net.up = up if isinstance(up, Parameter) else Parameter(up, name="up")
    optimizer = Muon([net.up])

    def step(number: int) -> Any:
        whole = Tensor(gradient(number, "up", SHAPES["up"], np.float32))
        return optimizer([distribute_tensor(whole, mesh, [Shard(0)])])

    step(0)
    before, right = local_view(net.up).asnumpy().copy(), optimizer.param_groups[0][key]
    if own_rank() == 1:
        optimizer.param_groups[0][key] = value
    texts = {3: r"ranks have different parameters or settings.*'up' of shape", -1: "ns_steps must be .*got -1"}
    with pytest.raises((ValueError, TypeError), match=texts.get(value, "Muon: momentum must be a number, got 'x'")):
        step(1)
    np.testing.assert_array_equal(local_view(net.up).asnumpy(), before)
    optimizer.param_groups[0][key] = right
    assert step(1)
    if value == 3:  # all ranks change it
        optimizer.param_groups[0][key] = value
        with count_collectives() as counts:
            assert step(2)
        assert (counts["all_to_all"], counts["all_gather"]) == (3, 1), counts
        other = Net(np.float32)
        truth = Muon([other.up])
        for number in range(3):
            truth.param_groups[0][key] = 3 if number == 2 else right
            truth([Tensor(gradient(number, "up", SHAPES["up"], np.float32))])
        np.testing.assert_array_equal(net.up.full_tensor().asnumpy(), other.up.asnumpy())


def test_a_chain_with_schedules_and_states_by_name():
    def made() -> tuple[Any, Any, Any]:
        net = Net(np.float32)
        optimizer = get_hyper_optimizer(net, list(SHAPES), ["bias"], {"lr": 0.02}, {"lr": 0.01})
        return net, optimizer, get_hyper_lr_scheduler(optimizer, 8, decay_style="linear", lr=1.0, lr_min=0.0)

    def go(net: Any, optimizer: Any, schedule: Any, first: int, last: int) -> None:
        named = dict(net.parameters_and_names())
        for step in range(first, last):
            optimizer.step({name: Tensor(gradient(step, name, p.shape, np.float32)) for name, p in named.items()})
            schedule.step()

    one, other = made(), made()
    assert isinstance(one[1].optimizers["muon"], Muon) and isinstance(one[1].optimizers["adamw"], AdamW)
    go(*one, 0, 3)
    saved = {
        "state": {
            name: {key: Tensor(value.asnumpy()) for key, value in state.items()}
            for name, state in one[1].state_dict()["state"].items()
        },
        **{key: value for key, value in one[1].state_dict().items() if key != "state"},
    }
    for (_, mine), (_, theirs) in zip(other[0].parameters_and_names(), one[0].parameters_and_names()):
        mine.set_data(Tensor(theirs.asnumpy()))
    other[1].load_state_dict(saved)
    other[2].load_state_dict(one[2].state_dict())
    go(*one, 3, 6), go(*other, 3, 6)
    for (name, mine), (_, theirs) in zip(other[0].parameters_and_names(), one[0].parameters_and_names()):
        np.testing.assert_array_equal(mine.asnumpy(), theirs.asnumpy(), err_msg=name)
    assert other[1].iteration == 6


def test_what_is_refused():
    net = Net(np.float32)
    with pytest.raises(ValueError, match=r"parameter 'bias' of shape \(7,\) has 1 dims"):
        Muon([net.bias])
    with pytest.raises(ValueError, match=r"Muon: lr must be at least 0, got -1"):
        Muon([net.up], lr=-1.0)
    with pytest.raises(ValueError, match=r"ns_dtype must be None or one of float64, float32, bfloat16, got 'half'"):
        Muon([net.up], ns_dtype="half")
    if device_type() == "cpu":
        with pytest.raises(ValueError, match=r"MindSpore's kernels on CPU have no bfloat16; use 'float32'"):
            Muon([net.up], ns_dtype="bfloat16")
        Muon([net.up], ns_dtype="float32")
    with pytest.raises(ValueError, match=r"AdamW: group 1 has no parameters"):
        AdamW([{"params": [net.up]}, {"params": []}])
    with pytest.raises(ValueError, match=r"Muon: got 0 gradients for 1 parameters"):
        Muon([net.up])([])
    with pytest.raises(TypeError, match=r"on MindSpore parameters have no gradients of their own"):
        get_hyper_optimizer(net, list(SHAPES), ["bias"]).step()
    with pytest.raises(ValueError, match=r"no gradients for up"):
        get_hyper_optimizer(net, list(SHAPES), ["bias"]).step({})
    with pytest.raises(TypeError, match=r"takes gradients by the parameters' names, got a list: pass dict\(zip\("):
        get_hyper_optimizer(net, list(SHAPES), ["bias"]).step([net.up, net.bias])
    names = [parameter.name for parameter in net.trainable_params()]
    get_hyper_optimizer(net, list(SHAPES), ["bias"]).step(dict(zip(names, net.trainable_params())))
    with pytest.raises(ValueError, match=r"'upp' are gradients of no parameter of its optimizers"):
        get_hyper_optimizer(net, list(SHAPES), ["bias"]).step({"upp": net.up})


@pytest.mark.parametrize("kind", [AdamW, Muon])
def test_a_group_that_comes_late_is_refused_and_all_can_be_given_at_once(kind: Any):
    net = Net(np.float32)
    with pytest.raises(NotImplementedError, match=rf"another of all groups, {kind.__name__}\(\[{{'params': "):
        kind([net.up]).add_param_group({"params": [net.down]})
    optimizer = kind([{"params": [net.up]}, {"params": [net.down]}])
    before = net.down.asnumpy().copy()
    optimizer([ops.ones_like(net.up), ops.ones_like(net.down)])
    assert not np.array_equal(net.down.asnumpy(), before)


@on_ranks(2)
def test_states_on_the_host_or_in_8_bits_are_refused_and_sharded_ones_are_smaller():
    with pytest.raises(NotImplementedError, match=r"swap_optimizer is not supported on MindSpore: .*Shard the states"):
        swap_optimizer(AdamW(matrices(Net())))
    with pytest.raises(NotImplementedError, match=r"AdamW8bit is not supported on MindSpore, .*shard its states by"):
        AdamW8bit(matrices(Net()))
    net, whole = Net(), Net()
    fully_shard(net, init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",)))
    optimizer, expected = AdamW(net.trainable_params(), lr=0.02), AdamW(whole.trainable_params(), lr=0.02)
    kept = sum(local_view(each).numel() for each in optimizer.exp_avg)
    assert kept < 0.6 * sum(each.numel() for each in expected.exp_avg)
    for step in range(3):
        full = [Tensor(gradient(step, each.name, each.shape)) for each in expected.parameters]
        optimizer([distribute_tensor(g, p.device_mesh, p.placements) for g, p in zip(full, net.trainable_params())])
        expected(full)
    for mine, other in zip(net.trainable_params(), whole.trainable_params()):
        np.testing.assert_allclose(mine.full_tensor().asnumpy(), other.asnumpy(), rtol=1e-12)
