"""Linear layers with the collective before or after them: values and gradients of plain ones, and who does them."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hp_onesided import choose, gathered_linear, scattered_linear
from hp_onesided import fused as neutral
from hp_onesided.torch import fused
from hp_platform import count_collectives, get_platform
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.not_on("torch-npu-sim", "torch-cuda", "torch-npu", reason="kinds are compared on the CPU")


def _world() -> tuple[Any, int, int]:
    torch.set_num_threads(1)
    groups = get_platform().groups
    group = groups.default_group()
    return group, groups.rank(), groups.size(group)


def _draw(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _integers(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _run(function: Any, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, **options: Any) -> list[torch.Tensor]:
    """Return the output and the gradients of x, w and b, for a gradient of the output that differs everywhere."""
    leaves = [each.clone().requires_grad_() for each in (x, w, b) if each is not None]
    y = function(*leaves, **options)
    y.backward((torch.arange(y.numel()) % 5 - 2).view(y.shape).to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[misc]


SHAPES = {"rows": ((192, 64), 0), "sequence": ((2, 96, 128), 1), "first of three": ((7, 30, 5), 0), "one": ((1, 4), 0)}


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_chunks_have_the_bits_of_plain(name: str, dtype: torch.dtype) -> None:
    """Of integers, whose sums are exact in any order; and of others where the library's order is the same."""
    group, rank, ranks = _world()
    (*before, features), dim = SHAPES[name]
    whole = [size * ranks if at == dim else size for at, size in enumerate(before)]
    out = 64 if features % 64 == 0 else 10
    for draw in (_integers, _draw) if features % 64 == 0 else (_integers,):
        x, wide = draw(*before, features, dtype=dtype, seed=rank), draw(*whole, features, dtype=dtype, seed=rank)
        w = draw(out, features, dtype=dtype, seed=9 + rank)
        for b in (None, draw(out, dtype=dtype, seed=3)):
            for function, given in ((gathered_linear, x), (scattered_linear, wide)):
                plain = _run(function, given, w, b, group=group, dim=dim, kind="plain")
                chunks = _run(function, given, w, b, group=group, dim=dim - len(before) - 1, kind="chunks")
                for got, want in zip(chunks, plain, strict=True):
                    assert torch.equal(got, want), f"{function.__name__}: {(got - want).abs().max()}"


