"""HSDPModule: the class that `fully_shard` adds to a module's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hp_fsdp.torch.group import ParameterGroup
from hp_fsdp.torch.hooks import run_forward

__all__ = ["HSDPModule", "UnshardHandle", "group_of", "make_sharded_class"]

_classes: dict[type, type] = {}


def group_of(module: nn.Module) -> ParameterGroup | None:
    """The group that `fully_shard` made of ``module``; None for a module that it was not called on."""
    return module.__dict__.get("_hsdp_group")


def make_sharded_class(cls: type) -> type:
    """``HSDP<name>``, a subclass of ``HSDPModule`` and ``cls``; the same for each call."""
    made = _classes.get(cls)
    if made is None:
        made = _classes[cls] = type(f"HSDP{cls.__name__}", (HSDPModule, cls), {"__module__": cls.__module__})
    return made


class UnshardHandle:
    """What ``unshard(async_op=True)`` returns."""

    def __init__(self, group: ParameterGroup) -> None:
        self._group = group

    def wait(self) -> None:
        """Makes the unsharded parameters usable."""
        self._group.finish_unshard()


class HSDPModule:
    """A sharded module: its own class, and these methods. Not made by hand: `fully_shard` changes a module's class.

    Setters act on all sharded modules inside, too, unless ``recurse=False``.
    """

    _hsdp_group: ParameterGroup

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs forward with the parameters gathered."""
        return run_forward(self._hsdp_group, group_of, super().__call__, args, kwargs)  # type: ignore[misc]

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers this module's own parameters (not those of sharded modules inside) and registers them.

        Args:
            async_op: return at once. The parameters are there after ``wait()`` on the result; forward waits by itself.
        """
        self._hsdp_group.start_unshard()
        self._hsdp_group.keep()
        self._hsdp_group.pinned = True
        if async_op:
            return UnshardHandle(self._hsdp_group)
        self._hsdp_group.finish_unshard()
        return None

    def reshard(self) -> None:
        """Frees this module's gathered parameters and registers the sharded ones."""
        self._hsdp_group.reshard()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients over ranks. Without, they accumulate unsharded until a backward that does.

        Args:
            requires_gradient_sync: reduce.
            recurse: for the sharded modules inside, too.
        """
        for group in self._groups(recurse):
            group.reduces = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward on a 2-d mesh all-reduces the gradients' shards over the replicas; without, they accumulate.

        Args:
            requires_all_reduce: all-reduce.
            recurse: for the sharded modules inside, too.
        """
        for group in self._groups(recurse):
            group.reduces_over_replicas = requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether to free the gathered parameters after forward. Set to True it holds for the root module, too.

        Args:
            reshard_after_forward: free them.
            recurse: for the sharded modules inside, too.
        """
        check_reshard(reshard_after_forward, "set_reshard_after_forward")
        for group in self._groups(recurse):
            group.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether to free the gathered parameters after backward. Keeping them saves a gather between micro-batches.

        Args:
            reshard_after_backward: free them.
            recurse: for the sharded modules inside, too.
        """
        for group in self._groups(recurse):
            group.reshard_after_backward = reshard_after_backward

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward waits for the reductions at its end.

        Without, the last ones run on into the next micro-batch. Set on the root module.

        Args:
            is_last_backward: wait.
        """
        from hp_fsdp.torch.context import RootContext

        group = self._hsdp_group
        context = group.context or RootContext.of(group, group_of)
        context.last_backward = is_last_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[HSDPModule]) -> None:
        """Which modules to gather while this one computes in forward, instead of the one that came next the last time.

        Args:
            modules: sharded modules; an empty list goes back to the recorded order.
        """
        self._hsdp_group.prefetch_in_forward = _groups_of(modules, "set_modules_to_forward_prefetch")

    def set_modules_to_backward_prefetch(self, modules: Sequence[HSDPModule]) -> None:
        """Which modules to gather while this one computes in backward, instead of the one that came next the last time.

        Args:
            modules: sharded modules; an empty list goes back to the recorded order.
        """
        self._hsdp_group.prefetch_in_backward = _groups_of(modules, "set_modules_to_backward_prefetch")

    def set_reduce_op_type(self, reduce_op_type: Any, *, recurse: bool = True) -> None:
        """How gradients are reduced over ranks.

        Args:
            reduce_op_type: ``"avg"`` (the default) or ``"sum"``, or the framework's own name for one of them.
            recurse: for the sharded modules inside, too.

        Raises:
            ValueError: another operation.
        """
        op = str(reduce_op_type).rsplit(".", 1)[-1].lower()
        if op not in ("avg", "sum"):
            raise ValueError(f'set_reduce_op_type: expected "avg" or "sum", got {reduce_op_type!r}')
        for group in self._groups(recurse):
            group.reduce_op = op

    def _groups(self, recurse: bool) -> Iterator[ParameterGroup]:
        if not recurse:
            yield self._hsdp_group
            return
        for module in self.modules():  # type: ignore[attr-defined]
            group = group_of(module)
            if group is not None:
                yield group

    # ---- where the parameters are looked at from outside ----
    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """As every module's; outside forward and backward the sharded parameters, unless ``unshard`` was called."""
        self._settle()
        return super().named_parameters(*args, **kwargs)  # type: ignore[misc]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state, with sharded parameters; `full_state_dict` gives whole tensors."""
        self._settle()
        return super().state_dict(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Loads sharded parameters; `load_full_state_dict` takes whole tensors."""
        self._settle()
        return super().load_state_dict(*args, **kwargs)  # type: ignore[misc]

    def _settle(self) -> None:
        context = self._hsdp_group.context
        # Without one of its own, parts of this module may have run alone.
        contexts = [context] if context else {id(c): c for g in self._groups(True) if (c := g.context)}.values()
        for each in contexts:
            each.settle()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        for group in self._groups(True):
            group.reshard()
        made = super()._apply(fn, recurse)  # type: ignore[misc]
        for group in self._groups(True):
            group.check()
        return made

    def _materialize(self, device: torch.device) -> None:
        """Gives parameters on meta memory in a flat shard; `hp_dtensor.init_parameters` calls it, then fills them."""
        for bucket in self._hsdp_group.buckets:
            bucket.materialize(device)

    def __deepcopy__(self, memo: Any) -> Any:
        raise NotImplementedError(
            f"{type(self).__name__} cannot be copied: its parameters are parts of shared buffers. Build a second model "
            "and load full_state_dict(model) into it"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotImplementedError(
            f"{type(self).__name__} cannot be pickled: its parameters are parts of shared buffers. "
            "Save full_state_dict(model)"
        )


def check_reshard(value: Any, where: str) -> None:
    """Raises for what ``reshard_after_forward`` cannot be."""
    if not isinstance(value, bool):
        if isinstance(value, int):
            raise NotImplementedError(
                f"{where}: reshard_after_forward={value}, the size of a smaller group to reshard to, is not supported "
                "yet. Use True (reshard over all ranks, least memory) or False (keep gathered until backward, least "
                "communication)"
            )
        raise TypeError(f"{where}: reshard_after_forward must be True or False, got {value!r}")


def _groups_of(modules: Sequence[HSDPModule], where: str) -> list[ParameterGroup]:
    for module in modules:
        if not isinstance(module, HSDPModule):
            raise TypeError(f"{where}: expected modules that fully_shard was called on, got {type(module).__name__}")
    return [module._hsdp_group for module in modules]


def shard_class(module: nn.Module, group: ParameterGroup) -> None:
    """Makes ``module`` an ``HSDPModule`` that runs with ``group``."""
    module.__dict__["_hsdp_group"] = group
    module.__class__ = make_sharded_class(type(module))
