"""Random mixes of policies on models that are sharded: the bits of the same model without them."""

from __future__ import annotations

import copy
import random
import warnings
import zlib
from collections.abc import Callable

import pytest
import torch
from offload_models import net
from torch import nn

from hp_dtensor import implicit_replication, init_device_mesh
from hp_fsdp import fully_shard
from hp_offload import CheckpointPolicy, checkpoint_exclude_wrapper, checkpoint_wrapper, swap_wrapper
from hp_platform import get_platform
from hp_platform.communication.checks import observers
from hp_platform.frames import frame
from hp_platform.torch.heavy import DeferredGradients, mark
from hp_styles import ColwiseParallel, RowwiseParallel, parallelize_module
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
CASES = 6
aten = torch.ops.aten


class Experts(nn.Module):
    """As transformers' own: loops over experts, whose products are functions."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.gate_up_proj, self.down_proj = nn.Parameter(torch.randn(4, 24, 8)), nn.Parameter(torch.randn(4, 8, 12))

    def forward(self, tokens, chosen, weights):
        out = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            rows, places = torch.where(chosen == expert)
            gate, up = (tokens[rows] @ self.gate_up_proj[expert].T).chunk(2, -1)
            expert_out = (torch.tanh(gate) * up) @ self.down_proj[expert].T
            out.index_add_(0, rows, expert_out * weights[rows, places, None])
        return out


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4), Experts()

    def forward(self, tokens):
        weights, chosen = self.gate(tokens).softmax(-1).topk(2, -1)
        return tokens + self.experts(tokens, chosen, weights)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Routed() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


def torchs_fully_shard(module: nn.Module) -> None:
    from torch.distributed.fsdp import fully_shard as shard

    shard(module)


def fsdp(shard: Callable[[nn.Module], object]) -> Callable[[nn.Module], None]:
    def apply(model: nn.Module) -> None:
        for block in model.blocks:
            shard(block)
        shard(model)

    return apply


def tensor_parallel(model: nn.Module) -> None:
    mesh = init_device_mesh(device_type(), (2,))
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def expert_parallel(model: nn.Module) -> None:
    mesh = init_device_mesh(device_type(), (2,))
    plan = {"experts.*_proj": "grouped_gemm", "experts": "ep_dispatch_experts", "gate": "ep_router"}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)


KINDS = {
    "torch's fully_shard": fsdp(torchs_fully_shard),
    "fully_shard": fsdp(fully_shard),
    "tensor parallel": tensor_parallel,
    "expert parallel": expert_parallel,
}


def mix(model: nn.Module, draw: random.Random) -> None:
    """Let each block, and parts of it, be left alone, computed again, kept by a policy, excluded or swapped."""
    kept = draw.choice([(aten.addmm.default,), (aten.mm.default,), (aten.addmm.default, aten.mm.default)])
    answer = draw.choice([CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_SWAP])

    def policy(ctx, op, *args, **kwargs):
        return answer if op in kept else CheckpointPolicy.MUST_RECOMPUTE

    for block in model.blocks:
        for name, part in block.named_children():
            change = draw.choice([None, None, checkpoint_wrapper, checkpoint_exclude_wrapper, swap_wrapper])
            if change is not None and name in ("norm", "dropout", "down"):
                change(part)
        options = {"early_stop": draw.random() < 0.7, "swap_inputs": draw.random() < 0.3}
        kind = draw.choice(["", "full", "table", "table", "swap"])
        if kind == "swap":
            swap_wrapper(block)
        elif kind:
            checkpoint_wrapper(block, "full" if kind == "full" else policy, **options)


def gradients(model: nn.Module, rank: int) -> list[torch.Tensor]:
    torch.manual_seed(rank)
    dtype = next(model.parameters()).dtype
    values = torch.linspace(-1, 1, 32, dtype=dtype, device=device_type()).view(4, 8)
    found = []
    for step in range(3):
        model.zero_grad()
        with implicit_replication():
            model(values * (step + 1 + rank)).backward()
        for parameter in model.parameters():
            gradient = parameter.grad
            found.append(gradient.to_local() if hasattr(gradient, "to_local") else gradient)
    return [each.clone() for each in found if each is not None]


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_random_mixes(kind: str) -> None:
    torch.manual_seed(0)
    rank, draw = get_platform().groups.rank(), random.Random(0)
    single = (Mixture().double() if kind == "expert parallel" else net(3)).to(device_type())
    if kind == "torch's fully_shard":
        single = single.float()  # NPUs do not reduce float64
    shard, offset = KINDS[kind], rank if "fully_shard" in kind else 0
    plain = copy.deepcopy(single)
    shard(plain)
    expected = gradients(plain, offset)
    for case in range(CASES):
        model = copy.deepcopy(single)
        inside = draw.random() < 0.5
        if inside:
            mix(model, draw)
        shard(model)
        if not inside:
            mix(model, draw)
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "policy_fn of .* cannot become a table"
            )  # DTensors stay with torch's modes
            found = gradients(model, offset)
        assert len(found) == len(expected) and all(map(torch.equal, found, expected)), f"case {case}"


@on_ranks(2)
@pytest.mark.parametrize("kind", ["fully_shard", "tensor parallel", "expert parallel"])
def test_ranks_communicate_in_one_order(kind: str) -> None:
    """Forward, and backward with what it computes again."""
    torch.manual_seed(0)
    model = (Mixture().double() if kind == "expert parallel" else net(3)).to(device_type())
    KINDS[kind](model)
    orders, order = [], []
    for wrapped in (False, True):
        if wrapped:
            for block in model.blocks:
                checkpoint_wrapper(block, early_stop=False)
        order = []
        observe = lambda what, size, group, order=order: order.append(what)  # noqa: E731
        observers.append(observe)
        try:
            gradients(model, 0)
        finally:
            observers.remove(observe)
        orders.append(order)
    codes = torch.tensor([hash_of(each) for each in orders])
    others = [torch.zeros_like(codes) for _ in range(2)]
    torch.distributed.all_gather(others, codes)
    assert torch.equal(*others), "the other rank had another order"
    assert orders[0] and (len(orders[1]) > len(orders[0]) or kind == "fully_shard")


def hash_of(order: list[str]) -> int:
    return zlib.crc32(" ".join(order).encode())


@pytest.mark.parametrize("seed", range(6))
def test_split_backward(seed: int) -> None:
    """Gradients of weights that are put off, whatever is computed again, kept or swapped."""
    expected, found = net(3), net(3)
    mix(found, random.Random(seed))
    results = []
    for model in (expected, found):
        torch.manual_seed(0)
        for block in model.blocks:
            mark(block)
        for step in range(3):
            model.zero_grad()
            deferred = DeferredGradients()
            x = torch.linspace(-1, 1, 32, dtype=torch.float64).view(4, 8).mul(step + 1).requires_grad_()
            with frame(weights=deferred):
                out = model(x)
            out.backward()
            assert len(deferred) > 0
            deferred.run()
            results.append([x.grad, *(parameter.grad for parameter in model.parameters())])
    for plain, mixed in zip(results[:3], results[3:]):
        assert all(map(torch.equal, plain, mixed))
