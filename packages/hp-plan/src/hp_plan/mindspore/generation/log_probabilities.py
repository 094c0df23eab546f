"""Log-probabilities of tokens in chunks: not on MindSpore."""

from __future__ import annotations

from typing import Any, NoReturn


def log_probabilities(model: Any, ids: Any, **options: Any) -> NoReturn:
    """Refuse.

    Raises:
        NotImplementedError: always; it names what to use.
    """
    raise NotImplementedError(
        "log_probabilities: it reads a transformers model's output layer, and those models are of PyTorch. On MindSpore"
        " gather them from the logits by mint.nn.functional.log_softmax"
    )
