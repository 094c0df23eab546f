"""Saved in one layout, loaded in another, bit for bit, on ranks of any framework."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import os

import layout_pairs
import numpy as np
import pytest

from hp_checkpoint import CheckpointError, load, save
from hp_checkpoint.disk.manifest import Manifest
from hp_checkpoint.errors import Ranks
from hp_checkpoint.layout.state import flatten
from hp_checkpoint.loading import loading, transfers
from hp_checkpoint.loading.reads import exchange
from hp_checkpoint.saving.saving import save_state
from hp_dtensor import DTensor, Partial, RaggedShard, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_platform import get_platform
from hp_testing import as_array, as_tensor, device_type, on_ranks, run_ranks


def laid_out(array, mesh, placements):
    return distribute_tensor(as_tensor(array), mesh, placements)


def local(tensor):
    return as_array(tensor.to_local())


@pytest.mark.parametrize(
    ("worlds", "count"), [((1, 2, 3, 4), 8), pytest.param(layout_pairs.WORLDS, 75, marks=pytest.mark.thorough)]
)
def test_any_layout_loads_from_any_other(tmp_path, worlds, count):
    """On any number of ranks, other than those that saved it; `nox -s robustness` takes hundreds of pairs."""
    pairs = [layout_pairs.pair(number, worlds) for number in range(count)]
    saved, again = str(tmp_path / "saved"), str(tmp_path / "again")
    phases = ((layout_pairs.save_pairs, [saved]), (layout_pairs.load_pairs, [saved, again]))
    for side, (function, folders) in enumerate(phases):
        for world in worlds:
            own = [each for each in pairs if each.sides[side].ranks == world]
            run_ranks(world, function, own, *folders, side=side, timeout=180)


def shared_descriptors():
    """List memory, pipes and handles of processes; sockets are the framework's, which opens some later."""
    targets = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing
            targets.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(each for each in targets if any(kind in each for kind in ("memfd:", "pipe:", "pidfd")))


@on_ranks(4)
@pytest.mark.parametrize("hosts", ["0000", "0011", "0120", "0x00"])
def test_ranks_of_several_hosts(tmp_path, monkeypatch, hosts):
    """Bytes travel through the memory of a host, or by collectives: between hosts, and where it can't be shared."""
    rank = get_platform().groups.rank()
    host = tmp_path / f"host{rank}"
    host.write_text(hosts[rank] * 32)
    monkeypatch.setattr(transfers, "_BOOT", host if hosts[rank] != "x" else tmp_path / "absent")
    mesh = init_device_mesh(device_type(), (4,))
    array = np.random.default_rng(0).standard_normal((130, 1000)).astype("f4")
    state = flatten({"model": {"w": laid_out(array, mesh, [Shard(0)])}})
    new = laid_out(np.zeros_like(array), mesh, [Shard(1)])
    save_state(state, tmp_path / "c", Ranks(), block_bytes=16 << 10)
    monkeypatch.setattr(transfers, "PER_ROUND", 32 << 10)
    monkeypatch.setattr(loading, "exchange", functools.partial(exchange, per_round=32 << 10))
    load({"model": {"w": laid_out(np.zeros_like(array), mesh, [Shard(1)])}}, checkpoint_id=tmp_path / "c")
    gc.collect()  # the error of the test before may keep the memory of its load
    before = shared_descriptors()
    load({"model": {"w": new}}, checkpoint_id=tmp_path / "c")
    assert shared_descriptors() == before
    assert local(new).tobytes() == local(laid_out(array, mesh, [Shard(1)])).tobytes()
    damaged = bytearray((tmp_path / "c" / "model.safetensors").read_bytes())
    get_platform().collectives.barrier()
    damaged[-70000] ^= 1
    if rank == 0:
        (tmp_path / "c" / "model.safetensors").write_bytes(damaged)
    get_platform().collectives.barrier()
    with pytest.raises(CheckpointError, match="load failed on 1 of 4 ranks: rank .: .*tensor 'w' changed since the sa"):
        load({"model": {"w": new}}, checkpoint_id=tmp_path / "c")


@on_ranks(4)
def test_other_ranks_load_what_four_wrote(tmp_path):
    """Any rank loads alone, and reads the files' checksums."""
    mesh = init_device_mesh(device_type(), (2, 2))
    array = np.arange(35, dtype=np.float32).reshape(5, 7)
    save({"model": {"w": laid_out(array, mesh, [Shard(0), Shard(1)])}, "step": 7}, checkpoint_id=tmp_path / "c")
    state = {"model": {"w": as_tensor(np.zeros((5, 7), np.float32))}, "step": 0}
    load(state, checkpoint_id=tmp_path / "c", no_dist=True, verify="all")
    assert (as_array(state["model"]["w"]) == array).all() and state["step"] == 7


@pytest.mark.smoke
@on_ranks(2)
def test_ranks_with_different_tensors(tmp_path):
    """As the stages of a pipeline: each rank has its own tensors, plain or on a mesh of its own, and own values."""
    rank = get_platform().groups.rank()
    own = {f"layer{rank}": as_tensor(np.full(3, rank, np.float32)), "shared": as_tensor(np.arange(4.0))}
    save({"model": own, "by_rank": {str(rank): rank}, "lr": 0.5}, checkpoint_id=tmp_path / "c")
    other = 1 - rank
    new = {"model": {f"layer{other}": as_tensor(np.zeros(3, np.float32))}, "by_rank": {str(other): None}, "lr": 0}
    load(new, checkpoint_id=tmp_path / "c")
    assert as_array(new["model"][f"layer{other}"]).tolist() == [other] * 3
    assert new["by_rank"] == {str(other): other} and new["lr"] == 0.5


