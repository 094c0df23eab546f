"""Linear layers fused with the all-gather before them or the reduce-scatter after them (async tensor parallelism)."""

from __future__ import annotations

import math
from typing import Any, Literal

from hp_onesided.port import Group, Tensor, fused
from hp_platform import get_platform, get_process_group_ranks
from hp_platform.extend import level_of

Kind = Literal["kernel", "chunks", "plain"]
Operation = Literal["gather", "scatter"]

MC2_RANKS = {"A2": (2, 4, 8), "A3": (2, 4, 8, 16, 32)}
"""Numbers of ranks that an NPU's operators take, by generation."""
MC2_FEATURES = range(256, 65535)
"""Numbers of input features that they take."""
MC2_SCATTER_RANKS = 16
"""From this number of ranks on, their reduce-scatter fails."""


def gathered_linear(
    x: Tensor, w: Tensor, b: Tensor | None = None, *, group: Group, dim: int, kind: Kind | None = None
) -> Tensor:
    """Gather an input along a dim and multiply it, the gather of one part under the product of another where that pays.

    It is ``linear(all_gather(x, dim), w, b)``: what a column-wise sharded layer does with a sequence that is sharded.
    In backward the gradient of ``x`` comes by `scattered_linear`, its transpose: that of this rank's part, summed over
    the ranks. The gathered input is kept for the gradient of ``w``.

    Args:
        x: this rank's part, (..., in features), of the same shape on every rank.
        w: (out features, in features); each rank has its own rows.
        b: (out features), or None.
        group: the ranks that ``x`` is gathered from.
        dim: of ``x``; not the last, which has the features.
        kind: how it is done; default None: what `choose` says. "chunks" exchanges and sums as "plain" does, bit by bit;
            its products of fewer rows have the bits of the whole one where the library's order of sums does not depend
            on the number of rows (on CPUs with MKL: chunks of a multiple of 8 rows, features in multiples of 64).
            "kernel" has the device's own bits.

    Returns:
        (..., out features), `dim` times the number of ranks.

    Raises:
        ValueError: shapes that don't fit, ``dim`` is the last one, or "kernel" where it can't be, with the reason.
        TypeError: different dtypes, or a tensor that is no plain one, such as a DTensor.
        RuntimeError: (in backward) with ``create_graph=True``.

    Source: Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning
    Models", ASPLOS 2023.
    """
    dim = _checked("gathered_linear", x, w, b, dim)
    ranks = get_platform().groups.size(group)
    rows = math.prod(x.shape[:-1]) * ranks
    kind = _kind("gather", kind, x, (rows, w.shape[1], w.shape[0]), group)
    return fused().gathered(x, w, b, group, dim, kind)


def scattered_linear(
    x: Tensor, w: Tensor, b: Tensor | None = None, *, group: Group, dim: int, kind: Kind | None = None
) -> Tensor:
    """Multiply an input and reduce-scatter the result along a dim, one part under the product of the next.

    It is ``reduce_scatter(linear(x, w), dim) + b``: what a row-wise sharded layer does whose output is a sharded
    sequence. In backward the gradient of ``x`` comes by `gathered_linear`, its transpose. The gradient of ``b`` is that
    of this rank's part of the output: its sum over the ranks is up to the caller.

    Args:
        x: (..., in features), of the same shape on every rank; each rank has its own features.
        w: (out features, in features), this rank's columns.
        b: (out features), the same on every rank, or None.
        group: the ranks whose products are summed.
        dim: of ``x``, whose size the number of ranks divides; not the last, which has the features.
        kind: as of `gathered_linear`.

    Returns:
        This rank's part, (..., out features), `dim` divided by the number of ranks.

    Raises:
        ValueError: shapes that don't fit, ``dim`` is the last one, or "kernel" where it can't be, with the reason.
        TypeError: different dtypes, or a tensor that is no plain one, such as a DTensor.
    """
    dim = _checked("scattered_linear", x, w, b, dim)
    ranks = get_platform().groups.size(group)
    if x.shape[dim] % ranks:
        raise ValueError(f"scattered_linear: {ranks} ranks do not divide dim {dim} of shape {list(x.shape)}")
    kind = _kind("scatter", kind, x, (math.prod(x.shape[:-1]), w.shape[1], w.shape[0]), group)
    return fused().scattered(x, w, b, group, dim, kind)


