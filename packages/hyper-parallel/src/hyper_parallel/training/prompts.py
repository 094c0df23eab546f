"""Texts that a model writes while it is trained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hp_plan import ParallelPlan
from hp_plan.extend import positions
from hyper_parallel.data import DataError, find_files, has_tokens
from hyper_parallel.data.documents import text_files
from hyper_parallel.data.examples import Examples, chat_of
from hyper_parallel.data.tokenization.tokenized import tokenizer_of
from hyper_parallel.data.tokenization.tokens import Tokenizer, read_tokenizer
from hyper_parallel.port import Trainer
from hyper_parallel.reports.output import Step

PROMPT = "def "  # what a model of text goes on with; plans without data train on Python's own sources


class Prompts:
    """The prompts of a plan, and a model that goes on with them.

    Args:
        plan: as it was given, with its text and its tokenizer.
        trainer: whose model writes.
    """

    def __init__(self, plan: ParallelPlan, trainer: Trainer) -> None:
        self._trainer, self._count = trainer, plan.validation.prompt_tokens
        config = getattr(trainer.model, "config", None)
        self._tokenizer = check_prompts(plan, config)
        prompts = plan.validation.prompts
        self._prompts = [(text, prompt_tokens(plan, self._tokenizer, text)) for text in prompts]
        self._between = "" if plan.data.format == "text" else "\n"

    def texts(self) -> tuple[str, ...]:
        """Return each prompt with what the model writes after it; every rank calls it.

        The model, the random numbers and the training data stay as they are.
        """
        decode, write = self._tokenizer.decode, self._trainer.write
        return tuple(prompt + self._between + decode(write(tokens, self._count)) for prompt, tokens in self._prompts)


def prompt_tokens(plan: ParallelPlan, tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a prompt as the plan's data has them: of messages by the chat template.

    Args:
        plan: the plan.
        tokenizer: of its data.
        text: of the prompt.

    Raises:
        DataError: the tokenizer has no chat template.
    """
    if plan.data.format == "messages":
        return chat_of(tokenizer).asked(text)
    return tokenizer.encode([text])[0] if plan.data.format == "text" else tokenizer.encode_prompt(text)


def first_prompt(plan: ParallelPlan, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that a model goes on with to show what it has learned.

    Args:
        plan: the plan; of examples to fine-tune on it is the prompt of the first one.
        tokenizer: of its data.
    """
    if plan.data.format == "text":
        return tokenizer.encode([PROMPT])[0]
    example = next(Examples(plan.data.format, tokenizer).read(next(iter(text_files(find_files(plan.data.paths))))))
    return example.tokens[: example.trained.index(True)]


def most_tokens(config: Any, prompt: Sequence[int], wanted: int) -> int:
    """Return how many tokens a model writes after a prompt: those wanted, but for those beyond its positions.

    Args:
        config: of the model.
        prompt: the tokens before.
        wanted: at most so many.
    """
    limit = positions(config)  # where positions are learned, there are no others
    return wanted if limit is None else max(0, min(wanted, limit - len(prompt)))


def check_prompts(plan: ParallelPlan, config: Any = None) -> Tokenizer:
    """Return the tokenizer of a plan's prompts.

    Args:
        plan: the plan.
        config: of the model; None where it has none, or is not known.

    Raises:
        DataError: it can't be told, a prompt has no tokens, or what follows one goes beyond the model's positions.
    """
    tokenizer = tokenizer_of(plan)
    if tokenizer is None and has_tokens(plan.data):
        message = f"{plan.data.paths[0]} doesn't say which tokenizer has written it"
        raise DataError(message, "leave the prompts out, or give a [model] path that has the tokenizer")
    tokenizer = tokenizer or read_tokenizer(None)
    for prompt in plan.validation.prompts:
        tokens = prompt_tokens(plan, tokenizer, prompt)
        if not tokens:
            raise DataError(f"the prompt {prompt!r} has no tokens", "write at least a letter")
        wanted = plan.validation.prompt_tokens
        possible = most_tokens(config, tokens, wanted)
        if possible < wanted:
            message = (
                f"the prompt {prompt!r} has {len(tokens)} tokens, and {wanted} more go beyond the model's"
                f" {positions(config)} positions"
            )
            shorter = f"make validation.prompt_tokens at most {possible}" if possible else "make the prompt shorter"
            raise DataError(message, f"{shorter}, or raise max_position_embeddings in [model.overrides]")
    return tokenizer


def write_texts(path: Path, step: Step) -> None:
    """Add a step's texts to a file, a line of JSON each."""
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps({"step": step.step, "text": text}, ensure_ascii=False) + "\n" for text in step.texts)
