"""Both cores against plain arithmetic, bit by bit: ranks are threads here."""

from __future__ import annotations

import pytest
import torch
from shared_teams import CORES, team

from hp_onesided.planning.headers import OPS, WIDTHS
from hp_onesided.port import port

pytestmark = pytest.mark.not_on("torch-cuda", "torch-npu", "torch-npu-sim", reason="tensors are on the host here")
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
SLOT = 1 << 13


def drawn(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Draw a rank's numbers; floating-point ones of all sizes, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(1000 * rank + count)
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    if not dtype.is_floating_point and not dtype.is_complex:
        low = 0 if dtype is torch.uint8 else -100
        return torch.randint(low, 100, (count,), generator=generator).to(dtype)
    values = torch.randn(count, generator=generator, dtype=torch.float64)
    return (values * 2.0 ** torch.randint(-8, 8, (count,), generator=generator)).to(dtype)


def reduced(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    """Reduce in the order of the ranks, 16-bit numbers in float32 and rounded once."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        other = part.to(wide)
        if dtype is torch.bool:
            total = total | other if op in ("sum", "max") else total & other
        elif op in ("sum", "avg"):
            total = total + other
        else:
            total = {"min": torch.minimum, "max": torch.maximum, "product": torch.mul}[op](total, other)
    return (total / len(parts) if op == "avg" else total).to(dtype)


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))


def check_reductions(size: int, core: str, dtype: torch.dtype, counts: list[int], ops=OPS) -> None:
    with team(size, core, SLOT // size // 64 * 64 * size) as on_all:
        for count in counts:
            for op in ops:
                if op == "avg" and not dtype.is_floating_point:
                    continue
                inputs = [drawn(rank, count * size, dtype) for rank in range(size)]
                wanted = reduced(inputs, op)

                def both(rank, carrier, count=count, op=op, inputs=inputs):
                    # a view that begins at no multiple of anything but its element
                    memory = torch.zeros(count * size + 1, dtype=dtype)
                    tensor = memory[1:]
                    tensor.copy_(inputs[rank])
                    piece = torch.zeros(count, dtype=dtype)
                    carrier.start("reduce_scatter", piece, tensor, op, (), (), 0, False)
                    carrier.start("all_reduce", tensor, tensor, op, (), (), 0, False)
                    return piece, tensor, memory[0].item()

                for rank, (piece, tensor, before) in enumerate(on_all(both)):
                    assert equal(tensor, wanted), (op, count, rank)
                    assert equal(piece, wanted[rank * count : rank * count + count]), (op, count, rank)
                    assert not before


def sizes_of(dtype: torch.dtype) -> list[int]:
    """List numbers of elements: none, one, odd ones, and more than four slots."""
    return [0, 1, 7, 1021, 4 * SLOT // dtype.itemsize + 3]


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32], ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_reductions(size, dtype, core):
    check_reductions(size, core, dtype, [1, 1021], ("sum", "avg", "max"))


@pytest.mark.thorough
@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool], ids=str)
@pytest.mark.parametrize("size", range(2, 9))
def test_all_reductions(size, dtype, core):
    check_reductions(size, core, dtype, sizes_of(dtype), OPS)


@pytest.mark.parametrize("core", CORES)
def test_numbers_that_are_none(core):
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 65504.0, 6e-8, 1e-45, 3.0])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        grid = torch.cartesian_prod(values, values).to(dtype)
        for op in OPS:
            wanted = reduced(list(grid.t().contiguous()), op)

            def reduce(rank, carrier, grid=grid, op=op):
                tensor = grid[:, rank].contiguous()
                carrier.start("all_reduce", tensor, tensor, op, (), (), 0, False)
                return tensor

            with team(2, core) as on_all:
                for tensor in on_all(reduce):
                    assert torch.equal(tensor.nan_to_num(1.5), wanted.nan_to_num(1.5)), (dtype, op)
                    assert torch.equal(tensor.isnan(), wanted.isnan())


def check_moves(size: int, core: str, dtype: torch.dtype, counts: list[int]) -> None:
    with team(size, core, SLOT // size // 64 * 64 * size) as on_all:
        for count in counts:
            sent = [
                [(one * 7 + other * 3) % 5 * count // 2 + (one + other) % 2 for other in range(size)]
                for one in range(size)
            ]
            received = [[sent[sender][rank] for sender in range(size)] for rank in range(size)]
            inputs = [drawn(rank, max(count * size, sum(sent[rank])), dtype) for rank in range(size)]

            def move(rank, carrier, count=count, sent=sent, received=received, inputs=inputs):
                own = inputs[rank]
                whole = torch.zeros(count * size, dtype=dtype)
                carrier.start("all_gather", whole, own[:count], "sum", (), (), 0, False)
                even = torch.zeros(count * size, dtype=dtype)
                carrier.start("all_to_all", even, own[: count * size], "sum", (), (), 0, False)
                rows = torch.zeros(sum(received[rank]), 3, dtype=dtype)
                source = own[: sum(sent[rank])].view(-1, 1).expand(-1, 3).contiguous()
                carrier.start("all_to_all", rows, source, "sum", received[rank], sent[rank], 0, False)
                told = own[:count].clone()
                carrier.start("broadcast", told, told, "sum", (), (), size - 1, False)
                return whole, even, rows, told

            for rank, (whole, even, rows, told) in enumerate(on_all(move)):
                assert equal(whole, torch.cat([each[:count] for each in inputs]))
                assert equal(even, torch.cat([each[rank * count : rank * count + count] for each in inputs]))
                starts = [sum(sent[sender][:rank]) for sender in range(size)]
                wanted = [each[at : at + n] for each, at, n in zip(inputs, starts, received[rank])]
                assert equal(rows, torch.cat(wanted).view(-1, 1).expand(-1, 3).contiguous())
                assert equal(told, inputs[size - 1][:count])


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_moves(size, core):
    check_moves(size, core, torch.float32, [0, 1, 1021, 4 * SLOT])


@pytest.mark.thorough
@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.complex128], ids=str)
@pytest.mark.parametrize("size", range(1, 9))
def test_all_moves(size, dtype, core):
    check_moves(size, core, dtype, sizes_of(dtype))


@pytest.mark.parametrize("core", CORES)
def test_complex_numbers_are_summed(core):
    def total(rank, carrier):
        tensor = torch.tensor([1 + 2j, 3 - 1j]) * (rank + 1)
        carrier.start("all_reduce", tensor, tensor, "sum", (), (), 0, False)
        return tensor.tolist()

    with team(2, core) as on_all:
        assert on_all(total) == [[3 + 6j, 9 - 3j]] * 2


@pytest.mark.parametrize("core", CORES)
def test_a_thread_completes_what_nobody_waits_for(core):
    """Waits in other orders than the issues, a call behind those under way, and handles that are dropped."""

    def work(rank, carrier):
        tensors = [torch.full((5000,), float(rank + number)) for number in range(6)]
        handles = [carrier.start("all_reduce", each, each, "sum", (), (), 0, True) for each in tensors]
        last = torch.ones(3)
        carrier.start("all_reduce", last, last, "sum", (), (), 0, False)  # behind the others
        for index in (4, 0, 2) if rank else (2, 4, 0):
            handles[index].wait()
            handles[index].wait()  # again is nothing
        carrier.start("barrier", None, None, "sum", (), (), 0, False)
        return [each[0].item() for each in tensors], last.tolist()

    with team(2, core) as on_all:
        assert on_all(work) == [([1.0 + 2 * number for number in range(6)], [2.0] * 3)] * 2


def test_what_fails_in_the_thread_of_python_fails_all_that_follows(monkeypatch):
    def reduce(*args):
        raise MemoryError

    monkeypatch.setattr(port(), "reduce", reduce)

    def work(rank, carrier):
        tensor, texts = torch.ones(3), []
        for handle in [carrier.start("all_reduce", tensor, tensor, "sum", (), (), 0, True) for _ in range(2)]:
            with pytest.raises(RuntimeError) as raised:
                handle.wait()
            texts.append(str(raised.value))
        return texts[0] == texts[1] and "so the all_reduce over ranks [0, 1] can't be done" in texts[0]

    with team(2, "python") as on_all:
        assert on_all(work) == [True, True]


@pytest.mark.parametrize("core", CORES)
def test_a_gather_into_the_tensor_it_is_of(core):
    def gather(rank, carrier):
        whole = torch.zeros(3 * 5000)
        piece = whole[rank * 5000 : (rank + 1) * 5000].fill_(rank)
        carrier.start("all_gather", whole, piece, "sum", (), (), 0, False)
        return whole[::5000].tolist()

    with team(3, core) as on_all:
        assert on_all(gather) == [[0.0, 1.0, 2.0]] * 3


def test_the_cores_know_the_same_dtypes():
    names = [str(each).partition(".")[2] for each in (*FLOATS, *INTEGERS)]
    assert [getattr(torch, name).itemsize for name in names] == list(WIDTHS)
