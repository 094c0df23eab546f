"""Embeddings sharded over the vocabulary or over the features: outputs, gradients, padding, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_platform import count_collectives
from hp_styles import ColwiseParallel, RowwiseParallel, parallelize_module
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
R = Replicate()
STYLES: dict[str, tuple[Any, dict[str, int]]] = {
    # style, and the collectives of forward where parts are equal
    "rows": (lambda: RowwiseParallel(use_local_output=False), {"all_reduce": 1}),
    "rows, sequence": (lambda: RowwiseParallel(output_layouts=Shard(1), use_local_output=False), {"reduce_scatter": 1}),
    "columns": (lambda: ColwiseParallel(use_local_output=False), {}),
    "columns, whole": (lambda: ColwiseParallel(output_layouts=R, use_local_output=False), {"all_gather": 1}),
}


@on_ranks(2, 4)
@pytest.mark.parametrize("padding", [None, 2, -1])
@pytest.mark.parametrize("style", STYLES)
def test_an_embedding_equals_one_process(style: str, padding: int | None, ranks: int) -> None:
    mesh = init_device_mesh(device_type(), (ranks,), ("tp",))
    make, collectives = STYLES[style]
    for vocabulary, features in ((8, 8), (5, 5), (7, 6)):  # 5 of 4 ranks: an empty part
        module = nn.Embedding(vocabulary, features, padding, dtype=torch.float64, device=device_type())
        with torch.no_grad():
            module.weight.copy_(torch.randn_like(module.weight))  # the padding's row is not zero, but has no gradient
        reference = copy.deepcopy(module)
        ids = torch.randint(0, vocabulary, (3, 4), device=device_type())
        ids[0] = torch.tensor([2, vocabulary - 1, 0, 2])
        factor = torch.randn(3, 4, features, dtype=torch.float64, device=device_type())
        parallelize_module(module, mesh, make())
        assert module.weight.placements == (Shard(0 if style.startswith("rows") else 1),)
        want = reference(ids)
        with count_collectives() as counts:
            got = module(ids)
        torch.testing.assert_close(got.full_tensor(), want, rtol=0, atol=0)
        if vocabulary == 8:
            assert dict(counts) == collectives
        (want * factor).sum().backward()
        (got * distribute_tensor(factor, mesh, got.placements)).sum().backward()
        assert isinstance(module.weight.grad, DTensor) and module.weight.grad.placements == module.weight.placements
        torch.testing.assert_close(module.weight.grad.full_tensor(), reference.weight.grad, rtol=1e-12, atol=1e-12)
        if padding is not None:
            assert not module.weight.grad.full_tensor()[padding].any()


@on_ranks(2)
def test_a_weight_shared_with_the_head() -> None:
    mesh = init_device_mesh(device_type(), (2,), ("tp",))
    model = nn.Sequential(
        nn.Embedding(7, 4, padding_idx=1, dtype=torch.float64, device=device_type()),
        nn.Linear(4, 7, bias=False, dtype=torch.float64, device=device_type()),
    )
    model[1].weight = model[0].weight
    reference = copy.deepcopy(model)
    ids = torch.tensor([[0, 1, 6], [3, 3, 2]], device=device_type())
    parallelize_module(model, mesh, {"0": "embedding_rowwise", "1": "colwise"})
    assert model[0].weight is model[1].weight and model[0].weight.placements == (Shard(0),)
    want, got = reference(ids), model(ids)
    assert got.placements == (Shard(2),)
    torch.testing.assert_close(got.full_tensor(), want)
    want.square().sum().backward()
    got.square().sum().backward()
    torch.testing.assert_close(model[0].weight.grad.full_tensor(), reference[0].weight.grad, rtol=1e-12, atol=1e-12)


@on_ranks(2)
@pytest.mark.parametrize("style", ["embedding_rowwise", "embedding_colwise"])
def test_options_that_are_refused(style: str) -> None:
    mesh, ids = init_device_mesh(device_type(), (2,), ("tp",)), torch.tensor([0, 1], device=device_type())
    options: Any
    for options in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}):
        torch.manual_seed(1)
        reference = nn.Embedding(4, 4, device=device_type(), **options)
        refused, followed = copy.deepcopy(reference), copy.deepcopy(reference)
        with pytest.raises(NotImplementedError, match="leave sparse out, .* lay the weight out as Replicate"):
            parallelize_module(refused, mesh, style)(ids)
        followed.sparse = reference.sparse = False
        parallelize_module(followed, mesh, style if "sparse" in options else "replicate")
        for module, given in ((reference, ids), (followed, distribute_tensor(ids, mesh, [R]))):
            module(given).square().sum().backward()
        torch.testing.assert_close(followed.weight.full_tensor(), reference.weight)
        torch.testing.assert_close(followed.weight.grad.full_tensor(), reference.weight.grad)
