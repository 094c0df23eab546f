"""Operations by what each token sees."""

from __future__ import annotations

import numpy as np
import pytest

from hp_pipeline.extend import Operations


def test_attention_is_within_documents_and_windows():
    positions = np.array([[0, 1, 2, 3, 0, 1]])  # two documents: 4 * 4 / 2 + 2 * 2 / 2 pairs
    assert Operations(10.0, {}).training(positions) == 3 * 60
    assert Operations(0.0, {None: 2.0}).training(positions) == pytest.approx(3 * 2 * 10)
    assert Operations(0.0, {3: 1.0}).training(positions) == pytest.approx(3 * 9.5)
