"""Styles of experts, of packed weights, of parameters, and of parts that run on plain tensors."""

from __future__ import annotations

import copy
import types

import pytest
import torch
from torch import nn

from hp_dtensor import (
    DTensor,
    Replicate,
    Shard,
    StridedShard,
    distribute_tensor,
    implicit_replication,
    init_device_mesh,
)
from hp_styles import parallelize_module
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
R = Replicate()
TOKENS, HIDDEN, INNER, EXPERTS = 6, 8, 12, 4


class Experts(nn.Module):
    """As transformers' own: loops over experts, and leaves out those that are numbered beyond the last."""

    def __init__(self, *, bias=False, drop=0.0):
        super().__init__()
        self.num_experts = EXPERTS
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, HIDDEN))
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER))
        self.down_proj_bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN)) if bias else None
        self.scale = nn.Parameter(torch.randn(HIDDEN))
        self.drop = nn.Dropout(drop)

    def forward(self, tokens, chosen, weights):
        out = torch.zeros_like(tokens)
        tokens = tokens * self.scale
        for expert in range(self.num_experts):
            rows, places = torch.where(chosen == expert)
            gate, up = (tokens[rows] @ self.gate_up_proj[expert].T).chunk(2, -1)
            made = self.drop(torch.tanh(gate) * up) @ self.down_proj[expert].T
            if self.down_proj_bias is not None:
                made = made + self.down_proj_bias[expert]
            out.index_add_(0, rows, made * weights[rows, places, None])
        return out


class Block(nn.Module):
    """A router, experts, and a residual, so that gradients of all inputs matter."""

    def __init__(self, **options):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS)
        self.experts = Experts(**options)

    def forward(self, tokens):
        weights, chosen = self.gate(tokens).softmax(-1).topk(2, -1)
        return tokens + self.experts(tokens, chosen, weights)


def gradients(model, tokens):
    tokens = tokens.detach().requires_grad_()
    with implicit_replication():
        (model(tokens) ** 2).sum().backward()
    made = {"tokens": tokens.grad, **{name: value.grad for name, value in model.named_parameters()}}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in made.items()}


def compare(make, plan, *, shape=(TOKENS, HIDDEN)):
    """The model under a plan has the gradients that it has without; returns it."""
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    try:
        one = make().to(device_type())
        tokens = torch.randn(*shape, device=device_type())
    finally:
        torch.set_default_dtype(torch.float32)
    expected = gradients(one, tokens)
    one.zero_grad()
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
    model = parallelize_module(one, mesh, plan)
    placed = distribute_tensor(tokens, mesh, [Replicate()])
    got = gradients(model, placed)
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-11, atol=1e-12, msg=lambda text, name=name: name + text)
    return model


BY_FEATURE = {
    "experts.gate_up_proj": "packed_colwise",
    "experts.down_proj": "rowwise",
    "experts.scale": "replicate",
    "experts": "moe_tp_experts",
    "gate": "replicate",
}
BY_EXPERT = {
    "experts.*_proj": "grouped_gemm",
    "experts.scale": "replicate",
    "experts": "ep_dispatch_experts",
    "gate": "ep_router",
}


@on_ranks(2)
def test_experts_by_feature():
    model = compare(Block, BY_FEATURE)
    assert model.experts.gate_up_proj.placements == (StridedShard(1, 2),)
    assert model.experts.down_proj.placements == (Shard(2),)


@on_ranks(2)
def test_a_bias_that_is_added_once():
    compare(lambda: Block(bias=True), {**BY_FEATURE, "experts.down_proj_bias": "replicate"})


