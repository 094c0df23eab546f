"""What each style promises: its collectives both ways, what stays as it was, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import hp_styles
from hp_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_platform import count_collectives, manual_seed
from hp_styles import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    TwoDimensionalParallel,
    parallelize_module,
)
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
R, P = Replicate(), Partial()


def _mesh() -> Any:
    return init_device_mesh(device_type(), (torch.distributed.get_world_size(),), ("tp",))


def _rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, device=device_type())


def _linear(rows: int = 8, columns: int = 8) -> nn.Linear:
    return nn.Linear(columns, rows, dtype=torch.float64, device=device_type())


def _embedding() -> nn.Embedding:
    return nn.Embedding(8, 8, dtype=torch.float64, device=device_type())


class RMSNorm(nn.Module):
    """Written out, as in many models."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, size, dtype=torch.float64, device=device_type()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


# ---- collectives of forward and backward ----
COLLECTIVES: list[tuple[Any, Any, Any, dict[str, int], dict[str, int]]] = [
    # module, style, placement of the input, collectives of forward, of backward
    (_linear, ColwiseParallel(), R, {}, {"all_reduce": 1}),
    (
        _linear,
        ColwiseParallel(input_layouts=Shard(0)),
        Shard(0),
        {"all_gather": 2},
        {"reduce_scatter": 1},
    ),  # lengths too
    (_linear, ColwiseParallel(output_layouts=R), R, {"all_gather": 1}, {"all_reduce": 1}),
    (_linear, RowwiseParallel(), Shard(-1), {"all_reduce": 1}, {}),
    (_linear, RowwiseParallel(output_layouts=Shard(0)), Shard(-1), {"reduce_scatter": 1}, {"all_gather": 1}),
    (_linear, RowwiseParallel(input_layouts=R), R, {"all_reduce": 1}, {"all_gather": 1}),
    (_embedding, ColwiseParallel(), R, {}, {}),
    (_embedding, RowwiseParallel(), R, {"all_reduce": 1}, {}),
    (_embedding, RowwiseParallel(output_layouts=Shard(1)), R, {"reduce_scatter": 1}, {"all_gather": 1}),
]


@on_ranks(2, 4)
@pytest.mark.parametrize("number", range(len(COLLECTIVES)))
def test_collectives_of_forward_and_backward(number: int, ranks: int) -> None:
    make, style, given, forward, backward = COLLECTIVES[number]
    mesh, module = _mesh(), make()
    module.requires_grad_(True)
    if isinstance(module, nn.Linear):
        module.bias = None  # whose gradient is summed where the output is sharded
    plain = copy.deepcopy(module)
    whole = _rand(8, 4, 8) if make is _linear else torch.randint(0, 8, (8, 4), device=device_type())
    mine = distribute_tensor(whole, mesh, [given]).to_local().clone()
    differentiable = whole.is_floating_point()
    whole.requires_grad_(differentiable)
    mine.requires_grad_(differentiable)
    parallelize_module(module, mesh, style)
    want = plain(whole)
    with count_collectives() as counted:
        got = module(mine)
    assert type(got) is torch.Tensor and dict(counted) == forward
    out = style.output_layouts
    torch.testing.assert_close(got, distribute_tensor(want.detach(), mesh, [out]).to_local())
    with count_collectives() as counted:
        got.sum().backward()  # each rank's part of a sum, so that the sum over the whole output is meant
    want.sum().backward()
    assert dict(counted) == backward
    torch.testing.assert_close(module.weight.grad.full_tensor(), plain.weight.grad)
    if differentiable:
        torch.testing.assert_close(mine.grad, distribute_tensor(whole.grad, mesh, [given]).to_local())


# ---- what a style keeps ----
@on_ranks(2)
@pytest.mark.parametrize("style", [ColwiseParallel(), RowwiseParallel(), SequenceParallel()], ids=repr)
def test_what_is_frozen_stays_frozen(style: Any) -> None:
    for weight, bias in ((True, False), (False, True), (False, False)):
        module = _linear() if not isinstance(style, SequenceParallel) else nn.LayerNorm(8, device=device_type())
        module.weight.requires_grad_(weight)
        module.bias.requires_grad_(bias)
        names = list(module.state_dict())
        parallelize_module(module, _mesh(), style)
        assert (module.weight.requires_grad, module.bias.requires_grad) == (weight, bias)
        assert list(module.state_dict()) == names and all(isinstance(v, DTensor) for v in module.state_dict().values())


