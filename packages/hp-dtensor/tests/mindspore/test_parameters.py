"""Parameters that are distributed after a kernel has read them: every kernel's values and gradients of one device."""

from __future__ import annotations

import mindspore as ms
import mindspore.mint.nn.functional as F
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, ops

from hp_dtensor import DTensor, Replicate, Shard, implicit_replication, init_device_mesh, parallelize_value_and_grad
from hp_dtensor.mindspore.api import distribute_parameter
from hp_dtensor.mindspore.modules import set_local
from hp_testing import on_ranks

# Sizes that no other test has: MindSpore keeps what it makes of a gradient, and gives it to who comes later.
M, N = 7, 10
ROWS = Tensor(np.array([[0, 4], [6, 3]]), ms.int32)

UNARY_OPS = """abs acos acosh asin asinh atan atanh ceil cos cosh elu erf erfc erfinv exp exp2 expm1 floor gelu
    hardshrink hardsigmoid hardswish isfinite isinf isnan log log10 log1p log2 logsigmoid mish neg reciprocal relu relu6
    round rsqrt selu sigmoid sign silu sin sinc sinh softplus softshrink sqrt square stop_gradient tan tanh trunc
    ones_like zeros_like"""
UNARY_MINT = """abs acos acosh asin asinh atan atanh ceil cos cosh erf erfc erfinv exp exp2 expm1 floor isfinite isinf
    log log10 log1p log2 nan_to_num neg reciprocal round rsqrt sigmoid sign sin sinc sinh sqrt square tan tanh trunc
    ones_like zeros_like clone"""
UNARY_F = "elu gelu leaky_relu logsigmoid relu relu6 selu sigmoid silu softshrink hardswish mish"
BINARY_OPS = "atan2 equal greater greater_equal less less_equal maximum minimum not_equal pow xlogy floor_div"
BINARY_MINT = "add sub mul div atan2 eq ge le lt ne maximum minimum remainder pow xlogy floor_divide fmod"