def choose(
    device: Any, shape: tuple[int, int, int], dtype: Any, group: Group, *, op: Operation = "gather"
) -> tuple[Kind, str]:
    """Choose how a linear layer and its collective are done, on all ranks alike.

    Example:
        >>> choose("cpu", (4096, 1024, 4096), torch.bfloat16, group)
        ('plain', 'on a CPU chunks were measured to gain nothing: 1.03 to 1.16 of the time of gather, then product')

    Args:
        device: the tensors', or its kind, "cpu", "cuda" or "npu".
        shape: rows of all ranks, input features, output features of this rank's product.
        dtype: of the tensors.
        group: the ranks.
        op: "gather" before the product, or "scatter" after it.

    Returns:
        "kernel", "chunks" or "plain", and why: the operator's name, or what stands against it.
    """
    where, ranks = str(device).partition(":")[0], get_platform().groups.size(group)
    if ranks == 1:
        return "plain", "one rank exchanges nothing"
    if where == "cpu":
        return "plain", (
            "on a CPU chunks were measured to gain nothing: 1.03 to 1.16 of the time of gather, then product"
        )
    if where not in ("cuda", "npu"):
        return "plain", f"tensors on {where!r} are not sent while others are multiplied"
    name, lacking = fused().operator(op, where)
    if where == "npu":
        lacking = mc2_limit(op, shape, _name(dtype), ranks, fused().generation()) or lacking
    elif lacking is None and _name(dtype) not in ("float16", "bfloat16", "float32"):
        lacking = f"{name} takes float16, bfloat16 and float32, got {_name(dtype)}"
    elif lacking is None and level_of(get_process_group_ranks(group)) != "host":
        lacking = f"{name} needs all ranks on one host"
    return ("kernel", name) if lacking is None else ("chunks", lacking)


def mc2_limit(op: Operation, shape: tuple[int, int, int], dtype: str, ranks: int, generation: str) -> str | None:
    """Name the limit of an NPU's fused operators that a call would violate; None if there is none.

    Example:
        >>> mc2_limit("gather", (4096, 128, 512), "bfloat16", 4, "A2")
        'npu_all_gather_base_mm takes 256 to 65534 input features, got 128'

    Args:
        op: "gather" or "scatter".
        shape: rows of all ranks, input features, output features.
        dtype: its name, such as "bfloat16".
        ranks: of the group.
        generation: "A2" or "A3".
    """
    name = "npu_all_gather_base_mm" if op == "gather" else "npu_mm_reduce_scatter_base"
    rows, into, out = shape
    if dtype not in ("float16", "bfloat16"):
        return f"{name} takes float16 and bfloat16, got {dtype}"
    if into not in MC2_FEATURES:
        return f"{name} takes {MC2_FEATURES.start} to {MC2_FEATURES.stop - 1} input features, got {into}"
    if ranks not in MC2_RANKS[generation]:
        return f"{name} takes {MC2_RANKS[generation]} ranks on {generation}, got {ranks}"
    if op == "scatter" and ranks >= MC2_SCATTER_RANKS:
        return f"{name} fails from {MC2_SCATTER_RANKS} ranks on, got {ranks}"
    if not rows or not out:
        return f"{name} takes no product without elements, got {rows} rows and {out} output features"
    return None


def _kind(op: Operation, kind: Kind | None, x: Tensor, shape: tuple[int, int, int], group: Group) -> Kind:
    if kind not in (None, "kernel", "chunks", "plain"):
        raise ValueError(f'kind is one of "kernel", "chunks", "plain" and None, got {kind!r}')
    if kind in ("chunks", "plain"):
        return kind
    chosen, reason = choose(x.device, shape, x.dtype, group, op=op)
    if kind == "kernel" and chosen != "kernel":
        raise ValueError(f'kind="kernel" can\'t be done: {reason}. Leave kind out')
    return chosen


def _name(dtype: Any) -> str:
    return str(dtype).rpartition(".")[2]


def _checked(what: str, x: Tensor, w: Tensor, b: Tensor | None, dim: int) -> int:
    """Check the operands, and return the dim counted from the first one."""
    for name, tensor in (("x", x), ("w", w), ("b", b)):
        if tensor is not None and not fused().plain(tensor):
            raise TypeError(f"{what}: {name} is a {type(tensor).__name__}; pass a plain tensor, such as its to_local()")
    last = len(x.shape) - 1
    if last < 1 or not -last - 1 <= dim <= last or dim % (last + 1) == last:
        raise ValueError(
            f"{what}: dim is one of {list(x.shape)} before the last, which has the features, got dim={dim}"
        )
    if len(w.shape) != 2 or w.shape[1] != x.shape[-1]:
        raise ValueError(f"{what}: w is (out features, {x.shape[-1]}) for x of {list(x.shape)}, got {list(w.shape)}")
    if b is not None and tuple(b.shape) != (w.shape[0],):
        raise ValueError(f"{what}: b is ({w.shape[0]},) for w of {list(w.shape)}, got {list(b.shape)}")
    different = {_name(tensor.dtype) for tensor in (x, w, b) if tensor is not None}
    if len(different) > 1:
        raise TypeError(f"{what}: operands are of one dtype, got {', '.join(sorted(different))}")
    return dim % (last + 1)