@on_ranks(2)
def test_a_module_without_bias_has_none() -> None:
    for style in (ColwiseParallel(), RowwiseParallel()):
        linear = parallelize_module(nn.Linear(4, 4, bias=False, device=device_type()), _mesh(), style)
        assert linear.bias is None and list(dict(linear.named_parameters())) == ["weight"]


# ---- sequence parallel ----
@on_ranks(2, 3)
@pytest.mark.parametrize("kind", ["layer norm", "without weights", "rms norm", "rms norm written out"])
def test_norms_on_parts_of_a_sequence(kind: str, ranks: int) -> None:
    mesh, options = _mesh(), {"dtype": torch.float64, "device": device_type()}
    norm = {
        "layer norm": lambda: nn.LayerNorm(8, **options),
        "without weights": lambda: nn.LayerNorm(8, elementwise_affine=False, **options),
        "rms norm": lambda: nn.RMSNorm(8, **options),
        "rms norm written out": RMSNorm,
    }[kind]()
    plain, whole = copy.deepcopy(norm), _rand(6, 6, 8)
    parallelize_module(norm, mesh, SequenceParallel())
    x = distribute_tensor(whole, mesh, [Shard(1)]).requires_grad_()
    plain_x = whole.clone().requires_grad_()
    with count_collectives() as counted:
        got = norm(x)
    assert isinstance(got, DTensor) and got.placements == (Shard(1),) and not counted
    torch.testing.assert_close(got.full_tensor(), plain(plain_x))
    got.pow(3).sum().backward()
    plain(plain_x).pow(3).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), plain_x.grad)
    for mine, theirs in zip(norm.parameters(), plain.parameters(), strict=True):
        assert mine.grad.placements == (R,), "summed over the parts of the sequence"
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)
    by_batch = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
    with count_collectives() as counted:
        again = norm(by_batch)
    assert again.placements == (Shard(1),) and dict(counted) == {"all_to_all": 1}
    with count_collectives() as counted:
        again.pow(3).sum().backward()
    assert counted["all_to_all"] == 1 and by_batch.grad.placements == (Shard(0),)
    torch.testing.assert_close(by_batch.grad.full_tensor(), plain_x.grad)


@on_ranks(2)
def test_dropout_on_parts_of_a_sequence_is_the_single_devices() -> None:
    mesh, whole = _mesh(), torch.ones(4, 6, 8, device=device_type())
    manual_seed(11)
    want = nn.Dropout(0.5)(whole)
    manual_seed(11)
    got = parallelize_module(nn.Dropout(0.5), mesh, SequenceParallel())(distribute_tensor(whole, mesh, [Shard(1)]))
    assert got.placements == (Shard(1),) and torch.equal(got.full_tensor(), want)


@on_ranks(2)
def test_sequence_parallel_replicates_parameters_and_buffers() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            rank = torch.distributed.get_rank()
            self.norm = RMSNorm()
            self.register_buffer("scale", torch.full((8,), rank + 2.0, dtype=torch.float64, device=device_type()))
            self.register_buffer("unused", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x) * self.scale

    mesh, x = _mesh(), _rand(2, 4, 8)
    plain = RMSNorm()(distribute_tensor(x, mesh, [R]).to_local())
    for source, factor in ((0, 2.0), (1, 3.0)):
        module = parallelize_module(Scaled(), mesh, SequenceParallel(), src_data_rank=source)
        assert module.scale.placements == (R,) and module.norm.weight.placements == (R,) and module.unused is None
        got = module(distribute_tensor(x, mesh, [R]))
        torch.testing.assert_close(got.full_tensor(), plain * factor)


# ---- inputs and outputs ----
class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = _linear()

    def forward(self, *, x: torch.Tensor, y: Any = 2, z: Any = None) -> torch.Tensor:
        return self.linear(x) + y + (0 if z is None else z)


@on_ranks(2)
def test_keyword_inputs() -> None:
    mesh = _mesh()
    style = PrepareModuleInput(
        input_kwarg_layouts={"x": Shard(0), "z": Shard(0)}, desired_input_kwarg_layouts={"x": R, "z": R}
    )
    module, whole = Keywords(), _rand(4, 8)
    want = module(x=whole, z=whole)
    parallelize_module(module, mesh, {"linear": ColwiseParallel(use_local_output=False), "": style})
    part = whole.chunk(2)[mesh.get_local_rank()]
    for x in (part, distribute_tensor(whole, mesh, [Shard(0)])):
        with count_collectives() as counted:
            got = module(x=x, z=part.clone())
        torch.testing.assert_close(got.full_tensor(), want)
        assert counted["all_gather"] == 2 + 1, "the length of the first plain part is compared"
    torch.testing.assert_close(module(x=part, y=5, z=None).full_tensor(), want - whole + 3)
    with pytest.raises(TypeError, match=r"Shard\(0\) is for a tensor, got int"):
        module(x=part, z=3)


