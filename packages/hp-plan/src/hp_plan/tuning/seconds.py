"""Seconds of a step, from what a rank's trace counts and a machine's rates.

Note [Seconds of a step]
Kernels take their measured seconds where there are any, and else what bounds them: operations over their rate for
matrix products and attention, the bytes of their tensors over the memory's bandwidth for all others, and the launch.
The host issues operations beside that, and the longer of the two counts; on a CPU it does both in turn.
Messages of data parallel groups travel beside compute, so that only what is longer than all compute is exposed; those
of tp, cp, ep and pp are waited for. Stages wait for each other: the bubble is a share of pp - 1 micro-batches, which
the schedule decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hp_plan.dry.trace import Trace
from hp_plan.tuning.hardware import Hardware, counts_of_axes, seconds_of

Number = Any
"""A number, or an array of them."""
Key = tuple[Any, ...]

_TENSOR = re.compile(r"(\w+)\[([\d,]*)\|")
_BYTES = {
    **dict.fromkeys(("float64", "int64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("bfloat16", "float16", "int16"), 2),
    **dict.fromkeys(("bool", "int8", "uint8"), 1),
}
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "attention", "convolution")
_OPTIMIZERS = ("_foreach_", "_fused_adam", "_fused_sgd")
_OVERLAPPED = frozenset({"dp_replicate", "dp_shard", "efsdp"})


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds of one step on the slowest rank.

    Attributes:
        compute: of forward and backward.
        optimizer: of its step, and of clipping.
        exposed: of messages that compute does not hide, by the axes of their group, such as `"dp_shard x cp"`.
        bubble: in which stages wait for each other.
    """

    compute: float
    optimizer: float
    exposed: Mapping[str, float]
    bubble: float

    @property
    def parts(self) -> dict[str, float]:
        """Each part by its name, messages by their axes."""
        return {"compute": self.compute, "optimizer": self.optimizer, **self.exposed, "bubble": self.bubble}

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self.parts.values())


def traffic(key: str) -> int:
    """Return the bytes that a kernel moves: its tensors, and a result like the largest of them.

    >>> traffic("aten.mul.Tensor(float32[2,3|3,1], bfloat16[3|1])")
    54

    Args:
        key: of a trace; tensors stand in it as `dtype[shape|strides]`.
    """
    sizes = [
        _BYTES.get(dtype, 4) * int(np.prod([int(each) for each in shape.split(",") if each], dtype=np.int64))
        for dtype, shape in _TENSOR.findall(key)
    ]
    return sum(sizes) + max(sizes, default=0)


def _operator(key: str) -> str:
    return key.partition("(")[0]


def _is_product(key: str) -> bool:
    words = re.split(r"[._]+", _operator(key))
    return any(word in _PRODUCTS for word in words)


def _is_optimizer(key: str) -> bool:
    return any(part in _operator(key) for part in _OPTIMIZERS)


def count_work(trace: Trace, kernels: Mapping[str, float] | None = None) -> dict[Key, float]:
    """Add up what takes time in a trace.

    Args:
        trace: of one rank.
        kernels: key of a kernel -> measured seconds of one call; what is not in it goes by the machine's rates.

    Returns:
        `("flops",)`, `("moved",)` in bytes, `("kernels",)` and `("operations",)`; `("measured",)` in seconds, of
        kernels that the others leave out; the same of the optimizer, as `("moved", "optimizer")`; and
        `("calls", kind, axes)` and `("bytes", kind, axes)` of collectives.
    """
    measured = {} if kernels is None else kernels
    work: dict[Key, float] = {("flops",): float(trace.flops), ("operations",): float(trace.operations)}

    def add(name: Key, value: float) -> None:
        work[name] = work.get(name, 0.0) + value

    products = unmeasured = 0
    for key, calls in trace.kernels.items():
        part = ("optimizer",) if _is_optimizer(key) else ()
        product = _is_product(key)
        products += calls if product else 0
        if key in measured:
            add(("measured", *part), calls * measured[key])
            continue
        unmeasured += calls if product else 0
        add(("kernels", *part), calls)
        if not product:
            # What an optimizer reads it writes, but for gradients.
            add(("moved", *part), calls * traffic(key))
    if products:
        work["flops",] *= unmeasured / products
    for (kind, _, axes), count in trace.collectives.items():
        add(("calls", kind, axes), count.calls)
        add(("bytes", kind, axes), count.bytes)
    return work


def bubble_share(schedule: str, pp: Number, micro_batches: Number, stages_a_rank: Number = 1) -> Number:
    """Return the bubble as a part of the seconds that a rank computes for one micro-batch.

    It is exact for stages of equal seconds whose backward takes twice a forward's. `zbv` needs twice as many
    micro-batches as stages to fill all its gaps but a sixth of each.

    >>> bubble_share("1f1b", 4, 8), bubble_share("interleaved", 4, 8, 2)
    (3.0, 1.5)

    Args:
        schedule: `"1f1b"`, `"interleaved"`, `"zbv"`, or `""` without stages.
        pp: ranks of the pipeline.
        micro_batches: of a step.
        stages_a_rank: of `interleaved`.
    """
    if schedule == "zbv":
        return (pp - 1) * np.where(np.asarray(micro_batches) >= 2 * np.asarray(pp), 1 / 6, 1 / 3)
    return (pp - 1) / (stages_a_rank if schedule == "interleaved" else 1) * (1.0 if schedule else 0.0)


