"""Styles on Cells: outputs and gradients of one process."""

from __future__ import annotations

import mindspore as ms
import mindspore.mint.nn.functional as F
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops

from hp_dtensor import DTensor, Replicate, Shard, init_device_mesh, parallelize_value_and_grad
from hp_platform import count_collectives
from hp_styles import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    ThreeDimensionalParallel,
    TwoDimensionalParallel,
    parallelize_module,
    sequence_parallel_plan,
)
from hp_testing import on_ranks

# 9 features over 2 or 4 ranks are uneven: their local parts travel as DTensors.
COLUMNS = ColwiseParallel(use_local_output=False)
X = np.random.default_rng(0).standard_normal((2, 5, 6)).astype(np.float32)


class Norm(nn.Cell):
    def __init__(self, size):
        super().__init__()
        self.weight = Parameter(Tensor(np.linspace(0.5, 1.5, size, dtype=np.float32)), name="weight")

    def construct(self, x):
        return x * mint.rsqrt(mint.mean(x * x, -1, True) + 1e-6) * self.weight


class Block(nn.Cell):
    def __init__(self, hidden=9):
        super().__init__()
        self.norm = Norm(6)
        self.gate = mint.nn.Linear(6, hidden)
        self.up = mint.nn.Linear(6, hidden)
        self.down = mint.nn.Linear(hidden, 6)

    def construct(self, x):
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Table(nn.Cell):
    parallel_kind = "embedding"

    def __init__(self, rows=7, size=6):
        super().__init__()
        values = np.random.default_rng(3).standard_normal((rows, size)).astype(np.float32)
        self.weight = Parameter(Tensor(values), name="weight")

    def construct(self, index):
        return ops.gather(self.weight, index, 0)


class Dense(nn.Cell):
    """As Block, of Cells of mindspore.nn."""

    def __init__(self, hidden=9):
        super().__init__()
        self.norm = nn.LayerNorm((6,), epsilon=1e-5)
        self.up = nn.Dense(6, hidden)
        self.down = nn.Dense(hidden, 6)

    def construct(self, x):
        return x + self.down(ops.gelu(self.up(self.norm(x))))


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.table = Table()
        self.blocks = nn.CellList([Block(), Block()])
        self.head = mint.nn.Linear(6, 7, bias=False)

    def construct(self, index):
        x = self.table(index)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def built(make):
    ms.set_seed(5)
    made = make()
    values = np.random.default_rng(1)
    for parameter in made.get_parameters():
        parameter.set_data(Tensor(values.standard_normal(parameter.shape).astype(np.float32) / 3))
    return made


def near(a, b, tolerance=1e-5):
    a = a.full_tensor() if isinstance(a, DTensor) else a
    scale = max(1.0, float(np.abs(b.asnumpy()).max()))
    np.testing.assert_allclose(a.asnumpy() / scale, b.asnumpy() / scale, rtol=0, atol=tolerance)


def same_gradients(net, plain, given, reference):
    value, wanted = ms.value_and_grad(lambda x: (plain(x) ** 2).mean(), None, plain.trainable_params())(reference)
    step = parallelize_value_and_grad(lambda x: (net(x) ** 2).mean(), None, net.trainable_params())
    loss, grads = step(given)
    near(loss, value)
    for parameter, grad, expected in zip(net.trainable_params(), grads, wanted, strict=True):
        if isinstance(parameter, DTensor):
            assert grad.placements == parameter.placements
        near(grad, expected)
    return step