@on_ranks(2)
def test_layouts_of_inputs_that_are_dtensors_already() -> None:
    mesh, whole = _mesh(), _rand(4, 6)
    given = distribute_tensor(whole, mesh, [Shard(1)])
    for desired, found in ((R, R), (Shard(0), Shard(0)), (None, Shard(1))):
        style = PrepareModuleInput(input_layouts=(R,), desired_input_layouts=(desired,))
        made = parallelize_module(nn.Identity(), mesh, style)(given)
        assert made.placements == (found,) and torch.equal(made.full_tensor(), whole)
    style = PrepareModuleInput(input_layouts=(R,), desired_input_layouts=(None,), use_local_output=True)
    assert torch.equal(parallelize_module(nn.Identity(), mesh, style)(given), given.to_local())
    style = PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(None,))
    assert parallelize_module(nn.Identity(), mesh, style)(whole).placements == (Shard(0),)


@on_ranks(2)
def test_a_module_whose_inputs_and_outputs_are_prepared_in_several_calls() -> None:
    mesh, whole = _mesh(), _rand(4, 6)
    module = nn.Identity()
    parallelize_module(module, mesh, PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=R))
    parallelize_module(module, mesh, PrepareModuleOutput(output_layouts=R, desired_output_layouts=Shard(1)))
    got = module(whole.chunk(2)[mesh.get_local_rank()])
    assert type(got) is torch.Tensor and torch.equal(got, whole.chunk(2, 1)[mesh.get_local_rank()])


def test_a_style_is_printed_as_it_is_written() -> None:
    names = {name: getattr(hp_styles, name) for name in hp_styles.__all__}
    both = {"input_layouts": (R, None), "desired_input_layouts": (Shard(0), None)}
    kwargs = {"input_kwarg_layouts": {"y": R}, "desired_input_kwarg_layouts": {"y": Shard(1)}}
    out = {"output_layouts": (P, None), "desired_output_layouts": (R, None)}
    for style in (
        ColwiseParallel(input_layouts=Shard(0), use_local_output=False),
        RowwiseParallel(),
        SequenceParallel(sequence_dim=0),
        PrepareModuleInput(**both, **kwargs, use_local_output=True),
        PrepareModuleInput(),
        PrepareModuleOutput(**out),
        PrepareModuleInputOutput(**both, **out, use_local_input=True, use_local_output=False),
        TwoDimensionalParallel(input_axis="y"),
    ):
        written = repr(style)
        made = eval(written, {**names, "Shard": Shard, "Replicate": Replicate, "Partial": Partial})
        assert type(made) is type(style) and repr(made) == written


# ---- what is refused ----
@on_ranks(2)
def test_a_second_style_on_a_module() -> None:
    mesh = _mesh()
    for make, style in ((_linear, ColwiseParallel()), (_linear, RowwiseParallel()), (RMSNorm, SequenceParallel())):
        module = parallelize_module(make(), mesh, style)
        with pytest.raises(RuntimeError, match=rf"has the style {type(style).__name__}\(.* already, .* a second time"):
            parallelize_module(module, mesh, style)
    module = parallelize_module(_linear(), mesh, ColwiseParallel())
    with pytest.raises(ValueError, match=r"Linear.weight of shape \(8, 8\) is placed .* already, this style wants"):
        parallelize_module(module, mesh, RowwiseParallel())
    copied = copy.deepcopy(module)
    assert copied(_rand(2, 8)).shape == (2, 4) and copied.weight.placements == (Shard(0),)


@on_ranks(2)
def test_calls_without_a_mesh_or_a_plan() -> None:
    mesh = _mesh()
    with pytest.raises(RuntimeError, match="no mesh is active: pass device_mesh"):
        parallelize_module(_linear(), None, ColwiseParallel())
    module = _linear()
    assert parallelize_module(module, mesh, {}) is module and type(module.weight) is nn.Parameter
    with pytest.warns(UserWarning, match="there is no parallelize_plan, so the module is unchanged"):
        assert parallelize_module(module, mesh) is module
    assert type(module.weight) is nn.Parameter
    for style in (ColwiseParallel(), RowwiseParallel()):
        with pytest.raises(NotImplementedError, match="shards Linear and Embedding modules, got Conv1d"):
            parallelize_module(nn.Sequential(nn.Conv1d(2, 2, 1)), mesh, {"0": style})
    with pytest.raises(TypeError, match="abstract"):
        hp_styles.ParallelStyle()  # type: ignore[abstract]
    with mesh:
        assert parallelize_module(module, parallelize_plan=ColwiseParallel()).weight.device_mesh == mesh


