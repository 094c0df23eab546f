"""Schedules that run on MindSpore, against one process in float64."""

from __future__ import annotations

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore.experimental.optim import AdamW
from pipeline_cells import SHAPES, Descent, Net, Stage, batch, reference

import hp_pipeline
from hp_dtensor import DTensor, Replicate, init_device_mesh
from hp_pipeline import PipelineError, PipelineSchedule, PipelineStage, placed, schedules
from hp_pipeline.mindspore.port import flatten, unflatten
from hp_platform import get_platform
from hp_testing import on_ranks

pytestmark = pytest.mark.device


def rank() -> int:
    return get_platform().groups.rank()


def build(name, micro_batches, net):
    """Make this rank's part of a schedule."""
    kind, ranks, stages = getattr(hp_pipeline, name), get_platform().groups.size(), len(net.parts)
    placement = placed(kind.shape, ranks, stages // ranks if kind.shape == "loop" else None)
    own = [PipelineStage(Stage(net, index), index, stages) for index, place in enumerate(placement) if place == rank()]
    return kind(own, micro_batches)


def close(tensor, expected):
    np.testing.assert_allclose(tensor.asnumpy(), expected, rtol=1e-12, atol=1e-12)


def compare(name, micro_batches, stages, optimize=Descent):
    """Train for two steps, and compare losses, gradients and weights."""
    rows = 2 * micro_batches
    net = Net(stages)
    schedule = build(name, micro_batches, net)
    parameters = [each for stage in schedule.stages for each in stage.submodule.trainable_params()]
    optimizer = optimize(parameters)
    losses, gradients = [], ()
    for _ in range(2):
        x, target = batch(rows)
        losses.append(schedule.run(x, target=target))
        gradients = schedule.take_gradients(parameters)
        optimizer(gradients)
    whole, expected, expected_gradients = reference(stages, rows, micro_batches, optimize=optimize)
    weights = {each.name: each for each in whole.trainable_params()}
    by_name = dict(zip(weights, expected_gradients, strict=True))
    assert {each.name for each in parameters} <= set(weights) and len(parameters) >= 4
    for parameter, gradient in zip(parameters, gradients, strict=True):
        close(gradient, by_name[parameter.name])
        close(parameter, weights[parameter.name].asnumpy())
    last = any(stage.is_last_stage for stage in schedule.stages)
    for got, wanted in zip(losses, expected, strict=True):
        assert len(got) == (micro_batches if last else 0)
        for one, other in zip(got, wanted, strict=last):
            close(one, other)


@on_ranks(2, thorough=(1,))
@pytest.mark.parametrize("name", SHAPES)
def test_every_schedule_equals_one_process(name, ranks):
    for micro_batches in (1, 2 * ranks + 1):
        compare(name, micro_batches, len(placed(SHAPES[name], ranks)))


@on_ranks(3)
def test_three_ranks():
    compare("Schedule1F1B", 7, 3)


@on_ranks(2)
def test_an_optimizer_of_mindspore():
    compare("Schedule1F1B", 2, 2, lambda parameters: AdamW(parameters, lr=0.05))


@on_ranks(1, 2)
def test_gradients_of_several_runs_add_up_until_they_are_taken(ranks):
    net = Net(ranks)
    schedule = build("Schedule1F1B", 2, net)
    parameters = schedule.stages[0].submodule.trainable_params()
    x, target = batch(4)
    schedule.run(x, target=target)
    once = schedule.take_gradients(parameters)
    for _ in range(2):
        schedule.run(x, target=target)
    for single, double in zip(once, schedule.take_gradients(parameters), strict=True):
        close(double, 2 * single.asnumpy())
    for zeros, parameter in zip(schedule.take_gradients(parameters), parameters, strict=True):
        assert zeros.shape == parameter.shape and not zeros.asnumpy().any()


@on_ranks(2)
def test_forwards_alone():
    net = Net(2)
    stage = PipelineStage(Stage(net, rank()), rank(), 2, has_backward=False)
    x, _ = batch(6)
    output = hp_pipeline.ScheduleGPipe(stage, 3, output_concat_dim=0).run(x)
    if rank():
        close(output, Net(2)(x).asnumpy())
    else:
        assert output == []


class Nested(nn.Cell):
    """Passes on a nest: a tensor with a gradient, one without, integers, plain values, one that nobody uses."""

    def __init__(self, last):
        super().__init__()
        self.weight, self.unused = Parameter(Tensor(np.ones(3))), Parameter(Tensor(np.ones(3)))
        self.last = last

    def construct(self, x, more=None, bonus=1.0):
        if more is not None:
            assert more["name"] == "first" and more["count"].asnumpy().dtype == np.int64
            assert not more["plain"]._requires_grad and more["unused"]._requires_grad
            x = x + more["plain"]
        x = x * self.weight
        if self.last:
            return (x * bonus).sum()
        plain = ops.stop_gradient(x) * 2
        return x, {"name": "first", "count": Tensor(np.arange(2)), "plain": plain, "unused": x * self.unused}


@on_ranks(2)
def test_nests_and_tensors_without_gradients():
    x = np.arange(6.0).reshape(2, 3)
    stage = PipelineStage(Nested(rank() == 1), rank(), 2)
    schedule = hp_pipeline.Schedule1F1B(stage, 2, kwargs_batch_dim={"bonus": -1} if rank() else None)
    losses = schedule.run(Tensor(x), **({"bonus": Tensor(2.0)} if rank() else {}))
    weight, unused = schedule.take_gradients([stage.submodule.weight, stage.submodule.unused])
    if rank():
        assert [float(loss.asnumpy()) for loss in losses] == [2 * 3 * row.sum() for row in x]
    close(weight, (3 if rank() else 1) * x.sum(0))
    assert not unused.asnumpy().any()


class Growing(nn.Cell):
    def __init__(self, last):
        super().__init__()
        self.weight, self.last = Parameter(Tensor(np.ones(()))), last

    def construct(self, x):
        if self.last:
            return (x * self.weight).sum()
        return (x * self.weight)[:, : int(x.asnumpy()[0, 0])]


@on_ranks(2)
def test_shapes_that_change():
    x = Tensor(np.array([[1.0, 5.0, 7.0], [3.0, 5.0, 7.0]]))
    fixed = hp_pipeline.ScheduleGPipe(PipelineStage(Growing(rank() == 1), rank(), 2), 2)
    text = (
        r"rank 0 at 0F1: ValueError: stage 0 -> stage 1, forward: the stage returned \(Float64 of shape \(1, 3\)"
        r" with a gradient\), and \(Float64 of shape \(1, 1\) .*dyn_shape=True"
    )
    with pytest.raises(PipelineError, match=text):
        fixed.run(x)
    stage = PipelineStage(Growing(rank() == 1), rank(), 2, dyn_shape=rank() == 0)
    schedule = hp_pipeline.ScheduleGPipe(stage, 2)
    losses = schedule.run(x)
    assert [float(loss.asnumpy()) for loss in losses] == ([1.0, 15.0] if rank() else [])
    assert float(schedule.take_gradients([stage.submodule.weight])[0].asnumpy()) == 8.0


@on_ranks(2)
@pytest.mark.parametrize("place", ["0F0", "1F1", "0B0", "1B1"])
def test_a_stage_that_raises_is_named_on_all_ranks_and_the_next_run_works(place):
    net = Net(2)
    failing = [True]
    schedule = build("Schedule1F1B", 3, net)

    def custom(step, run):
        if failing and str(step) == place:
            raise ArithmeticError("too hot")
        run()

    x, target = batch(6)
    for kind in (hp_pipeline.MetaStepType.FORWARD, hp_pipeline.MetaStepType.BACKWARD):
        schedule.register_custom_function(kind, custom)
    parameters = schedule.stages[0].submodule.trainable_params()
    for _ in range(2):
        with pytest.raises(PipelineError, match=f"rank {place[0]} at {place}: ArithmeticError: too hot"):
            schedule.run(x, target=target)
        failing.clear()
        schedule.take_gradients(parameters)
        losses = schedule.run(x, target=target)
        _, expected, gradients = reference(2, 6, 3, steps=1)
        for loss, wanted in zip(losses, expected[0], strict=bool(rank())):
            close(loss, wanted)
        by_name = dict(zip([each.name for each in net.trainable_params()], gradients, strict=True))
        for parameter, gradient in zip(parameters, schedule.take_gradients(parameters), strict=True):
            close(gradient, by_name[parameter.name])
        failing.append(True)


class Crooked(nn.Cell):
    """Raises in ``construct``, in an operator that MindSpore runs later, or not at all."""

    def __init__(self, how):
        super().__init__()
        self.weight, self.how = Parameter(Tensor(np.ones((3, 3)))), how

    def construct(self, x):
        x = ops.matmul(x, self.weight)
        if self.how == "raise":
            raise ArithmeticError("too hot")
        return ops.matmul(x, Tensor(np.ones((7, 3)))) if self.how == "operator" else x


@on_ranks(2)
@pytest.mark.parametrize(("how", "text"), [("raise", "ArithmeticError: too hot"), ("operator", "[A-Za-z]+: .*MatMul")])
def test_a_cell_that_fails_is_named_at_its_step(how, text):
    for place, ways in ((0, [how, ""]), (1, ["", how])):
        schedule = hp_pipeline.Schedule1F1B(PipelineStage(Crooked(ways[rank()]), rank(), 2), 2)
        with pytest.raises(PipelineError, match=f"rank {place} at {place}F0: {text}"):
            schedule.run(Tensor(np.ones((2, 3))))
    compare("Schedule1F1B", 2, 2)


@on_ranks(2)
def test_bad_input_is_refused_on_all_ranks_before_anything_is_sent():
    net = Net(2)
    x, target = batch(6)
    with pytest.raises(ValueError, match="has 6 rows along dim 0, which 4 micro-batches do not divide"):
        build("Schedule1F1B", 4, net).run(x, target=target)
    with pytest.raises(ValueError, match=r"The ranks \[1\] of the pipeline have another order than rank 0"):
        build("Schedule1F1B", 3 if rank() else 2, net).run(x, target=target)
    with pytest.raises(PipelineError, match=r"rank 1 at 1F0: TypeError: the last stage must return a scalar loss, .*"
                       r"a tensor of shape \(3, 5\)"):  # fmt: skip
        build("Schedule1F1B", 2, net).run(x)
    with pytest.raises(TypeError, match="PipelineStage: module must be a Cell, whose parameters can be listed, got"
                       " function; call it in a Cell's construct"):  # fmt: skip
        PipelineStage(lambda x: x, 0, 2)
    build("Schedule1F1B", 3, net).run(x, target=target)

    class Called(nn.Cell):
        def construct(self, x):
            return function(x)

    function = (lambda x: (x * x).sum()) if rank() else (lambda x: 2 * x)
    losses = hp_pipeline.ScheduleGPipe(PipelineStage(Called(), rank(), 2), 3).run(x)
    assert len(losses) == 3 * rank()
    for loss, rows in zip(losses, np.split(x.asnumpy(), 3)):
        close(loss, 4 * (rows**2).sum())


class Laid(nn.Cell):
    """Computes with DTensors; passes them on, or plain tensors."""

    def __init__(self, mesh, to_next, loss):
        super().__init__()
        self.weight, self.mesh = Parameter(Tensor(np.array([1.0, 2.0, 3.0]))), mesh
        self.to_next, self.loss = to_next, loss

    def construct(self, x):
        wrapped = DTensor.from_local(x * self.weight, self.mesh, [Replicate()])
        return self.loss((wrapped * wrapped).sum()) if rank() else self.to_next(wrapped)


@on_ranks(2)
def test_tensors_of_meshes_go_as_plain_ones():
    mesh, x = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "tp"))["tp"], np.arange(6.0).reshape(2, 3)

    def run(to_next, loss):
        stage = PipelineStage(Laid(mesh, to_next, loss), rank(), 2)
        schedule = hp_pipeline.Schedule1F1B(stage, 2)
        losses = schedule.run(Tensor(x))
        return losses, schedule.take_gradients([stage.submodule.weight])[0]

    local, whole = (lambda tensor: tensor.to_local()), (lambda tensor: tensor.full_tensor())
    with pytest.raises(PipelineError, match=r"rank 0 at 0F0: .* a DTensor; return its local part, to_local\(\), and w"):
        run(lambda tensor: tensor, local)
    with pytest.raises(PipelineError, match=r"rank 1 at 1B0: .* return its full_tensor\(\) or to_local\(\)"):
        run(local, lambda tensor: tensor)
    for loss in (local, whole):
        losses, gradient = run(local, loss)
        weight = np.array([1.0, 2.0, 3.0])
        for got, row in zip(losses, x):
            close(got, ((row * weight * weight) ** 2).sum())
        close(gradient, 2 * (x**2).mean(0) * weight**3)


