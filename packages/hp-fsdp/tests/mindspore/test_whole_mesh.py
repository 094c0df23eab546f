"""Parameters that were laid out on a mesh with the axes of data parallelism, by `shard_module`."""

from __future__ import annotations

import numpy as np
import pytest
from fsdp_cells import Block, batch, close, differentiated, double, same_gradients, same_weights, seeded, sgd
from mindspore import Tensor, mint, nn

from hp_dtensor import Layout, RaggedShard, Replicate, Shard, init_device_mesh, shard_module
from hp_fsdp import clip_grad_norm_, fully_shard, hsdp
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("mindspore")


class Model(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.CellList([Block(6) for _ in range(2)])

    def construct(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@on_ranks(2, 4)
def test_a_declared_layout_on_both_axes_is_sharded_over_dp(ranks: int):
    layout = Layout((2, ranks // 2), ("dp", "tp"))
    mesh = init_device_mesh(device_type(), (2, ranks // 2), mesh_dim_names=("dp", "tp"))
    reference, model = seeded(double(Model)), seeded(double(Model))
    rows = layout("dp", "None")
    shard_module(
        model,
        {
            "forward": {"input": rows, "output": rows, "blocks.*.output": rows},
            "parameter": {
                "blocks.*.up.weight": layout("tp", "None"),
                "blocks.*.up.bias": layout("tp"),
                "blocks.0.down.weight": layout("None", "tp"),
                "blocks.1.down.weight": layout("dp", "None"),
            },
        },
    )
    for block in model.blocks:
        fully_shard(block, mesh["dp"])
    fully_shard(model, mesh["dp"])
    assert isinstance(model.blocks[0].up.weight.placements[0], RaggedShard)
    assert model.blocks[0].up.weight.placements[1] == Shard(0)
    assert model.blocks[1].down.weight.placements == (Shard(0), Replicate()), "its own layout divides it"
    for step in range(2):
        everything, _ = batch(step, 6, np.float64)
        own = Tensor(np.split(everything.asnumpy(), 2)[mesh.get_local_rank("dp")])
        _, expected = differentiated(reference, dtensors=False)(everything)
        _, gradients = differentiated(model)(own)
        same_gradients(model, gradients, reference, expected, 1e-12)
        norm = np.sqrt(sum(float((gradient.asnumpy() ** 2).sum()) for gradient in expected))
        close(clip_grad_norm_(model.trainable_params(), 100.0, gradients=gradients).asnumpy(), norm, "norm", 1e-12)
        sgd(reference)(expected)
        sgd(model)(gradients)
        same_weights(model, reference, 1e-12)


@on_ranks(2)
def test_axes_that_nothing_tells_are_refused():
    """The conditions are those of PyTorch's tests, in tests/test_axes.py."""
    whole, staged = (
        init_device_mesh(device_type(), shape, mesh_dim_names=names)
        for shape, names in (((2, 1), ("dp", "tp1")), ((1, 2, 1), ("pp", "dp", "tp2")))
    )

    def laid_out(mesh, *placements):
        cell = mint.nn.Linear(4, 4, bias=False)
        return shard_module(cell, {"parameter": {"weight": (mesh, list(placements))}})

    first = r"sharded over all 2 ranks, but 1 of its 1 parameters are DTensors already, the first 'weight', placed"
    with pytest.raises(ValueError, match=first + r".*those of \('dp', 'tp1'\) over which.*mesh\[\"dp\"\]"):
        fully_shard(laid_out(whole["tp1"], Shard(0)))
    with pytest.raises(ValueError, match=r"'weight' is placed \(Shard\(0\),\).*divides it over 1 of 2 ranks"):
        fully_shard(laid_out(whole["tp1"], Shard(0)), whole)
    for cell in (laid_out(whole["tp1"], Shard(0)), laid_out(whole, Replicate(), Shard(0))):
        ragged, other = fully_shard(cell, whole["dp"]).weight.placements
        assert isinstance(ragged, RaggedShard) and other == Shard(0)  # over the axis that is named
    with pytest.raises(ValueError, match=r"hsdp: .* with \['pp'\], and hsdp cannot tell.*mesh\['dp'\]"):
        hsdp(laid_out(staged["tp2"], Shard(0)))
    ragged, other = fully_shard(laid_out(staged["tp2"], Shard(0)), staged["dp"]).weight.placements
    assert isinstance(ragged, RaggedShard) and other == Shard(0)