@on_ranks(2)
def test_experts_by_expert():
    model = compare(Block, BY_EXPERT)
    assert model.experts.gate_up_proj.to_local().shape == (EXPERTS // 2, 2 * INNER, HIDDEN)
    assert model.experts.num_experts == EXPERTS, "outside of forward"


class WithIdentity(Block):
    """The last expert returns its input, as some of LongCat-Flash's do."""

    def __init__(self):
        super().__init__()
        self.experts.identity = nn.Identity()
        self.experts.forward = types.MethodType(_with_identity, self.experts)


def _with_identity(self, tokens, chosen, weights):
    out = torch.zeros_like(tokens)
    for expert in range(self.num_experts):
        rows, places = torch.where(chosen == expert)
        made = self.identity(tokens[rows] * self.scale)
        if expert < self.num_experts - 1:
            gate, up = (tokens[rows] @ self.gate_up_proj[expert].T).chunk(2, -1)
            made = (torch.tanh(gate) * up) @ self.down_proj[expert].T
        out.index_add_(0, rows, made * weights[rows, places, None])
    return out


@on_ranks(2)
def test_an_expert_that_returns_its_input():
    model = compare(WithIdentity, {**BY_FEATURE, "experts.identity": "moe_identity_expert"})
    with pytest.raises(RuntimeError, match="called outside of experts that have the style 'moe_tp_experts'.* by 2"):
        model.experts.identity(torch.ones(2, HIDDEN))
    with pytest.raises(RuntimeError, match=r"Identity has the style IdentityExpert\(\) already"):
        parallelize_module(model.experts.identity, model.gate.weight.device_mesh, "moe_identity_expert")


class Summed(nn.Module):
    """A product over the sharded dim, with no style that would sum it."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, INNER), nn.Parameter(torch.randn(INNER, HIDDEN))

    def forward(self, x):
        return self.up(x).tanh() @ self.down


@on_ranks(2)
@pytest.mark.parametrize(("down", "placement"), [("rowwise", Shard(1)), ("grouped_gemm", Shard(0)), ("replicate", R)])
def test_an_output_that_is_brought_to_all_ranks(down, placement):
    plan = {"0.up": "colwise", "0.down": down, "0": "all_reduce", "1": "replicate"}
    model = compare(lambda: nn.Sequential(Summed(), nn.Linear(HIDDEN, HIDDEN)), plan)
    assert model[0].down.placements == (placement,)
    x = distribute_tensor(torch.ones(TOKENS, HIDDEN, dtype=torch.float64), model[0].down.device_mesh, [R])
    assert model[0](x).placements == (R,)


class Sinks(nn.Module):
    """Attention over heads with a logit of its own for each, as granitemoe's: a parameter that no Linear owns."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3)), nn.Linear(HIDDEN, HIDDEN)
        self.sinks = nn.Parameter(torch.randn(4))

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (4, -1)).transpose(0, 1) for part in self.qkv)
        logits = q @ k.transpose(-1, -2)
        sinks = self.sinks.view(-1, 1, 1).expand(-1, logits.shape[1], 1)
        weights = torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]
        return self.out((weights @ v).transpose(0, 1).flatten(1))


@on_ranks(2)
@pytest.mark.parametrize("sinks", ["colwise", "replicate"])
def test_parameters_that_the_module_itself_computes_with(sinks):
    plan = {"0.qkv.*": "colwise", "0.out": "rowwise", "0.sinks": sinks, "0": "local_params"}
    model = compare(lambda: nn.Sequential(Sinks()), plan)
    assert model[0].sinks.placements == ((Shard(0),) if sinks == "colwise" else (R,))


@on_ranks(2)
@pytest.mark.parametrize("plan", [BY_FEATURE, {"experts": "plain", "gate": "replicate"}], ids=["experts", "plain"])
def test_a_copy_computes_with_its_own_parameters(plan):
    model = compare(Block, plan)
    other = copy.deepcopy(model)
    tokens = distribute_tensor(torch.ones(TOKENS, HIDDEN, dtype=torch.float64), model.gate.weight.device_mesh, [R])
    before = model(tokens)
    with torch.no_grad():
        other.experts.down_proj.zero_()
    assert torch.equal(other(tokens).full_tensor(), tokens.full_tensor())
    assert torch.equal(model(tokens).full_tensor(), before.full_tensor())


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up, self.down = nn.Linear(HIDDEN, 2 * INNER), nn.Linear(INNER, HIDDEN)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(gate.sigmoid() * up)


@on_ranks(2)
def test_two_matrices_in_one_linear():
    model = compare(Packed, {"gate_up": "packed_colwise", "down": "rowwise"})
    assert model.gate_up.bias.placements == (StridedShard(0, 2),)