@on_ranks(2)
def test_the_files_of_any_layout_are_the_same(tmp_path):
    mesh = init_device_mesh(device_type(), (2,))
    array = np.arange(60, dtype=np.float32).reshape(6, 10)
    sums = set()
    moved = RaggedShard((0,), (3, 3), owners=(1, 0, 0, 1, 0, 1))
    for number, placements in enumerate([[Shard(0)], [Shard(1)], [Replicate()], [moved]]):
        folder = tmp_path / str(number)
        save({"model": {"w": laid_out(array, mesh, placements)}, "step": 1}, checkpoint_id=folder)
        sums.add(hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest())
    assert len(sums) == 1


@on_ranks(2)
def test_each_byte_is_read_once(tmp_path):
    """Over all ranks, for a change of layout from rows to columns."""
    mesh = init_device_mesh(device_type(), (2,))
    array = np.arange(1 << 18, dtype=np.float32).reshape(512, 512)
    manifest = save_state(
        flatten({"model": {"w": laid_out(array, mesh, [Shard(0)])}}), tmp_path / "c", Ranks(), block_bytes=64 << 10
    )
    new = laid_out(np.zeros_like(array), mesh, [Shard(1)])
    counts: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        preadv = os.preadv
        patch.setattr(os, "preadv", lambda *arguments: counts.append(preadv(*arguments)) or counts[-1])
        load({"model": {"w": new}}, checkpoint_id=tmp_path / "c")
    read = as_tensor(np.array([sum(counts)], np.int64))
    get_platform().collectives.all_reduce(read, group=get_platform().groups.default_group())
    each = sum(os.path.getsize(tmp_path / "c" / name) for name in ("manifest.json", "state.json"))
    assert int(as_array(read)[0]) - 2 * each == manifest.files["model.safetensors"].size == array.nbytes + 4096
    assert local(new).tobytes() == local(laid_out(array, mesh, [Shard(1)])).tobytes()


@on_ranks(2)
def test_what_ranks_have_together_is_saved_together(tmp_path):
    mesh = init_device_mesh(device_type(), (2,))
    partial = DTensor.from_local(as_tensor(np.ones(3, np.float32)), mesh, [Partial()])
    with pytest.raises(ValueError, match=r"elements of a Partial's value. Reduce it first: tensor.reduce_partial\(\)"):
        save({"w": partial}, checkpoint_id=tmp_path / "c")
    whole = partial.reduce_partial()
    alone = tmp_path / f"alone{get_platform().groups.rank()}"
    with pytest.raises(
        ValueError, match=r"'w' is on the ranks \(0, 1\), and 1 take part; call without no_dist, on all"
    ):
        save({"w": whole}, checkpoint_id=alone, no_dist=True)
    save({"w": whole}, checkpoint_id=tmp_path / "c")
    load(new := {"w": as_tensor(np.zeros(3, np.float32))}, checkpoint_id=tmp_path / "c")
    assert as_array(new["w"]).tolist() == [2.0] * 3


@on_ranks(2)
def test_a_failing_rank_is_named_on_all(tmp_path):
    rank = get_platform().groups.rank()
    bad = {"model": {"w": as_tensor(np.zeros(2, np.float32))}, "x": object() if rank == 1 else 1}
    with pytest.raises(CheckpointError, match="save failed on 1 of 2 ranks: rank 1: checkpoint: 'x' is a builtins.obj"):
        save(bad, checkpoint_id=tmp_path / "c")
    with pytest.raises(ValueError, match="'w' is F32 of shape .3. on one rank, and F32 of shape .4. on rank 1"):
        save({"model": {"w": as_tensor(np.zeros(3 + rank, np.float32))}}, checkpoint_id=tmp_path / "c")
    with pytest.raises(ValueError, match="'lr' is 0 on one rank and 1 on another. Values that differ by rank need"):
        save({"model": {"w": as_tensor(np.zeros(3, np.float32))}, "lr": rank}, checkpoint_id=tmp_path / "c")
    with pytest.raises(ValueError, match="the ranks save different targets: rank 0: .*c0'"):
        save({"model": {"w": as_tensor(np.zeros(3, np.float32))}}, checkpoint_id=tmp_path / f"c{rank}")
    assert not list(tmp_path.iterdir())
    own = {"model": {"w": as_tensor(np.zeros(3, np.float32))}, f"rank{rank}": rank}  # as the error says
    save(own, checkpoint_id=tmp_path / "c")
    load(new := {"rank0": None, "rank1": None}, checkpoint_id=tmp_path / "c")
    assert new == {"rank0": 0, "rank1": 1}
    save({"model": {"w": as_tensor(np.zeros(3, np.float32))}}, checkpoint_id=tmp_path / "c")
    with pytest.raises(CheckpointError, match="load failed on 1 of 2 ranks: rank 1: .*lacks 1 of 1 tensors: 'v'"):
        load({"model": {"wv"[rank]: as_tensor(np.ones(3, np.float32))}}, checkpoint_id=tmp_path / "c")
    assert isinstance(Manifest.from_bytes((tmp_path / "c" / "manifest.json").read_bytes(), "m"), Manifest)
