"""Names of what a program saves: the module that saves it, and how many it saved before.

The trace of a step and the blocks that follow a plan name by the same rules, so that a plan says the same to both.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from hp_offload.saved import block_of
from hp_offload.torch.packed import address_of
from hp_offload.torch.swapping import stays

T = torch.Tensor


class Sites:
    """The sites of what one run of a block saves; each storage has one.

    What the block is given has sites of its own, `"layers.3#given0"`: whether an input requires gradients, and so is
    left alone as parameters are, must not change the names of others.

    Args:
        name: of the block.
        given: its arguments.
    """

    def __init__(self, name: str, given: Any = ()) -> None:
        self.name, self.path = name, [name]
        self._given = {address_of(each) for each in tree_leaves(given) if isinstance(each, T)} - {0}
        self._counts: Counter[str] = Counter()
        self._storages: dict[int, tuple[StorageWeakRef, str]] = {}

    def site(self, tensor: T) -> tuple[str | None, bool]:
        """Return the site of a tensor's storage, None for a parameter's, and if it is saved here for the first time."""
        address = address_of(tensor)
        given = address in self._given
        if not address or (stays(tensor) and not given):
            return None, False
        known = self._storages.get(address)
        if known is not None and not known[0].expired():
            return known[1], False
        name = f"{self.name}#given" if given else f"{self.path[-1]}#"
        site = f"{name}{self._counts[name]}"
        self._counts[name] += 1
        self._storages[address] = StorageWeakRef(tensor.untyped_storage()), site
        return site, True


@contextlib.contextmanager
def walking(module: nn.Module, sites: Sites, prefix: str) -> Iterator[None]:
    """Let `sites` follow the calls of the modules in a module."""
    handles = []
    for name, child in module.named_modules():
        if not name:
            continue
        path = f"{prefix}.{name}" if prefix else name
        handles.append(child.register_forward_pre_hook(lambda *_, path=path: sites.path.append(path)))
        handles.append(child.register_forward_hook(lambda *_: _leave(sites), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _leave(sites: Sites) -> None:
    sites.path.pop()


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of a model: modules whose name ends with the first number in it."""
    named = ((name, module) for name, module in model.named_modules() if name.rpartition(".")[2].isdigit())
    return {name: module for name, module in named if block_of(name) == name}