def strides_of(mesh: Mapping[str, Number]) -> dict[str, tuple[Number, Number]]:
    """Return the stride and size of each axis: tp innermost, then cp, dp_shard, dp_replicate and pp; ep and the rest.

    >>> strides_of({"dp_replicate": 1, "dp_shard": 4, "cp": 1, "tp": 2, "pp": 2, "ep": 4})["efsdp"]
    (4, 2)

    Args:
        mesh: the size of each axis, a number or an array.
    """
    strides, inside = {}, 1
    for axis in ("tp", "cp", "dp_shard", "dp_replicate", "pp"):
        strides[axis] = inside, mesh[axis]
        inside = inside * mesh[axis]
    tp, ep = mesh["tp"], mesh["ep"]
    # Experts are spread over tp's ranks too, or cut over them: Note [Two views of one world] in features/experts.
    first = np.where(np.asarray(ep) % tp == 0, 1, tp)
    rest = mesh["dp_shard"] * mesh["cp"] * tp // (first * ep)
    strides["ep"], strides["efsdp"] = (first, ep), (first * ep, rest)
    return {axis: (_plain(stride), _plain(size)) for axis, (stride, size) in strides.items()}


def _plain(value: Number) -> Number:
    return value if np.ndim(value) else int(value)


@dataclass(frozen=True, eq=False)
class Priced:
    """Seconds of many plans: as `Seconds`, but each an array.

    Attributes:
        compute: a number a plan.
        optimizer: a number a plan.
        exposed: by axes, a number a plan.
        bubble: a number a plan.
    """

    compute: Number
    optimizer: Number
    exposed: Mapping[str, Number]
    bubble: Number

    @property
    def total(self) -> Number:
        """All of them, a number a plan."""
        return self.compute + self.optimizer + sum(self.exposed.values()) + self.bubble

    def one(self, index: int = 0) -> Seconds:
        """Return the seconds of one plan."""

        def at(value: Number) -> float:
            value = np.atleast_1d(value)
            return float(value[index if len(value) > 1 else 0])

        exposed = {axes: at(value) for axes, value in self.exposed.items()}
        return Seconds(at(self.compute), at(self.optimizer), {k: v for k, v in exposed.items() if v}, at(self.bubble))

    def slower(self, other: Priced) -> Priced:
        """Return of each plan the seconds of the slower of two ranks."""
        mine = self.total >= other.total
        return Priced(
            np.where(mine, self.compute, other.compute),
            np.where(mine, self.optimizer, other.optimizer),
            {
                axes: np.where(mine, self.exposed.get(axes, 0.0), other.exposed.get(axes, 0.0))
                for axes in dict.fromkeys((*self.exposed, *other.exposed))
            },
            np.where(mine, self.bubble, other.bubble),
        )


def price(
    work: Mapping[Key, Number],
    hardware: Hardware,
    mesh: Mapping[str, Number],
    *,
    dtype: str,
    micro_batches: Number = 1,
    schedule: str = "",
    stages_a_rank: int = 1,
    overlapped: bool = True,
) -> Priced:
    """Price what a rank does in a step: Note [Seconds of a step].

    Args:
        work: as `count_work` returns it; numbers, or arrays of one plan an entry.
        hardware: the machine.
        mesh: the size of each axis.
        dtype: that matrix products are computed in.
        micro_batches: of a step.
        schedule: of the stages; `""` without.
        stages_a_rank: of `interleaved`.
        overlapped: count what data parallel messages take beyond compute; False takes them to be hidden, for a bound.

    Raises:
        ValueError: the machine has no rate of the dtype, a collective has no price, or a group has an unknown axis.
    """

    def of(*name: Any) -> Number:
        return work.get(name, 0.0)

    rate = hardware.rate(dtype)
    device = of("flops") / rate + of("moved") / hardware.bandwidth + of("kernels") * hardware.launch + of("measured")
    issued = of("operations") * hardware.host
    compute = np.maximum(device, issued) if hardware.kind != "cpu" else device + issued
    moved, launched = of("moved", "optimizer"), of("kernels", "optimizer")
    optimizer = moved / hardware.bandwidth + launched * hardware.launch + of("measured", "optimizer")
    strides = strides_of(mesh)
    hidden: dict[str, Number] = {}
    exposed: dict[str, Number] = {}
    for name in work:
        if name[0] != "bytes":
            continue
        _, kind, axes = name
        unknown = [axis for axis in axes if axis not in strides]
        if unknown:
            raise ValueError(f"a group of {kind} spans {unknown[0]!r}, expected axes among {', '.join(strides)}.")
        counts = counts_of_axes(hardware, [strides[axis] for axis in _inside_out(axes)])
        seconds = seconds_of(hardware, kind, of(*name), counts, calls=of("calls", kind, axes))
        target = hidden if _OVERLAPPED & set(axes) else exposed
        target[" x ".join(axes)] = target.get(" x ".join(axes), 0.0) + seconds
    waited = compute + sum(exposed.values())
    share = bubble_share(schedule, mesh["pp"], micro_batches, stages_a_rank)
    if overlapped and hidden:
        beside = sum(hidden.values())
        part = np.maximum(0.0, beside - compute) / np.where(np.asarray(beside) > 0, beside, 1.0)
        exposed |= {axes: seconds * part for axes, seconds in hidden.items()}
    return Priced(compute, optimizer, exposed, share * waited / micro_batches)


def _inside_out(axes: Iterable[str]) -> list[str]:
    order = ("tp", "ep", "cp", "dp_shard", "efsdp", "dp_replicate", "pp")
    return sorted(axes, key=order.index)
