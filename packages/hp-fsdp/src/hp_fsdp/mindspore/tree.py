"""Tensors inside nested inputs and outputs."""

from __future__ import annotations

from mindspore import Tensor

from hp_fsdp.tree import tree_functions

__all__ = ["map_tensors", "tensors"]

map_tensors, tensors = tree_functions(Tensor)
