"""`[communication]` and `[mesh] order`: what goes between hosts, how it travels, and which axes stay on a host.

Note [Bytes by level]
    Of a group of H hosts with L ranks each, an all-gather or a reduce-scatter of B bytes brings each rank
    B (H - 1) / (H L) from other hosts and B (L - 1) / L from its own, an all-reduce twice that. Of what a rank sends in
    an all-to-all, L - 1 parts of H L stay on its host, and L (H - 1) leave it. Of messages to a neighbour, one of L
    leaves. These are what two levels or a ring send; a backend may send more.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hp_offload.extend import size
from hp_onesided import Wire
from hp_plan.plan import ParallelPlan
from hp_plan.reading.diagnostics import Diagnostic, near_misses
from hp_plan.sections import AXES, MeshSection
from hp_plan.structure.memory import BYTES
from hp_plan.structure.outline import ModelOutline
from hp_platform import get_platform

WIRES = ("bf16", "e4m3", "int8")
_WIRED = "dp_replicate"
_CARRIED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


@dataclass(frozen=True)
class Spread:
    """Where the ranks of a group along axes are.

    Attributes:
        local: ranks on a host, the most of any.
        hosts: hosts, the most of any group.
        level: "host", "between" or "mixed": of all groups together, as `hp_dtensor.DeviceMesh.level` has it.
        even: each host of each group has as many.
    """

    local: int
    hosts: int
    level: str
    even: bool

    def split(self, kind: str, nbytes: float) -> tuple[float, float]:
        """Return the bytes that come to a rank from its host and from others: Note [Bytes by level].

        >>> Spread(2, 2, "mixed", True).split("all_reduce", 1000)
        (1000.0, 500.0)

        Args:
            kind: of the collective.
            nbytes: the larger of a gather's or a scatter's two tensors, the one that is sent of others.
        """
        local, hosts = self.local, self.hosts
        if kind == "all_to_all":
            return nbytes * (local - 1) / (local * hosts), nbytes * (hosts - 1) / hosts
        if kind in ("send", "recv"):
            if kind == "recv":  # counted by whoever sends
                return 0.0, 0.0
            crossing = nbytes / local if hosts > 1 else 0.0
            return nbytes - crossing, crossing
        factor = 2 if kind == "all_reduce" else 1
        return factor * nbytes * (local - 1) / local, factor * nbytes * (hosts - 1) / (hosts * local)


@dataclass(frozen=True)
class AxisTraffic:
    """What goes along axes in a step of a rank.

    Attributes:
        axes: along which the group lies.
        level: where its ranks are; "" where `mesh.ranks_per_host` is none.
        carrier: what its collectives go through: "memory", "two levels" or "backend", and the wire of gradients.
        reason: why.
        host: bytes that come from the rank's own host; all of them where hosts are not known.
        between: bytes that come from others.
    """

    axes: tuple[str, ...]
    level: str
    carrier: str
    reason: str
    host: float
    between: float


def spread_of(mesh: MeshSection, axes: Sequence[str]) -> Spread | None:
    """Find where the groups along axes are, with `mesh.ranks_per_host` consecutive ranks on a host; None without it.

    >>> spread_of(MeshSection(dp_shard=4, tp=2, ranks_per_host=4), ["dp_shard"])
    Spread(local=2, hosts=2, level='mixed', even=True)
    """
    if mesh.ranks_per_host is None:
        return None
    grid = mesh.rank_grid()
    names = tuple(mesh.axes)
    own = [names.index(axis) for axis in axes if axis in names]
    if not own:
        return None
    hosts = np.moveaxis(grid, own, range(-len(own), 0)).reshape(-1, math.prod(grid.shape[at] for at in own))
    hosts //= mesh.ranks_per_host
    hosts -= hosts.min(axis=1, keepdims=True)
    counted = [np.unique(line, return_counts=True)[1] for line in np.unique(hosts, axis=0)]  # few are different
    local, number = max(int(each.max()) for each in counted), max(len(each) for each in counted)
    level = "host" if number == 1 else "between" if local == 1 else "mixed"
    return Spread(local, number, level, all(len(set(each.tolist())) == 1 for each in counted))


def traffic(plan: ParallelPlan, sent: Mapping[tuple[str, tuple[str, ...]], float]) -> list[AxisTraffic]:
    """Tell for the axes of a plan what carries their collectives, why, and how many bytes stay on a host.

    Args:
        plan: the plan.
        sent: bytes of a rank's step by kind of collective and axes, as observers count them.
    """
    kinds: dict[tuple[str, ...], dict[str, float]] = {}
    for (kind, axes), nbytes in sent.items():
        own = kinds.setdefault(axes, {})
        own[kind] = own.get(kind, 0) + nbytes
    found = []
    for axes, each in kinds.items():
        spread = None if plan.mesh.ep > 1 and not set(axes) <= set(plan.mesh.axes) else spread_of(plan.mesh, axes)
        split = [(nbytes, 0.0) if spread is None else spread.split(kind, nbytes) for kind, nbytes in each.items()]
        carrier, reason = carrier_of_axis(plan, axes, spread, set(each))
        host, between = (sum(part[at] for part in split) for at in (0, 1))
        found.append(AxisTraffic(axes, "" if spread is None else spread.level, carrier, reason, host, between))
    return sorted(found, key=lambda each: -(each.host + each.between))


def carrier_of_axis(plan: ParallelPlan, axes: Sequence[str], spread: Spread | None, kinds: set[str]) -> tuple[str, str]:
    """Return what carries the collectives along axes, and why.

    Args:
        plan: the plan.
        axes: of the groups.
        spread: where they are, if that is known.
        kinds: of their collectives.
    """
    wire = plan.communication.wire.get(_WIRED) if tuple(axes) == (_WIRED,) else None
    after = f", gradients as {wire}" if wire else ""
    platform = get_platform()
    if plan.communication.transport == "backend":
        return f"backend{after}", "transport is backend"
    if platform.name != "torch" or platform.devices.kind != "cpu":
        return f"backend{after}", "only tensors of the host's memory have another carrier"
    if spread is None:
        return f"memory on one host, else backend{after}", "mesh.ranks_per_host is not given"
    if spread.level == "host":
        return "memory", "all ranks are on one host"
    if not kinds & set(_CARRIED):
        return "backend", "messages between hosts have no other way"
    if spread.level == "between":
        return f"backend{after}", "each rank is on another host"
    if not spread.even:
        return f"backend{after}", "hosts have different numbers of ranks"
    return f"two levels{after}", f"{spread.local} ranks on each of {spread.hosts} hosts"


def check_communication(plan: ParallelPlan) -> list[Diagnostic]:
    """Refuse wires that would carry nothing, or that could not win, and orders of other axes than the mesh's."""
    return [
        *_check_order(plan),
        *(each for pair in plan.communication.wire.items() for each in _check_wire(plan, *pair)),
    ]


