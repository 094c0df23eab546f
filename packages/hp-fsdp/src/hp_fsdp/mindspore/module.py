"""HSDPModule: the class that `fully_shard` adds to a Cell's, and the work before and after forward and backward.

Note [Where backward begins and ends]
    The backward of a Cell begins when a gradient has come to one of its outputs: a hook on that tensor. It ends with
    the node that unsharded its parameters: Note [The oldest node] in `hp_fsdp.mindspore.groups.group`.

Note [Forward inside backward]
    Recomputation runs forward again in backward. Inside a Cell whose backward has begun the parameters are gathered,
    and stay so. A Cell that is recomputed as a whole runs as in any forward.

Note [No second derivative]
    The tensors that a recorded backward computes with are freed when that backward ends, and the sum over the ranks is
    not recorded. So neither the gradients of the parameters nor those of the inputs of the outermost Cell can be
    differentiated again: no other path leads into the recorded graph.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mindspore import Tensor, nn
from mindspore.common import dtype as mstype
from mindspore.common._register_for_recompute import recompute_registry
from mindspore.graph.api import _pynative_executor
from mindspore.rewrite.symbol_tree.symbol_tree_builder import SymbolTreeBuilder

from hp_dtensor.mindspore.extend import DTensor, alias, grad_enabled, local_mode, once_differentiable, own_dtypes, wrap
from hp_fsdp.groups.managed_params import make_sharded_class, spec_of
from hp_fsdp.mindspore.groups.group import Call, ParameterGroup, RootContext, in_backward, unsharded_tensors
from hp_fsdp.mindspore.state_dict import refuse_hooks, write_parts
from hp_fsdp.module_api import ModuleAPI
from hp_fsdp.state_dict.model import check_names, laid_out
from hp_fsdp.steps.tree import in_dtypes, tree_functions

map_tensors, tensors = tree_functions(Tensor)


def run_forward(
    group: ParameterGroup, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a Cell's forward with its parameters gathered, and arrange for its backward; return its result."""
    context = group.context or RootContext.of(group)
    run = functools.partial(_run, context, group, forward)
    return in_dtypes(group.policy, _cast, map_tensors, run, args, kwargs)


