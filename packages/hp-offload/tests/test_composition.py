"""Checkpoints and swaps of models that are sharded: the gradients of one process."""

from __future__ import annotations

import copy

import pytest
import torch
from offload_models import Net, net

from hp_dtensor import DTensor, init_device_mesh
from hp_fsdp import CPUOffloadPolicy, fully_shard
from hp_offload import (
    CheckpointPolicy,
    SwapManager,
    checkpoint_exclude_wrapper,
    checkpoint_wrapper,
    fit_memory,
    keep_collectives_policy,
    place,
    swap_wrapper,
    trace_saved,
)
from hp_optim import AdamW, SwapOptimizerConfig, swap_optimizer
from hp_platform import count_collectives, get_platform
from hp_styles import ColwiseParallel, RowwiseParallel, parallelize_module
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
SAVE, SWAP, RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_SWAP, CheckpointPolicy.MUST_RECOMPUTE


def by_table(ctx, op, *args, **kwargs):
    if op is not torch.ops.aten.addmm.default:
        return RECOMPUTE
    return SAVE if args[2].shape[-1] > args[2].shape[0] else SWAP


CHANGES = {
    "full": checkpoint_wrapper,
    "table": lambda block: checkpoint_wrapper(block, by_table),
    "excluded": lambda block: (checkpoint_exclude_wrapper(block.up), checkpoint_wrapper(block)),
    "swap": swap_wrapper,
    "inputs": lambda block: checkpoint_wrapper(block, swap_inputs=True),
}


def batch(rows: slice = slice(None), step: int = 0) -> torch.Tensor:
    values = torch.linspace(-1, 1, 32, dtype=torch.float64).view(4, 8) * (step + 1)
    return values[rows].to(device_type())


def compare(model: torch.nn.Module, reference: torch.nn.Module, bits: bool) -> None:
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        other = expected[name].grad
        other = other.full_tensor() if isinstance(other, DTensor) else other
        tolerance = {"rtol": 0, "atol": 0} if bits else {"rtol": 1e-12, "atol": 1e-12}
        torch.testing.assert_close(gradient, other, **tolerance, msg=name)


@pytest.mark.smoke
@on_ranks(2)
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_fully_sharded_blocks(change: str, inside: bool) -> None:
    """The same bits as fully_shard alone, and the gradients of one process."""
    single = net(3, dropout=0.0).to(device_type())
    models = [copy.deepcopy(single), copy.deepcopy(single)]
    for model, changed in zip(models, (False, True)):
        for block in model.blocks:
            if changed and inside:
                CHANGES[change](block)
            fully_shard(block)
            if changed and not inside:
                CHANGES[change](block)
        fully_shard(model)
    rank = get_platform().groups.rank()
    for step in range(2):
        for model in models:
            model.zero_grad()
            model(batch(slice(2 * rank, 2 * rank + 2), step)).backward()
        compare(models[1], models[0], bits=True)
        single.zero_grad()
        (single(batch(step=step)) / 2).backward()
        compare(models[1], single, bits=False)


@on_ranks(2)
@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("change", [name for name in CHANGES if name != "excluded"])
def test_tensor_parallel_blocks(change: str, local: bool) -> None:
    single = net(3, dropout=0.0).to(device_type())
    mesh = init_device_mesh(device_type(), (2,))
    models: list[Net] = [copy.deepcopy(single), copy.deepcopy(single)]
    for model, changed in zip(models, (False, True)):
        for block in model.blocks:
            plan = {"up": ColwiseParallel(use_local_output=local), "down": RowwiseParallel(use_local_output=True)}
            parallelize_module(block, mesh, plan)
            if changed:
                CHANGES[change](block)
    for step in range(3):
        for model in (*models, single):
            model.zero_grad()
            model(batch(step=step)).backward()
        compare(models[1], models[0], bits=True)
        compare(models[1], single, bits=False)


