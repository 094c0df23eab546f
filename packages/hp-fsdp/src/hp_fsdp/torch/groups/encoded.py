"""EncodedBucket: parameters that are gathered as the bytes that their classes make of them, all in one collective.

See Note [Encoded parameters] in `hp_fsdp.torch.groups.encoding`. The gathered buffer is one of bytes. It holds, one
after the other, the tensors that are handed to ``fsdp_post_all_gather``, each whole. What that returns is made once,
and shows the buffer's bytes whenever they are there, as in Note [Three buffers] of `hp_fsdp.torch.groups.bucket`. A
rank's piece has its rows of all these tensors, so the pieces are copied to their places when they have arrived.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hp_dtensor import DeviceMesh
from hp_fsdp.torch.groups.bucket import FREED, Bucket, Copied
from hp_fsdp.torch.groups.encoding import Encoding
from hp_platform import collectives
from hp_platform.torch.internals import get_version, set_versions, without_torch_function


@dataclass(slots=True)
class Gathered:
    """A tensor that is gathered for a parameter.

    Attributes:
        dtype: of its elements.
        rest: its shape without the rows.
        row: bytes of a row.
        rows: number of rows on each rank.
        start: of the whole tensor in the gathered buffer, in bytes.
    """

    dtype: torch.dtype
    rest: tuple[int, ...]
    row: int
    rows: tuple[int, ...]
    start: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.row * sum(self.rows)


class EncodedBucket(Bucket):
    """A bucket of encoded parameters, which are cut between rows.

    Attributes:
        wants_amax: there are parameters whose scale is of the whole parameter.
        amax: by parameter; None before the first reduction.
        fresh: `amax` is of the present values.
        gathered: what is gathered for each parameter.
        metadata: what each parameter's extension wants back.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.encodings: list[Encoding] = [each.encoding for each in self.parameters if each.encoding is not None]
        self.wants_amax = any(self._takes_amax(index) for index in range(len(self.parameters)))
        self.amax: torch.Tensor | None = None
        self.fresh = False
        self.gathered: list[list[Gathered]] = []
        self.metadata: list[Any] = []

    def _takes_amax(self, index: int) -> bool:
        encoding, parameter = self.encodings[index], self.parameters[index]
        return encoding.wants_amax(encoding.around(torch.empty((0, *parameter.shape[1:]), dtype=self.dtype)))

    def is_aliased(self) -> bool:
        return False

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the gathered buffer; where an extension may communicate, those of the elements until it is known."""
        if not self.gathered and self.wants_amax:
            self.gathered = self._describe(*self._encode(torch.empty(self.layout.piece, dtype=self.dtype), 0, None))
        if not self.gathered:
            return self.layout.total * self.compute_dtype.itemsize
        return self._total()

    # ---- encoding ----
    def rows(self, index: int) -> tuple[int, ...]:
        """Return how many rows of a parameter each rank has."""
        row = math.prod(self.parameters[index].shape[1:])
        units = self.layout.units(index) if row else (0,) * self.layout.ranks
        return tuple(each // max(1, row) for each in units)

    def _encode(self, shard: torch.Tensor, rows: int | None, amax: torch.Tensor | None) -> tuple[Any, Any, Any]:
        """Encode this rank's rows of each parameter, or none of them."""
        instances, tensors, metadata = [], [], []
        for index, (parameter, encoding) in enumerate(zip(self.parameters, self.encodings)):
            start, stop = self.layout.place(index, self.axes.shard_rank) if rows is None else (0, 0)
            count = self.rows(index)[self.axes.shard_rank] if rows is None else rows
            own = shard[start:stop].view(count, *parameter.shape[1:])
            largest = torch.ones((), dtype=shard.dtype) if amax is None else amax[index]
            shape = torch.Size(parameter.shape)
            stride = torch.empty(shape, device="meta").stride()
            around = (_shard_mesh(self.axes.mesh), shape, stride, parameter.places[0][0], self.policy)
            taken = largest if self._takes_amax(index) else None
            instance, own_tensors, own_metadata = encoding.encode(parameter.name, own, taken, around)
            instances.append(instance)
            tensors.append(list(own_tensors))
            metadata.append(own_metadata)
        return instances, tensors, metadata

    def _describe(self, instances: Any, tensors: Sequence[Sequence[torch.Tensor]], metadata: Any) -> Any:
        described, start = [], 0
        for index, own in enumerate(tensors):
            rows = self.rows(index)
            described.append([])
            for tensor in own:
                rest = tuple(tensor.shape[1:])
                each = Gathered(tensor.dtype, rest, math.prod(rest) * tensor.dtype.itemsize, rows, start)
                start += math.ceil(each.nbytes / 16) * 16  # so that each can be seen in its own dtype
                described[-1].append(each)
        return described

    def _total(self) -> int:
        """Bytes of the gathered buffer; any number of ranks can keep equal parts of it between the passes."""
        last = max((each for own in self.gathered for each in own), key=lambda each: each.start)
        unit = 16 * self.axes.shard_size
        return math.ceil((last.start + last.nbytes) / unit) * unit

    def _piece(self) -> int:
        """Bytes that each rank sends: those of the rank with the most."""
        every = [each for own in self.gathered for each in own]
        return max(sum(each.rows[rank] * each.row for each in every) for rank in range(self.layout.ranks))

    # ---- the gathered buffer ----
    def make_full(self) -> torch.Tensor:
        encoded = self._encode(self.shard[:0], 0, self.amax)
        self.instances, _, self.metadata = encoded
        self.gathered = self._describe(*encoded)
        return torch.zeros(self._total(), dtype=torch.uint8, device=self.device)

    def make_unsharded(self) -> None:
        for index, parameter in enumerate(self.parameters):
            result, _ = self.instances[index].fsdp_post_all_gather(
                self._whole(index), self.metadata[index], self.compute_dtype
            )
            if tuple(result.shape) != tuple(parameter.shape):
                raise ValueError(
                    f"fully_shard: fsdp_post_all_gather of {self.encodings[index].cls.__name__} made a tensor of shape"
                    f" {list(result.shape)} for parameter {parameter.name!r} of shape {list(parameter.shape)}"
                )
            parameter.show_as(nn.Parameter(result, requires_grad=parameter.trains))

    def _whole(self, index: int) -> tuple[torch.Tensor, ...]:
        """Return the gathered tensors of a parameter, in the buffer."""
        return tuple(
            self.full[each.start : each.start + each.nbytes].view(each.dtype).view(sum(each.rows), *each.rest)
            for each in self.gathered[index]
        )

    def addresses(self) -> list[int]:
        return [self.full.data_ptr()]

    def free(self) -> None:
        self.versions_shown = self._shown_versions()
        set_versions(self._shown(), (FREED,) * len(self.parameters))
        super().free()

    def show_unsharded(self) -> None:
        if self.version is not None:
            set_versions(self._shown(), self.versions_shown)
        super().show_unsharded()

    def _shown(self) -> tuple[Any, ...]:
        return tuple(parameter.unsharded for parameter in self.parameters)

    def _shown_versions(self) -> tuple[int, ...]:
        return tuple(get_version(each) for each in self._shown())

    # ---- gathering ----
    def _gather_from(self, shard: torch.Tensor) -> Any:
        with torch.no_grad():
            self.instances, tensors, self.metadata = self._encode(shard, None, self.amax)
            own = [tensor.contiguous().view(-1).view(torch.uint8) for each in tensors for tensor in each]
            piece = torch.zeros(self._piece(), dtype=torch.uint8, device=self.device)
            torch._foreach_copy_(list(piece.split_with_sizes(_with_rest(own, piece.numel())))[: len(own)], own)
            if self.axes.shard_size == 1:
                self._land(piece)
                return None if self.home == self.device else Copied()
            landing = torch.empty(piece.numel() * self.axes.shard_size, dtype=torch.uint8, device=self.device)
            handle = self._all_gather(landing, piece, self.axes.shard_group)
            return _Landing(handle, (piece, landing), lambda: self._land(landing))

    def _land(self, pieces: torch.Tensor) -> None:
        """Copy all ranks' pieces to their places, and tell the unsharded parameters what came with them."""
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for rank, piece in enumerate(pieces.chunk(self.layout.ranks)):
            at = 0
            for each in (each for own in self.gathered for each in own):
                size, first = each.rows[rank] * each.row, sum(each.rows[:rank]) * each.row
                if size:
                    sources.append(piece[at : at + size])
                    targets.append(self.full_alias[each.start + first : each.start + first + size])
                at += size
        if targets:
            torch._foreach_copy_(targets, sources)
        for index, parameter in enumerate(self.parameters):
            self.instances[index].fsdp_post_all_gather(
                self._whole(index), self.metadata[index], self.compute_dtype, out=parameter.unsharded
            )


