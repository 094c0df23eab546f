"""Which modules a plan names, and that it does what torch's own does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed.tensor.parallel as torch_styles
import torch.nn.functional as F
from torch import nn

import hp_styles
from hp_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_platform import count_collectives
from hp_styles import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from hp_testing import device_type, on_ranks

R, P = Replicate(), Partial()


def _linear(rows: int, columns: int, bias: bool = True) -> nn.Linear:
    return nn.Linear(columns, rows, bias=bias, dtype=torch.float64, device=device_type())


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.ModuleDict({"up": _linear(12, 6), "down": _linear(6, 12)})
        self.norm = nn.LayerNorm(6, dtype=torch.float64, device=device_type())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp["down"](F.gelu(self.mlp["up"](self.norm(x))))


class Model(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _mesh() -> Any:
    return init_device_mesh(device_type(), (torch.distributed.get_world_size(),), ("tp",))


def _rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, device=device_type())


class Named(ParallelStyle):
    """Tells what it is applied to."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def apply(self, module: Any, device_mesh: Any) -> Any:
        self.seen.append((module, self.src_data_rank))
        return module


# ---- which modules ----
@on_ranks(1)
def test_patterns_match_part_by_part() -> None:
    model, mesh = Model(3), _mesh()

    def names(pattern: str) -> list[str]:
        style = Named()
        parallelize_module(model, mesh, {pattern: style})
        known = {id(module): name for name, module in model.named_modules()}
        return [known[id(module)] for module, _ in style.seen]

    assert names("layers.*") == ["layers.0", "layers.1", "layers.2"], "not what is inside them"
    assert names("layers.*.mlp.up") == [f"layers.{i}.mlp.up" for i in range(3)]
    assert names("layers.[02].*.d*") == ["layers.0.mlp.down", "layers.2.mlp.down"]
    assert names("layers.1.norm") == ["layers.1.norm"] and names("") == [""] and names("l?yers") == ["layers"]
    assert names("*") == ["layers"] and names("*.*.norm") == [f"layers.{i}.norm" for i in range(3)]
    model.layers[1].extra = nn.Identity()
    assert names("layers.*.extra") == ["layers.1.extra"], "what some layers have"


@on_ranks(1)
def test_keys_that_match_nothing() -> None:
    model, mesh = Model(), _mesh()
    for key in ("*.up", "layers", "norm*"):
        style = Named()
        if key == "layers":
            parallelize_module(model, mesh, {key: style})
            assert style.seen
            continue
        with pytest.raises(ValueError, match="matches no submodule of Model"):
            parallelize_module(model, mesh, {key: style})
    with pytest.raises(ValueError, match=r"'layers\.0\.mlp\.upp' matches no .* near: layers\.0\.mlp\.up"):
        parallelize_module(model, mesh, {"layers.0.mlp.upp": Named()})
    first = Named()
    with pytest.raises(
        ValueError, match=r"'nothing' matches no submodule of Model; there are layers, layers\.0, .*, \.\.\.$"
    ):
        parallelize_module(model, mesh, {"layers.0": first, "nothing": Named()})
    assert not first.seen, "nothing was changed"
    with pytest.raises(ValueError, match=r"'layers\.1' is matched by 'layers\.\*' and by 'layers\.1'; keep one"):
        parallelize_module(model, mesh, {"layers.*": Named(), "layers.1": Named()})
    with pytest.raises(TypeError, match="parallelize_plan must be a ParallelStyle or {pattern: style}, got list"):
        parallelize_module(model, mesh, [Named()])  # type: ignore[arg-type]


@on_ranks(1)
def test_a_module_with_two_names_is_changed_once() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2)})
    model["b"] = model["a"]
    style = Named()
    parallelize_module(model, _mesh(), {"?": style})
    assert len(style.seen) == 1
    style = Named()
    parallelize_module(model, _mesh(), {"b": style})
    assert [module for module, _ in style.seen] == [model["a"]]
    with pytest.raises(ValueError, match="'b' is matched by 'a' and by 'b'"):
        parallelize_module(model, _mesh(), {"a": Named(), "b": Named()})


@on_ranks(2)
def test_whose_parameters_count() -> None:
    mesh = _mesh()
    me = mesh.get_local_rank()
    for source, first in ((0, 0.0), (1, 1.0), (None, float(me))):
        linear = _linear(4, 3)
        nn.init.constant_(linear.weight, me)
        style = ColwiseParallel()
        parallelize_module(linear, mesh, style, src_data_rank=source)
        assert linear.weight.to_local().eq(first).all() and style.src_data_rank == 0


@on_ranks(2)
def test_styles_are_applied_directly_and_keep_no_state() -> None:
    mesh, linear, whole = _mesh(), _linear(4, 4), _rand(3, 4)
    want = linear(whole)
    style = ColwiseParallel(output_layouts=Replicate())
    before = dict(vars(style))
    assert style.apply(linear, mesh) is linear
    torch.testing.assert_close(linear(whole), want)
    parallelize_module(_linear(4, 4), mesh, style, src_data_rank=None)
    assert vars(style) == before and style.src_data_rank == 0