class Detached(nn.Cell):
    """Whose loss has no gradient, or which is frozen later."""

    def __init__(self, detaches=False):
        super().__init__()
        self.weight, self.detaches = Parameter(Tensor(np.array([1.0, 2.0, 3.0]))), detaches

    def construct(self, x):
        x = x * self.weight
        if not rank():
            return x
        return ops.stop_gradient(x.sum()) if self.detaches else x.sum()


@on_ranks(2)
def test_gradients_that_are_not_there():
    x = np.arange(6.0).reshape(2, 3)
    text = r"rank 1 at 1F0: ValueError: the loss of the last stage needs no gradient, .*has_backward=False"
    with pytest.raises(PipelineError, match=text):
        hp_pipeline.ScheduleGPipe(PipelineStage(Detached(True), rank(), 2), 2).run(Tensor(x))
    stage = PipelineStage(Detached(True), rank(), 2, has_backward=False)
    losses = hp_pipeline.ScheduleGPipe(stage, 2).run(Tensor(x))
    expected = list((x * [1.0, 4.0, 9.0]).sum(1))
    assert [float(loss.asnumpy()) for loss in losses] == (expected if rank() else [])

    stage = PipelineStage(Detached(), rank(), 2)
    schedule, weight = hp_pipeline.ScheduleGPipe(stage, 2), stage.submodule.weight
    schedule.run(Tensor(x))
    schedule.take_gradients([weight])
    if rank() == 0:
        weight.requires_grad = False
    with pytest.raises(
        PipelineError, match=r"zero \(zero_grad or take_gradients\).*frozen, set gradients to zero and ru"
    ):
        schedule.run(Tensor(x))
    schedule.take_gradients([weight])
    schedule.run(Tensor(x))
    close(schedule.take_gradients([weight])[0], x.mean(0) * [1.0, 2.0, 3.0] if rank() else np.zeros(3))


