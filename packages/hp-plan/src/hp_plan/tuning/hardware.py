"""Machines: memory, rates, and the network in levels, by which a collective is priced.

Note [Price of a collective]
A group of ranks is described by its counts: how many ranks it has in a host, how many such hosts in a rack, and so
on, innermost first. A ring on a level moves all but one n-th of the bytes past each rank, and every rank of a host
carries its share to the other hosts over a link of its own. So an all-gather of B gathered bytes over r ranks in each
of H hosts takes

    max(B (r - 1) / r / bandwidth_0, B (H - 1) / H / (r bandwidth_1)) + (r - 1) latency_0 + (H - 1) latency_1

which for one rank a host is the slower level's alone. In a pairwise exchange nobody carries for others: of the B bytes
that a rank sends, each other rank gets B / (r H), over the link that leads to it. Within one host both move the
same bytes over the same link, and have the same price; over hosts they differ by up to r. An all-reduce is a
reduce-scatter and an all-gather.

Prices never fall with the bytes, or with the number of ranks on an axis of a mesh (the distance of neighbours
stays): a host that a group fills in part counts like one that it fills.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from hp_offload.extend import parse_size
from hp_plan.reading.diagnostics import close_names

KINDS_OF_DEVICE = ("cpu", "cuda", "npu")
Number = Any
"""A number, or an array of them."""


@dataclass(frozen=True, slots=True)
class Level:
    """A level of the network.

    Attributes:
        name: such as "host".
        ranks: neighbours that it joins, those of the levels inside counted; None joins any number.
        latency: seconds of a message without content, from one rank to another.
        bandwidth: bytes a second of a rank, in each direction.
    """

    name: str
    ranks: int | None
    latency: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine, as many times as a plan needs it.

        Hardware.load("h100-8").memory        # 85899345920

    Attributes:
        name: its name.
        memory: bytes of a rank's device.
        overhead: bytes of them that are not a plan's: context, libraries, buffers of the communication.
        flops: operations a second of matrix products, by dtype, such as "bfloat16".
        bandwidth: bytes a second between the device's memory and its cores.
        launch: seconds from one kernel's end to the next one's begin.
        host: seconds that the host takes to issue an operation.
        levels: of the network, innermost first.
        kind: of its devices: "cuda" (default), "npu", or "cpu", which computes and issues operations in turn.
        device: the maker's name of the device that `probe` measured; "" of published figures.

    Raises:
        ValueError: an unknown kind, a number that is not positive, no level, or a level that is faster or smaller than
            one inside it.
    """

    name: str
    memory: int
    overhead: int
    flops: dict[str, float]
    bandwidth: float
    launch: float
    host: float
    levels: tuple[Level, ...] = field(default=())
    kind: str = "cuda"
    device: str = ""

    def __post_init__(self) -> None:
        rates = {"memory": self.memory, "bandwidth": self.bandwidth, **{f"flops.{k}": v for k, v in self.flops.items()}}
        for level in self.levels:
            rates[f"bandwidth of the level {level.name}"] = level.bandwidth
        for name, value in rates.items():
            if not value > 0:
                raise ValueError(f"Hardware {self.name}: {name} is more than 0, got {value}.")
        if self.kind not in KINDS_OF_DEVICE:
            raise ValueError(f"Hardware {self.name}: kind is one of {', '.join(KINDS_OF_DEVICE)}, got {self.kind!r}.")
        if not self.levels or not self.flops:
            raise ValueError(f"Hardware {self.name}: needs one level of its network, and the rate of one dtype.")
        for inner, outer in zip(self.levels, self.levels[1:], strict=False):
            larger = inner.ranks is not None and (
                outer.ranks is None or (outer.ranks > inner.ranks and outer.ranks % inner.ranks == 0)
            )
            if not larger or outer.bandwidth > inner.bandwidth or outer.latency < inner.latency:
                raise ValueError(
                    f"Hardware {self.name}: the level {outer.name} joins a multiple of the {inner.ranks} ranks of"
                    f" {inner.name}, at no more bandwidth and no less latency; got {outer} around {inner}."
                )

    @property
    def described(self) -> str:
        """Its rates for people, such as "cpu: float32 50 Gflop/s, memory 10 GB/s, host 2 GB/s"."""
        rates = [f"{name} {rate / 1e9:.3g} Gflop/s" for name, rate in self.flops.items()]
        levels = [f"{each.name} {each.bandwidth / 1e9:.3g} GB/s" for each in self.levels]
        return f"{self.name}: {', '.join([*rates, f'memory {self.bandwidth / 1e9:.3g} GB/s', *levels])}"

    @property
    def room(self) -> int:
        """Bytes of a rank's device for a plan."""
        return self.memory - self.overhead

    @classmethod
    def load(cls, name: str | PathLike[str]) -> Hardware:
        """Read a table: one of `machines()` by name, or a TOML file by its path.

        Raises:
            ValueError: there is neither, or the table lacks a key or has one too many.
        """
        known = machines()
        path = Path(name)
        if str(name) in known:
            text = resources.files("hp_plan.tuning").joinpath("machines", f"{name}.toml").read_text("utf-8")
        elif path.suffix == ".toml" and path.is_file():
            text = path.read_text("utf-8")
        else:
            close = close_names(str(name), known)
            meant = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
            raise ValueError(
                f"there is no hardware {str(name)!r}: {meant}There are {', '.join(known)}, and files that end in .toml."
            )
        try:
            return cls._read(tomllib.loads(text))
        except (tomllib.TOMLDecodeError, TypeError, KeyError) as error:
            raise ValueError(
                f"{name} is no table of hardware: {error}; take one that `probe` wrote as a model."
            ) from error

    @classmethod
    def _read(cls, table: dict[str, Any]) -> Hardware:
        levels = tuple(Level(**{"ranks": None, **level}) for level in table.pop("levels"))
        sizes = {key: 0 if table[key] == 0 else parse_size(table[key]) for key in ("memory", "overhead")}
        table = {key: value for key, value in table.items() if key not in sizes}
        return cls(**sizes, **table, levels=levels)

    def write(self, path: str | PathLike[str]) -> None:
        """Write the table that `load` reads back to an equal value."""
        import tomli_w

        table = asdict(self)
        table["levels"] = [
            {key: value for key, value in level.items() if value is not None} for level in table.pop("levels")
        ]
        for key in ("memory", "overhead"):
            table[key] = f"{table[key]} B" if table[key] else 0
        Path(path).write_text(tomli_w.dumps(table), encoding="utf-8")

    def rate(self, dtype: str) -> float:
        """Return the operations a second in a dtype.

        Raises:
            ValueError: the table does not have the dtype.
        """
        if dtype not in self.flops:
            raise ValueError(f"{self.name} has no rate of {dtype}, only of {', '.join(self.flops)}: add it to [flops].")
        return self.flops[dtype]


