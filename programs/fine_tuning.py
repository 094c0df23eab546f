# /// program
# tolerance = 1e-5  # the model's norms, and its losses, compute in float32
# [[launch]]
# ranks = 2
#
# [[launch]]
# ranks = 3
# ///
"""A chat model fine-tuned by a plan with LoRA: begun on two ranks, gone on with on three, evaluated, merged, asked."""

import json
import subprocess
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from reporting import ALONE, RANK, RANKS, report_step, report_weights

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAN = """
[model]
path = "model"
[adapter]
kind = "lora"
rank = 4
[mesh]
dp_shard = {ranks}
[fsdp]
groups = {groups}
[data]
paths = ["chat.jsonl"]
format = "messages"
sequence_length = 64
batch_size = 6
[optimizer]
lr = 0.02
[run]
steps = 6
dtype = "float64"
"""


def write_model(folder):
    """Write what a chat model's folder has: weights, a tokenizer, a chat template."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 259}
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, eos_token_id=258, **sizes)
    LlamaForCausalLM(config).double().save_pretrained(folder)
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.add_special_tokens(["<end>", "<|im_start|>", "<|im_end|>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))


def call(*arguments):
    """Call the command; where torchrun has started this script, `train` joins its ranks."""
    subprocess.run([sys.executable, "-m", "hyper_parallel", *arguments], check=True)


here = Path(f"rank-{RANK}-of-{RANKS}")  # each rank has its own copy of what it reads
(here / "model").mkdir(parents=True, exist_ok=True)
write_model(here / "model")
talks = [(f"say {word}", word) for word in ("red", "blue", "green", "cat", "dog", "sun", "sea")]
with open(here / "chat.jsonl", "w") as file:
    for question, answer in talks:
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        file.write(json.dumps({"messages": messages}) + "\n")
groups = '["model.layers.*"]' if RANKS > 1 else "[]"
(here / "plan.toml").write_text(PLAN.format(ranks=RANKS, groups=groups).replace("chat.jsonl", str(here / "chat.jsonl")))

begins = RANKS == 2
call("train", str(here / "plan.toml"), "--out", "run", "--resume", "auto", *(["--until", "3"] if begins else []))
for line in map(json.loads, Path("run/metrics.jsonl").read_text().splitlines()):
    if begins or ALONE or line["step"] > 3:
        report_step(line["loss"], line["step"])

if not begins:
    call("checkpoint", "merge", "run", str(here / "merged"), "--base", str(here / "model"))
    model = AutoModelForCausalLM.from_pretrained(here / "merged")
    tokenizer = AutoTokenizer.from_pretrained(here / "merged")
    asked = [{"role": "user", "content": "say red"}]
    inputs = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    print("asked to say red:", repr(tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :])), flush=True)
    report_weights(model)