@on_ranks(2, 4)
def test_columns_then_rows(ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    net, plain = built(Block), built(Block)
    plan = {"gate": COLUMNS, "up": COLUMNS, "down": RowwiseParallel()}
    parallelize_module(net, mesh, plan)
    assert net.gate.weight.placements == (Shard(0),)
    assert net.down.weight.placements == (Shard(1),)
    step = same_gradients(net, plain, Tensor(X), Tensor(X))
    with count_collectives() as counts:
        step(Tensor(X))
    # one forward for down; one backward for the input that gate and up share
    assert counts["all_reduce"] == 2


@on_ranks(2, 4)
def test_sequence_parallel(ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    net, plain = built(Block), built(Block)
    plan = {
        "norm": SequenceParallel(),
        "gate": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(net, mesh, plan)
    x = DTensor.from_local(Tensor(X), mesh, [Replicate()]).redistribute(placements=[Shard(1)])
    same_gradients(net, plain, x, Tensor(X))


@on_ranks(2, 4)
@pytest.mark.parametrize("hidden", [8, 9, 3], ids=["even", "uneven", "some empty"])
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_dense_with_bias_and_layer_norm(sequence, hidden, ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    net, plain = built(lambda: Dense(hidden)), built(lambda: Dense(hidden))
    x, layout = Tensor(X), Shard(1) if sequence else Replicate()
    plan = {
        "up": ColwiseParallel(input_layouts=layout, use_local_output=False),
        "down": RowwiseParallel(output_layouts=layout, use_local_output=not sequence),
    }
    if sequence:
        plan["norm"] = SequenceParallel()
        x = DTensor.from_local(x, mesh, [Replicate()]).redistribute(placements=[Shard(1)])
    parallelize_module(net, mesh, plan)
    assert net.up.bias.placements == (Shard(0),)
    same_gradients(net, plain, x, Tensor(X))


@on_ranks(2)
def test_an_embedding_by_columns():
    mesh = init_device_mesh("cpu", (2,))
    net, plain = built(lambda: nn.Embedding(7, 6)), built(lambda: nn.Embedding(7, 6))
    parallelize_module(net, mesh, {"": ColwiseParallel(output_layouts=Replicate())})
    assert net.embedding_table.local_shape == (7, 3)
    index = Tensor(np.array([[0, 6, 3], [5, 5, 1]]), ms.int32)
    same_gradients(net, plain, index, index)


@on_ranks(1)
def test_a_dense_with_an_activation_is_refused_by_name():
    net = nn.SequentialCell(nn.Dense(4, 4, activation="relu"))
    with pytest.raises(NotImplementedError, match=r"0: ColwiseParallel .* got Dense with an activation \(ReLU\)"):
        parallelize_module(net, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()})
    apart = nn.SequentialCell(nn.Dense(4, 4), nn.ReLU())
    for one, other in zip(apart.get_parameters(), net.get_parameters(), strict=True):
        one.set_data(other)
    parallelize_module(apart, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()})
    x = ops.ones((2, 4), ms.float32)
    np.testing.assert_allclose(apart(x).asnumpy(), net(x).asnumpy())


@on_ranks(2, 4)
@pytest.mark.parametrize("rows", [True, False], ids=["rows", "columns"])
def test_a_whole_model_with_uneven_shards(rows, ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    net, plain = built(Net), built(Net)
    plan = {
        "table": RowwiseParallel() if rows else ColwiseParallel(output_layouts=Replicate()),
        "blocks.*.gate": COLUMNS,
        "blocks.*.up": COLUMNS,
        "blocks.*.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(net, mesh, plan)
    index = Tensor(np.array([[0, 6, 3], [5, 5, 1]]), ms.int32)
    same_gradients(net, plain, index, index)


@on_ranks(2)
def test_inputs_and_outputs_are_prepared():
    mesh = init_device_mesh("cpu", (2,))
    seen = []

    class Keep(nn.Cell):
        def construct(self, x, y=None):
            seen.append((x.placements, type(y)))
            return x, y

    cell = Keep()
    style = PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),))
    parallelize_module(cell, mesh, style)
    out = PrepareModuleOutput(output_layouts=(Replicate(), None), desired_output_layouts=(Shard(1), None))
    parallelize_module(cell, mesh, out)
    x, y = cell(Tensor(X[0, :2]), y=3)
    assert seen == [((Replicate(),), int)]
    assert tuple(x.shape) == (4, 3)
    assert y == 3


@on_ranks(2)
def test_mistakes_are_told_apart():
    mesh = init_device_mesh("cpu", (2,))
    net = built(Net)
    with pytest.raises(ValueError, match=r"matches no submodule of Net; near: .*blocks\.0\.gate"):
        parallelize_module(net, mesh, {"blocks.0.gates": ColwiseParallel()})
    with pytest.raises(ValueError, match="keep one"):
        parallelize_module(net, mesh, {"blocks.*.gate": ColwiseParallel(), "blocks.0.gate": RowwiseParallel()})
    with pytest.raises(NotImplementedError, match="shards Linear and Embedding modules, got Norm"):
        parallelize_module(net, mesh, {"blocks.*.norm": ColwiseParallel()})
    parallelize_module(net.head, mesh, ColwiseParallel())
    with pytest.raises(ValueError, match="two styles on one Cell"):
        parallelize_module(net.head, mesh, RowwiseParallel())


@on_ranks(2)
def test_styles_by_name_and_sequence_parallel():
    mesh = init_device_mesh("cpu", (2,))
    net, plain = built(Net), built(Net)
    plan = {"blocks.*.gate": "colwise", "blocks.*.up": "colwise", "blocks.*.down": "rowwise", "head": "colwise"}
    plan = sequence_parallel_plan(plan, norms=["blocks.*.norm"], embedding="table")
    parallelize_module(net, mesh, {**plan, "head": "replicate"})
    index = Tensor(np.array([[0, 3, 5, 1], [2, 2, 4, 0]], np.int32))
    same_gradients(net, plain, index, index)


@on_ranks(4)
def test_two_dimensional():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    net, plain = built(lambda: mint.nn.Linear(6, 8)), built(lambda: mint.nn.Linear(6, 8))
    parallelize_module(net, mesh, TwoDimensionalParallel(use_local_output=False))
    assert net.weight.placements == (Shard(0), Shard(1))
    x = np.random.default_rng(2).standard_normal((4, 6)).astype(np.float32)
    given = DTensor.from_local(Tensor(x), mesh, [Replicate(), Replicate()])
    same_gradients(net, plain, given, Tensor(x))


@on_ranks(4)
def test_two_dimensional_with_a_depth():
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("depth", "x", "y"))
    net, plain = built(lambda: mint.nn.Linear(6, 8)), built(lambda: mint.nn.Linear(6, 8))
    parallelize_module(net, mesh, TwoDimensionalParallel(depth_axis="depth", use_local_output=False))
    assert net.weight.placements == (Replicate(), Shard(0), Shard(1))
    x = np.random.default_rng(2).standard_normal((5, 6)).astype(np.float32)
    given = DTensor.from_local(Tensor(x), mesh, [Replicate()] * 3)
    same_gradients(net, plain, given, Tensor(x))


