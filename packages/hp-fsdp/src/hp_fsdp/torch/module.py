"""HSDPModule: the class that `fully_shard` adds to a module's, and what its setters change of the module's group."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hp_fsdp.groups.managed_params import make_sharded_class
from hp_fsdp.module_api import ModuleAPI
from hp_fsdp.state_dict.model import laid_out
from hp_fsdp.steps.order import INSIDE, ExecutionOrder, Span
from hp_fsdp.torch.compat import check_modules, check_parameters, check_prepared, check_state, own_mark
from hp_fsdp.torch.groups.communication import Communication
from hp_fsdp.torch.state_dict import unwrapped
from hp_fsdp.torch.steps.context import RootContext, RootGroup
from hp_fsdp.torch.steps.context import hsdp_sync_stream as hsdp_sync_stream
from hp_fsdp.torch.steps.hooks import run_forward


class Settings(Communication):
    """A group's communication, and its part in a step, as `hp_fsdp.module_api.ModuleAPI` sets them.

    Args:
        group: the group.
    """

    def __init__(self, group: RootGroup) -> None:
        super().__init__(group.axes)
        self.group = group
        self._reshard_after_forward: bool | None = None

    @staticmethod
    def of(group: RootGroup) -> Settings:
        """Return the settings of a group, which uses them in each step from now on."""
        settings = group.communication if isinstance(group.communication, Settings) else Settings(group)
        group.communicate_by(settings)
        return settings

    def set_unshard_in_backward(self, unshard: bool) -> None:
        """Set the group's part; see `hp_fsdp.module_api.ModuleAPI`."""
        self.group.unshard_in_backward = unshard
        if self.group.context is not None:
            self.group.context.backward_order = ExecutionOrder()  # the recorded order may gather it ahead
        several = len(self.group.members) > 1
        self.group.span = (
            Span(self.group.members if several else (), None if unshard else self._around)
            if several or not unshard
            else None
        )

    def _around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, self._check_saved):
                return forward(*args, **kwargs)

        return run

    def _check_saved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Raise if backward needs a parameter whose memory was freed after forward."""
        storage = tensor.untyped_storage()
        if tensor.numel() and storage.nbytes() == 0:
            for bucket in self.group.buckets:
                for parameter, offset in zip(bucket.parameters, bucket.layout.offsets):
                    if bucket.full_storage._cdata == storage._cdata and offset == tensor.storage_offset():
                        raise RuntimeError(
                            f"set_unshard_in_backward(False): backward needs parameter {parameter.name!r} of"
                            f" {self.group.name}, which was freed after forward. Leave it True for this module"
                        )
        return tensor

    def reduce_at_end(self, enable: bool) -> None:
        """Set the group's part; see `ModuleAPI.set_reduce_scatter_unused_params`."""
        group = self.group
        if enable is group.reduces_at_end:
            return
        group.reduces_at_end = enable
        group.unshard_in_backward = not enable
        if enable:
            self._reshard_after_forward, group.reshard_after_forward = group.reshard_after_forward, False
        else:
            group.reshard_after_forward = self._reshard_after_forward

    def set_most_reductions(self, number: int) -> None:
        """Set the group's part; see `ModuleAPI.set_reduce_scatter_max_input_buffers`."""
        self.group.most_reductions = number
        if self.group.context is not None:
            self.group.context.count_reductions()

    def set_post_optim_event(self, event: Any) -> None:
        """Set the group's part; see `hp_fsdp.module_api.ModuleAPI`."""
        assert self.group.context is not None
        self.group.context.events.append(event)

    def reset_iter_state(self) -> None:
        """Set the group's part; see `hp_fsdp.module_api.ModuleAPI`."""
        context = self.group.context
        assert context is not None
        if context.root is not self.group:
            raise RuntimeError(
                f"reset_iter_state: {self.group.name} is inside of another sharded module. Call it on the outermost"
                f" one, {context.root.class_name}"
            )
        context.abandon()


_WITH_DETERMINISTIC = ("set_custom_all_gather", "set_unshard_in_backward", "set_post_optim_event", "reset_iter_state")
_OF_THE_MODEL = ("set_post_optim_event", "reset_iter_state")
_Tracing = importlib.import_module("torch._guards").TracingContext
_traced = torch.compiler.is_dynamo_compiling


