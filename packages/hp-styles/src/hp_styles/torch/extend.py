"""Names on PyTorch that other packages of this repository may import, beside the public ones."""

from __future__ import annotations

from hp_styles.torch import modules
from hp_styles.torch.context.attention import capped_attention
from hp_styles.torch.context.call import refuse_compiled
from hp_styles.torch.context.hooks import sees_whole_sequences, whole_sequences
from hp_styles.torch.eight_bits import EmulatedLinear, grouped_product
from hp_styles.torch.low_precision import is_low_precision, run_low_precision
from hp_styles.torch.regions import as_computed

__all__ = [
    "EmulatedLinear",
    "as_computed",
    "capped_attention",
    "grouped_product",
    "is_low_precision",
    "modules",
    "refuse_compiled",
    "run_low_precision",
    "sees_whole_sequences",
    "whole_sequences",
]