def _check_wire(plan: ParallelPlan, axis: str, dtype: Any) -> list[Diagnostic]:
    key = f"communication.wire.{axis}"
    if axis not in (*AXES, "ep"):
        return [Diagnostic(key, f"there is no axis '{axis}'", near_misses(axis, AXES))]
    if dtype not in WIRES:
        return [Diagnostic(key, f"got {dtype!r}, expected one of {', '.join(WIRES)}", near_misses(str(dtype), WIRES))]
    if axis != _WIRED:
        message = f"got {dtype!r}, but a wire carries the gradients that are reduced over dp_replicate alone"
        return [Diagnostic(key, message, "leave it out, or make replicas: mesh.dp_replicate")]
    reduced = plan.fsdp.reduce_dtype or plan.fsdp.param_dtype or plan.run.dtype
    reason = more = ""
    if plan.mesh.dp_replicate == 1:
        reason, more = ", but there is one replica", ", or make mesh.dp_replicate larger"
    elif get_platform().name != "torch":
        reason = ", which this version has on PyTorch only"
    elif plan.run.deterministic:
        reason, more = " with run.deterministic, whose sums are exact", ", or run.deterministic"
    elif reduced == "float64":
        reason = ", but gradients are reduced in float64, which it would round"
        more = ", or make fsdp.reduce_dtype 'float32'"
    if reason:
        return [Diagnostic(key, f"got {dtype!r}{reason}", f"leave it out{more}")]
    spread = None if plan.mesh.order == "auto" else spread_of(plan.mesh, [_WIRED])  # else once the order is chosen
    return [host_axis(_WIRED, dtype)] if spread is not None and spread.level == "host" else []


