"""The operators that users of MindSpore call, each with operands that its CPU takes: what a DTensor is judged by.

The truth of each is the same call on one device, in float64 where MindSpore's CPU has that. A result or a gradient that
differs is *wrong*; an error, on all ranks alike, is *refused*; an operator that one device refuses is *missing*.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import mindspore.mint.nn.functional as F
from mindspore import Tensor, mint, nn, ops

__all__ = ["OPERATORS", "SINGLE", "Case", "Flags", "Ints"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Ints:
    """An operand of integers below ``high``.

    Attributes:
        shape: its shape.
        high: the first integer that is too large.
        dtype: its type.
    """

    shape: Shape
    high: int
    dtype: Any = ms.int64


@dataclass(frozen=True)
class Flags:
    """An operand of booleans, of which half are true."""

    shape: Shape


@dataclass(frozen=True)
class Case:
    """A call: a function, and its operands, of which plain shapes are normally distributed numbers."""

    function: Callable[..., Any]
    operands: tuple[Any, ...]


A, B, SQUARE, ROWS, IMAGE = (5, 6), (6, 4), (4, 4), (3, 5, 6), (4, 2, 6, 6)
OPERATORS: dict[str, Case] = {}
SINGLE = frozenset(
    {
        "addcdiv",
        "mish",
        "softplus",
        "log_softmax",
        "LayerNorm",
        "mse_loss",
        "nn.MSELoss",
        "l1_loss",
        "clip_by_global_norm",
    }
)
"""Operators that compute in single precision on the CPU, whatever they are given."""


def _case(name: str, function: Callable[..., Any], *operands: Any) -> None:
    OPERATORS[name] = Case(function, operands)


def _positive(x: Any) -> Any:
    return x * x + 0.5


def _within(x: Any) -> Any:
    """Numbers between -0.9 and 0.9."""
    return ops.tanh(x) * 0.9


def _elementwise() -> None:
    plain = """abs neg exp sin cos tan atan sinh cosh tanh asinh erf erfc expm1 sigmoid relu relu6 elu selu gelu silu
        mish softplus softsign softshrink hardshrink hardswish hardsigmoid hardtanh logsigmoid floor ceil round trunc
        sign square isnan isinf isfinite celu tanhshrink leaky_relu deg2rad"""
    for name in plain.split():
        _case(name, getattr(ops, name), A)
    for name in "log sqrt rsqrt log1p log2 log10 reciprocal acosh".split():
        function = getattr(ops, name)
        _case(name, lambda x, f=function: f(_positive(x) + 1), A)
    for name in "asin acos atanh erfinv".split():
        function = getattr(ops, name)
        _case(name, lambda x, f=function: f(_within(x)), A)
    for name in "add sub mul maximum minimum atan2 equal not_equal less less_equal greater greater_equal".split():
        _case(name, getattr(ops, name), A, A)
    _case("div", lambda x, y: ops.div(x, _positive(y)), A, A)
    _case("floor_div", lambda x, y: x // _positive(y), A, A)
    _case("mod", lambda x, y: x % _positive(y), A, A)
    _case("pow", lambda x: x**2, A)
    _case("pow of tensors", lambda x, y: ops.pow(_positive(x), y), A, A)
    _case("clamp", lambda x: ops.clamp(x, -0.5, 0.5), A)
    _case("hypot", ops.hypot, A, A)
    _case("lerp", lambda x, y: ops.lerp(x, y, 0.3), A, A)
    _case("addcmul", lambda x, y, z: ops.addcmul(x, y, z, 0.5), A, A, A)
    _case("addcdiv", lambda x, y, z: ops.addcdiv(x, y, _positive(z), 0.5), A, A, A)
    _case("where", lambda m, x, y: ops.where(m, x, y), Flags(A), A, A)
    _case("masked_fill", lambda x, m: x.masked_fill(m, 0.5), A, Flags(A))
    _case("nan_to_num", ops.nan_to_num, A)
    _case("xlogy", lambda x, y: ops.xlogy(x, _positive(y)), A, A)
    _case("logaddexp", ops.logaddexp, A, A)
    _case("logical_and", ops.logical_and, Flags(A), Flags(A))
    _case("logical_or", ops.logical_or, Flags(A), Flags(A))
    _case("logical_not", ops.logical_not, Flags(A))
    _case("logical_xor", ops.logical_xor, Flags(A), Flags(A))
    _case("&", lambda x, y: x & y, Flags(A), Flags(A))
    _case("|", lambda x, y: x | y, Flags(A), Flags(A))
    _case("^", lambda x, y: x ^ y, Flags(A), Flags(A))
    _case("~", lambda x: ~x, Flags(A))
    _case("& of integers", lambda x, y: x & y, Ints(A, 9), Ints(A, 9))
    _case("bitwise_or", ops.bitwise_or, Ints(A, 9), Ints(A, 9))
    _case("glu", lambda x: ops.glu(x, -1), A)
    _case("prelu", ops.prelu, (4, 3, 5), (3,))
    _case("cast", lambda x: x.astype(ms.float16).astype(ms.float32), A)


def _reductions() -> None:
    for name in "sum mean prod std var amax amin max min logsumexp norm".split():
        method = "mean" if name == "mean" else name
        if name not in ("amax", "amin", "logsumexp", "norm"):
            _case(f"x.{name}()", lambda x, n=method: getattr(x, n)(), A)
    _case("sum over an axis", lambda x: x.sum(0), A)
    _case("mean over an axis", lambda x: x.mean(-1), A)
    _case("prod over an axis", lambda x: x.prod(1), A)
    _case("std over an axis", lambda x: x.std(0), A)
    _case("mint.std", lambda x: mint.std(x, -1), A)
    _case("mint.var", lambda x: mint.var(x, -1), A)
    _case("ops.std", lambda x: ops.std(x, 1), A)
    _case("ops.var", lambda x: ops.var(x, 1), A)
    _case("x.max over an axis", lambda x: x.max(0), A)
    _case("x.min over an axis", lambda x: x.min(1), A)
    _case("ops.max over an axis", lambda x: ops.max(x, 1), A)
    _case("ops.min over an axis", lambda x: ops.min(x, 0), A)
    _case("mint.max over an axis", lambda x: mint.max(x, 1), A)
    _case("mint.min over an axis", lambda x: mint.min(x, 0), A)
    _case("amax", lambda x: ops.amax(x, -1), A)
    _case("amin", lambda x: ops.amin(x, 0), A)
    _case("x.any()", lambda x: x.any(), Flags(A))
    _case("x.all()", lambda x: x.all(), Flags(A))
    _case("any over an axis", lambda x: x.any(0), Flags(A))
    _case("all over an axis", lambda x: x.all(-1), Flags(A))
    _case("argmax", lambda x: x.argmax(-1), A)
    _case("argmin", lambda x: x.argmin(0), A)
    _case("logsumexp", lambda x: ops.logsumexp(x, 1), A)
    _case("norm", lambda x: ops.norm(x), A)
    _case("norm over an axis", lambda x: ops.norm(x, dim=1), A)
    _case("cumsum", lambda x: ops.cumsum(x, 0), A)
    _case("cumprod", lambda x: ops.cumprod(x, 1), A)
    _case("cummax", lambda x: ops.cummax(x, 1), A)
    _case("median", lambda x: ops.median(x, 1), A)
    _case("count_nonzero", lambda x: ops.count_nonzero(x, 0), Ints(A, 2))
    _case("sort", lambda x: ops.sort(x, 1), A)
    _case("argsort", lambda x: ops.argsort(x, 0), A)
    _case("topk", lambda x: ops.topk(x, 3), A)
    _case("softmax", lambda x: ops.softmax(x, 1), A)
    _case("log_softmax", lambda x: ops.log_softmax(x, 0), A)


def _products() -> None:
    _case("matmul", ops.matmul, A, B)
    _case("x @ y", lambda x, y: x @ y, (3, 2, 6), (3, 6, 4))
    _case("mm", ops.mm, A, B)
    _case("bmm", ops.bmm, (3, 2, 4), (3, 4, 2))
    _case("mv", ops.mv, A, (6,))
    _case("dot", lambda x, y: ops.dot(x, y), A, B)
    _case("outer", ops.outer, (5,), (6,))
    _case("addmm", ops.addmm, (5, 4), A, B)
    _case("baddbmm", ops.baddbmm, (3, 2, 2), (3, 2, 4), (3, 4, 2))
    _case("einsum", lambda x, y: ops.einsum("ij,jk->ik", x, y), A, B)
    _case("tensordot", lambda x, y: ops.tensordot(x, y, 1), A, B)
    _case("linear", F.linear, (2, 3, 6), (4, 6), (4,))
    _case("kron", ops.kron, (2, 3), (4, 2))


def _shapes() -> None:
    _case("reshape", lambda x: x.reshape(2, 5, 3), A)
    _case("view", lambda x: x.view(30), A)
    _case("flatten", ops.flatten, (5, 2, 3))
    _case("x.flatten", lambda x: x.flatten(), A)
    _case("squeeze", lambda x: x.squeeze(1), (5, 1, 6))
    _case("unsqueeze", lambda x: x.unsqueeze(1), A)
    _case("transpose", lambda x: x.transpose(1, 0), A)
    _case("permute", lambda x: x.permute(2, 0, 1), ROWS)
    _case("swapaxes", lambda x: x.swapaxes(0, 2), ROWS)
    _case("movedim", lambda x: ops.movedim(x, 0, 2), ROWS)
    _case("broadcast_to", lambda x: x.broadcast_to((3, 5, 6)), (1, 5, 6))
    _case("expand_as", lambda x, y: x.expand_as(y), (1, 6), A)
    _case("tile", lambda x: ops.tile(x, (2, 1)), A)
    _case("repeat_interleave", lambda x: ops.repeat_interleave(x, 2, 0), A)
    _case("cat", lambda x, y: ops.cat((x, y), 0), A, A)
    _case("stack", lambda x, y: ops.stack((x, y), 1), A, A)
    _case("hstack", lambda x, y: ops.hstack((x, y)), A, A)
    _case("split", lambda x: ops.split(x, 2, 1), A)
    _case("chunk", lambda x: ops.chunk(x, 2, 0), A)
    _case("unbind", lambda x: ops.unbind(x, 0), A)
    _case("unstack", lambda x: ops.unstack(x, 1), A)
    _case("narrow", lambda x: ops.narrow(x, 1, 1, 3), A)
    _case("select", lambda x: ops.select(x > 0, x, x * 2), A)
    _case("x.select", lambda x: mint.select(x, 1, 2), A)
    _case("roll", lambda x: ops.roll(x, 2, 0), A)
    _case("flip", lambda x: ops.flip(x, (1,)), A)
    _case("mint.flip", lambda x: mint.flip(x, (0,)), A)
    _case("fliplr", ops.fliplr, A)
    _case("rot90", lambda x: ops.rot90(x, 1, (0, 1)), A)
    _case("diag", lambda x: ops.diag(x), (5,))
    _case("diagonal", lambda x: ops.diagonal(x), SQUARE)
    _case("tril", lambda x: ops.tril(x), A)
    _case("triu", lambda x: ops.triu(x, 1), A)
    _case("meshgrid", lambda x, y: ops.meshgrid(x, y, indexing="ij"), (5,), (6,))
    _case("pad", lambda x: ops.pad(x, (1, 2)), A)
    _case("pad of images", lambda x: ops.pad(x, (1, 1, 2, 2), mode="constant", value=0.5), IMAGE)
    _case("reverse_sequence", lambda x: ops.reverse_sequence(x, Tensor([2, 3, 1, 4, 6], ms.int64), 1, 0), A)
    _case("zeros_like", ops.zeros_like, A)
    _case("ones_like", ops.ones_like, A)
    _case("full_like", lambda x: ops.full_like(x, 2.5), A)


def _indices() -> None:
    _case("x[1]", lambda x: x[1], A)
    _case("x[:, 1:3]", lambda x: x[:, 1:3], A)
    _case("x[::2]", lambda x: x[::2], A)
    _case("x[..., None]", lambda x: x[..., None], A)
    _case("x[index]", lambda x, i: x[i], A, Ints((3,), 5))
    _case("x[mask]", lambda x, m: x[m], A, Flags(A))
    _case("gather", lambda x, i: ops.gather(x, i, 0), A, Ints((2, 2), 5))
    _case("gather of columns", lambda x, i: ops.gather(x, i, 1), A, Ints((2,), 6))
    _case("gather_elements", lambda x, i: ops.gather_elements(x, 1, i), A, Ints((5, 2), 6))
    _case("gather_nd", lambda x, i: ops.gather_nd(x, i), A, Ints((3, 2), 5))
    _case("index_select", lambda x, i: ops.index_select(x, 1, i), A, Ints((3,), 6, ms.int32))
    _case("index_add", lambda x, i, y: ops.index_add(x, i, y, 0), A, Ints((5,), 5, ms.int32), A)
    _case("scatter", lambda x, i, y: ops.scatter(x, 1, i, y), A, Ints((5, 2), 6), (5, 2))
    _case("tensor_scatter_add", ops.tensor_scatter_add, A, Ints((3, 1), 5), (3, 6))
    _case(
        "tensor_scatter_elements",
        lambda x, y: ops.tensor_scatter_elements(x, Tensor([[1], [0], [3], [2], [5]]), y, 1),
        A,
        (5, 1),
    )
    _case("tensor_scatter_update", lambda x, y: ops.tensor_scatter_update(x, Tensor([[1], [0], [3]]), y), A, (3, 6))
    _case("scatter_nd", lambda y: ops.scatter_nd(Tensor([[1], [0], [3]]), y, (5, 6)), (3, 6))
    _case("masked_select", ops.masked_select, A, Flags(A))
    _case("nonzero", ops.nonzero, Ints(A, 2))
    _case("argwhere", ops.argwhere, Ints(A, 2))
    _case("one_hot", lambda x: ops.one_hot(x, 6, Tensor(1.0), Tensor(0.0)), Ints((5,), 6))
    _case("unique", lambda x: ops.unique(x), Ints((7,), 3))
    _case("searchsorted", lambda x, y: ops.searchsorted(ops.cumsum(_positive(x), 0), y), (6,), (5,))
    _case("bincount", lambda x: ops.bincount(x), Ints((8,), 5, ms.int32))
    _case("histc", lambda x: ops.histc(x, 4, -2.0, 2.0), A)
    _case("take", lambda x, i: x.take(i, 1), A, Ints((3,), 6))
    _case("embedding", lambda i, w: F.embedding(i, w), Ints((5, 2), 6), B)
    _case("isclose", lambda x, y: ops.isclose(x, y), A, A)


def _layers() -> None:
    _case("conv1d", lambda x, w: ops.conv1d(x, w, pad_mode="pad", padding=1), (4, 2, 6), (4, 2, 3))
    _case("conv2d", lambda x, w: ops.conv2d(x, w, pad_mode="pad", padding=1), IMAGE, (4, 2, 3, 3))
    _case(
        "conv2d with a bias", lambda x, w, b: ops.conv2d(x, w, b, pad_mode="pad", padding=1), IMAGE, (4, 2, 3, 3), (4,)
    )
    _case("grouped conv2d", lambda x, w: ops.conv2d(x, w, groups=2), IMAGE, (4, 1, 3, 3))
    _case("conv2d, same", lambda x, w: ops.conv2d(x, w, pad_mode="same"), IMAGE, (4, 2, 3, 3))
    _case("max_pool2d", lambda x: ops.MaxPool(2, 2)(x), IMAGE)
    _case("avg_pool2d", lambda x: ops.AvgPool(2, 2)(x), IMAGE)
    _case("adaptive_avg_pool2d", lambda x: ops.adaptive_avg_pool2d(x, 2), IMAGE)
    _case("adaptive_max_pool2d", lambda x: ops.adaptive_max_pool2d(x, 2), IMAGE)
    _case("max_pool2d with indices", lambda x: ops.max_pool2d(x, 2, return_indices=True), IMAGE)
    _case("max_pool3d", lambda x: ops.MaxPool3D(2, 2)(x), (2, 3, 4, 4, 4))
    _case("avg_pool3d", lambda x: ops.AvgPool3D(2, 2)(x), (2, 3, 4, 4, 4))
    _case(
        "nn.Conv2dTranspose",
        lambda x, w: ops.Conv2DTranspose(2, 3, pad_mode="valid")(x, w, (4, 3, 8, 8)),
        IMAGE,
        (2, 3, 3, 3),
    )
    _case("bilinear interpolate", lambda x: ops.interpolate(x, (12, 12), mode="bilinear"), IMAGE)
    _case(
        "strided conv2d", lambda x, w: ops.conv2d(x, w, stride=2, pad_mode="pad", padding=(1, 2)), IMAGE, (4, 2, 3, 2)
    )
    _case(
        "trained batch_norm",
        lambda x, w, b: ops.BatchNorm(True)(x, w, b, ops.zeros_like(w), ops.ones_like(w))[0],
        (4, 2, 6, 6),
        (2,),
        (2,),
    )
    _case("nn.MaxPool2d", lambda x: nn.MaxPool2d(2, 2)(x), IMAGE)
    _case("nn.AvgPool2d", lambda x: nn.AvgPool2d(2, 2)(x), IMAGE)
    _case("layer_norm", lambda x, w, b: ops.layer_norm(x, (6,), w, b), A, (6,), (6,))
    _case("LayerNorm", lambda x, w, b: ops.LayerNorm(1, 1, 1e-5)(x, w, b)[0], A, (6,), (6,))
    _case("group_norm", lambda x, w, b: ops.group_norm(x, 2, w, b), (4, 4, 6), (4,), (4,))
    _case("nn.GroupNorm", lambda x: nn.GroupNorm(2, 4)(x), (4, 4, 6, 6))
    _case(
        "batch_norm", lambda x, w, b, m, v: ops.batch_norm(x, m, _positive(v), w, b), (4, 2, 6), (2,), (2,), (2,), (2,)
    )
    _case("rms_norm", lambda x, w: x * mint.rsqrt(mint.mean(x * x, -1, True) + 1e-6) * w, A, (6,))
    _case("dropout in evaluation", lambda x: ops.dropout(x, 0.5, training=False), A)
    _case("cross_entropy", lambda x, t: ops.cross_entropy(x, t), A, Ints((5,), 6, ms.int32))
    _case("nll_loss", lambda x, t: ops.nll_loss(ops.log_softmax(x), t), A, Ints((5,), 6, ms.int32))
    _case("mse_loss", lambda x, y: ops.mse_loss(x, y), A, A)
    _case("nn.MSELoss", lambda x, y: nn.MSELoss()(x, y), A, A)
    _case("l1_loss", lambda x, y: ops.l1_loss(x, y), A, A)
    _case("smooth_l1_loss", lambda x, y: ops.smooth_l1_loss(x, y), A, A)
    _case("SmoothL1Loss", lambda x, y: nn.SmoothL1Loss()(x, y), A, A)
    _case("huber_loss", lambda x, y: ops.huber_loss(x, y), A, A)
    _case("binary_cross_entropy", lambda x, y: ops.binary_cross_entropy(ops.sigmoid(x), ops.sigmoid(y)), A, A)
    _case("BCEWithLogits", lambda x, y: nn.BCEWithLogitsLoss()(x, ops.sigmoid(y)), A, A)
    _case(
        "binary_cross_entropy_with_logits", lambda x, y: ops.binary_cross_entropy_with_logits(x, ops.sigmoid(y)), A, A
    )
    _case("kl_div", lambda x, y: ops.kl_div(ops.log_softmax(x), ops.softmax(y)), A, A)
    _case("SoftmaxCrossEntropyWithLogits", lambda x, y: nn.SoftmaxCrossEntropyWithLogits()(x, ops.softmax(y)), A, A)
    _case(
        "sparse SoftmaxCrossEntropyWithLogits",
        lambda x, t: nn.SoftmaxCrossEntropyWithLogits(sparse=True)(x, t),
        A,
        Ints((5,), 6, ms.int32),
    )
    _case(
        "sparse mean SoftmaxCrossEntropyWithLogits",
        lambda x, t: nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")(x, t),
        A,
        Ints((5,), 6, ms.int32),
    )
    _case("cosine_similarity", lambda x, y: ops.cosine_similarity(x, y), A, A)
    _case("interpolate", lambda x: ops.interpolate(x, (12, 12), mode="nearest"), IMAGE)
    _case("pixel_shuffle", lambda x: ops.pixel_shuffle(x, 2), (2, 4, 3, 3))
    _case("unfold", lambda x: ops.unfold(x, 3), IMAGE)
    _case("clip_by_value", lambda x: ops.clip_by_value(x, -0.5, 0.5), A)
    _case("clip_by_norm", lambda x: ops.clip_by_norm(x, 1.0), A)
    _case("clip_by_global_norm", lambda x, y: ops.clip_by_global_norm((x, y), 1.0), A, B)
    _case("l2_normalize", lambda x: ops.L2Normalize(1)(x), A)


_elementwise()
_reductions()
_products()
_shapes()
_indices()
_layers()
