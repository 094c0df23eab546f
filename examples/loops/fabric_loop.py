"""Trains a model under a plan in a loop of Lightning Fabric, saves it in the middle, and goes on from there.

    pip install lightning
    torchrun --standalone --nproc-per-node 2 examples/loops/fabric_loop.py

`fabric.setup` applies the plan where DDP would wrap the model, its
loaders give ranks of one tensor-parallel group the same rows, and its checkpoints are those of hp-checkpoint.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from hp_checkpoint import Checkpointer
from hp_plan import FsdpSection, MeshSection, ParallelPlan, apply


class PlanStrategy(DDPStrategy):
    """A strategy of Fabric that applies a plan, for any mesh without `pp`.

    `fabric.save(folder, state)` and `fabric.load(folder, state)` take "model", "optimizer" and "step", from all ranks.
    """

    def __init__(self, plan: ParallelPlan) -> None:
        super().__init__()
        self.plan = plan
        self._backward_sync_control = None  # each micro-batch is reduced

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        mesh = self.plan.mesh
        place = mesh.coordinate(self.global_rank)
        return {
            "num_replicas": mesh.data_parallel,
            "rank": place.get("dp_replicate", 0) * mesh.dp_shard + place.get("dp_shard", 0),
        }

    def setup_module(self, module: torch.nn.Module) -> Any:
        return apply(module, self.plan)

    def save_checkpoint(self, path: Any, state: dict[str, Any], *others: Any, **options: Any) -> None:
        with Checkpointer(path, background=False) as checkpoints:
            checkpoints.save(state["step"], state["model"], state["optimizer"])

    def load_checkpoint(self, path: Any, state: Any = None, *others: Any, **options: Any) -> dict[str, Any]:
        with Checkpointer(path) as checkpoints:
            state["step"] = checkpoints.load(state["model"], state["optimizer"]).step
        return {}


def train(folder: str, plan: ParallelPlan, steps: int = 6, resume: bool = False) -> list[float]:
    """Return the losses of the steps, or with `resume` of those after the checkpoint, which is saved in the middle."""
    ranks = plan.mesh.world_size
    device = "cuda" if torch.cuda.device_count() >= ranks else "cpu"
    fabric = Fabric(accelerator=device, devices=ranks, strategy=PlanStrategy(plan))
    fabric.launch()
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    rows = torch.randint(64, (8, 16)).repeat(steps, 1)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader = fabric.setup_dataloaders(DataLoader(rows, batch_size=8 // plan.mesh.data_parallel))

    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    if resume:
        fabric.load(folder, state)
    losses, done = [], state["step"]
    for step, own in enumerate(loader, 1):
        if step <= done:
            continue
        loss = model(input_ids=own, labels=own).loss
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(fabric.all_reduce(loss.detach(), reduce_op="mean").item())
        if step == steps // 2 and not resume:
            fabric.save(folder, {**state, "step": step})
    fabric.print("losses:", " ".join(f"{loss:.4f}" for loss in losses))
    return losses


if __name__ == "__main__":
    mesh = MeshSection(dp_shard=int(os.environ["WORLD_SIZE"]))
    blocks = ParallelPlan(mesh=mesh, fsdp=FsdpSection(groups=("model.layers.*",)))
    train("runs/fabric", blocks)
    train("runs/fabric", blocks, resume=True)  # prints the losses of the second half again
    torch.distributed.destroy_process_group()
