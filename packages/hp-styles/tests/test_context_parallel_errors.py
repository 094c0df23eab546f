"""What context parallelism refuses: by which error, before anything is sent, and with nothing left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from hp_dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
from hp_platform import count_collectives
from hp_styles import (
    AsyncContextParallel,
    ContextParallel,
    context_parallel,
    context_parallel_shard,
    parallelize_module,
)
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
R = Replicate()
HEADS, SIZE = 4, 2
DIM = HEADS * SIZE


class Attention(nn.Module):
    """Projections and torch's attention, written for one device."""

    def __init__(self) -> None:
        super().__init__()
        options: dict[str, Any] = {"dtype": torch.float64, "device": device_type(), "bias": False}
        self.q, self.k, self.v = (nn.Linear(DIM, DIM, **options) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _mesh() -> Any:
    return init_device_mesh(device_type(), (dist.get_world_size(),), ("cp",))


class Given(nn.Module):
    """Calls attention with what it is given."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, **options)


@on_ranks(2)
def test_what_attention_is_not_computed() -> None:
    mesh = _mesh()
    module = parallelize_module(Given(), mesh, ContextParallel())

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device_type())

    q = rand(1, 4, 6, 2)
    cases: list[tuple[type[Exception], str, tuple[torch.Tensor, ...], dict[str, Any]]] = [
        (NotImplementedError, "dropout_p=0.1", (q, q, q), {"dropout_p": 0.1}),
        (ValueError, "fewer key than query heads need enable_gqa=True", (q, q[:, :2], q[:, :2]), {}),
        (ValueError, "is_causal=True needs as many keys", (q, q[:, :, :4], q[:, :, :4]), {"is_causal": True}),
        (ValueError, "must be .batch, heads, sequence, head size", (q[0], q[0], q[0]), {}),
        (TypeError, "they must have the same dtype", (q, q.double(), q), {}),
        (ValueError, r"3 query heads and 3 .* a Ulysses .* Pass ulysses_degree= one of \[1\]", (q[:, :3],) * 3, {}),
        (
            ValueError,
            "q, k and v are placed .* they must have the same layout",
            (distribute_tensor(q, mesh, [R]), q, q),
            {},
        ),
        (ValueError, "it must be Shard.2., its sequence dim", (distribute_tensor(q, mesh, [R]),) * 3, {}),
        (
            ValueError,
            "length 7 .* does not divide over 2",
            (distribute_tensor(rand(1, 4, 7, 2), mesh, [Shard(2)]),) * 3,
            {},
        ),
    ]
    for error, text, tensors, options in cases:
        with count_collectives() as counts, pytest.raises(error, match=text):
            module(*tensors, **options)
        assert dict(counts) == {"all_gather": 1}, "that there is an error is all that is sent"
        assert F.scaled_dot_product_attention(q, q, q).shape == q.shape, "the mode is left"
        assert not torch.overrides._get_current_function_mode_stack()
    assert module(q[:, :, :4], q, q).shape == (1, 4, 4, 2), "fewer queries than keys"
    assert module(q, q, q, dropout_p=0.0).shape == q.shape
    placed = distribute_tensor(q, mesh, [R]).redistribute(placements=[Shard(2)])
    assert module(placed, placed, placed).shape == q.shape
    padded = distribute_tensor(rand(1, 4, 8, 2), mesh, [Shard(2)])
    assert module(padded, padded, padded).shape == padded.shape
    mask = torch.ones(12, 12, dtype=torch.bool, device=device_type()).tril()
    whole = parallelize_module(Given(), mesh, ContextParallel(qkv_indices=(0, 1, 2), seq_dim=2, head_dim=1))
    torch.testing.assert_close(whole(q, q, q, attn_mask=mask), module(q, q, q, is_causal=True))
    assert module(q, q[:, :2], q[:, :2], enable_gqa=True).shape == q.shape
    ring = parallelize_module(Given(), mesh, ContextParallel(ulysses_degree=1))
    assert ring(q[:, :3], q[:, :3], q[:, :3]).shape == (1, 3, 6, 2)
    own = {"attn_mask": rand(6, 6)} if dist.get_rank() else {}  # all ranks refuse what one is given
    text = r"an attn_mask of shape \(6, 6\)" if own else r"ranks \[1\] refuse this step, for the reasons that"
    module(q, q, q)
    for _ in range(2):  # shapes that are not new
        with count_collectives() as counts, pytest.raises(NotImplementedError, match=text):
            module(q, q, q, **own)
        assert dict(counts) == {"all_gather": 1}, "nothing but what is compared"


@on_ranks(2)
def test_parts_of_unequal_length_are_found_out() -> None:
    mesh = _mesh()
    module = parallelize_module(Given(), mesh, ContextParallel())
    q = torch.randn(1, 4, 3 + dist.get_rank(), 2, device=device_type())
    module(*[torch.randn(1, 4, 3, 2, device=device_type())] * 3)
    for _ in range(2):  # of which the first rank has seen its own before
        with pytest.raises(
            ValueError, match=r"parts of different shapes.*rank 0: \[1, 4, 3, 2, .*rank 1: \[1, 4, 4, 2"
        ):
            module(q, q, q)
    with pytest.raises(ValueError, match="length 9 .* does not divide over 2 ranks; pad it to 10"):
        context_parallel_shard(torch.zeros(1, 9), mesh)
    assert context_parallel_shard(torch.zeros(1, 10), mesh).shape == (1, 5)
    balanced = parallelize_module(Given(), mesh, ContextParallel(load_balance=True))
    with pytest.raises(ValueError, match="load_balance needs two equal chunks per rank, but q .* has length 3"):
        balanced(*[torch.ones(1, 4, 3, 2, device=device_type())] * 3)
    text = "rank, but q .* has length 3" if dist.get_rank() else r"ranks \[1\] refuse this step"
    with pytest.raises(ValueError, match=text):
        balanced(*[torch.ones(1, 4, 4 - dist.get_rank(), 2, device=device_type())] * 3)
    part = context_parallel_shard(torch.ones(1, 4, 8, 2, device=device_type()), mesh, seq_dim=2, load_balance=True)
    torch.testing.assert_close(balanced(part, part, part), part)


@on_ranks(2)
@pytest.mark.parametrize("style", ["ulysses", "ring", "async"])
def test_lengths_that_differ_in_a_later_step(style: str) -> None:
    mesh = _mesh()
    context = {
        "ulysses": ContextParallel(),
        "ring": ContextParallel(ulysses_degree=1),
        "async": AsyncContextParallel(q_proj="q", v_proj="v", head_size=SIZE),
    }[style]
    model = nn.Sequential(Attention(), nn.Flatten(2), Attention())
    model[1].forward = lambda x: x.transpose(1, 2).flatten(2)
    parallelize_module(model, mesh, {"0": context, "2": context})
    x = torch.randn(1, 4, DIM, dtype=torch.float64, device=device_type())
    model(x)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"parts of different shapes.*rank 0: \[1, 4, 2, 2.*rank 1: \[1, 4, 4, 2"):
            model(x if dist.get_rank() else x[:, :2])
    assert model(x).shape == (1, HEADS, 4, SIZE)


class Decoder(Attention):
    """Attention of another class than the encoder's."""


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.ModuleList([Attention(), Attention()]), Decoder()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.encoder[0](x), self.encoder[1](x), self.decoder(y)


@on_ranks(2)
def test_what_only_one_rank_sees_at_a_later_kind_of_attention() -> None:
    """Lengths that the first kind has on one rank, and not on the other; what one rank refuses there."""
    mesh, rank = _mesh(), dist.get_rank()
    model = parallelize_module(Two(), mesh, {"encoder.*": ContextParallel(), "decoder": ContextParallel()})
    one = parallelize_module(Two(), mesh, dict.fromkeys(["encoder.*", "decoder"], ContextParallel()))
    options: dict[str, Any] = {"dtype": torch.float64, "device": device_type()}
    x, longer = torch.randn(2, 4, DIM, **options), torch.randn(2, 4 + 2 * rank, DIM, **options)
    for _ in range(2):
        for each in (model, one):
            with pytest.raises(ValueError, match=r"rank 1"):
                each(x, longer)
            each(x, x)
    heads = parallelize_module(nn.ModuleList([Given(), Other()]), mesh, {"*": ContextParallel()})
    heads.forward = lambda q, k: (heads[0](q, q, q), heads[1](q, k, k))  # type: ignore[method-assign]
    q = torch.randn(1, 4, 6, 2, device=device_type())
    with pytest.raises(ValueError, match="fewer key than query heads need enable_gqa" if rank else "rank"):
        heads(q, q[:, :2] if rank else q)


class Other(Given):
    """Of another class."""


class Layers(nn.ModuleList):
    """Layers of one kind, each of which the first has an input, and the second options of its own."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, **options: Any) -> torch.Tensor:
        first, second, *rest = self
        return sum((layer(y).sum() for layer in rest), first(x).sum() + second(y, **options).sum())


class Masked(Attention):
    """With a mask and positions, as those of transformers."""

    def forward(
        self,
        x: torch.Tensor,
        *,
        position_ids: Any = None,
        attention_mask: Any = None,
        dropout: float = 0.0,
        mask: Any = None,
    ) -> torch.Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for each in (self.q, self.k, self.v))
        options: dict[str, Any] = {"attn_mask": attention_mask if mask is None else mask, "dropout_p": dropout}
        return F.scaled_dot_product_attention(q, k, v, is_causal=options["attn_mask"] is None, **options)


@on_ranks(2)
@pytest.mark.parametrize("style", ["ulysses", "ring", "async"])
@pytest.mark.parametrize("alone", [False, True], ids=["a step", "the first step"])
def test_what_one_rank_finds_at_a_later_layer_of_one_kind(style: str, alone: bool) -> None:
    mesh, rank = _mesh(), dist.get_rank()
    context = {
        "ulysses": ContextParallel(),
        "ring": ContextParallel(ulysses_degree=1),
        "async": AsyncContextParallel(q_proj="q", v_proj="v", head_size=SIZE),
    }[style]
    options: dict[str, Any] = {"dtype": torch.float64, "device": device_type()}
    x = torch.randn(2, 4, DIM, **options)
    causal = torch.ones(4, 4, dtype=torch.bool, device=device_type()).tril()
    padded = causal.clone()
    padded[:, 0] = False
    longer = torch.randn(2, 6, DIM, **options)
    cases: list[tuple[type[Exception], str, torch.Tensor, dict[str, Any]]] = [
        (ValueError, "parts are 6 queries and 6 keys, batch 2; .* which here are 4 and 4, batch 2", longer, {}),
        (ValueError, "parts are 4 queries and 4 keys, batch 1", x[:1], {}),
        (RuntimeError, "documents or padding", x, {"attention_mask": padded.expand(2, 1, 4, 4)}),
        (NotImplementedError, "dropout_p=0.5", x, {"dropout": 0.5}),
        (NotImplementedError, "an attn_mask of shape", x, {"mask": padded}),
    ]
    for error, text, y, own in cases:
        layers = Layers([Masked(), Masked(), Masked()])
        model = parallelize_module(layers, mesh, {"*": context})
        if alone and "attention_mask" in own:
            assert model(x, x, **(own if rank else {})).isfinite(), "a layer that still compares knows of all padding"
            continue
        for _ in range(1 if alone else 2):
            if not alone:
                want = model(x, x)
                torch.testing.assert_close(model(x, x), want)
            said = text + "|refuse this step|different shapes" if alone or not rank else text
            with pytest.raises(Exception if alone else error, match=said):
                model(x, y if rank else x, **(own if rank else {}))
        assert not torch.overrides._get_current_function_mode_stack()
        model(x, x)
        with torch.no_grad():
            assert model(longer, longer).isfinite(), "another length, on all"


@on_ranks(2)
def test_load_balance_that_is_not_the_same_everywhere() -> None:
    mesh = _mesh()
    x = torch.randn(1, 8, DIM, dtype=torch.float64, device=device_type())
    for balance in (False, True):
        style = ContextParallel(load_balance=balance)
        model = parallelize_module(nn.Sequential(Attention()), mesh, {"0": style})
        alone = parallelize_module(Attention(), mesh, style)
        part = context_parallel_shard({"input": x}, mesh, load_balance=not balance)
        text = f"is sharded with load_balance={not balance}, the style has load_balance={balance}; pass the same"
        with pytest.raises(ValueError, match=f"input 'input' of shape .1, 4, 8. {text}"):
            model(**part)
        with pytest.raises(ValueError, match=f"input 0 of shape .1, 4, 8. {text}"):
            alone(part["input"])
        model(context_parallel_shard(x, mesh, load_balance=balance))
    uneven = parallelize_module(Attention(), mesh, ContextParallel(load_balance=dist.get_rank() == 1))
    with pytest.raises(
        ValueError, match="differ in load_balance .*: rank 0: load_balance=False, 2, 1; rank 1: load_bal.*True"
    ):
        uneven(x[:, :4])


@on_ranks(2)
def test_modules_that_do_not_fit() -> None:
    mesh = _mesh()
    x = torch.randn(1, 4, DIM, device=device_type())
    silent = parallelize_module(nn.Identity(), mesh, ContextParallel())
    with pytest.raises(RuntimeError, match="Identity ran without a call of .*attn_implementation='sdpa'"):
        silent(x)
    heads = torch.randn(1, 4, HEADS, SIZE, device=device_type())
    core = parallelize_module(_Core(), mesh, ContextParallel(qkv_kwarg_names=("q", "k", "v")))
    assert core(q=heads, k=heads, v=heads).shape == heads.shape
    with pytest.raises(RuntimeError, match="Identity already has a context parallel style"):
        parallelize_module(silent, mesh, ContextParallel())
    several = parallelize_module(nn.MultiheadAttention(DIM, HEADS, device=device_type()), mesh, ContextParallel())
    with pytest.raises(NotImplementedError, match="nn.MultiheadAttention calls attention where"):
        several(x, x, x)
    own = Attention().to(x.dtype)
    assert parallelize_module(own, mesh, ContextParallel())(x).shape[-2] == 4  # it calls torch's attention
    named = parallelize_module(Given(), mesh, ContextParallel(qkv_indices=(0, 1, 3), qkv_kwarg_names=("q", "k", "w")))
    with pytest.raises(TypeError, match="v is looked for at position 3 and by name 'w'; the inputs are"):
        named(x[..., None], x[..., None], x[..., None])
    core = parallelize_module(Given(), mesh, ContextParallel(qkv_indices=(0, 1, 2)))
    q = torch.randn(1, 2, 4, 2, device=device_type())
    with pytest.raises(ValueError, match="the output of shape .* must have the sequence of length 4 in dim 1"):
        _patched(core, lambda q, k, v: q[:, :1])(q, q, q)
    with pytest.raises(NotImplementedError, match="attention weights are not redistributed"):
        _patched(core, lambda q, k, v: (q, q))(q, q, q)
    assert not torch.overrides._get_current_function_mode_stack()


class _Core(nn.Module):
    """Computes attention by other means than torch's function, of q, k and v as inputs."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * SIZE**-0.5
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def _patched(module: nn.Module, forward: Any) -> nn.Module:
    module.forward = forward
    return module


class Rotated(Attention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q.cos(), k, v, is_causal=True)


@on_ranks(2)
def test_async_arguments_and_what_comes_between() -> None:
    mesh = _mesh()
    x = torch.randn(1, 4, DIM, dtype=torch.float64, device=device_type())
    module = parallelize_module(Rotated(), mesh, AsyncContextParallel(q_proj="q", v_proj="v", head_size=SIZE))
    with pytest.raises(RuntimeError, match="q in attention, .* is not the output of the projection that q_proj names"):
        module(x)
    parallelize_module(Rotated(), mesh, AsyncContextParallel(v_proj="v", head_size=SIZE))(x)
    with pytest.raises(ValueError, match="Attention has no submodule 'w'; it has .'q', 'k', 'v'."):
        parallelize_module(Attention(), mesh, AsyncContextParallel(v_proj="w"))
    with pytest.raises(ValueError, match="with ulysses_degree=1 over 2 ranks no projection's output"):
        parallelize_module(Attention(), mesh, AsyncContextParallel(v_proj="v", ulysses_degree=1))
    parallelize_module(Attention(), mesh, ContextParallel(ulysses_degree=1))(x)
    unknown = parallelize_module(Attention(), mesh, AsyncContextParallel(v_proj="v"))
    with pytest.raises(ValueError, match="must be .batch, sequence, heads . head_size., with head_size"):
        unknown(x)
    late = Attention()
    late.forward = lambda x: F.scaled_dot_product_attention(*[x.unflatten(-1, (-1, SIZE)).transpose(1, 2)] * 3)
    parallelize_module(late, mesh, AsyncContextParallel(q_proj="q", v_proj="v", head_size=SIZE))
    with pytest.raises(RuntimeError, match="attention is called before the projections of q, v ran"):
        late(x)
    late = _patched(Attention(), late.forward)
    assert parallelize_module(late, mesh, ContextParallel())(x).shape == (1, HEADS, 4, SIZE)  # both left out
    assert not torch.overrides._get_current_function_mode_stack()


@on_ranks(2)
def test_an_error_inside_leaves_nothing_behind() -> None:
    class Fails(nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            F.scaled_dot_product_attention(q, q, q)
            raise KeyError("own")

    module = parallelize_module(Fails(), _mesh(), ContextParallel())
    q = torch.randn(1, 2, 4, 2, device=device_type())
    for _ in range(2):
        with pytest.raises(KeyError, match="own"):
            module(q)
        assert not torch.overrides._get_current_function_mode_stack()
    one = F.scaled_dot_product_attention(q, q, q)
    with count_collectives() as counts:
        torch.testing.assert_close(F.scaled_dot_product_attention(q, q, q), one)
    assert not counts


def test_styles_check_their_arguments() -> None:
    with pytest.raises(ValueError, match="ulysses_degree must be at least 1 or None, got 0"):
        ContextParallel(ulysses_degree=0)
    with pytest.raises(ValueError, match="qkv_indices must have three entries, for q, k and v, or none; got"):
        ContextParallel(qkv_indices=(0, 1))
    with pytest.raises(ValueError, match="qkv_kwarg_names must have three"):
        ContextParallel(qkv_kwarg_names="qkv")
    with pytest.raises(ValueError, match="seq_dim and head_dim are both 1"):
        ContextParallel(head_dim=1)
    with pytest.raises(ValueError, match="name at least one of q_proj, k_proj, v_proj"):
        AsyncContextParallel()
    assert repr(AsyncContextParallel(q_proj="q")).startswith("AsyncContextParallel(q_proj='q'")
    assert repr(ContextParallel(ulysses_degree=2)) == (
        "ContextParallel(seq_dim=1, head_dim=2, ulysses_degree=2, inner_ring_degree=None, qkv_indices=(),"
        " qkv_kwarg_names=(), load_balance=False, use_local_output=False)"
    )
    assert repr(AsyncContextParallel(v_proj="v")).startswith("AsyncContextParallel(v_proj='v', head_size=None, ")


@on_ranks(2)
def test_what_one_rank_finds_inside_a_module_of_queries_keys_and_values_and_in_a_block() -> None:
    mesh, rank = _mesh(), dist.get_rank()
    q, mask = torch.randn(1, 4, 6, 2, device=device_type()), torch.ones(6, 6, dtype=torch.bool, device=device_type())
    own = {"attn_mask": mask} if rank else {}
    text = "an attn_mask of shape" if rank else r"ranks \[1\] refuse this step"
    style = ContextParallel(qkv_indices=(0, 1, 2), head_dim=1, seq_dim=2, ulysses_degree=1)
    module = parallelize_module(Given(), mesh, style)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=text):
            module(q, q, q, **own)
        assert module(q, q, q).shape == q.shape
    leaf = torch.randn(1, 4, 6, 2, device=device_type(), requires_grad=True)
    for step in range(3):
        with pytest.raises(NotImplementedError, match=text), context_parallel(mesh):
            first = F.scaled_dot_product_attention(leaf, leaf, leaf, is_causal=True)
            again = F.scaled_dot_product_attention(first, first, first, is_causal=True)
            if step:  # which no block before had
                again = F.scaled_dot_product_attention(again, again, again, is_causal=not own, **own)
            (first.sum() + again.sum()).backward()
            assert step == 0 and leaf.grad is not None
            F.scaled_dot_product_attention(first, first, first, is_causal=not own, **own)
        leaf.grad = None


class Remembering(nn.Module):
    """Attention that keeps its keys and values in a list of the caller's, or of its own."""

    def __init__(self, *, own: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM, dtype=torch.float64, device=device_type())
        self.kept: list[torch.Tensor] | None = [] if own else None

    def forward(self, x: torch.Tensor, cache: list[torch.Tensor] | None = None) -> torch.Tensor:
        cache = self.kept if cache is None else cache
        q, k, v = (each.unflatten(-1, (-1, SIZE)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        if cache is not None:
            if cache:
                k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
            cache[:] = k, v
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] == k.shape[2])


@on_ranks(2)
@pytest.mark.parametrize("degree", [None, 1])
@pytest.mark.parametrize("own", [False, True])
def test_keys_of_earlier_calls_are_refused(degree: int | None, own: bool) -> None:
    module = parallelize_module(Remembering(own=own), _mesh(), ContextParallel(ulysses_degree=degree))
    cache = () if own else ([],)
    x = torch.randn(1, 6, DIM, dtype=torch.float64, device=device_type())
    with torch.no_grad():
        module(x, *cache)
        for new in (1, 2):
            with (
                pytest.raises(
                    NotImplementedError, match=rf"{new} queries and .* keys of|{new} queries and \d+ keys, and"
                ),
                count_collectives() as counts,
            ):
                module(x[:, :new], *cache)
            assert "all_to_all" not in str(counts), "nothing but the comparison is sent"
        module.kept = None
        assert module(x[:, :2]).shape == (1, HEADS, 2, SIZE), "of keys of this call"


@on_ranks(2)
def test_a_block_refuses_keys_of_earlier_calls() -> None:
    module, mesh = Remembering(own=True), _mesh()
    torch.distributed.broadcast(module.qkv.weight.data, 0)
    x = torch.randn(1, 8, DIM, dtype=torch.float64, device=device_type())
    message = "2 queries and 6 keys, and no sequence of 6 tokens is passed"
    with pytest.raises(NotImplementedError, match=message), torch.no_grad():
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
            module(x)
            module(x[:, :2])
