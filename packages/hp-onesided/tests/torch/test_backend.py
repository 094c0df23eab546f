"""The backend "hp_shared" as programs of torch.distributed use it."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from test_carrier import Reason, refuse
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from hp_onesided import opening
from hp_onesided.torch.backend import SharedGroup
from hp_testing import on_ranks

pytestmark = pytest.mark.not_on("torch-cuda", "torch-npu", "torch-npu-sim", reason="tensors are on the host here")
# names of PyTorch 2.13, and those before
all_gather_single: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
gathered: Any = getattr(functional, "all_gather_single", functional.all_gather_tensor)
scattered: Any = getattr(functional, "reduce_scatter_single", functional.reduce_scatter_tensor)


@contextlib.contextmanager
def shared(*, of: list[int] | None = None) -> Iterator[Any]:
    """Make a group of the ranks by the backend, and destroy it."""
    group: Any = dist.new_group(of, backend="hp_shared")
    try:
        yield group
    finally:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


@on_ranks(1, 2, 4)
@pytest.mark.smoke
def test_collectives(ranks):
    rank = dist.get_rank()
    with shared() as group:
        assert isinstance(group, SharedGroup) and dist.get_backend(group) == "hp_shared" and group.name() == "hp_shared"
        for asynchronous in (False, True):

            def wait(work, asynchronous=asynchronous):
                assert (work is not None) == asynchronous
                if work is not None:
                    work.wait()
                    assert work.is_completed() or ranks == 1  # by gloo alone

            total = torch.full((3, 2), rank + 1.0).t()  # of no order in memory
            wait(dist.all_reduce(total, group=group, async_op=asynchronous))
            assert total.unique().tolist() == [ranks * (ranks + 1) / 2]
            flag = torch.tensor(rank == 0)
            wait(dist.all_reduce(flag, dist.ReduceOp.MAX, group=group, async_op=asynchronous))
            assert flag.item() is True
            bits = torch.tensor([1 << rank])
            wait(dist.all_reduce(bits, dist.ReduceOp.BOR, group=group, async_op=asynchronous))  # by gloo
            assert bits.item() == 2**ranks - 1
            told = torch.full((4,), rank)
            wait(dist.broadcast(told, ranks - 1, group=group, async_op=asynchronous))
            assert told.tolist() == [ranks - 1] * 4
            whole, parts = torch.empty(ranks * 2, dtype=torch.bfloat16), [torch.empty(2) for _ in range(ranks)]
            wait(all_gather_single(whole, torch.full((2,), rank).bfloat16(), group, asynchronous))
            assert whole.tolist() == [float(each // 2) for each in range(2 * ranks)]
            wait(dist.all_gather(parts, torch.full((2,), float(rank)), group=group, async_op=asynchronous))
            assert [part.tolist() for part in parts] == [[float(each)] * 2 for each in range(ranks)]
            piece, rows = torch.empty(3), [torch.full((3,), float(each * (rank + 1))) for each in range(ranks)]
            wait(reduce_scatter_single(piece, torch.cat(rows), group=group, async_op=asynchronous))
            assert piece.tolist() == [rank * ranks * (ranks + 1) / 2] * 3
            wait(dist.reduce_scatter(piece.zero_(), rows, group=group, async_op=asynchronous))
            assert piece.tolist() == [rank * ranks * (ranks + 1) / 2] * 3
            sent = [rank + each for each in range(ranks)]
            swapped = torch.empty(sum(sent), 2)
            source = torch.cat([torch.full((count, 2), float(each)) for each, count in enumerate(sent)])
            wait(dist.all_to_all_single(swapped, source, sent, sent, group=group, async_op=asynchronous))
            assert swapped.unique().tolist() == ([float(rank)] if swapped.numel() else [])
            lists = [torch.full((count,), -1.0) for count in sent]
            wait(dist.all_to_all(lists, [torch.full((count,), rank + 0.5) for count in sent], group, asynchronous))
            assert [each.tolist() for each in lists] == [[other + 0.5] * count for other, count in enumerate(sent)]
            wait(dist.barrier(group=group, async_op=asynchronous))
            found = [torch.empty(1) for _ in range(ranks)] if rank == 0 else None
            wait(dist.gather(torch.tensor([float(rank)]), found, 0, group, asynchronous))
            assert found is None or torch.cat(found).tolist() == [float(each) for each in range(ranks)]


@on_ranks(2)
def test_coalesced_collectives_and_messages():
    rank = dist.get_rank()
    with shared() as group:
        tensors = [torch.full((count,), rank + 1.0) for count in (1, 5)]
        with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as works:
            for tensor in tensors:
                dist.all_reduce(tensor, group=group)
        works.wait()
        assert [tensor.unique().item() for tensor in tensors] == [3.0, 3.0]
        wholes, pieces = [torch.empty(2 * count) for count in (1, 5)], [torch.empty(count) for count in (1, 5)]
        with dist.distributed_c10d._coalescing_manager(group, device=torch.device("cpu")):
            for whole, piece in zip(wholes, pieces, strict=True):
                all_gather_single(whole, piece.fill_(rank), group=group)
        assert [whole.tolist() for whole in wholes] == [[0.0, 1.0], [0.0] * 5 + [1.0] * 5]
        with dist.distributed_c10d._coalescing_manager(group):
            for whole, piece in zip(wholes, pieces, strict=True):
                reduce_scatter_single(piece, whole, group=group)
        assert [piece.unique().item() for piece in pieces] == [2.0 * rank] * 2
        message = torch.full((3,), float(rank))
        operations = [dist.P2POp(dist.isend, message, 1 - rank, group)]
        came = torch.empty(3)
        operations.append(dist.P2POp(dist.irecv, came, 1 - rank, group))
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert came.tolist() == [1.0 - rank] * 3


@on_ranks(3)
def test_objects_and_groups():
    rank = dist.get_rank()
    with shared() as group, shared(of=[0, 2]) as pair:
        everyone: list[Any] = [None] * 3
        dist.all_gather_object(everyone, {"rank": rank, "text": "x" * rank * 1000}, group)
        assert [each["rank"] for each in everyone] == [0, 1, 2]
        listed = [("from", rank)]
        dist.broadcast_object_list(listed, 1, group)
        assert listed == [("from", 1)]
        found = [None] * 3 if rank == 0 else None
        dist.gather_object(rank, found, 0, group)
        assert found == ([0, 1, 2] if rank == 0 else None)
        if rank != 1:
            total = torch.tensor([rank])
            dist.all_reduce(total, group=pair)
            assert total.item() == 2 and dist.get_process_group_ranks(pair) == [0, 2]


@on_ranks(2)
def test_functional_collectives_and_compiled_functions():
    rank = dist.get_rank()
    with shared() as group:

        def used(tensor):
            total = functional.all_reduce(tensor * 2, "sum", group)
            whole = gathered(total + rank, 0, group)
            return scattered(whole, "sum", 0, group) + 1

        expected = [(3.0 * 2 + rank) * 2 + 1] * 4
        tensor = torch.full((4,), rank + 1.0)
        assert used(tensor).tolist() == expected
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the compiler's own
            assert torch.compile(used, backend="aot_eager", fullgraph=True)(tensor).tolist() == expected
        exchanged = functional.all_to_all_single(torch.full((2,), float(rank)), [1, 1], [1, 1], group)
        assert exchanged.tolist() == [0.0, 1.0]
        waited = functional.all_reduce(tensor, "sum", group)
        dist.all_reduce(waited, group=group)  # of a tensor that is still under way


@on_ranks(2)
def test_tensors_without_values():
    with shared() as group, FakeTensorMode():
        tensor, whole = torch.ones(4), torch.empty(8)
        dist.all_reduce(tensor, group=group)
        all_gather_single(whole, tensor, group=group)
        dist.all_gather(list(whole.chunk(2)), tensor, group=group)
        assert whole.shape == (8,)


@on_ranks(2)
def test_what_can_not_be_is_refused():
    rank = dist.get_rank()
    with shared() as group:
        with pytest.raises(TypeError, match="hp_shared communicates tensors of the host; all_reduce got one on meta"):
            dist.all_reduce(torch.ones(3, device="meta"), group=group)
        pid = os.fork()
        if not pid:
            try:
                dist.barrier(group=group)
            except RuntimeError as error:
                os._exit(0 if "forked" in str(error) else 2)
            os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
        work = dist.all_reduce(torch.ones(3 + rank), group=group, async_op=True)
        for _ in range(2):
            with pytest.raises(
                RuntimeError, match=r"all_reduce\(12 bytes of float32, sum\), rank 1 all_reduce\(16 bytes"
            ):
                wait(work)


@on_ranks(2)
@pytest.mark.parametrize("place", ["memory", "process"])
def test_ranks_that_may_not_share_memory_communicate_by_gloo(place, monkeypatch):
    """One of them lacks the right; all go through gloo, and the first one says why, once."""
    rank, told = dist.get_rank(), Reason()
    if rank == 1:
        monkeypatch.setattr(*((os, "memfd_create") if place == "memory" else (opening, "hold")), refuse)
    monkeypatch.setattr(opening, "_said", set())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")  # of a launcher that knows nothing of the group
    logging.getLogger("hp_onesided").addHandler(told)
    try:
        for _ in range(2):
            with shared() as group:
                total, parts = torch.tensor([rank + 1.0]), [torch.empty(1) for _ in range(2)]
                dist.all_reduce(total, group=group)
                dist.all_gather(parts, total + rank, group=group)
                assert [total.item(), parts[0].item(), parts[1].item()] == [3.0, 3.0, 4.0]
                pieces = [torch.empty(1) for _ in range(2)]
                for work in (
                    group.allreduce_coalesced(pieces),
                    reduce_scatter_single(pieces[0], torch.ones(2), group=group, async_op=True),
                    dist.all_to_all_single(torch.empty(2), torch.ones(2), group=group, async_op=True),
                    dist.barrier(group=group, async_op=True),
                ):
                    wait(work)
                assert pieces[0].item() == 2.0
    finally:
        logging.getLogger("hp_onesided").removeHandler(told)
    assert len(told.texts) == (rank == 0)
    assert all("go through gloo" in text and "Operation not permitted" in text for text in told.texts)


@on_ranks(2)
def test_sharded_and_replicated_models():
    """DTensor, FSDP2 and DDP, three steps each: as one process with both ranks' samples."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    samples, targets = torch.randn(3, 4, 8, dtype=torch.float64), torch.randn(3, 4, 2, dtype=torch.float64)

    def model():
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)).double()

    def train(module, rows):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for sample, target in zip(samples, targets, strict=True):
            torch.nn.functional.mse_loss(module(sample[rows]), target[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()

    alone = model()
    train(alone, slice(None))
    own = slice(2 * rank, 2 * rank + 2)
    with shared() as group:
        mesh = DeviceMesh.from_group(group, "cpu")
        replicated = DistributedDataParallel(model(), process_group=group, bucket_cap_mb=0)
        train(replicated, own)
        sharded = model()
        for layer in (sharded[0], sharded[2], sharded):
            fully_shard(layer, mesh=mesh)
        train(sharded, own)
        wanted = list(alone.parameters())
        for one, other, expected in zip(replicated.parameters(), sharded.parameters(), wanted, strict=True):
            torch.testing.assert_close(one, expected)
            torch.testing.assert_close(whole_of(other), expected)
        matrix = distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)])
        product = matrix.t() @ matrix
        assert whole_of(product).tolist() == (whole_of(matrix).t() @ whole_of(matrix)).tolist()
        del replicated, sharded, matrix, product, mesh
        gc.collect()