def host_axis(axis: str, dtype: str) -> Diagnostic:
    """Refuse a wire along an axis whose ranks share a host."""
    message = f"got {dtype!r}, but the ranks of {axis} are on one host, where encoding takes longer than sending"
    return Diagnostic(f"communication.wire.{axis}", message, "leave it out")


def _check_order(plan: ParallelPlan) -> list[Diagnostic]:
    mesh, order = plan.mesh, plan.mesh.order
    if not order:
        return []
    if mesh.ep > 1:
        message = f"got {_said(order)} with mesh.ep = {mesh.ep}, which needs the usual order"
        return [Diagnostic("mesh.order", message, "leave it out")]
    if order == "auto":
        if mesh.ranks_per_host is None:
            return [Diagnostic("mesh.order", "got 'auto', but mesh.ranks_per_host is not given", "give it")]
        return []
    fix = f"write each of {', '.join(AXES)} once at most, outermost first"
    wrong = next((name for at, name in enumerate(order) if name not in AXES or name in order[:at]), None)
    if wrong is not None:
        twice = "twice" if wrong in AXES else f"which is no axis: {near_misses(wrong, AXES)}"
        return [Diagnostic("mesh.order", f"got {_said(order)} with {wrong!r} {twice}", fix)]
    if "pp" in order and order[0] != "pp":
        return [Diagnostic("mesh.order", f"got {_said(order)}: ranks of a stage are neighbours", fix)]
    if not _ascends(mesh.axis_order):
        message = f"got {_said(order)}: parameters are sharded over ranks of dp_shard and cp in ascending order"
        return [Diagnostic("mesh.order", message, "write dp_shard before cp")]
    return []


def _said(order: str | Sequence[str]) -> str:
    return repr(order) if isinstance(order, str) else str(list(order))


def estimate(plan: ParallelPlan, model: ModelOutline) -> dict[str, tuple[str, float]]:
    """Estimate what a rank's step sends along each axis: a kind of collective, and its bytes.

    Weights are gathered twice and gradients scattered once; tensor parallelism reduces activations four times a layer,
    and a ring of keys and values goes around three times. The kinds stand for these.

    Args:
        plan: sizes, dtypes, tokens.
        model: elements; and where its configuration tells them, layers, hidden size and heads.
    """
    mesh, config = plan.mesh, model.config
    width = BYTES[plan.fsdp.param_dtype or plan.run.dtype]
    reduced = BYTES[plan.fsdp.reduce_dtype or plan.fsdp.param_dtype or plan.run.dtype]
    elements = model.elements / (mesh.tp * mesh.pp)
    tokens = plan.data.batch_size / mesh.data_parallel * plan.data.sequence_length / mesh.cp
    activations = tokens * (getattr(config, "hidden_size", None) or 0) * width
    layers = (getattr(config, "num_hidden_layers", None) or 0) / mesh.pp
    heads = getattr(config, "num_attention_heads", None) or 1
    keys = (getattr(config, "num_key_value_heads", None) or heads) / heads
    shards = mesh.dp_shard * mesh.cp
    wire = plan.communication.wire.get(_WIRED)
    between = reduced if wire is None else 2 if wire == "bf16" else 1
    weights = elements * (2 * width + reduced)
    sent = {
        "pp": ("send", 2 * activations),
        "dp_replicate": ("all_reduce", elements * between / shards),
        "dp_shard": ("all_gather", weights),
        "cp": ("all_gather", weights / mesh.dp_shard + 6 * keys * activations * layers),
        "tp": ("all_reduce", 4 * activations * layers),
    }
    return {axis: sent[axis] for axis in mesh.axes}


