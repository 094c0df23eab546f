"""Models in training: fully_shard, tensor parallelism and optimizers, resumed in another layout."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from hp_checkpoint import Checkpointer, CheckpointError, Keep, load, load_model, save
from hp_dtensor import Shard, distribute_tensor, init_device_mesh
from hp_fsdp import full_state_dict, fully_shard
from hp_optim import AdamW, AdamW8bit, get_hyper_lr_scheduler, get_hyper_optimizer
from hp_platform import get_platform
from hp_styles import ColwiseParallel, RowwiseParallel, parallelize_module
from hp_testing import device_type, on_ranks


def plain(seed=0, hidden=9):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, hidden), nn.GELU(), nn.Linear(hidden, 5, bias=False)).to(device_type())


def sharded(model, dp, tp):
    mesh = init_device_mesh(device_type(), (dp, tp), mesh_dim_names=("dp", "tp"))
    if tp > 1:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(model, mesh["dp"])


def optimizer_of(kind, model):
    if kind == "torch":
        return torch.optim.AdamW(model.parameters(), lr=0.1)
    if kind == "adamw":
        return AdamW(model.parameters(), lr=0.1)
    named = list(model.named_parameters())
    matrices, others = [n for n, p in named if p.ndim == 2], [n for n, p in named if p.ndim != 2]
    return get_hyper_optimizer(model, matrices, others, muon_kwargs={"lr": 0.1}, adamw_kwargs={"lr": 0.1})


def train(model, optimizer, steps, schedule=None):
    for step in range(*steps):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).to(device_type())
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()


def whole(model):
    return {name: value.clone() for name, value in full_state_dict(model).items()}


@on_ranks(4, timeout=120)
@pytest.mark.parametrize("kind", ["torch", "adamw", "muon"])
def test_training_goes_on_in_another_layout(tmp_path, kind):
    """Weights after two more steps are those of a run that was loaded in the old layout, up to the order of sums."""
    hidden = 8 if kind == "muon" else 9  # uneven: each rank has other units
    model = sharded(plain(0, hidden), 2, 2)
    optimizer = optimizer_of(kind, model)
    train(model, optimizer, (0, 2))
    with Checkpointer(tmp_path / "run", keep=Keep(last=1)) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, model, optimizer, data={"next": 8}, extra={"note": "x", "t": torch.arange(3)})
    checkpoints = Checkpointer(tmp_path / "run", background=False)
    assert checkpoints.steps() == [2]
    saved = whole(model)
    train(model, optimizer, (2, 4))
    for dp, tp in ((4, 1), (1, 4)):
        other = sharded(plain(1, hidden), dp, tp)
        new = optimizer_of(kind, other)
        loaded = checkpoints.load(other, new)
        assert loaded.step == 2 and loaded.data == {"next": 8} and loaded.extra["t"].tolist() == [0, 1, 2]
        for name, value in whole(other).items():
            assert torch.equal(value, saved[name]), name
        train(other, new, (2, 4))
        for name, value in whole(other).items():
            torch.testing.assert_close(value, whole(model)[name], rtol=1e-4, atol=1e-5)


@pytest.mark.smoke
@on_ranks(2)
def test_a_resumed_run_is_the_same_run(tmp_path):
    """Same layout: bit for bit, with the schedule."""

    def start(seed):
        model = sharded(plain(seed), 2, 1)
        optimizer = optimizer_of("muon", model)
        return model, optimizer, get_hyper_lr_scheduler(optimizer, total_steps=10, warmup_steps=2, lr=0.1)

    model, optimizer, schedule = start(0)
    train(model, optimizer, (0, 3), schedule)
    checkpoints = Checkpointer(tmp_path / "run", background=False)
    checkpoints.save(3, model, optimizer, schedule=schedule)
    train(model, optimizer, (3, 5), schedule)
    other, new, other_schedule = start(1)
    assert checkpoints.load(other, new, schedule=other_schedule).step == 3 and new.iteration == 3
    train(other, new, (3, 5), other_schedule)
    for name, value in whole(other).items():
        assert torch.equal(value, whole(model)[name]), name


@on_ranks(2)
def test_states_of_eight_bits_are_saved_as_values(tmp_path):
    """They give the same codes again, and load into AdamW, whose states load into them."""

    def start(seed, kind):
        model = sharded(plain(seed, 2048), 2, 1)
        return model, kind(model.parameters(), lr=0.1)

    def coded(parameters, lr):
        return AdamW8bit(parameters, lr, compiled=False)

    model, optimizer = start(0, coded)
    train(model, optimizer, (0, 2))
    checkpoints = Checkpointer(tmp_path / "run", background=False)
    checkpoints.save(2, model, optimizer)
    train(model, optimizer, (2, 4))
    other, new = start(1, coded)
    train(other, new, (0, 1))
    between, values = start(1, AdamW)
    checkpoints.load(between, values, step=2)
    checkpoints.save(3, between, values)
    for step in (2, 3):
        assert "exp_avg_code" in {key for state in new.state.values() for key in state}
        checkpoints.load(other, new, step=step)
        train(other, new, (2, 4))
        for name, value in whole(other).items():
            assert torch.equal(value, whole(model)[name]), name


@on_ranks(2)
def test_states_that_are_missing_are_errors(tmp_path):
    model = sharded(plain(), 2, 1)
    checkpoints = Checkpointer(tmp_path / "run", background=False)
    with pytest.raises(
        FileNotFoundError, match="a checkpoint is not in .*; it has no checkpoint, so start without a load"
    ):
        checkpoints.load(model)
    checkpoints.save(1, model)
    with pytest.raises(ValueError, match="the checkpoint has no optimizer; load it without one"):
        checkpoints.load(model, optimizer_of("torch", model))
    assert checkpoints.load(model).step == 1
    other = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, other, (0, 1))
    checkpoints.save(2, model, other)
    with pytest.raises(
        ValueError, match="optimizer is of another class: it has dampening, momentum, and lacks betas, eps; build the"
    ):
        checkpoints.load(model, optimizer_of("torch", model))
    new = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.8)
    assert checkpoints.load(model, new).step == checkpoints.load(model).step == 2
    assert new.param_groups[0]["lr"] == 0.1 and new.param_groups[0]["momentum"] == 0.9
    buffers = [[each.state[key]["momentum_buffer"].to_local() for key in model.parameters()] for each in (new, other)]
    assert all(map(torch.equal, *buffers))
    with pytest.raises(TypeError, match=r"keep must be a Keep, as Keep\(last=2\), got 3"):
        Checkpointer(tmp_path / "run", keep=3, background=False)
    with pytest.raises(FileNotFoundError, match=r"step 5 is not in .*; it has the steps \[1, 2\]"):
        checkpoints.load(model, step=5)
    torch.manual_seed(0)
    small = sharded(nn.Sequential(nn.Linear(6, 10)).to(device_type()), 2, 1)
    with pytest.raises(ValueError, match="has 1 of 3 tensors that the model lacks: '2.weight'. It is of another model"):
        checkpoints.load(small)


@on_ranks(2)
def test_a_state_of_unknown_layout_is_refused(tmp_path):
    model = sharded(plain(), 2, 1)
    optimizer = optimizer_of("torch", model)
    train(model, optimizer, (0, 1))
    parameter = next(each for each in model.parameters() if each.to_local().numel())
    optimizer.state[parameter]["codes"] = torch.zeros(7)
    expected = "rank 0: checkpoint: state 'codes' of '0.weight' in AdamW is a plain tensor of shape .7,., and the param"
    checkpoints = Checkpointer(tmp_path / "run", background=False)
    with pytest.raises(CheckpointError, match=expected):
        checkpoints.save(1, model, optimizer)
    other = optimizer_of("adamw", model)  # an optimizer whose states are DTensors, as the error says
    train(model, other, (0, 1))
    checkpoints.save(1, model, other)
    assert checkpoints.load(model, optimizer_of("adamw", model)).step == 1


@on_ranks(1)
def test_what_a_load_could_not_bring_back_is_refused_by_the_save(tmp_path):
    class Counter(nn.Linear):
        def get_extra_state(self):
            return torch.ones(1)

        def own(self):
            return {**dict(self.named_parameters()), **dict(self.named_buffers())}

        def set_extra_state(self, state):
            pass

    checkpoints = Checkpointer(tmp_path / "run", background=False)
    with pytest.raises(TypeError, match="'_extra_state' of state_dict.. is no parameter or buffer of the Counter"):
        checkpoints.save(1, model := Counter(2, 2))
    checkpoints.save(1, model.own(), optimizer_of("torch", model), extra={"own": model.get_extra_state()})
    other = Counter(2, 2)
    loaded = checkpoints.load(other.own(), optimizer_of("torch", other))
    assert torch.equal(other.weight, model.weight) and loaded.extra["own"].tolist() == [1.0]
    with pytest.raises(TypeError, match="'mean' is BF16, which NumPy lacks, .* convert it before the call, as by .f"):
        checkpoints.save(2, plain(), extra={"mean": torch.ones(2, dtype=torch.bfloat16)})
    checkpoints.save(2, plain(), extra={"mean": torch.ones(2, dtype=torch.bfloat16).float()})
    with pytest.raises(ValueError, match="the checkpoint has no schedule; load it without one"):
        checkpoints.load(plain(), schedule=torch.optim.lr_scheduler.ConstantLR(optimizer_of("torch", plain())))
    assert checkpoints.load(plain()).extra["mean"].tolist() == [1.0, 1.0]


@on_ranks(2)
def test_an_untied_checkpoint_of_a_tied_model(tmp_path):
    """One value of two would be lost without a word."""
    untied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).to(device_type())
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).to(device_type())
    model[1].weight = model[0].weight
    before = model[0].weight.clone()
    with Checkpointer(tmp_path, background=False) as checkpoints:
        checkpoints.save(1, untied)
        for load in (lambda: checkpoints.load(model), lambda: load_model(model, checkpoints.path(1))):
            with pytest.raises(ValueError, match="'0.weight' and '1.weight' are one tensor here, and have different"):
                load()
        assert torch.equal(model[0].weight, before)
        with torch.no_grad():
            untied[1].weight.copy_(untied[0].weight)
        checkpoints.save(2, untied)
        checkpoints.load(model)
        assert torch.equal(model[1].weight, untied[1].weight)


@on_ranks(2)
@pytest.mark.parametrize("beside", [True, False])
def test_ranks_that_call_with_another_step(tmp_path, beside):
    """Before anything is written, on all ranks alike; the next save is as any other."""
    model, rank = sharded(plain(), 2, 1), get_platform().groups.rank()
    with Checkpointer(tmp_path / "run", background=beside) as checkpoints:
        expected = "ranks save different targets: rank 0: .*step-00000004', rank 1: .*step-00000005'; all save one"
        with pytest.raises(ValueError, match=expected):
            checkpoints.save(4 + rank, model)
        with pytest.raises(CheckpointError, match="save failed on 1 of 2 ranks: rank 1: save: step must be a number"):
            checkpoints.save(4 - 9 * rank, model)
        assert not (tmp_path / "run").exists()
        checkpoints.save(4, model)
        checkpoints.save(5, model).wait()
        with pytest.raises(ValueError, match="all ranks load one checkpoint, got .*step-00000004', '.*step-00000005'"):
            checkpoints.load(model, step=4 + rank)
        with pytest.raises(CheckpointError, match="load failed on 1 of 2 ranks: rank 1: load: step 9 is not in"):
            checkpoints.load(model, step=4 + 5 * rank)
        assert checkpoints.load(model, step=5).step == 5


@on_ranks(2)
def test_descriptors_do_not_grow_with_the_tensors(tmp_path, monkeypatch):
    """Files are open one at a time; a load that exchanges bytes has the memory and the pipe of the other rank, too."""
    mesh = init_device_mesh(device_type(), (2,))

    def state(value, placement):
        array = torch.full((2, 4), value, device=device_type())
        return {"model": {f"w{n}": distribute_tensor(array, mesh, [placement]) for n in range(200)}}

    saved, loaded = state(1.0, Shard(0)), state(0.0, Shard(1))
    for name, call, of, limit in (("pwrite", save, saved, 4), ("preadv", load, loaded, 6)):
        call(of, checkpoint_id=tmp_path / "c")  # opens what its collectives need
        before, most, own = len(os.listdir("/proc/self/fd")), [0], getattr(os, name)

        def counted(*arguments, own=own, most=most):
            most.append(len(os.listdir("/proc/self/fd")))
            return own(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(os, name, counted)
            call(of, checkpoint_id=tmp_path / "c")
        assert max(most) - before <= limit, (name, limit)
    assert all(bool((value.to_local() == 1).all()) for value in loaded["model"].values())
