"""Examples to fine-tune on: conversations, prompts with completions, pairs of which one is preferred.

Note [Which tokens are trained]
    A loss is taken of what the assistant has said, and of nothing else. A conversation becomes one text by the
    tokenizer's own chat template, and one list of tokens. Which characters of it the assistant has said is told by the
    template's `{% generation %}` marks. Where it has none, the text up to the request for an answer is compared with
    that up to the end of the answer: each has to begin the text of the whole conversation, as it does where a template
    adds to the end alone. A template that writes earlier messages differently once there are later ones (as some that
    leave out what the assistant has thought) has no exact answer without marks, and is refused. So is a token that
    holds both characters that were said by the assistant and others.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyper_parallel.data.documents import DataError, read_rows
from hyper_parallel.data.tokenization.tokens import Tokenizer

FORMATS: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt-completion": ("prompt", "completion"),
    "preference": ("chosen", "rejected"),
}
"""The keys that a row of each format has to have."""

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MESSAGE = 'a message is an object such as {"role": "user", "content": "..."}'
Spans = list[tuple[int, int]]


@dataclass(frozen=True)
class Example:
    """A document to fine-tune on.

    Attributes:
        tokens: of all of it.
        trained: for each token, whether a loss is taken of it.
    """

    tokens: list[int]
    trained: list[bool]


class Examples:
    """Reads the examples of files.

    Args:
        format: "messages", "prompt-completion" or "preference".
        tokenizer: of the texts. Messages need one of a folder whose chat template transformers reads.
    """

    def __init__(self, format: str, tokenizer: Tokenizer) -> None:
        self._format, self._tokenizer = format, tokenizer

    def read(self, file: Path) -> Iterator[Example]:
        """Read the examples of a file; of "preference" the chosen and the rejected one of a row follow each other.

        Args:
            file: JSON lines, or a Parquet or Arrow file.

        Raises:
            DataError: it can't be read, a row lacks a key or has no token to train, or the chat template isn't exact.
            ImportError: transformers or pyarrow isn't installed.
        """
        for where, row in read_rows(file):
            try:
                yield from self._examples(row)
            except DataError as error:
                raise DataError(f"{where} {error.message}", error.fix, key=error.key) from error

    def _examples(self, row: Mapping[str, Any]) -> Iterator[Example]:
        lacking = [key for key in FORMATS[self._format] if row.get(key) is None]
        if lacking:
            message = f"has no {lacking[0]!r}, which data.format = {self._format!r} needs; it has {', '.join(row)}"
            near = [name for name, keys in FORMATS.items() if all(row.get(key) is not None for key in keys)]
            fix = f"write format = {near[0]!r}" if near else "rename the key, or take another format"
            if self._format == "preference":  # the objective may have asked for it
                fix = "give lines with 'prompt', 'chosen' and 'rejected'; data of other formats has no pairs of answers"
            raise DataError(message, fix, key="format")
        tools = row.get("tools") or None
        if self._format == "messages":
            pairs: list[tuple[Any, Any]] = [([], _messages(row["messages"]))]
        elif self._format == "prompt-completion":
            pairs = [(row["prompt"], row["completion"])]
        else:
            prompt, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
            if prompt is None:
                prompt, chosen, rejected = _without_prompt(chosen, rejected)
            pairs = [(prompt, chosen), (prompt, rejected)]
        for prompt, answer in pairs:
            example = self._example(prompt, answer, tools)
            if not any(example.trained[1:]):
                message = "has no token of an assistant" if self._format == "messages" else "has an empty answer"
                raise DataError(message, "leave the row out, or give it an answer")
            yield example

    def _example(self, prompt: Any, answer: Any, tools: Any) -> Example:
        if isinstance(prompt, str) and isinstance(answer, str):
            return self._joined(prompt, answer)
        if isinstance(prompt, str) or isinstance(answer, str):
            raise DataError("has text on one side and messages on the other", "write both as text, or both as messages")
        return chat_of(self._tokenizer).example([*_messages(prompt)], [*_messages(answer)], tools)

    def _joined(self, prompt: str, answer: str) -> Example:
        """Tokenize both alone, as a prompt is where a model goes on with it."""
        before = self._tokenizer.encode_prompt(prompt)
        (after,) = self._tokenizer.encode([answer])
        after = [*after, *([] if self._tokenizer.end is None else [self._tokenizer.end])]
        return Example([*before, *after], [False] * len(before) + [True] * len(after))


def _without_prompt(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """Take the messages that both begin with as the prompt."""
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise DataError("has no 'prompt'", "give the text that both answers follow", key="format")
    one, other = _messages(chosen), _messages(rejected)
    same = 0
    while same < min(len(one), len(other)) - 1 and one[same] == other[same]:
        same += 1
    return one[:same], one[same:], other[same:]


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise DataError(f"has a {type(value).__name__} where messages are expected", _MESSAGE)
    for number, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            has = ", ".join(map(repr, message)) if isinstance(message, Mapping) else type(message).__name__
            raise DataError(f"has no role in message {number}, but {has}", _MESSAGE)
    # A table has every key in every row, None where it isn't there.
    return [{key: each for key, each in message.items() if each is not None} for message in value]


class _Chat:
    """A tokenizer's chat template: see Note [Which tokens are trained].

    Args:
        folder: of tokenizer.json, tokenizer_config.json and maybe chat_template.jinja.
        tokenizer: the same, as it is read without transformers.
    """

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        try:
            library = importlib.import_module("transformers")
            self._render = importlib.import_module("transformers.utils.chat_template_utils").render_jinja_template
        except ImportError as error:
            raise ImportError("a chat template needs transformers: pip install transformers") from error
        self._tokenizer = tokenizer
        whole: Any = library.PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        self._named = whole
        self._options = dict(whole.special_tokens_map)
        if not whole.chat_template:
            message = f"the tokenizer in {folder} has no chat template"
            fix = (
                "put its chat_template.jinja beside tokenizer.json, or take data.format = 'prompt-completion' with text"
            )
            raise DataError(message, fix, key="tokenizer")

    def example(self, prompt: list[Any], answer: list[Any], tools: Any) -> Example:
        """Tokenize a conversation; what an assistant says in `answer` is trained."""
        messages = [*prompt, *answer]
        if not messages:
            raise DataError("has no message", "leave the row out")
        template = self._named.get_chat_template(None, tools)
        if _MARKS.search(template):
            text, spans = self._marked(messages, tools, template, len(prompt))
        else:
            text, spans = self._compared(messages, tools, template, len(prompt))
        encoding = self._tokenizer.encoding(text)
        return Example(encoding.ids, _trained(text, encoding.offsets, spans))

    def asked(self, text: str) -> list[int]:
        """Return the tokens of a conversation in which a user has said this, up to where the assistant answers."""
        messages = [{"role": "user", "content": text}]
        template = self._named.get_chat_template(None, None)
        return self._tokenizer.encoding(self._text(messages, None, template, ask=True)).ids

    def _text(self, messages: list[Any], tools: Any, template: str, *, ask: bool = False, marks: bool = False) -> Any:
        options = {"chat_template": template, "add_generation_prompt": ask, "return_assistant_tokens_mask": marks}
        try:
            texts, spans = self._render([messages], tools=tools, **options, **self._options)
        except Exception as error:  # Templates raise what they like.
            message = f"is refused by the chat template: {type(error).__name__}: {error}"
            raise DataError(message, "change the messages, or the template") from error
        return (texts[0], [tuple(span) for span in spans[0]]) if marks else texts[0]

    def _marked(self, messages: list[Any], tools: Any, template: str, before: int) -> tuple[str, Spans]:
        text, spans = self._text(messages, tools, template, marks=True)
        said = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if len(spans) != len(said):
            message = f"has {len(said)} messages of an assistant, but the template marks {len(spans)}"
            raise DataError(message, "mend the {% generation %} marks of the template", key="tokenizer")
        return text, [span for span, number in zip(spans, said, strict=True) if number >= before]

    def _compared(self, messages: list[Any], tools: Any, template: str, before: int) -> tuple[str, Spans]:
        text, spans = self._text(messages, tools, template), []
        for number in range(before, len(messages)):
            if messages[number]["role"] != "assistant":
                continue
            asked = self._text(messages[:number], tools, template, ask=True) if number else ""
            said = text if number + 1 == len(messages) else self._text(messages[: number + 1], tools, template)
            if not (text.startswith(said) and said.startswith(asked)):
                message = (
                    f"has a message, number {number}, that the chat template writes differently once others follow, so"
                    " it can't be told which tokens the assistant said"
                )
                fix = "mark what an assistant says in the template: {% generation %}...{% endgeneration %}"
                raise DataError(message, f"{fix}; or give conversations of one answer", key="tokenizer")
            spans.append((len(asked), len(said)))
        return text, spans


def _trained(text: str, offsets: Sequence[tuple[int, int]], spans: Spans) -> list[bool]:
    """Tell for each token whether it lies in a span."""
    trained = [any(start <= first and last <= end for start, end in spans) for first, last in offsets]
    for (first, last), inside in zip(offsets, trained, strict=True):
        if not inside and any(first < end and start < last for start, end in spans):
            message = f"has a token, {text[first:last]!r}, of which only a part was said by the assistant"
            fix = "let the chat template write a special token or a line break between the two"
            raise DataError(message, fix, key="tokenizer")
    return [inside and first < last for (first, last), inside in zip(offsets, trained, strict=True)]


def chat_of(tokenizer: Tokenizer) -> _Chat:
    """Return the chat template that belongs to a tokenizer.

    Raises:
        DataError: there is none.
    """
    if tokenizer.folder is None:
        message = "has messages, but the tokenizer has no chat template"
        raise DataError(message, "name a folder with a tokenizer.json and its chat template", key="tokenizer")
    return _chat(tokenizer)


@functools.lru_cache(maxsize=2)
def _chat(tokenizer: Any) -> _Chat:
    return _Chat(tokenizer.folder, tokenizer)


def chat_digest(tokenizer: Tokenizer, format: str) -> str:
    """Return what differs where the same rows become other tokens: the tokenizer's digest, and its template's."""
    if format == "text" or tokenizer.folder is None:
        return tokenizer.digest
    files = [tokenizer.folder / name for name in ("tokenizer_config.json", "chat_template.jinja")]
    raw = b"".join(file.read_bytes() for file in files if file.is_file())
    return hashlib.sha256(f"{tokenizer.digest} {format} ".encode() + raw).hexdigest()
