"""Each style against one process: outputs, gradients, the number of collectives; and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hp_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, implicit_replication, init_device_mesh
from hp_platform import count_collectives
from hp_styles import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from hp_testing import device_type, on_ranks

R = Replicate()


class Mlp(nn.Module):
    def __init__(self, dim=6, hidden=12, bias=True):
        super().__init__()
        self.up = nn.Linear(dim, hidden, bias=bias, dtype=torch.float64, device=device_type())
        self.down = nn.Linear(hidden, dim, bias=bias, dtype=torch.float64, device=device_type())

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Pre-norm attention and MLP over two heads a rank, written for one device."""

    def __init__(self, dim, heads):
        super().__init__()
        options = {"dtype": torch.float64, "device": device_type()}
        self.heads, self.head_dim = heads, dim // heads
        self.norm1, self.norm2 = nn.LayerNorm(dim, **options), nn.LayerNorm(dim, **options)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False, **options) for _ in range(4))
        self.mlp = Mlp(dim, 2 * dim)

    def forward(self, x):
        batch, length, _ = x.shape
        h = self.norm1(x)
        q, k, v = (m(h).view(batch, length, -1, self.head_dim).transpose(1, 2) for m in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(batch, length, -1))
        return x + self.mlp(self.norm2(x))


def _mesh():
    return init_device_mesh(device_type(), (torch.distributed.get_world_size(),), ("tp",))


def _rand(*shape):
    return torch.randn(*shape, dtype=torch.float64, device=device_type())