class HSDPModule(ModuleAPI):
    """A sharded module: its own class, and these methods. Don't construct it: `fully_shard` changes a module's class.

    Setters with ``recurse=True``, the default of most, act on all sharded modules inside as well.
    """

    _hsdp_group: RootGroup

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward with the parameters gathered."""
        if _traced():
            _refuse_in_a_graph(type(self).__name__)
        return run_forward(self, super().__call__, args, kwargs)  # type: ignore[misc]

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward waits for the reductions at its end.

        Without, the last ones run on into the next micro-batch. Set on the root module.

        Args:
            is_last_backward: wait.
        """
        self._context().last_backward = is_last_backward

    def reduce_gradients(self) -> None:
        """Reduce the gradients that backward passes with ``set_requires_gradient_sync(False)`` have left.

        For who learns only afterwards which pass was the last, as in a pipeline. All ranks call it on the root module,
        between backward passes. A rank whose passes left no gradients, or raised, takes part.
        """
        self._context().reduce_collected()

    def _context(self) -> RootContext:
        return self._hsdp_group.context or RootContext.of(self._hsdp_group)

    def _tuned(self, setter: str, recurse: bool = False, *, one_mesh: bool = False) -> Iterator[Any]:
        groups = self._groups(recurse)
        for group in groups:
            if group.deterministic and setter not in _WITH_DETERMINISTIC:
                raise NotImplementedError(
                    f"{setter}: fully_shard(deterministic=True) adds gradients in an order of its own and not by"
                    f" reduce-scatter, so {group.class_name} does not support it. Leave deterministic out"
                )
        if setter in _OF_THE_MODEL:
            self._context()
        yield from (Settings.of(group) for group in groups)

    def _hsdp_modules(self) -> Iterator[nn.Module]:
        return self.modules()

    @property
    def _is_fsdp_managed_module(self) -> bool:
        """Mark of torch's fully_shard, by which transformers' ``generate`` keeps ranks in step.

        False for the compiler, which has ways of its own with torch's.
        """
        return _Tracing.try_get() is None

    @_is_fsdp_managed_module.setter
    def _is_fsdp_managed_module(self, _: bool) -> None:
        own_mark()

    @property
    def _is_accelerate_prepared(self) -> bool:
        """True: ``accelerator.prepare`` registers the module and returns it as it is, instead of one around it."""
        check_prepared()
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, _: bool) -> None:
        pass  # accelerate marks what it has registered

    def modules(self) -> Iterator[nn.Module]:
        """Return all modules, as every module does."""
        check_modules()
        return super().modules()  # type: ignore[misc]

    # ---- access to the parameters from outside ----
    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Return named parameters: outside forward and backward the sharded ones, unless ``unshard`` was called."""
        self._settle()
        check_parameters()
        return super().named_parameters(*args, **kwargs)  # type: ignore[misc]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state, with sharded parameters; `full_state_dict` has full tensors."""
        self._settle()
        check_state()
        return super().state_dict(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load DTensors, full plain tensors (the same on all ranks), or this rank's plain parts.

        Args:
            state_dict: by name. A DTensor in another layout is moved, which all ranks of its mesh take part in.
            strict: names must be the same.
            assign: the parameters get the memory, dtype and device of the tensors; they stay the objects that they are.

        Raises:
            RuntimeError: a tensor of neither the full nor the local shape, before anything is changed; with
                ``strict``, names that are missing or not known.
        """
        self._settle()
        own: dict[str, torch.Tensor] = {}
        for name, value in super().state_dict(keep_vars=True).items():  # type: ignore[misc]
            if isinstance(value, torch.Tensor):
                own[name] = own[unwrapped(name)] = value
        result = super().load_state_dict(laid_out(own, state_dict, assign=assign), strict, assign)  # type: ignore[misc]
        self._restore()
        return result

    def _settle(self) -> None:
        context = self._hsdp_group.context
        # Without one of its own, parts of this module may have run alone.
        contexts = [context] if context else {id(c): c for g in self._groups(True) if (c := g.context)}.values()
        for each in contexts:
            each.settle()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        for group in self._groups(True):
            group.reshard()
        without_values = [place for place in self._buffers_of_no_state() if place[2].is_meta]
        result = super()._apply(fn, recurse)  # type: ignore[misc]
        self._restore()
        if without_values:  # to_empty gives them memory, but no state that is loaded has their values
            places = {place[:2] for place in without_values}
            self._hsdp_group.unfilled += [
                (*place, place[2].data_ptr(), place[2]._version)
                for place in self._buffers_of_no_state()
                if place[:2] in places and not place[2].is_meta
            ]
        return result

    def _buffers_of_no_state(self) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
        for module in self.modules():
            for name in module._non_persistent_buffers_set:
                if (buffer := module._buffers.get(name)) is not None:
                    yield module, name, buffer

    def _restore(self) -> None:
        for group in self._groups(True):
            group.restore()

    def _materialize(self, device: torch.device) -> None:
        """Give parameters on meta memory in a flat shard; `hp_dtensor.init_parameters` calls it, then fills them."""
        for bucket in self._hsdp_group.buckets:
            bucket.materialize(device)


def _refuse_in_a_graph(name: str) -> None:
    raise NotImplementedError(
        f"fully_shard: torch.compile cannot take gathering and freeing of parameters into a graph, but that is what"
        f" {name} does around its forward. Compile the parts inside: module.compile() on each sharded block (before or"
        " after fully_shard), and don't call torch.compile on sharded modules or on what holds them"
    )


# Dynamo runs such a function while it traces, so that its error is raised instead of a fall back to no graph.
_refuse_in_a_graph._dynamo_marked_constant = True
FSDPModule = HSDPModule
"""torch's name of the class."""


def shard_class(module: nn.Module, group: RootGroup) -> None:
    """Make ``module`` an ``HSDPModule`` that runs with ``group``: Note [Name of a sharded class]."""
    module.__dict__["_hsdp_group"] = group
    module.__class__ = make_sharded_class(HSDPModule, type(module))


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make a method of a sharded module gather the module's parameters, as its forward does.

    The parameters stay gathered until the method returns, also while it calls its own forward, or modules
    inside, each of which gathers its own group. All ranks must call it, and make the same calls in it.

    Example:
        >>> fully_shard(model)
        >>> register_fsdp_forward_method(model, "generate")      # T5 calls its encoder outside of model.forward
        >>> model.generate(ids)

    Args:
        module: a module that `fully_shard` was called on; another one is left as it is, as torch does.
        method_name: the method's name.

    Raises:
        ValueError: the module has no such method.
    """
    if not isinstance(module, HSDPModule):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(
            f"register_fsdp_forward_method: {type(module).__name__} has no method {method_name!r}, got {method!r}"
        )

    @functools.wraps(method)
    def gathered(*args: Any, **kwargs: Any) -> Any:
        group = module._hsdp_group

        def run(*args: Any, **kwargs: Any) -> Any:
            former, group.span = group.span, INSIDE
            try:
                return method(*args, **kwargs)
            finally:
                group.span = former

        return run_forward(module, run, args, kwargs)

    setattr(module, method_name, gathered)
