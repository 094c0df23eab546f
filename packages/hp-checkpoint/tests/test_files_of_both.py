"""Both frameworks write the same files: their hash is the same constant in each environment."""

from __future__ import annotations

import hashlib

import numpy as np

from hp_checkpoint import save
from hp_dtensor import Shard, distribute_tensor, init_device_mesh
from hp_testing import as_tensor, device_type, on_ranks

HASHES = {"model.safetensors": "60245621a6607f96", "state.json": "565c834796859ac8"}


@on_ranks(2)
def test_both_frameworks_write_the_same_files(tmp_path):
    mesh = init_device_mesh(device_type(), (2,))
    array = np.arange(15, dtype=np.float32).reshape(5, 3)
    state = {
        "model": {"w": distribute_tensor(as_tensor(array), mesh, [Shard(0)]), "b": as_tensor(array[0], "bfloat16")},
        "step": 3,
        "betas": (0.9, 0.999),
    }
    save(state, checkpoint_id=tmp_path / "c")
    written = {name: hashlib.sha256((tmp_path / "c" / name).read_bytes()).hexdigest()[:16] for name in HASHES}
    assert written == HASHES