def _same_gradients(module, reference):
    for (name, p), q in zip(module.named_parameters(), reference.parameters(), strict=True):
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        torch.testing.assert_close(grad, q.grad, rtol=1e-11, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_columns_then_rows(local, bias):
    mesh = _mesh()
    module = Mlp(bias=bias)
    reference, x = copy.deepcopy(module), _rand(4, 6)
    plan = {"up": ColwiseParallel(use_local_output=local), "down": RowwiseParallel(use_local_output=local)}
    assert parallelize_module(module, mesh, plan) is module
    assert module.up.weight.placements == (Shard(0),) and module.down.weight.placements == (Shard(1),)
    x0, x1 = x.clone().requires_grad_(), x.clone().requires_grad_()
    want = reference(x0)
    want.square().sum().backward()
    with count_collectives() as forward:
        got = module(x1)
    assert type(got) is (torch.Tensor if local else DTensor)
    with count_collectives() as backward:
        got.square().sum().backward()
    torch.testing.assert_close(got if local else got.full_tensor(), want)
    torch.testing.assert_close(x1.grad, x0.grad)
    _same_gradients(module, reference)
    if mesh.size() > 1:
        assert dict(forward) == {"all_reduce": 1} and dict(backward) == {"all_reduce": 1}


@on_ranks(2, 3)
def test_uneven_features_with_dtensor_activations():
    mesh = _mesh()
    module = Mlp(dim=5, hidden=7)
    reference, x = copy.deepcopy(module), _rand(4, 5)
    parallelize_module(
        module, mesh, {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel(use_local_output=False)}
    )
    reference(x).square().sum().backward()
    module(distribute_tensor(x, mesh, [R])).square().sum().backward()
    _same_gradients(module, reference)


@on_ranks(2)
@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("sequence", [True, False])
def test_a_transformer_block_communicates_four_times(local, sequence):
    mesh = _mesh()
    module = Block(8, 4)
    reference, x = copy.deepcopy(module), _rand(2, 6, 8)
    stream = Shard(1) if sequence else R
    plan = {
        "[qkv]": ColwiseParallel(input_layouts=stream, use_local_output=local),
        "o": RowwiseParallel(output_layouts=stream, use_local_output=local),
        "mlp.up": ColwiseParallel(input_layouts=stream, use_local_output=local),
        "mlp.down": RowwiseParallel(output_layouts=stream, use_local_output=local),
    }
    if sequence:
        plan["norm?"] = SequenceParallel(use_local_output=local)
    if local:
        module.heads = reference.heads
    parallelize_module(module, mesh, plan)
    x0 = x.clone().requires_grad_()
    want = reference(x0)
    want.square().sum().backward()
    given = distribute_tensor(x, mesh, [stream]).requires_grad_()
    x1 = given if not local else given.detach().to_local().clone().requires_grad_()
    if local and sequence:
        # The sequence is whole between the projections, so plain activations need its whole length.
        hidden = {"length": x.shape[1]}
        module.forward = lambda h: _local_block(module, h, hidden["length"])
    with implicit_replication(), count_collectives() as forward:
        got = module(x1)
    loss = got.square().sum()
    with count_collectives() as backward:
        loss.backward()
    kinds = ({"all_gather": 2, "reduce_scatter": 2}, {"all_reduce": 2})
    compared = {"all_gather": 3} if sequence and local else {}  # the lengths of plain parts, once
    assert dict(forward) == (kinds[0] | compared if sequence else kinds[1])
    if sequence and not local:
        assert dict(backward) == {**kinds[0], "all_reduce": 1}  # the norms' weights and the row bias
    elif not sequence:
        assert dict(backward) == kinds[1]
    whole = got if isinstance(got, DTensor) else DTensor.from_local(got.detach(), mesh, [stream])
    torch.testing.assert_close(whole.full_tensor(), want)
    if not sequence or not local:
        _same_gradients_of_block(module, reference)
        grad = x1.grad if isinstance(x1.grad, DTensor) else DTensor.from_local(x1.grad, mesh, [stream])
        torch.testing.assert_close(grad.full_tensor(), x0.grad)


def _local_block(module, x, length):
    h = module.norm1(x)
    q, k, v = (
        m(h).view(x.shape[0], length, -1, module.head_dim).transpose(1, 2) for m in (module.q, module.k, module.v)
    )
    a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + module.o(a.transpose(1, 2).reshape(x.shape[0], length, -1))
    return x + module.mlp(module.norm2(x))


def _same_gradients_of_block(module, reference):
    for (name, p), q in zip(module.named_parameters(), reference.parameters(), strict=True):
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        torch.testing.assert_close(grad, q.grad, rtol=1e-10, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")


@on_ranks(2, 3)
@pytest.mark.parametrize("style", ["rows", "columns"])
def test_embeddings(style):
    mesh = _mesh()
    module = nn.Sequential(nn.Embedding(7, 6, padding_idx=2, dtype=torch.float64, device=device_type()))
    reference = copy.deepcopy(module)
    ids = torch.tensor([[0, 2, 6, 3], [5, 1, 2, 6]], device=device_type())
    one = (
        RowwiseParallel(use_local_output=False)
        if style == "rows"
        else ColwiseParallel(output_layouts=R, use_local_output=False)
    )
    parallelize_module(module, mesh, {"0": one})
    want, got = reference(ids), module(ids)
    torch.testing.assert_close(got.full_tensor(), want)
    want.square().sum().backward()
    got.square().sum().backward()
    _same_gradients(module, reference)


@on_ranks(2)
def test_tied_weights_stay_tied():
    mesh = _mesh()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(6, 4, dtype=torch.float64, device=device_type())
            self.head = nn.Linear(4, 6, bias=False, dtype=torch.float64, device=device_type())
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.embed(ids))

    module = Model()
    reference, ids = copy.deepcopy(module), torch.tensor([0, 5, 2], device=device_type())
    style = ColwiseParallel(output_layouts=R, use_local_output=False)
    parallelize_module(module, mesh, {"embed": RowwiseParallel(use_local_output=False), "head": style})
    assert module.head.weight is module.embed.weight
    reference(ids).square().sum().backward()
    module(ids).square().sum().backward()
    torch.testing.assert_close(module.embed.weight.grad.full_tensor(), reference.embed.weight.grad)
    other = Model()
    with pytest.raises(ValueError, match="or on two modules that share the parameter"):
        parallelize_module(other, mesh, {"embed": ColwiseParallel(), "head": style})


@on_ranks(2)
def test_prepare_inputs_and_outputs():
    mesh = _mesh()

    class Sum(nn.Module):
        def forward(self, x, flag, y=None):
            assert flag == "on"
            return x + y, x * 2

    x, y = _rand(4, 3), _rand(4, 3)
    module = parallelize_module(
        Sum(),
        mesh,
        PrepareModuleInputOutput(
            input_layouts=(R, None),
            desired_input_layouts=(Shard(0), None),
            input_kwarg_layouts={"y": R},
            desired_input_kwarg_layouts={"y": Shard(0)},
            output_layouts=(Shard(0), None),
            desired_output_layouts=(R, None),
        ),
    )
    total, double = module(x, "on", y=y)
    assert type(total) is torch.Tensor and isinstance(double, DTensor) and double.placements == (Shard(0),)
    torch.testing.assert_close(total, x + y)
    torch.testing.assert_close(double.full_tensor(), 2 * x)
    with pytest.raises(ValueError, match="1 positional inputs, 2 input_layouts"):
        module(x)
    local = parallelize_module(
        nn.Identity(),
        mesh,
        PrepareModuleInput(input_layouts=(R,), desired_input_layouts=(Shard(0),), use_local_output=True),
    )
    assert torch.equal(local(x), x.chunk(2)[torch.distributed.get_rank()])
    two = parallelize_module(
        nn.Identity(), mesh, PrepareModuleOutput(output_layouts=(R, R), desired_output_layouts=(R, R))
    )
    with pytest.raises(ValueError, match="1 outputs, 2 output_layouts"):
        two(x)


@on_ranks(2)
def test_what_parallelize_module_refuses():
    mesh = _mesh()
    with pytest.raises(ValueError, match=r"'upp' matches no submodule of Mlp; near: up"):
        parallelize_module(Mlp(), mesh, {"upp": ColwiseParallel()})
    with pytest.raises(ValueError, match=r"'up' is matched by 'u\*' and by 'up'"):
        parallelize_module(Mlp(), mesh, {"u*": ColwiseParallel(), "up": RowwiseParallel()})
    with pytest.raises(TypeError, match="'up' must have a ParallelStyle, got a int"):
        parallelize_module(Mlp(), mesh, {"up": 3})
    with pytest.warns(UserWarning, match="there is no parallelize_plan, so the module is unchanged"):
        assert not isinstance(parallelize_module(Mlp(), mesh).up.weight, DTensor)
    with pytest.raises(ValueError, match=r"a mesh of one axis is needed.*mesh\['tp'\]"):
        parallelize_module(Mlp(), init_device_mesh(device_type(), (1, 2), ("dp", "tp")), {"up": ColwiseParallel()})
    axes = init_device_mesh(device_type(), (1, 2), ("dp", "tp"))
    assert isinstance(parallelize_module(Mlp(), axes["tp"], {"up": ColwiseParallel()}).up.weight, DTensor)
    inside = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)).to(device_type())
    x = torch.randn(2, 6, 4, device=device_type())
    expected = inside(x)
    sharded = {"1": ColwiseParallel(), "3": RowwiseParallel()}
    for place, kind in (("0", "LayerNorm"), ("2", "GELU")):
        text = (
            f"Parallel shards Linear and Embedding modules, got {kind}.*; leave it out, or, .* give it SequenceParallel"
        )
        for style in (ColwiseParallel(), RowwiseParallel()):
            with pytest.raises(NotImplementedError, match=text):
                parallelize_module(copy.deepcopy(inside), mesh, {place: style})
    for style in (ColwiseParallel(), RowwiseParallel()):
        with pytest.raises(NotImplementedError, match="got Sequential.*; name the Linear and .* such as '1', or write"):
            parallelize_module(copy.deepcopy(inside), mesh, style)
    torch.testing.assert_close(parallelize_module(copy.deepcopy(inside), mesh, sharded)(x), expected)
    parts = {"0": SequenceParallel(), "1": ColwiseParallel(), "3": RowwiseParallel(output_layouts=Shard(1))}
    part = x.chunk(2, 1)[torch.distributed.get_rank()]
    made = parallelize_module(copy.deepcopy(inside), mesh, parts)(part)
    torch.testing.assert_close(made, expected.chunk(2, 1)[torch.distributed.get_rank()])
    once = parallelize_module(Mlp(), mesh, {"up": ColwiseParallel()})
    with pytest.raises(ValueError, match="is placed .* already, this style wants .*two styles on one module"):
        parallelize_module(once, mesh, {"up": RowwiseParallel()})
    with mesh:  # the mesh may come from the context
        assert parallelize_module(Mlp(), parallelize_plan={"up": ColwiseParallel()}).up.weight.device_mesh == mesh


