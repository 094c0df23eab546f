"""What a sharded module can be told, whatever the framework: the methods of HSDPModule that set up its group."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from hp_fsdp.sharded_class import groups_in

__all__ = ["Controls", "UnshardHandle", "check_reshard", "divisor_of", "share_comm_ctx"]


class UnshardHandle:
    """What ``unshard(async_op=True)`` returns."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def wait(self) -> None:
        """Makes the unsharded parameters usable."""
        self._group.finish_unshard()


class Controls:
    """The methods that act on the groups of a sharded module and of those inside it.

    Setters with ``recurse=True``, which most have by default, act on all sharded modules inside, too.
    """

    _hsdp_group: Any

    def _hsdp_modules(self) -> Iterable[Any]:
        """List this module and those inside it."""
        raise NotImplementedError

    def _groups(self, recurse: bool) -> list[Any]:
        """List this module's group, with ``recurse`` those inside it, too."""
        return groups_in(self._hsdp_modules()) if recurse else [self._hsdp_group]

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
        check_reshard(reshard_after_forward, "set_reshard_after_forward", sizes=False)
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

    def set_modules_to_forward_prefetch(self, modules: Sequence[Any]) -> None:
        """Which modules to gather while this one computes in forward, instead of the one that came next the last time.

        Args:
            modules: sharded modules; an empty list goes back to the recorded order.
        """
        self._hsdp_group.prefetch_in_forward = _groups_of(modules, "set_modules_to_forward_prefetch")

    def set_modules_to_backward_prefetch(self, modules: Sequence[Any]) -> None:
        """Which modules to gather while this one computes in backward, instead of the one that came next the last time.

        Args:
            modules: sharded modules; an empty list goes back to the recorded order.
        """
        self._hsdp_group.prefetch_in_backward = _groups_of(modules, "set_modules_to_backward_prefetch")

    def set_reduce_op_type(self, reduce_op_type: Any, *, recurse: bool = True) -> None:
        """How gradients are reduced over ranks; takes back what `set_gradient_divide_factor` set.

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
            group.reduce_op, group.divisor = op, None

    def set_gradient_divide_factor(self, factor: float, *, recurse: bool = False) -> None:
        """Gradients of this module's own group are the sum over the ranks divided by ``factor``, instead of their mean.

        The sum is divided, so with a ``reduce_dtype`` of a small range, such as float16, it must not overflow.

        Args:
            factor: more than 0; such as the number of ranks times that of micro-batches.
            recurse: for the sharded modules inside, too. Default False, as in torch.

        Raises:
            ValueError: a factor that is not a finite number above 0.
        """
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor <= sys.float_info.max:
            raise ValueError(f"set_gradient_divide_factor: factor must be a finite number above 0, got {factor!r}")
        for group in self._groups(recurse):
            group.reduce_op, group.divisor = "sum", None if factor == 1 else float(factor)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise NotImplementedError(
            f"{type(self).__name__} cannot be copied: its parameters are shards of a group's. Build a second model and"
            " load full_state_dict(model) into it"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise NotImplementedError(
            f"{type(self).__name__} cannot be pickled: its parameters are shards of a group's. Save"
            " full_state_dict(model)"
        )


def divisor_of(group: Any) -> float | None:
    """What reduced gradients of a group are divided by, its scale in it; None for 1."""
    if group.scale == 1.0:
        return group.divisor
    return (1.0 if group.divisor is None else group.divisor) / group.scale


def check_reshard(value: Any, where: str, *, sizes: bool) -> None:
    """Raises for what ``reshard_after_forward`` cannot be.

    Args:
        value: as given.
        where: the function that it was given to.
        sizes: it may be the size of a smaller group.
    """
    if not isinstance(value, bool):
        if isinstance(value, int):
            if sizes:
                return
            raise NotImplementedError(
                f"{where}: reshard_after_forward={value}, the size of a smaller group to reshard to, is not supported "
                "yet. Use True (reshard over all ranks, least memory) or False (keep gathered until backward, least "
                "communication)"
            )
        raise TypeError(f"{where}: reshard_after_forward must be True or False, got {value!r}")


def _groups_of(modules: Sequence[Any], where: str) -> list[Any]:
    for module in modules:
        if not isinstance(module, Controls):
            raise TypeError(f"{where}: expected modules that fully_shard was called on, got {type(module).__name__}")
    return [module._hsdp_group for module in modules]


def share_comm_ctx(modules: Sequence[Any]) -> None:
    """Check that several sharded models, such as the stages of a pipeline on a rank, can share streams; they do anyway.

    torch's function of the name gives its models one set of streams. Here no model has streams of its own: buffers are
    allocated on the current stream, collectives run on that of their process group, copies of offloaded shards on one
    for the device. So nothing is left to set.

    Args:
        modules: sharded modules.

    Raises:
        ValueError: something else among them.
    """
    for index, module in enumerate(modules):
        if not isinstance(module, Controls):
            raise ValueError(
                f"share_comm_ctx: expected modules of fully_shard, number {index} is a {type(module).__name__}. Call"
                " fully_shard on it first"
            )
