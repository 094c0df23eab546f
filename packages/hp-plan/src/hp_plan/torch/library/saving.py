"""`save_pretrained` of a model that a plan was applied to: its ranks gather what one of them writes."""

from __future__ import annotations

import functools
import sys
import time
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d

from hp_dtensor import DTensor
from hp_platform import get_platform

_PATIENCE = 10.0  # seconds until a rank says for whom it waits
_meetings = 0


def save_whole(model: nn.Module) -> None:
    """Make `save_pretrained` write full weights: every rank calls it, they gather, and rank 0 writes.

    A state dict of whole tensors needs nobody else: transformers' own method has it.
    """
    if not callable(getattr(model, "save_pretrained", None)):
        return
    original: Any = model.save_pretrained

    @functools.wraps(original)
    def save_pretrained(save_directory: Any, *args: Any, **options: Any) -> None:
        state = options.pop("state_dict", None)
        if state is not None and not any(isinstance(value, DTensor) for value in state.values()):
            original(save_directory, *args, state_dict=state, **options)
            return
        _meet(type(model).__name__)
        writes = get_platform().groups.rank() == 0
        whole = _gathered(model.state_dict() if state is None else state, keep=writes)
        if writes:
            original(save_directory, *args, state_dict=whole, **options)
        done = torch.zeros(1, device=get_platform().devices.current_device())
        get_platform().collectives.all_reduce(done, "sum", group=_everyone())  # Others may read what was written.

    model.save_pretrained = save_pretrained  # type: ignore[assignment]
    _save_on_all_ranks_of_trainers()


def _save_on_all_ranks_of_trainers() -> None:
    """Let transformers' Trainer, and those of other libraries that inherit it, save a model of `save_whole`.

    A Trainer calls `save_pretrained` on one rank alone, which would wait for the others for ever.
    """
    trainers = sys.modules.get("transformers.trainer")
    original: Any = getattr(getattr(trainers, "Trainer", None), "_save", None)
    if original is None or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def _save(self: Any, output_dir: str | None = None, state_dict: Any = None) -> None:
        if "save_pretrained" not in vars(self.model) and any(
            "save_pretrained" in vars(module) for module in self.model.modules()
        ):
            save_whole(self.model)  # an adapter around a planned model
        if state_dict is None and "save_pretrained" in vars(self.model) and not self.args.should_save:
            self.model.save_pretrained(self.args.output_dir if output_dir is None else output_dir)
        else:
            original(self, output_dir, state_dict)

    trainers.Trainer._save = _save  # type: ignore[union-attr]


def _meet(model: str) -> None:
    """Wait for all ranks in the store: a collective could be joined by another one of ranks that save nothing.

    Raises:
        TimeoutError: a rank did not come within the store's time limit.
    """
    global _meetings
    group = dist.group.WORLD
    if group is None or dist.get_backend(group) == "fake":
        return
    store: Any = c10d._get_default_store()
    keys = [f"hp_plan/save_pretrained/{_meetings}/{rank}" for rank in range(group.size())]
    store.set(keys[group.rank()], "")
    end, told = time.monotonic() + store.timeout.total_seconds(), False
    while True:
        try:
            store.wait(keys, timedelta(seconds=_PATIENCE))
            break
        except dist.DistStoreError:
            late = [rank for rank, key in enumerate(keys) if not store.check([key])]
            text = (
                f"save_pretrained of {model} gathers what a plan has sharded, so every rank has to call it, but ranks"
                f" {late} have not yet: call it outside of `if rank == 0:`, or pass it a whole state_dict (under a"
                " Trainer of transformers, import the Trainer before the plan is applied)"
            )
            if late and time.monotonic() > end:
                raise TimeoutError(text) from None
            if late and not told:
                warnings.warn(f"rank {group.rank()}: {text}", stacklevel=4)
                told = True
    _meetings += 1


def _everyone() -> Any:
    groups = get_platform().groups
    return groups.new_group(range(groups.size()))


def _gathered(state: dict[str, Any], keep: bool) -> dict[str, Any]:
    """Gather the DTensors of a state; a tensor under several names stays one tensor, as savers expect.

    A rank that doesn't keep them frees each at once: the hosts' memory holds one copy, not one for each rank.
    """
    full: dict[int, torch.Tensor] = {}
    for value in state.values():
        if isinstance(value, DTensor) and _identity(value) not in full:
            whole = value.full_tensor().detach()
            full[_identity(value)] = whole.cpu().clone() if keep else whole.new_empty(0)
    return {name: full[_identity(value)] if isinstance(value, DTensor) else value for name, value in state.items()}


def _identity(value: torch.Tensor) -> int:
    """Return the address of the local tensor's memory; an empty one has none, so the object's."""
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.data_ptr() or id(value)