@on_ranks(2)
def test_what_is_torchs_own_is_refused_by_its_name() -> None:
    from torch.distributed.device_mesh import init_device_mesh as torchs_mesh
    from torch.distributed.tensor import distribute_tensor as torchs_distribute
    from torch.distributed.tensor.parallel import ColwiseParallel as Torchs

    text = r"torch's own torch\.distributed\.\S+\.ColwiseParallel, .* from hp_styles import ColwiseParallel"
    for plan in (Torchs(), {"up": Torchs()}, {"up": Torchs}):
        with pytest.raises(TypeError, match=text):
            parallelize_module(Model(1).layers[0].mlp, _mesh(), plan)
    theirs = torchs_mesh(device_type(), (2,))
    with pytest.raises(TypeError, match=r"a DeviceMesh of hp_dtensor, got torch\.distributed\.device_mesh"):
        parallelize_module(_linear(4, 4), theirs, ColwiseParallel())  # type: ignore[arg-type]
    linear = _linear(4, 4)
    linear.weight = nn.Parameter(torchs_distribute(linear.weight.data, theirs))
    with pytest.raises(TypeError, match="Linear.weight: got torch's own DTensor"):
        parallelize_module(linear, _mesh(), ColwiseParallel())
    with pytest.raises(TypeError, match="distribute_tensor: got torch's own DTensor"):
        parallelize_module(nn.Sequential(linear), _mesh(), {"0.weight": "colwise"})


@on_ranks(2)
def test_torchs_meshes_placements_and_tensors_in_styles() -> None:
    from torch.distributed import tensor as torchs
    from torch.distributed.device_mesh import init_device_mesh as torchs_mesh

    theirs, x = torchs_mesh(device_type(), (2,)), _rand(4, 4)
    into = PrepareModuleInput(input_layouts=R, desired_input_layouts=R)
    for do in (
        lambda: into.apply(_linear(4, 4), theirs),
        lambda: hp_styles.ContextParallel().apply(_linear(4, 4), theirs),
        lambda: hp_styles.DSAIndexerContextParallel().apply(_linear(4, 4), theirs),
        lambda: hp_styles.context_parallel_shard(x, theirs, seq_dim=0),
        lambda: hp_styles.context_parallel_unshard(x, theirs, seq_dim=0),
        lambda: hp_styles.context_parallel(theirs).__enter__(),
    ):
        with pytest.raises(
            TypeError, match=r"a DeviceMesh of hp_dtensor, got torch\.distributed.* hp_dtensor\.init_device"
        ):
            do()
    with pytest.raises(
        TypeError, match=r"of hp_dtensor, got a torch\.distributed.*; create it with hp_dtensor\.init_device"
    ):
        hp_styles.SequenceParallel().apply(nn.LayerNorm(4), theirs)
    cut, whole = torchs.Shard(0), torchs.Replicate()
    for make in (
        lambda: ColwiseParallel(output_layouts=whole),
        lambda: RowwiseParallel(input_layouts=whole),
        lambda: PrepareModuleInput(input_layouts=cut, desired_input_layouts=whole),
        lambda: PrepareModuleInput(input_layouts=(R, cut), desired_input_layouts=(R, R)),
        lambda: PrepareModuleInput(input_kwarg_layouts={"x": cut}, desired_input_kwarg_layouts={"x": whole}),
        lambda: hp_styles.PrepareModuleOutput(output_layouts=cut, desired_output_layouts=whole),
    ):
        with pytest.raises(
            TypeError, match=r"_layouts has (Shard|Replicate)\(.*\), a torch\.\S*, .*from hp_dtensor import"
        ):
            make()
    tensor = torchs.distribute_tensor(x, theirs, [cut])
    model = parallelize_module(_linear(4, 4), _mesh(), ColwiseParallel())
    for give in (model, lambda x: DTensor.from_local(x, _mesh(), [R]), lambda x: distribute_tensor(x, _mesh(), [R])):
        with pytest.raises(TypeError, match=r"torch's own DTensor .* x.full_tensor\(\) returns the global tensor"):
            give(tensor)
    with pytest.raises(
        ValueError, match=r"add: a torch\.distributed\.tensor\.DTensor can't be mixed with DTensors of hp"
    ):
        distribute_tensor(x, _mesh(), [R]) + tensor


