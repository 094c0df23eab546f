"""torch.distributed.checkpoint saves and loads our states, and between ours and torch's, for other numbers of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_models import Net, batch, close, loss_of, rows, same_weights, seeded
from torch import nn

from hp_dtensor import (
    Partial,
    Replicate,
    Shard,
    StridedShard,
    distribute_tensor,
    init_device_mesh,
)
from hp_fsdp import (
    StateDictOptions,
    fully_shard,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from hp_testing import device_type, on_ranks, run_ranks

pytestmark = [
    pytest.mark.framework("torch"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
    pytest.mark.filterwarnings("ignore:HCCL doesn't support gather"),
]


class Deep(Net):
    """With a scalar and a parameter of three dims, of which ranks own runs that cut rows."""

    def __init__(self, scalar: bool) -> None:
        super().__init__(blocks=2)
        self.scale = nn.Parameter(torch.tensor(1.5) if scalar else torch.tensor([1.5]))
        self.cube = nn.Parameter(torch.randn(3, 5, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale + self.cube.mean()


def build(kind: str, values: bool, scalar: bool) -> tuple[Any, Any]:
    """A model sharded by ours, by torch, on two axes of ours, or not; with other values where they are to be loaded."""
    model = seeded(lambda: Deep(scalar), torch.float64 if scalar else torch.float32)  # FSDP2 reduces by HCCL, too
    if not values:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(9.0)
    if kind == "torch":
        from torch.distributed.fsdp import fully_shard as torchs

        for block in model.blocks:
            torchs(block)
        torchs(model)
    elif kind != "alone":
        mesh = None
        if kind == "two axes":
            mesh = init_device_mesh(device_type(), (2, dist.get_world_size() // 2), ("replicate", "shard"))
        for block in model.blocks:
            fully_shard(block, mesh)
        fully_shard(model, mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def functions(kind: str) -> tuple[Any, Any, Any, Any]:
    if kind in ("ours", "two axes"):
        return get_model_state_dict, set_model_state_dict, get_optimizer_state_dict, set_optimizer_state_dict
    from torch.distributed.checkpoint import state_dict as torchs

    return (
        torchs.get_model_state_dict,
        torchs.set_model_state_dict,
        torchs.get_optimizer_state_dict,
        torchs.set_optimizer_state_dict,
    )


def step(model: Any, optimizer: Any, number: int, whole: bool = False) -> None:
    x = batch(number)[0].to(next(model.parameters()).dtype)
    loss_of(model(x if whole else rows(x))).backward()
    optimizer.step()
    optimizer.zero_grad()


def save(kind: str, path: str, scalar: bool) -> None:
    model, optimizer = build(kind, values=True, scalar=scalar)
    for number in range(2):
        step(model, optimizer, number, whole=kind == "alone")
    get_model, _, get_optimizer, _ = functions(kind)
    state = {"model": get_model(model), "optimizer": get_optimizer(model, optimizer)}
    dcp.save(state, checkpoint_id=path)


def load(kind: str, path: str, scalar: bool) -> None:
    """Loads, compares with a single process after the saved steps, and once more after a step."""
    model, optimizer = build(kind, values=False, scalar=scalar)
    get_model, set_model, get_optimizer, set_optimizer = functions(kind)
    state = {"model": get_model(model), "optimizer": get_optimizer(model, optimizer)}
    dcp.load(state, checkpoint_id=path)
    set_model(model, state["model"])
    set_optimizer(model, optimizer, state["optimizer"])
    reference, other = build("alone", values=True, scalar=scalar)
    for number in range(2):
        step(reference, other, number, whole=True)
    limit = 1e-10 if scalar else 1e-4
    for _ in range(2):
        if kind in ("ours", "two axes"):
            same_weights(model, reference, limit)
        else:
            for (name, expected), got in zip(reference.named_parameters(), model.parameters(), strict=True):
                close(got.full_tensor() if hasattr(got, "full_tensor") else got, expected, name, limit)
        step(model, optimizer, 2, whole=kind == "alone")
        step(reference, other, 2, whole=True)


@pytest.mark.parametrize(
    ("saver", "savers", "loader", "loaders"),
    [
        pytest.param("ours", 2, "ours", 3, marks=pytest.mark.thorough),
        pytest.param("ours", 3, "ours", 1, marks=pytest.mark.thorough),
        ("ours", 3, "torch", 2),
        ("torch", 2, "ours", 3),
        pytest.param("ours", 2, "alone", 1, marks=pytest.mark.thorough),
        pytest.param("alone", 1, "ours", 2, marks=pytest.mark.thorough),
        ("two axes", 4, "ours", 2),
        ("torch", 3, "two axes", 4),
    ],
)
def test_saved_by_one_and_loaded_by_another(saver, savers, loader, loaders, tmp_path):
    scalar = "torch" not in (saver, loader)  # which FSDP2 refuses
    run_ranks(savers, save, saver, str(tmp_path), scalar)
    run_ranks(loaders, load, loader, str(tmp_path), scalar)


LAYOUTS = {
    "rows": [Replicate(), Shard(0)],
    "columns": [Replicate(), Shard(1)],
    "both": [Shard(0), Shard(1)],
    "one dim twice": [Shard(0), Shard(0)],
    "strided": [StridedShard(0, 3), Replicate()],
    "replicated": [Replicate(), Replicate()],
}


@on_ranks(4)
def test_tensors_in_any_layout_load_into_any_other(tmp_path):
    """Uneven: nothing divides 9 and 5; on a mesh of 2 x 2 the last of the rows' owners has one of them."""
    mesh = init_device_mesh(device_type(), (2, 2), ("dp", "tp"))
    whole = torch.arange(45.0, device=device_type()).view(9, 5)
    state: dict[str, Any] = {name: distribute_tensor(whole + i, mesh, p) for i, (name, p) in enumerate(LAYOUTS.items())}
    state["empty"] = distribute_tensor(torch.zeros(0, 3, device=device_type()), mesh, [Replicate(), Shard(1)])
    path = str(tmp_path)
    dcp.save(state, checkpoint_id=path)
    moved = list(LAYOUTS.values())[1:] + list(LAYOUTS.values())[:1]
    into: dict[str, Any] = {
        name: distribute_tensor(torch.zeros_like(whole), mesh, p) for name, p in zip(LAYOUTS, moved, strict=True)
    }
    into["empty"] = distribute_tensor(torch.zeros(0, 3, device=device_type()), mesh, [Shard(1), Replicate()])
    dcp.load(into, checkpoint_id=path)
    for i, name in enumerate(LAYOUTS):
        assert torch.equal(into[name].full_tensor(), whole + i), name
    from torch.distributed.device_mesh import init_device_mesh as torchs_mesh
    from torch.distributed.tensor import Shard as TorchsShard
    from torch.distributed.tensor import distribute_tensor as torchs

    theirs = {
        name: torchs(torch.zeros_like(whole), torchs_mesh(device_type(), (4,)), [TorchsShard(1)]) for name in LAYOUTS
    }
    dcp.load(theirs, checkpoint_id=path)
    for i, name in enumerate(LAYOUTS):
        assert torch.equal(theirs[name].full_tensor(), whole + i), name


@on_ranks(2)
def test_parts_of_a_sum_and_async_save_are_refused_and_host_copies_saved(tmp_path):
    from hp_dtensor import DTensor

    mesh = init_device_mesh(device_type(), (2,))
    part = DTensor.from_local(torch.ones(3, device=device_type()), mesh, [Partial()])
    with pytest.raises(dcp.api.CheckpointException, match="has a Partial.*reduce_partial"):
        dcp.save({"part": part}, checkpoint_id=str(tmp_path / "part"))
    model, _ = build("ours", values=True, scalar=True)
    reference = build("alone", values=True, scalar=True)[0]
    state, path = get_model_state_dict(model, options=StateDictOptions(cpu_offload=True)), str(tmp_path / "host")
    if device_type() == "cpu":
        with pytest.raises(NotImplementedError, match="async_save.*cpu_offload"):
            dcp.async_save({"x": distribute_tensor(torch.ones(2, 4), mesh, [Shard(1)])}, checkpoint_id=path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    dcp.save(state, checkpoint_id=path)
    dcp.load(get_model_state_dict(model), checkpoint_id=path)
    same_weights(model, reference)
