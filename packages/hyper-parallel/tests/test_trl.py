"""`[objective] kind = "dpo"` against TRL's DPOTrainer on the same batch; `nox -s "loops(trl)"` has TRL."""

from __future__ import annotations

import copy
import importlib.util
import warnings
from typing import Any

import pytest
import torch

from hp_plan import ParallelPlan, build_model
from hp_plan.torch.extend import build_objective

pytestmark = [
    pytest.mark.framework("torch"),
    pytest.mark.not_on("torch-npu-sim", "torch-cuda", "torch-npu", reason="the trainer asks for CPUs"),
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason='needs TRL: nox -s "loops(trl)"'),
]
SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
PAIRS = {
    "prompt": ["a b ", "c d e ", "f ", "g h "],
    "chosen": ["c d e", "f g", "h i j k", "l"],
    "rejected": ["x", "y z z z", "q r", "s t u"],
}


def tokenizer() -> Any:
    """A tokenizer whose tokens are letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: at for at, word in enumerate(["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz"])}
    letters = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def plan_of(objective: dict[str, Any]) -> ParallelPlan:
    return ParallelPlan.from_dict(
        {
            "model": {"config": "LlamaConfig", "overrides": {**SIZES, "initializer_range": 0.5}},
            "data": {"format": "preference", "batch_size": 4, "sequence_length": 8},
            "objective": {"kind": "dpo", **objective},
        }
    )


def trainer_of(model: Any, reference: Any, folder: Any, **options: Any) -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    arguments = DPOConfig(
        str(folder),
        per_device_train_batch_size=4,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    rows = Dataset.from_dict(PAIRS)
    return DPOTrainer(model, ref_model=reference, args=arguments, train_dataset=rows, processing_class=tokenizer())


@pytest.mark.parametrize(
    "objective", [{}, {"loss": "hinge", "beta": 2.0}, {"loss": "ipo", "beta": 0.3}], ids=["sigmoid", "hinge", "ipo"]
)
def test_losses_and_gradients_of_preferences_are_those_of_trl(objective: dict[str, Any], tmp_path):
    plan = plan_of(objective)
    model, reference = build_model(plan), build_model(plan)
    with torch.no_grad():
        for each in reference.parameters():
            each.add_(torch.randn(each.shape, generator=torch.Generator().manual_seed(1)), alpha=0.1)
    theirs = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of theirs
        options = {"loss_type": objective.get("loss", "sigmoid"), "beta": objective.get("beta", 0.1)}
        trainer = trainer_of(theirs, copy.deepcopy(reference), tmp_path, **options)
        batch = next(iter(trainer.get_train_dataloader()))
        expected = trainer.compute_loss(theirs, dict(batch))
    expected.backward()

    rows = torch.arange(8).view(2, 4).T.flatten()  # theirs are all chosen answers, then all rejected ones
    tokens = batch["input_ids"][rows]
    labels = tokens.masked_fill(batch["completion_mask"][rows] == 0, -100)
    own = build_objective(plan, lambda other: reference)
    assert own is not None
    total, _ = own(model, {"input_ids": tokens, "labels": labels})
    loss = total / own.items(labels)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    gradients = {name: each.grad for name, each in theirs.named_parameters()}
    assert any(gradient.any() for gradient in gradients.values())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6, msg=name)
