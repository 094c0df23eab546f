"""The calls that must give on DTensors what they give on one device: test_ops_match_single_device runs each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from hp_testing import device_type

__all__ = ["CASES", "Arg", "Case"]

MOVES = "would have to be redistributed first|written in place"


@dataclass(frozen=True)
class Arg:
    """A tensor argument.

    Attributes:
        shape: global shape.
        kind: "f" distinct floats without zero, "p" positive ones, "b" bools, "i<n>" ints below n.
    """

    shape: tuple[int, ...]
    kind: str = "f"


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        name: unique.
        run: the call, of the tensors.
        args: the tensors.
        refuses: pattern of the error that it may raise for some placements; empty where it must always work.
        only: kinds of placements that are tried, of "replicate shard partial avg".
    """

    name: str
    run: Callable[..., Any]
    args: tuple[Arg, ...]
    refuses: str = ""
    only: str = "replicate shard partial avg"


CASES: list[Case] = []


def case(name: str, run: Callable[..., Any], *shapes: Any, **options: Any) -> None:
    """Adds a case; a shape is a tuple (floats) or ``(tuple, kind)``."""
    args = tuple(Arg(s[0], s[1]) if len(s) == 2 and isinstance(s[0], tuple) else Arg(tuple(s)) for s in shapes)
    CASES.append(Case(name, run, args, **options))


