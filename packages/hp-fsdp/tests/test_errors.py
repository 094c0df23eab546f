"""What fully_shard refuses, by its text."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from fsdp_models import Net, data_mesh, pair, same_weights, seeded
from torch import nn

import hp_dtensor
from hp_dtensor import DeviceMesh, init_device_mesh
from hp_fsdp import MixedPrecisionPolicy, OffloadPolicy, clip_grad_norm_, full_state_dict, fully_shard
from hp_testing import device_type, on_ranks

REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"comm_fusion_zero_copy": False}, NotImplementedError, "comm_fusion_zero_copy=False is not supported yet"),
    ({"shard_placement_fn": 1}, TypeError, "shard_placement_fn must be a function of a parameter, got int"),
    ({"reshard_after_forward": 2}, ValueError, r"reshard_after_forward=2 must divide the 1 ranks of the shard axis"),
    ({"reshard_after_forward": "yes"}, TypeError, "reshard_after_forward must be True or False, got 'yes'"),
    (
        {"mp_policy": MixedPrecisionPolicy(), "mixed_precision": MixedPrecisionPolicy()},
        ValueError,
        "mixed_precision and mp_policy are the same argument",
    ),
    ({"mp_policy": "bf16"}, TypeError, "expected an hp_fsdp.MixedPrecisionPolicy, got str"),
    ({"offload_policy": True}, TypeError, "expected an hp_fsdp.OffloadPolicy, got bool"),
    ({"mesh": 2}, TypeError, "mesh must be an hp_dtensor.DeviceMesh, got builtins.int. Make it with hp_dtensor.init_"),
]


@on_ranks(1)
@pytest.mark.parametrize("index", range(len(REFUSED)))
def test_arguments(index: int):
    options, error, text = REFUSED[index]
    model = seeded(Net)
    with pytest.raises(error, match=text):
        fully_shard(model, **{"mesh": data_mesh(), **options})
    assert type(model) is Net
    fully_shard(model, data_mesh(), offload_policy=OffloadPolicy(), comm_fusion_zero_copy=True)


@on_ranks(1)
def test_modules():
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module or a list of them, got dict"):
        fully_shard({"a": nn.Linear(1, 1)})
    with pytest.raises(
        ValueError, match=r"ModuleList has no forward of its own. Call fully_shard on each of its modules"
    ):
        fully_shard(nn.ModuleList([nn.Linear(1, 1)]))
    for each in nn.ModuleList([nn.Linear(1, 1)]):
        fully_shard(each)
    model: Any = pair()[1]
    with pytest.raises(ValueError, match=r"this Net is sharded already"):
        fully_shard(model, data_mesh())
    with pytest.raises(TypeError, match=r"expected modules that fully_shard was called on, got Linear"):
        model.set_modules_to_forward_prefetch([model.last])
    with pytest.raises(ValueError, match=r'expected "avg" or "sum", got <RedOpType.MAX'):
        model.set_reduce_op_type(torch.distributed.ReduceOp.MAX)
    model.set_reduce_op_type(torch.distributed.ReduceOp.SUM)
    with pytest.raises(NotImplementedError, match=r"set_reshard_after_forward: reshard_after_forward=4"):
        model.set_reshard_after_forward(4)
    with pytest.raises(
        NotImplementedError, match=r"Net cannot be copied.*Build a second model and load full_state_dict"
    ):
        copy.deepcopy(model)
    with pytest.raises(NotImplementedError, match=r"Net cannot be pickled.*Save full_state_dict"):
        pickle.dumps(model)
    second: Any = Net().to(device_type(), torch.float64)
    second.load_state_dict(pickle.loads(pickle.dumps(full_state_dict(model))))
    same_weights(model, second)
    model.set_reshard_after_forward(True)
    model.set_reshard_after_forward(False)


@on_ranks(4)
def test_meshes():
    mesh = init_device_mesh(device_type(), (2, 1, 2), mesh_dim_names=("a", "b", "c"))
    with pytest.raises(ValueError, match=r"one axis \(shard\) or two \(replicate, shard\), got 3: \('a', 'b', 'c'\)"):
        fully_shard(seeded(Net), mesh)
    turned = DeviceMesh(device_type(), [3, 1, 2, 0])
    with pytest.raises(ValueError, match=r"ranks must ascend along the shard axis, axis 0 of .*\[3, 1, 2, 0\]"):
        fully_shard(seeded(Net), turned)
    fully_shard(seeded(Net), DeviceMesh(device_type(), [0, 1, 2, 3]))
    fully_shard(seeded(Net), mesh["a", "c"])


@on_ranks(1)
def test_half_of_a_group_on_meta():
    model = seeded(Net)
    model.first.to("meta")
    with pytest.raises(ValueError, match=r"2 of \d+ parameters of Net are on the meta device \(first.weight"):
        fully_shard(model, data_mesh())
    model.first.to_empty(device=device_type())
    fully_shard(model, data_mesh())


@on_ranks(2)
def test_gradients_by_sharded_parameters_without_backward():
    model = fully_shard(seeded(Net), data_mesh())
    parameters = list(model.parameters())
    x = torch.ones(2, 5, dtype=torch.float64, device=device_type())
    for unused in (False, True):
        with pytest.raises(RuntimeError, match=r"input 0, of shape .* is a parameter of fully_shard: forward computes"):
            torch.autograd.grad(model(x).sum(), parameters, allow_unused=unused)
    with pytest.raises(RuntimeError, match=r"Call backward\(\) without inputs and read .grad"):
        model(x).sum().backward(inputs=parameters)
    model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in parameters)
    alone = copy.deepcopy(parameters[0])
    _ = torch.autograd.grad(alone.square().sum(), alone)


def test_clipping_takes_the_gradients_of_the_parameters() -> None:
    clipped = []
    for foreach in (None, True, False):
        parameters = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 2.0)
        norm = clip_grad_norm_(parameters, 1.0, foreach=foreach)
        torch.testing.assert_close(norm, torch.tensor(20.0).sqrt())
        clipped.append(torch.cat([parameter.grad for parameter in parameters]))
    torch.testing.assert_close(clipped[0].norm(), torch.tensor(1.0))
    assert torch.equal(clipped[0], clipped[1]) and torch.equal(clipped[0], clipped[2])
    with pytest.raises(TypeError, match="gradients= is for MindSpore; on PyTorch the gradients are"):
        clip_grad_norm_(parameters, 1.0, gradients=clipped)  # type: ignore[arg-type]
    clip_grad_norm_(parameters, 1.0)


@on_ranks(2)
def test_what_is_torchs_own() -> None:
    from torch.distributed.device_mesh import init_device_mesh as torchs_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    theirs, linear = torchs_mesh(device_type(), (2,)), nn.Linear(4, 4, device=device_type())
    with pytest.raises(TypeError, match=r"hp_dtensor.DeviceMesh, got torch\.distributed.* Make it with hp_dtensor"):
        fully_shard(linear, mesh=theirs)  # type: ignore[arg-type]
    linear.weight = nn.Parameter(distribute_tensor(linear.weight.data, theirs, [Shard(0)]))
    with pytest.raises(TypeError, match="parameter 'weight' is a DTensor of torch's. Lay it out with hp_dtensor"):
        fully_shard(linear, mesh=data_mesh())
    linear.weight = nn.Parameter(hp_dtensor.distribute_tensor(torch.ones(4, 4), data_mesh(), [hp_dtensor.Shard(0)]))
    axes = init_device_mesh(device_type(), (1, 2), mesh_dim_names=("dp", "tp"))
    linear.weight = nn.Parameter(hp_dtensor.distribute_tensor(torch.ones(4, 4), axes["tp"], [hp_dtensor.Shard(0)]))
    fully_shard(linear, mesh=axes["dp"])