# name: (function of one or two Parameters of shape (M, N), how many).
CASES = {f"ops.{name}": (getattr(ops, name), 1) for name in UNARY_OPS.split()}
CASES |= {f"mint.{name}": (getattr(mint, name), 1) for name in UNARY_MINT.split()}
CASES |= {f"F.{name}": (getattr(F, name), 1) for name in UNARY_F.split()}
CASES |= {f"ops.{name} of two": (getattr(ops, name), 2) for name in BINARY_OPS.split()}
CASES |= {f"mint.{name} of two": (getattr(mint, name), 2) for name in BINARY_MINT.split()}
CASES |= {
    "+": (lambda w, v: w + v, 2),
    "+ 1": (lambda w: w + 1, 1),
    "- 1": (lambda w: w - 1, 1),
    "1 -": (lambda w: 1 - w, 1),
    "* 2": (lambda w: w * 2, 1),
    "/ 2": (lambda w: w / 2, 1),
    "/": (lambda w, v: w / v, 2),
    "** 2": (lambda w: w**2, 1),
    "2 **": (lambda w: mint.pow(2.0, w), 1),
    "< 0.5": (lambda w: w < 0.5, 1),
    "== 0.5": (lambda w: w == 0.5, 1),
    "% 0.3": (lambda w: mint.remainder(w, 0.3), 1),
    "2 %": (lambda w: mint.remainder(2.0, w), 1),
    "fmod scalar": (lambda w: mint.fmod(w, 0.3), 1),
    "div trunc": (lambda w, v: mint.div(w, v, rounding_mode="trunc"), 2),
    "add alpha": (lambda w, v: mint.add(w, v, alpha=2), 2),
    "sub alpha": (lambda w, v: mint.sub(w, v, alpha=2), 2),
    "Add": (lambda w, v: ops.Add()(w, v), 2),
    "RealDiv": (lambda w, v: ops.RealDiv()(w, v), 2),
    "lerp": (lambda w, v: ops.lerp(w, v, 0.3), 2),
    "lerp tensor": (lambda w, v: ops.lerp(w, v, w), 2),
    "clamp": (lambda w: ops.clamp(w, 0.3, 0.5), 1),
    "clamp tensors": (lambda w, v: ops.clamp(w, v * 0.5, v), 2),
    "where": (lambda w, v: mint.where(w > 0.5, w, v), 2),
    "masked fill": (lambda w: w.masked_fill(w > 0.5, 0.25), 1),
    "masked fill tensor": (lambda w: ops.masked_fill(w, w > 0.5, Tensor(0.25)), 1),
    "cast": (lambda w: w.astype(ms.float64), 1),
    "Cast": (lambda w: ops.Cast()(w, ms.float64), 1),
    "identity": (lambda w: ops.Identity()(w), 1),
    "addn": (lambda w, v: ops.addn([w, v]), 2),
    "matmul": (lambda w: ops.matmul(w, ops.transpose(w, (1, 0))), 1),
    "mint matmul": (lambda w: mint.matmul(w, w.T), 1),
    "MatMul": (lambda w, v: ops.MatMul(transpose_b=True)(w, v), 2),
    "BatchMatMul": (lambda w, v: ops.BatchMatMul(transpose_b=True)(w, v), 2),
    "bmm": (lambda w: mint.bmm(w.reshape(M, 1, N), w.reshape(M, N, 1)), 1),
    "mm": (lambda w: mint.mm(w, w.T), 1),
    "linear": (lambda w, v: F.linear(w, v), 2),
    "bias add": (lambda w: ops.bias_add(w, mint.sum(w, 0)), 1),
    "gather rows": (lambda w: ops.gather(w, ROWS, 0), 1),
    "gather columns": (lambda w: ops.gather(w, ROWS, 1), 1),
    "gather elements": (lambda w: ops.gather_elements(w, 1, ops.zeros((M, 2), ms.int32)), 1),
    "embedding": (lambda w: F.embedding(ROWS, w), 1),
    "layer norm": (lambda w: ops.LayerNorm(1, 1, 1e-5)(w, mint.sum(w, 0), mint.mean(w, 0)), 1),
    "sum": (lambda w: w.sum(0), 1),
    "mean": (lambda w: mint.mean(w, -1, True), 1),
    "prod": (lambda w: mint.prod(w, 0), 1),
    "max of all": (lambda w: mint.max(w), 1),
    "min of all": (lambda w: mint.min(w), 1),
    "max of dim": (lambda w: ops.max(w, 0)[0], 1),
    "min of dim": (lambda w: ops.min(w, 1)[0], 1),
    "amax": (lambda w: ops.amax(w, 0), 1),
    "amin": (lambda w: ops.amin(w, 1), 1),
    "ReduceSum": (lambda w: ops.ReduceSum()(w, 0), 1),
    "ReduceMean": (lambda w: ops.ReduceMean()(w, 0), 1),
    "ReduceAll": (lambda w: ops.ReduceAll()(w > 0.5, 0), 1),
    "ReduceAny": (lambda w: ops.ReduceAny()(w > 0.5, 0), 1),
    "argmax": (lambda w: ops.argmax(w, 0), 1),
    "softmax": (lambda w: ops.softmax(w, 0), 1),
    "log_softmax": (lambda w: ops.log_softmax(w, 0), 1),
    "mint log_softmax": (lambda w: F.log_softmax(w, 0), 1),
    "cumsum": (lambda w: ops.cumsum(w, 0), 1),
    "mint cumsum": (lambda w: mint.cumsum(w, 1), 1),
    "topk": (lambda w: ops.topk(w, 2)[0], 1),
    "mint topk": (lambda w: mint.topk(w, 2, 0)[0], 1),
    "reshape": (lambda w: w.reshape(-1), 1),
    "view": (lambda w: w.view(N, M), 1),
    "flatten": (lambda w: w.flatten(), 1),
    "ops flatten": (lambda w: ops.flatten(w), 1),
    "expand_dims": (lambda w: ops.expand_dims(w, 1), 1),
    "unsqueeze": (lambda w: mint.unsqueeze(w, 1), 1),
    "squeeze": (lambda w: ops.squeeze(w), 1),
    "transpose": (lambda w: ops.transpose(w, (1, 0)), 1),
    "mint transpose": (lambda w: mint.transpose(w, 0, 1), 1),
    "permute": (lambda w: mint.permute(w, (1, 0)), 1),
    "broadcast_to": (lambda w: ops.broadcast_to(w, (2, M, N)), 1),
    "mint broadcast_to": (lambda w: mint.broadcast_to(w, (2, M, N)), 1),
    "cat": (lambda w, v: mint.cat([w, v], 0), 2),
    "concat": (lambda w, v: ops.concat([w, v], 1), 2),
    "stack": (lambda w, v: ops.stack([w, v]), 2),
    "split": (lambda w: ops.split(w, 4, 0), 1),
    "mint split": (lambda w: mint.split(w, 4, 0), 1),
    "split sizes": (lambda w: mint.split(w, [3, 4], 0), 1),
    "Split": (lambda w: ops.Split(1, 5)(w), 1),
    "chunk": (lambda w: mint.chunk(w, 2, 0), 1),
    "narrow": (lambda w: mint.narrow(w, 1, 1, 3), 1),
    "ops narrow": (lambda w: ops.narrow(w, 1, 1, 3), 1),
    "slice": (lambda w: w[1:3], 1),
    "index": (lambda w: w[ROWS.reshape(-1)], 1),
    "triu": (lambda w: ops.triu(w), 1),
    "tril": (lambda w: ops.tril(w), 1),
    "tile": (lambda w: ops.tile(w, (2, 1)), 1),
    "repeat": (lambda w: ops.repeat_interleave(w, 2, 0), 1),
}
GROUP = 48
GROUPS = [pytest.param(i, id=f"from {list(CASES)[i]}") for i in range(0, len(CASES), GROUP)]


