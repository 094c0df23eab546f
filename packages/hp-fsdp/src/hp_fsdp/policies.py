"""Policies of `fully_shard`: what is computed and communicated in which dtype, and what is kept where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["CPUOffloadPolicy", "MixedPrecisionPolicy", "OffloadPolicy"]


@dataclass(frozen=True, slots=True)
class MixedPrecisionPolicy:
    """Dtypes of a group's computation and communication. Sharded parameters keep theirs: the optimizer step is exact.

    Args:
        param_dtype: dtype of the unsharded parameters, so of forward, backward and the all-gather. Each rank casts its
            own piece before the all-gather. Default None: the parameters' own dtype.
        reduce_dtype: dtype in which gradients are reduced over ranks and accumulated over backward passes.
            Default None: ``param_dtype``, or where that is None the parameters' own.
        output_dtype: floating-point outputs of the module's forward are cast to this. Default None: no cast.
        cast_forward_inputs: cast floating-point inputs of the module's forward to ``param_dtype``. Default True.
    """

    param_dtype: Any = None
    reduce_dtype: Any = None
    output_dtype: Any = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True, slots=True)
class OffloadPolicy:
    """Nothing is offloaded: the default, and the base of the other policies."""


@dataclass(frozen=True, slots=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Sharded parameters, gradients and optimizer states live on the host.

    Args:
        pin_memory: keep them in page-locked memory, so that copies overlap computation. Default True.
    """

    pin_memory: bool = True