@pytest.mark.device
@on_ranks(2)
@pytest.mark.parametrize("parallel", ["fsdp", "tp"])
def test_a_budget_for_sharded_models(parallel: str) -> None:
    """fit_memory plans in the first step; gradients have the bits of the same model without it."""
    pytest.importorskip("scipy", reason="fit_memory needs scipy, in hp-offload's extra plan")
    single = net(4, dropout=0.0).to(device_type())
    mesh = init_device_mesh(device_type(), (2,))
    models: list[Net] = [copy.deepcopy(single), copy.deepcopy(single)]
    rank = get_platform().groups.rank()
    rows = slice(2 * rank, 2 * rank + 2) if parallel == "fsdp" else slice(None)
    for model in models:
        for block in model.blocks:
            if parallel == "fsdp":
                fully_shard(block)
            else:
                plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(block, mesh, plan)
        if parallel == "fsdp":
            fully_shard(model)
    total = sum(each.bytes for each in trace_saved(models[0], (batch(rows),)))
    assert total > 0 and all(parameter.grad is None for parameter in models[0].parameters())
    fit_memory(models[1], int(0.75 * total), bandwidth=1e15)
    for step in range(3):
        for model in models:
            model.zero_grad()
            model(batch(rows, step)).backward()
        compare(models[1], models[0], bits=True)
    assert SwapManager().host_bytes > 0
    too_little = fit_memory(copy.deepcopy(single), 1)
    with pytest.raises(ValueError, match="a budget of 1 B .* is below the least"):  # on all ranks alike
        too_little(batch())


@on_ranks(2)
def test_collectives_that_are_kept_do_not_run_again() -> None:
    single = net(3, dropout=0.0).to(device_type())
    mesh = init_device_mesh(device_type(), (2,))
    counts, models = [], []
    policies = (None, "full", keep_collectives_policy)
    for policy in policies:
        model = copy.deepcopy(single)
        for block in model.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
            if policy is not None:
                checkpoint_wrapper(block, policy, early_stop=False)
        for step in range(3):
            model.zero_grad()
            with count_collectives() as counted:
                model(batch(step=step)).backward()
        counts.append(counted.total())
        models.append(model)
    assert counts[0] == counts[2] < counts[1], "in forward and backward; once more where all is computed again; kept"
    compare(models[1], models[0], bits=True)
    compare(models[2], models[0], bits=True)


@on_ranks(2)
def test_parameters_activations_and_states_share_one_link() -> None:
    """Copies begin in the order of their deadlines: each party's for the block before, then the optimizer's slices."""
    manager, models = SwapManager(), []
    for link in (None, manager):
        model = net(4, dropout=0.0).to(device_type())
        for block in model.blocks:
            if link is not None:
                swap_wrapper(block)
            fully_shard(block, offload_policy=CPUOffloadPolicy(link=link))
        fully_shard(model, offload_policy=CPUOffloadPolicy(link=link))
        optimizer = AdamW(model.named_parameters(), lr=0.1)
        if link is not None and device_type() == "cpu":  # elsewhere states of parameters on the host are there already
            swap_optimizer(optimizer, SwapOptimizerConfig(swap_times=2, min_numel=1), link=link)
        for step in range(2):
            optimizer.zero_grad()
            with manager.record() as events:
                model(batch(step=step)).backward()
                optimizer.step()
        models.append(model)
    compare(models[1], models[0], bits=True)
    groups = list(dict.fromkeys(name for what, name in events if what == "launch_offload"))
    order = []
    for what, name in events:
        if what == "launch_load":
            order.append(f"activations {groups.index(name)}")
        elif what == "load":
            order.append("states" if name.startswith("AdamW") else "parameters")
    assert order[:5] == ["parameters"] * 5, "forward: the root and four blocks"
    assert order[5:12] == [
        "parameters",  # of block 3, whose activations never left
        "parameters",  # of block 2, during block 3's backward
        "activations 2",
        "parameters",
        "activations 1",
        "parameters",
        "activations 0",
    ]
    assert set(order[12:]) <= {"states"} and (len(order) > 13 or device_type() != "cpu")


@on_ranks(2)
def test_homes_of_sharded_models_and_caches_of_one_rank_are_refused_on_all() -> None:
    rank = get_platform().groups.rank()
    model = net(3).to(device_type())
    before = [each.data_ptr() for each in model.parameters()]
    error, text = (ValueError, "^A cache of 8 bytes") if rank else (RuntimeError, "place failed on rank 1.* of 8 bytes")
    with pytest.raises(error, match=text):
        place(model, {"blocks.*": "host"}, cache=8 if rank else 2**20)
    assert [each.data_ptr() for each in model.parameters()] == before
    fully_shard(model.blocks[1])
    with pytest.raises(NotImplementedError, match=r"blocks\.1\..* is a DTensor.*: sharded parameters"):
        place(model, {"blocks.*": "host"})
