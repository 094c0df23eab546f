"""Parameters that are DTensors on another axis of the same mesh, and the global norm of gradients."""

from __future__ import annotations

import math

import mindspore.mint.nn.functional as F
import numpy as np
import pytest
from fsdp_cells import ROWS, close, differentiated, loss_of, pair, same_gradients, same_weights, seeded, sgd, whole
from mindspore import Parameter, Tensor, mint, nn
from mindspore.experimental.optim import AdamW

from hp_dtensor import DTensor, RaggedShard, Replicate, Shard, SkipDTensorDispatch, init_device_mesh
from hp_dtensor.mindspore.api import distribute_parameter
from hp_fsdp import (
    StateDictOptions,
    clip_grad_norm_,
    full_state_dict,
    fully_shard,
    get_optimizer_state_dict,
    global_grad_norm,
    load_full_state_dict,
    set_optimizer_state_dict,
)
from hp_platform import count_collectives
from hp_testing import device_type, on_ranks


class Layer(nn.Cell):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.scale = Parameter(Tensor(np.ones(width, np.float32)), name="scale")
        self.up, self.down = mint.nn.Linear(width, hidden), mint.nn.Linear(hidden, width, bias=False)

    def construct(self, x):
        return x + self.down(F.silu(self.up(x * self.scale)))


class Parallel(nn.Cell):
    def __init__(self, hidden: int = 12) -> None:
        super().__init__()
        self.blocks = nn.CellList([Layer(6, hidden) for _ in range(2)])
        self.head = mint.nn.Linear(6, 4, bias=False)
        self.gain = Parameter(Tensor(np.ones(6, np.float32)), name="gain")  # stays plain: on the data axis only

    def construct(self, x):
        x = x * self.gain
        if isinstance(self.blocks[0].scale, DTensor):
            x = DTensor.from_local(x, self.blocks[0].scale.device_mesh["tp"], [Replicate()])
        for block in self.blocks:
            x = block(x)
            if isinstance(x, DTensor):
                x = x.redistribute(placements=[Replicate()])
        x = self.head(x)
        return x.full_tensor() if isinstance(x, DTensor) else x


def parallel(mesh, hidden: int = 12, *, data: str | tuple[str, ...] = "dp", **options):
    model = seeded(lambda: Parallel(hidden))
    tp = mesh["tp"]
    for block in model.blocks:
        for parameter, placement in (
            (block.scale, Replicate()), (block.up.weight, Shard(0)), (block.up.bias, Shard(0)),
            (block.down.weight, Shard(1)),
        ):  # fmt: skip
            distribute_parameter(parameter, tp, [placement])
    distribute_parameter(model.head.weight, tp, [Shard(0)])
    for block in model.blocks:
        fully_shard(block, mesh[data], **options)
    return seeded(lambda: Parallel(hidden)), fully_shard(model, mesh[data], **options)


def columns(mesh) -> tuple[Tensor, Tensor]:
    rows = np.random.RandomState(7).randn(ROWS, 6).astype(np.float32)
    return Tensor(rows), Tensor(np.split(rows, mesh["dp"].size())[mesh["dp"].get_local_rank()])


@on_ranks(4)
@pytest.mark.parametrize("hidden", [12, 5])
def test_data_by_tensor_parallel(hidden: int):
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    reference, model = parallel(mesh, hidden)
    weight = model.blocks[0].up.weight
    assert tuple(weight.shape) == (hidden, 6) and weight.device_mesh == mesh
    assert isinstance(weight.placements[0], RaggedShard) and weight.placements[1] == Shard(0)
    assert weight.to_local().ndim == 1
    everything, own = columns(mesh)
    for _ in range(2):
        _, expected = differentiated(reference, dtensors=False)(everything)
        _, gradients = differentiated(model)(own)
        same_gradients(model, gradients, reference, expected)
        norm = math.sqrt(sum(float((gradient.asnumpy() ** 2).sum()) for gradient in expected))
        with count_collectives() as counted:
            close(global_grad_norm(model.trainable_params(), gradients=gradients).asnumpy(), norm, "norm")
        assert dict(counted) == {"all_reduce": 1}
        sgd(reference)(expected)
        sgd(model)(gradients)
        same_weights(model, reference)
    state = full_state_dict(model)
    load_full_state_dict(model, {name: tensor * 2 for name, tensor in state.items()})
    for name, tensor in full_state_dict(model).items():
        close(tensor.asnumpy(), 2 * state[name].asnumpy(), name, 0.0)


