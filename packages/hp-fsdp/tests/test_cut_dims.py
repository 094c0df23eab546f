"""`shard_placement_fn` that returns a `Shard` of any dim: training, states, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsdp_models import (
    Net,
    batch,
    close,
    compared,
    data_mesh,
    loss_of,
    pair,
    same_gradients,
    same_weights,
    seeded,
    train,
)
from torch import nn

from hp_dtensor import Replicate, Shard, init_device_mesh, init_empty_weights, init_parameters
from hp_fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    StateDictOptions,
    clip_grad_norm_,
    full_state_dict,
    fully_shard,
    get_model_state_dict,
    get_optimizer_state_dict,
    load_full_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from hp_platform import count_collectives
from hp_styles import ColwiseParallel, RowwiseParallel, parallelize_module
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")


def last(parameter: nn.Parameter) -> Shard | None:
    """Along the last dim, of sizes that no number of ranks divides."""
    return Shard(-1) if parameter.dim() > 1 else None


class Convolutions(nn.Module):
    """Weights of three dims, cut along the one in the middle, which has fewer slices than ranks in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv1d(5, 2, 3), nn.Conv1d(2, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x.reshape(-1, 5, 1).expand(-1, 5, 4)).sin()).mean(-1)


def middle(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.dim() == 3 else None


@on_ranks(2, 3)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reshard_after_forward": False},
        {"comm_fusion": False},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    ],
)
def test_training(options):
    _, model = pair(shard_placement_fn=last, **options)
    weight = model.blocks[0].up.weight
    assert weight.placements == (Shard(1),) and weight.shape == (11, 7)
    assert weight.to_local().shape == weight._spec.local_shape
    assert weight.to_local().stride() == (1, 11), "slices along the last dim are runs of memory"
    train(*pair(shard_placement_fn=last, **options), make=lambda params: torch.optim.AdamW(params, lr=0.01))


@on_ranks(2, 3)
def test_a_dim_in_the_middle():
    train(*pair(Convolutions, shard_placement_fn=middle))


@on_ranks(2)
def test_parts_and_gathered_parameters_look_into_the_buffers():
    """Nothing is copied: one gather and one reduction a parameter, of buffers that the tensors look into."""
    model = fully_shard(seeded(Net), data_mesh(), shard_placement_fn=last)
    compared(model)
    with count_collectives() as counts:
        loss_of(model(batch()[1])).backward()
    assert counts["all_gather"] == counts["reduce_scatter"] == 1 + sum(p.dim() > 1 for p in model.parameters())
    for bucket in model._hsdp_group.buckets:
        for parameter in bucket.parameters:
            assert parameter.unsharded.untyped_storage().data_ptr() == bucket.full_storage.data_ptr()
            local = parameter.sharded.to_local()
            assert not local.numel() or local.untyped_storage().data_ptr() == bucket.shard.untyped_storage().data_ptr()


@on_ranks(4)
def test_replicas_and_smaller_groups():
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    _, model = pair(mesh=mesh, shard_placement_fn=last)
    assert model.first.weight.placements == (Replicate(), Shard(1))
    train(*pair(mesh=mesh, shard_placement_fn=last), steps=2)
    train(*pair(shard_placement_fn=last, reshard_after_forward=2), steps=2)


@on_ranks(2)
def test_accumulation_clipping_and_mixed_precision():
    reference, model = pair(shard_placement_fn=last)
    for part in range(2):
        whole, own = batch(part)
        model.set_requires_gradient_sync(part == 1)
        loss_of(reference(whole)).backward()
        loss_of(model(own)).backward()
    norm = clip_grad_norm_(model.parameters(), 0.1)
    close(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.1), "norm")
    same_gradients(model, reference)
    policy = MixedPrecisionPolicy(torch.float32, torch.float64)
    train(*pair(shard_placement_fn=last, mixed_precision=policy), steps=1, limit=1e-5)


@on_ranks(4)
def test_tensor_parallel_on_the_other_dim():
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    reference = seeded(lambda: Net(width=6))
    model = copy.deepcopy(reference)

    def over(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if getattr(parameter, "placements", None) == (Shard(0),) and parameter.dim() == 2 else None

    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh["dp"], shard_placement_fn=over)
    fully_shard(model, mesh["dp"])
    assert model.blocks[0].up.weight.placements == (Shard(1), Shard(0))
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in (reference, model)]
    for step in range(2):
        whole = batch(step)[0]
        own = whole.chunk(2)[mesh.get_local_rank("dp")]
        for net, x in ((reference, whole), (model, own)):
            loss_of(net(x)).backward()
        same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same_weights(model, reference)
    down = nn.Linear(6, 6, device=device_type())
    parallelize_module(down, mesh["tp"], RowwiseParallel())
    with pytest.raises(ValueError, match=r"returned Shard\(1\) for 'weight', which is placed \(Shard\(1\),\) on"):
        fully_shard(down, mesh["dp"], shard_placement_fn=last)


