"""The methods of a sharded module, whatever the framework."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from hp_fsdp.groups.managed_params import groups_in
from hp_fsdp.options import check_reshard


class UnshardHandle:
    """The result of ``unshard(async_op=True)``."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def wait(self) -> None:
        """Wait until the unsharded parameters are usable."""
        self._group.finish_unshard()


class ModuleAPI:
    """The methods of a sharded module that act on its group, and on the groups of the modules inside it.

    Setters with ``recurse=True``, the default of most, act on all sharded modules inside as well.
    """

    _hsdp_group: Any

    def _hsdp_modules(self) -> Iterable[Any]:
        """List this module and those inside it."""
        raise NotImplementedError

    def _groups(self, recurse: bool) -> list[Any]:
        """List this module's group, with ``recurse`` also those inside it."""
        return groups_in(self._hsdp_modules()) if recurse else [self._hsdp_group]

    def _tuned(self, setter: str, recurse: bool = False, *, one_mesh: bool = False) -> Iterator[Any]:
        """Yield the communication settings of each group, or raise if a group doesn't support a setter.

        Args:
            setter: its name, for errors.
            recurse: include the sharded modules inside.
            one_mesh: the setting needs all parameters of a group on one mesh.
        """
        raise NotImplementedError

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own parameters (not those of sharded modules inside) and register them.

        Args:
            async_op: return at once. The parameters are there after ``wait()`` on the result; forward waits by itself.
        """
        context = self._hsdp_group.context
        if context is not None and context.root is self._hsdp_group:
            context.compare()  # here, so that a rank whose forward then fails leaves no other waiting
        self._hsdp_group.start_unshard()
        self._hsdp_group.keep()
        self._hsdp_group.user_unsharded = True
        if async_op:
            return UnshardHandle(self._hsdp_group)
        self._hsdp_group.finish_unshard()
        return None

    def reshard(self) -> None:
        """Free this module's gathered parameters and register the sharded ones."""
        self._hsdp_group.reshard()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backward reduces gradients over ranks; else they accumulate unsharded until a backward that does.

        Args:
            requires_gradient_sync: reduce.
            recurse: include the sharded modules inside.
        """
        for group in self._groups(recurse):
            group.reduces = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward on a 2-d mesh all-reduces the gradients' shards over the replicas; else they accumulate.

        Args:
            requires_all_reduce: all-reduce.
            recurse: include the sharded modules inside.
        """
        for group in self._groups(recurse):
            group.reduces_over_replicas = requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether to free the gathered parameters after forward; True includes the root module.

        Args:
            reshard_after_forward: free them.
            recurse: include the sharded modules inside.
        """
        check_reshard(reshard_after_forward, "set_reshard_after_forward", sizes=False)
        for group in self._groups(recurse):
            group.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether to free the gathered parameters after backward; else the next micro-batch needs no gather.

        Args:
            reshard_after_backward: free them.
            recurse: include the sharded modules inside.
        """
        for group in self._groups(recurse):
            group.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[Any]) -> None:
        """Set the modules to gather while this one computes in forward, instead of the next one of the last pass.

        Args:
            modules: sharded modules; an empty list goes back to the recorded order.
        """
        self._hsdp_group.prefetch_in_forward = _groups_of(modules, "set_modules_to_forward_prefetch")

    def set_modules_to_backward_prefetch(self, modules: Sequence[Any]) -> None:
        """Set the modules to gather while this one computes in backward, instead of the next one of the last pass.

        Args:
            modules: sharded modules; an empty list goes back to the recorded order.
        """
        self._hsdp_group.prefetch_in_backward = _groups_of(modules, "set_modules_to_backward_prefetch")

    def set_reduce_op_type(self, reduce_op_type: Any, *, recurse: bool = True) -> None:
        """Set how gradients are reduced over ranks; undoes `set_gradient_divide_factor`.

        Args:
            reduce_op_type: ``"avg"`` (the default) or ``"sum"``, or the framework's own name for one of them.
            recurse: include the sharded modules inside.

        Raises:
            ValueError: another operation.
        """
        op = str(reduce_op_type).rsplit(".", 1)[-1].lower()
        if op not in ("avg", "sum"):
            raise ValueError(f'set_reduce_op_type: expected "avg" or "sum", got {reduce_op_type!r}')
        for group in self._groups(recurse):
            group.reduce_op, group.divisor = op, None

    def set_gradient_divide_factor(self, factor: float, *, recurse: bool = False) -> None:
        """Make gradients of this module's group the sum over the ranks divided by ``factor``, instead of the mean.

        The sum is divided, so it must not overflow a ``reduce_dtype`` of a small range, such as float16.

        Args:
            factor: more than 0; such as the number of ranks times that of micro-batches.
            recurse: include the sharded modules inside. Default False, as in torch.

        Raises:
            ValueError: anything but a finite number above 0.
        """
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor <= sys.float_info.max:
            raise ValueError(f"set_gradient_divide_factor: factor must be a finite number above 0, got {factor!r}")
        for group in self._groups(recurse):
            group.reduce_op, group.divisor = "sum", None if factor == 1 else float(factor)

    def set_all_reduce_hook(self, hook: Callable[[Any], None], *, stream: Any = None) -> None:
        """Call ``hook`` with each reduced shard of gradients, to reduce it over further ranks.

        The shard is flat, of the reduction's dtype, and the hook changes it in place. It is the result of the
        reduce-scatter, or on a mesh of two axes of the all-reduce; there is one call for each dtype in the group.

        Args:
            hook: takes the shard.
            stream: on a device, the stream to run the hook in. Default: the current one.

        Raises:
            TypeError: the hook isn't callable.
            ValueError: a stream on a mesh of two axes, whose all-reduce precedes the hook.
        """
        if not callable(hook):
            raise TypeError(f"set_all_reduce_hook: expected a function of a tensor, got {type(hook).__name__}")
        for each in self._tuned("set_all_reduce_hook", one_mesh=True):
            if stream is not None and each.axes.replicate_size > 1:
                raise ValueError(
                    "set_all_reduce_hook: stream cannot be set on a mesh of two axes: the hook follows its all-reduce"
                )
            each.hook, each.stream = hook, stream

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Reduce by sums only, and divide afterwards; the gradients are the same up to rounding.

        An all-reduce hook gets the sums before the division.

        Args:
            enable: use sums.
        """
        for each in self._tuned("set_force_sum_reduction_for_comms"):
            each.sums = bool(enable)

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gather parameters by ``comm``.

        Args:
            comm: torch's ``AllGather``: ``comm.allocate(size, dtype=, device=)`` makes the memory that is gathered
                into, ``comm(output_tensor=, input_tensor=, group=, async_op=)`` gathers, and returns a handle or None.
                The result is copied into the parameters' memory.

        Raises:
            TypeError: it lacks one of them.
        """
        check_comm(comm, "set_custom_all_gather")
        for each in self._tuned("set_custom_all_gather", one_mesh=True):
            each.gather = comm

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduce gradients over the shard axis by ``comm``.

        Args:
            comm: torch's ``ReduceScatter``: as for `set_custom_all_gather`, with ``op=`` as well, which is always the
                sum: means are divided afterwards.

        Raises:
            TypeError: it lacks one of them.
        """
        check_comm(comm, "set_custom_reduce_scatter")
        for each in self._tuned("set_custom_reduce_scatter", one_mesh=True):
            each.scatter = comm

    def set_custom_all_reduce(self, all_reduce: Callable[..., Any], *, recurse: bool = True) -> None:
        """Reduce gradients over the replicate axis of a mesh of two axes by ``all_reduce``.

        Example:
            >>> model.set_custom_all_reduce(functools.partial(hp_onesided.all_reduce, wire=hp_onesided.Wire("bf16")))

        Args:
            all_reduce: called as ``all_reduce(piece, op=, group=, async_op=True)`` with a flat shard that the
                reduce-scatter left, of the reduction's dtype; ``op`` is "avg" or "sum". It changes the piece in place,
                by the end of ``wait()`` of the handle that it returns, alike on all ranks of the group.
            recurse: include the sharded modules inside.

        Raises:
            TypeError: it isn't callable.
            ValueError: no group has replicas.
            NotImplementedError: with ``deterministic=True``, and on MindSpore.
        """
        if not callable(all_reduce):
            raise TypeError(f"set_custom_all_reduce: expected a function of a tensor, got {type(all_reduce).__name__}")
        replicated = [
            each for each in self._tuned("set_custom_all_reduce", recurse) if each.axes.replicate_group is not None
        ]
        if not replicated:
            raise ValueError(
                "set_custom_all_reduce: gradients are reduced over no replicate axis. Give fully_shard a mesh of two"
                ' axes, such as mesh["dp_replicate", "dp_shard"]; set_custom_reduce_scatter is for the shard axis'
            )
        for each in replicated:
            each.replicas = all_reduce

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Use a separate process group for reduce-scatters, so that they can run beside the all-gathers of backward.

        All ranks must call it.

        Args:
            enable: False goes back to the mesh's group.
            recurse: include the sharded modules inside.
        """
        for each in self._tuned("set_separate_reduce_scatter_group", recurse):
            each.separate_group = bool(enable)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Call `set_gradient_divide_factor`; this is torch's older name."""
        self.set_gradient_divide_factor(factor)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Reduce a group's gradients even if a rank's backward pass does not reach the group.

        By default a group must have gradients on all ranks or on none; some of its parameters may have none anywhere.
        The group's forward must still run on all ranks. Its parameters stay gathered between forward and backward, and
        its gradients are reduced at the end of backward, when all ranks have the same to do.

        Args:
            reduce_scatter_unused_params: reduce them.
            recurse: include the sharded modules inside.
        """
        for each in self._tuned("set_reduce_scatter_unused_params", recurse):
            each.reduce_at_end(bool(reduce_scatter_unused_params))

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set how many groups' gradients may be under way at once; more take more memory and wait less. Default 1.

        The largest number of a model's groups counts for all of them.

        Args:
            max_input_buffers: at least 1.
            recurse: include the sharded modules inside.

        Raises:
            TypeError, ValueError: anything else.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(
                "set_reduce_scatter_max_input_buffers: max_input_buffers must be an int, got"
                f" {type(max_input_buffers).__name__}"
            )
        if max_input_buffers < 1:
            raise ValueError(
                f"set_reduce_scatter_max_input_buffers: max_input_buffers must be 1 or more, got {max_input_buffers}"
            )
        for each in self._tuned("set_reduce_scatter_max_input_buffers", recurse):
            each.set_most_reductions(max_input_buffers)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backward gathers the parameters again; it need not if it does not use them (embeddings).

        Args:
            unshard_in_backward: False: don't gather. A module that saves a parameter for backward then raises
                RuntimeError.
        """
        for each in self._tuned("set_unshard_in_backward"):
            each.set_unshard_in_backward(bool(unshard_in_backward))

    def set_post_optim_event(self, event: Any) -> None:
        """Wait for ``event`` before the next forward gathers, for an optimizer step in another stream.

        It is used once: each step needs a new event.

        Args:
            event: recorded after the optimizer's step; it has ``wait()``.

        Raises:
            TypeError: it has no ``wait()``.
        """
        if not callable(getattr(event, "wait", None)):
            raise TypeError(f"set_post_optim_event: expected an event, with wait(), got {type(event).__name__}")
        for each in self._tuned("set_post_optim_event"):
            each.set_post_optim_event(event)

    def reset_iter_state(self) -> None:
        """Go back to the state between steps after an error in forward or backward; the step's gradients are lost.

        The next forward does this by itself.

        Raises:
            RuntimeError: this is not the outermost sharded module.
        """
        for each in self._tuned("reset_iter_state"):
            each.reset_iter_state()

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Refuse: collectives read and write the memory of parameters and gradients, so nothing is staged.

        Raises:
            NotImplementedError: ``enable`` is True.
        """
        if enable:
            raise NotImplementedError(_NOTHING_STAGED.format("set_allocate_memory_from_process_group_for_comm"))

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Refuse: collectives read and write the memory of parameters and gradients, so nothing is staged.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(_NOTHING_STAGED.format(f"set_symm_mem_for_comm({backend!r})"))

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


def _groups_of(modules: Sequence[Any], where: str) -> list[Any]:
    for module in modules:
        if not isinstance(module, ModuleAPI):
            raise TypeError(f"{where}: expected modules that fully_shard was called on, got {type(module).__name__}")
    return [module._hsdp_group for module in modules]


def share_comm_ctx(modules: Sequence[Any]) -> None:
    """Check that several sharded models, such as the stages of a pipeline on a rank, can share streams; they always do.

    torch's function of this name gives its models one set of streams. Here no model has streams of its own: buffers are
    allocated on the current stream, collectives run on their process group's, copies of offloaded shards on one for the
    device. So there is nothing to set.

    Args:
        modules: sharded modules.

    Raises:
        ValueError: something else among them.
    """
    for index, module in enumerate(modules):
        if not isinstance(module, ModuleAPI):
            raise ValueError(
                f"share_comm_ctx: expected modules of fully_shard, number {index} is a {type(module).__name__}. Call"
                " fully_shard on it first"
            )


_NOTHING_STAGED = (
    "{}: fully_shard has no staging buffers to place, its collectives read and write the memory that parameters and"
    " gradients are in. To gather through memory of your own, give set_custom_all_gather an object with allocate()"
)


def check_comm(comm: Any, where: str) -> None:
    """Raise TypeError for anything but torch's ``AllGather`` or ``ReduceScatter``."""
    if not callable(comm) or not callable(getattr(comm, "allocate", None)):
        raise TypeError(
            f"{where}: expected an object that can be called and has allocate(size, dtype=, device=), as torch's"
            f" AllGather and ReduceScatter, got {type(comm).__name__}"
        )
