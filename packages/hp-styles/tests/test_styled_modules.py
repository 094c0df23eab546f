"""What users do to modules that have styles: styles again, loading, casting, copying, clipping."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from hp_dtensor import DTensor, Replicate, Shard, init_device_mesh
from hp_platform import count_collectives
from hp_styles import (
    ColwiseParallel,
    ContextParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
R = Replicate()
PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class MLP(nn.Module):
    """A norm, which no style is on, and two Linears."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        options: dict[str, Any] = {"dtype": torch.float64, "device": device_type()}
        self.norm = nn.LayerNorm(4, **options)
        self.up, self.down = nn.Linear(4, 8, **options), nn.Linear(8, 4, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def _mesh() -> Any:
    return init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))


def _input() -> torch.Tensor:
    return torch.arange(12.0, dtype=torch.float64, device=device_type()).view(3, 4).sin()


def _full(x: Any) -> torch.Tensor:
    return x.detach().full_tensor() if isinstance(x, DTensor) else x.detach()


def _same(got: Any, want: Any) -> None:
    torch.testing.assert_close(_full(got), _full(want), rtol=1e-11, atol=1e-12)


@on_ranks(2)
def test_styles_a_second_time() -> None:
    mesh, model = _mesh(), parallelize_module(MLP(), _mesh(), PLAN)
    with pytest.raises(RuntimeError, match="Linear has the style ColwiseParallel.* already"):
        parallelize_module(model, mesh, PLAN)
    _same(model(_input()), MLP()(_input()))
    into = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=R, use_local_output=True)
    named = PrepareModuleInput(input_kwarg_layouts={"x": Shard(0)}, desired_input_kwarg_layouts={"x": R})
    out = PrepareModuleOutput(output_layouts=R, desired_output_layouts=Shard(0))
    for style in (into, named, out):
        parallelize_module(model, mesh, {"norm": style})
    texts = [r"its inputs \['0'\]", r"its inputs \[\"'x'\"\]", r"its outputs \['0'\]"]
    for style, text in zip((into, named, out), texts, strict=True):
        with pytest.raises(
            RuntimeError, match=rf"LayerNorm: a style already converts {text} over \('tp',\), which can"
        ):
            parallelize_module(model, mesh, {"norm": style})
    x = _input()[:2]
    _same(model.norm(x.chunk(2)[mesh.get_local_rank()]), MLP().norm(x).chunk(2)[mesh.get_local_rank()])


@on_ranks(2)
def test_one_module_under_two_names() -> None:
    inner = MLP()
    both = nn.ModuleDict({"a": nn.Sequential(inner), "b": nn.Sequential(inner)})
    with pytest.raises(ValueError, match="'b.0.up' is matched by 'a.0.up' and by 'b.0.up'; keep one"):
        parallelize_module(both, _mesh(), {"a.0.up": ColwiseParallel(), "b.0.up": RowwiseParallel()})
    parallelize_module(both, _mesh(), {f"a.0.{name}": style for name, style in PLAN.items()})
    for name in "ab":
        _same(both[name](_input()), MLP()(_input()))


@on_ranks(2)
def test_loading() -> None:
    model, other = parallelize_module(MLP(), _mesh(), PLAN), MLP(seed=1)
    with pytest.raises(RuntimeError, match=r'"up.weight".* plain tensor of shape \(8, 4\)'):
        model.load_state_dict(other.state_dict())
    parallelize_module(other, _mesh(), PLAN)
    model.load_state_dict(copy.deepcopy(other.state_dict()))
    _same(model(_input()), MLP(seed=1)(_input()))
    turned = {"up": RowwiseParallel(input_layouts=R), "down": ColwiseParallel(output_layouts=R)}
    again = parallelize_module(MLP(), _mesh(), turned)
    again.load_state_dict(other.state_dict())
    assert again.up.weight.placements == (Shard(1),)
    _same(again(_input()), MLP(seed=1)(_input()))


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_casting(dtype: torch.dtype) -> None:
    model, plain = parallelize_module(MLP(), _mesh(), PLAN).to(dtype), MLP().to(dtype)
    x = _input().to(dtype)
    model(x).sum().backward()
    plain(x).sum().backward()
    torch.testing.assert_close(model(x), plain(x))
    assert isinstance(model.up.weight, DTensor) and model.up.weight.dtype == model.up.weight.grad.dtype == dtype
    torch.testing.assert_close(_full(model.up.weight.grad), plain.up.weight.grad, rtol=0.05, atol=0.05)


@on_ranks(2)
def test_from_meta() -> None:
    with torch.device("meta"):
        model = MLP()
    model = parallelize_module(model.to("meta"), _mesh(), PLAN).to_empty(device=device_type())
    model.load_state_dict(parallelize_module(MLP(), _mesh(), PLAN).state_dict())
    _same(model(_input()), MLP()(_input()))


@on_ranks(2)
def test_copies() -> None:
    model = parallelize_module(MLP(), _mesh(), PLAN)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.up.weight.zero_(), other.up.bias.zero_()
    _same(other(_input()), _input() + MLP().down.bias)
    _same(model.eval()(_input()), MLP()(_input()))
    _same(model.train()(_input()), MLP()(_input()))


