"""Optimizer states: whole, sharded, by name, against the optimizer of a single process."""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
import pytest
from fsdp_cells import Net, batch, close, data_mesh, differentiated, double, pair, same_weights, seeded, whole, world
from mindspore import Tensor, mint, nn
from mindspore.experimental import optim

from hp_dtensor import DTensor, SkipDTensorDispatch, init_device_mesh
from hp_fsdp import (
    StateDictOptions,
    full_state_dict,
    fully_shard,
    get_optimizer_state_dict,
    load_full_state_dict,
    set_optimizer_state_dict,
)
from hp_testing import device_type, on_ranks

FULL = StateDictOptions(full_state_dict=True)
HOST = StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
WIDE = {
    "adamw": lambda p: optim.AdamW(p, lr=0.02),
    "amsgrad": lambda p: optim.AdamW(p, lr=0.02, betas=(0.8, 0.9), amsgrad=True),
    "decay": lambda p: nn.AdamWeightDecay(p, 0.02, weight_decay=0.1),
    "momentum": lambda p: nn.Momentum(p, 0.02, 0.9),
}
"""Those of which MindSpore computes float64."""
NARROW = {
    "adam": lambda p: optim.Adam(p, lr=0.02),
    "sgd": lambda p: optim.SGD(p, lr=0.02, momentum=0.9),
    "old adam": lambda p: nn.Adam(p, 0.02),
    "old sgd": lambda p: nn.SGD(p, 0.02, momentum=0.9),
}
MAKE = {**WIDE, **NARROW}
KEYS = {
    "adamw": ["exp_avg", "exp_avg_sq", "state_step"],
    "amsgrad": ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "state_step"],
    "decay": ["moments1", "moments2", "global_step"],
    "momentum": ["moments", "global_step"],
    "adam": ["exp_avg", "exp_avg_sq", "state_step"],
    "sgd": ["accum", "stat"],
    "old adam": ["moment1", "moment2", "global_step", "beta1_power", "beta2_power"],
    "old sgd": ["accum", "stat", "global_step"],
}


LOADED = ("amsgrad", "decay", "momentum", "old adam")
"""Those whose states are compared before and after a load."""


class Partly(Net):
    """With a frozen parameter and a tied one."""

    def __init__(self) -> None:
        super().__init__(blocks=1)
        self.first.bias.requires_grad = False
        self.tied = self.last


def made(kind: str, cell: Any, parameters: Any = None) -> Any:
    with SkipDTensorDispatch():
        return MAKE[kind](parameters or cell.trainable_params())


class Run:
    """A reference and a model with their optimizers."""

    def __init__(self, kind: str, steps: int = 2) -> None:
        self.wide = kind in WIDE
        self.reference, self.model = pair(double(Partly) if self.wide else Partly)
        self.limit = 1e-12 if self.wide else 1e-5
        self.first, self.second = made(kind, self.reference), made(kind, self.model)
        self.one = differentiated(self.reference, dtensors=False)
        self.many = differentiated(self.model)
        for step in range(steps):
            self.more(step)

    def more(self, step: int) -> None:
        everything, own = batch(step, dtype=np.float64 if self.wide else np.float32)
        self.first(self.one(everything)[1])
        _, gradients = self.many(own)
        with SkipDTensorDispatch():
            self.second(tuple(gradients))

    def same(self) -> None:
        same_weights(self.model, self.reference, self.limit)
        state = get_optimizer_state_dict(self.model, self.second, options=FULL)
        same_state(state, get_optimizer_state_dict(self.reference, self.first), self.limit)


def same_state(state: Any, expected: Any, limit: float) -> None:
    assert list(state["state"]) == list(expected["state"])
    for name, inside in expected["state"].items():
        assert list(state["state"][name]) == list(inside), name
        for key, value in inside.items():
            got = state["state"][name][key]
            assert type(got) is Tensor and got.dtype == value.dtype, (name, key)
            close(got.asnumpy(), value.asnumpy(), f"{name}.{key}", limit)
    assert state["param_groups"] == expected["param_groups"]


def copied(state: Any) -> Any:
    """Nothing of it is the optimizer's memory."""
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    if isinstance(state, list):
        return [copied(value) for value in state]
    if isinstance(state, DTensor):
        return state.__deepcopy__({})
    return state.copy() if isinstance(state, Tensor) else state


@on_ranks(3)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.thorough if kind in LOADED else ()) for kind in MAKE]
)
def test_full_states_are_those_of_a_single_process(kind: str):
    run = Run(kind)
    state = get_optimizer_state_dict(run.model, run.second, options=FULL)
    expected = [name for name in run.reference.state_dict() if name != "first.bias" and not name.startswith("tied")]
    assert list(state["state"]) == expected == state["param_groups"][0]["params"]
    assert {tuple(inside) for inside in state["state"].values()} == {tuple(KEYS[kind])}
    run.same()
    # By hand, from the single process's own Parameters.
    (key, *_) = KEYS[kind]
    for name, slot in zip(expected, getattr(run.first, key)):
        close(state["state"][name][key].asnumpy(), slot.asnumpy(), name, run.limit)
    for key in set(KEYS[kind]) & {"state_step", "global_step"}:
        assert {value[key].asnumpy().item() for value in state["state"].values()} == {2}
    only = get_optimizer_state_dict(run.model, run.second, options=HOST)
    assert bool(only) == (world()[0] == 0)


