"""What the packages use of PyTorch's private interface, each under one name.

Attributes of tensors are read and set here below `__torch_function__`: the descriptors of `torch.Tensor`, called
without a lookup on the object. No other module names `torch._C`; `docs/structure.py` counts those that do. So whatever
a version of PyTorch moves or renames is mended in this file, and its test tells of it by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

T = torch.Tensor
_C: Any = torch._C


def getter(name: str) -> Callable[[T], Any]:
    """Return the function that reads an attribute of a tensor."""
    return getattr(T, name).__get__


def setter(name: str) -> Callable[[T, Any], None]:
    """Return the function that sets an attribute of a tensor."""
    return getattr(T, name).__set__


get_data, set_data = getter("data"), setter("data")
get_grad, set_grad = getter("grad"), setter("grad")
get_requires_grad, set_requires_grad = getter("requires_grad"), setter("requires_grad")
get_base = getter("_base")
get_device = getter("device")
get_dtype = getter("dtype")
get_grad_fn = getter("grad_fn")
get_is_leaf = getter("is_leaf")
get_retains_grad = getter("retains_grad")
get_shape = getter("shape")
get_version = getter("_version")
get_hooks: Callable[[T], dict[int, Any] | None] = getter("_backward_hooks")
get_accumulation_hooks: Callable[[T], dict[int, Any] | None] = getter("_post_accumulate_grad_hooks")

set_versions: Callable[[tuple[T, ...], tuple[int, ...]], None] = _C._autograd._unsafe_set_version_counter
swap_tensors: Callable[[T, T], None] = _C._swap_tensor_impl
same_memory: Callable[[T, T], bool] = _C._is_alias_of

# Interception. `plainly(function, types, args, kwargs)` calls a function with it off, `without_torch_function()`
# is a block with it off for subclasses, `without_all_torch_functions()` for modes too.
plainly: Any = _C._disabled_torch_function_impl
without_torch_function: Callable[[], AbstractContextManager[Any]] = _C.DisableTorchFunctionSubclass
without_all_torch_functions: Callable[[], AbstractContextManager[Any]] = _C.DisableTorchFunction
with_torch_function: Callable[[], AbstractContextManager[Any]] = _C._EnableTorchFunction
without_torch_dispatch: Callable[[], AbstractContextManager[Any]] = _C._DisableTorchDispatch
torch_function_enabled: Callable[[], bool] = _C._is_torch_function_enabled
torch_functions_above: Callable[[], int] = _C._len_torch_function_stack
torch_dispatches_above: Callable[[], int] = _C._len_torch_dispatch_stack

# Where torch's functions have their second names: those of `torch.nn.functional` and the like, from C.
variable_functions: Any = _C._VariableFunctions
nn_functions: Any = _C._nn
linalg_functions: Any = _C._linalg
special_functions: Any = _C._special
fft_functions: Any = _C._fft

# The backward pass. `backward_id()` numbers the pass that runs in this thread; it is -1 outside of one.
backward_id: Callable[[], int] = _C._current_graph_task_id
keeps_graph: Callable[[], bool] = getattr(_C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
current_node: Callable[[], Any] = _C._current_autograd_node
next_node_number: Callable[[], int] = _C._autograd._get_sequence_nr
engine_will_run: Callable[[Any], bool] = _C._will_engine_execute_node
saved_hooks_above: Callable[[bool], Any] = _C._autograd._top_saved_tensors_default_hooks

# Transforms of functions, and modes.
transforms_active: Callable[[], bool] = _C._are_functorch_transforms_active
current_transform: Callable[[], Any] = _C._functorch.peek_interpreter_stack
is_transformed: Callable[[T], bool] = _C._functorch.is_functorch_wrapped_tensor
current_fake_mode: Callable[[], Any] = functools.partial(_C._get_dispatch_mode, _C._TorchDispatchModeKey.FAKE)
set_deterministic: Callable[..., None] = _C._set_deterministic_algorithms
Range: Any = _C._profiler._RecordFunctionFast
"""A named range of the profiler's, `with Range(name)`; without one running it costs 0.2 us."""

_native_dispatch = _C._disabled_torch_dispatch_impl


def in_backward() -> bool:
    """Return True in a backward pass."""
    return backward_id() != -1


def is_native(tensor: T) -> bool:
    """Return True if operations on a tensor run torch's kernels: its class has no dispatch of its own."""
    kind: Any = type(tensor)
    return kind.__torch_dispatch__ is _native_dispatch
