"""What known devices can do at most."""

from __future__ import annotations

import re

# Operations a second in bfloat16 and float16 with dense matrices, by the makers' data sheets; the first that fits.
_PEAKS = (
    (r"B200", 2250e12),
    (r"H200", 989e12),
    (r"H100 NVL", 835e12),
    (r"H100 PCIe", 756e12),
    (r"H800 PCIe", 756e12),
    (r"H[18]00|GH200", 989e12),
    (r"H20", 148e12),
    (r"A[18]00", 312e12),
    (r"A40", 149.7e12),
    (r"A10G", 70e12),
    (r"A10", 125e12),
    (r"L40S", 362e12),
    (r"L40", 181e12),
    (r"L4", 121e12),
    (r"RTX 4090", 165.2e12),
    (r"MI300X", 1307e12),
    (r"MI325X", 1307e12),
)


def known_peak(device: str, dtype: str) -> float | None:
    """Return the operations a second that a device can do at most; None where that isn't known.

    >>> known_peak("NVIDIA H100 80GB HBM3", "bfloat16")
    989000000000000.0
    >>> known_peak("NVIDIA H100 80GB HBM3", "float64") is None
    True

    Args:
        device: its name, as its maker calls it.
        dtype: of the model's computation.
    """
    if dtype not in ("bfloat16", "float16"):
        return None
    return next((peak for name, peak in _PEAKS if re.search(rf"\b(?:{name})\b", device)), None)
