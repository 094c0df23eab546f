"""Recomputation and saved tensors of MindSpore, and copies to the host, done when the call returns.

A storage is a contiguous tensor here, then the bytes of one: MindSpore makes no tensor of a part of some memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, nn

from hp_offload.manager import Entry, GroupRun, SwapManager, name_of_group
from hp_offload.port import ALIGNMENT
from hp_offload.saved import CheckpointPolicy, checked_swap_answer

Function = Callable[..., Any]


def check_checkpoint(policy_fn: Function | None, swap_inputs: bool) -> None:
    """Refuse options of checkpoint that MindSpore has no means for.

    Raises:
        NotImplementedError: `policy_fn` or `swap_inputs`.
    """
    if policy_fn is not None:
        raise NotImplementedError(
            "checkpoint(policy_fn=...) is not supported on MindSpore, whose operations can't be handed an output that"
            " was kept: checkpoint smaller functions, or leave policy_fn out to compute all again."
        )
    if swap_inputs:
        raise NotImplementedError(
            "checkpoint(swap_inputs=True) is not supported on MindSpore, which saves the arguments of recompute itself:"
            " call swap around what uses them."
        )


def checkpoint(
    function: Function,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    policy_fn: Function | None,
    context_fn: Callable[[], Any] | None,
    swap_inputs: bool,
    group_swap: bool,
    early_stop: bool,
) -> Any:
    chosen = {} if context_fn is None else {"context_fn": context_fn}
    return mindspore.recompute(function, *args, use_reentrant=False, early_stop=early_stop, **chosen, **kwargs)


class _Kept:
    """A saved tensor that stays."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def load(self) -> Tensor:
        return self._tensor


class _Swapped:
    """A saved tensor whose values may be on the host."""

    def __init__(self, tensor: Tensor, entry: Entry) -> None:
        self._entry, self._shape = entry, tensor.shape
        self._dtype = tensor.asnumpy().dtype

    def load(self) -> Tensor:
        base, offset = self._entry.bring()
        if isinstance(base, Tensor):
            return base.reshape(self._shape)
        nbytes = int(np.prod(self._shape, dtype=np.int64)) * self._dtype.itemsize
        return Tensor(base[offset : offset + nbytes].view(self._dtype).reshape(self._shape))


def swap(
    function: Function,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    policy_fn: Function | None,
    group: str,
    group_swap: bool,
) -> Any:
    owner = getattr(function, "__self__", function)
    cell = owner if isinstance(owner, nn.Cell) else None
    run: list[GroupRun] = []

    def open_run() -> GroupRun:
        if not run:
            run.append(SwapManager().begin(group or name_of_group(owner, cell), group_swap))
        return run[0]

    with _packing(open_run, cell, policy_fn):
        result = function(*args, **kwargs)
    if run:
        SwapManager().end(run[0])
    return result


def saving(run: GroupRun, module: Any) -> AbstractContextManager[None]:
    return _packing(lambda: run, module if isinstance(module, nn.Cell) else None, None)


def _packing(
    open_run: Callable[[], GroupRun], cell: nn.Cell | None, policy_fn: Function | None
) -> AbstractContextManager[None]:
    protected = set() if cell is None else {each.data_ptr() for each in cell.get_parameters()}

    def pack(tensor: Tensor) -> Any:
        # MindSpore hands parameters over as tensors; those it can't give the bytes of stay, too.
        if tensor.data_ptr() in protected or tensor.dtype == mindspore.bfloat16 or not tensor.is_contiguous():
            return _Kept(tensor)
        if policy_fn is not None:
            asked = f"a {tensor.dtype} tensor of shape {tuple(tensor.shape)}"
            if checked_swap_answer(policy_fn(tensor), asked) is CheckpointPolicy.MUST_SAVE:
                return _Kept(tensor)
        entry = open_run().add(tensor)
        return _Kept(tensor) if entry is None else _Swapped(tensor, entry)

    return mindspore.saved_tensors_hooks(pack, lambda packed: packed.load())


