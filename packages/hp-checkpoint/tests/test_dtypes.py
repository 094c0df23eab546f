"""Dtypes are converted as the frameworks convert them."""

from __future__ import annotations

import numpy as np
import pytest

from hp_checkpoint.disk.files import converted
from hp_checkpoint.layout.tensors import read_bytes
from hp_platform import get_platform
from hp_testing import as_tensor, on_ranks

DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
UNSIGNED = {"F64": np.uint64, "F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}
LARGEST = {"F64": 0x7FF << 52, "F32": 0xFF << 23, "F16": 0x1F << 10, "BF16": 0xFF << 7}
"""Bits of infinity: those of nan are larger."""


def values():
    bits = np.random.default_rng(0).integers(0, 2**32, 20_000, dtype=np.uint32).view(np.float32)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.00390625, 1.01171875, 65519.9, 65520.0, 3.4e38, 1e-40]
    return np.concatenate([bits, np.array(special, np.float32)])


def to(tensor, dtype):
    if get_platform().name == "torch":
        import torch

        return tensor.to(getattr(torch, dtype))
    import mindspore

    return tensor.astype(getattr(mindspore, dtype))


@on_ranks(1)
@pytest.mark.parametrize("source", list(DTYPES))
def test_conversions_are_those_of_the_framework(source):
    with np.errstate(all="ignore"):
        tensor = as_tensor(values(), source)
    for target, name in DTYPES.items():
        truth = read_bytes(to(tensor, target)).view(UNSIGNED[name])
        got = converted(read_bytes(tensor), DTYPES[source], name).view(UNSIGNED[name])
        magnitude = truth.dtype.type(2 ** (8 * truth.itemsize - 1) - 1)
        nan, own = ((each & magnitude) > LARGEST[name] for each in (truth, got))
        assert (nan == own).all() and (truth == got)[~nan].all(), target
