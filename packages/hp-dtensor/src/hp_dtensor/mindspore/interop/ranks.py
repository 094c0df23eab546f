"""The ranks of a mesh as a tensor."""

from __future__ import annotations

import mindspore
import numpy as np


def rank_tensor(ranks: np.ndarray) -> mindspore.Tensor:
    """Create a tensor of ranks."""
    return mindspore.Tensor(ranks.astype(np.int32))
