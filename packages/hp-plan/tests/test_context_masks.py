"""Windows, documents and padding of transformers models whose sequence is cut: right, or refused by every rank.

All combinations are run by ``nox -s context``; here is one of each kind.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from context_cases import LENGTH, VOCABULARY, Case, batch_of, build, judge, run

from hp_dtensor import init_device_mesh
from hp_platform import count_collectives
from hp_styles import AsyncContextParallel, ContextParallel, context_parallel_shard, parallelize_module
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")  # transformers' models are PyTorch's
RIGHT = [
    Case("mistral", 11, None, False, "whole"),
    Case("mistral", 11, 1, True, "whole"),
    Case("qwen2", 5, None, True, "right padding"),
    Case("phi3", 11, 1, False, "packed"),
    Case("gemma3", 11, None, True, "packed"),
    Case("gemma3", 5, 1, True, "left padding"),
    Case("llama", None, None, True, "packed at ranks"),
    Case("llama", None, 1, False, "whole, mask of ones"),
]


@on_ranks(2)
def test_masks_of_the_whole_sequence() -> None:
    for case in RIGHT:
        assert judge(case) == "right", case


@on_ranks(4)
def test_rings_of_ulysses_groups() -> None:
    for case in (Case("mistral", 7, 2, True, "packed"), Case("gemma3", 7, 2, False, "left padding")):
        assert judge(case) == "right", case


def _mesh() -> Any:
    return init_device_mesh(device_type(), (dist.get_world_size(),), ("cp",))


def _styled(style: ContextParallel, family: str = "llama", window: int | None = None) -> Any:
    return parallelize_module(build(family, window), _mesh(), {"model.layers.*.self_attn": style})


@on_ranks(2)
@pytest.mark.parametrize("degree", [None, 1], ids=["ulysses", "ring"])
def test_a_single_token_a_rank_is_causal(degree: int | None) -> None:
    model, ids = build("llama", None), torch.tensor([[3, 5]], device=device_type())
    want = model(input_ids=ids, use_cache=False).logits
    parallelize_module(model, _mesh(), {"model.layers.*.self_attn": ContextParallel(ulysses_degree=degree)})
    rank = dist.get_rank()
    places = torch.tensor([[rank]], device=device_type())
    got = model(input_ids=ids[:, rank : rank + 1], position_ids=places, use_cache=False).logits
    torch.testing.assert_close(got, want[:, rank : rank + 1], rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_padding_on_one_rank_at_lengths_that_are_not_new() -> None:
    model = build("llama", None)
    reference = copy.deepcopy(model)
    parallelize_module(model, _mesh(), {"model.layers.*.self_attn": ContextParallel()})
    for kind in ("whole", "whole, mask of ones", "right padding", "whole", "left padding"):
        batch = batch_of(kind, 2)
        part = context_parallel_shard(batch, _mesh())
        if part["counts"].all():
            part.pop("attention_mask", None)  # of a rank that has no padding
        with count_collectives() as counts:
            logits, _ = run(model, part)
        assert counts["all_gather"] == 2, "for two layers, and with padding"
        want, _ = run(reference, batch)
        want, keep = (context_parallel_shard(x, _mesh()) for x in (want, batch["counts"]))
        torch.testing.assert_close(logits[keep], want[keep], rtol=1e-11, atol=1e-11)


@pytest.mark.not_on("torch-npu-sim", "torch-npu", reason="reduces float64 over ranks, which HCCL does not")
@on_ranks(2)
def test_recomputed_layers_see_the_documents_of_their_own_batch() -> None:
    """Two batches go forward before either goes back."""
    model = build("gemma3", 5)
    reference, batches = copy.deepcopy(model), [batch_of(kind, 2) for kind in ("packed", "left padding")]
    sum(run(reference, batch, exact=False)[1] for batch in batches).backward()  # type: ignore[union-attr]
    style = ContextParallel(load_balance=True)
    parallelize_module(model, _mesh(), {"model.layers.*.self_attn": style})
    # Renamed in the course of transformers 5.
    (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
    parts = [context_parallel_shard(batch, _mesh(), load_balance=True) for batch in batches]
    losses = [run(model, part, exact=False)[1] for part in parts]
    for loss in losses:
        loss.backward()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        dist.all_reduce(p.grad)
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


@on_ranks(2)
def test_decoding_is_refused() -> None:
    mesh, model = _mesh(), _styled(ContextParallel()).eval()
    ids = torch.randint(1, VOCABULARY, (1, LENGTH), device=device_type())
    places = torch.arange(LENGTH, device=device_type())[None]
    part = context_parallel_shard({"input_ids": ids, "position_ids": places}, mesh)
    out = model(**part)  # with the cache that it makes by default
    torch.testing.assert_close(out.logits, model(**part, use_cache=False).logits)
    text = rf"LlamaAttention: the key/value cache \(DynamicCache\) holds {LENGTH // 2} tokens already, .* generate\(\)"
    with pytest.raises(NotImplementedError, match=text):
        model(input_ids=ids[:, :1], position_ids=places[:, -1:] + 1, past_key_values=out.past_key_values)
    with pytest.raises(
        ValueError, match=r"position_ids count from 0 to 7 on each of the 2 ranks. .* does generate\(\)"
    ):
        model.generate(part["input_ids"], max_new_tokens=2, do_sample=False)
    padded = torch.ones(2, LENGTH // 2, dtype=torch.long, device=device_type())
    padded[1, : 3 - dist.get_rank()] = 0
    with pytest.raises(ValueError, match=r"token 8 of the sequence has position id 0, the one before it 7"):
        model.generate(part["input_ids"].expand(2, -1), attention_mask=padded, max_new_tokens=1, do_sample=False)
    plain = build("llama", None).eval()
    assert plain.generate(ids, max_new_tokens=2, do_sample=False).shape[1] <= LENGTH + 2  # without the style


@on_ranks(2)
def test_what_a_default_cache_does_to_early_sends() -> None:
    model = _styled(AsyncContextParallel(v_proj="v_proj", head_size=4))
    part = context_parallel_shard(batch_of("whole", 2), _mesh())
    with pytest.raises(NotImplementedError, match=r"a key/value cache \(DynamicCache\) copies keys .* use_cache=False"):
        model(input_ids=part["input_ids"], position_ids=part["position_ids"])
    run(model, part)


@on_ranks(2)
def test_position_ids_that_are_not_those_of_the_tokens() -> None:
    for balance in (False, True):
        model, batch = _styled(ContextParallel(load_balance=balance)), batch_of("whole", 2)
        part = context_parallel_shard(batch, _mesh(), load_balance=balance)
        ids = part["input_ids"].clone()
        with pytest.raises(
            ValueError, match="LlamaForCausalLM is called without position_ids, so it would count from 0"
        ):
            model(input_ids=ids, use_cache=False)
        with pytest.raises(ValueError, match="position_ids count from 0 to 7 on each of the 2 ranks. Models count"):
            model.model(input_ids=ids, use_cache=False)
        other = context_parallel_shard(batch, _mesh(), load_balance=not balance)["position_ids"].clone()
        text = f"sharded with load_balance={not balance}, the style has load_balance={balance}"
        with pytest.raises(ValueError, match=text):
            model(input_ids=ids, position_ids=other, use_cache=False)
        logits = model(input_ids=ids, position_ids=part["position_ids"], use_cache=False).logits
        want = model.model(input_ids=ids, position_ids=part["position_ids"], use_cache=False).last_hidden_state
        torch.testing.assert_close(logits, model.lm_head(want))
        if dist.get_rank():
            ids, other = ids[:, :-2], other[:, :-2]
        with pytest.raises(ValueError, match=r"parts of different shapes.* rank 0: \[2, 4, 8, .* rank 1: \[2, 4, 6, "):
            model(input_ids=ids, position_ids=other, use_cache=False)


@on_ranks(2)
def test_masks_that_are_not_understood() -> None:
    mesh, batch = _mesh(), batch_of("whole", 2)
    part = context_parallel_shard(batch, mesh)
    ids, places = part["input_ids"], part["position_ids"]
    model = _styled(ContextParallel())
    odd = torch.ones(2, 1, LENGTH // 2, LENGTH // 2, dtype=torch.bool, device=device_type()).tril()
    odd[0, 0, 3, 1] = False
    own = {"attention_mask": odd} if dist.get_rank() else {}
    text = (
        r"its attention_mask of shape \(2, 1, 8, 8\), for 8 tokens, does not consist of causal=True"
        if own
        else "ranks .1."
    )
    with pytest.raises(NotImplementedError, match=text):
        model(input_ids=ids, position_ids=places, use_cache=False, **own)
    chunked = _styled(ContextParallel(), "gemma3", 5)
    chunked.config.layer_types = ["chunked_attention", "full_attention"]
    with pytest.raises(NotImplementedError, match="layer 0 is of the type 'chunked_attention'"):
        chunked.model.layers[0].self_attn(torch.zeros(1, 4, 16), position_embeddings=None, attention_mask=None)
    two_sided = _styled(ContextParallel(), "mistral", 11)
    for layer in two_sided.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(NotImplementedError, match="a sliding window of 11 that sees keys on both sides, over 16 tok"):
        two_sided(input_ids=ids, position_ids=places, use_cache=False)


@on_ranks(1)
def test_on_one_rank_everything_is_the_models_own() -> None:
    model = build("mistral", 5)
    batch = batch_of("left padding", 1)
    want, _ = run(model, batch)
    parallelize_module(model, _mesh(), {"model.layers.*.self_attn": ContextParallel()})
    got, _ = run(model, batch)
    torch.testing.assert_close(got, want, rtol=0.0, atol=0.0)
