"""deterministic=True: the same bits for any number of ranks."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_models import Net, batch, data_mesh, loss_of, pair, same_gradients, seeded, train
from micro_batches import hash_of, loss_of_micro_batch, shard, weights_after
from test_tensor_parallel import Parallel, parallelize, parts
from torch import nn

from hp_dtensor import init_device_mesh
from hp_fsdp import CPUOffloadPolicy, clip_grad_norm_, fully_shard, global_grad_norm
from hp_testing import device_type, on_ranks, run_ranks

pytestmark = [pytest.mark.device, pytest.mark.framework("torch")]

JOBS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "accumulated without communication": ({}, (2, 3, 4)),
    "accumulated until the last backward": ({"way": "not last"}, (3,)),
    "replicas": ({"replicas": 2}, (4,)),
    "fused": ({"optimizer": "fused"}, (1, 3)),
    "loop": ({"optimizer": "loop"}, (3,)),
    "mixed precision": ({"low": True}, (1, 3)),
    "by parameter": ({"comm_fusion": False}, (3,)),
    "on the host": ({"offload_policy": CPUOffloadPolicy()}, (3,)),
    "kept": ({"reshard_after_forward": False}, (2,)),
    "resharded to two": ({"reshard_after_forward": 2}, (4,)),
}
EIGHT = {
    "eight": ({}, (8,)),
    "eight, replicas": ({"replicas": 2}, (8,)),
    "eight, fused": ({"optimizer": "fused"}, (1, 8)),
    "eight, mixed precision": ({"low": True}, (1, 8)),
}
SAME = (
    "fused",
    "mixed precision",
    "eight, fused",
    "eight, mixed precision",
)  # other numbers than the first job's, by their definition


@cache
def first() -> dict[str, Any]:
    return run_ranks(1, weights_after)[0]


@pytest.mark.parametrize("name", [*JOBS, *(pytest.param(name, marks=pytest.mark.thorough) for name in EIGHT)])
def test_weights_and_norms_have_the_same_bits(name: str):
    options, sizes = (JOBS | EIGHT)[name]
    expected = None if name in SAME or device_type() != "cpu" and name == "on the host" else first()
    for ranks in sizes:
        for result in run_ranks(ranks, weights_after, **options):
            expected = expected or result
            assert result == expected, f"{name} on {ranks} ranks"


def tensor_parallel_weights(sequence: bool) -> dict[str, Any]:
    """Trains a model that is cut in two on "tp" on all ranks; its micro-batches are shared on the other axis."""
    mesh = parts(dist.get_world_size())
    model = seeded(Parallel, torch.float32)
    model.sequence = sequence
    parallelize(model, mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh["dp_shard"], deterministic=True)
    fully_shard(model, mesh["dp_shard"], deterministic=True)
    model.set_reduce_op_type("sum")
    made = torch.optim.AdamW(model.parameters(), lr=0.01)
    count = 8 // mesh.size("dp_shard")
    norms = []
    for step in range(2):
        for index in range(count):
            number = mesh.get_local_rank("dp_shard") * count + index
            x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(100 * step + number)).to(device_type())
            model.set_requires_gradient_sync(index == count - 1)
            (loss_of(model(x)) / 8).backward()
        norms.append(clip_grad_norm_(model.parameters(), 0.01).item())
        made.step()
        made.zero_grad()
    return {"hash": hash_of(model), "norms": norms}


@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("sequence", [False, True])
def test_on_top_of_tensor_parallel(sequence: bool, ranks: int):
    expected = run_ranks(2, tensor_parallel_weights, sequence)[0]
    assert all(result == expected for result in run_ranks(ranks, tensor_parallel_weights, sequence))


def test_without_it_they_differ():
    results = [run_ranks(ranks, weights_after, deterministic=False)[0]["hash"] for ranks in (1, 3)]
    assert results[0] != results[1]


@on_ranks(1, 3, 4)
def test_gradients_are_those_of_a_single_process(ranks: int):
    train(*pair(deterministic=True))
    if ranks == 4:
        mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        train(*pair(deterministic=True, mesh=mesh))


@on_ranks(2)
def test_means_over_accumulated_micro_batches():
    reference, model = pair(deterministic=True)
    for step in range(3):
        whole, own = batch(step)
        loss_of(reference(whole)).backward()
        model.set_requires_gradient_sync(step == 2)
        loss_of(model(own)).backward()
        if step < 2:
            assert all(parameter.grad is None for parameter in model.parameters())
    same_gradients(model, reference)
    assert torch.allclose(
        global_grad_norm(model.parameters(), 1.0),
        sum(p.grad.abs().sum() for p in reference.parameters()),  # type: ignore[arg-type]
    )


class Rare(nn.Module):
    """A block that some micro-batches skip."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, skip: bool) -> torch.Tensor:
        x = self.first(x)
        return self.blocks[1](x if skip else self.blocks[0](x))


