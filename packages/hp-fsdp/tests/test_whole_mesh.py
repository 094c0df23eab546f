"""Parameters that `shard_module` or `distribute_module` laid out on a mesh with the axes of data parallelism."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fsdp_models import batch, close
from torch import nn

from hp_dtensor import (
    DTensor,
    Layout,
    RaggedShard,
    Replicate,
    Shard,
    distribute_module,
    init_device_mesh,
    init_empty_weights,
    init_parameters,
    shard_module,
)
from hp_fsdp import clip_grad_norm_, full_state_dict, fully_shard, get_model_state_dict, hsdp, set_model_state_dict
from hp_platform import count_collectives
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
R = Replicate()


class Mlp(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5, dtype=torch.float64)
        self.up, self.down = nn.Linear(5, hidden, dtype=torch.float64), nn.Linear(hidden, 5, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, hidden: int = 7) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp(hidden) for _ in range(2))
        self.head = nn.Linear(5, 3, dtype=torch.float64)
        self.table = nn.Linear(5, 6, bias=False, dtype=torch.float64)  # its rows are divided over dp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x) + self.table(x)[..., :3]


def plan(layout: Any) -> dict[str, Any]:
    return {
        "forward": {
            "input": layout("dp", "None"),
            "output": layout("dp", "None"),
            "layers.*.output": layout("dp", "None"),
        },
        "parameter": {
            "layers.*.up.weight": layout("tp", "None"),
            "layers.*.up.bias": layout("tp"),
            "layers.*.down.weight": layout("None", "tp"),
            "table.weight": layout("dp", "None"),
        },
    }


def program_loss(out: torch.Tensor) -> torch.Tensor:
    return out.pow(2).mean() + out.sin().mean()


def compared(model: nn.Module, reference: nn.Module, mesh: Any, steps: int = 2, own: bool = True) -> None:
    """Trains both and compares the norm of gradients, gradients and weights; the model takes its rows over dp."""
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in (reference, model)]
    for step in range(steps):
        whole, _ = batch(step)
        rows = whole.chunk(mesh.size("dp"))[mesh.get_local_rank("dp")] if own else whole
        program_loss(reference(whole)).backward()
        program_loss(model(rows)).backward()
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            if p.grad is None or q.grad is None:
                assert p.grad is None and q.grad is None, name
            else:
                close(p.grad.full_tensor(), q.grad, name)
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        close(clip_grad_norm_(model.parameters(), 0.05), expected, "norm")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, tensor in full_state_dict(model).items():
        close(tensor, reference.state_dict()[name], name)


def reference_model(hidden: int = 7) -> Model:
    torch.manual_seed(3)
    with torch.device(device_type()):  # where init_parameters draws, too
        return Model(hidden)


@on_ranks(2, 4)
@pytest.mark.parametrize("meta", [False, True])
def test_a_declared_layout_on_both_axes_is_sharded_over_dp(ranks: int, meta: bool):
    layout = Layout((2, ranks // 2), ("dp", "tp"))
    mesh = init_device_mesh(device_type(), (2, ranks // 2), mesh_dim_names=("dp", "tp"))
    reference = reference_model()
    if meta:
        with init_empty_weights():
            model = Model()
    else:
        model = copy.deepcopy(reference)
    shard_module(model, plan(layout))
    for layer in model.layers:
        fully_shard(layer, mesh["dp"])
    fully_shard(model, mesh["dp"])
    if meta:
        torch.manual_seed(3)
        init_parameters(model)
    weight = model.layers[0].up.weight
    assert isinstance(weight.placements[0], RaggedShard) and weight.placements[1] == Shard(0)
    assert model.table.weight.placements == (Shard(0), R), "it is divided over dp by its own layout"
    compared(model, reference, mesh)
    with count_collectives() as counts:
        program_loss(model(batch()[0].chunk(2)[mesh.get_local_rank("dp")])).backward()
    assert counts["reduce_scatter"] >= 3, "gradients are reduced with the group's, not one by one before"


@on_ranks(4)
def test_replicas_and_shards_of_a_declared_layout():
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("rep", "dp"))
    reference = reference_model()
    model = copy.deepcopy(reference)
    flat = (mesh, [Shard(0), Shard(0)])
    shard_module(model, {"forward": {"input": flat, "output": flat}})
    fully_shard(model, mesh)
    assert model.head.weight.device_mesh == mesh and isinstance(model.head.weight.placements[1], RaggedShard)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (reference, model)]
    for step in range(2):
        whole, own = batch(step)
        program_loss(reference(whole)).backward()
        program_loss(model(own)).backward()
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            close(p.grad.full_tensor(), q.grad, name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
def test_uses_that_do_not_vary_are_counted_once():
    """A penalty on the weights is the same on all ranks; the data's part of a gradient is not."""
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    whole, own = batch()

    class Penalty(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return program_loss(self.inner(x)) + sum(p.pow(2).sum() for p in self.inner.parameters())

    other = distribute_module(copy.deepcopy(reference_model()), mesh)
    both = fully_shard(Penalty(other), mesh)
    plain = Penalty(reference_model())
    both(DTensor.from_local(own, mesh, [Shard(0)])).backward()
    plain(whole).backward()
    for (name, p), q in zip(both.named_parameters(), plain.parameters(), strict=True):
        close(p.grad.full_tensor(), q.grad, name)


@on_ranks(2)
def test_states_go_out_and_in():
    mesh = init_device_mesh(device_type(), (2, 1), mesh_dim_names=("dp", "tp"))
    models = []
    for _ in range(2):
        model = shard_module(reference_model(), plan(Layout((2, 1), ("dp", "tp"))))
        models.append(fully_shard(model, mesh["dp"]))
    with torch.no_grad():
        for p in models[0].parameters():
            p.add_(1.0)
    set_model_state_dict(models[1], get_model_state_dict(models[0]))
    for name, tensor in full_state_dict(models[1]).items():
        close(tensor, full_state_dict(models[0])[name], name)
        close(tensor, reference_model().state_dict()[name] + 1, name)


@on_ranks(2)
def test_a_copy_of_a_sharded_parameter_is_refused():
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    model = fully_shard(nn.Linear(3, 3, device=device_type()), mesh)
    other = nn.Linear(3, 3, device=device_type())
    other.weight = copy.deepcopy(model.weight)
    with pytest.raises(ValueError, match=r"'weight' is placed \(RaggedShard.*as a copy of one that is sharded"):
        fully_shard(other, mesh)
    second = fully_shard(nn.Linear(3, 3, device=device_type()), mesh)
    set_model_state_dict(second, get_model_state_dict(model))
    copied = fully_shard(copy.deepcopy(nn.Linear(3, 3, device=device_type())), mesh)
    set_model_state_dict(copied, get_model_state_dict(model))
    for net in (second, copied):
        close(full_state_dict(net)["weight"], full_state_dict(model)["weight"], "weight")


@on_ranks(2, 4)
def test_hsdp_takes_the_axes_from_layouts(ranks: int):
    layout = Layout((2, ranks // 2), ("dp", "tp"))
    mesh = init_device_mesh(device_type(), (2, ranks // 2), mesh_dim_names=("dp", "tp"))
    reference = reference_model()
    model = shard_module(copy.deepcopy(reference), plan(layout))
    for layer in model.layers:
        hsdp(layer, threshold=0, optimizer_level="level3")
    hsdp(model, threshold=0, comm_fusion=True)
    weight = model.layers[0].up.weight
    assert isinstance(weight.placements[0], RaggedShard) and weight.device_mesh == mesh
    compared(model, reference, mesh)


@on_ranks(4)
def test_hsdp_of_replicas_and_of_styles():
    from hp_styles import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh(device_type(), (4, 1), mesh_dim_names=("dp", "tp"))
    reference = reference_model()
    rows = (mesh, [Shard(0), R])
    model = shard_module(
        copy.deepcopy(reference),
        {"forward": {"input": rows, "output": rows}, "parameter": {"table.weight": (mesh, [R, Shard(0)])}},
    )
    hsdp(model, 2, 0)
    assert model.table.weight.device_mesh.shape == (2, 2, 1)
    compared(model, reference, mesh, 1)
    reference = reference_model(8)
    model = copy.deepcopy(reference)
    tp = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    for layer in model.layers:
        parallelize_module(layer, tp["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        hsdp(layer, 1)  # plain data parallelism
    hsdp(model, threshold=0)
    assert model.layers[0].up.weight.placements == (R, Shard(0))
    compared(model, reference, tp, 1)
