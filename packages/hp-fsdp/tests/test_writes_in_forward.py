"""Writes to parameters in forward, which a gathered copy would lose, are refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fsdp_models import data_mesh, seeded
from torch import nn

from hp_dtensor import init_device_mesh
from hp_fsdp import fully_shard
from hp_fsdp.torch.extend import all_gathered
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.device


def _index(code: Any, value: torch.Tensor) -> None:
    code[2:4] = value[2:4]


def _assigned(code: Any, value: torch.Tensor) -> None:
    code.data = value


WRITES = {
    "copy_": lambda code, value: code.copy_(value),
    "lerp_": lambda code, value: code.lerp_(value, 0.1),
    "mul_, add_": lambda code, value: code.mul_(0.9).add_(value, alpha=0.1),
    "an index": _index,
    "a view": lambda code, value: code.view(-1)[:3].zero_(),
    "data.add_": lambda code, value: code.data.add_(value),
    "data.mul_, data.add_": lambda code, value: code.data.mul_(0.9).add_(value, alpha=0.1),
    "data": _assigned,
}


class Codes(nn.Module):
    """A codebook, which forward moves towards its inputs."""

    def __init__(self, write: Any, trains: bool = False) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.codes = nn.Parameter(torch.ones(6, 8), requires_grad=trains)
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.write(self.codes, torch.full_like(self.codes, 2.0))
        return self.project(x) + self.codes.mean()


def sharded(write: Any, mesh: Any = None, **options: Any) -> tuple[nn.Module, torch.Tensor]:
    model = seeded(lambda: nn.Sequential(Codes(write, **options), nn.Linear(8, 4)))
    fully_shard(model[0], mesh or data_mesh())
    fully_shard(model, mesh or data_mesh())
    return model, torch.randn(3, 8, dtype=torch.float64, device=next(model.parameters()).device)


@on_ranks(2)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("trains", [False, True])
def test_a_write_in_forward_is_refused(write, trains):
    model, x = sharded(WRITES[write], trains=trains)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"forward of 0 wrote to one of its parameters \(codes"):
            model(x)
    with torch.no_grad(), pytest.raises(RuntimeError, match="wrote to one of its parameters"):
        model.eval()(x)


@on_ranks(2)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_among_forwards_of_what_is_gathered_is_refused(write):
    model, x = sharded(WRITES[write])
    expected = copy.deepcopy({name: each.full_tensor() for name, each in model.state_dict().items()})
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"forward of 0 wrote to one of its parameters \(codes"):
            with all_gathered(model.eval()):
                model(x)
                model(x)
    for name, each in model.state_dict().items():
        assert torch.equal(each.full_tensor(), expected[name])


@on_ranks(2)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_to_replicas_is_refused(write):
    mesh = init_device_mesh(device_type(), (2, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    model, x = sharded(WRITES[write], mesh)
    with pytest.raises(
        RuntimeError, match=r"forward of 0 wrote to one of its parameters \(codes.* the replicas differ"
    ):
        model(x)


@on_ranks(1)
@pytest.mark.parametrize("write", WRITES)
def test_one_process_keeps_what_forward_writes(write):
    model, x = sharded(WRITES[write])
    if write == "data":
        with pytest.raises(RuntimeError, match="wrote to one of its parameters"):
            model(x)
        return
    expected = torch.ones(6, 8, dtype=torch.float64, device=x.device)
    for _ in range(2):
        model(x).sum().backward()
        with torch.no_grad():
            WRITES[write](expected, torch.full_like(expected, 2.0))
    assert torch.equal(model[0].codes.full_tensor(), expected)


@on_ranks(2)
def test_after_a_refused_write_the_model_trains():
    model, x = sharded(WRITES["copy_"])
    with pytest.raises(RuntimeError, match="wrote to one of its parameters"):
        model(x)
    model[0].write = lambda code, value: None
    model(x).square().mean().backward()
    assert model[0].project.weight.grad is not None
    with torch.no_grad():
        model[0].codes.fill_(2.0)  # outside of forward
    assert model[0].codes.full_tensor().eq(2).all()
    for buffer in (True, False):
        model = seeded(lambda: nn.Sequential(Codes(WRITES["copy_"]), nn.Linear(8, 4)))
        ignored = [model[0].codes]
        if buffer:
            del model[0].codes
            model[0].register_buffer("codes", ignored.pop().detach())
        fully_shard(model[0], data_mesh(), ignored_params=ignored)
        fully_shard(model, data_mesh(), ignored_params=ignored)
        model(x).square().mean().backward()
        assert model[0].codes.eq(2).all() and model[0].project.weight.grad is not None


@on_ranks(2)
def test_an_embedding_that_shortens_its_rows_is_refused():
    model = fully_shard(seeded(lambda: nn.Embedding(6, 8, max_norm=0.1)), data_mesh())
    with pytest.raises(RuntimeError, match=r"forward of Embedding wrote to one of its parameters \(weight\)"):
        model(torch.arange(3, device=next(model.parameters()).device))
    ignored = seeded(lambda: nn.Sequential(nn.Embedding(6, 8, max_norm=0.1), nn.Linear(8, 2)))
    fully_shard(ignored, data_mesh(), ignored_params=[ignored[0].weight])
    ignored(torch.arange(3, device=device_type())).sum().backward()
    assert ignored[0].weight[:3].norm(dim=1).le(0.1 + 1e-6).all()


@on_ranks(2)
def test_reading_data_is_no_write():
    seen = []
    model, x = sharded(lambda code, value: seen.append(code.data.sum().item()))
    model(x).sum().backward()
    model.eval()(x)
    assert seen == [48.0, 48.0]


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_looking_for_writes_copies_no_parameters(dtype: torch.dtype):
    if device_type() != "cpu":
        pytest.skip("the profiler tells how much each operator allocates on a CPU")
    wide = 256  # of a Linear whose input and output are small beside its weight
    model = fully_shard(seeded(lambda: nn.Linear(wide, wide)).to(dtype), data_mesh())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        model(torch.ones(1, wide, dtype=dtype))
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert 0 < largest <= 1.1 * wide * wide * dtype.itemsize  # the gathered buffer itself, if anything