@on_ranks(3)
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("amsgrad", "full"),
        pytest.param("amsgrad", "broadcast", marks=pytest.mark.thorough),
        ("decay", "flat"),
        pytest.param("momentum", "full", marks=pytest.mark.thorough),
        ("momentum", "sharded"),
        ("old adam", "broadcast"),
        pytest.param("sgd", "sharded", marks=pytest.mark.thorough),
    ],
)
def test_a_loaded_optimizer_goes_on_as_the_saved_one(kind: str, way: str):
    run = Run(kind)
    options = {
        "full": FULL,
        "sharded": StateDictOptions(cpu_offload=True),
        "flat": StateDictOptions(flatten_optimizer_state_dict=True),
        "broadcast": HOST,
    }[way]
    state = copied(get_optimizer_state_dict(run.model, run.second, options=options))
    old = run.second
    if kind == "momentum":  # into one that has stepped
        with SkipDTensorDispatch():
            run.second(tuple(Tensor(np.ones(p.local_shape)) for p in run.model.trainable_params()))
        load_full_state_dict(run.model, {k: v.copy() for k, v in run.reference.state_dict().items()})
    else:
        run.second = made(kind, run.model)
    rates = [group["lr"] for group in getattr(run.second, "param_groups", ())] or [run.second.learning_rate]
    rates[0].set_data(Tensor(7.0, mindspore.float32))
    set_optimizer_state_dict(run.model, run.second, state, options=BROADCAST if way == "broadcast" else options)
    assert rates[0].asnumpy() == np.float32(0.02) and (old is run.second) == (kind == "momentum")
    run.same()
    for step in range(2, 4):
        run.more(step)
    run.same()


@on_ranks(4)
def test_another_number_of_ranks():
    run = Run("adamw")
    state = get_optimizer_state_dict(run.model, run.second, options=FULL)
    weights = full_state_dict(run.model)
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("replicate", "shard"))
    run.model = fully_shard(seeded(double(Partly)), mesh)  # two pieces, and one group instead of two
    load_full_state_dict(run.model, weights)
    run.second, run.many = made("adamw", run.model), differentiated(run.model)
    set_optimizer_state_dict(run.model, run.second, state, options=FULL)
    run.same()
    run.more(2)
    run.same()


@on_ranks(2)
def test_before_the_first_step_there_are_zeros():
    run = Run("adamw", steps=0)
    state = get_optimizer_state_dict(run.model, run.second, options=FULL)
    assert all(not value.asnumpy().any() for inside in state["state"].values() for value in inside.values())
    sharded = get_optimizer_state_dict(run.model, run.second)["state"]["last.weight"]["exp_avg"]
    assert sharded._spec is run.model.last.weight._spec and not whole(sharded).any()
    run.more(0)
    run.same()


@on_ranks(2)
def test_groups_and_optimizers_may_be_cut_in_another_way():
    run = Run("adamw")
    state = get_optimizer_state_dict(run.model, run.second, options=FULL)
    parameters = run.model.trainable_params()
    with SkipDTensorDispatch():
        parts = [
            optim.AdamW([{"params": parameters[:1], "lr": 3.0}, {"params": parameters[1:3]}], lr=5.0),
            optim.AdamW(parameters[3:], lr=3.0),
        ]
    set_optimizer_state_dict(run.model, parts, state, options=FULL)
    again = get_optimizer_state_dict(run.model, parts, options=FULL)
    assert [len(group["params"]) for group in again["param_groups"]] == [1, 2, len(parameters) - 3]
    assert {group["lr"] for group in again["param_groups"]} == {float(np.float32(0.02))}
    same_state({**again, "param_groups": state["param_groups"]}, state, 0.0)
    flat = get_optimizer_state_dict(
        run.model, parts, options=StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    )
    assert flat["param_groups.last.weight.betas"] == (0.9, 0.999) and "state.last.weight.exp_avg" in flat
    mixed = {**state, "param_groups": [
        {**state["param_groups"][0], "params": [name], "lr": float(at)}
        for at, name in enumerate(state["param_groups"][0]["params"])
    ]}  # fmt: skip
    with pytest.raises(ValueError, match="was saved with .* others of its group with"):
        set_optimizer_state_dict(run.model, run.second, mixed, options=FULL)
    with SkipDTensorDispatch():  # grouped as they were saved
        alone = optim.AdamW([{"params": [each]} for each in parameters])
    set_optimizer_state_dict(run.model, alone, mixed, options=FULL)
    assert [group["lr"].asnumpy().item() for group in alone.param_groups] == [*map(float, range(len(parameters)))]
    other = copied(state)
    other["state"]["last.weight"]["state_step"] = Tensor(5, mindspore.int32)
    with pytest.raises(ValueError, match="of one AdamW were saved with different state_step, from 2 to 5"):
        set_optimizer_state_dict(run.model, run.second, other, options=FULL)
    with SkipDTensorDispatch():
        each = [optim.AdamW([parameter]) for parameter in parameters]
    set_optimizer_state_dict(run.model, each, other, options=FULL)
    again = get_optimizer_state_dict(run.model, each, options=FULL)["state"]
    steps = {name: inside["state_step"].asnumpy().item() for name, inside in again.items()}
    assert steps.pop("last.weight") == 5 and {*steps.values()} == {2}
    with SkipDTensorDispatch():
        old = nn.Momentum([{"params": parameters[:2], "lr": 0.5}, {"params": parameters[2:]}], 0.1, 0.9)
    groups = get_optimizer_state_dict(run.model, old)["param_groups"]
    assert [(len(group["params"]), group["learning_rate"]) for group in groups] == [
        (2, 0.5),
        (len(parameters) - 2, float(np.float32(0.1))),
    ]