@on_ranks(2)
@pytest.mark.parametrize("norm", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("foreach", [True, False])
def test_clipping_of_plain_and_sharded_gradients(foreach: bool, norm: float) -> None:
    model, plain = parallelize_module(MLP(), _mesh(), PLAN), MLP()
    for each in (model, plain):
        each(_input()).square().sum().backward()
    options: dict[str, Any] = {"norm_type": norm, "foreach": foreach}
    got = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, **options)
    _same(got, torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1, **options))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        _same(p.grad, q.grad)


@on_ranks(2)
def test_a_weight_that_is_computed() -> None:
    for wrap in (nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm):
        model = MLP()
        wrap(model.up)
        with pytest.raises(NotImplementedError, match="up: the weight of .*Linear is not a parameter but computed"):
            parallelize_module(model, _mesh(), PLAN)
        parallelize_module(model, _mesh(), {"norm": SequenceParallel()})  # left out of the plan
        model = MLP()
        wrap(model.up)
        nn.utils.parametrize.remove_parametrizations(model.up, "weight")
        parallelize_module(model, _mesh(), PLAN)


@on_ranks(2, 4)
def test_plain_parts_of_unequal_widths() -> None:
    _unequal_widths(lambda model: model)


@on_ranks(2)
def test_plain_parts_of_unequal_widths_compiled() -> None:
    _unequal_widths(lambda model: torch.compile(model, fullgraph=True, backend="aot_eager"))


def _unequal_widths(compiled: Any) -> None:
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mesh = init_device_mesh(device_type(), (ranks,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    options: dict[str, Any] = {"dtype": torch.float64, "device": device_type()}
    one = nn.Sequential(nn.Linear(6, 9, **options), nn.GELU(), nn.Linear(9, 6, **options), nn.Linear(6, 7, **options))
    model = copy.deepcopy(one)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel(), "3": ColwiseParallel()})
    run = compiled(model)
    for rows in (4, 4, 3):
        x = torch.randn(rows, 6, **options)
        want, got = one(x), run(x)
        wanted = torch.chunk(want, mesh.size(), -1)
        torch.testing.assert_close(got, wanted[rank] if rank < len(wanted) else want[:, :0])
        torch.sin(want).sum().backward()
        torch.sin(got).sum().backward()
    for p, q in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)  # type: ignore[union-attr]


@on_ranks(2)
def test_plain_parts_of_wrong_widths() -> None:
    mesh, rank = _mesh(), torch.distributed.get_rank()
    uneven = parallelize_module(nn.Linear(9, 4, device=device_type()), mesh, RowwiseParallel())
    even = parallelize_module(nn.Linear(8, 4, device=device_type()), mesh, RowwiseParallel())
    takes = "RowwiseParallel on Linear: a plain input is taken as this rank's part of the {} features that the weight"
    each = (
        takes.format(9)
        + " takes, rank 0: 5, rank 1: 4; got rank 0: 5, rank 1: 5, of shape .3, 5. here. Pass the output of a"
    )
    mine = takes.format(8) + f" takes, rank 0: 4, rank 1: 4; got rank {rank}: {5 - 2 * rank}, .* ColwiseParallel of 8"
    for _ in range(2):
        with pytest.raises(ValueError, match=each):
            uneven(torch.ones(3, 5, device=device_type()))
        with pytest.raises(ValueError, match=mine):
            even(torch.ones(3, 5 - 2 * rank, device=device_type()))
    with count_collectives() as counts:
        uneven(torch.ones(3, 5 - rank, device=device_type()))
    assert dict(counts) == {"all_gather": 1, "all_reduce": 1}, "widths are compared until they are right"
    with count_collectives() as counts:
        uneven(torch.ones(3, 5 - rank, device=device_type()))
    assert dict(counts) == {"all_reduce": 1}


@on_ranks(2)
@pytest.mark.parametrize("style", ["colwise", "sequence", "plain", "context", "prepared"])
def test_pickling_is_refused_and_copying_is_not(style: str) -> None:
    mesh = _mesh()
    options: dict[str, Any] = {"dtype": torch.float64, "device": device_type()}
    model = nn.Sequential(nn.LayerNorm(4, **options), nn.Linear(4, 4, **options))
    given: dict[str, Any] = {
        "colwise": {"1": ColwiseParallel()},
        "sequence": {"0": SequenceParallel()},
        "plain": {"1": "plain"},
        "context": {"1": ContextParallel()},
        "prepared": {"1": PrepareModuleInput(input_layouts=R, desired_input_layouts=R)},
    }[style]
    parallelize_module(model, mesh, given)
    for pickled in (model, next(iter(model[int(name)] for name in given))):
        for save in (lambda x: pickle.dumps(x), lambda x: torch.save(x, io.BytesIO())):
            with pytest.raises(NotImplementedError, match="parallel styles cannot be pickled.*Save module.state_dict"):
                save(pickled)
    loaded = pickle.loads(pickle.dumps(model.state_dict()))
    copied = copy.deepcopy(model)
    copied.load_state_dict(loaded)
    if style == "colwise":
        _same(copied(_input()), model(_input()))
