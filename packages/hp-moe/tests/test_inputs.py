"""Wrong inputs of one rank: the same error on all, before any row is sent."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from moe_models import Wraps
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from hp_dtensor import DeviceMesh, Replicate, distribute_tensor, init_device_mesh
from hp_moe import (
    ExpertParallel,
    ExpertTensorParallel,
    GroupedExperts,
    MoE,
    TensorParallel,
    TokenChoiceTopKRouter,
    overlap_experts,
)
from hp_styles import parallelize_module
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")

TOKENS, CHOICES = 3, ((0, 1), (2, 0), (1, 2))


class Packed(nn.Module):
    """Experts as transformers has them."""

    is_transposed = False

    def __init__(self, experts=3, hidden=4, inner=6) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.randn(experts, hidden, inner))

    def _apply_gate(self, value):
        gate, up = value.chunk(2, -1)
        return gate.sigmoid() * up

    def forward(self, hidden_states, top_k_index, top_k_weights):
        raise NotImplementedError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Packed()


def inputs() -> list[torch.Tensor]:
    """Return tokens, choices and weights."""
    each = torch.randn(TOKENS, 4), torch.tensor(CHOICES), torch.rand(TOKENS, 2)
    return [value.to(device_type()) for value in each]


def wrong(x, chosen, weights):
    """List wrong inputs and what is said of them."""
    inf, minus = weights.clone(), chosen.clone()
    inf[2, 1], minus[1, 0] = float("inf"), -2
    return [
        ((x, chosen + 1, weights), r"chose expert 3 for token 1, but there are experts 0 to 2 \(2 such choices\)"),
        ((x, chosen + 1, weights), ".*; in transformers' own expert parallelism 3 is an expert of another rank"),
        ((x, minus, weights), r"chose expert -2 for token 1, but there are experts 0 to 2 \(1 such choice\)"),
        ((x, chosen, weights * torch.nan), r"has weight nan for expert 0 of token 0 \(6 weights not finite\): look at"),
        ((x, chosen, inf), r"has weight inf for expert 2 of token 2 \(1 weight not finite\): look at the router"),
        ((x[:, :3], chosen, weights), r"has tokens of shape \(3, 3\); its experts take \[tokens, 4\]"),
        ((x[None], chosen, weights), r"has tokens of shape \(1, 3, 4\); its experts take \[tokens, 4\]"),
        ((x, chosen[:2], weights[:2]), r"has choices of shape \(2, 2\) and weights of shape \(2, 2\) for 3 tokens"),
        ((x, chosen, weights[:, :1]), r"has choices of shape \(3, 2\) and weights of shape \(3, 1\) for 3 tokens"),
        ((x, chosen.repeat(1, 2), weights.repeat(1, 2)), "has 4 choices a token, but there are 3 experts"),
        ((x, chosen.float(), weights), "has choices of torch.float32; they must have an integer dtype"),
        ((x, chosen, weights > 0.5), "has weights of torch.bool; they must have a floating dtype"),
        ((x.long(), chosen, weights), "has tokens of torch.int64; they must have a floating dtype"),
        ((x, chosen, weights.to("meta")), "has weights on meta, but its experts are on .*: bring both to one device"),
    ]


@on_ranks(2)
@pytest.mark.parametrize("combine", ["fast", "exact"])
def test_wrong_inputs_of_one_rank_are_the_same_error_of_all(combine):
    mesh, rank = init_device_mesh(device_type(), (2,), mesh_dim_names=("ep",)), dist.get_rank()
    model = nn.ModuleDict({"layers": nn.ModuleList([Block(), Block()])})
    parallelize_module(model, mesh, {"layers.*.experts": ExpertParallel(combine=combine)}).to(device_type())
    layer, right = model["layers"][1].experts, inputs()
    for values, text in wrong(*right):
        with pytest.raises(ValueError, match=rf"^layers\.1\.experts \(Packed\): rank 1 {text}") as caught:
            layer(*(values if rank else right))
        assert "rank 0" not in str(caught.value)
    assert layer(*right).shape == (TOKENS, 4)


@on_ranks(2)
def test_inputs_that_differ_between_ranks_are_the_same_error_of_all():
    mesh, rank = init_device_mesh(device_type(), (2,), mesh_dim_names=("ep",)), dist.get_rank()
    layer = parallelize_module(Packed(), mesh, ExpertParallel()).to(device_type())
    x, chosen, weights = inputs()
    for values, here, there in (
        ((x, chosen[:, :1], weights[:, :1]), "1 choice a token", "2 choices a token"),
        ((x.double(), chosen, weights), "tokens of torch.float64", "tokens of torch.float32"),
        ((x, chosen, weights.bfloat16()), "weights of torch.bfloat16", "weights of torch.float32"),
        ((x.clone().requires_grad_(), chosen, weights), "gradients of tokens", "no gradients"),
    ):
        with pytest.raises(ValueError, match=f"Packed: rank 0 has .*{there}.*; rank 1 has .*{here}.*; all ranks must"):
            layer(*(values if rank else (x, chosen, weights)))
    other = parallelize_module(Packed(), mesh, ExpertParallel(combine=("fast", "exact")[rank])).to(device_type())
    with pytest.raises(ValueError, match="rank 0 has .*combine='fast'; rank 1 has .*combine='exact'; all ranks must"):
        other(x, chosen, weights)


@on_ranks(2)
def test_wrong_counts_of_one_rank_are_the_same_error_of_all():
    mesh, rank = init_device_mesh(device_type(), (2,), mesh_dim_names=("ep",)), dist.get_rank()
    experts = parallelize_module(GroupedExperts(4, 4, 3), mesh, ExpertParallel()).to(device_type())
    x = inputs()[0]
    for counts, text in (
        ([2, 1, 1], "rank 1 has counts that add up to 4 rows, but there are 3"),
        ([2, 1], "rank 1 has counts of 2 experts, but there are 3"),
    ):
        with pytest.raises(ValueError, match=text):
            experts(x, counts if rank else [1, 1, 1])
    assert experts(x, [1, 1, 1]).shape == x.shape


@on_ranks(2)
def test_experts_without_values_are_refused():
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("ep",))
    with torch.device("meta"):
        experts = Packed()
    parallelize_module(experts, mesh, ExpertParallel())
    with pytest.raises(ValueError, match="has tokens on .*, but its experts are on meta: bring both"):
        experts(*inputs())
    experts.to_empty(device=device_type())
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.fill_(0.1)
    assert bool(experts(*inputs()).isfinite().all())


@on_ranks(2)
def test_modules_that_cannot_be_taken_over_are_refused():
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("ep",))
    many, spread, other = Packed(), Packed(), Packed()
    spread._is_expert_parallel = True
    with pytest.raises(ValueError, match="Packed: transformers has spread these experts over ranks already"):
        parallelize_module(spread, mesh, ExpertParallel())
    other.forward = lambda hidden_states: hidden_states  # type: ignore[method-assign]
    with pytest.raises(TypeError, match=r"Packed is called with \(hidden_states\); experts over ranks are called with"):
        parallelize_module(other, mesh, ExpertParallel())
    other.forward = lambda tokens, chosen, weights: tokens  # type: ignore[method-assign]
    parallelize_module(other, mesh, ExpertParallel())
    many.is_transposed = True
    with pytest.raises(TypeError, match=r"gate_up_proj of shape \(3, 12, 4\) and down_proj of shape \(3, 4, 6\)"):
        parallelize_module(many, mesh, TensorParallel())
    many.is_transposed = False
    parallelize_module(many, mesh, TensorParallel())
    few = nn.ModuleDict({"layer": Block()})
    few["layer"].experts = Packed(1)
    with pytest.raises(ValueError, match=r"layer\.experts \(Packed\): 1 experts cannot be spread over 2 ranks"):
        parallelize_module(few, mesh, {"*.experts": ExpertParallel()})
    parallelize_module(few, DeviceMesh(device_type(), [dist.get_rank()]), {"*.experts": ExpertParallel()})
    none = Packed()
    none._apply_gate = None
    with pytest.raises(TypeError, match="Packed has no _apply_gate, which computes what is between its two products"):
        parallelize_module(none, mesh, ExpertParallel())
    del none._apply_gate  # that of the class
    assert parallelize_module(none, mesh, ExpertParallel()).to(device_type())(*inputs()).shape == (TOKENS, 4)
    block = Block()
    with pytest.raises(TypeError, match="Block is not a module of experts: .*Name the module that has gate_up_proj"):
        parallelize_module(block, mesh, ExpertParallel())
    with pytest.raises(ValueError, match=r"its own before or after them. Use chunks=2, or overlap_experts"):
        parallelize_module(block, mesh, {"experts": ExpertParallel(async_combine=True)})
    torch.manual_seed(0)
    single, values = Block().to(device_type()), inputs()
    expected = one_rank(single.experts, *values)
    chunks = parallelize_module(copy.deepcopy(single), mesh, {"experts": ExpertParallel(chunks=2)})
    torch.testing.assert_close(chunks.experts(*values), expected)
    pairs = parallelize_module(copy.deepcopy(single), mesh, {"experts": ExpertParallel()})
    assert overlap_experts(pairs, overlap := Wraps()) == 1
    torch.testing.assert_close(pairs.experts(*values), expected)
    assert overlap.calls == ["dispatch", "combine"]


def one_rank(experts, x, chosen, weights):
    """Return what experts compute where they are not spread."""
    alone = DeviceMesh(device_type(), [dist.get_rank()])
    return parallelize_module(copy.deepcopy(experts), alone, ExpertParallel())(x, chosen, weights)


class Ungated(nn.Module):
    """Experts without a gate."""

    has_gate = False

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(torch.randn(3, 6, 4))
        self.down_proj = nn.Parameter(torch.randn(3, 4, 6))
        self.act_fn = nn.GELU()

    def forward(self, hidden_states, top_k_index, top_k_weights):
        rows = torch.einsum("th,tkih->tki", hidden_states, self.up_proj[top_k_index])
        out = torch.einsum("tki,tkhi->tkh", self.act_fn(rows), self.down_proj[top_k_index])
        return (out * top_k_weights.unsqueeze(-1)).sum(1)


@on_ranks(2)
def test_experts_without_a_gate_say_so():
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("ep",))
    torch.manual_seed(0)
    single, values = Ungated().to(device_type()), inputs()
    wrong = copy.deepcopy(single)
    wrong.has_gate = True
    with pytest.raises(TypeError, match=r"gate_up_proj must be .* \(or up_proj, with has_gate = False\) and down_proj"):
        parallelize_module(wrong, mesh, ExpertParallel())
    wrong.has_gate = False
    spread = parallelize_module(wrong, mesh, ExpertParallel())
    torch.testing.assert_close(spread(*values), single(*values))
    wrong = copy.deepcopy(single)
    wrong.act_fn = None
    with pytest.raises(TypeError, match="Ungated has no act_fn, which computes .*: define it"):
        parallelize_module(wrong, mesh, ExpertParallel())
    wrong.act_fn = nn.GELU()
    torch.testing.assert_close(parallelize_module(wrong, mesh, ExpertParallel())(*values), single(*values))


@on_ranks(4)
def test_tokens_on_an_axis_that_experts_are_not_spread_over():
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    values = inputs()

    def run(over, style):
        torch.manual_seed(0)
        experts = parallelize_module(GroupedExperts(4, 4, 4).to(device_type()), over, style)
        whole = [distribute_tensor(each, mesh["tp"], [Replicate()]) for each in values]
        return experts._expert_layer(experts, *whole).full_tensor()

    with pytest.raises(
        ValueError, match="Spread experts over all these ranks, or use ExpertTensorParallel on a mesh o"
    ):
        run(mesh["dp"], ExpertParallel())
    expected = run(mesh["tp"], ExpertParallel())
    for over, style in ((mesh["dp", "tp"]._flatten("all"), ExpertParallel()), (mesh, ExpertTensorParallel())):
        torch.testing.assert_close(run(over, style), expected)
    unnamed = init_device_mesh(device_type(), (2, 2))
    with pytest.raises(ValueError, match=r"need names, such as \('ep', 'tp'\)"):
        run(unnamed, ExpertTensorParallel())


def test_experts_of_llama_4_are_refused():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

    from hp_moe.layer.experts import check_module, describe

    experts = Llama4TextExperts(transformers.Llama4TextConfig(hidden_size=8, intermediate_size=4, num_local_experts=2))
    with pytest.raises(TypeError, match="Llama4TextExperts"):
        check_module(describe(experts), experts)


def test_biases_of_another_number_of_experts_are_refused():
    router = TokenChoiceTopKRouter(4, 6, top_k=2)
    for length in (1, 5):
        with pytest.raises(ValueError, match=rf"expert_bias of shape \({length},\) is none of 6 experts: \(6,\)"):
            router(torch.randn(3, 4), torch.zeros(length))


@on_ranks(2)
def test_choices_that_change_where_a_block_is_computed_again_are_refused():
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("ep",))
    torch.manual_seed(0)
    moe = MoE(8, 8, 4, top_k=2).to(device_type())
    parallelize_module(moe, mesh, {"experts": ExpertParallel()})
    x = torch.randn(40, 8, device=device_type(), requires_grad=True)

    def block(x):
        return moe(nn.functional.dropout(x, 0.5))

    checkpoint(block, x, use_reentrant=False).sum().backward()  # the generators' states are kept
    torch.manual_seed(dist.get_rank())
    out = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False, determinism_check="none")
    with pytest.raises(RuntimeError, match=r"^experts \(GroupedExperts\): the block was computed again for backward"):
        out.sum().backward()


@on_ranks(2)
def test_saved_choices_are_those_of_the_forward():
    """Two pairs of experts have equal scores, and noise that changes its sign from run to run decides."""
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("ep",))
    torch.manual_seed(0)
    moe = MoE(8, 8, 4, top_k=1).to(device_type())
    parallelize_module(moe, mesh, {"experts": ExpertParallel()})
    with torch.no_grad():
        moe.router.gate.weight[1::2] = moe.router.gate.weight[::2]
    noise = 1e-5 * torch.arange(4, device=device_type())
    moe.router.gate.register_forward_hook(lambda gate, inputs, output: output + noise.neg_())
    ops = [torch.ops.aten.sort.stable, torch.ops.aten.topk.default]
    saved = partial(checkpoint, context_fn=partial(create_selective_checkpoint_contexts, ops), use_reentrant=False)
    gradients = []
    for run in (moe, partial(saved, moe)):
        x = torch.randn(40, 8, generator=torch.Generator().manual_seed(1)).to(device_type()).requires_grad_()
        noise.abs_()
        run(x).sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)
    with pytest.raises(RuntimeError, match="or save the choices: torch.utils.checkpoint.checkpoint"):
        checkpoint(moe, x, use_reentrant=False, determinism_check="none").sum().backward()


@on_ranks(2)
def test_equal_scores_in_low_precision_are_chosen_alike_where_a_block_is_computed_again():
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("ep",))
    torch.manual_seed(0)
    moe = MoE(8, 8, 4, top_k=2).to(device_type(), torch.bfloat16)
    parallelize_module(moe, mesh, {"experts": ExpertParallel()})
    with torch.no_grad():
        moe.router.gate.weight[2:] = moe.router.gate.weight[:2]
    x = torch.randint(-1, 2, (64, 8), device=device_type()).bfloat16().requires_grad_()
    moe(x).sum().backward()
    expected = [x.grad, moe.router.gate.weight.grad, moe.experts.w1.grad.to_local()]
    x.grad = None
    moe.zero_grad()
    checkpoint(moe, x, use_reentrant=False).sum().backward()
    for one, other in zip(expected, [x.grad, moe.router.gate.weight.grad, moe.experts.w1.grad.to_local()], strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=0)
