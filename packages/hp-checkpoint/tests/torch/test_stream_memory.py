"""Memory of stream_weights: the bytes of all storages that it makes, counted at every operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hp_checkpoint import stream_weights
from hp_dtensor import RaggedShard, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_testing import device_type, on_ranks

KIB = 1024
SIZES = [3, 200, 64, 64, 1, 40, 7, 300, 64, 64, 64, 5]  # rows of 1 KiB; two tensors are larger than most buckets


class Counted(TorchDispatchMode):
    """Counts the bytes of the storages that operators make and that are alive; `peak` is the most of them."""

    def __init__(self, known: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._known = {each.untyped_storage()._cdata for each in known.values()}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                if storage._cdata not in self._known and storage._cdata not in self._live():
                    self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                    self.total += storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self._live().values()))
        return result

    def _live(self) -> dict[int, tuple[StorageWeakRef, int]]:
        self._made = {at: each for at, each in self._made.items() if not each[0].expired()}
        return self._made


def model() -> dict[str, torch.Tensor]:
    mesh = init_device_mesh(device_type(), (2,))
    placements = [Shard(0), Shard(1), Replicate(), RaggedShard((0,), (3, 1)), Shard(0)]
    tensors = {}
    for number, rows in enumerate(SIZES):
        tensor = torch.full((rows, 256), float(number), device=device_type())
        kind = placements[number % 5] if rows % 4 == 0 else Shard(0)
        tensors[f"w{number}"] = distribute_tensor(tensor, mesh, [kind])
    tensors["plain"] = torch.ones(100, 256, device=device_type())
    return tensors


@on_ranks(2)
@pytest.mark.parametrize("on", ["all", 0])
@pytest.mark.parametrize("bucket", [16 * KIB, 128 * KIB, 400 * KIB])
def test_a_bucket_and_the_largest_tensor(bucket, on):
    """With the tensor that the loop has, and one round after the other: what is handed over is the caller's."""
    tensors = model()
    largest = max(SIZES) * KIB
    with Counted({name: getattr(value, "_local_tensor", value) for name, value in tensors.items()}) as counted:
        received = 0
        for _, tensor in stream_weights(tensors, bucket=bucket, ranks=on):
            received += tensor.nbytes
            del tensor
    assert received in (0, sum(SIZES) * KIB + 100 * KIB) and counted.total > received
    assert bucket // 8 <= counted.peak <= bucket + largest < received or not received
    assert counted.peak <= bucket + largest


@on_ranks(2)
def test_the_tensor_of_the_loop_is_within_it_too():
    tensors = {name: value for name, value in model().items() if name not in ("w1", "w7")}
    with Counted(tensors) as counted:
        for _, _tensor in stream_weights(tensors, bucket=256 * KIB):
            pass
    assert counted.peak <= 256 * KIB + 100 * KIB
