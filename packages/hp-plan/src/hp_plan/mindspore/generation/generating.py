"""Generation under a plan: not on MindSpore, whose models have no `generate`."""

from __future__ import annotations

from typing import Any, NoReturn


def generating(model: Any, **options: Any) -> NoReturn:
    """Refuse.

    Raises:
        NotImplementedError: always; it names what to use.
    """
    raise NotImplementedError(
        "generating: it runs `generate` of transformers, whose models are of PyTorch. Save the weights by"
        " hp_checkpoint, or send them by hp_checkpoint.stream_weights, and generate with PyTorch"
    )
