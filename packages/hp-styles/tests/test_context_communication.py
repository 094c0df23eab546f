"""Attention over a cut sequence: what is communicated and when, blocks with a cut sequence, inference and autocast."""

from __future__ import annotations

import copy

import pytest
import torch
from context_models import DIM, LENGTH, SIZE, Attention, Model, context_mesh, loss_of, random_batch, sum_over_ranks

from hp_platform import count_collectives
from hp_styles import (
    AsyncContextParallel,
    ContextParallel,
    context_parallel,
    context_parallel_shard,
    parallelize_module,
)
from hp_styles.context.rounds import SIZE as SIZE_OF_HEADER
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")


@on_ranks(4)
def test_what_is_sent() -> None:
    mesh = context_mesh()
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
    mesh, batch = context_mesh(), random_batch()
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

    mesh, events = context_mesh(), []
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
    mesh, model, batch = context_mesh(), Model(2), random_batch()
    reference = copy.deepcopy(model)
    want = loss_of(reference(batch["ids"], batch["places"]), batch["targets"])
    want.backward()
    model.recompute = recompute
    ids, targets = batch["ids"].clone(), batch["targets"].clone()
    places = batch["places"].clone()
    before = ids.clone()
    options = {"buffers": [ids, places, targets], "buffer_seq_dims": [1, 1, 1], "no_restore_buffers": {targets}}
    with context_parallel(mesh, **options):  # type: ignore[arg-type]
        assert ids.shape == (2, LENGTH // 2)
        loss = loss_of(model(ids, places), targets)
        loss.backward()
    assert torch.equal(ids, before) and targets.shape == (2, LENGTH // 2)
    total = loss.detach().clone()
    sum_over_ranks(total)
    torch.testing.assert_close(total, want.detach(), rtol=1e-12, atol=1e-12)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        sum_over_ranks(p.grad)  # type: ignore[arg-type]
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
    mesh, length = context_mesh(), 8
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