@on_ranks(2)
def test_what_becomes_of_parameters() -> None:
    mesh = _mesh()
    model = Model(1)
    model.layers[0].mlp["up"].weight.requires_grad_(False)
    model.layers[0].mlp["down"].weight.tag = "kept"
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    plan = {f"layers.0.mlp.{name}": style for name, style in plan.items()} | {"layers.0.norm": SequenceParallel()}
    parallelize_module(model, mesh, plan)
    up, down, norm = model.layers[0].mlp["up"], model.layers[0].mlp["down"], model.layers[0].norm
    assert up.weight.placements == up.bias.placements == (Shard(0),) and not up.weight.requires_grad
    assert down.weight.placements == (Shard(1),) and down.bias.placements == (R,) and down.weight.tag == "kept"
    assert norm.weight.placements == norm.bias.placements == (R,)
    assert all(isinstance(p, nn.Parameter) and p.is_leaf for p in model.parameters())
    embedding = parallelize_module(nn.Embedding(5, 3, device=device_type()), mesh, ColwiseParallel())
    assert embedding.weight.placements == (Shard(1),)
    embedding = parallelize_module(nn.Embedding(5, 3, device=device_type()), mesh, RowwiseParallel())
    assert embedding.weight.placements == (Shard(0),)
    container = nn.Sequential(nn.LayerNorm(3, device=device_type()), nn.Dropout())
    assert parallelize_module(container, mesh, SequenceParallel())[0].weight.placements == (R,)


# ---- against torch's own ----
def _torch_plan(styles: Any, replicate: Any, shard: Any, sequence: bool) -> dict[str, Any]:
    stream = shard(1) if sequence else replicate
    plan = {
        "layers.*.mlp.up": styles.ColwiseParallel(input_layouts=stream),
        "layers.*.mlp.down": styles.RowwiseParallel(output_layouts=stream),
    }
    return plan | ({"layers.*.norm": styles.SequenceParallel(use_local_output=True)} if sequence else {})


@on_ranks(2)
@pytest.mark.parametrize("sequence", [True, False])
def test_a_plan_for_torch_is_a_plan_for_us(sequence: bool) -> None:
    if device_type() == "npu":
        pytest.skip("torch's own plan reduces float64, which hccl doesn't")
    model, x = Model(), _rand(2, 6, 6)
    theirs = copy.deepcopy(model)
    mesh = _mesh()
    torch_mesh = torch.distributed.init_device_mesh(device_type(), (2,))
    parallelize_module(model, mesh, _torch_plan(hp_styles, R, Shard, sequence))
    torch_plan = _torch_plan(
        torch_styles, torch.distributed.tensor.Replicate(), torch.distributed.tensor.Shard, sequence
    )
    torch_styles.parallelize_module(theirs, torch_mesh, torch_plan)
    part = x.chunk(2, 1)[mesh.get_local_rank()].clone() if sequence else x
    with count_collectives() as counted:
        got = model(part)
    want = theirs(part)
    assert type(got) is type(want) is torch.Tensor
    torch.testing.assert_close(got, want)
    kinds = {"all_gather": 2 + 1, "reduce_scatter": 2} if sequence else {"all_reduce": 2}  # 1 compares lengths
    assert dict(counted) == kinds
    got.square().sum().backward()
    want.square().sum().backward()
    for (name, mine), other in zip(model.named_parameters(), theirs.parameters()):
        if "mlp" in name and not (sequence and "down.bias" in name):  # torch leaves the others partial
            torch.testing.assert_close(mine.grad.to_local(), other.grad.to_local(), msg=name)


MORE = {
    "loss_parallel": ["z_loss"],
    **dict.fromkeys(("ColwiseParallel", "RowwiseParallel"), ["async_tensor_parallel"]),
}  # arguments that torch's have not


def test_names_defaults_and_arguments_are_torchs() -> None:
    import inspect

    assert set(torch_styles.__all__) <= set(hp_styles.__all__)
    for name in set(torch_styles.__all__) - {"ParallelStyle"}:
        mine, theirs = getattr(hp_styles, name), getattr(torch_styles, name)
        target = (lambda f: f) if not inspect.isclass(mine) else (lambda c: c.__init__)
        have = inspect.signature(target(mine)).parameters
        want = inspect.signature(target(theirs)).parameters
        assert list(have)[: len(want)] == list(want), name
        more = [have[key] for key in list(have)[len(want) :]]
        assert [p.name for p in more] == MORE.get(name, []), name
        assert all(p.kind == p.KEYWORD_ONLY and p.default is not p.empty for p in more), name
        for key, parameter in want.items():
            assert have[key].kind == parameter.kind, (name, key)
            assert have[key].default == parameter.default, (name, key)


@on_ranks(2)
def test_a_rank_that_the_mesh_leaves_out() -> None:
    mesh, module = init_device_mesh(device_type(), (1,), ("first",)), _linear(4, 4)
    if torch.distributed.get_rank() == 0:
        assert parallelize_module(module, mesh, ColwiseParallel()) is module
        return
    weight = module.weight
    with (
        count_collectives() as counts,
        pytest.raises(ValueError, match=r"rank 1 is not in DeviceMesh.*on the ranks of"),
    ):
        parallelize_module(module, mesh, ColwiseParallel())
    assert not counts and module.weight is weight