def swap_tensor(tensor: Tensor, group: str, group_swap: bool) -> Tensor:
    """Refuse: MindSpore's recompute does not ask what becomes of one tensor."""
    raise NotImplementedError(
        "swap_tensor_wrapper is not supported on MindSpore, whose recompute decides itself what it saves: use"
        " swap(function, ..., policy_fn=...), which chooses tensors."
    )


def run_excluded(forward: Function, args: Any, kwargs: Any, *, save_output: bool) -> Any:
    """Refuse: MindSpore's recompute has no way around a part of what it runs again."""
    raise NotImplementedError(
        "checkpoint_exclude_wrapper is not supported on MindSpore, whose recompute runs all of a function again:"
        " checkpoint the functions before and after the cell."
    )


def trace(model: Any, args: Any, kwargs: Any, loss: Any) -> Any:
    """Refuse: MindSpore has no clock of operations."""
    raise NotImplementedError(
        "trace_saved (fit_memory calls it) is not supported on MindSpore, which does not say what each operation"
        " takes. plan_memory plans what is listed by hand."
    )


def apply(model: Any, plan: Any) -> None:
    """Refuse: MindSpore's recompute keeps nothing of what it runs again."""
    raise NotImplementedError(
        "apply_memory_plan is not supported on MindSpore, whose recompute runs all of a function again: use"
        " checkpoint_wrapper and swap_wrapper on its cells."
    )


def before_first_step(model: Any, action: Any) -> None:
    trace(model, (), {}, None)


def module_names(module: nn.Cell) -> list[str]:
    """Refuse: a Cell's parameters can't be exchanged while it runs."""
    raise NotImplementedError(
        "place is not supported on MindSpore: parameters of a Cell stay on their device. swap_wrapper and"
        " checkpoint_wrapper save memory there."
    )


def find_parts(model: nn.Cell, names: Any) -> Any:
    """Refuse, as `module_names` does."""
    return module_names(model)


def place(model: nn.Cell, found: Any, budget: int, ahead: int) -> Any:
    """Refuse, as `module_names` does."""
    return module_names(model)


def is_module(value: Any) -> bool:
    """Tell a Cell from everything else."""
    return isinstance(value, nn.Cell)


def is_tensor(value: Any) -> bool:
    """Tell a tensor from everything else."""
    return isinstance(value, Tensor)


def wrap(module: nn.Cell, around: Function) -> nn.Cell:
    module.construct = functools.partial(around, module.construct)
    return module


def streams() -> tuple[None, None]:
    """Have no streams: copies are done at once."""
    return None, None


def storage(tensor: Tensor) -> Tensor:
    """Get what is copied: the tensor."""
    return tensor


def address(storage: Tensor) -> int:
    """Tell memory apart by where it begins and how long it is; 0 where there is none."""
    return (storage.data_ptr() << 48 | storage.nbytes) if storage.nbytes else 0


def nbytes(storage: Tensor) -> int:
    """Count a tensor's bytes."""
    return storage.nbytes


def on_host(storage: Tensor) -> bool:
    """Tell that memory counts as the device's, on CPU as well."""
    return False


def host(nbytes: int, from_host: bool) -> np.ndarray:
    return np.empty(nbytes, np.uint8)


def copy_out(storages: list[Tensor], buffer: np.ndarray, stream: None, after: None) -> None:
    offset = 0
    for each in storages:
        values = np.ascontiguousarray(each.asnumpy()).reshape(-1).view(np.uint8)
        buffer[offset : offset + values.size] = values
        offset += -(-values.size // ALIGNMENT) * ALIGNMENT


def copy_back(buffer: np.ndarray, nbytes: int, like: Any, stream: None) -> tuple[np.ndarray, None]:
    return buffer[:nbytes].copy(), None


def empty_like(storage: Tensor) -> None:
    """Need nothing: bytes come back as bytes."""


def free(storage: Tensor) -> None:
    """Refuse: tensors that the caller holds stay where they are."""
    raise NotImplementedError(
        "SwapManager.add_storage is not supported on MindSpore: a tensor that its caller holds cannot be freed. Use"
        " swap(function, ...), whose saved tensors nobody else holds."
    )


def fill(storage: Tensor, buffer: np.ndarray, nbytes: int, stream: None) -> None:
    free(storage)


def wait(event: None) -> None:
    """Wait for nothing: copies are done."""
