"""TensorSpec, and the reading of placements."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest

from hp_dtensor import DeviceMesh, Partial, RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.layout.spec import TensorSpec, normalize

R = Replicate()


def _mesh(shape: tuple[int, ...] = (2, 2), names: tuple[str, ...] | None = ("dp", "tp")) -> DeviceMesh:
    count = 1
    for size in shape:
        count *= size
    ranks = iter(range(count))

    def nest(sizes: tuple[int, ...]) -> list:
        return [nest(sizes[1:]) if len(sizes) > 1 else next(ranks) for _ in range(sizes[0])]

    return DeviceMesh("cpu", nest(shape), names, _init_groups=False)


def test_equal_specs_are_one_object() -> None:
    a = TensorSpec.of(_mesh(), (Shard(0), R), (5, 3))
    assert TensorSpec.of(_mesh(), [Shard(0), Replicate()], [5, 3]) is a
    assert TensorSpec.of(_mesh(), (Shard(1), R), (5, 3)) is not a
    assert pickle.loads(pickle.dumps(a)) is a and copy.deepcopy(a) is a
    assert a.with_placements((R, R)) is TensorSpec.of(_mesh(), (R, R), (5, 3))


def test_specs_die_with_their_last_user() -> None:
    from hp_dtensor.layout import spec

    made = TensorSpec.of(_mesh(), (Shard(0), R), (977, 3))
    before = len(spec._specs)
    del made
    gc.collect()
    assert len(spec._specs) == before - 1


def test_what_a_spec_knows() -> None:
    spec = TensorSpec.of(_mesh(), (Shard(0), Shard(1)), (5, 3))  # made by rank 0
    assert spec.local_shape == (3, 2) and spec.shape == (5, 3) and not spec.replicated
    assert spec.with_placements((R, R)).replicated
    assert TensorSpec.of(_mesh(), (RaggedShard((0, 1), (1, 2)), R), (5, 3)).local_shape == (5,)
    assert "(Shard(0), Shard(1)), (5, 3))" in repr(spec)
    outside = DeviceMesh("cpu", [1, 2], ("dp",), _init_groups=False)
    assert TensorSpec.of(outside, (Shard(0),), (5, 3)).local_shape == (0, 0)


def test_placements_are_checked_and_counted_from_the_front() -> None:
    mesh = _mesh()
    assert normalize([Shard(-1), R], mesh, 3, "f") == (Shard(2), R)
    assert normalize([StridedShard(-3, 2), Partial()], mesh, 3, "f") == (StridedShard(0, 2), Partial())


@pytest.mark.parametrize(
    ("placements", "error", "message"),
    [
        (
            Shard(0),
            TypeError,
            r"f: placements must be a sequence with one placement per axis, got Shard\(0\); write \[Shard\(0\)\]",
        ),
        ([R], ValueError, r"f: 1 placements \(Replicate\(\),\) for a mesh of 2 axes \('dp', 'tp'\)"),
        ([R, Shard(2)], ValueError, r"f: Shard\(2\) of a tensor with 2 dims: the dim must be in \[-2, 1\]"),
        ([R, Shard(-3)], ValueError, r"f: Shard\(-3\) of a tensor with 2 dims"),
        ([R, "Shard(0)"], TypeError, r"f: 'Shard\(0\)', a builtins.str, is not a placement of hp_dtensor"),
        ([R, None], TypeError, r"f: None, a builtins.NoneType, is not a placement of"),
    ],
)
def test_placements_that_do_not_fit(placements, error, message) -> None:
    with pytest.raises(error, match=message):
        normalize(placements, _mesh(), 2, "f")


def test_shapes_that_placements_can_not_cut() -> None:
    with pytest.raises(ValueError, match="split_factor 2 must divide the size 5"):
        TensorSpec.of(_mesh(), (StridedShard(0, 2), R), (5, 3))
    with pytest.raises(ValueError, match="more than one RaggedShard"):
        TensorSpec.of(_mesh(), (RaggedShard((0,), (1, 1)), RaggedShard((0,), (1, 1))), (4, 3))
    with pytest.raises(ValueError, match="pass 2 non-negative units"):
        TensorSpec.of(_mesh(), (RaggedShard((0,), (1, 1, 2)), R), (4, 3))