class Conv1D(nn.Module):
    """transformers' linear layer of weight [in, out]."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class Transposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = Conv1D(INNER, HIDDEN), Conv1D(HIDDEN, INNER)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


@on_ranks(2)
def test_a_linear_layer_whose_weight_is_transposed():
    model = compare(Transposed, {"up": "colwise", "down": "rowwise"}, shape=(2, 3, HIDDEN))
    assert (model.up.weight.placements, model.down.weight.placements) == ((Shard(1),), (Shard(0),))


class Recurrent(nn.Module):
    """Nothing that a DTensor could do: a loop that writes into views."""

    def __init__(self):
        super().__init__()
        self.decay, self.into, self.norm = (
            nn.Parameter(torch.randn(HIDDEN)),
            nn.Linear(HIDDEN, HIDDEN),
            nn.LayerNorm(HIDDEN),
        )

    def forward(self, x):
        state, out = torch.zeros_like(x[0]), torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for step in range(len(x)):
            state = state * self.decay.sigmoid() + self.into(x[step])
            out.as_strided((HIDDEN,), (1,), step * HIDDEN).copy_(state)
        return self.norm(out)


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixer, self.mlp = Recurrent(), Packed()

    def forward(self, x):
        return x + self.mlp(self.mixer(x))


@on_ranks(2)
def test_a_plain_part_between_sharded_ones():
    model = compare(Mixed, {"mixer": "plain", "mlp.gate_up": "packed_colwise", "mlp.down": "rowwise"})
    assert all(value.placements == (Replicate(),) for value in model.mixer.parameters())


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**2


class Cube(nn.Module):
    def forward(self, x):
        return Cubed.apply(x)


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.cube, self.down = nn.Linear(HIDDEN, INNER), Cube(), nn.Linear(INNER, HIDDEN)

    def forward(self, x):
        return self.down(self.cube(self.up(x)))


@on_ranks(2)
def test_an_activation_that_is_an_autograd_function():
    compare(Wide, {"up": "colwise", "cube": "pointwise", "down": "rowwise"})


@on_ranks(2)
def test_errors_name_what_to_change():
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
    block = parallelize_module(Block().to(device_type()), mesh, {"experts": "moe_tp_experts", "gate": "replicate"})
    x = distribute_tensor(torch.randn(TOKENS, HIDDEN, device=device_type()), mesh, [Replicate()])
    with pytest.raises(ValueError, match="the experts of Experts are replicated, .* gate_up_proj 'packed"):
        block(x)
    with pytest.raises(
        ValueError, match=r"the experts' drop drops with p = 0.5: each rank would draw for its own features"
    ):
        parallelize_module(Block(drop=0.5), mesh, {"experts": "moe_tp_experts"})

    def without_dropping():
        block = Block(drop=0.5)
        block.experts.drop.p = 0.0
        return block

    compare(without_dropping, BY_FEATURE)
    dropping, tokens = Block(drop=0.5).to(device_type()), torch.randn(TOKENS, HIDDEN, device=device_type())
    torch.manual_seed(4)
    expected = dropping(tokens)
    parallelize_module(dropping, mesh, {"gate": "colwise_gather_output"})  # the experts have no style
    torch.manual_seed(4)
    with implicit_replication():
        out = dropping(distribute_tensor(tokens, mesh, [Replicate()]))
    torch.testing.assert_close(out.full_tensor(), expected)
    with pytest.raises(NotImplementedError, match="WholeExperts is for a parameter, got Linear; name the parameter"):
        parallelize_module(Block(), mesh, {"gate": "grouped_gemm"})
    with pytest.raises(NotImplementedError, match="ExpertsParallel is for a module, not for the parameter 'scale'"):
        parallelize_module(Block(), mesh, {"experts.scale": "moe_tp_experts"})
    styled = parallelize_module(Block().to(device_type()), mesh, {"experts.down_proj": "rowwise"})
    with pytest.raises(ValueError, match="Experts.down_proj of shape .* is placed .* already, this style wants"):
        parallelize_module(styled, mesh, {"experts.down_proj": "grouped_gemm"})
    both = {"experts.gate_up_proj": "grouped_gemm", "experts.down_proj": "rowwise", "experts": "moe_tp_experts"}
    with pytest.raises(ValueError, match="some weights of Experts are sharded by expert and some by feature"):
        parallelize_module(Block().to(device_type()), mesh, {**both, "gate": "replicate"})(x)
    with pytest.raises(ValueError, match=r"Linear turned \(6, 8\) into \(6, 12\), so it is not elementwise"):
        parallelize_module(nn.Linear(HIDDEN, INNER), mesh, "pointwise")(x)
    compare(lambda: nn.Linear(HIDDEN, INNER), "plain")
