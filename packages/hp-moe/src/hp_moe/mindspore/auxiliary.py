"""The auxiliary loss of transformers' models, which are not on MindSpore."""

from __future__ import annotations

from typing import Any

from mindspore import nn


def global_auxiliary_loss(model: nn.Cell, *, group: Any = None) -> Any:
    """Refuse: it is for transformers' models.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        "global_auxiliary_loss is for transformers' models, which run on PyTorch: use MoE(load_balance_coeff=...,"
        " sequence_partition_group=...)"
    )
