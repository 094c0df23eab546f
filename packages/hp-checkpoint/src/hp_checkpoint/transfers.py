"""Transfers: the blocks that this rank reads, into its own tensors and to the ranks that want bytes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hp_checkpoint.manifest import Manifest
from hp_checkpoint.pieces import Piece, clip, gather, scatter
from hp_checkpoint.ranks import Ranks
from hp_checkpoint.reads import Exchange, Transfer, reads
from hp_checkpoint.storage import opened, read_at
from hp_checkpoint.tensors import written_bytes

__all__ = ["Request", "Target", "Transfers"]


class Target:
    """A tensor that is loaded: its bytes, from the first one that arrives to the last."""

    def __init__(self, value: Any, remaining: int) -> None:
        self.value, self.remaining = value, remaining
        self.data: np.ndarray | None = None
        self.store: Callable[[], None] | None = None

    def memory(self) -> np.ndarray:
        """Return the bytes to write to."""
        if self.data is None:
            self.data, self.store = written_bytes(self.value)
        return self.data

    def arrived(self, count: int) -> None:
        """Count bytes that were written; with the last one they go into the tensor."""
        self.remaining -= count
        if not self.remaining:
            if self.store is not None:
                self.store()
            self.data = self.store = None


@dataclass(frozen=True)
class Request:
    """A piece of a file, in bytes of it, and the tensor that it goes to."""

    file: int
    piece: Piece
    target: Target


class Transfers:
    """One rank's part in the reading of a checkpoint.

    Args:
        plan: of this rank.
        requests: this rank's, in the order of the plan.
        manifest: of the checkpoint; a file without checksums is not verified, and only what is wanted of it is read.
        paths: of the files, by number.
        ranks: who loads.
    """

    def __init__(
        self, plan: Exchange, requests: Sequence[Request], manifest: Manifest, paths: Sequence[Path], ranks: Ranks
    ) -> None:
        self._plan, self._requests, self._manifest, self._paths, self._ranks = plan, requests, manifest, paths, ranks
        self._size = manifest.block_bytes
        self._buffer = np.empty(self._size if plan.blocks else 0, np.uint8)

    def run(self) -> Exception | None:
        """Run all rounds. A rank that fails goes on sending, so that no other waits, and returns its error."""
        failure: Exception | None = None
        sends: dict[tuple[int, int], list[Transfer]] = {}
        for transfer in self._plan.sends:
            sends.setdefault((transfer.file, transfer.block), []).append(transfer)
        blocks = iter([*self._plan.blocks, (self._plan.rounds, 0, 0)])
        number, file, block = next(blocks)
        for current in range(self._plan.rounds):
            packed: list[list[np.ndarray]] = [[] for _ in range(self._ranks.size)]
            while number == current:
                try:
                    self._take(file, block, sends[file, block], packed)
                except Exception as error:
                    failure = failure or error
                    for transfer in sends[file, block]:
                        if transfer.rank != self._ranks.rank:
                            packed[transfer.rank].append(np.zeros(transfer.nbytes, np.uint8))
                number, file, block = next(blocks)
            if self._plan.remote:
                self._swap(current, packed)
        return failure

    def _take(self, file: int, block: int, wanted: Sequence[Transfer], packed: list[list[np.ndarray]]) -> None:
        """Read a block, write what this rank wants of it, and pack what others want."""
        start = block * self._size
        length = min(self._size, self._manifest.files[self._paths[file].name].size - start)
        direct = self._direct(wanted, start, length)
        data = self._buffer[:length] if direct is None else direct
        self._read(file, block, wanted, data)
        sent: list[tuple[int, np.ndarray]] = []
        for transfer in wanted:
            if transfer.rank != self._ranks.rank:
                sent += [
                    (transfer.rank, gather(data, each.first - start, each.length, each.count, each.stride).copy())
                    for each in transfer.pieces
                ]
        for rank, values in sent:
            packed[rank].append(values)
        for transfer in wanted:
            if direct is not None:
                self._requests[transfer.request].target.arrived(length)
            elif transfer.rank == self._ranks.rank:
                self._place(
                    transfer, lambda each, _: gather(data, each.first - start, each.length, each.count, each.stride)
                )

    def _direct(self, wanted: Sequence[Transfer], start: int, length: int) -> np.ndarray | None:
        """Return the memory of a tensor that this rank alone wants, if the block is one run of it."""
        if len(wanted) != 1 or wanted[0].rank != self._ranks.rank:
            return None
        (piece, *others) = self._parts(wanted[0])
        if others or piece.count > 1 or piece.length != length:
            return None
        return self._requests[wanted[0].request].target.memory()[piece.local : piece.local + length]

    def _read(self, file: int, block: int, wanted: Sequence[Transfer], data: np.ndarray) -> None:
        start, path = block * self._size, self._paths[file]
        verified = bool(self._manifest.files[path.name].rows)
        ranges = ((start, start + len(data)),)
        if not verified:
            ranges = reads(piece for transfer in wanted for piece in transfer.pieces)
        with opened(path) as descriptor:
            for low, high in ranges:
                read_at(descriptor, data[low - start : high - start], low, path)
        if verified:
            self._manifest.verify_block(path.name, block, data)

    def _parts(self, transfer: Transfer) -> tuple[Piece, ...]:
        """Return the pieces of one of this rank's requests in a block, with their places in the tensor."""
        start = transfer.block * self._size
        return clip(self._requests[transfer.request].piece, start, start + self._size)

    def _place(self, transfer: Transfer, values: Callable[[Piece, int], np.ndarray]) -> int:
        """Write bytes into the tensor that wants them; return their number."""
        target, position = self._requests[transfer.request].target, 0
        for piece in self._parts(transfer):
            memory = target.memory()
            scatter(memory, piece.local, piece.length, piece.count, piece.local_stride, values(piece, position))
            position += piece.size
        target.arrived(position)
        return position

    def _swap(self, number: int, packed: Sequence[Sequence[np.ndarray]]) -> None:
        """Exchange the packed bytes of a round, and write what arrives."""
        own = self._ranks.rank
        incoming = [each for each in self._plan.receives if each.round == number and each.reader != own]
        received = [0] * self._ranks.size
        for transfer in incoming:
            received[transfer.reader] += transfer.nbytes
        sent = [sum(map(len, each)) for each in packed]
        flat = [values for each in packed for values in each]
        data = self._ranks.all_to_all(np.concatenate(flat) if flat else np.empty(0, np.uint8), received, sent)
        at = 0
        for transfer in incoming:  # sorted by reader
            at += self._place(transfer, lambda each, done, at=at: data[at + done : at + done + each.size])
