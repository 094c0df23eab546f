"""Tensors that are one here, and two in the checkpoint: loaded where both have one value, refused where they differ."""

from __future__ import annotations

import numpy as np
import pytest

from hp_checkpoint import load, save
from hp_dtensor import Shard, distribute_tensor, init_device_mesh
from hp_platform import get_platform
from hp_testing import as_array, as_tensor, device_type, on_ranks


@on_ranks(1, 2)
def test_values_of_two_names_for_one_tensor(tmp_path):
    mesh = init_device_mesh(device_type(), (get_platform().groups.size(),))
    one, other = np.arange(12, dtype=np.float32).reshape(6, 2), np.arange(12, dtype=np.float32).reshape(6, 2)
    other[5, 1] = np.nan
    saved = {"in": one, "same": one.copy(), "other": other, "wide": one.astype("f8")}
    tensors = {name: distribute_tensor(as_tensor(each), mesh, [Shard(0)]) for name, each in saved.items()}
    save({"model": tensors}, checkpoint_id=tmp_path / "c")
    tied = distribute_tensor(as_tensor(np.zeros((6, 2), np.float32)), mesh, [Shard(1)])
    for name in ("other", "wide"):
        with pytest.raises(ValueError, match=f"load: 'in' and '{name}' are one tensor here, and have different values"):
            load({"model": {"in": tied, name: tied}}, checkpoint_id=tmp_path / "c")
        assert not as_array(tied.to_local()).any()
    load({"model": {"in": tied, "same": tied}}, checkpoint_id=tmp_path / "c")
    untied = distribute_tensor(as_tensor(np.zeros((6, 2), np.float32)), mesh, [Shard(1)])
    load({"model": {"in": tied, "other": untied}}, checkpoint_id=tmp_path / "c")
    assert as_array(untied.full_tensor()).tobytes() == other.tobytes()
    save({"model": {"other": tensors["in"]}}, checkpoint_id=tmp_path / "one")
    tied = distribute_tensor(as_tensor(np.zeros((6, 2), np.float32)), mesh, [Shard(1)])
    load({"model": {"in": tied, "other": tied}}, checkpoint_id=tmp_path / "one")
    truth = distribute_tensor(as_tensor(one), mesh, [Shard(1)])
    assert (as_array(tied.to_local()) == as_array(truth.to_local())).all()
