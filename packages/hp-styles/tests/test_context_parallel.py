"""Attention over a cut sequence against one process in float64: losses, all gradients, what is communicated."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_platform import count_collectives, get_platform
from hp_styles import (
    AsyncContextParallel,
    ColwiseParallel,
    ContextParallel,
    RowwiseParallel,
    context_parallel,
    context_parallel_shard,
    context_parallel_unshard,
    parallelize_module,
)
from hp_styles.context.header import SIZE as SIZE_OF_HEADER
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
R = Replicate()
HEADS, SIZE, LENGTH, VOCABULARY = 4, 2, 16, 11
DIM = HEADS * SIZE


class Attention(nn.Module):
    """Projections and torch's attention, written for one device."""

    def __init__(self, kv_heads: int, causal: bool) -> None:
        super().__init__()
        options: dict[str, Any] = {"dtype": torch.float64, "device": device_type(), "bias": False}
        self.q, self.o = nn.Linear(DIM, DIM, **options), nn.Linear(DIM, DIM, **options)
        self.k, self.v = nn.Linear(DIM, kv_heads * SIZE, **options), nn.Linear(DIM, kv_heads * SIZE, **options)
        self.causal = causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (each(x).view(batch, length, -1, SIZE).transpose(1, 2) for each in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)
        return self.o(out.transpose(1, 2).reshape(batch, length, -1))


