"""shard_module: parity with one process, which names stand for what, and what is refused before anything changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hp_dtensor import DTensor, Layout, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_dtensor.creation.sharding_plan import shard_module
from hp_platform import count_collectives
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
R = Replicate()


def _linear(rows: int, columns: int) -> nn.Linear:
    return nn.Linear(columns, rows, dtype=torch.float64, device=device_type())


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = _linear(7, 6), _linear(6, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Two blocks, a norm, a buffer, a head whose weight is shared with another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"mlp": Mlp()}) for _ in range(2))
        self.norm = nn.LayerNorm(6, dtype=torch.float64, device=device_type())
        self.head, self.other = _linear(6, 6), _linear(6, 6)
        self.other.weight = self.head.weight
        self.register_buffer("shift", torch.ones(6, dtype=torch.float64, device=device_type()))

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> Any:
        for layer in self.layers:
            x = x + layer["mlp"](x)
        x = self.norm(x) + self.shift
        return self.head(x), self.other(x if scale is None else x * scale)


def _plan(layout: Any) -> dict[str, Any]:
    return {
        "forward": {
            "input": layout("dp", "None"),
            "output": [layout("dp", "None"), None],
            "layers.*.mlp.output": layout("dp", "None"),
        },
        "parameter": {
            "layers.*.mlp.up.weight": layout("tp", "None"),
            "layers.*.mlp.up.bias": layout("tp"),
            "layers.*.mlp.down.weight": layout("None", "tp"),
            "head.weight": layout("tp", "None"),
        },
    }


@on_ranks(4)
def test_a_plan_over_two_axes_equals_one_process() -> None:
    model = Model()
    reference = copy.deepcopy(model)
    plan = _plan(Layout((2, 2), ("dp", "tp")))
    assert shard_module(model, plan) is model
    mesh = init_device_mesh(device_type(), (2, 2), ("dp", "tp"))
    for layer in model.layers:
        assert layer["mlp"].up.weight.placements == (R, Shard(0)) and layer["mlp"].up.bias.placements == (R, Shard(0))
        assert layer["mlp"].down.weight.placements == (R, Shard(1)) and layer["mlp"].down.bias.placements == (R, R)
    assert model.head.weight is model.other.weight and model.head.weight.placements == (R, Shard(0))
    assert isinstance(model.shift, DTensor) and all(isinstance(p, nn.Parameter) for p in model.parameters())
    x = torch.randn(4, 6, dtype=torch.float64, device=device_type())
    first, second = reference(x)
    (first * second).sum().backward()
    part = x.chunk(2)[mesh.get_local_rank("dp")]  # a plain input is this rank's part
    with count_collectives() as counts:
        got = model(part)
    assert type(got) is tuple and got[0].placements == (Shard(0), R) and got[1].placements == (Shard(0), Shard(1))
    assert counts["all_reduce"] == 2 and counts["all_gather"] == 1
    (got[0] * got[1]).sum().backward()
    for mine, want in zip(got, (first, second), strict=True):
        torch.testing.assert_close(mine.full_tensor(), want, rtol=1e-12, atol=1e-12)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-12, atol=1e-12, msg=name)


@on_ranks(2)
def test_inputs_by_position_and_by_name() -> None:
    mesh = init_device_mesh(device_type(), (2,), ("tp",))
    where, whole = (mesh, [Shard(0)]), (mesh, [R])
    x, scale = torch.ones(4, 6, dtype=torch.float64), torch.ones(6, dtype=torch.float64)
    x, scale = x.to(device_type()), scale.to(device_type())
    model = shard_module(Model(), {"forward": {"input": [where, whole], "head.input": {"input": where}}})
    assert all(isinstance(p, DTensor) and p.placements == (R,) for p in model.parameters()), "all are replicated"
    model.head.forward = lambda input: nn.functional.linear(input, model.head.weight)
    with pytest.raises(ValueError, match="names the input 'input', but the inputs passed by name"):
        model(x[:2], scale)
    with pytest.raises(ValueError, match=r"'input' of Model has 2 layouts for 1 positional inputs; pass None for"):
        model(x)
    with pytest.raises(TypeError, match="'input' must be a tensor, got a int"):
        model(x, 3)
    other = distribute_tensor(x, init_device_mesh(device_type(), (2,), ("x",)), [R])
    with pytest.raises(
        ValueError, match="'input' is on DeviceMesh.*'x'.*, but the plan's layout is on DeviceMesh.*'tp'"
    ):
        model(other, scale)
    model = shard_module(Model(), {"forward": {"input": where}})
    assert model(x=x[:2])[0].shape == (4, 6) and model(distribute_tensor(x, mesh, [R]))[0].placements == (Shard(0),)
    with pytest.raises(ValueError, match="'input' of Model: no input is a tensor"):
        model()
    pair = shard_module(nn.Identity(), {"forward": {"output": [(mesh, [Partial()])]}})
    assert pair(x).full_tensor().sum() == 2 * x.sum()


@on_ranks(2)
def test_what_is_refused_leaves_the_module_alone() -> None:
    layout, model = Layout((2,), ("tp",)), Model()
    rows, whole = layout("tp", "None"), layout("None", "None")
    for plan, error, text in (
        ({"parameters": {}}, ValueError, r"unknown section 'parameters' .* expected one of \['forward', 'param"),
        ({}, ValueError, "the plan has no layouts"),
        (
            {"parameter": {"head.wieght": rows}},
            ValueError,
            "'head.wieght' matches no parameter of Model; near: head.we",
        ),
        ({"parameter": {"layers.*.weight": rows}}, ValueError, r"'layers.\*.weight' matches no parameter"),
        ({"parameter": {"head.*": rows, "*.weight": whole}}, ValueError, r"'head.weight' is named by 'head.\*' and by"),
        ({"parameter": {"head.weight": rows, "other.weight": whole}}, ValueError, "'other.weight' is named by 'head.w"),
        ({"parameter": {"head.bias": rows, "norm.bias": layout("None", "tp")}}, ValueError, r"Shard\(1\) of a tensor"),
        ({"parameter": {"head.weight": "tp"}}, TypeError, "'head.weight' needs a layout, got str 'tp'"),
        ({"parameter": {"head.weight": layout}}, ValueError, "describes ranks only; call it"),
        ({"forward": {"layers.*.mpl.input": rows}}, ValueError, r"matches no submodule of Model; near: layers"),
        ({"forward": {"head": rows}}, ValueError, r"'head' in 'forward' must end with one of \['input', 'output'\]"),
        ({"forward": {"head.input": rows, "h*.input": whole}}, ValueError, "the input of 'head' is named by"),
        ({"forward": {"output": {"x": rows}}}, TypeError, "'output' is a mapping, but outputs have no names"),
        ({"forward": {"input": [rows, 3]}}, TypeError, r"'input\[1\]' needs a layout, got int 3"),
        (
            {"parameter": {"head.weight": rows, "norm.weight": Layout((1, 2), ("a", "b"))()}},
            ValueError,
            "several meshes",
        ),
    ):
        with pytest.raises(error, match=text):
            shard_module(model, plan)
    assert not any(isinstance(p, DTensor) for p in model.parameters()) and not model._forward_pre_hooks
    for mended in (
        {"parameter": {"head.weight": rows}},
        {"parameter": {"head.weight": layout("tp", "None"), "norm.weight": layout("None")}},
        {"forward": {"head.input": rows, "output": whole}},
        {"forward": {"input": [rows, None]}},
    ):
        shard_module(Model(), mended)