def best_order(mesh: MeshSection, sent: Mapping[str, tuple[str, float]]) -> tuple[str, ...]:
    """Choose the order of a mesh's axes by which the fewest bytes go between hosts.

    >>> mesh = MeshSection(dp_shard=2, tp=2, ranks_per_host=2)
    >>> best_order(mesh, {"dp_shard": ("all_gather", 900.0), "tp": ("all_reduce", 100.0)})
    ('tp', 'dp_shard')

    Args:
        mesh: sizes, and `ranks_per_host`.
        sent: for each axis the kind of collective and its bytes, as `estimate` tells them.

    Returns:
        All axes, outermost first; the usual order where no other one is better. `pp` stays outermost, and `dp_shard`
        before `cp`.
    """
    names = tuple(mesh.axes)
    first, rest = (names[:1], names[1:]) if names[0] == "pp" else ((), names)
    orders = [(*first, *inner) for inner in itertools.permutations(rest)]
    return min(filter(_ascends, orders), key=lambda order: between_hosts(replace(mesh, order=order), sent))


def _ascends(order: Sequence[str]) -> bool:
    """Tell whether ranks ascend along the axes that parameters are sharded over, taken as one."""
    return not {"dp_shard", "cp"} <= set(order) or order.index("dp_shard") < order.index("cp")


def between_hosts(mesh: MeshSection, sent: Mapping[str, tuple[str, float]]) -> float:
    """Sum the bytes that come to a rank from other hosts.

    Args:
        mesh: with `ranks_per_host`.
        sent: as for `best_order`.
    """
    spreads = {axis: spread_of(mesh, [axis]) for axis in sent}
    return sum(spread.split(*sent[axis])[1] for axis, spread in spreads.items() if spread is not None)


def with_order(plan: ParallelPlan, model: ModelOutline) -> ParallelPlan:
    """Choose the order of `[mesh] order = "auto"`; a plan with another one stays as it is.

    Args:
        plan: the plan.
        model: the outline of its model.
    """
    if plan.mesh.order != "auto" or plan.mesh.ranks_per_host is None:
        return plan
    return replace(plan, mesh=replace(plan.mesh, order=best_order(plan.mesh, estimate(plan, model))))


def lines(found: Sequence[AxisTraffic]) -> list[str]:
    """Write for people what goes along axes."""
    told = []
    for each in found:
        where = f" ({each.level})" if each.level else ""
        nbytes = f"{size(round(each.host + each.between))} a step"
        if each.level:
            nbytes += f", {size(round(each.between))} of it from other hosts"
        told.append(f"{' x '.join(each.axes)}{where}: {nbytes}; through {each.carrier}, as {each.reason}")
    return told


def notes(plan: ParallelPlan, model: ModelOutline) -> list[str]:
    """Estimate, for a plan that says how many ranks share a host, what goes along its axes, and by another order.

    Args:
        plan: without anything wrong.
        model: the outline of its model.
    """
    if plan.mesh.ranks_per_host is None or plan.mesh.world_size == 1:
        return []
    chosen, sent = with_order(plan, model), estimate(plan, model)
    found = traffic(chosen, {(kind, (axis,)): nbytes for axis, (kind, nbytes) in sent.items()})
    told = [f"about {line}" for line in lines(found)]
    if chosen.mesh.order:
        usual, now = (size(round(between_hosts(mesh, sent))) for mesh in (replace(plan.mesh, order=()), chosen.mesh))
        told.append(
            f"the axes are in the order {', '.join(chosen.mesh.order)}: about {now} a step come from other hosts,"
            f" {usual} in the usual order"
        )
    return told


def wire_of(plan: ParallelPlan) -> Wire | None:
    """Return the wire of gradients between replicas."""
    dtype = plan.communication.wire.get(_WIRED)
    return None if dtype is None else Wire(dtype)  # type: ignore[arg-type]
