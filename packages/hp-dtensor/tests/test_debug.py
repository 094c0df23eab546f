"""CommDebugMode: each collective with its bytes, axis, module, line and phase, and nothing left behind."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint

from hp_dtensor import DTensor, Layout, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_dtensor.creation.sharding_plan import shard_module
from hp_dtensor.debugging.debug import Collective, CommDebugMode, Total
from hp_platform import get_platform
from hp_platform.communication.checks import observers
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
R = Replicate()
BYTES = 4 * 6 * 8  # of the activations: 4 tokens of 6 numbers


def _line(mark: str) -> int:
    """The line of this file that ends with a mark."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {mark}"))


def _linear(rows: int, columns: int) -> nn.Linear:
    return nn.Linear(columns, rows, dtype=torch.float64, device=device_type())


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = _linear(8, 6), _linear(6, 8)

    def forward(self, x: Any) -> Any:
        return self.down(torch.relu(self.up(x)))  # down is called


class Net(nn.Module):
    def __init__(self, depth: int = 2, recompute: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(depth))
        self.recompute, self.fails = recompute, False

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            if self.recompute:
                x = checkpoint(lambda x, layer=layer: torch.tanh(layer(x)), x, use_reentrant=False)
            else:
                x = x + layer(x)
            if self.fails:
                raise KeyError("on purpose")
        return x


def _parallel(world: int, net: Net, tokens: str = "None") -> tuple[Any, Any]:
    """A net, column parallel and then row parallel, and its input, which has a history.

    Args:
        world: ranks.
        net: is changed.
        tokens: the axis that cuts the tokens between the layers.
    """
    torch.set_num_threads(1)
    tensor = Layout((world,), ("tensor",))
    parameters = {
        "up.weight": tensor("tensor", "None"),
        "up.bias": tensor("tensor"),
        "down.weight": tensor("None", "tensor"),
    }
    plan = {
        "parameter": {f"layers.*.{name}": layout for name, layout in parameters.items()},
        "forward": {"layers.*.up.input": tensor(), "layers.*.down.output": tensor(tokens, "None")},
    }
    shard_module(net, plan)
    mesh = init_device_mesh(device_type(), (world,), ("tensor",))
    x = torch.randn(4, 6, dtype=torch.float64, device=device_type(), requires_grad=True)
    return mesh, distribute_tensor(x, mesh, [R if tokens == "None" else Shard(0)]) * 1.0


def _hooks(net: nn.Module) -> list[Any]:
    own = [
        hook for each in net.modules() for hook in (*each._forward_hooks.values(), *each._forward_pre_hooks.values())
    ]
    glob = (
        torch_module._global_forward_pre_hooks,
        torch_module._global_forward_hooks,
        torch_module._global_backward_hooks,
    )
    return [*own, *(hook for hooks in glob for hook in hooks.values()), *observers]


def _seen(comm: CommDebugMode) -> list[tuple[Any, ...]]:
    assert all(event.file == __file__ and event.axis == "tensor" for event in comm.events)
    return [(e.phase, e.module, e.kind, e.bytes, e.line) for e in comm.events]


@on_ranks(2, 4)
def test_a_parallel_mlp_to_the_last_byte() -> None:
    net = Net()
    mesh, x = _parallel(torch.distributed.get_world_size(), net)
    before = _hooks(net)
    with CommDebugMode(mesh=mesh) as comm:
        y = net(x)
        y.sum().backward()  # backward is called
    forward, backward = _line("down is called"), _line("backward is called")
    assert _seen(comm) == [
        ("forward", "Net.layers.0.down", "all_reduce", BYTES, forward),  # in a hook of the module's own
        ("forward", "Net.layers.1.down", "all_reduce", BYTES, forward),
        ("backward", "Net.layers.1.up", "all_reduce", BYTES, backward),
        ("backward", "Net.layers.0.up", "all_reduce", BYTES, backward),
    ]
    assert comm.get_total_counts() == 4 and comm.get_comm_counts() == {"all_reduce": 4}
    assert comm.totals("phase", "axis") == {
        ("forward", "tensor"): Total(2, 2 * BYTES),
        ("backward", "tensor"): Total(2, 2 * BYTES),
    }
    assert comm.totals() == {(): Total(calls=4, bytes=4 * BYTES)} and CommDebugMode().totals() == {(): Total()}
    assert _hooks(net) == before
    net(x)
    assert comm.get_total_counts() == 4