def _pointwise() -> None:
    a, row, col, thin = (5, 7), (7,), (5, 1), (4, 1, 3)
    # ---- one operand ----
    for name in """abs neg exp sin tanh sigmoid relu gelu silu erf floor ceil round sign trunc square reciprocal clone
        contiguous positive expm1 frac sgn softsign mish""".split():
        func = getattr(torch, name, None) or getattr(F, name, None) or getattr(torch.Tensor, name)
        case(name, func, a)
    for name in "sqrt rsqrt log log2 log1p".split():
        case(name, getattr(torch, name), (a, "p"))
    case("pow", lambda x: x**2, a)
    case("rpow", lambda x: 2.0**x, a)
    case("clamp", lambda x: x.clamp(-0.5, 0.5), thin)
    case("clamp tensors", torch.clamp, a, row, col)
    case("add scalar", lambda x: x + 1.5, a)
    case("radd scalar", lambda x: 1 + x, thin)
    case("rsub", lambda x: 1.5 - x, a)
    case("torch.rsub", lambda x: torch.rsub(x, 2.0), a)
    case("mul scalar", lambda x: x * 3, a)
    case("rmul scalar", lambda x: 0.5 * x, thin)
    case("div scalar", lambda x: x / 3, a)
    case("rdiv", lambda x: 2.0 / x, a)
    case("floordiv", lambda x: x.detach() // 0.5, a)
    case("mod", lambda x: x % 0.7, a)
    case("div floor", lambda x: torch.div(x, 0.3, rounding_mode="floor"), a)
    case("leaky_relu", lambda x: F.leaky_relu(x, 0.2), a)
    case("elu", F.elu, a)
    case("softplus", F.softplus, a)
    case("hardtanh", F.hardtanh, a)
    case("hardswish", F.hardswish, a)
    case("logsigmoid", F.logsigmoid, a)
    case("gelu tanh", lambda x: F.gelu(x, approximate="tanh"), thin)
    case("nan_to_num", torch.nan_to_num, a)
    case("to float32", lambda x: x.to(torch.float32), a)
    case("float", lambda x: x.float(), a)
    case("double", lambda x: x.double(), a)
    case("type_as", lambda x, y: x.type_as(y), (a, "i9"), row)
    case("to like", lambda x, y: x.to(y), a, (row, "i9"))
    case("to bool", lambda x: x.bool(), a)
    case("int", lambda x: (x * 16).int(), a)
    case("zeros_like", torch.zeros_like, a)
    case("ones_like", torch.ones_like, a)
    case("full_like", lambda x: torch.full_like(x, 2.5), thin)
    case("isnan", torch.isnan, a)
    case("logical_not", torch.logical_not, (a, "b"))
    case("invert", lambda x: ~x, (a, "b"))
    case("scalar", lambda x: x * 2 + 1, ())
    case("size one", lambda x: x.exp() * 2, (1,))
    case("no elements", lambda x: x.exp() + 1, (0, 3))
    # ---- two operands ----
    for name in "add sub mul div maximum minimum atan2 fmod remainder eq ne lt le gt ge".split():
        case(name, getattr(torch, name), a, a)
    case("add row", lambda x, y: x + y, a, row)
    case("add column", lambda x, y: x + y, a, col)
    case("add 0-d", lambda x, y: x + y, a, ())
    case("add outer", lambda x, y: x + y, (5, 1), (1, 7))
    case("add more dims", lambda x, y: x + y, (3,), (2, 4, 1, 3))
    case("add alpha", lambda x, y: torch.add(x, y, alpha=2), a, a)
    case("sub alpha", lambda x, y: x.sub(y, alpha=3), a, row)
    case("sub row", lambda x, y: x - y, a, row)
    case("mul row", lambda x, y: x * y, a, row)
    case("mul column", lambda x, y: x * y, a, col)
    case("mul 0-d", lambda x, y: x * y, a, ())
    case("mul one", lambda x, y: x * y, a, (1, 1))
    case("mul itself", lambda x: x * x, a)
    case("add itself", lambda x: x + x, a)
    case("div row", lambda x, y: x / y, a, (row, "p"))
    case("div by column", lambda x, y: x / y, (7,), (col, "p"))
    case("pow tensor", torch.pow, (a, "p"), row)
    if device_type() != "npu":  # torch_npu replaces the CPU's kernel by one without a gradient: nothing to compare with
        case("true_divide", torch.true_divide, a, (a, "p"))
    case("mul int float", lambda x, y: x * y, (a, "i5"), a)
    case("bool and", lambda x, y: x & y, (a, "b"), (row, "b"))
    case("bool or", lambda x, y: x | y, (a, "b"), (col, "b"))
    case("compare scalar", lambda x: x > 0, a)
    case("mul bool", lambda x, y: x * y, a, (a, "b"))
    case("int add", lambda x, y: x + y, (a, "i50"), (row, "i50"))
    case("int floor", lambda x: x // 4, (a, "i50"))
    case("xlogy", torch.xlogy, (a, "p"), (a, "p"))
    case("no elements two", lambda x, y: x + y, (0, 3), (1, 3))
    case("no elements mul", lambda x, y: x * y, (0, 3), (3,))
    # ---- three ----
    case("where", torch.where, (a, "b"), a, a)
    case("where row", torch.where, (row, "b"), a, col)
    case("where scalar", lambda c, x: torch.where(c, x, 0.0), (a, "b"), a)
    case("where method", lambda x, c, y: x.where(c, y), a, (a, "b"), ())
    case("masked_fill", lambda x, m: x.masked_fill(m, 0.5), a, (a, "b"))
    case("masked_fill row", lambda x, m: x.masked_fill(m, -1e9), a, (row, "b"))
    case("masked_fill tensor", lambda x, m, v: x.masked_fill(m, v), a, (col, "b"), ())
    case("addcmul", lambda x, y, z: torch.addcmul(x, y, z, value=0.5), a, a, row)
    case("addcdiv", lambda x, y, z: torch.addcdiv(x, y, z, value=0.5), a, row, (a, "p"))
    case("lerp", lambda x, y, w: torch.lerp(x, y, w), a, a, row)
    case("lerp scalar", lambda x, y: torch.lerp(x, y, 0.25), a, a)
    # ---- in place, on a fresh tensor ----
    case("add_", lambda x, y: x.clone().add_(y), a, a, refuses=MOVES)
    case("add_ row", lambda x, y: x.clone().add_(y), a, row, refuses=MOVES)
    case("add_ alpha", lambda x, y: x.clone().add_(y, alpha=2), a, a, refuses=MOVES)
    case("add_ scalar", lambda x: x.clone().add_(1), a, refuses=MOVES)
    case("sub_", lambda x, y: x.clone().sub_(y), a, col, refuses=MOVES)
    case("mul_", lambda x, y: x.clone().mul_(y), a, row, refuses=MOVES)
    case("mul_ scalar", lambda x: x.clone().mul_(2), a)
    case("div_", lambda x, y: x.clone().div_(y), a, (a, "p"), refuses=MOVES)
    case("iadd", _iadd, a, row, refuses=MOVES)
    case("imul", _imul, a, a, refuses=MOVES)
    case("neg_", lambda x: x.clone().neg_(), a)
    case("zero_", lambda x: x.clone().zero_(), a, refuses=MOVES)
    case("fill_", lambda x: x.clone().fill_(2.0), a, refuses=MOVES)
    case("relu_", lambda x: x.clone().relu_(), a, refuses=MOVES)
    case("exp_", lambda x: x.clone().exp_(), a, refuses=MOVES)
    case("clamp_", lambda x: x.clone().clamp_(-1, 1), a, refuses=MOVES)
    case("masked_fill_", lambda x, m: x.clone().masked_fill_(m, 3.0), a, (a, "b"), refuses=MOVES)
    case("copy_", lambda x, y: x.clone().copy_(y), a, a, refuses=MOVES)
    case("copy_ row", lambda x, y: x.clone().copy_(y), a, row, refuses=MOVES)
    case("addcmul_", lambda x, y, z: x.clone().addcmul_(y, z), a, a, row, refuses=MOVES)
    case("lerp_", lambda x, y: x.clone().lerp_(y, 0.3), a, a, refuses=MOVES)
    case("clamp_min", lambda x: x.clamp_min(0.1), a)


def _iadd(x: Any, y: Any) -> Any:
    x = x.clone()
    x += y
    return x


def _imul(x: Any, y: Any) -> Any:
    x = x.clone()
    x *= y
    return x


def _reductions() -> None:
    a, thin = (5, 7), (4, 1, 3)
    for name in "sum mean amax amin".split():
        func = getattr(torch, name)
        case(name, func, a)
        case(f"{name} dim", lambda x, f=func: f(x, 0), a)
        case(f"{name} last keep", lambda x, f=func: f(x, -1, keepdim=True), a)
        case(f"{name} keep by position", lambda x, f=func: f(x, 1, True), a)
        case(f"{name} dims", lambda x, f=func: f(x, (0, 2)), thin)
        case(f"{name} one", lambda x, f=func: f(x, dim=1), thin)
    case("sum 0-d", torch.sum, ())
    case("sum method", lambda x: x.sum(1), a)
    case("sum ints", torch.sum, (a, "i9"))
    case("sum bools", torch.sum, (a, "b"))
    case("sum no elements", lambda x: x.sum(0), (0, 3))
    case("sum dtype", lambda x: x.sum(dtype=torch.float32), (a, "i9"))
    case("sum dim none keep", lambda x: x.sum(None, True), a)
    case("sum empty dims", lambda x: x.sum(()), a)
    case("mean negative dims", lambda x: x.mean((-1, -2)), thin)
    case("mean dtype", lambda x: x.mean(dtype=torch.float64), (a, "i9"))
    case("mean method", lambda x: x.mean(-1, keepdim=True), a)
    case("mean float32", lambda x: x.mean(0, dtype=torch.float32), (a, "i9"))
    case("prod", torch.prod, (2, 3))
    case("prod dim", lambda x: x.prod(1, keepdim=True), a)
    case("prod no grad", lambda x: x.detach().prod(0), a)
    case("any", torch.any, (a, "b"))
    case("any dim", lambda x: x.any(1), (a, "b"))
    case("all", torch.all, (a, "b"))
    case("all dim", lambda x: torch.all(x, dim=0, keepdim=True), (a, "b"))
    case("any comparison", lambda x: (x > 1.0).any(), a)
    case("max", torch.max, a)
    case("min", torch.min, a)
    case("max method", lambda x: x.max(), thin)
    case("max no grad", lambda x: x.detach().max(), a)
    case("max ints", torch.max, ((4,), "i9"))
    case("min ints", lambda x: x.min(), ((1,), "i9"))
    case("max dim", lambda x: tuple(torch.max(x, 1)), a)
    case("max dim keep", lambda x: tuple(x.max(dim=0, keepdim=True)), a)
    case("min dim", lambda x: tuple(x.min(-1)), thin)
    case("max elementwise", lambda x, y: torch.max(x, y), a, (7,))
    case("min elementwise", lambda x, y: x.min(other=y), a, a)
    case("amax no grad", lambda x: x.detach().amax(1), a)
    case("amin no grad", lambda x: x.detach().amin((0, 1), keepdim=True), a)
    case("argmax", torch.argmax, a)
    case("argmax dim", lambda x: x.argmax(-1), a)
    case("argmin", lambda x: x.argmin(0, keepdim=True), a)
    case("logsumexp", lambda x: x.logsumexp(-1), a)
    case("logsumexp dims", lambda x: torch.logsumexp(x, (0, 2), True), thin)
    case("median dim", lambda x: tuple(x.median(0)), a)
    case("median", torch.median, a)
    case("nansum", lambda x: x.nansum(1), a)
    case("count_nonzero", lambda x: torch.count_nonzero(x, 0), (a, "i3"))
    case("aminmax", lambda x: tuple(torch.aminmax(x, dim=1)), a)
    case("mode", lambda x: tuple(torch.mode(x, 1)), (a, "i3"))
    case("var", lambda x: x.var(), a)
    case("var dim", lambda x: torch.var(x, -1, keepdim=True), a)
    case("var uncorrected", lambda x: torch.var(x, dim=-1, correction=0), a)
    case("std", lambda x: x.std(0, unbiased=False), a)
    case("var_mean", lambda x: torch.var_mean(x, 1), a)
    case("norm", lambda x: x.norm(), a)
    case("norm dim", lambda x: x.norm(dim=-1, keepdim=True), a)
    case("norm p", lambda x: torch.norm(x, p=1, dim=0), a)
    case("vector_norm", torch.linalg.vector_norm, a)
    case("vector_norm no grad", lambda x: torch.linalg.vector_norm(x.detach()), a)
    case(
        "vector_norm inf",
        lambda x: torch.linalg.vector_norm(x.detach(), float("inf")),
        (7, 3),
    )
    case("vector_norm 1", lambda x: torch.linalg.vector_norm(x.detach(), 1), thin)
    case("vector_norm 0", lambda x: torch.linalg.vector_norm(x.double(), 0), (thin, "i2"))
    case("vector_norm dim", lambda x: torch.linalg.vector_norm(x, 2, -1), a)
    case("cumsum", lambda x: x.cumsum(0), a)
    case("cumsum last", lambda x: torch.cumsum(x, dim=-1), a)
    case("cumsum ints", lambda x: x.cumsum(-1), (a, "i2"))
    case("cumprod", lambda x: x.cumprod(1), a)
    case("cummax", lambda x: tuple(x.cummax(1)), a)
    case("logcumsumexp", lambda x: x.logcumsumexp(0), a)
    case("sort", lambda x: tuple(torch.sort(x)), a)
    case("sort descending", lambda x: tuple(x.sort(0, descending=True)), a)
    case("sort positional", lambda x: tuple(x.sort(0, True)), a)
    case("sort stable", lambda x: tuple(torch.sort(x, stable=True, dim=1)), (a, "i3"))
    case("argsort", lambda x: x.argsort(-1), a)
    case("argsort stable", lambda x: torch.argsort(x, dim=0, stable=True), (a, "i3"))
    case("topk", lambda x: tuple(x.topk(3)), a)
    case("topk dim", lambda x: tuple(torch.topk(x, 2, dim=0, largest=False)), a)
    case("kthvalue", lambda x: tuple(x.kthvalue(2)), a)
    case("kthvalue keep", lambda x: tuple(x.kthvalue(2, 0, True)), a)
    case("isin", lambda x, y: torch.isin(x, y), (a, "i9"), ((3,), "i9"))
    case("allclose", torch.allclose, a, a)
    case("equal", lambda x: torch.equal(x, x.clone()), a)
    case("unique", lambda x: torch.unique(x), (a, "i9"))
    case("bincount", lambda x: torch.bincount(x, minlength=9), ((7,), "i9"))
    case("nonzero", lambda x: torch.nonzero(x), (a, "b"))


_pointwise()
_reductions()
