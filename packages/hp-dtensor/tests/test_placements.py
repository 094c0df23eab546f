"""Placements are values."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError

import pytest

import hp_dtensor
from hp_dtensor import Partial, Placement, RaggedShard, Replicate, Shard, StridedShard

ALL = [
    Shard(0),
    Shard(-1),
    Replicate(),
    Partial(),
    *map(Partial, ("avg", "min", "max", "product")),
    StridedShard(1, 4),
    RaggedShard((0, 1), (3, 0, 5)),
    RaggedShard((0, 1), (1, 2), owners=(1, 0, 1)),
]


@pytest.mark.parametrize("placement", ALL, ids=repr)
def test_placements_are_values(placement: Placement) -> None:
    assert eval(repr(placement), vars(hp_dtensor)) == placement, "the repr is the constructor"
    for same in (
        copy.deepcopy(placement),
        pickle.loads(pickle.dumps(placement)),
        eval(repr(placement), vars(hp_dtensor)),
    ):
        assert same == placement and hash(same) == hash(placement)
    assert isinstance(placement, Placement)
    assert [placement == other for other in ALL].count(True) == 1
    with pytest.raises((FrozenInstanceError, AttributeError, TypeError)):
        placement.dim = 3  # type: ignore[attr-defined]


def test_what_they_say_of_themselves() -> None:
    assert Shard(1).is_shard() and Shard(1).is_shard(1) and not Shard(1).is_shard(0)
    assert not Shard(1).is_replicate() and not Shard(1).is_partial()
    assert Replicate().is_replicate() and not Replicate().is_shard()
    assert Partial().is_partial() and Partial("max").is_partial("max") and not Partial("max").is_partial("sum")
    assert not StridedShard(0, 2).is_shard(), "its part is not contiguous"
    assert StridedShard(0, 2) != Shard(0) and StridedShard(dim=0, split_factor=2) == StridedShard(0, 2)


def test_unknown_reductions_are_errors() -> None:
    with pytest.raises(ValueError, match=r"op must be one of sum, avg, min, max, product, got 'mean'"):
        Partial("mean")


def test_names_of_a_reduction():
    for made in (Partial("max"), Partial(reduce_op="max"), Partial(op="max")):
        assert made == Partial("max") and made.reduce_op == made.op == "max" and hash(made) == hash(Partial("max"))
        assert repr(made) == "Partial('max')" and pickle.loads(pickle.dumps(made)) == made and copy.copy(made) == made
    assert Partial().reduce_op == "sum"
    with pytest.raises(TypeError, match="reduce_op='max' and op='sum' are two names of one argument"):
        Partial("max", op="sum")
    assert Partial("max") == Partial(op="max")
