"""The short forms: hsdp by level, Cells by size."""

from __future__ import annotations

import math

import mindspore
import numpy as np
import pytest
from fsdp_cells import Block, Net, batch, close, differentiated, double, same_gradients, seeded, train
from mindspore import mint, nn

from hp_dtensor import RaggedShard, Replicate
from hp_fsdp import clip_grad_norm_, fully_shard, hsdp, modules_by_size
from hp_platform import count_collectives
from hp_testing import on_ranks

pytestmark = pytest.mark.framework("mindspore")


def made(level: str, threshold: int = 0, shard_size: int = -1, **options):
    reference, model = seeded(double(Net)), seeded(double(Net))
    options = {"comm_fusion": True, **options}
    for block in model.blocks:
        hsdp(block, shard_size, threshold, level, **options)
    return reference, hsdp(model, shard_size, threshold, level, **options)


@on_ranks(2)
@pytest.mark.parametrize(("level", "gathers"), [("level1", 4), ("level2", 4), ("level3", 7)])
def test_levels_say_how_often_parameters_are_gathered(level: str, gathers: int):
    """Four groups; levels 1 and 2 gather them once for all micro-batches of a step."""
    reference, model = made(level)
    step = differentiated(model)
    counted = []
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        with count_collectives() as counts:
            step(batch(dtype=np.float64)[1])
        counted.append(counts["all_gather"])
    assert counts["reduce_scatter"] == 4
    assert counted == [gathers, gathers if level == "level3" else 0]
    train(reference, model, steps=2)


@on_ranks(4)
def test_fewer_ranks_than_all_are_replicas():
    reference, model = made("level2", shard_size=2)
    assert model.first.weight.device_mesh.shape == (2, 2)
    train(reference, model, steps=2)


class Wide(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = mint.nn.Linear(5, 40), mint.nn.Linear(40, 5, bias=False)

    def construct(self, x):
        return self.down(mint.tanh(self.up(x)))


@on_ranks(2)
def test_small_parameters_stay_whole_and_are_averaged_and_clipped():
    """Weights of 1600 bytes and a bias of 320."""
    reference, model = seeded(double(Wide)), seeded(double(Wide))
    hsdp(model, threshold=1, comm_fusion=True)
    assert isinstance(model.up.weight.placements[0], RaggedShard)
    assert model.up.bias.placements == (Replicate(),) and model.up.bias.to_local().shape == (40,)
    with count_collectives() as counts:
        train(reference, model, steps=2)
    assert counts["all_reduce"] == 2 + 1 and counts["reduce_scatter"] == 2  # one asks whether ranks agree
    everything, own = batch(dtype=np.float64)
    _, expected = differentiated(reference, dtensors=False)(everything)
    _, gradients = differentiated(model)(own)
    norm = math.sqrt(sum(float((gradient.asnumpy() ** 2).sum()) for gradient in expected))
    close(clip_grad_norm_(model.trainable_params(), 0.01, gradients=gradients).asnumpy(), norm, "norm", 1e-12)


@on_ranks(2)
def test_one_rank_a_shard_is_plain_data_parallelism():
    reference, model = made("level3", shard_size=1)
    assert all(parameter.placements == (Replicate(),) for parameter in model.trainable_params())
    model(batch(dtype=np.float64)[1])  # asks whether ranks agree
    with count_collectives() as counts:
        differentiated(model)(batch(dtype=np.float64)[1])
    assert dict(counts) == {"all_reduce": 4}
    train(reference, model, steps=2)


@on_ranks(2)
@pytest.mark.parametrize(
    ("options", "buckets"), [({}, 3), ({"comm_fusion": True}, 1), ({"comm_fusion": True, "bucket_size": 2}, 2)]
)
def test_fusion_and_bucket_size_say_what_is_communicated_as_one(options, buckets):
    reference, model = seeded(double(Wide)), seeded(double(Wide))
    hsdp(model, threshold=0, optimizer_level="level3", **options)
    model(batch(dtype=np.float64)[1])  # asks whether ranks agree
    with count_collectives() as counts:
        differentiated(model)(batch(dtype=np.float64)[1])
    assert counts["all_gather"] == counts["reduce_scatter"] == buckets
    train(reference, model, steps=1)


@on_ranks(2)
def test_accumulation_scale_and_dtype():
    reference, model = made("level2", enable_grad_accumulation=True, grad_scale=0.25)
    step = differentiated(model)
    _, waiting = step(batch(0, dtype=np.float64)[1])
    assert all(not gradient.to_local().asnumpy().any() for gradient in waiting)
    model.set_requires_gradient_sync(True)
    _, gradients = step(batch(1, dtype=np.float64)[1])
    one = differentiated(reference, dtensors=False)
    both = [one(batch(index, dtype=np.float64)[0])[1] for index in range(2)]
    same_gradients(model, gradients, reference, [(a + b) * 0.25 for a, b in zip(*both)], 1e-12)
    _, model = made("level2", reduce_dtype=mindspore.float32)
    _, gradients = differentiated(model)(batch(dtype=np.float64)[1])
    for gradient in gradients:
        values = gradient.full_tensor().asnumpy()
        assert values.dtype == np.float64 and (values == values.astype(np.float32)).all()


@on_ranks(2)
def test_arguments_are_checked():
    for options, error, text in (
        ({"optimizer_level": "level4"}, ValueError, "level1, level2, level3, got 'level4'"),
        ({"shard_size": 3}, ValueError, "divide the 2 ranks of data parallelism, got 3"),
        ({"threshold": -1}, ValueError, "KiB, 0 or more, got -1"),
        ({"bucket_size": 4}, ValueError, "bucket_size=4 limits.*Use comm_fusion=True, or leave"),
        ({"comm_async": True}, NotImplementedError, "comm_async=True.: on MindSpore .*use enable_grad_accumulation=T"),
        ({"reduce_dtype": "float32"}, TypeError, "reduce_dtype must be a Type or None, got 'float32'"),
    ):
        with pytest.raises(error, match=text):
            hsdp(mint.nn.Linear(2, 2), **options)
    train(*made("level2", comm_fusion=True, bucket_size=4), steps=1)


def names(model: nn.Cell, max_bytes: int) -> list[str]:
    by_cell = {id(cell): name for name, cell in model.cells_and_names()}
    return [by_cell[id(cell)] for cell in modules_by_size(model, max_bytes)]


def test_cells_by_size():
    model = Net(blocks=2)
    block = sum(4 * math.prod(p.shape) for p in Block().get_parameters())
    assert names(model, 100_000) == [""]
    assert names(model, block) == ["first", "blocks.0", "blocks.1", "last", ""]
    parts = ["first", "blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "last", ""]
    assert names(model, block - 4) == parts
    model.last.weight = model.first.weight  # neither of the two that share it
    assert names(model, block) == ["blocks.0", "blocks.1", ""]
    with pytest.raises(ValueError, match="at least 1, got 0"):
        modules_by_size(model, 0)


@on_ranks(2)
def test_groups_by_size_train():
    reference, model = seeded(double(Net)), seeded(double(Net))
    for cell in modules_by_size(model, 2000):
        fully_shard(cell)
    train(reference, model, steps=2)
