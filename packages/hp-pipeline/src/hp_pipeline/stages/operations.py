"""The operations of a model, counted from its shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Operations:
    """Multiplications and additions of a model's matrices and of its attention.

    Norms, activations, softmax, and what linear attention and state spaces do beside their matrices are left out.

    Attributes:
        matrices: in the forward of a token: two for each weight that it meets; of experts, those of the chosen ones.
        attention: in the forward of a token, for each token that it sees, by how many it sees at most (the size of a
            sliding window; None: all before it).
    """

    matrices: float
    attention: Mapping[int | None, float]

    def training(self, positions: NDArray[np.int64]) -> float:
        """Return the operations of a forward and a backward, which takes twice those of the forward.

        Args:
            positions: of each token in its document: the tokens before it are those that it sees. A token counts
                itself by half, so that a document of `n` tokens has `n * n / 2` pairs.
        """
        forward = self.matrices * positions.size
        for window, each in self.attention.items():
            seen = positions + 0.5
            forward += each * float((seen if window is None else np.minimum(seen, window)).sum())
        return 3 * forward