@on_ranks(2, 4)
@pytest.mark.parametrize("kind", [None, "chunks"])
def test_layers_equal_one_process(kind: Any) -> None:
    group, rank, ranks = _world()
    x, grad = (_draw(2, 70 * ranks, 6, dtype=torch.float64, seed=seed) for seed in (0, 1))
    up, down = _draw(5 * ranks, 6, dtype=torch.float64, seed=2), _draw(6, 5 * ranks, dtype=torch.float64, seed=3)
    b, c = _draw(5 * ranks, dtype=torch.float64, seed=4), _draw(6, dtype=torch.float64, seed=5)
    alone = [each.clone().requires_grad_() for each in (x, up, b, down, c)]
    want = F.linear(torch.tanh(F.linear(alone[0], alone[1], alone[2])), alone[3], alone[4])
    want.backward(grad)

    def part(value: Any, dim: int) -> torch.Tensor:
        return value.chunk(ranks, dim)[rank].detach().clone()

    cut = (part(x, 1), part(up, 0), part(b, 0), part(down, 1), c.clone())
    own = [each.requires_grad_() for each in cut]
    hidden = torch.tanh(gathered_linear(own[0], own[1], own[2], group=group, dim=1, kind=kind))
    y = scattered_linear(hidden, own[3], own[4], group=group, dim=1, kind=kind)
    y.backward(part(grad, 1))
    get_platform().collectives.all_reduce(own[4].grad, group=group)  # of the output's parts
    torch.testing.assert_close(y, part(want, 1), rtol=1e-12, atol=1e-12)
    for leaf, ref, dim in zip(own, alone, (1, 0, 0, 1, None), strict=True):
        expected = ref.grad if dim is None else part(ref.grad, dim)
        torch.testing.assert_close(leaf.grad, expected, rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_chunks_are_exchanged_one_by_one_and_only_what_is_needed() -> None:
    group = _world()[0]
    x, w = torch.ones(128, 4), torch.ones(6, 4, requires_grad=True)
    with count_collectives() as calls:
        y = gathered_linear(x, w, group=group, dim=0, kind="chunks")
        y.sum().backward()
    assert dict(calls) == {"all_gather": fused.CHUNKS}, "x needs no gradient"
    x.requires_grad_()
    with count_collectives() as calls:
        scattered_linear(x, w, group=group, dim=0, kind="chunks").sum().backward()
    assert dict(calls) == {"reduce_scatter": 2, "all_gather": 2}, "parts of 64 rows and more"
    with torch.no_grad():
        assert not gathered_linear(x, w, group=group, dim=0).requires_grad
    for function in (gathered_linear, scattered_linear):
        with pytest.raises(RuntimeError, match=f"{function.__name__}: a backward that records a graph"):
            torch.autograd.grad(function(x, w, group=group, dim=0).sum(), [x], create_graph=True)


@on_ranks(1, 2)
def test_what_a_cpu_chooses() -> None:
    group, _, ranks = _world()
    kind, reason = choose("cpu", (64, 8, 8), torch.float32, group)
    assert kind == "plain" and ("measured to gain nothing" in reason if ranks > 1 else "one rank" in reason)
    assert choose(torch.device("meta"), (64, 8, 8), torch.float32, group)[0] == "plain"


@contextlib.contextmanager
def _npu(**operators: Any) -> Iterator[None]:
    """Take CPU tensors for those of an NPU with these operators."""
    with pytest.MonkeyPatch.context() as patch:
        module = types.SimpleNamespace(**operators)
        patch.setattr(fused, "_torch_npu", lambda: module)
        patch.setattr(fused, "generation", lambda: "A2")
        patch.setattr(fused, "_hccl_name", lambda group: "hccl of the group")
        patch.setattr(fused, "_device", lambda tensor: "npu")
        real = neutral.choose
        patch.setattr(neutral, "choose", lambda device, *args, **kwargs: real("npu", *args, **kwargs))
        yield


def _gather_mm(
    input: Any,
    x2: Any,
    hcom: str,
    world_size: int,
    *,
    bias: Any,
    gather_index: int,
    gather_output: bool,
    comm_turn: int,
) -> Any:
    """Stand for npu_all_gather_base_mm, of which these are the documented arguments and limits."""
    assert input.dim() == x2.dim() == 2 and input.is_contiguous() and hcom == "hccl of the group"
    assert bias is None and gather_index == 0 and gather_output and comm_turn == 0
    group = get_platform().groups.default_group()
    whole = input.new_empty(world_size * input.shape[0], input.shape[1])
    get_platform().collectives.all_gather(whole, input, group=group)
    return whole @ x2, whole


def _mm_scatter(input: Any, x2: Any, hcom: str, world_size: int, *, reduce_op: str, bias: Any, comm_turn: int) -> Any:
    """Stand for npu_mm_reduce_scatter_base."""
    assert input.dim() == x2.dim() == 2 and input.is_contiguous() and hcom == "hccl of the group"
    assert reduce_op == "sum" and bias is None and comm_turn == 0
    out = input.new_empty(input.shape[0] // world_size, x2.shape[1])
    get_platform().collectives.reduce_scatter(
        out, (input @ x2).contiguous(), group=get_platform().groups.default_group()
    )
    return out


@on_ranks(2, 3)
def test_the_calls_of_an_npu_and_its_limits() -> None:
    group, rank, ranks = _world()
    x, w = _draw(2, 4, 256, dtype=torch.bfloat16, seed=rank), _draw(256, 256, dtype=torch.bfloat16, seed=rank)
    wide, b = _draw(2, 4 * ranks, 256, dtype=torch.bfloat16, seed=rank), _draw(256, dtype=torch.bfloat16, seed=5)
    options: dict[str, Any] = {"group": group, "dim": 1}
    with _npu(npu_all_gather_base_mm=_gather_mm, npu_mm_reduce_scatter_base=_mm_scatter):
        chosen = choose("npu", (8, 256, 256), torch.bfloat16, group)
        if ranks == 3:
            assert chosen == ("chunks", "npu_all_gather_base_mm takes (2, 4, 8) ranks on A2, got 3")
            with pytest.raises(ValueError, match='kind="kernel" can\'t be done: npu_mm_reduce_scatter_base takes'):
                scattered_linear(wide, w, **options, kind="kernel")
            return
        assert chosen == ("kernel", "torch_npu.npu_all_gather_base_mm")
        assert choose("npu", (8, 8, 8), torch.bfloat16, group)[0] == "chunks"
        for function, given in ((gathered_linear, x), (scattered_linear, wide)):
            for got, want in zip(
                _run(function, given, w, b, **options),
                _run(function, given, w, b, **options, kind="plain"),
                strict=True,
            ):
                torch.testing.assert_close(got, want, rtol=2e-2, atol=0.5)
    with _npu():
        assert choose("npu", (8, 256, 256), torch.bfloat16, group)[1] == "this torch_npu has no npu_all_gather_base_mm"


def _cuda_gather(A: Any, Bs: Any, gather_dim: int, group_name: str, *, return_A: bool = True) -> Any:
    assert gather_dim == 0 and return_A and A.dim() == 2
    group = get_platform().groups.default_group()
    assert group_name == group.group_name
    whole = A.new_empty(2 * A.shape[0], A.shape[1])
    get_platform().collectives.all_gather(whole, A, group=group)
    return whole, [whole @ each for each in Bs]


def _cuda_scatter(A: Any, B: Any, reduce_op: str, scatter_dim: int, group_name: str) -> Any:
    assert (reduce_op, scatter_dim) == ("sum", 0)
    out = A.new_empty(A.shape[0] // 2, B.shape[1])
    get_platform().collectives.reduce_scatter(out, (A @ B).contiguous(), group=get_platform().groups.default_group())
    return out


@on_ranks(2)
def test_the_calls_of_cuda_fit_the_operators_schemas() -> None:
    group, rank, _ = _world()
    for op in ("gather", "scatter"):
        name, lacking = fused.operator(op, "cuda")
        assert lacking is None, name
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", _cuda_gather, "CPU")
    library.impl("fused_matmul_reduce_scatter", _cuda_scatter, "CPU")
    real, x, w = (
        neutral.choose,
        _draw(3, 2, 6, dtype=torch.float64, seed=rank),
        _draw(4, 6, dtype=torch.float64, seed=rank),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neutral, "choose", lambda device, *args, **kwargs: real("cuda", *args, **kwargs))
        assert choose("cpu", (6, 6, 4), torch.float64, group)[0] == "plain"
        assert neutral.choose("cpu", (6, 6, 4), torch.float64, group) == (
            "chunks",
            "torch.ops.symm_mem.fused_all_gather_matmul takes float16, bfloat16 and float32, got float64",
        )
        x, w = x.float(), w.float()
        for function, given in ((gathered_linear, x), (scattered_linear, torch.cat([x, x + 1], 1))):
            kernel = _run(function, given, w, None, group=group, dim=1, kind="kernel")
            plain = _run(function, given, w, None, group=group, dim=1, kind="plain")
            for got, want in zip(kernel, plain, strict=True):
                torch.testing.assert_close(got, want)
        patch.setattr(neutral, "level_of", lambda ranks: "mixed")
        assert "all ranks on one host" in neutral.choose("cpu", (6, 6, 4), torch.float32, group)[1]
    library._destroy()


class Named(torch.Tensor):
    """A tensor of a class of its own, as a DTensor is."""


@on_ranks(2)
def test_what_is_refused() -> None:
    group, _, _ = _world()
    x, w = torch.ones(3, 4, device=device_type()), torch.ones(2, 4)
    for given, options, error, text in (
        ((x, w), {"dim": 1}, ValueError, r"dim is one of \[3, 4\] before the last, which has the features, got dim=1"),
        ((x[0], w), {"dim": 0}, ValueError, r"dim is one of \[4\] before the last"),
        ((x, w.t()), {"dim": 0}, ValueError, r"w is \(out features, 4\) for x of \[3, 4\], got \[4, 2\]"),
        ((x, w, torch.ones(3)), {"dim": 0}, ValueError, r"b is \(2,\) for w of \[2, 4\], got \[3\]"),
        ((x, w.double()), {"dim": 0}, TypeError, "operands are of one dtype, got float32, float64"),
        ((x.as_subclass(Named), w), {"dim": 0}, TypeError, r"x is a Named; pass a plain tensor, such as its to_local"),
        ((x, w), {"dim": 0, "kind": "fast"}, ValueError, "kind is one of .*, got 'fast'"),
        ((x, w), {"dim": 0, "kind": "kernel"}, ValueError, "can't be done: on a CPU chunks were measured"),
    ):
        with pytest.raises(error, match=text):
            gathered_linear(*given, group=group, **options)
    with pytest.raises(ValueError, match=r"scattered_linear: 2 ranks do not divide dim 0 of shape \[3, 4\]"):
        scattered_linear(x, w, group=group, dim=0)