class Model(nn.Module):
    """Tokens and their positions, two layers, logits."""

    def __init__(self, kv_heads: int = HEADS, causal: bool = True, recompute: str = "") -> None:
        super().__init__()
        options: dict[str, Any] = {"dtype": torch.float64, "device": device_type()}
        self.tokens, self.places = (nn.Embedding(n, DIM, **options) for n in (VOCABULARY, LENGTH))
        self.layers = nn.ModuleList([Attention(kv_heads, causal) for _ in range(2)])
        self.norms = nn.ModuleList([nn.LayerNorm(DIM, **options) for _ in range(2)])
        self.head = nn.Linear(DIM, VOCABULARY, **options)
        self.recompute = recompute

    def layer(self, index: int, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers[index](self.norms[index](x))

    def forward(self, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(places)
        for index in range(2):
            again = {"use_reentrant": self.recompute == "reentrant"}
            recomputed = self.recompute and torch.is_grad_enabled()
            x = checkpoint(self.layer, index, x, **again) if recomputed else self.layer(index, x)
        return self.head(x)


def _mesh() -> Any:
    return init_device_mesh(device_type(), (dist.get_world_size(),), ("cp",))


def _batch(length: int = LENGTH) -> dict[str, torch.Tensor]:
    ids = torch.randint(VOCABULARY, (2, length + 1), device=device_type())
    places = torch.arange(length, device=device_type())[None]
    return {"ids": ids[:, :-1], "places": places, "targets": ids[:, 1:]}


def _sum(x: torch.Tensor, group: Any = None) -> None:
    get_platform().collectives.all_reduce(x, group=group or dist.group.WORLD)


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def _equals_one_process(model: Model, style: ContextParallel, *, recompute: str = "") -> None:
    mesh, balance = _mesh(), style.settings.load_balance
    reference, batch = copy.deepcopy(model), _batch()
    parallelize_module(model, mesh, {"layers.*": style})
    want = _loss(reference(batch["ids"], batch["places"]), batch["targets"])
    want.backward()
    part = context_parallel_shard(batch, mesh, load_balance=balance)
    model.recompute = recompute
    logits = model(part["ids"], part["places"])
    loss = _loss(logits, part["targets"])
    loss.backward()
    total = loss.detach().clone()
    _sum(total)
    torch.testing.assert_close(total, want.detach(), rtol=1e-12, atol=1e-12)
    whole = context_parallel_unshard(logits, mesh, load_balance=balance)
    torch.testing.assert_close(whole, reference(batch["ids"], batch["places"]), rtol=1e-11, atol=1e-11)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert p.grad is not None
        _sum(p.grad)
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(part["ids"], part["places"]), logits.detach())


@on_ranks(2, 4)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("load_balance", [False, True], ids=["consecutive", "balanced"])
@pytest.mark.parametrize("degree", [None, 1, 2], ids=["ulysses", "ring", "two"])
def test_all_gradients_are_those_of_one_process(degree: int | None, load_balance: bool, causal: bool) -> None:
    for kv_heads in (4, 2, 1):
        _equals_one_process(Model(kv_heads, causal), ContextParallel(ulysses_degree=degree, load_balance=load_balance))


@on_ranks(1, 3)
def test_one_rank_and_three() -> None:
    if dist.get_world_size() == 1:
        _equals_one_process(Model(), ContextParallel(load_balance=True))
        _equals_one_process(Model(), AsyncContextParallel(v_proj="v", head_size=SIZE))
        return
    mesh, x = _mesh(), torch.randn(1, 12, DIM, dtype=torch.float64, device=device_type())
    module = Attention(2, True)
    want = module(x)
    parallelize_module(module, mesh, ContextParallel(ulysses_degree=1, load_balance=True))
    got = module(context_parallel_shard(x, mesh, load_balance=True))
    torch.testing.assert_close(context_parallel_unshard(got, mesh, load_balance=True), want)


@on_ranks(2, 4)
@pytest.mark.parametrize("degree", [None, 1, 2], ids=["ulysses", "ring", "two"])
@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
def test_recomputed_layers(how: str, degree: int | None) -> None:
    _equals_one_process(Model(2), ContextParallel(ulysses_degree=degree, load_balance=True), recompute=how)
    if degree != 1:
        style = AsyncContextParallel(q_proj="q", k_proj="k", v_proj="v", head_size=SIZE, ulysses_degree=degree)
        _equals_one_process(Model(2), style, recompute=how)


@on_ranks(2, 4)
@pytest.mark.parametrize("degree", [None, 2], ids=["ulysses", "two"])
@pytest.mark.parametrize("load_balance", [False, True], ids=["consecutive", "balanced"])
def test_projections_that_are_sent_at_once(degree: int | None, load_balance: bool) -> None:
    for names in ("qkv", "kv", "v"):
        style = AsyncContextParallel(
            **{f"{name}_proj": name for name in names},  # type: ignore[arg-type]
            head_size=SIZE,
            ulysses_degree=degree,
            load_balance=load_balance,
        )
        for kv_heads in (4, 2, 1):
            _equals_one_process(Model(kv_heads), style)


@on_ranks(2, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision(dtype: torch.dtype) -> None:
    mesh = _mesh()
    module = Attention(2, True).to(dtype)
    x = torch.randn(2, 16, DIM, device=device_type()).to(dtype)
    exact = copy.deepcopy(module).double()
    given = x.double().requires_grad_()
    want = exact(given)
    want.square().sum().backward()
    parallelize_module(module, mesh, ContextParallel(ulysses_degree=1, load_balance=True))
    part = context_parallel_shard(x, mesh, load_balance=True).requires_grad_()
    got = module(part)
    assert got.dtype == dtype
    got.square().sum().backward()
    tolerance = {"rtol": 0.0, "atol": 1e-5 if dtype == torch.float32 else 0.1}
    cut = context_parallel_shard(want, mesh, load_balance=True)
    torch.testing.assert_close(got.double(), cut, **tolerance)
    grad = context_parallel_shard(given.grad, mesh, load_balance=True)
    torch.testing.assert_close(part.grad.double(), grad, **tolerance)  # type: ignore[union-attr]


# ---- q, k and v as inputs ----
class Core(nn.Module):
    """Attention by hand, with a bias for each distance: something that torch's function is not called for."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        weights = torch.softmax(q @ k.mT + bias, -1)
        return (weights @ v).transpose(1, 2).flatten(2), None


class Torchs(nn.Module):
    def forward(self, *, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3)


@on_ranks(2, 4)
@pytest.mark.parametrize("load_balance", [False, True], ids=["consecutive", "balanced"])
def test_a_module_that_takes_q_k_v_may_compute_what_it_likes(load_balance: bool) -> None:
    mesh = _mesh()
    whole = [torch.randn(2, 8, n, 3, dtype=torch.float64, device=device_type()) for n in (4, 2, 2)]
    bias = torch.randn(8, 8, dtype=torch.float64, device=device_type())
    leaves = [x.clone().requires_grad_() for x in whole]
    want, _ = Core()(*leaves, bias)
    want.square().sum().backward()
    style = ContextParallel(qkv_indices=(0, 1, 2), load_balance=load_balance)
    module = parallelize_module(Core(), mesh, style)
    parts = [context_parallel_shard(x, mesh, load_balance=load_balance).requires_grad_() for x in whole]
    got, nothing = module(*parts, bias)
    got.square().sum().backward()
    assert nothing is None
    torch.testing.assert_close(context_parallel_unshard(got, mesh, load_balance=load_balance), want)
    for part, leaf in zip(parts, leaves, strict=True):
        grad = context_parallel_unshard(part.grad, mesh, load_balance=load_balance)
        torch.testing.assert_close(grad, leaf.grad, rtol=1e-11, atol=1e-12)


@on_ranks(4)
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_names_of_inputs_and_a_ring_inside(degree: int) -> None:
    mesh = _mesh()
    whole = [torch.randn(2, 4, 8, 3, dtype=torch.float64, device=device_type()) for _ in range(3)]
    leaves = [x.clone().requires_grad_() for x in whole]
    want = Torchs()(query=leaves[0], key=leaves[1], value=leaves[2])
    want.square().sum().backward()
    names = ("query", "key", "value")
    style = ContextParallel(
        qkv_kwarg_names=names, seq_dim=2, head_dim=1, ulysses_degree=degree, load_balance=True, use_local_output=True
    )
    module = parallelize_module(Torchs(), mesh, style)
    parts = [context_parallel_shard(x, mesh, seq_dim=2, load_balance=True) for x in whole]
    given = [DTensor.from_local(x, mesh, [Shard(2)]).requires_grad_() for x in parts]
    got = module(**dict(zip(names, given, strict=True)))
    assert type(got) is torch.Tensor
    got.square().sum().backward()
    torch.testing.assert_close(got, context_parallel_shard(want, mesh, seq_dim=2, load_balance=True))
    for x, leaf in zip(given, leaves, strict=True):
        grad = context_parallel_shard(leaf.grad, mesh, seq_dim=2, load_balance=True)
        torch.testing.assert_close(x.grad.to_local(), grad, rtol=1e-11, atol=1e-12)  # type: ignore[union-attr]


# ---- together with DTensors ----
@on_ranks(2, 4)
@pytest.mark.parametrize("degree", [None, 1], ids=["ulysses", "ring"])
def test_replicated_parameters_get_their_whole_gradient(degree: int | None) -> None:
    mesh = _mesh()
    model = Model(2)
    reference, batch = copy.deepcopy(model), _batch()
    _loss(reference(batch["ids"], batch["places"]), batch["targets"]).backward()
    plan = {name: "replicate" for name, child in model.named_modules() if list(child.parameters(recurse=False))}
    parallelize_module(model, mesh, plan)
    parallelize_module(model, mesh, {"layers.*": ContextParallel(ulysses_degree=degree, load_balance=True)})
    part = context_parallel_shard(batch, mesh, load_balance=True)
    given = {name: DTensor.from_local(x, mesh, [Shard(1)]) for name, x in part.items()}
    logits = model(given["ids"], given["places"])
    assert logits.placements == (Shard(1),)
    with count_collectives() as counts:
        _loss(logits, given["targets"]).backward()
    assert counts["all_reduce"] == 1, "one sum for all gradients"
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        grad = p.grad.full_tensor()  # type: ignore[union-attr]
        torch.testing.assert_close(grad, q.grad, rtol=1e-10, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")


@on_ranks(4)
@pytest.mark.parametrize("local", [True, False], ids=["plain", "DTensors"])
@pytest.mark.parametrize("style", ["ulysses", "ring", "async"])
def test_heads_over_one_axis_and_the_sequence_over_the_other(style: str, local: bool) -> None:
    mesh = init_device_mesh(device_type(), (2, 2), ("cp", "tp"))
    module = Attention(2, True)
    x = torch.randn(2, LENGTH, DIM, dtype=torch.float64, device=device_type())
    reference, leaf = copy.deepcopy(module), x.clone().requires_grad_()
    want = reference(leaf)
    want.square().sum().backward()
    plan = {
        "[qkv]": ColwiseParallel(use_local_output=local),
        "o": RowwiseParallel(use_local_output=local, output_layouts=R),
    }
    parallelize_module(module, mesh["tp"], plan)
    context = {
        "ulysses": ContextParallel(load_balance=True),
        "ring": ContextParallel(ulysses_degree=1, load_balance=True),
        "async": AsyncContextParallel(q_proj="q", k_proj="k", v_proj="v", head_size=SIZE, load_balance=True),
    }[style]
    parallelize_module(module, mesh["cp"], context)
    part = context_parallel_shard(x, mesh["cp"], load_balance=True)
    given = part.requires_grad_() if local else distribute_tensor(part, mesh["tp"], [R]).requires_grad_()
    got = module(given)
    loss = got.square().sum()
    loss.backward()
    got = got if local else got.full_tensor()
    grad = given.grad if local else given.grad.full_tensor()
    torch.testing.assert_close(context_parallel_unshard(got, mesh["cp"], load_balance=True), want)
    torch.testing.assert_close(context_parallel_unshard(grad, mesh["cp"], load_balance=True), leaf.grad)
    for (name, p), q in zip(module.named_parameters(), reference.named_parameters(), strict=True):
        mine = p.grad.full_tensor()  # type: ignore[union-attr]
        _sum(mine, mesh["cp"].get_group())
        torch.testing.assert_close(mine, q[1].grad, msg=lambda m, name=name: f"{name}: {m}")


# ---- what is communicated ----
@on_ranks(4)
def test_what_is_sent() -> None:
    mesh = _mesh()
    x = torch.randn(1, 8, DIM, dtype=torch.float64, device=device_type())
    part = context_parallel_shard(x, mesh)
    tokens, width, number = 8 // 4, DIM, 8  # of a rank; of q, k, v each; bytes
    cases = [
        (ContextParallel(), 2, 2, 4 * tokens * width, 4 * tokens * width),
        (AsyncContextParallel(q_proj="q", k_proj="k", v_proj="v", head_size=SIZE), 4, 4, 4 * tokens * width, None),
        (ContextParallel(ulysses_degree=1), 3, 3 + 4, 3 * 2 * tokens * width, 7 * 2 * tokens * width),
        (ContextParallel(ulysses_degree=2), 2 + 1, 2 + 1 + 2, None, None),
    ]
    for style, forward_calls, backward_calls, forward_size, backward_size in cases:
        module = parallelize_module(Attention(4, True), mesh, style)
        module(part)  # whatever attention reads is compared
        with count_collectives() as forward:
            out = module(part.clone().requires_grad_())
        with count_collectives() as backward:
            out.sum().backward()
        ends = isinstance(style, AsyncContextParallel)  # what follows the first projection could be refused
        assert dict(forward) == {"all_gather": 1 + ends, "all_to_all": forward_calls}, "lengths, in each step"
        assert dict(backward) == {"all_to_all": backward_calls}, style
        compared = 4 * (SIZE_OF_HEADER + ends) * number
        assert forward_size is None or forward.bytes - compared == forward_size * number, style
        assert backward_size is None or backward.bytes == backward_size * number, style


@on_ranks(2)
def test_the_ranks_compare_once_a_step() -> None:
    mesh, batch = _mesh(), _batch()
    model = parallelize_module(Model(2), mesh, {"layers.*": ContextParallel(load_balance=True)})
    part = context_parallel_shard(batch, mesh, load_balance=True)
    with count_collectives() as first:
        model(part["ids"], part["places"])
    assert first["all_gather"] == 2, "each layer, before any"
    for recompute in ("", "not reentrant"):
        model.recompute = recompute
        for _ in range(2):
            with count_collectives() as forward:
                logits = model(part["ids"], part["places"])
            assert forward["all_gather"] == 2, "what a layer is about to compute, and whether all have"
            with count_collectives() as backward:
                logits.sum().backward()
            assert backward["all_gather"] == bool(recompute), "layers that are run again are a step"
    with count_collectives() as counts:
        model.layers[0](torch.ones(2, 4, DIM, dtype=torch.float64, device=device_type()))
    assert counts["all_gather"] == 1, "a layer alone"


@on_ranks(2)
def test_gradients_are_sent_before_the_first_projection_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    from hp_styles.torch.context import exchange

    mesh, events = _mesh(), []
    module = parallelize_module(
        Attention(4, True), mesh, AsyncContextParallel(q_proj="q", k_proj="k", v_proj="v", head_size=SIZE)
    )
    x = torch.randn(1, 8, DIM, dtype=torch.float64, device=device_type())
    send, wait = exchange.Transfer._send, exchange.Transfer._wait
    monkeypatch.setattr(exchange.Transfer, "_send", lambda self, sent: (events.append("send"), send(self, sent))[1])
    monkeypatch.setattr(exchange.Transfer, "_wait", lambda self: (events.append("wait"), wait(self))[1])
    for name in "qkv":
        getattr(module, name).register_forward_pre_hook(lambda mod, args: events.append("product"))
        getattr(module, name).weight.register_post_accumulate_grad_hook(lambda p: events.append("gradient"))
    out = module(x)
    assert events == ["product", "send"] * 3 + ["wait"] * 3
    events.clear()
    out.sum().backward()
    assert events == ["send"] * 3 + ["wait", "gradient"] * 3


@on_ranks(2)
@pytest.mark.parametrize("recompute", ["", "not reentrant"])
def test_everything_inside_a_block(recompute: str) -> None:
    mesh, model, batch = _mesh(), Model(2), _batch()
    reference = copy.deepcopy(model)
    want = _loss(reference(batch["ids"], batch["places"]), batch["targets"])
    want.backward()
    model.recompute = recompute
    ids, targets = batch["ids"].clone(), batch["targets"].clone()
    places = batch["places"].clone()
    before = ids.clone()
    options = {"buffers": [ids, places, targets], "buffer_seq_dims": [1, 1, 1], "no_restore_buffers": {targets}}
    with context_parallel(mesh, **options):  # type: ignore[arg-type]
        assert ids.shape == (2, LENGTH // 2)
        loss = _loss(model(ids, places), targets)
        loss.backward()
    assert torch.equal(ids, before) and targets.shape == (2, LENGTH // 2)
    total = loss.detach().clone()
    _sum(total)
    torch.testing.assert_close(total, want.detach(), rtol=1e-12, atol=1e-12)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        _sum(p.grad)  # type: ignore[arg-type]
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")
    with (
        pytest.raises(ValueError, match="1 buffers, 2 buffer_seq_dims; pass one dim"),
        context_parallel(mesh, buffers=[ids], buffer_seq_dims=[1, 1]),
    ):
        pass
    with (
        pytest.raises(ValueError, match="no_restore_buffers has a tensor that is not in"),
        context_parallel(mesh, buffers=[ids], buffer_seq_dims=[1], no_restore_buffers={places}),
    ):
        pass
    with (
        pytest.raises(ValueError, match="length 6 .* does not divide over 2 ranks, with load_balance"),
        context_parallel(mesh, buffers=[ids[:, :6]], buffer_seq_dims=[1]),
    ):
        pass


@on_ranks(2)
@pytest.mark.parametrize("degree", [None, 1], ids=["ulysses", "ring"])
def test_inference_copies_and_autocast(degree: int | None) -> None:
    mesh, length = _mesh(), 8
    x = torch.randn(1, length, DIM, device=device_type())
    module = Attention(2, True).float()
    want = module(x)
    styles: list[ContextParallel] = [ContextParallel(ulysses_degree=degree)]
    if degree is None:
        styles.append(AsyncContextParallel(q_proj="q", k_proj="k", v_proj="v", head_size=SIZE))
    part = context_parallel_shard(x, mesh)
    for style in styles:
        copied = copy.deepcopy(parallelize_module(copy.deepcopy(module), mesh, style))
        copied(part)
        with torch.inference_mode(), count_collectives() as counts:
            got = copied(part.clone())
        assert counts["all_to_all"] == (4 if isinstance(style, AsyncContextParallel) else 2 if degree is None else 1)
        torch.testing.assert_close(got, context_parallel_shard(want, mesh), rtol=1e-5, atol=1e-5)
        with torch.autocast(device_type(), torch.bfloat16):
            low = copied(part)
            low.float().square().sum().backward()
        assert low.dtype == torch.bfloat16 and copied.q.weight.grad.dtype == torch.float32
        torch.testing.assert_close(low.float(), context_parallel_shard(want, mesh), rtol=0.05, atol=0.05)