@on_ranks(2)
def test_parts_of_different_lengths_are_refused_in_any_step() -> None:
    rank, mesh = torch.distributed.get_rank(), _mesh()
    options: dict[str, Any] = {"dtype": torch.float64, "device": device_type()}
    model = nn.Sequential(nn.LayerNorm(4, **options), nn.Sequential(nn.LayerNorm(4, **options)))
    parallelize_module(model[1], mesh, {"0": SequenceParallel(use_local_output=True)})
    parallelize_module(model, mesh, {"0": SequenceParallel(use_local_output=True)})
    two = {"input_layouts": (None, Shard(0)), "desired_input_layouts": (None, Replicate())}
    named = {"input_kwarg_layouts": {"z": Shard(0)}, "desired_input_kwarg_layouts": {"z": Replicate()}}
    other = parallelize_module(Other(), mesh, PrepareModuleInput(**two, **named))
    leaves = PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate())
    last = parallelize_module(nn.Sequential(nn.Identity()), mesh, {"0": leaves})
    text = r"placed Shard\(%d\) over 2 ranks have different shapes: rank 0: \[%s\]; rank 1: \[%s\]. .* pad them"

    def ones(*shape: int) -> torch.Tensor:
        return torch.ones(*shape, **options)

    for _ in range(2):
        with count_collectives() as counts:
            model(ones(2, 3, 4))
        assert dict(counts) == {"all_gather": 1}, "one for both norms, whose styles are of two calls"
        with pytest.raises(ValueError, match=text % (1, "2, 3, 4", "2, 4, 4")):
            model(ones(2, 3 + rank, 4))
        with pytest.raises(ValueError, match=text % (1, "2, 3, 4", "2, 4, 4")):
            model[1](ones(2, 3 + rank, 4))
        with count_collectives() as counts:
            other(ones(1, 4), ones(1, 4), z=ones(2, 4))
        assert dict(counts) == {"all_gather": 3}, "one for both inputs that are compared, one to gather each"
        with pytest.raises(ValueError, match=text % (0, "1, 4", "2, 4")):
            other(ones(1, 4), ones(1 + rank, 4), z=ones(2, 4))
        with pytest.raises(ValueError, match=text % (0, "1, 4", "2, 4")):
            other(ones(1, 4), ones(1, 4), z=ones(1 + rank, 4))
        with pytest.raises(ValueError, match=text % (0, "1, 4", "2, 4")):
            last(ones(1 + rank, 4))


class Other(nn.Module):
    """Reads inputs of several lengths."""

    def forward(self, x: torch.Tensor, y: Any, *, z: Any) -> Any:
        return x.sum() + y.to_local().sum() + z.to_local().sum()


@on_ranks(2)
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_replicated(training: bool) -> None:
    mesh, x = _mesh(), _rand(4, 6)
    reference = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).double().train(training).to(device_type())
    for placement in (Replicate(), Shard(0)):
        model = copy.deepcopy(reference)
        one = copy.deepcopy(reference)
        parallelize_module(model, mesh, {"*": "replicate"})
        got, want = model(distribute_tensor(x, mesh, [placement])), one(x)
        got.square().sum().backward()
        want.square().sum().backward()
        torch.testing.assert_close(got.full_tensor(), want)
        torch.testing.assert_close(model[1].running_mean.full_tensor(), one[1].running_mean)
        torch.testing.assert_close(model[1].running_var.full_tensor(), one[1].running_var)
        torch.testing.assert_close(model[0].weight.grad.full_tensor(), one[0].weight.grad, rtol=1e-10, atol=1e-12)


@on_ranks(2)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_networks_stay_plain(kind: type[nn.Module]) -> None:
    mesh, x = _mesh(), _rand(4, 3, 6)
    options: dict[str, Any] = {"dtype": torch.float64, "device": device_type()}
    model = nn.Sequential(nn.Linear(6, 6, **options), kind(6, 5, batch_first=True, **options))
    reference = copy.deepcopy(model)
    with pytest.raises(
        NotImplementedError, match=rf"1: the style 'replicate' is not for {kind.__name__}: .*full_tensor"
    ):
        parallelize_module(model, mesh, {"1": "replicate"})
    parallelize_module(model, mesh, {"0": ColwiseParallel(output_layouts=Replicate())})
    got, want = model(x)[0], reference(x)[0]
    got.square().sum().backward()
    want.square().sum().backward()
    torch.testing.assert_close(got, want)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        torch.testing.assert_close(grad, q.grad, rtol=1e-10, atol=1e-12)
