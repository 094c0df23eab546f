"""torch.compile of operations on DTensors: one graph, eager's values, gradients and layouts."""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from hp_dtensor import DeviceMesh, DTensor, Layout, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_dtensor.debugging.debug import CommDebugMode
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")


def _mlp(x: Any, w: Any, v: Any) -> Any:
    return F.linear(F.gelu(F.linear(x, w)), v).redistribute(placements=[Replicate()])


def _sizes(x: Any, w: Any, v: Any) -> Any:
    rows, columns = x.size()
    assert x.dim() == 2 and len(x) == rows and x.numel() == rows * columns and x.shape == (rows, columns)
    return (x @ w.t()).view(rows, -1) * x.size(1)


def _methods(x: Any, w: Any, v: Any) -> Any:
    """Methods that DTensor has of its own, on what goes into a graph."""
    y = x.view(6, 2, 4).transpose(0, 1).reshape(2, 24).sum(-1).unsqueeze(0)
    return (w[:, 1:3] - w[:, :2]) @ (y.sum() / 2.0 + v[:2, :3] * 2)


def _pieces(x: Any, w: Any, v: Any) -> Any:
    first, second = F.linear(x, w).chunk(2, 0)
    return torch.cat([second, first * 2.0], 0)[1:, :4].softmax(-1)


def _border(x: Any, w: Any, v: Any) -> Any:
    local = x.to_local(grad_placements=[Partial()]) if x.placements[0].is_replicate() else x.to_local()
    made = DTensor.from_local(local.sin(), w.device_mesh, x.placements)
    return made.full_tensor() @ w.full_tensor().t()


def _norms(x: Any, w: Any, v: Any) -> Any:
    y = F.layer_norm(F.dropout(x, 0.0), (x.shape[-1],))
    return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)


def _twice(x: Any, w: Any, v: Any) -> Any:
    """One value read by three: its gradient is summed once."""
    return F.linear(x, w) + F.linear(x, w) * F.linear(x, w)


PROGRAMS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "mlp": _mlp,
    "sizes": _sizes,
    "methods": _methods,
    "pieces": _pieces,
    "border": _border,
    "norms": _norms,
    "twice": _twice,
}
LAYOUTS = {
    "column": (Replicate(), Shard(0), Shard(1)),
    "row": (Shard(1), Shard(1), Replicate()),
    "data": (Shard(0), Replicate(), Replicate()),
    "replicated": (Replicate(), Replicate(), Replicate()),
}
USUAL = [(name, "column") for name in PROGRAMS] + [("mlp", "row"), ("pieces", "row")]
RARE = [pair for pair in itertools.product(PROGRAMS, LAYOUTS) if pair not in USUAL]


def _operands(layout: str) -> tuple[Any, list[Any]]:
    torch.manual_seed(0)
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
    values = [torch.randn(shape, dtype=torch.float64) for shape in ((6, 8), (10, 8), (8, 10))]
    return mesh, [
        torch.nn.Parameter(distribute_tensor(value, mesh, [placement]))
        for value, placement in zip(values, LAYOUTS[layout], strict=True)
    ]


def _step(function: Any, operands: list[Any]) -> tuple[Any, list[Any], dict[Any, int]]:
    for operand in operands:
        operand.grad = None
    with CommDebugMode() as counted:
        out = function(*operands)
        out.square().sum().backward()
    return out, [operand.grad for operand in operands], counted.get_comm_counts()


@on_ranks(2)
@pytest.mark.parametrize(
    ("program", "layout"), [*USUAL, *(pytest.param(*pair, marks=pytest.mark.thorough) for pair in RARE)]
)
def test_equals_eager(program: str, layout: str) -> None:
    torch.set_num_threads(1)
    torch._dynamo.reset()
    _, operands = _operands(layout)
    wanted, grads, count = _step(PROGRAMS[program], operands)
    compiled = torch.compile(PROGRAMS[program], fullgraph=True, backend="aot_eager")
    for _ in range(2):
        out, found, moved = _step(compiled, operands)
        assert type(out) is type(wanted)
        if isinstance(out, DTensor):
            assert out.placements == wanted.placements and out.shape == wanted.shape
        torch.testing.assert_close(_whole(out), _whole(wanted))
        for have, want in zip(found, grads, strict=True):
            assert (have is None) == (want is None)
            if have is not None:
                torch.testing.assert_close(_whole(have), _whole(want))
        sums = moved.pop("all_reduce", 0)  # eager sums the gradients of all replicated parameters together
        assert sums <= count.get("all_reduce", 0) + len(operands) - 1
        # a graph gathers a leaf once where eager gathers it at each read
        eager = {kind: n for kind, n in count.items() if kind != "all_reduce"}
        assert moved.keys() == eager.keys() and all(n <= eager[kind] for kind, n in moved.items())