@on_ranks(4)
def test_optimizer_states():
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    reference, model = parallel(mesh, 5)
    with SkipDTensorDispatch():
        first, second = AdamW(reference.trainable_params()), AdamW(model.trainable_params())
    everything, own = columns(mesh)
    first(differentiated(reference, dtensors=False)(everything)[1])
    _, gradients = differentiated(model)(own)
    with SkipDTensorDispatch():
        second(tuple(gradients))
    options = StateDictOptions(full_state_dict=True)
    state = get_optimizer_state_dict(model, second, options=options)
    expected = get_optimizer_state_dict(reference, first)
    assert list(state["state"]) == list(expected["state"])
    for name, inside in expected["state"].items():
        for key, value in inside.items():
            close(state["state"][name][key].asnumpy(), value.asnumpy(), f"{name}.{key}")
    doubled = {name: {key: value * 2 for key, value in inside.items()} for name, inside in state["state"].items()}
    set_optimizer_state_dict(model, second, {**state, "state": doubled}, options=options)
    sharded = get_optimizer_state_dict(model, second)["state"]
    for name, inside in doubled.items():
        for key, value in inside.items():
            close(whole(sharded[name][key]), value.asnumpy(), f"{name}.{key}", 0.0)


@on_ranks(4)
def test_summed_in_one_order():
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    reference, model = parallel(mesh, deterministic=True)
    everything, own = columns(mesh)
    _, expected = differentiated(reference, dtensors=False)(everything)
    _, gradients = differentiated(model)(own)
    same_gradients(model, gradients, reference, expected)
    flat = np.concatenate([gradient.asnumpy().reshape(-1) for gradient in expected])
    for order in (1.0, 2.0, math.inf):
        norm = global_grad_norm(model.trainable_params(), order, gradients=gradients)
        close(norm.asnumpy(), np.linalg.norm(flat, order), f"norm {order}")


@on_ranks(2)
def test_clipping():
    reference, model = pair()
    everything = Tensor(np.random.RandomState(3).randn(8, 5).astype(np.float32))
    parameters = model.trainable_params()
    _, gradients = differentiated(model, lambda x: loss_of(model(x)))(everything)
    _, expected = differentiated(reference, dtensors=False)(everything)
    flat = np.concatenate([gradient.asnumpy().reshape(-1) for gradient in expected])
    for order in (1.0, 2.0, 3.0, math.inf):
        close(
            global_grad_norm(parameters, order, gradients=gradients).asnumpy(),
            np.linalg.norm(flat, order),
            f"norm {order}",
        )
    with pytest.raises(
        TypeError, match="clip_grad_norm_: MindSpore has no .grad, so pass gradients=gradients, the grad"
    ):
        clip_grad_norm_(parameters, 0.5)
    norm = np.linalg.norm(flat)
    close(clip_grad_norm_(parameters, 0.5, gradients=gradients).asnumpy(), norm, "norm before")
    same_gradients(model, gradients, reference, [gradient * float(0.5 / (norm + 1e-6)) for gradient in expected])
    clip_grad_norm_(parameters, 100.0, gradients=gradients)
    close(global_grad_norm(parameters, gradients=gradients).asnumpy(), 0.5, "norm after")
    with pytest.raises(ValueError, match=r"clip_grad_norm_: 13 parameters and 3 gradients; give the"):
        clip_grad_norm_(parameters, 0.25, gradients=gradients[:3])
    close(clip_grad_norm_(parameters, 0.25, gradients=gradients).asnumpy(), 0.5, "norm before")
    close(global_grad_norm(parameters, gradients=gradients).asnumpy(), 0.25, "norm after")
    gradients[0]._update_data(gradients[0].to_local() * float("nan"))
    with pytest.raises(RuntimeError, match=r"the gradients' norm of order 2.0 is nan"):
        clip_grad_norm_(parameters, 1.0, gradients=gradients, error_if_nonfinite=True)