@on_ranks(2)
def test_what_does_not_fit_is_refused():
    run = Run("adamw", steps=1)
    state = get_optimizer_state_dict(run.model, run.second, options=FULL)
    wrong = copied(state)
    wrong["param_groups"][0]["params"].remove("last.bias")
    wrong["param_groups"][0]["params"].append("other")
    with pytest.raises(ValueError, match=r"1 parameters .* missing in the state \(last.bias\), 1 in it .* \(other\)"):
        set_optimizer_state_dict(run.model, run.second, wrong, options=FULL)
    set_optimizer_state_dict(run.model, run.second, wrong, options=StateDictOptions(full_state_dict=True, strict=False))
    less = copied(state)
    less["state"]["last.weight"]["other"] = less["state"]["last.weight"].pop("exp_avg")
    with pytest.raises(ValueError, match=r"misses the states \['exp_avg'\], and has \['other'\]"):
        set_optimizer_state_dict(run.model, run.second, less, options=FULL)
    less["state"]["last.weight"]["exp_avg_sq"] = 2 * less["state"]["last.weight"]["exp_avg_sq"]
    set_optimizer_state_dict(run.model, run.second, less, options=StateDictOptions(full_state_dict=True, strict=False))
    rest = get_optimizer_state_dict(run.model, run.second, options=FULL)["state"]["last.weight"]
    for key, expected in (
        ("exp_avg", state["state"]["last.weight"]["exp_avg"]),
        ("exp_avg_sq", less["state"]["last.weight"]["exp_avg_sq"]),
    ):
        close(rest[key].asnumpy(), expected.asnumpy(), key, 0.0)
    set_optimizer_state_dict(run.model, made("adamw", run.model), copied(state), options=FULL)
    state["state"]["last.weight"]["exp_avg"] = Tensor(np.zeros((2, 2)))
    with pytest.raises(ValueError, match=r"'last.weight.exp_avg' has shape \(2, 2\), the model's is \(3, 7\)"):
        set_optimizer_state_dict(run.model, run.second, state, options=FULL)
    early = seeded(Net)
    optimizer = optim.AdamW(early.trainable_params())
    fully_shard(early, data_mesh())
    with pytest.raises(ValueError, match="create the optimizer after fully_shard"):
        get_optimizer_state_dict(early, optimizer)
    with SkipDTensorDispatch():
        get_optimizer_state_dict(early, optim.AdamW(early.trainable_params()))
    with pytest.raises(ValueError, match="are not the model's"):
        get_optimizer_state_dict(run.model, made("adamw", seeded(Net)))
    with pytest.raises(TypeError, match="expected an optimizer of mindspore.experimental.optim.* got Linear"):
        get_optimizer_state_dict(run.model, mint.nn.Linear(2, 2))


@on_ranks(2)
def test_mints_optimizers_have_their_largest_in_groups():
    """Ascend steps with them; what they hold is the same everywhere."""
    _, model = pair(lambda: Net(1))
    with SkipDTensorDispatch():
        optimizer = mint.optim.AdamW(model.trainable_params(), amsgrad=True)
    rows = np.arange(21, dtype=np.float32).reshape(3, 7)
    state = get_optimizer_state_dict(model, optimizer, options=FULL)
    assert list(state["state"]["last.weight"]) == ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "state_step"]
    state["state"]["last.weight"]["max_exp_avg_sq"] = Tensor(rows)
    set_optimizer_state_dict(model, optimizer, state, options=FULL)
    again = get_optimizer_state_dict(model, optimizer, options=FULL)
    close(again["state"]["last.weight"]["max_exp_avg_sq"].asnumpy(), rows, "largest", 0.0)
    assert again["param_groups"] == state["param_groups"] and "max_exp_avg_sq" not in again["param_groups"][0]