def machines() -> list[str]:
    """List the names of the tables that come with this package."""
    folder = resources.files("hp_plan.tuning").joinpath("machines")
    return sorted(each.name.removesuffix(".toml") for each in folder.iterdir() if each.name.endswith(".toml"))


def counts_of(hardware: Hardware, ranks: Iterable[int]) -> tuple[int, ...]:
    """Count a group's ranks by level, innermost first.

    >>> counts_of(Hardware.load("h100-8"), [0, 1, 8, 9])      # two hosts, two ranks in each
    (2, 2)

    Args:
        hardware: whose levels count.
        ranks: global, such as a process group lists them.

    Raises:
        ValueError: the outermost level joins fewer.
    """
    members, counts = sorted(set(ranks)), []
    inside = 1
    for level in hardware.levels:
        blocks: dict[int, int] = {}
        for rank in members:
            block = 0 if level.ranks is None else rank // level.ranks
            blocks[block] = blocks.get(block, 0) + 1
        most = max(blocks.values(), default=1)
        counts.append(-(-most // inside))
        inside *= counts[-1]
    _check_joined(hardware, len(members), inside)
    return tuple(counts)


def counts_of_axes(hardware: Hardware, axes: Sequence[tuple[Number, Number]]) -> tuple[Number, ...]:
    """Count the ranks by level of a group that spans axes of a mesh.

    >>> counts_of_axes(Hardware.load("h100-8"), [(4, 8)])     # every fourth rank, eight of them
    (2, 4)

    Args:
        hardware: whose levels count.
        axes: of each its stride (the distance of neighbours) and its size, innermost first; numbers, or arrays of one
            shape.

    Raises:
        ValueError: the outermost level joins fewer.
    """
    counts: list[Number] = []
    inside: Number = 1
    size: Number = 1
    joined: list[tuple[Number, Number]] = []
    for stride, ranks in axes:
        size = size * ranks
        if joined and np.all(joined[-1][0] * joined[-1][1] == stride):
            joined[-1] = joined[-1][0], joined[-1][1] * ranks
        else:
            joined.append((stride, ranks))
    for level in hardware.levels:
        members: Number = 1
        for stride, ranks in joined:
            within = ranks if level.ranks is None else np.minimum(ranks, -(-level.ranks // np.asarray(stride)))
            members = members * np.maximum(within, 1)
        counts.append(-(-members // inside))
        inside = inside * counts[-1]
    _check_joined(hardware, size, inside)
    return tuple(count if np.ndim(count) else int(count) for count in counts)


def _check_joined(hardware: Hardware, ranks: Number, joined: Number) -> None:
    if np.any(np.asarray(ranks) > np.asarray(joined)):
        outer = hardware.levels[-1]
        raise ValueError(
            f"{hardware.name} joins {outer.ranks} ranks ({outer.name}), but a group has {int(np.max(ranks))}: give it a"
            " level more, or fewer ranks."
        )


KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send", "recv")
"""Collectives that have a price."""


def seconds_of(hardware: Hardware, kind: str, size: Number, counts: Sequence[Number], *, calls: Number = 1) -> Number:
    """Return what collectives take: Note [Price of a collective].

    Args:
        hardware: whose network it is.
        kind: one of `KINDS`. A `recv` takes nothing: the peer's `send` is counted.
        size: bytes of all calls together, as observers are told of a call: the larger of a gather's or a scatter's
            two tensors, the one that is sent of others.
        counts: ranks by level, innermost first, as `counts_of` returns them.
        calls: how many there are.

    Returns:
        Seconds; an array where an argument is one.

    Raises:
        ValueError: an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"there is no price of {kind!r}, only of {', '.join(KINDS)}.")
    latency, each = _price(hardware, kind, counts)
    return calls * latency + size * each


def _price(hardware: Hardware, kind: str, counts: Sequence[Number]) -> tuple[Number, Number]:
    """Return the seconds of a call, and those of each byte."""
    latency: Number = 0.0
    each: Number = 0.0
    inside: Number = 1
    for level, count in zip(hardware.levels, counts, strict=True):
        count = np.asarray(count)
        there, around = count > 1, inside * count
        if kind == "all_to_all":
            latency = latency + (around - inside) * level.latency
            each = each + (around - inside) / level.bandwidth
        elif kind in ("send", "recv"):
            latency = np.where(there, level.latency, latency)
            each = np.where(there, 1 / level.bandwidth, each)
        else:
            latency = latency + (count - 1) * level.latency
            part = 1.0 if kind == "broadcast" else (count - 1) / (count * inside)
            each = np.where(there, np.maximum(each, part / level.bandwidth), each)
        inside = around
    if kind == "all_to_all":
        each = each / inside
    factor = {"all_reduce": 2.0, "recv": 0.0}.get(kind, 1.0)
    return factor * latency, factor * each
