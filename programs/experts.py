# /// program
# ranks = 2
# losses = 'sum'
# ///
"""A mixture of experts, spread over two ranks, each with tokens of its own."""

import torch
import torch.distributed as dist

from hp_dtensor import init_device_mesh
from hp_moe import ExpertParallel, MoE
from hp_platform import destroy_process_group, init_process_group
from hp_styles import parallelize_module
from reporting import ALONE, RANKS, own, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = MoE(dim=8, hidden_dim=16, num_experts=8, top_k=2)
if not ALONE:
    init_process_group()
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
    parallelize_module(model, mesh, {"experts": ExpertParallel()})
replicated = [weight for name, weight in model.named_parameters() if not name.startswith("experts.")]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)

for _ in range(5):
    x = own(torch.randn(32, 8))
    loss = (model(x) - x.roll(1, 1)).square().mean() / RANKS  # a part of the mean over all ranks
    loss.backward()
    if not ALONE:
        for weight in replicated:
            dist.all_reduce(weight.grad)
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach())

report_weights(model)
if not ALONE:
    destroy_process_group()