@on_ranks(2)
def test_another_layout_is_another_graph() -> None:
    """Layouts are guarded: an operand that is placed otherwise is not taken for the one that was traced."""
    torch._dynamo.reset()
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
    value = torch.randn(4, 4, dtype=torch.float64)
    compiled = torch.compile(lambda x: x.sum(0) * 2, fullgraph=True, backend="aot_eager")
    for placement in (Shard(0), Shard(1), Replicate(), Shard(0)):
        out = compiled(distribute_tensor(value, mesh, [placement]))
        torch.testing.assert_close(out.full_tensor().cpu(), value.sum(0) * 2)
    assert compiled(distribute_tensor(value, mesh, [Shard(0)])).is_partial()


@on_ranks(2)
def test_results_go_on_outside() -> None:
    """DTensors that leave a graph are DTensors: operations outside, another graph, gradients through all."""
    torch._dynamo.reset()
    _, (x, w, v) = _operands("column")
    first = torch.compile(lambda x, w: F.linear(x, w).relu(), fullgraph=True, backend="aot_eager")
    second = torch.compile(lambda h, v: F.linear(h, v), fullgraph=True, backend="aot_eager")

    def run(one: Any, two: Any) -> list[Any]:
        for operand in (x, w, v):
            operand.grad = None
        out = two(one(x, w) + 1.0, v)
        out.full_tensor().square().sum().backward()
        return [out.full_tensor(), *(operand.grad.full_tensor() for operand in (x, w, v))]

    wanted = run(lambda x, w: F.linear(x, w).relu(), lambda h, v: F.linear(h, v))
    with warnings.catch_warnings():  # Dynamo looks for .grad of what goes into a graph, leaf or not
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        found = run(first, second)
    for have, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(have, want)
    with torch.no_grad():
        assert torch.equal(first(x, w).full_tensor(), F.linear(x, w).relu().full_tensor())


@pytest.mark.not_on("torch-npu-sim", reason="torch.compile's inductor wants triton-ascend for NPUs")
@on_ranks(2)
def test_ranks_with_unequal_parts_do_not_share_a_graph() -> None:
    """Graphs are cached on disk, where all ranks of a machine find them; what goes in is alike on both ranks here."""
    torch._dynamo.reset()
    with warnings.catch_warnings():  # its import warns
        warnings.simplefilter("ignore")
        importlib.import_module("torch._inductor.compile_fx")
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
    value = torch.arange(5.0)
    x = distribute_tensor(value, mesh, [Replicate()])
    compiled = torch.compile(lambda x: x.redistribute(placements=[Shard(0)]) * 2 + 1, fullgraph=True)
    for rank in range(2):  # one after the other, so that the second would find the first one's graph
        if rank == mesh.get_rank():
            assert compiled(x).to_local().tolist() == (value * 2 + 1).chunk(2)[rank].tolist()
        torch.distributed.barrier()


