"""stream_weights of transformers models under plans: the state dict of one process, to the bit, which a model loads."""

from __future__ import annotations

import pytest
import torch
from test_pipelined import small_plan

from hp_checkpoint import stream_weights
from hp_dtensor import DTensor
from hp_plan import ParallelPlan, apply, build_model
from hp_plan.torch.library.folders import ties_of
from hp_platform import get_platform
from hp_testing import on_ranks

pytestmark = pytest.mark.framework("torch")  # transformers' models are PyTorch's

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
LORA = {"adapter": {"kind": "lora", "rank": 2, "targets": ["q_proj", "down_proj"]}}


def drawn(plan: ParallelPlan) -> torch.nn.Module:
    """The model of a plan in one process, no weight zero or one."""
    model = build_model(plan)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return model


def check(plan: ParallelPlan, bucket: int | str = 4096) -> None:
    one = drawn(plan)
    model = apply(drawn(plan), plan)
    streamed = {name: value.cpu() for name, value in stream_weights(model, bucket=bucket)}
    expected, ties = one.state_dict(), ties_of(one)
    firsts = {ties.get(name, (name,))[0] for name in expected}
    assert streamed.keys() == firsts
    for name, value in streamed.items():
        own = expected[name]
        assert type(value) is torch.Tensor and not value.requires_grad
        assert (value.dtype, value.shape) == (own.dtype, own.shape), name
        assert torch.equal(value.reshape(-1).view(torch.uint8), own.reshape(-1).view(torch.uint8)), name
    plain = build_model(plan)
    missing, unexpected = plain.load_state_dict(streamed, strict=False)
    assert not unexpected and set(missing) == expected.keys() - firsts
    tokens = torch.randint(24, (2, 8), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        assert torch.equal(plain.eval()(input_ids=tokens).logits, one.eval()(input_ids=tokens).logits)
    one_rank = list(stream_weights(model, bucket=bucket, ranks=0))
    assert [name for name, _ in one_rank] == (list(streamed) if get_platform().groups.rank() == 0 else [])
    assert all(torch.equal(value.cpu(), streamed[name]) for name, value in one_rank)


@on_ranks(2)
@pytest.mark.parametrize("axis", ["dp_shard", "tp", "dp_replicate", "pp"])
@pytest.mark.parametrize("tied", [False, True])
def test_two_ranks(axis, tied):
    check(small_plan({axis: 2}, tie_word_embeddings=tied))


@on_ranks(3)
def test_shards_that_are_not_equal():
    check(small_plan({"dp_shard": 3}))


@on_ranks(4)
@pytest.mark.parametrize(
    "mesh", [{"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}, {"pp": 2, "tp": 2}, {"pp": 2, "dp_shard": 2}]
)
def test_two_axes(mesh):
    check(small_plan(mesh, tie_word_embeddings=True))


@on_ranks(4)
@pytest.mark.parametrize("mesh", [{"dp_shard": 4, "ep": 2}, {"dp_shard": 2, "tp": 2, "ep": 2}])
def test_experts_are_stacked_as_the_class_has_them(mesh):
    check(small_plan(mesh, config="Qwen3MoeConfig", **EXPERTS))


@on_ranks(2)
def test_an_adapter_comes_beside_the_weights_under_it():
    plan = small_plan({"dp_shard": 2}, sections=LORA)
    check(plan)
    names = [name for name, _ in stream_weights(apply(drawn(plan), plan))]
    assert "model.layers.0.self_attn.q_proj.base_layer.weight" in names
    assert "model.layers.0.self_attn.q_proj.lora_A.default.weight" in names


@on_ranks(2)
@pytest.mark.parametrize("sections", [{}, {"fsdp": {"groups": ["model.layers.*"], "reshard_after_forward": False}}])
def test_between_steps_they_are_the_full_tensors(sections):
    """Also where the parameters of the forward are still gathered."""
    plan = small_plan({"dp_shard": 2}, sections={**sections, "run": {"dtype": "bfloat16"}})
    model = apply(drawn(plan), plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tokens = torch.randint(24, (2, 8), generator=torch.Generator().manual_seed(get_platform().groups.rank()))
    for _ in range(2):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        streamed = dict(stream_weights(model))
        state = model.state_dict()
        assert streamed.keys() == state.keys()
        for name, value in state.items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            assert streamed[name].dtype is torch.bfloat16 and torch.equal(streamed[name], whole), name
    with torch.no_grad():
        model(input_ids=tokens)
    assert all(torch.equal(value, streamed[name]) for name, value in stream_weights(model))
