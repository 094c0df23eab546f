"""torch.compile of sharded blocks: one graph for all of them, the single process's gradients."""

from __future__ import annotations

import copy
import importlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_models import Net, batch, close, data_mesh, loss_of, same_gradients, same_weights, seeded, train
from test_tensor_parallel import Parallel, data, parallelize, parts
from torch import nn

from hp_fsdp import MixedPrecisionPolicy, fully_shard
from hp_testing import on_ranks

# Dynamo asks every tensor for its gradient, and hides that warning from users, but not from a filter that raises.
pytestmark = [pytest.mark.framework("torch"), pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")]


def counter(backend: str = "aot_eager") -> Any:
    with warnings.catch_warnings():  # imports warn
        warnings.simplefilter("ignore")
        importlib.import_module("torch._inductor.compile_fx")
    torch._dynamo.reset()
    return importlib.import_module("torch._dynamo.testing").CompileCounterWithBackend(backend)


def compiled(how: str, count: Any, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A model and its copy with sharded, compiled blocks."""
    reference = seeded(Net)
    model = copy.deepcopy(reference)
    for index, block in enumerate(model.blocks):
        if how == "before":
            block.compile(backend=count, fullgraph=True)
        if how == "wrapped":
            model.blocks[index] = block = torch.compile(block, backend=count, fullgraph=True)
        fully_shard(block, data_mesh(), **options)
        if how == "after":
            block.compile(backend=count, fullgraph=True)
    return reference, fully_shard(model, data_mesh(), **options)


@on_ranks(3, thorough=(1,))
@pytest.mark.parametrize("how", ["before", "after", "wrapped"])
def test_blocks_share_one_graph(how: str):
    count = counter()
    reference, model = compiled(how, count)
    if how == "wrapped":
        names = [name.replace("_orig_mod.", "") for name, _ in model.named_parameters()]
        assert names == [name for name, _ in reference.named_parameters()]
        for step in range(2):
            whole, own = batch(step)
            for net, x in ((reference, whole), (model, own)):
                loss_of(net(x)).backward()
            for ours, theirs in zip(model.parameters(), reference.parameters()):
                close(ours.grad.full_tensor(), theirs.grad, "gradient")
    else:
        train(reference, model)
    assert count.frame_count == 1, count.frame_count


@on_ranks(2)
@pytest.mark.parametrize("options", [{"deterministic": True}, {"reshard_after_forward": False}, {"comm_fusion": False}])
def test_with_options(options: dict[str, Any]):
    count = counter()
    reference, model = compiled("after", count, **options)
    train(reference, model)
    assert count.frame_count == 1


@on_ranks(2)
def test_accumulation_evaluation_and_a_new_shape():
    count = counter()
    reference, model = compiled("before", count)
    for step, more in ((0, False), (1, True)):
        whole, own = batch(step)
        model.set_requires_gradient_sync(more)
        loss_of(reference(whole)).backward()
        loss_of(model(own)).backward()
    same_gradients(model, reference)
    with torch.no_grad():
        close(model(batch(2)[1]), reference(batch(2)[1]), "evaluation")
    whole, own = batch(3)
    for net in (reference, model):
        net.zero_grad()
    loss_of(reference(torch.cat([whole, whole]))).backward()
    loss_of(model(torch.cat([own, own]))).backward()
    same_gradients(model, reference)


@pytest.mark.thorough
@pytest.mark.not_on("torch-npu-sim", reason="torch.compile's inductor wants triton-ascend for NPUs")
@on_ranks(2)
def test_mixed_precision_with_inductor():
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    count = counter("inductor")
    reference, model = compiled("after", count, mixed_precision=policy)
    train(reference, model, run=lambda net, x: loss_of(net(x).double()), limit=1e-5)
    assert count.frame_count == 1


@on_ranks(4)
def test_tensor_parallel_blocks():
    mesh, count = parts(4), counter()
    reference = seeded(Parallel)
    model = copy.deepcopy(reference)
    parallelize(model, mesh["tp"])
    for block in model.blocks:
        block.compile(backend=count, fullgraph=True)
        fully_shard(block, mesh["dp_shard"])
    fully_shard(model, mesh["dp_shard"])
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in (reference, model)]
    for step in range(2):
        whole, own = data(mesh, step)
        loss_of(reference(whole)).backward()
        loss_of(model(own)).backward()
        same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        same_weights(model, reference)
    assert count.frame_count >= 1


@on_ranks(1)
@pytest.mark.parametrize("whole", ["function", "method"])
def test_a_sharded_module_inside_a_graph_is_refused(whole: str):
    assert dist.is_initialized()
    model = seeded(Net)
    for block in model.blocks:
        fully_shard(block)
    if whole == "function":
        model = torch.compile(fully_shard(model), backend="eager")
    else:
        model.compile(backend="eager")
    with pytest.raises(Exception, match=r"torch.compile cannot take gathering .* module.compile\(\) on each sharded"):
        model(batch()[1])
    parts = seeded(Net)
    for block in parts.blocks:
        fully_shard(block)
        block.compile(backend="eager")
    parts(batch()[1])