@on_ranks(2)
def test_what_modules_own_hooks_move_is_theirs_in_backward_too() -> None:
    net = Net(depth=1)
    mesh, x = _parallel(2, net, tokens="tensor")
    with CommDebugMode(mesh=mesh) as comm:
        y = net(x)
        y.sum().backward()
    assert [(e.phase, e.module, e.kind, e.bytes) for e in comm.events] == [
        ("forward", "Net.layers.0.up", "all_gather", BYTES),
        ("forward", "Net.layers.0.down", "reduce_scatter", BYTES),
        ("backward", "Net.layers.0.down", "all_gather", BYTES),
        ("backward", "Net.layers.0.up", "reduce_scatter", BYTES),
    ]


@on_ranks(2)
def test_the_table_has_a_row_for_each_place_and_their_sum() -> None:
    net = Net(depth=1)
    mesh, x = _parallel(2, net)
    with CommDebugMode(mesh=mesh) as comm:
        for _ in range(3):
            net(x)
    rows = [line.replace("│", " ").replace("|", " ").split() for line in comm.table().splitlines()]
    place = f"test_debug.py:{_line('down is called')}"
    assert ["forward", "Net.layers.0.down", "all_reduce", "tensor", "3", str(3 * BYTES), place] in rows
    assert ["total", "3", str(3 * BYTES)] in rows and len([row for row in rows if "tensor" in row]) == 1
    with pytest.raises(
        ValueError, match="totals: 'size' is not an attribute of Collective, which has kind, axis, bytes"
    ):
        comm.totals("size")


@on_ranks(2)
def test_a_forward_that_is_done_again_in_backward_is_its_modules() -> None:
    net = Net(depth=1, recompute=True)
    mesh, x = _parallel(2, net)
    with CommDebugMode(mesh=mesh) as comm:
        net(x).sum().backward()
    places = [(event.phase, event.module) for event in comm.events]
    assert places == [("forward", "Net.layers.0.down"), *(("backward", f"Net.layers.0.{n}") for n in ("down", "up"))]


@on_ranks(2)
def test_backward_on_another_thread_is_told_by_the_waiting_line() -> None:
    net = Net(depth=1)
    mesh, x = _parallel(2, net)
    with CommDebugMode(mesh=mesh) as comm:
        thread = threading.Thread(target=net(x).sum().backward)
        thread.start(), thread.join()  # waits for the thread
    assert _seen(comm)[1:] == [("backward", "Net.layers.0.up", "all_reduce", BYTES, _line("waits for the thread"))]


@on_ranks(4)
def test_axes_have_the_names_of_the_mesh() -> None:
    mesh = init_device_mesh(device_type(), (2, 2), ("outer", "inner"))
    local = torch.ones(4, 4, device=device_type())
    x = DTensor.from_local(local, mesh, [Partial(), Shard(0)])
    flat = mesh._flatten("both")
    with CommDebugMode(mesh=mesh) as named, CommDebugMode() as all_names, CommDebugMode(mesh=[]) as nameless:
        y = x.redistribute(placements=[R, Shard(0)])
        y = y.redistribute(placements=[R, Shard(1)])
        y.redistribute(placements=[R, R])
        get_platform().collectives.barrier(flat.get_group())
    kinds = [
        ("all_reduce", "outer", 64),
        ("all_to_all", "inner", 64),
        ("all_gather", "inner", 128),
        ("barrier", "both", 0),
    ]
    assert [(e.kind, e.axis, e.bytes) for e in named.events] == kinds
    assert ["inner" in event.axis.split("|") for event in all_names.events] == [False, True, True, False]
    rank = torch.distributed.get_rank()
    pairs = [f"ranks {rank % 2}, {rank % 2 + 2}", *[f"ranks {rank // 2 * 2}, {rank // 2 * 2 + 1}"] * 2]
    assert [event.axis for event in nameless.events] == [*pairs, "ranks 0, 1, 2, 3"]


