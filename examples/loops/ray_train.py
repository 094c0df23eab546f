"""Trains a model under a plan on workers of Ray Train, which are ranks as those of torchrun are.

    pip install "ray[train]"
    python examples/loops/ray_train.py

Ray makes the workers, tells them their places and joins them in a process group of torch's, which `apply` takes. Its
own `prepare_model` is not called: a plan shards. The rows of a step are each worker's own, by its rank.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ray import train
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from transformers import LlamaConfig, LlamaForCausalLM

import hp_platform
from hp_checkpoint import save_model
from hp_plan import FsdpSection, MeshSection, ParallelPlan, apply

WORKERS = 2


def loop(config: dict[str, Any]) -> None:
    """Train, and report the losses; run by every worker."""
    hp_platform.init_process_group()  # takes the one that Ray has made
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    tokens = torch.randint(64, (8, 16))

    plan = ParallelPlan(mesh=MeshSection(dp_shard=dist.get_world_size()), fsdp=FsdpSection(groups=("model.layers.*",)))
    model = apply(model, plan)

    own = tokens.chunk(dist.get_world_size())[dist.get_rank()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(config["steps"]):
        loss = model(input_ids=own, labels=own).loss
        loss.backward()  # gradients are the means over the ranks
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    save_model(model, config["model"])  # by all ranks, in a folder that they all see
    saved = Checkpoint.from_directory(config["model"]) if dist.get_rank() == 0 else None
    train.report({"losses": losses}, checkpoint=saved)  # Ray keeps the metrics of what has a checkpoint


def fit(folder: str, steps: int = 5) -> list[float]:
    """Return the losses of a run whose files are in a folder; it starts the workers.

    Args:
        folder: that all workers see.
        steps: of the loop.
    """
    trainer = TorchTrainer(
        loop,
        train_loop_config={"steps": steps, "model": str(Path(folder) / "model")},
        scaling_config=ScalingConfig(num_workers=WORKERS, use_gpu=torch.cuda.device_count() >= WORKERS),
        run_config=RunConfig(name="ray", storage_path=folder),
    )
    metrics = trainer.fit().metrics
    assert metrics is not None  # the loop has reported
    return metrics["losses"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print("losses:", " ".join(f"{loss:.4f}" for loss in fit(folder)))