def _shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the axis over which parameters are sharded, the last of two."""
    return mesh if mesh.ndim == 1 or mesh.mesh_dim_names is None else mesh[mesh.mesh_dim_names[-1]]


def _with_rest(tensors: Sequence[torch.Tensor], total: int) -> list[int]:
    sizes = [tensor.numel() for tensor in tensors]
    return [*sizes, total - sum(sizes)]


class _Landing:
    """A gather, and the copies after it."""

    def __init__(self, handle: Any, tensors: Sequence[torch.Tensor], land: Callable[[], None]) -> None:
        self._handle, self._tensors, self._land = handle, tensors, land

    def wait(self) -> None:
        """Wait for the gather, and copy."""
        if self._handle is not None:
            self._handle.wait()
        with torch.no_grad():
            self._land()


# ---- scales of whole parameters ----
def reduce_amax(buckets: Sequence[EncodedBucket], backward: bool) -> None:
    """Compute the largest absolute values of all parameters that have a scale, over all ranks that share them.

    Args:
        buckets: of a model, or of a group that runs alone.
        backward: a backward pass gathers: the scales are those of its forward.
    """
    chosen = [b for b in buckets if b.wants_amax and not b.fresh and not (backward and b.amax is not None)]
    if not chosen:
        return
    for each in chosen:
        each.check()
    wide = torch.float64 if any(each.dtype is torch.float64 for each in chosen) else torch.float32
    first = chosen[0]  # of which `device` is that of memory once it is prepared
    device = first.shard.device if first.offload is None else first.device
    values = torch.zeros(sum(len(each.parameters) for each in chosen), dtype=wide, device=device)
    places = [(bucket, index) for bucket in chosen for index in range(len(bucket.parameters))]
    with torch.no_grad(), without_torch_function():
        parts = {at: bucket.range_of(index) for at, (bucket, index) in enumerate(places)}
        filled = {at: part for at, part in parts.items() if part.numel()}
        if filled:
            largest = torch._foreach_norm(list(filled.values()), math.inf)
            values[list(filled)] = torch.stack([each.to(device, wide) for each in largest])
        for group, members in _groups_of(places).items():
            some = values[members]
            handle: Any = collectives.all_reduce(some, op="max", group=group, async_op=True)
            handle.wait()
            values[members] = some
    at = 0
    for bucket in chosen:
        bucket.amax, at = values[at : at + len(bucket.parameters)].to(bucket.dtype), at + len(bucket.parameters)
        bucket.fresh = True


def _groups_of(places: Sequence[tuple[EncodedBucket, int]]) -> dict[Any, list[int]]:
    """Return the numbers of the parameters that a process group shares, by group, in the order of all ranks."""
    groups: dict[Any, list[int]] = {}
    for at, (bucket, _) in enumerate(places):
        if bucket.axes.shard_size > 1:
            groups.setdefault(bucket.axes.shard_group, []).append(at)
    for at, (bucket, index) in enumerate(places):
        inner = bucket.parameters[index].inner
        if inner is None:
            continue
        for axis, placement in enumerate(inner.placements):
            if not placement.is_replicate() and inner.mesh.size(axis) > 1:
                groups.setdefault(inner.mesh.get_group(axis), []).append(at)
    return groups