@on_ranks(2)
def test_contexts_nest_and_are_entered_again() -> None:
    net = Net(depth=1)
    mesh, x = _parallel(2, net)
    before = _hooks(net)
    outer, inner = CommDebugMode(mesh=mesh), CommDebugMode(mesh=mesh)
    with outer:
        with outer, inner:
            net(x)
        net(x)
    net(x)
    with outer:
        y = net(x)
    assert (outer.get_total_counts(), inner.get_total_counts()) == (3, 1)
    with outer:
        y.sum().backward()  # its forward was seen, the last time
    assert outer.events[-1].module == "Net.layers.0.up" and _hooks(net) == before


@on_ranks(2)
def test_nothing_is_left_after_an_exception() -> None:
    net = Net()
    mesh, x = _parallel(2, net)
    before = _hooks(net)
    net.fails = True
    with pytest.raises(KeyError, match="on purpose"), CommDebugMode(mesh=mesh) as comm:
        net(x)
    assert _hooks(net) == before and comm.get_total_counts() == 1
    with comm:
        with pytest.raises(KeyError):
            net(x)
        get_platform().collectives.barrier(mesh.get_group())
        net.fails = False
        net(x).sum().backward()
    assert [event.module.rpartition(".")[0] for event in comm.events[1:]] == [
        "Net.layers.0",
        "",
        *[f"Net.layers.{i}" for i in (0, 1, 1, 0)],
    ]
    assert _hooks(net) == before


@on_ranks(2)
def test_modules_that_nobody_holds_have_a_name_too() -> None:
    mesh = init_device_mesh(device_type(), (2,), ("tensor",))
    x = DTensor.from_local(torch.ones(3, device=device_type()), mesh, [Partial()])

    class Reduce(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.redistribute(placements=[R])

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = Reduce()

        def forward(self, x: Any) -> Any:
            self.held(x)
            return Reduce()(x)

    outer = Outer()
    with CommDebugMode(mesh=mesh) as comm:
        outer.held(x)
        outer(x)
        outer.held(x)
        x.redistribute(placements=[R])
    assert [e.module for e in comm.events] == ["Reduce", "Outer.held", "Outer.(Reduce)", "Outer.held", ""]


@on_ranks(2)
def test_the_trace_is_what_was_seen(tmp_path: Path) -> None:
    net = Net(depth=1)
    mesh, x = _parallel(2, net)
    collectives, value = get_platform().collectives, torch.ones(5, device=device_type())
    with CommDebugMode(mesh=mesh) as comm:
        net(x).sum().backward()
        waited = collectives.all_reduce(value, group=mesh.get_group(), async_op=True)
        left = collectives.all_gather(
            torch.empty(10, device=device_type()), value, group=mesh.get_group(), async_op=True
        )
        assert waited is not None and left is not None and comm.events[-2].duration is None
        waited.wait()
    assert [event.duration is None for event in comm.events] == [False, False, False, True]
    assert all(isinstance(e, Collective) and 0 < (e.duration or 1) < 60 * 10**9 for e in comm.events)
    path = tmp_path / f"trace{torch.distributed.get_rank()}.json"  # the ranks share the folder
    comm.chrome_trace(path)
    left.wait()
    assert comm.events[-1].duration is not None
    trace = json.loads(path.read_text(encoding="utf-8"))
    labels = {e["name"]: e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert labels == {"process_name": f"rank {torch.distributed.get_rank()}", "thread_name": "tensor"}
    events = [event for event in trace["traceEvents"] if event["ph"] != "M"]
    assert [e["name"] for e in events] == ["all_reduce", "all_reduce", "all_reduce", "all_gather"]
    assert [e["ph"] for e in events] == ["X", "X", "X", "i"] and [e["cat"] for e in events][:2] == [
        "forward",
        "backward",
    ]
    times = [e["ts"] for e in events]
    assert times == sorted(times) and all(e["dur"] > 0 for e in events[:3])
    assert times[1] - times[0] + 1 >= events[0]["dur"]  # one after the other; a microsecond for rounding
    assert events[0]["args"] == {
        "kind": "all_reduce",
        "axis": "tensor",
        "bytes": BYTES,
        "phase": "forward",
        "module": "Net.layers.0.down",
        "file": __file__,
        "line": _line("down is called"),
    }
