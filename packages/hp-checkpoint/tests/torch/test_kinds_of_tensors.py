"""Every dtype and memory layout of a tensor comes back as it was, or is refused by name."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from hp_checkpoint import load, save
from hp_checkpoint.torch.port import DTYPES
from hp_dtensor import DeviceMesh, Replicate, Shard, distribute_tensor, init_parameters
from hp_testing import device_type, on_ranks


def values(dtype):
    torch.manual_seed(0)
    return (torch.randn(6, 8) * 3).to(dtype)


def loaded(value, into, folder):
    save({"model": {"w": value}}, checkpoint_id=folder, no_dist=True)
    load({"model": {"w": into}}, checkpoint_id=folder, no_dist=True, verify="all")
    return into


def bits(tensor):
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).tolist() if plain.numel() else []


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_memory_layouts_of_each_dtype(tmp_path, dtype):
    """Saved and loaded: transposed, every second column, without dims, without elements; safetensors reads the same."""
    whole = values(dtype)
    cases = {
        "whole": (whole, torch.zeros(6, 8, dtype=dtype)),
        "transposed": (whole.t(), torch.zeros(8, 6, dtype=dtype)),
        "into transposed": (whole.clone(), torch.zeros(8, 6, dtype=dtype).t()),
        "columns": (whole[:, ::2], torch.zeros(6, 12, dtype=dtype)[:, 1::3]),
        "scalar": (whole[0, 0], torch.zeros((), dtype=dtype)),
        "empty": (whole[:0], torch.zeros(0, 8, dtype=dtype)),
    }
    save({"model": {name: value for name, (value, _) in cases.items()}}, checkpoint_id=tmp_path / "c", no_dist=True)
    new = {name: into for name, (_, into) in cases.items()}
    load({"model": new}, checkpoint_id=tmp_path / "c", no_dist=True, verify="all")
    read = load_file(tmp_path / "c" / "model.safetensors")
    for name, (value, into) in cases.items():
        assert bits(into) == bits(value) == bits(read[name]) and read[name].shape == value.shape, name


def test_views_with_lazy_signs(tmp_path):
    value = torch.randn(4, dtype=torch.complex64)
    assert torch.equal(loaded(value.conj(), torch.zeros(4, dtype=torch.complex64), tmp_path / "a"), value.conj())
    assert torch.equal(loaded(value.conj().imag, torch.zeros(4), tmp_path / "b"), -value.imag)
    memory = torch.zeros(4, dtype=torch.complex64)
    assert torch.equal(loaded(value, memory.conj(), tmp_path / "c"), value) and torch.equal(memory, value.conj())


@pytest.mark.parametrize(
    ("value", "error", "mended"),
    [
        (
            lambda: torch.ones(2, dtype=torch.complex128),
            "'w' has dtype torch.complex128, which safetensors lacks; convert it before the call",
            lambda value: [value.to(torch.complex64)],
        ),
        (
            lambda: torch.ones(2, dtype=torch.float8_e4m3fnuz),
            "'w' has dtype torch.float8_e4m3fnuz, which safetensors lacks; convert it before the call",
            lambda value: [value.float()],
        ),
        (
            lambda: torch.nn.Linear(2, 2, device="meta").weight,
            r"'w' is on the meta device .*; give it memory first, as by hp_dtensor.init_parameters\(model\)",
            lambda value: [init_parameters(torch.nn.Linear(2, 2, device="meta")).weight],
        ),
        (
            lambda: torch.eye(2).to_sparse(),
            "'w' has the layout torch.sparse_coo; expected a dense tensor",
            lambda value: [value.to_dense()],
        ),
        (
            lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
            r"'w' is a nested tensor; save its .unbind\(\) parts",
            lambda value: value.unbind(),
        ),
        (
            lambda: torch._subclasses.FakeTensorMode().from_tensor(torch.ones(3)),
            "'w' is a torch.*FakeTensor, whose",
            lambda value: [torch.ones(3)],
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_kinds_that_are_refused(tmp_path, value, error, mended):
    """By a save and by a load, before anything is written."""
    with pytest.raises(TypeError, match=error):
        save({"model": {"w": value()}}, checkpoint_id=tmp_path / "c", no_dist=True)
    assert not list(tmp_path.iterdir())
    save({"model": {"w": torch.zeros(2)}}, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises(TypeError, match=error):
        load({"model": {"w": value()}}, checkpoint_id=tmp_path / "c", no_dist=True)
    parts = dict(enumerate(mended(value())))
    save({"model": parts}, checkpoint_id=tmp_path / "c", no_dist=True)
    load({"model": (new := {at: torch.zeros_like(each) for at, each in parts.items()})}, checkpoint_id=tmp_path / "c")
    assert all(torch.equal(new[at], each) for at, each in parts.items())


@pytest.mark.parametrize("name", ["", "a/b", "../../x", "model.safetensors", "\n", "\0", "ü.é", '"', "x" * 70000])
def test_names_of_any_characters(tmp_path, name):
    value = torch.arange(3)
    new = {"model": {name: torch.zeros(3, dtype=torch.int64)}}
    save({"model": {name: value}}, checkpoint_id=tmp_path / "c", no_dist=True)
    load(new, checkpoint_id=tmp_path / "c", no_dist=True)
    assert torch.equal(new["model"][name], value)
    assert torch.equal(load_file(tmp_path / "c" / "model.safetensors")[name], value)


@on_ranks(3)
def test_tensors_of_some_ranks_in_the_state_of_all(tmp_path) -> None:
    """A rank that is not in a tensor's mesh has it in its state, without a part."""
    mesh, inside = DeviceMesh(device_type(), [0, 2]), dist.get_rank() != 1
    values = torch.arange(5.0, device=device_type())
    state = {
        "cut": distribute_tensor(values, mesh, [Shard(0)]),
        "whole": distribute_tensor(values, mesh, [Replicate()]),
    }
    save({**state, "step": 3}, checkpoint_id=tmp_path)
    new = {name: torch.zeros_like(each) for name, each in state.items()}
    load(new, checkpoint_id=tmp_path)
    for name, each in new.items():
        assert torch.equal(each.to_local(), state[name].to_local())
        assert (each.to_local().numel() > 0) is inside
