"""Parameters that are DTensors on another axis of the same mesh, and the global norm of gradients."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from fsdp_models import ROWS, close, loss_of, same_gradients, same_weights, seeded
from torch import nn

from hp_dtensor import DeviceMesh, DTensor, RaggedShard, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_dtensor.torch.api import distribute_parameter
from hp_fsdp import clip_grad_norm_, full_state_dict, fully_shard, global_grad_norm, load_full_state_dict
from hp_platform import count_collectives
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.device


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 12), nn.Linear(12, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Parallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(6) for _ in range(2))
        self.head = nn.Linear(6, 4, bias=False)
        self.scale = nn.Parameter(torch.ones(6))  # stays plain: it is on the data axis only
        self.sequence = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        if isinstance(self.blocks[0].norm.weight, DTensor):
            mesh = self.blocks[0].norm.weight.device_mesh["tp"]
            x = DTensor.from_local(x, mesh, [Replicate()])
            if self.sequence:
                x = x.redistribute(placements=[Shard(1)])
        for block in self.blocks:
            x = block(x)
            if isinstance(x, DTensor):
                x = x.redistribute(placements=[Shard(1) if self.sequence else Replicate()])
        x = self.head(x)
        return x.full_tensor() if isinstance(x, DTensor) else x


def cut(module: nn.Module, name: str, mesh: DeviceMesh, placement: Shard | Replicate) -> None:
    whole = module._parameters[name]
    made = distribute_tensor(whole.detach(), mesh, [placement])
    setattr(module, name, nn.Parameter(made))


def parallelize(model: Parallel, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        for name in ("weight", "bias"):
            cut(block.norm, name, mesh, Replicate())
        cut(block.up, "weight", mesh, Shard(0))
        cut(block.up, "bias", mesh, Shard(0))
        cut(block.down, "weight", mesh, Shard(1))
    cut(model.head, "weight", mesh, Replicate())


def parts(ranks: int) -> DeviceMesh:
    return init_device_mesh(device_type(), (ranks // 2, 2), mesh_dim_names=("dp_shard", "tp"))


def data(mesh: DeviceMesh, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    whole = torch.randn(ROWS, 4, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    whole = whole.to(device_type())
    return whole, whole.chunk(mesh.size("dp_shard"))[mesh.get_local_rank("dp_shard")]


def build(mesh: DeviceMesh, sequence: bool) -> tuple[nn.Module, nn.Module]:
    reference = seeded(Parallel)
    model = copy.deepcopy(reference)
    model.sequence = sequence
    parallelize(model, mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh["dp_shard"])
    return reference, fully_shard(model, mesh["dp_shard"])


@pytest.mark.smoke
@on_ranks(2, 4, thorough=(8,))
@pytest.mark.parametrize("sequence", [False, True])
def test_training_on_two_axes(ranks: int, sequence: bool):
    mesh = parts(ranks)
    reference, model = build(mesh, sequence)
    spec = model.blocks[0].down.weight._spec
    assert spec.mesh is mesh or spec.mesh == mesh
    assert isinstance(spec.placements[0], RaggedShard) and spec.placements[1] == Shard(1)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in (reference, model)]
    for step in range(3):
        whole, own = data(mesh, step)
        loss_of(reference(whole)).backward()
        loss_of(model(own)).backward()
        same_gradients(model, reference)
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        with count_collectives() as counts:
            norm = clip_grad_norm_(model.parameters(), 0.05)
        assert dict(counts) == {"all_reduce": 1}
        close(norm, expected, "norm")
        same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        same_weights(model, reference)


@on_ranks(4)
def test_whole_tensors_load_into_both_axes():
    mesh = parts(4)
    _, model = build(mesh, False)
    other = {name: torch.randn_like(tensor) for name, tensor in seeded(Parallel).state_dict().items()}
    for tensor in other.values():
        torch.distributed.broadcast(tensor, 0)
    load_full_state_dict(model, other)
    state = full_state_dict(model)
    assert all(torch.equal(state[name], tensor) for name, tensor in other.items())


@on_ranks(4)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_norms_of_every_order(norm_type: float):
    mesh = parts(4)
    reference, model = build(mesh, False)
    whole, own = data(mesh, 0)
    loss_of(reference(whole)).backward()
    loss_of(model(own)).backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()], norm_type)
    close(global_grad_norm(model.parameters(), norm_type), expected, "norm")


@on_ranks(4)
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_torchs_own_clipping_gives_the_norm_of_a_single_process(norm_type: float, foreach: bool):
    mesh = parts(4)
    reference, model = build(mesh, False)  # parameters on ("dp_shard", "tp"), and one on "dp_shard" alone
    whole, own = data(mesh, 0)
    loss_of(reference(whole)).backward()
    loss_of(model(own)).backward()
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01, norm_type)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type, foreach=foreach)
    close(norm, expected, "norm")
    same_gradients(model, reference)


@on_ranks(2)
def test_a_norm_that_is_not_finite_is_an_error_if_wanted():
    model = fully_shard(nn.Linear(3, 3, device=device_type()))
    assert global_grad_norm(model.parameters()) == 0
    model(torch.full((1, 3), float("inf"), device=device_type())).sum().backward()
    with pytest.raises(RuntimeError, match=r"norm of order 2.0 is (inf|nan), so they cannot be clipped to 1.0"):
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    finite = {name: bool(each.grad.full_tensor().isfinite().all()) for name, each in model.named_parameters()}
    assert finite == {"weight": False, "bias": True}


@on_ranks(2)
def test_a_lower_learning_rate_than_one_that_overflows():
    torch.manual_seed(0)
    kept, x = nn.Linear(3, 3).state_dict(), torch.randn(4, 3, device=device_type())
    for rate in (1e30, 1e-3):
        model = nn.Linear(3, 3, device=device_type())
        model.load_state_dict(kept)
        model = fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        for step in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            refused = pytest.raises(RuntimeError, match="is not finite, or lower the learning rate")
            with refused if step and rate > 1 else contextlib.nullcontext():
                norm = clip_grad_norm_(model.parameters(), 1e30, error_if_nonfinite=True)
            optimizer.step()
    assert 0 < norm < 10


@on_ranks(4)
def test_axes_of_different_meshes_cannot_be_joined():
    mesh = parts(4)
    model = seeded(Parallel)
    parallelize(model, mesh["tp"])
    with pytest.raises(ValueError, match=r"'blocks.0.norm.weight' is a DTensor on .*Both must be slices of one mesh"):
        fully_shard(model, init_device_mesh(device_type(), (4,), mesh_dim_names=("dp_shard",)))
    fully_shard(model, mesh["dp_shard"])
    reference = seeded(Parallel)
    for net, x in zip((reference, model), data(mesh, 0), strict=True):
        loss_of(net(x)).backward()
    same_gradients(model, reference)


@on_ranks(4)
def test_an_optimizer_and_a_hook_of_before_tensor_parallelism() -> None:
    mesh = parts(4)
    reference = seeded(Parallel)
    model, optimizers, seen = copy.deepcopy(reference), [], ([], [])
    for net, to in zip((reference, model), seen, strict=True):
        optimizers.append(torch.optim.Adam(net.parameters(), lr=0.01))
        net.blocks[0].up.weight.register_hook(lambda g, to=to: to.append(g) or g * 2)
    for name, parameter in model.named_parameters():
        if name != "scale":
            cut_here = {"up.weight": 0, "up.bias": 0, "down.weight": 1}.get(name.removeprefix("blocks.")[2:])
            distribute_parameter(parameter, mesh["tp"], [Replicate() if cut_here is None else Shard(cut_here)])
    for block in model.blocks:
        fully_shard(block, mesh["dp_shard"])
    fully_shard(model, mesh["dp_shard"])
    for step in range(2):
        for net, x, optimizer in zip((reference, model), data(mesh, step), optimizers, strict=True):
            loss_of(net(x)).backward()
            optimizer.step()
            optimizer.zero_grad()
    same_weights(model, reference)
    assert len(seen[0]) == 2 and all(gradient.shape == (12, 6) for gradient in seen[0] + seen[1])
