"""Collectives over symmetric memory, bit by bit: against the order of the ranks, and the group's ordinary ones."""

from __future__ import annotations

import pytest
import torch
from test_cores import FLOATS, INTEGERS, drawn, equal, reduced
from test_symmetric import use, world

from hp_onesided import SymmetricMemory
from hp_onesided.carriers.carrier import SharedMemory
from hp_onesided.planning.headers import OPS
from hp_platform import LostRankError, get_platform
from hp_platform.communication.carriers import carrier_of
from hp_testing import on_ranks

pytestmark = pytest.mark.not_on("torch-cuda", "torch-npu", "torch-npu-sim", reason="tensors are on the host here")
COUNTS = (0, 1, 33, 5000)


@pytest.fixture(params=["native", "python"])
def core(request):
    return request.param


@on_ranks(1, 2, 3, 4)
def test_reductions_have_the_bits_of_the_order_of_the_ranks(core, ranks, monkeypatch):
    use(core, monkeypatch)
    rank, own = get_platform().groups.rank(), get_platform().collectives
    assert ranks == 1 or isinstance(carrier_of(world()), SharedMemory)
    with SymmetricMemory(world(), 1 << 18) as memory:
        for dtype in (*FLOATS, *INTEGERS, torch.bool, torch.complex64):
            for count in COUNTS:
                inputs = [drawn(each, count * ranks, dtype) for each in range(ranks)]
                for op in OPS:
                    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
                        continue
                    if dtype.is_complex and op != "sum":
                        continue
                    wanted = reduced(inputs, op)
                    whole = memory.local((count * ranks,), dtype, 64 * (rank + 1))
                    whole.copy_(inputs[rank])
                    piece = torch.empty(count, dtype=dtype)
                    memory.reduce_scatter(piece, whole, op)
                    assert equal(piece, wanted[rank * count : (rank + 1) * count])
                    memory.all_reduce(whole, op)
                    assert equal(whole, wanted), (dtype, count, op)
                    if ranks > 1:  # alone, gloo is the group's
                        ordinary = inputs[rank].clone()
                        own.all_reduce(ordinary, op, group=world())
                        assert equal(ordinary, wanted)


@on_ranks(1, 2, 3, 4)
def test_gathers_and_exchanges(core, ranks, monkeypatch):
    use(core, monkeypatch)
    rank, own = get_platform().groups.rank(), get_platform().collectives
    with SymmetricMemory(world(), 1 << 18) as memory:
        for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex128):
            for count in COUNTS[:3]:
                part = memory.local((count,), dtype, 256)
                part.copy_(drawn(rank, count, dtype))
                gathered, ordinary = torch.empty(ranks * count, dtype=dtype), torch.empty(ranks * count, dtype=dtype)
                memory.all_gather(gathered, part)
                own.all_gather(ordinary, part.clone(), group=world())
                assert equal(gathered, ordinary)
                within = memory.local((ranks * count,), dtype, 1024)
                within[rank * count : (rank + 1) * count] = part
                memory.all_gather(within, within[rank * count : (rank + 1) * count])  # in place
                assert equal(within, ordinary)
                sent = [(rank + 2 * peer) % 3 * count for peer in range(ranks)]
                received = [(peer + 2 * rank) % 3 * count for peer in range(ranks)]
                source = memory.local((sum(sent), 2), dtype, 4096)
                source.copy_(drawn(rank, 2 * sum(sent), dtype).view(-1, 2))
                output, other = (torch.empty(sum(received), 2, dtype=dtype) for _ in range(2))
                memory.all_to_all(output, source, received, sent)
                own.all_to_all(other, source.clone(), received, sent, group=world())
                assert equal(output, other)
                equally = memory.local((2 * ranks, count), dtype, 4096)
                equally.copy_(drawn(rank, equally.numel(), dtype).view(equally.shape))
                swapped, other = torch.empty_like(equally), torch.empty_like(equally)
                memory.all_to_all(swapped, equally)
                own.all_to_all(other, equally.clone(), group=world())
                assert equal(swapped, other)
                memory.barrier()


@on_ranks(2)
def test_what_can_not_be_is_refused():
    with SymmetricMemory(world(), 1024) as memory:
        own, other = memory.local((8,), torch.float32), torch.ones(8)
        strided = memory.local((4, 2), torch.float32).t()
        cases = [
            (lambda: memory.all_reduce(other), ValueError, "has to lie in this rank's symmetric memory"),
            (lambda: memory.all_gather(torch.ones(8), own), ValueError, "a tensor has 32 bytes, and 64 are expected"),
            (lambda: memory.all_gather(memory.local((16,), torch.float32, 16), own), ValueError, "overwrite the input"),
            (lambda: memory.reduce_scatter(own[:4], own[1:]), ValueError, "has 28 bytes, and 32 are expected"),
            (lambda: memory.reduce_scatter(own[2:6], own), ValueError, "would overwrite the input"),
            (lambda: memory.all_gather(torch.ones(16).double(), own), ValueError, "of one dtype"),
            (lambda: memory.all_reduce(strided), ValueError, "is not contiguous"),
            (lambda: memory.all_reduce(own, "mean"), ValueError, "op 'mean' is unknown"),
            (lambda: memory.all_reduce(own.view(torch.int32), "avg"), TypeError, "there is no avg of int32"),
            (lambda: memory.all_reduce(own.view(torch.uint16)), TypeError, "there is no sum of uint16"),
            (lambda: memory.all_to_all(other, own, [1, 7], [3, 4]), ValueError, r"rows \[3, 4\] for 2 ranks"),
            (lambda: memory.all_to_all(other[:7], own), ValueError, "7 rows can't be split equally among 2 ranks"),
            (lambda: memory.all_to_all(own, own), ValueError, "would overwrite the input"),
        ]
        for call, kind, text in cases:
            with pytest.raises(kind, match=text):
                call()


@on_ranks(3)
def test_what_ranks_call_differently_is_refused_on_all(core, monkeypatch):
    """Nothing was read or written, so the memory is of use afterwards."""
    use(core, monkeypatch)
    rank = get_platform().groups.rank()
    with SymmetricMemory(world(), 1024) as memory:
        own = memory.local((6,), torch.float32)
        own.fill_(1.0)
        cases = [
            (lambda: memory.barrier() if rank == 1 else memory.all_reduce(own), r"all_reduce\(24 bytes .* barrier\(\)"),
            (lambda: memory.all_reduce(own[rank // 2 :]), "24 bytes of float32, sum.*rank 2 all_reduce.20 bytes"),
            (lambda: memory.all_reduce(own, "max" if rank else "sum"), "float32, sum.*rank 1 .*float32, max"),
            (
                lambda: memory.all_to_all(torch.ones(6), own, [2, 2, 2], [1, 1, 4] if rank == 1 else [2, 2, 2]),
                "in an all_to_all rank 1 of the group sends 4 bytes to rank 0, which expects 8",
            ),
        ]
        for call, text in cases:
            with pytest.raises(RuntimeError, match=text) as caught:
                call()
            assert not isinstance(caught.value, LostRankError)
        memory.all_reduce(own)
        assert own.tolist() == [3.0] * 6
