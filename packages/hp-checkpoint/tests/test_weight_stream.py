"""stream_weights on both frameworks: whole tensors of any layout to the bit, on all ranks or on one; a stream left."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from checkpoint_layouts import MESHES, choose_placements, choose_shape

from hp_checkpoint import CheckpointError, stream_weights
from hp_dtensor import Shard, distribute_tensor, init_device_mesh
from hp_platform import get_platform
from hp_testing import as_array, as_tensor, device_type, on_ranks

DTYPES = ("f4", "f8", "i8", "u1", "?", "f2")


def model_of(seed: int, count: int = 12) -> tuple[dict, dict]:
    """Tensors of one process, and the same over the ranks in random layouts, some of them plain."""
    chance, ranks = random.Random(seed), get_platform().groups.size()
    full, placed = {}, {}
    for number in range(count):
        shape = choose_shape(chance.choice)
        values = np.random.default_rng(number).integers(0, 256, shape).astype(chance.choice(DTYPES))
        mesh = chance.choice([each for each in MESHES if np.prod(each) == ranks])
        placements = choose_placements(chance.choice, shape, mesh)
        full[f"layers.{number}.w"] = values
        tensor = as_tensor(values)
        if chance.random() < 0.8:
            tensor = distribute_tensor(tensor, init_device_mesh(device_type(), mesh), placements)
        placed[f"layers.{number}.w"] = tensor
    return full, placed


def assert_same(got: list, full: dict) -> None:
    assert [name for name, _ in got] == list(full)
    for name, tensor in got:
        array = as_array(tensor)
        assert (array.dtype, array.shape) == (full[name].dtype, full[name].shape)
        assert array.tobytes() == full[name].tobytes(), name


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("bucket", [1, 8, 96, 700, "512MiB"])
def test_any_layout_is_whole_to_the_bit(bucket):
    for seed in range(4):
        full, placed = model_of(seed)
        assert_same(list(stream_weights(placed, bucket=bucket)), full)
        one = list(stream_weights(placed, bucket=bucket, ranks=0))
        assert_same(one, full if get_platform().groups.rank() == 0 else {})


@on_ranks(2)
def test_a_tensor_of_two_names_comes_once_and_ranks_may_have_others():
    """As the stages of a pipeline have: the names are joined in the order of the ranks."""
    rank = get_platform().groups.rank()
    shared = as_tensor(np.arange(5, dtype="f4"))
    own = as_tensor(np.full(3, rank, "f4"))
    got = list(stream_weights({"embed": shared, f"own.{rank}": own, "head": shared}))
    assert_same(got, {"embed": np.arange(5, dtype="f4")} | {f"own.{r}": np.full(3, r, "f4") for r in range(2)})


@on_ranks(2)
def test_arguments_are_refused_on_all_ranks():
    placed = model_of(0)[1]
    wrong: Any
    for wrong in ("many", 0, -1, True, 2.5, None):
        with pytest.raises(ValueError, match="stream_weights: bucket=.*expected bytes, as 5_000_000_000 or '5GB'"):
            stream_weights(placed, bucket=wrong)
    for wrong in (1, None, False, "0", [0]):
        with pytest.raises(ValueError, match="stream_weights: ranks=.*expected 'all' for every rank, or 0"):
            stream_weights(placed, ranks=wrong)
    rank = get_platform().groups.rank()
    with pytest.raises(
        CheckpointError, match=r"failed on 1 of 2 ranks: rank 1: stream_weights: bucket='many'"
    ) as error:
        stream_weights(placed, bucket="many" if rank else 64)
    assert error.value.ranks == (1,)
    with pytest.raises(ValueError, match=r'pass different arguments: rank 0: \{"bucket": 64.*rank 1: \{"bucket": 65'):
        stream_weights(placed, bucket=64 + rank)
    with pytest.raises(ValueError, match="stream_weights: 'w' is F32 of shape"):
        stream_weights({"w": as_tensor(np.zeros(2 + rank, "f4"))})
    get_platform().collectives.barrier()


class Stopped(Exception):
    """Of the program that iterates."""


@on_ranks(2, 3)
@pytest.mark.parametrize("how", ["break", "raise", "close", "drop"])
@pytest.mark.parametrize("on", ["all", 0])
def test_a_loop_that_is_left_is_named_on_the_others(how, on):
    placed = {f"w{n}": as_tensor(np.full(64, n, "f4")) for n in range(9)}
    groups = get_platform().groups
    leaver = 0 if on == 0 else groups.size() - 1
    if groups.rank() == leaver:
        leave(how, placed, on)
    else:
        count = 0 if how == "drop" else 2
        expected = (
            f"stream_weights failed on 1 of {groups.size()} ranks: rank {leaver}: its loop was left after {count}"
        )
        with pytest.raises(CheckpointError, match=f"{expected} of 9 tensors") as error:
            list(stream_weights(placed, bucket=1024, ranks=on))
        assert error.value.ranks == (leaver,)
    get_platform().collectives.barrier()  # what follows is not confused
    assert len(list(stream_weights(placed))) == 9


def leave(how: str, placed: dict, on: Any) -> None:
    """Leave the loop of a stream after two tensors."""
    if how == "drop":
        stream_weights(placed, bucket=1024, ranks=on)
    elif how == "close":
        stream = stream_weights(placed, bucket=1024, ranks=on)
        assert [next(stream)[0], next(stream)[0]] == ["w0", "w1"]
        stream.close()
    elif how == "break":
        for name, _ in stream_weights(placed, bucket=1024, ranks=on):
            if name == "w1":
                break
    else:
        with pytest.raises(Stopped):
            raise_inside(placed, on)


def raise_inside(placed: dict, on: Any) -> None:
    for name, _ in stream_weights(placed, bucket=1024, ranks=on):
        if name == "w1":
            raise Stopped


@on_ranks(2)
def test_all_may_leave_together_and_after_the_last():
    placed = {f"w{n}": as_tensor(np.full(64, n, "f4")) for n in range(9)}
    for count in (0, 1, 4, 9):
        assert [name for _, (name, _) in zip(range(count), stream_weights(placed, bucket=1024))] == list(placed)[:count]
    if get_platform().groups.rank() == 0:
        stream = stream_weights(placed, bucket=1024)
        assert len([next(stream) for _ in placed]) == 9
        stream.close()  # without the end of the iteration
    else:
        assert len(list(stream_weights(placed, bucket=1024))) == 9
    get_platform().collectives.barrier()


@on_ranks(2)
def test_a_rank_without_memory_is_named(monkeypatch):
    mesh = init_device_mesh(device_type(), (2,))
    placed = {"w": distribute_tensor(as_tensor(np.zeros((8, 8), "f4")), mesh, [Shard(0)])}
    stream = stream_weights(placed)
    if get_platform().groups.rank() == 1:
        from hp_checkpoint.port import port

        def none_left(*_):
            raise MemoryError("no memory")

        monkeypatch.setattr(port(), "new_whole", none_left)
    with pytest.raises(CheckpointError, match="failed on 1 of 2 ranks: rank 1: MemoryError: no memory"):
        next(stream)