@on_ranks(4)
def test_three_dimensional_is_refused():
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("x", "y", "z"))
    with pytest.raises(NotImplementedError, match="ThreeDimensionalParallel is for PyTorch, got the Cell Linear"):
        parallelize_module(mint.nn.Linear(6, 8), mesh, ThreeDimensionalParallel())


@on_ranks(2)
def test_sequence_parallel_replicates_buffers_and_a_second_style_is_refused():
    class Scaled(nn.Cell):
        def __init__(self, factor):
            super().__init__()
            self.norm = Norm(6)
            self.register_buffer("scale", Tensor(np.full(6, factor, np.float32)))

        def construct(self, x):
            return self.norm(x) * self.scale

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    want = Scaled(2.0)(Tensor(X)).asnumpy()
    module = parallelize_module(Scaled(2.0 + mesh.get_rank()), mesh, SequenceParallel())
    assert module.scale.placements == (Replicate(),)
    got = module(DTensor.from_local(Tensor(X), mesh, [Replicate()]))
    np.testing.assert_allclose(got.full_tensor().asnumpy(), want, rtol=1e-5, atol=1e-6)
    with pytest.raises(RuntimeError, match=r"Scaled has the style SequenceParallel\(.* already"):
        parallelize_module(module, mesh, SequenceParallel())
    with pytest.warns(UserWarning, match="there is no parallelize_plan"):
        assert parallelize_module(module, mesh) is module


@on_ranks(2)
def test_parts_of_different_lengths_are_refused_in_any_step():
    mesh = init_device_mesh("cpu", (2,))
    rank = mesh.get_rank()
    net = built(lambda: nn.SequentialCell(nn.LayerNorm((6,)), nn.LayerNorm((6,))))
    parallelize_module(net, mesh, {"*": SequenceParallel(use_local_output=True)})
    whole = Tensor(np.random.default_rng(0).standard_normal((2, 6, 6)).astype(np.float32))
    mine = whole[:, 3 * rank : 3 * rank + 3]
    text = r"placed Shard\(1\) over 2 ranks have different shapes: rank 0: \[2, 3, 6\]; rank 1: \[2, 4, 6\]. .* pad"
    for _ in range(2):
        with count_collectives() as counts:
            net(mine)
        assert dict(counts) == {"all_gather": 1}, "one for both norms"
        for _ in range(2):
            with pytest.raises(ValueError, match=text):
                net(whole[:, : 3 + rank])
    run = parallelize_value_and_grad(lambda x: (net(x) ** 2).mean(), None, net.trainable_params())
    with count_collectives() as counts:
        loss, grads = run(mine)
    assert counts["all_gather"] == 1 and len(grads) == 4


@on_ranks(2, 4)
def test_plain_parts_of_unequal_widths(ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    net, plain = built(Block), built(Block)
    parallelize_module(net, mesh, {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()})
    same_gradients(net, plain, Tensor(X), Tensor(X))
    with pytest.raises(ValueError, match="RowwiseParallel on Linear: a plain input is taken .* of the 9 features"):
        net.down(ops.ones((2, 7), ms.float32))