def parameters(count, low):
    """Whole ones, each read by a kernel: MindSpore keeps their shape from then on."""
    rng = np.random.default_rng(4)
    made = []
    for index in range(count):
        values = low + 0.8 * rng.random((M, N), dtype=np.float32)
        made.append(Parameter(Tensor(values), name=f"w{index}"))
        ops.stop_gradient(made[-1])
    return made


def loss_of(out, given):
    """Results, whatever their dtype, weighed unevenly; and the operands, for there to be a gradient."""
    total = sum((w * w).sum() for w in given)
    for value in out if isinstance(out, (tuple, list)) else [out]:
        value = value.astype(ms.float32)
        total = total + (value * value * 0.5 + value).sum()
    return total


def check(name, mesh, placement):
    function, count = CASES[name]
    low = 1.1 if "acosh" in name else 0.1
    plain = parameters(count, low)

    def run(given):
        return loss_of(function(*given), given)

    try:
        run(plain).asnumpy()
    except RuntimeError as error:
        if "unregistered" in str(error):  # the CPU does not have the kernel
            return
        raise
    wanted, gradients = ms.value_and_grad(lambda: run(plain), None, plain)()
    given = parameters(count, low)
    for parameter in given:
        distribute_parameter(parameter, mesh, [placement])
    with implicit_replication():  # of the index tensors in the table
        value, made = parallelize_value_and_grad(lambda: run(given), None, given)()
    np.testing.assert_allclose(value.asnumpy(), wanted.asnumpy(), rtol=2e-5, err_msg="loss")
    for gradient, expected in zip(made, gradients, strict=True):
        assert isinstance(gradient, DTensor)
        np.testing.assert_allclose(
            gradient.full_tensor().asnumpy(), expected.asnumpy(), rtol=5e-5, atol=5e-5, err_msg="gradient"
        )


@on_ranks(1)
@pytest.mark.parametrize("kernel", ["gather rows", "stack", "cumsum", "softmax"])
def test_a_parameter_forgets_the_shape_that_it_had(kernel):
    function, count = CASES[kernel]
    given = parameters(count, 0.1)
    halves = [Tensor(parameter.asnumpy()[:, ::2].copy()) for parameter in given]
    for parameter, half in zip(given, halves, strict=True):
        set_local(parameter, half)
        assert parameter.dtype == ms.float32
    value, made = ms.value_and_grad(lambda: loss_of(function(*given), given), None, given)()
    fresh = [Parameter(half, name=f"f{index}") for index, half in enumerate(halves)]
    wanted, gradients = ms.value_and_grad(lambda: loss_of(function(*fresh), fresh), None, fresh)()
    np.testing.assert_allclose(value.asnumpy(), wanted.asnumpy(), rtol=1e-6)
    for gradient, expected in zip(made, gradients, strict=True):
        np.testing.assert_allclose(gradient.asnumpy(), expected.asnumpy(), rtol=1e-6)


@on_ranks(2)
@pytest.mark.parametrize(
    "first", [GROUPS[0], *(pytest.param(*each.values, id=each.id, marks=pytest.mark.thorough) for each in GROUPS[1:])]
)
def test_kernels_that_read_a_parameter(first):
    mesh = init_device_mesh("cpu", (2,))
    failures = []
    for name in list(CASES)[first : first + GROUP]:
        for placement in (Shard(0), Shard(1), Replicate()):
            try:
                check(name, mesh, placement)
            except Exception as error:
                failures.append(f"{name} of {placement}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    assert not failures, "\n".join(failures)


def of_a_copy(parameter, differentiate):
    """Gradients of a copy and of the parameter where both are used, and of the parameter that is copied in between."""
    made = parameter.copy()
    assert isinstance(made, Parameter) and made.requires_grad and made is not parameter
    _, gradients = differentiate(lambda: (made * made * parameter).sum(), None, [made, parameter])()
    _, cut_off = differentiate(lambda: (parameter.copy() * made).sum(), None, [parameter])()
    return *gradients, *cut_off


@on_ranks(2)
def test_a_copy_is_a_parameter_of_its_own():
    """As on one device: it trains, and what was copied gets no gradient through it."""
    plain, given = parameters(1, 0.1) + parameters(1, 0.1)
    distribute_parameter(given, init_device_mesh("cpu", (2,)), [Shard(0)])
    assert given.copy().placements == (Shard(0),)
    expected = of_a_copy(plain, ms.value_and_grad)
    for got, want in zip(of_a_copy(given, parallelize_value_and_grad), expected, strict=True):
        np.testing.assert_allclose(got.full_tensor().asnumpy(), want.asnumpy(), rtol=1e-6)
    assert expected[0].asnumpy().all() and expected[1].asnumpy().all() and not expected[2].asnumpy().any()
