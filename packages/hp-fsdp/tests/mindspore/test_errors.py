"""What fully_shard refuses on MindSpore, by its text."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from fsdp_cells import Net, batch, data_mesh, differentiated, pair, same_gradients, seeded, train
from mindspore import mint, nn

from hp_dtensor import Replicate, Shard, init_device_mesh
from hp_fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    full_state_dict,
    fully_shard,
    load_full_state_dict,
    register_fsdp_forward_method,
)
from hp_testing import device_type, on_ranks


class _Link:
    """A link without streams."""

    streams = (None, None)

    def note(self, what: str, name: str) -> None:
        """Do nothing."""


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"comm_fusion_zero_copy": True}, NotImplementedError, "comm_fusion_zero_copy=True .* no write to a view reaches"),
    ({"offload_policy": CPUOffloadPolicy(link=_Link())}, NotImplementedError, r"CPUOffloadPolicy\(link=...\) is not"),
    ({"shard_placement_fn": 3}, TypeError, "shard_placement_fn must be a function of a parameter, got int"),
    (
        {"shard_placement_fn": lambda p: Replicate()},
        TypeError,
        r"return a Shard or None, got Replicate\(\) for 'first.w",
    ),
    (
        {"shard_placement_fn": lambda p: Shard(1)},
        NotImplementedError,
        r"Shard\(1\) for 'first.weight' of shape \(7, 5\).*Return Shard\(0\)",
    ),
    ({"reshard_after_forward": 2}, ValueError, r"reshard_after_forward=2 must divide the 1 ranks of the shard axis"),
    ({"reshard_after_forward": "yes"}, TypeError, "reshard_after_forward must be True or False, got 'yes'"),
    (
        {"mp_policy": MixedPrecisionPolicy(), "mixed_precision": MixedPrecisionPolicy()},
        ValueError,
        "are the same argument",
    ),
    ({"mp_policy": "bf16"}, TypeError, "expected an hp_fsdp.MixedPrecisionPolicy, got str"),
    ({"mesh": 2}, TypeError, "mesh must be an hp_dtensor.DeviceMesh, got builtins.int. Make it with"),
]


@on_ranks(1)
def test_arguments():
    for options, error, text in REFUSED:
        model = seeded(Net)
        with pytest.raises(error, match=text):
            fully_shard(model, **{"mesh": data_mesh(), **options})
        assert type(model) is Net
    fully_shard(model, offload_policy=OffloadPolicy(), comm_fusion_zero_copy=False)
    assert (type(model).__name__, type(model).__qualname__) == ("Net", "HSDPNet")


@on_ranks(2)
def test_arguments_that_those_errors_name_train():
    named: list[dict[str, Any]] = [
        {"comm_fusion_zero_copy": None, "offload_policy": CPUOffloadPolicy()},
        {"shard_placement_fn": lambda p: None, "reshard_after_forward": 1},
        {"shard_placement_fn": lambda p: Shard(0), "mp_policy": MixedPrecisionPolicy()},
    ]
    for options in named:
        train(*pair(**options), steps=1)


@on_ranks(1)
def test_statistics_that_a_forward_writes():
    net = nn.SequentialCell(nn.Dense(4, 4), nn.BatchNorm1d(4))
    message = "1 is a BatchNorm1d, whose moving_mean is written in forward .* pass its running statistics in ignored_pa"
    with pytest.raises(NotImplementedError, match=message):
        fully_shard(net, data_mesh())

    def made(norm):
        return seeded(lambda: nn.SequentialCell(nn.Dense(5, 4), norm(), nn.Dense(4, 4))).set_train()

    for norm in (lambda: nn.BatchNorm1d(4), lambda: nn.LayerNorm((4,))):
        reference, model = made(norm), made(norm)
        statistics = [each for each in model.get_parameters() if "moving" in each.name]
        fully_shard(model, data_mesh(), ignored_params=statistics)
        train(reference, model, steps=2)


@on_ranks(1)
def test_cells():
    with pytest.raises(TypeError, match=r"expected a mindspore.nn.Cell, got list"):
        fully_shard([mint.nn.Linear(1, 1)])  # type: ignore[type-var]
    with pytest.raises(ValueError, match=r"CellList has no construct of its own. Call fully_shard on each"):
        fully_shard(nn.CellList([mint.nn.Linear(1, 1)]))
    for each in nn.CellList([mint.nn.Linear(1, 1)]):
        fully_shard(each)
    reference, model = pair()
    with pytest.raises(ValueError, match=r"this Net is sharded already"):
        fully_shard(model, data_mesh())
    with pytest.raises(TypeError, match=r"expected modules that fully_shard was called on, got Linear"):
        model.set_modules_to_forward_prefetch([model.last])
    with pytest.raises(ValueError, match=r'expected "avg" or "sum", got \'max\''):
        model.set_reduce_op_type("max")
    with pytest.raises(NotImplementedError, match=r"set_is_last_backward\(False\): on MindSpore each backward pass"):
        model.set_is_last_backward(False)
    model.set_requires_gradient_sync(False)
    (everything, own), step = batch(), differentiated(model)
    step(own)
    model.set_requires_gradient_sync(True)
    _, once = differentiated(reference, dtensors=False)(everything)
    same_gradients(model, step(own)[1], reference, [2 * each for each in once])
    with pytest.raises(NotImplementedError, match=r"set_all_reduce_hook: not on MindSpore, .* there are set_requires_"):
        model.set_all_reduce_hook(lambda shard: None)
    model.set_requires_all_reduce(True)
    model.set_reduce_op_type("sum")
    same_gradients(model, step(own)[1], reference, once)  # of one rank
    model.set_gradient_divide_factor(2.0, recurse=True)
    same_gradients(model, step(own)[1], reference, [each / 2 for each in once])
    with pytest.raises(NotImplementedError, match=r"Net cannot be copied"):
        copy.deepcopy(model)
    with pytest.raises(NotImplementedError, match=r"Net cannot be pickled.*Save full_state_dict"):
        pickle.dumps(model)
    second, state = fully_shard(Net(), data_mesh()), full_state_dict(model)
    load_full_state_dict(second, pickle.loads(pickle.dumps(state)))
    for name, value in full_state_dict(second).items():
        assert (value.asnumpy() == state[name].asnumpy()).all(), name


@on_ranks(4)
def test_meshes():
    mesh = init_device_mesh(device_type(), (2, 1, 2), mesh_dim_names=("a", "b", "c"))
    with pytest.raises(ValueError, match=r"one axis \(shard\) or two \(replicate, shard\), got 3: \('a', 'b', 'c'\)"):
        fully_shard(seeded(Net), mesh)
    train(*pair(mesh=mesh["a", "c"]), steps=1)


class Encoder(nn.Cell):
    """A Cell that is used by a method."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mint.nn.Linear(5, 3)

    def encode(self, x):
        return mint.sin(self.inner(x))


class Encodes(nn.Cell):
    """A Cell whose construct calls that method."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()

    def construct(self, x):
        return self.encoder.encode(x)


@on_ranks(2)
def test_methods_that_compute_are_called_by_a_construct():
    model = fully_shard(seeded(Encoder), data_mesh())
    with pytest.raises(
        NotImplementedError, match=r"\(Encoder, 'encode'\): .*Call fully_shard on a Cell whose construct"
    ):
        register_fsdp_forward_method(model, "encode")
    reference, model = seeded(Encodes), seeded(Encodes)
    train(reference, fully_shard(model, data_mesh()), steps=1)