class Join(nn.Cell):
    def __init__(self, index):
        super().__init__()
        generator = np.random.default_rng(index)
        self.weight, self.last = Parameter(Tensor(generator.normal(size=(3, 3)))), index == 3

    def construct(self, a, b=None):
        if not self.last:
            return ops.matmul(a, self.weight)
        y = ops.matmul(ops.tanh(a) * b, self.weight)
        return (y * y).sum()


@on_ranks(2)
def test_chains_that_join():
    # Stages 0 -> 1 -> 3 and 2 -> 3, of which each rank has two, so that a stage takes from both ranks.
    placement = (0, 1, 0, 1)
    x = Tensor(np.random.default_rng(9).normal(size=(4, 3)))
    own = [PipelineStage(Join(index), index, 4) for index in range(4) if placement[index] == rank()]
    schedule = PipelineSchedule(
        own, 2, order=schedules.gpipe, placement=placement, boundaries=[(0, 1), (1, 3), (2, 3)], scale_grads=False
    )
    schedule.run(x)
    cells = [Join(index) for index in range(4)]
    whole = nn.CellList(cells)

    def loss(x):
        return cells[3](cells[1](cells[0](x)), cells[2](x))

    expected = mindspore.value_and_grad(loss, None, [cell.weight for cell in whole])(x)[1]
    for stage in own:
        close(schedule.take_gradients([stage.submodule.weight])[0], expected[stage.stage_index].asnumpy())


def test_nests_are_taken_apart_and_put_together():
    tree = ({"b": [1, (2,)], "a": ()}, [], None)
    leaves, structure = flatten(tree)
    assert leaves == [1, 2, None]
    assert unflatten(leaves, structure) == tree
    assert flatten(({"b": [5, (6,)], "a": ()}, [], 7))[1] == structure
    assert flatten(({"b": [5, [6]], "a": ()}, [], 7))[1] != structure
