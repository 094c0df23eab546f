# /// program
# ranks = 2
# tolerance = 1e-6  # trainers compute in float32
# constant = false  # trainers keep a history
# ///
"""Trainers of trl on a planned model: SFT, DPO and GRPO, saved in the middle and at the end, loaded without a plan.

And DPO of an adapter, whose reference is the model without it.
"""

import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from hp_dtensor import DTensor
from hp_plan import ParallelPlan, apply
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, RANK, RANKS, report_step, report_weights

words = {word: place for place, word in enumerate(["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz"])}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")

if not ALONE:
    init_process_group()
    store = torch.distributed.distributed_c10d._get_default_store()
    if RANK == 0:
        store.set("folder", tempfile.mkdtemp())
    folder = Path(store.get("folder").decode())
else:
    folder = Path(tempfile.mkdtemp())


SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}


def planned_model():
    set_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    return model if ALONE else apply(model, ParallelPlan.from_dict({"mesh": {"dp_shard": 2}}))


def options(name):
    """Of a trainer; the ranks' samples of a step are those of one process."""
    return {
        "output_dir": str(folder / name),
        "per_device_train_batch_size": 4 // RANKS,
        "max_steps": 3,
        "save_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "train_sampling_strategy": "sequential",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_only_model": True,
        "report_to": [],
        "disable_tqdm": True,
    }


def whole_weights(model):
    state = model.state_dict().items()
    return {key: each.full_tensor() if isinstance(each, DTensor) else each for key, each in state}


def trained(trainer, name):
    """Train, save, and load what was saved in the middle and at the end."""
    trainer.train()
    trainer.save_model(str(folder / name / "end"))
    weights = whole_weights(trainer.model)
    last = LlamaForCausalLM.from_pretrained(folder / name / "end").state_dict()
    assert all(torch.equal(last[key], weights[key]) for key in last)
    middle = LlamaForCausalLM.from_pretrained(folder / name / "checkpoint-2").state_dict()
    assert middle.keys() == last.keys() and not all(torch.equal(last[key], middle[key]) for key in last)
    for entry in trainer.state.log_history if name != "grpo" else ():  # whose answers are drawn by each rank
        if "loss" in entry:
            report_step(torch.tensor(entry["loss"]))
    return trainer.model


texts = ["a b c d e f", "x y z a b", "k l m n", "b d f h j l"] * 4
sft = SFTTrainer(
    planned_model(),
    args=SFTConfig(**options("sft")),
    train_dataset=Dataset.from_dict({"text": texts}),
    processing_class=tokenizer,
)
pairs = {"prompt": ["a b", "c d"] * 8, "chosen": ["c d e", "f g"] * 8, "rejected": ["x y", "z z z"] * 8}
dpo = DPOTrainer(
    planned_model(),
    ref_model=planned_model(),
    args=DPOConfig(**options("dpo")),
    train_dataset=Dataset.from_dict(pairs),
    processing_class=tokenizer,
)
grpo = GRPOTrainer(
    planned_model(),
    reward_funcs=lambda completions, **others: [float(len(set(text.split()))) for text in completions],
    args=GRPOConfig(**options("grpo"), num_generations=2, max_completion_length=6),
    train_dataset=Dataset.from_dict({"prompt": ["a b c", "d e f"] * 8}),
    processing_class=tokenizer,
)
adapted = DPOTrainer(
    planned_model(),
    args=DPOConfig(**options("adapted")),
    train_dataset=Dataset.from_dict(pairs),
    processing_class=tokenizer,
    peft_config=LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]),
)
adapted.train()
adapted.save_model(str(folder / "adapted" / "end"))
weights = whole_weights(adapted.model)
set_seed(0)
loaded = PeftModel.from_pretrained(LlamaForCausalLM(LlamaConfig(**SIZES)), folder / "adapted" / "end").state_dict()
assert loaded.keys() == weights.keys() and all(torch.equal(loaded[key], weights[key]) for key in loaded)
assert (folder / "adapted" / "checkpoint-2" / "adapter_model.safetensors").exists()
losses = [entry["loss"] for entry in adapted.state.log_history if "loss" in entry]
assert losses[-1] < losses[0], losses
for loss in losses:
    report_step(torch.tensor(loss))
trained(grpo, "grpo")
report_weights(trained(sft, "sft"), trained(dpo, "dpo"))
if not ALONE:
    destroy_process_group()
