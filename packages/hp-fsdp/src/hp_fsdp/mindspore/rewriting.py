"""Sharded Cells and ``mindspore.rewrite``, which ``amp`` uses at level O1."""

from __future__ import annotations

import functools
from typing import Any

from mindspore import nn
from mindspore.rewrite.symbol_tree.symbol_tree_builder import SymbolTreeBuilder

from hp_fsdp.mindspore.module import HSDPModule

__all__ = ["refuse_rewriting"]


def refuse_rewriting() -> None:
    """Refuse sharded Cells from now on where MindSpore rewrites a Cell's source: of their class there is none."""
    plain = SymbolTreeBuilder.__init__
    if hasattr(plain, "_refuses_sharded"):
        return

    @functools.wraps(plain)
    def checked(self: Any, network: Any) -> None:
        for _, each in network.cells_and_names() if isinstance(network, nn.Cell) else ():
            if isinstance(each, HSDPModule):
                raise NotImplementedError(
                    f"{type(each).__name__} is sharded by fully_shard, and MindSpore rewrites the source of a Cell's"
                    ' class (amp.auto_mixed_precision at "O1"): do that before fully_shard, or take level O2, O3 or'
                    " auto, or fully_shard's own mp_policy"
                )
        plain(self, network)

    checked._refuses_sharded = True  # type: ignore[attr-defined]
    SymbolTreeBuilder.__init__ = checked