@on_ranks(2, 3)
def test_states_of_models_and_optimizers():
    """Into a model that is cut anywhere, and back; a dim of two slices leaves the third rank without any."""
    reference, model = pair(Convolutions, shard_placement_fn=middle)
    other = pair(Convolutions)[1]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in (reference, model, other)]

    def step(number: int, *nets: nn.Module) -> None:
        for net, optimizer in zip((reference, model, other), optimizers, strict=True):
            if net in nets:
                loss_of(net(batch(number)[0 if net is reference else 1])).backward()
                optimizer.step()
                optimizer.zero_grad()

    step(0, reference, model)
    full = StateDictOptions(full_state_dict=True)
    for options in (StateDictOptions(), full):
        set_model_state_dict(other, get_model_state_dict(model, options=options), options=options)
        same_weights(other, reference)
    state = get_optimizer_state_dict(model, optimizers[1], options=full)
    set_optimizer_state_dict(other, optimizers[2], state, options=full)
    step(1, reference, other)
    same_weights(other, reference)
    set_model_state_dict(model, get_model_state_dict(other))
    state = get_optimizer_state_dict(other, optimizers[2], options=full)
    set_optimizer_state_dict(model, optimizers[1], state, options=full)
    step(2, reference, model)
    same_weights(model, reference)
    load_full_state_dict(other, full_state_dict(model))
    model.load_state_dict(other.state_dict())
    same_weights(model, reference)


@on_ranks(2)
def test_models_on_meta_casts_and_copies():
    torch.manual_seed(5)
    with torch.device(device_type()):
        reference = Net()
    with init_empty_weights():
        model = fully_shard(Net(), data_mesh(), shard_placement_fn=last)
    torch.manual_seed(5)
    init_parameters(model)
    for name, tensor in full_state_dict(model).items():
        assert torch.equal(tensor, reference.state_dict()[name]), name
    model.double()
    train(reference.double(), model, steps=1)
    model.first = nn.Sequential(model.first, nn.Linear(7, 7, device=device_type(), dtype=torch.float64))
    compared(model)  # of a group whose parameters were on meta
    assert model.first[1].weight.placements == (Shard(1),)
    with pytest.raises(ValueError, match="as a copy of one that is sharded"):
        fully_shard(copy.deepcopy(model.last), data_mesh(), shard_placement_fn=last)


@on_ranks(2)
def test_copies_of_cut_parameters_join():
    reference, model = seeded(Twice), seeded(Twice)
    fully_shard(model, data_mesh(), shard_placement_fn=last)
    train(reference, model, steps=1)
    for net in (reference, model):
        net.layers.append(copy.deepcopy(net.layers[0]))
    compared(model)
    assert model.layers[1].weight.placements == (Shard(1),)
    assert model.layers[1].weight.to_local().numel() < model.layers[1].weight.numel()
    train(reference, model, steps=1)


class Recurrent(nn.Module):
    """Its weights are set by name, and flattened."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.cell = nn.Embedding(6, 5), nn.LSTM(5, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(3, device=x.device)
        return self.cell(x.unsqueeze(1) + self.table(places))[0].mean(1)


@on_ranks(2)
def test_recurrent_weights_and_tables():
    train(*pair(Recurrent, shard_placement_fn=last), steps=2)


@on_ranks(2)
def test_checkpoints_go_between_cuts(tmp_path):
    reference, model = pair(shard_placement_fn=last)
    other = pair()[1]
    for place, (source, target) in enumerate([(model, other), (other, model)]):
        dcp.save({"model": get_model_state_dict(source)}, checkpoint_id=tmp_path / str(place))
        with torch.no_grad():
            for parameter in target.parameters():
                parameter.zero_()
        dcp.load({"model": get_model_state_dict(target)}, checkpoint_id=tmp_path / str(place))
        same_weights(target, reference)


class Twice(nn.Module):
    """Layers one after the other, of which more may come."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).sin()
        return x


@on_ranks(1)
def test_dims_that_cannot_be():
    text = r"Shard\(1\) for 'first.weight' of shape \(7, 5\): deterministic=True adds in blocks.*Return Shard\(0\)"
    with pytest.raises(NotImplementedError, match=text):
        fully_shard(seeded(Net), data_mesh(), deterministic=True, shard_placement_fn=lambda p: Shard(1))
    with pytest.raises(ValueError, match=r"Shard\(2\) for 'first.weight' of shape \(7, 5\), which has no such dim"):
        fully_shard(seeded(Net), data_mesh(), shard_placement_fn=lambda p: Shard(2))