def wait(work: Any) -> None:
    work.wait()


def whole_of(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor()


def used(group: dist.ProcessGroup, turns: int) -> None:
    """Begin collectives that nobody waits for, and others that are waited for, or by a future."""
    ranks = dist.get_world_size(group)
    tensor, whole = torch.zeros(16), torch.empty(ranks * 4)
    works = []
    for turn in range(turns):
        works.append(dist.broadcast(tensor, turn % ranks, group=group, async_op=True))
        if turn % 3 == 0:
            all_gather_single(whole, torch.full((4,), float(turn)), group=group)
            assert whole[-1].item() == turn
        if turn % 100 == 0:
            works[-1].get_future().wait()
            for work in works:
                work.wait()
            works = []


@on_ranks(2, timeout=300.0)
def test_ten_thousand_broadcasts_mixed_with_gathers():
    with shared() as group:
        used(group, 10_000)


@on_ranks(2, timeout=600.0)
@pytest.mark.parametrize("collectives", [100, pytest.param(5_000, marks=pytest.mark.thorough)])
def test_many_groups_leave_nothing(collectives):
    """Twenty groups, one after the other: memory, threads and open files stay as they are after the first few."""
    seen = []
    for _ in range(20):
        with shared() as group:
            used(group, collectives)
        del group
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4
        mapped = Path("/proc/self/maps").read_text().count("memfd:hp_onesided")
        seen.append((resident, threading.active_count(), len(os.listdir("/proc/self/fd")), mapped))
    assert {each[1:] for each in seen[2:]} == {seen[2][1:]}
    assert seen[-1][0] < seen[2][0] + 4096


@on_ranks(2)
def test_a_default_group_of_its_own(tmp_path):
    """As a program starts: with the device's name, and with PyTorch's checks on."""
    environment = {"GLOO_SOCKET_IFNAME": "lo", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    rank, code = dist.get_rank(), Path(__file__).with_name("shared_program.py")
    from subprocess import run
    from sys import executable

    command = [executable, str(code), str(tmp_path.parent / "store"), str(rank)]
    done = run(command, capture_output=True, text=True, timeout=240, env={**os.environ, **environment})
    assert (done.returncode, done.stdout) == (0, f"rank {rank}: [3.0, 3.0] 0.0\n"), done.stderr
