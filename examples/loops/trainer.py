"""Trains a model under a plan by transformers' Trainer, with checkpoints of all ranks.

torchrun --standalone --nproc-per-node 2 examples/loops/trainer.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from hp_checkpoint import Checkpointer
from hp_plan import FsdpSection, MeshSection, ParallelPlan, apply


class PlanTrainer(Trainer):
    """A Trainer of a model that a plan was applied to: all ranks save and load its checkpoints.

    A checkpoint is a Hugging Face model, with the optimizer's states: `train(resume_from_checkpoint=folder)` goes on
    from it, on any number of ranks.
    """

    def _checkpoints(self, folder: Any) -> Checkpointer:
        return Checkpointer(folder, background=False)  # the Trainer's own state is added once it is complete

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        step = self.state.global_step
        with self._checkpoints(self.args.output_dir) as checkpoints:
            checkpoints.save(step, self.model, self.optimizer.optimizer, schedule=self.lr_scheduler)
            if self.args.should_save:
                self.state.save_to_json(str(checkpoints.path(step) / "trainer_state.json"))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Leave the model as it is: it is loaded with the optimizer, which comes later."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            folder = Path(checkpoint)
            with self._checkpoints(folder.parent) as checkpoints:
                step = next(each for each in checkpoints.steps() if checkpoints.path(each).name == folder.name)
                checkpoints.load(self.model, self.optimizer.optimizer, schedule=self.lr_scheduler, step=step)


class Rows(Dataset):
    """Rows of random tokens, the same on every rank."""

    def __init__(self, count: int) -> None:
        self.rows = torch.randint(64, (count, 16), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def train(folder: str, steps: int = 4, resume: str | None = None) -> list[float]:
    """Return the losses of the steps; run by every rank."""
    arguments = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        logging_steps=1,
        save_steps=2,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        train_sampling_strategy="sequential",
        disable_tqdm=True,
        report_to=[],
    )
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    mesh = MeshSection(dp_shard=arguments.world_size)
    model = apply(model, ParallelPlan(mesh=mesh, fsdp=FsdpSection(groups=("model.layers.*",))))
    trainer = PlanTrainer(model, arguments, train_dataset=Rows(32))
    trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    print("losses:", train("runs/trainer"))
    torch.distributed.destroy_process_group()