@on_ranks(2)
def test_an_uneven_plain_input_is_refused_before_it_is_sent():
    style = RowwiseParallel(input_layouts=Shard(-1))
    module = parallelize_module(nn.Linear(5, 3, device=device_type()), _mesh(), style)
    with count_collectives() as seen, pytest.raises(ValueError, match="rank 0: 3, rank 1: 2; got"):
        module(torch.ones(2, 5, device=device_type()))
    assert dict(seen) == {"all_gather": 1}, "the widths alone"


def test_styles_check_their_arguments():
    with pytest.raises(ValueError, match="input_layouts needs desired_input_layouts"):
        PrepareModuleInput(input_layouts=R)
    with pytest.raises(ValueError, match="2 input_layouts, 1 desired_input_layouts"):
        PrepareModuleInput(input_layouts=(R, R), desired_input_layouts=(R,))
    with pytest.raises(ValueError, match="desired_input_layouts needs input_layouts"):
        PrepareModuleInput(desired_input_layouts=R)
    with pytest.raises(ValueError, match=r"names \['a'\], desired_input_kwarg_layouts names \[\]"):
        PrepareModuleInput(input_kwarg_layouts={"a": R})
    with pytest.raises(ValueError, match="1 output_layouts, 2 desired_output_layouts"):
        PrepareModuleOutput(output_layouts=R, desired_output_layouts=(R, R))
    assert repr(ColwiseParallel()) == (
        "ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=True,"
        " async_tensor_parallel='off')"
    )
    assert Partial() != R