def _run(context: RootContext, group: ParameterGroup, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if group.active:
        return forward(*args, **kwargs)
    again = in_backward()
    outermost = context.outermost is None
    if outermost:
        if again:
            context.outermost = group
        else:
            context.begin_forward(group)
    before = None
    try:
        with own_dtypes():  # buffers and collectives have those of the parameters
            context.unshard(group, context.order, group.prefetch_in_forward)
        call = Call(group) if _recording() else None
        if call is not None and group.deterministic:
            group.calls.add(call)
        with own_dtypes():
            before = group.show(unsharded_tensors(group, call))
        if call is not None and outermost:
            args, kwargs = map_tensors(_guard, args), map_tensors(_guard, kwargs)
        output = forward(*args, **kwargs)
        group.note("left")
        group.show(before)
        watched = call is not None and _watch(context, call, output)
        if call is not None and not watched:
            group.calls.discard(call)
        context.finished.append(group)
        reshard = group.reshard_after_forward
        if reshard or (reshard is None and not (watched and group is context.root)):
            group.reshard(before_backward=watched)
        if outermost:
            context.end_forward()
    except BaseException:
        if before is not None:
            group.show(before)
        if outermost and not again:
            context.abandon()
        else:
            group.reshard()
            if outermost:
                context.end_forward()
        raise
    return output


def _recording() -> bool:
    """Tell whether operations are recorded: a gradient is taken, and not inside ``_no_grad``, as recomputation does."""
    return grad_enabled() and _pynative_executor.enable_grad()


def _guard(tensor: Tensor) -> Tensor:
    """Return an alias of an input, whose gradient can't be differentiated: Note [No second derivative]."""
    if not tensor._requires_grad:
        return tensor
    with local_mode():
        inside = alias(tensor)
        Tensor.register_hook(inside, _guarded)
    return wrap(inside, tensor._spec) if isinstance(tensor, DTensor) else inside


def _guarded(gradient: Tensor) -> Tensor:
    with local_mode():
        return once_differentiable(lambda gradient: gradient, _an_input, gradient)


def _an_input() -> str:
    return "an input of a Cell that fully_shard shards"


def _cast(dtype: Any, tensor: Tensor) -> Tensor:
    return tensor.astype(dtype) if tensor.dtype in mstype.float_type and tensor.dtype != dtype else tensor


def _watch(context: RootContext, call: Call, output: Any) -> bool:
    watched = False
    with local_mode():
        for tensor in tensors(output):
            if tensor._requires_grad:
                watched = True
                Tensor.register_hook(tensor, lambda gradient: context.enter_backward(call))
    return watched


def hsdp_sync_stream() -> None:
    """Wait for the reductions of all sharded models that are still under way: on MindSpore none are.

    A backward pass returns its gradients, so it waits for each reduction that it starts.
    """


class HSDPModule(ModuleAPI):
    """A sharded Cell: its own class, and these methods. Don't construct it: `fully_shard` changes a Cell's class.

    Setters with ``recurse=True``, the default of most, act on all sharded Cells inside as well.
    """

    _hsdp_group: ParameterGroup

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the Cell, whose own ``__call__`` would initialise full parameters where values are missing."""
        self._hsdp_group.check_values()
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        """Run the Cell's construct with the parameters gathered.

        Not around ``__call__``: a Cell that is differentiated itself begins to record there.
        """
        inner = self.__dict__.get("_hsdp_construct") or super().construct  # type: ignore[misc]
        return run_forward(self._hsdp_group, inner, args, kwargs)

    def parameters_and_names(self, name_prefix: str = "", expand: bool = True) -> Iterator[tuple[str, Any]]:
        """List the Cell's parameters, the sharded ones also after a backward pass that raised."""
        self._hsdp_group.recover()
        return super().parameters_and_names(name_prefix, expand)  # type: ignore[misc]

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load DTensors, full plain tensors (the same on all ranks), or this rank's plain parts.

        Args:
            state_dict: by name. A DTensor in another layout is moved, which all ranks of its mesh take part in.
            strict: names must be the same.

        Raises:
            RuntimeError: names that are missing or not known, with ``strict``, or a tensor of neither the full nor the
                local shape; before anything is changed.
            NotImplementedError: a Cell inside changes states before they are loaded.
        """
        refuse_hooks(self)
        for group in self._groups(True):
            group.reshard()
        own = dict(self.state_dict(keep_vars=True))  # type: ignore[attr-defined]
        missing, unknown = check_names(own, state_dict, type(self).__name__, strict=strict)
        state = laid_out(own, state_dict)
        parts = {name: value for name, value in state.items() if spec_of(own.get(name)) is not None}
        write_parts(own, parts)
        rest = {name: value for name, value in state.items() if name in own and name not in parts}
        return super().load_state_dict(rest, False)._replace(missing_keys=missing, unexpected_keys=unknown)  # type: ignore[misc]

    def zero_grads(self) -> None:
        """Drop the gradients that wait for a backward pass with gradient sync, here and in the sharded Cells inside.

        The gradients that `mindspore.value_and_grad` returned belong to the caller and are not touched.
        """
        for group in self._groups(True):
            group.forget_gradients()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Not on MindSpore: each backward pass returns its gradients, so it waits for them.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            f"set_is_last_backward({is_last_backward}): on MindSpore each backward pass returns its gradients, so its"
            " reductions are over when it is; to put them off use set_requires_gradient_sync(False)"
        )

    def _tuned(self, setter: str, recurse: bool = False, *, one_mesh: bool = False) -> Iterator[Any]:
        raise NotImplementedError(
            f"{setter}: not on MindSpore, where a group's gradients are reduced inside of value_and_grad; there are"
            " set_requires_gradient_sync, set_requires_all_reduce, set_reduce_op_type and set_gradient_divide_factor"
        )

    def _hsdp_modules(self) -> Iterator[nn.Cell]:
        return (cell for _, cell in self.cells_and_names())  # type: ignore[attr-defined]


FSDPModule = HSDPModule
"""torch's name of the class."""


def shard_class(cell: nn.Cell, group: ParameterGroup) -> None:
    """Make ``cell`` an ``HSDPModule`` that runs with ``group``: its class becomes a subclass of its own.

    What was put around the Cell's construct before runs inside of the gather, recomputation around it.
    """
    cell.__dict__["_hsdp_group"] = group
    if "construct" in cell.__dict__:  # ms.amp.auto_mixed_precision(..., "auto"), ms.jit, or a user's own
        cell.__dict__["_hsdp_construct"] = cell.__dict__.pop("construct")
    object.__setattr__(cell, "__class__", make_sharded_class(HSDPModule, type(cell)))
    if cell._recompute_cell is not None:
        object.__setattr__(cell, "_recompute_cell", _recomputed(cell, cell._recompute_cell))


def _recomputed(cell: nn.Cell, before: Any) -> Any:
    """Apply ``Cell.recompute`` to the sharded Cell's construct, with the options of before."""
    if isinstance(before, nn.Cell):
        return recompute_registry.get()(cell.construct, True)
    options = inspect.getclosurevars(before).nonlocals
    kwargs = {name: options[name] for name in ("output_recompute", "early_stop", "context_fn")}
    return recompute_registry.get()(cell.construct, use_reentrant=False, **kwargs)


def register_fsdp_forward_method(module: Any, method_name: str) -> None:
    """Not on MindSpore, whose backward passes follow the construct of Cells.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        f"register_fsdp_forward_method({type(module).__name__}, {method_name!r}): on MindSpore the parameters of a"
        " sharded Cell are gathered around its construct only. Call fully_shard on a Cell whose construct calls the"
        " method"
    )


def refuse_rewriting() -> None:
    """Refuse sharded Cells from now on if MindSpore rewrites a Cell's source: their class has none."""
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
