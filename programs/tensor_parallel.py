# /// program
# ranks = 2
# ///
"""Attention and feed-forward of one's own, tensor parallel by torch's styles of the same names."""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from hp_dtensor import init_device_mesh
from hp_platform import destroy_process_group, init_process_group
from hp_styles import ColwiseParallel, RowwiseParallel, parallelize_module
from reporting import ALONE, RANKS, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


class Block(nn.Module):
    """Attention of four heads of four, and a feed-forward."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.first, self.second = nn.LayerNorm(16), nn.LayerNorm(16)

    def forward(self, x):
        y = self.first(x)
        q, k, v = (each(y).unflatten(-1, (-1, 4)).transpose(1, 2) for each in (self.q, self.k, self.v))
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(torch.nn.functional.gelu(self.up(self.second(x))))


model = nn.Sequential(Block(), Block())
if not ALONE:
    init_process_group()
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    columns = {f"*.{name}": ColwiseParallel() for name in ("q", "k", "v", "up")}
    parallelize_module(model, mesh, {**columns, "*.out": RowwiseParallel(), "*.down": RowwiseParallel()})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)

for _ in range(5):
    x = torch.randn(2, 6, 16)
    loss = (model(x) - x.roll(1, 1)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach())

report_weights(model)
if not ALONE:
    destroy_process_group()