@on_ranks(1, 2)
def test_a_group_that_some_micro_batches_skip():
    reference, model = pair(Rare, deterministic=True)
    for step in range(4):
        whole, own = batch(step)
        loss_of(reference(whole, step != 1)).backward()
        model.set_requires_gradient_sync(step == 3)
        loss_of(model(own, step != 1)).backward()
    same_gradients(model, reference)
    assert model.unused.weight.grad is None


@on_ranks(2)
def test_gradients_that_were_not_dropped():
    _, model = pair(deterministic=True)
    loss_of(model(batch()[1])).backward()
    with pytest.raises(
        RuntimeError, match=r"still has the gradient that the last.*set_requires_gradient_sync\(False\)"
    ):
        loss_of(model(batch()[1])).backward()
    model.zero_grad(set_to_none=False)
    loss_of(model(batch()[1])).backward()
    model.zero_grad()
    for last in (False, True):  # two micro-batches of a step
        model.set_requires_gradient_sync(last)
        loss_of(model(batch()[1])).backward()


@on_ranks(2)
def test_ranks_with_different_numbers_of_micro_batches():
    mesh = init_device_mesh(device_type(), (2, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    _, model = pair(deterministic=True, mesh=mesh)
    loss_of(model(batch()[1])).backward()  # a step in which they ran as many
    model.zero_grad()
    if dist.get_rank():
        model.set_requires_gradient_sync(False)
        loss_of(model(batch()[1])).backward()
    model.set_requires_gradient_sync(True)
    with pytest.raises(ValueError, match=r"this rank ran [12] micro-batches since the last step, others from 1 to 2"):
        loss_of(model(batch()[1])).backward()
    model.zero_grad()
    reference = seeded(Net)
    parts = torch.stack(batch()[0].chunk(4))
    loss_of(reference(parts.flatten(0, 1))).backward()
    for micro_batch, part in enumerate(parts.chunk(2)[dist.get_rank()]):  # two each, consecutive ones
        model.set_requires_gradient_sync(micro_batch == 1)
        (loss_of(model(part)) / 2).backward()
    same_gradients(model, reference)


@on_ranks(1)
def test_a_graph_that_runs_backward_again():
    model = shard(data_mesh(), deterministic=True)
    model.set_requires_gradient_sync(False)
    loss = loss_of_micro_batch(model, 0, 0)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="got gradients after .* were complete.*: run forward again instead"):
        loss.backward()
    model.zero_grad()
    model.set_requires_gradient_sync(True)
    loss_of_micro_batch(model, 0, 0).backward()
    anew = shard(data_mesh(), deterministic=True)
    loss_of_micro_batch(anew, 0, 0).backward()
    for one, other in zip(model.parameters(), anew.parameters(), strict=True):
        assert one.grad is None or torch.equal(one.grad.to_local(), other.grad.to_local())


@on_ranks(2)
def test_norms():
    model = shard(data_mesh(), deterministic=True)
    loss_of_micro_batch(model, 0, 0).backward()
    with pytest.raises(NotImplementedError, match=r"norm_type=3.0 is not the same for any number of ranks"):
        global_grad_norm(model.parameters(), 3)
    largest = max(p.grad.full_tensor().abs().max() for p in model.parameters() if p.grad is not None)
    assert global_grad_norm(model.parameters(), float("inf")) == largest
    other = shard(data_mesh())
    with pytest.raises(ValueError, match="some parameters are sharded with deterministic=True, some are not"):
        clip_grad_norm_([*model.parameters(), *other.parameters()], 1.0)
    loss_of_micro_batch(other, 0, 0).backward()
    norms = [clip_grad_norm_(net.parameters(), 1.0) for net in (model, other)]  # once for each kind
    torch.testing.assert_close(*norms, check_dtype=False, rtol=1e-5, atol=1e-5)
