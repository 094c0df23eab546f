"""Linear layers with the collective before or after them on PyTorch: by a device's operator, in chunks of rows, plain.

All is done with the dim that is gathered or scattered as the first one. Never run on more than one GPU or NPU: the
calls of CUDA's operators are tested by their schemas, those of torch_npu on the simulated NPU.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from hp_onesided.torch.port import PLAIN
from hp_platform import get_platform

CHUNKS = 4
"""Parts of rows at most: the exchange of the first, or of the last, is under no product."""
CHUNK_ROWS = 64
"""Rows that the product of a chunk has at least; of few, a device has no work, and a library another order of sums."""
_CUDA = {"gather": "fused_all_gather_matmul", "scatter": "fused_matmul_reduce_scatter"}
_NPU = {"gather": "npu_all_gather_base_mm", "scatter": "npu_mm_reduce_scatter_base"}

T = torch.Tensor
Group = torch.distributed.ProcessGroup


def plain(tensor: T) -> bool:
    """Tell a tensor or a parameter of torch itself."""
    return type(tensor) in PLAIN


def operator(op: str, device: str) -> tuple[str, str | None]:
    """Name a device's operator, and why it can't be called."""
    if device == "npu":
        name = f"torch_npu.{_NPU[op]}"
        return name, None if hasattr(_torch_npu(), _NPU[op]) else f"this torch_npu has no {_NPU[op]}"
    importlib.import_module("torch.distributed._symmetric_memory")  # defines the operators
    name = f"torch.ops.symm_mem.{_CUDA[op]}"
    return name, None if hasattr(torch.ops.symm_mem, _CUDA[op]) else f"this torch has no {name}"


@functools.cache
def generation() -> str:
    """Tell an A3 from an A2 by the name of the device."""
    return "A3" if str(torch.npu.get_device_name()).startswith("Ascend910_93") else "A2"  # type: ignore[attr-defined]


def gathered(x: T, w: T, b: T | None, group: Group, dim: int, kind: str) -> T:
    """Gather and multiply."""
    return _Gathered.apply(x.movedim(dim, 0), w, b, group, kind).movedim(0, dim)


def scattered(x: T, w: T, b: T | None, group: Group, dim: int, kind: str) -> T:
    """Multiply and reduce-scatter."""
    return _Scattered.apply(x.movedim(dim, 0), w, b, group, kind).movedim(0, dim)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: T, w: T, b: T | None, group: Group, kind: str) -> T:
        y, whole = _gather(x.contiguous(), w, b, group, kind)
        ctx.save_for_backward(whole if ctx.needs_input_grad[1] else None, w)
        ctx.group, ctx.kind = group, kind
        return y

    @staticmethod
    def backward(ctx: Any, grad: T) -> Any:
        _refuse_second("gathered_linear")
        whole, w = ctx.saved_tensors
        of_x, of_w, of_b = ctx.needs_input_grad[:3]
        grad = grad.contiguous()
        return (
            _scatter(grad, w.t(), ctx.group, ctx.kind) if of_x else None,
            grad.flatten(0, -2).t() @ whole.flatten(0, -2) if of_w else None,
            grad.flatten(0, -2).sum(0) if of_b else None,
            None,
            None,
        )


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: T, w: T, b: T | None, group: Group, kind: str) -> T:
        x = x.contiguous()
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, w)
        ctx.group, ctx.kind = group, kind
        y = _scatter(x, w, group, kind)
        return y if b is None else y + b

    @staticmethod
    def backward(ctx: Any, grad: T) -> Any:
        _refuse_second("scattered_linear")
        x, w = ctx.saved_tensors
        of_x, of_w, of_b = ctx.needs_input_grad[:3]
        grad = grad.contiguous()
        of_input, of_weight = None, None
        if of_x or of_w:
            of_input, whole = _gather(grad, w.t(), None, ctx.group, ctx.kind)
            of_weight = whole.flatten(0, -2).t() @ x.flatten(0, -2) if of_w else None
        return of_input if of_x else None, of_weight, grad.flatten(0, -2).sum(0) if of_b else None, None, None


def _refuse_second(what: str) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{what}: a backward that records a graph (create_graph=True) goes through it, which has no second"
            " derivative; use the collective and the product one after the other"
        )


def _gather(x: T, w: T, b: T | None, group: Group, kind: str) -> tuple[T, T]:
    """Return the product of the gathered rows, and the gathered rows."""
    platform = get_platform()
    ranks, collectives = platform.groups.size(group), platform.collectives
    rows, features = (ranks * x.shape[0], *x.shape[1:-1]), (x.shape[-1], w.shape[0])
    if kind == "kernel":
        y, whole = _gather_by_kernel(x.flatten(0, -2), w.t(), group, ranks)
        y, whole = y.view(*rows, features[1]), whole.view(*rows, features[0])
        return (y if b is None else y + b), whole
    whole = x.new_empty(*rows, features[0])
    count = _chunks(x.shape[0], x.shape[1:-1], ranks)
    if kind == "plain" or count < 2:
        collectives.all_gather(whole, x, group=group)
        return F.linear(whole, w, b), whole
    y = x.new_empty(*rows, features[1])
    parts = x.chunk(count)
    pieces = [part.new_empty(ranks, *part.shape) for part in parts]
    waiting = collectives.all_gather(pieces[0], parts[0], group=group, async_op=True)
    begin = 0
    for index, (part, piece) in enumerate(zip(parts, pieces, strict=True)):
        waiting.wait()
        if index + 1 < len(parts):
            waiting = collectives.all_gather(pieces[index + 1], parts[index + 1], group=group, async_op=True)
        own = slice(begin, begin + part.shape[0])
        y.unflatten(0, (ranks, -1))[:, own] = F.linear(piece, w, b)
        whole.unflatten(0, (ranks, -1))[:, own] = piece
        begin += part.shape[0]
    return y, whole


def _scatter(x: T, w: T, group: Group, kind: str) -> T:
    """Return this rank's rows of the product, summed over the ranks."""
    platform = get_platform()
    ranks, collectives = platform.groups.size(group), platform.collectives
    rows = x.shape[0] // ranks
    shape = (rows, *x.shape[1:-1], w.shape[0])
    if kind == "kernel":
        return _scatter_by_kernel(x.flatten(0, -2), w.t(), group, ranks).view(shape)
    out = x.new_empty(shape)
    count = _chunks(rows, x.shape[1:-1], ranks)
    if kind == "plain" or count < 2:
        collectives.reduce_scatter(out, F.linear(x, w), group=group)
        return out
    under_way = []
    for part, target in zip(x.unflatten(0, (ranks, rows)).chunk(count, 1), out.chunk(count), strict=True):
        product = F.linear(part, w).contiguous()
        handle = collectives.reduce_scatter(target, product, group=group, async_op=True)
        under_way.append((handle, product))  # which is read until then
    for handle, _ in under_way:
        handle.wait()
    return out


