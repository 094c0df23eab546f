"""What context parallelism of sparse attention refuses: by which error, on all ranks, before a key is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from sparse_model import DIM, Attention, Block, Indexer, Loss, options
from torch import nn

from hp_dtensor import DeviceMesh, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_platform import count_collectives
from hp_styles import (
    AsyncDSAIndexerContextParallel,
    AsyncDSASparseAttentionContextParallel,
    ContextParallel,
    DSAIndexerContextParallel,
    DSAIndexerLossContextParallel,
    DSASparseAttentionContextParallel,
    parallelize_module,
)
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
R = Replicate()
T = torch.Tensor


def _mesh() -> Any:
    return init_device_mesh(device_type(), (dist.get_world_size(),), ("cp",))


def _rand(*shape: int) -> T:
    return torch.randn(shape, **options())


class Given(nn.Module):
    """Returns the query, or what it is made to."""

    def __init__(self, give: Any = None) -> None:
        super().__init__()
        self.give = give

    def forward(self, query: T, key: T, *, other: Any = None, positions: T | None = None) -> Any:
        return query if self.give is None else self.give(query, key)


def _style(**more: Any) -> DSAIndexerContextParallel:
    return DSAIndexerContextParallel(**more)


@on_ranks(2)
def test_inputs_that_do_not_fit() -> None:
    mesh, x = _mesh(), _rand(2, 4, 3)
    module = parallelize_module(Given(), mesh, _style())
    shard = distribute_tensor(_rand(2, 8, 3), mesh, [Shard(1)])
    cases: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
        (TypeError, r"the input 'key' of forward\(query.*got nothing; the call has \['Tensor'\] and", (x,), {}),
        (TypeError, "the input 'query' of .* must be a tensor, got int", (1, x), {}),
        (TypeError, "the input 'key' of .* got nothing", (x,), {"key": None}),
        (TypeError, "must be plain, or all on one mesh; 'query' is on .*'key' is on no mesh, plain", (shard, x), {}),
        (ValueError, r"'key' has shape \(3,\); it must have the sequence in dim 1", (x, x[0, 0]), {}),
        (ValueError, r"'key' of shape \(2, 8, 3\) has 8 tokens .dim 1., the query 4", (x, _rand(2, 8, 3)), {}),
        (ValueError, r"it must be Shard\(1\), its sequence dim", (shard, distribute_tensor(x, mesh, [R])), {}),
        (
            ValueError,
            "length 7 .* does not divide over 2",
            (distribute_tensor(_rand(2, 7, 3), mesh, [Shard(1)]),) * 2,
            {},
        ),
        (ValueError, "the input 'other' .* A DTensor that is not a key must", (x, x), {"other": shard}),
        (ValueError, "A DTensor that is not a key must", (shard, shard), {"other": distribute_tensor(x, mesh, [R])}),
    ]
    for error, text, args, kwargs in cases:
        with count_collectives() as counts, pytest.raises(error, match=text):
            module(*args, **kwargs)
        assert not counts or dict(counts) == {"all_gather": 1}, "nothing but what is compared"
    balanced = parallelize_module(Given(), mesh, _style(load_balance=True))
    with count_collectives() as counts, pytest.raises(ValueError, match="two equal chunks per rank, .* has length 3"):
        balanced(x[:, :3], x[:, :3])
    assert dict(counts) == {"all_gather": 1}
    assert module(x, x) is x, "and is right again"
    whole = distribute_tensor(x, mesh, [R])
    for other in (x, whole.redistribute(placements=[Shard(1)])):
        assert module(shard, shard, other=other).placements == (Shard(1),)


@on_ranks(2)
def test_parts_that_differ_between_the_ranks() -> None:
    module = parallelize_module(Given(), _mesh(), _style())
    rank = dist.get_rank()
    unequal = _rand(2, 3 + rank, 3)
    kinds = (unequal, unequal), (_rand(1, 4, 2)[..., rank:], _rand(1, 4, 3)), (_rand(1, 4, 5), _rand(1, 4, 5))
    for index, (query, key) in enumerate(kinds):
        key = key.requires_grad_(rank == 0) if index == 2 else key
        with count_collectives() as counts, pytest.raises(ValueError, match=r"parts of different shapes .* rank 1: \["):
            module(query, key)
        assert dict(counts) == {"all_gather": 1}, "nothing but what is compared"


@on_ranks(2)
def test_parts_that_differ_in_a_later_step() -> None:
    rank, balanced = dist.get_rank(), parallelize_module(Given(), _mesh(), _style(load_balance=True))
    both = parallelize_module(nn.ModuleList([Given(), Given()]), _mesh(), {"*": _style()})
    both.forward = lambda x: both[1](both[0](x, x), x)  # type: ignore[method-assign]
    for length in (4, 6, 4):
        x, longer = _rand(2, length, 3), _rand(2, length + 2 * rank, 3)
        assert balanced(x, x) is x
        with count_collectives() as counts:
            both(x)
        assert dict(counts) == {"all_gather": 1 + 2}, "one compares, in a call of both"
        with pytest.raises(ValueError, match=rf"parts of different shapes .* rank 1: \[\[2, {length + 2}, 3\]"):
            balanced(longer, longer)
        odd = _rand(2, length + rank, 3)
        text = (
            "two equal chunks per rank" if rank else r"ranks \[1\] refuse their parts of the sequence; see their errors"
        )
        with pytest.raises(ValueError, match=text):
            balanced(odd, odd)
        text = f"has {length + 1} tokens .dim 1., the query {length}" if rank else r"ranks \[1\] refuse their parts"
        with pytest.raises(ValueError, match=text):
            both[0](x, odd)


@on_ranks(2)
def test_modules_and_meshes_that_do_not_fit() -> None:
    class Blind(nn.Module):
        def forward(self, query: T, key: T, **others: Any) -> T:
            return query

    mesh = _mesh()
    with count_collectives() as counts:
        for module, style, text in [
            (Given(), _style(keys=("k",)), r"forward\(query.* has no input 'k'; pass the name of one"),
            (Given(), _style(query=4), "has no input 4"),
            (nn.Identity(), _style(query=-1, keys=(0,), positions=None), "has no input -1"),
            (Blind(), _style(), "has no argument 'positions' for the positions of its queries .* positions=None"),
            (
                Block(),
                AsyncDSAIndexerContextParallel(core="index", projections={"key": "q"}),
                "no submodule 'index'; it",
            ),
            (Block(), AsyncDSAIndexerContextParallel(core="core", projections={"key": "kk"}), "has no submodule 'kk'"),
        ]:
            with pytest.raises(ValueError, match=text):
                parallelize_module(module, mesh, style)
        named = parallelize_module(Given(), mesh, _style())
        for style in (_style(), DSASparseAttentionContextParallel()):
            with pytest.raises(RuntimeError, match="Given already has a context parallel style; apply only one"):
                parallelize_module(named, mesh, style)
        with pytest.raises(RuntimeError, match="Given already has a context parallel style"):
            parallelize_module(named, mesh, ContextParallel(qkv_indices=(0, 1, 2)))
    assert not counts
    with pytest.raises(ValueError, match=r"the ranks along the context axis are \[1, 0\]; they must ascend"):
        parallelize_module(Given(), DeviceMesh(device_type(), [1, 0], mesh_dim_names=("cp",)), _style())
    both = init_device_mesh(device_type(), (1, 2), ("dp", "cp"))
    with pytest.raises(ValueError, match="a mesh of one axis is needed for DSAIndexerContextParallel, got axes"):
        parallelize_module(Given(), both, _style())
    x = _rand(2, 4, 3)
    assert parallelize_module(Blind(), mesh, _style(positions=None))(x, x, more=1) is x


@on_ranks(4)
def test_sums_over_heads_that_are_sharded() -> None:
    mesh = init_device_mesh(device_type(), (2, 2), ("cp", "tp"))
    heads = distribute_tensor(_rand(2, 4, 2, 3), mesh, [Shard(1), Shard(2)])
    batch = distribute_tensor(_rand(2, 4, 2, 3), mesh, [Shard(1), Shard(0)])
    for style in (_style(), DSAIndexerLossContextParallel(keys=("key",), reduction="none")):
        module = parallelize_module(Given(), mesh["cp"], style)
        assert module(batch, batch).placements == (Shard(1), Shard(0))
        with pytest.raises(
            ValueError, match=r"must be Replicate\(\), or Shard of the batch \(the result is a sum over heads"
        ):
            module(heads, heads)
    mean = parallelize_module(Given(lambda q, k: q.mean()), mesh["cp"], DSAIndexerLossContextParallel(keys=("key",)))
    found = mean(batch, batch)
    assert found.placements == (R, R)
    torch.testing.assert_close(found.full_tensor(), batch.full_tensor().mean())
    latent = distribute_tensor(_rand(2, 4, 3), mesh, [Shard(1), R])
    with pytest.raises(ValueError, match="redistribute"):
        partial = distribute_tensor(_rand(2, 4, 3), mesh, [Shard(1), R]).redistribute(placements=[Shard(1), Partial()])
        parallelize_module(Given(), mesh["cp"], _style())(latent, latent, other=partial)


@on_ranks(2)
def test_outputs_that_do_not_fit() -> None:
    mesh, x = _mesh(), _rand(2, 4, 3)
    shard = distribute_tensor(_rand(2, 8, 3), mesh, [Shard(1)])
    whole = parallelize_module(Given(lambda q, k: k), mesh, _style())
    with pytest.raises(ValueError, match=r"an output of shape \(2, 8, 3\) must have the 4 queries in dim 1"):
        whole(shard, shard)
    assert whole(x, x).shape == (2, 8, 3), "of plain tensors nothing is laid out"
    for give in (lambda q, k: None, lambda q, k: q.argmax()):
        module = parallelize_module(Given(give), mesh, DSAIndexerLossContextParallel(keys=("key",)))
        with pytest.raises(TypeError, match="on Given: the output must be a loss, alone or first of several"):
            module(x, x)
    several = parallelize_module(
        Given(lambda q, k: (q.sum(), "more")), mesh, DSAIndexerLossContextParallel(keys=["key"])
    )
    loss, more = several(x, x)
    assert loss.shape == () and more == "more"


class Uses(nn.Module):
    """A projection and what is done with it before the core."""

    def __init__(self, do: Any) -> None:
        super().__init__()
        self.proj, self.core, self.do = nn.Linear(4, 4, **options()), Given(), do

    def forward(self, x: T) -> Any:
        return self.do(self, x)


@on_ranks(2)
def test_early_keys_that_are_something_else() -> None:
    mesh, x = _mesh(), _rand(2, 4, 4)

    def written(m: Any, x: T) -> Any:
        key = m.proj(x)
        with torch.no_grad():
            key.mul_(2)
        return m.core(x, key)

    def twice(m: Any, x: T) -> Any:
        key = m.proj(x)
        return m.core(m.core(x, key), key)

    text = "the key 'key', of shape .* is not the output of proj, .*something in between .rotary positions, a norm."
    for do, message in [
        (lambda m, x: m.core(x, m.proj(x).cos()), text),
        (lambda m, x: m.core(x, m.proj(x).detach()), text),
        (lambda m, x: m.core(x, m.proj(x).transpose(1, 2)), text),
        (lambda m, x: m.core(x, m.proj(x).view(2, 2, 2, 4).flatten(2)), "'key' of shape .* has 2 tokens"),
        (written, text),
        (lambda m, x: m.core(x, x), "the core runs before proj, the projection of 'key': leave it out"),
        (lambda m, x: (m.proj(x), m.core(x, m.proj(x))), "proj, of projections=.*, ran twice before the core"),
        (twice, "the core runs twice in one forward; use DSASparseAttentionContextParallel"),
    ]:
        style = AsyncDSASparseAttentionContextParallel(core="core", projections={"key": "proj"}, positions=None)
        module = parallelize_module(Uses(do), mesh, style)
        for _ in range(2):
            with pytest.raises((RuntimeError, ValueError), match=message):
                module(x)
        if "tokens" not in message:  # left out of the projections, a key is sent when the core runs
            left = Uses(do)
            parallelize_module(left.core, mesh, DSASparseAttentionContextParallel(positions=None))
            found = left(x)
            assert (found[1] if isinstance(found, tuple) else found).shape == x.shape
    style = AsyncDSASparseAttentionContextParallel(core="core", projections={"key": "proj"}, positions=None)
    views = parallelize_module(Uses(lambda m, x: m.core(x, m.proj(x).unflatten(-1, (2, 2)))), mesh, style)
    views.core.give = lambda query, key: key
    assert views(x).shape == (2, 8, 2, 2)
    silent = parallelize_module(Uses(lambda m, x: m.proj(x)), mesh, style)
    assert silent(x).shape == x.shape, "a core that does not run is no error"
    bad = Uses(lambda m, x: m.core(x, m.proj(x)))
    bad.proj.register_forward_hook(lambda mod, args, out: (out,))
    with pytest.raises(TypeError, match="the output of proj must be a tensor, got tuple"):
        parallelize_module(bad, mesh, style)(x)


@on_ranks(2)
def test_what_is_compiled() -> None:
    projections: dict[str | int, str] = {"key": "proj"}
    for style in (_style(), AsyncDSAIndexerContextParallel(core="core", projections=projections)):
        module = Uses(lambda m, x: m.core(x, m.proj(x)))
        parallelize_module(module if "Async" in repr(style) else module.core, _mesh(), style)
        with pytest.raises(NotImplementedError, match="modules with this style can't be compiled"):
            torch.compile(module, backend="eager")(_rand(2, 4, 4))
        x = _rand(2, 4, 4)
        outer = torch.compile(nn.Sequential(torch.compiler.disable(module)), backend="eager")
        torch.testing.assert_close(outer(x), module(x))


@on_ranks(2)
def test_second_derivatives() -> None:
    module = parallelize_module(Given(lambda q, k: k * k), _mesh(), _style())
    key = _rand(2, 4, 3).requires_grad_()
    (grad,) = torch.autograd.grad(module(key, key).sum(), key, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_styles_check_their_arguments() -> None:
    for wrong in ("key", ()):
        with pytest.raises(ValueError, match="keys are the names or positions of one or more inputs, got"):
            _style(keys=wrong)
    with pytest.raises(ValueError, match="must be different inputs, got .'key', 'key', 'positions'."):
        _style(query="key")
    with pytest.raises(ValueError, match="seq_dim=-2 counts from the end"):
        _style(seq_dim=-2)
    with pytest.raises(ValueError, match="reduction must be 'mean', 'sum' or 'none', got 'max'"):
        DSAIndexerLossContextParallel(reduction="max")  # type: ignore[arg-type]
    for wrong in ({}, {"value": "v"}):
        with pytest.raises(ValueError, match="projections must be for one or more of keys=.* use DSAIndexer"):
            AsyncDSAIndexerContextParallel(core="core", projections=wrong)  # type: ignore[arg-type]
    assert repr(AsyncDSAIndexerContextParallel(core="core", projections={"key": "k"})) == (
        "AsyncDSAIndexerContextParallel(query='query', keys=('key',), positions='positions', seq_dim=1,"
        " load_balance=False, use_local_output=False, core='core', projections={'key': 'k'})"
    )
    assert DSAIndexerLossContextParallel().keys == ("key", "key_index")


def test_what_the_reference_computes() -> None:
    """Its parts agree with each other, so that what is compared with it is compared with attention."""
    query, key, weights = torch.rand(1, 5, 2, 3), torch.rand(1, 5, 3), torch.rand(1, 5, 2)
    selected = Indexer()(query, key, weights)
    places = torch.arange(5)[:, None]
    assert ((selected <= places) & (selected >= -1)).all() and (selected[0, 0] == torch.tensor([0, -1, -1])).all()
    out = Attention()(query, key, key, query, key, selected)
    torch.testing.assert_close(out[0, 0], key[0, :1].expand(2, -1), msg="the first token sees itself")
    assert Loss()(query, key, query, key, weights) >= 0 and DIM == Block().o.in_features
