"""A tokenizer with a chat template, and files of examples."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

SPECIAL = ["<end>", "<s>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% if tools %}tools: {{ tools | length }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tokenizer(folder: Path, template: str | None) -> Path:
    """Write a tokenizer that has a token for each byte, and for what is special."""
    folder.mkdir()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    own.add_special_tokens(SPECIAL)
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    own.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", own.token_to_id("<s>"))])
    own.save(str(folder / "tokenizer.json"))
    described = {"eos_token": "<end>", "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return folder


def write(path: Path, *rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
