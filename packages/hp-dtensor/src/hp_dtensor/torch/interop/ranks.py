"""The ranks of a mesh as a tensor."""

from __future__ import annotations

import numpy as np
import torch


def rank_tensor(ranks: np.ndarray) -> torch.Tensor:
    """Create a tensor of ranks on the host, as torch's DeviceMesh has it."""
    return torch.tensor(ranks.tolist(), dtype=torch.int, device="cpu")