@on_ranks(2)
def test_in_place() -> None:
    torch._dynamo.reset()
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
    value = torch.randn(4, 4, dtype=torch.float64)
    x = distribute_tensor(value, mesh, [Shard(0)])

    def add(x: Any) -> Any:
        x.add_(1.0)
        return x * 2

    out = torch.compile(add, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(x.full_tensor().cpu(), value + 1)
    torch.testing.assert_close(out.full_tensor().cpu(), (value + 1) * 2)


@on_ranks(2)
def test_what_is_not_traced_is_named() -> None:
    torch._dynamo.reset()
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
    x = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)])

    def fails(function: Any, text: str) -> None:
        with pytest.raises(Exception, match=text):
            torch.compile(function, fullgraph=True, backend="aot_eager")(x)

    def works(function: Any, want: torch.Tensor, whole: bool = True) -> None:
        made = torch.compile(function, fullgraph=whole, backend="aot_eager")(x)
        torch.testing.assert_close(_whole(made), want)

    one, part = x.full_tensor(), x.to_local()
    fails(lambda x: F.dropout(x, 0.5), "dropout of a DTensor is not traced; call it on the local tensor .to_local., or")
    works(lambda x: F.dropout(x.to_local(), 0.0), part)
    fails(lambda x: x.amax(), "amax of a DTensor is not traced; call it on the local tensor .*torch.compiler.disable")
    works(lambda x: x.to_local().amax(), part.amax())
    assert torch.equal(torch.compile(lambda x: x.to_local() * 2, fullgraph=True, backend="eager")(x), part * 2)
    works(lambda x: torch.compiler.disable(torch.amax)(x * 2), (one * 2).amax(), whole=False)
    fails(lambda x: x + torch.ones(4, 4, device=x.device), "a plain tensor; distribute")
    works(lambda x: x + DTensor.from_local(torch.ones(2, 4, device=x.device), mesh, [Shard(0)]), one + 1)
    other = DeviceMesh(device_type(), [1, 0])
    fails(lambda x: x.redistribute(other, [Shard(0)]), "to another mesh is not traced; call it outside")
    torch.testing.assert_close(
        _whole(torch.compile(lambda x: x * 2, backend="aot_eager")(x).redistribute(other, [Shard(0)])), one * 2
    )
    fails(lambda x: x.redistribute(), "redistribute: pass the target")
    works(lambda x: x.redistribute(placements=[Replicate()]) * 2, one * 2)
    layout = Layout((2,), ("tp",))("tp", "None")
    fails(lambda x: x.redistribute(layout), "redistribute to a Layout is not traced; pass its placements")
    works(lambda x: x.redistribute(placements=layout.placements) * 2, one * 2)
    fails(
        lambda x: x.redistribute(placements=[Replicate()], forward_dtype=torch.float64), "cast with to\\(dtype\\) first"
    )
    works(lambda x: x.to(torch.float64).redistribute(placements=[Replicate()]) * 2, one.double() * 2)
    fails(
        lambda x: DTensor.from_local(x.to_local(), mesh, [Shard(0)], grad_placements=[Shard(0)]),
        "without run_check and grad",
    )
    works(lambda x: DTensor.from_local(x.to_local(), mesh, [Shard(0)]) * 2, one * 2)
    again = functools.partial(checkpoint, use_reentrant=False)
    fails(lambda x: again(torch.sin, x), "is not traced; checkpoint modules that take and return plain tensors")
    works(lambda x: again(torch.sin, x.to_local()), part.sin())
    torch.testing.assert_close(
        _whole(again(torch.compile(torch.sin, fullgraph=True, backend="aot_eager"), x)), one.sin()
    )


def _whole(x: Any) -> torch.Tensor:
    return x.full_tensor().detach() if isinstance(x, DTensor) else x.detach()


def of_any_size(x):
    return (x * 2).view(x.shape[0], x.size(1), -1).sin().sum(-1)


@on_ranks(2)
@pytest.mark.parametrize("strided", [False, True])
def test_sizes_and_strides_that_change(strided):
    mesh = init_device_mesh(device_type(), (2,))
    torch.compiler.reset()  # it counts how often a function is compiled
    compiled = torch.compile(of_any_size, backend="aot_eager", fullgraph=True)
    for dim in (0, 1):
        for size in (4, 6, 8):
            shape = (size, 2, 3) if dim == 0 else (2, size, 3)
            whole = torch.linspace(0, 1, math.prod(shape), dtype=torch.float64, device=device_type()).view(shape)
            part = whole.chunk(2, dim)[mesh.get_local_rank()]
            x = DTensor.from_local(part if strided else part.contiguous(), mesh, [Shard(dim)])
            assert torch.allclose(compiled(x).full_tensor(), of_any_size(whole))