def _chunks(rows: int, others: Sequence[int], ranks: int) -> int:
    return min(CHUNKS, rows, rows * math.prod(others) * ranks // CHUNK_ROWS)


def _gather_by_kernel(x: T, w: T, group: Group, ranks: int) -> tuple[T, T]:
    """Return the product of all ranks' rows with ``w`` of (in, out) features, and the rows."""
    if _device(x) == "npu":
        return _torch_npu().npu_all_gather_base_mm(
            x, w, _hccl_name(group), ranks, bias=None, gather_index=0, gather_output=True, comm_turn=0
        )
    whole, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(x, [w], 0, group.group_name)
    return y, whole


def _scatter_by_kernel(x: T, w: T, group: Group, ranks: int) -> T:
    if _device(x) == "npu":
        return _torch_npu().npu_mm_reduce_scatter_base(
            x, w, _hccl_name(group), ranks, reduce_op="sum", bias=None, comm_turn=0
        )
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w, "sum", 0, group.group_name)


def _device(tensor: T) -> str:
    return tensor.device.type


def _hccl_name(group: Group) -> str:
    """Name the group's communicator on this rank's device: torch_npu takes a rank modulo the devices for that."""
    backend: Any = group._get_backend(torch.device("npu"))
    return backend.get_hccl_comm_name(torch.npu.current_device())  # type: ignore[attr-defined]


def _torch_npu() -> Any:
    return importlib.import_module("torch_npu")
