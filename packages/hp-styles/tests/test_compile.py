"""torch.compile of modules with styles: one graph, the results and gradients of the eager ones."""

from __future__ import annotations

import copy
import importlib
import warnings

import pytest
import torch
import torch.nn.functional as F

from hp_dtensor import Shard, init_device_mesh
from hp_styles import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from hp_testing import device_type, on_ranks

pytestmark = [pytest.mark.framework("torch"), pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")]


class Block(torch.nn.Module):
    """Attention and MLP, as a decoder has them."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.width = width
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (torch.nn.Linear(width, width, bias=i == 3) for i in range(4))
        self.up, self.gate = torch.nn.Linear(width, 4 * width), torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (
            part(h).unflatten(-1, (-1, self.width // self.heads)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.o(attended)
        h = self.norm2(x)
        return x + self.down(F.gelu(self.gate(h)) * self.up(h))


def _plan(sequence: bool) -> dict:
    if not sequence:
        return {
            **dict.fromkeys(("q", "k", "v", "up", "gate"), ColwiseParallel()),
            **dict.fromkeys(("o", "down"), RowwiseParallel()),
        }
    column = ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
    row = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    return {
        "": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Shard(1)),
        "norm[12]": SequenceParallel(),
        **dict.fromkeys(("q", "k", "v", "up", "gate"), column),
        **dict.fromkeys(("o", "down"), row),
    }


def _compiled_equals_eager(mesh_size: int, sequence: bool, backend: str, dtype: torch.dtype) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    close = {} if dtype is torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    mesh = init_device_mesh(device_type(), (mesh_size,), mesh_dim_names=("tp",))
    block = Block().to(dtype)
    reference = copy.deepcopy(block)
    block.to(device_type()), reference.to(device_type())
    x = torch.randn(2, 8, 16, dtype=dtype, device=device_type())
    parallelize_module(block, mesh, _plan(sequence))
    if backend == "inductor":
        with warnings.catch_warnings():  # its import warns
            warnings.simplefilter("ignore")
            importlib.import_module("torch._inductor.compile_fx")
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    for _ in range(2):
        given = x.chunk(mesh_size, 1)[mesh.get_local_rank()] if sequence else x
        out = compiled(given)
        out = out.full_tensor() if sequence else out
        wanted = reference(x)
        torch.testing.assert_close(out, wanted, **close)
        out.square().sum().backward()
        wanted.square().sum().backward()
    for (name, p), (_, q) in zip(block.named_parameters(), reference.named_parameters(), strict=True):
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        torch.testing.assert_close(grad, q.grad, **close, msg=lambda m, name=name: f"{name}: {m}")


@on_ranks(2)
@pytest.mark.parametrize("sequence", [False, True])
def test_block_in_one_graph(sequence: bool) -> None:
    _compiled_equals_eager(2, sequence, "aot_eager", torch.float64)


@pytest.mark.thorough
@pytest.mark.not_on("torch-npu-sim", reason="torch.compile's inductor wants triton-ascend for NPUs")
@on_ranks(2)
def test_block_by_inductor() -> None:
    _compiled_equals_eager(2, True, "inductor", torch.float32)
