"""Functions and modules whose activations are computed again, or wait on the host."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from hp_offload.port import port

M = TypeVar("M")
Policy = Callable[..., Any]
_OPTIONS = {"swap_inputs": False, "policy_fn": None, "context_fn": None, "group_swap": False, "early_stop": True}
"""Of `checkpoint`, with their defaults."""


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    swap_inputs: bool = False,
    policy_fn: Policy | None = None,
    context_fn: Callable[[], Any] | None = None,
    group_swap: bool = False,
    early_stop: bool = True,
    **kwargs: Any,
) -> Any:
    """Call a function without keeping what its backward needs: backward calls it again.

    The second call sees the arguments, random numbers, autocast, determinism, function modes and context variables
    (`contextvars`) of the first. What changes between the two (a write to a parameter, another branch) raises, and
    so does a write to what an operation saved, as without a checkpoint. Only another tensor put in the place of a
    parameter or a buffer is not noticed.

        y = checkpoint(block, x)                                             # all of block again
        y = checkpoint(block, x, policy_fn=lambda ctx, op, *args: op is torch.ops.aten.addmm.default)

    Args:
        function: computes the same from the same arguments; a module, a method of one, or a function.
        *args: its arguments. Tensors in lists, tuples and dicts among them are saved as an operation saves its inputs.
        swap_inputs: those tensors wait on the host.
        policy_fn: torch's policy of selective checkpoints, `(ctx, op, *args, **kwargs) -> CheckpointPolicy`. It is
            asked once, in the first call, about stand-ins without values. What heavy operations (linear
            layers, attention, matrix products, convolutions, embeddings) compute is kept by the table of its answers,
            and handed back in the second call.
        context_fn: returns the contexts of the first and of the second call, as torch's; not with `policy_fn`.
        group_swap: outputs that go to the host do so by one copy.
        early_stop: end the second call as soon as nothing more is needed of it.
        **kwargs: the function's keyword arguments, likewise. `use_reentrant=False` is taken for torch's, and dropped.

    Returns:
        What the function returned.

    Raises:
        TypeError: `function` or a policy can't be called, or a policy returned nonsense.
        ValueError: `policy_fn` and `context_fn` together, or `use_reentrant=True`.
        NotImplementedError: `MUST_SWAP` for what is no output of a heavy operation.
    """
    _check_callable("checkpoint", "function", function)
    _check_checkpoint(policy_fn, context_fn, swap_inputs)
    if "use_reentrant" in kwargs and kwargs.pop("use_reentrant"):
        raise ValueError(
            "checkpoint(use_reentrant=True): there is no reentrant checkpoint here; leave it out, or pass False."
        )
    return port().checkpoint(
        function,
        args,
        kwargs,
        policy_fn=policy_fn,
        context_fn=context_fn,
        swap_inputs=swap_inputs,
        group_swap=group_swap,
        early_stop=early_stop,
    )


def swap(
    function: Callable[..., Any], *args: Any, policy_fn: Policy | None = None, group_swap: bool = False, **kwargs: Any
) -> Any:
    """Call a function whose saved tensors wait on the host until backward needs them; nothing is computed again.

    What one call saves is a group. It leaves when the next group begins, and comes back while the group after it is in
    its backward (see `SwapManager`); the last group of a forward stays. Each storage is copied once. Parameters,
    buffers, leaves that the caller holds and views of them stay where they are.

    Args:
        function: a module, a method of one, or a function.
        *args: its arguments.
        policy_fn: asked about each tensor that is saved, returns `MUST_SAVE` (it stays) or `MUST_SWAP`. Default: all
            are swapped.
        group_swap: copy the group as one.
        **kwargs: its keyword arguments.

    Returns:
        What the function returned.

    Raises:
        TypeError: `function` or `policy_fn` can't be called, or the policy returned nonsense.
        RuntimeError: in backward, if something wrote to what was saved.
        NotImplementedError: in backward, if it is to be differentiated (`create_graph=True`).
    """
    _check_callable("swap", "function", function)
    if policy_fn is not None:
        _check_callable("swap", "policy_fn", policy_fn)
    return port().swap(function, args, kwargs, policy_fn=policy_fn, group="", group_swap=group_swap)


def checkpoint_wrapper(module: M, policy: Literal["full"] | Policy = "full", **checkpoint_kwargs: Any) -> M:
    """Compute a module again in backward, whoever calls it; names of parameters and of its children stay.

    Args:
        module: changed in place.
        policy: `"full"`, or a `policy_fn` of `checkpoint`.
        **checkpoint_kwargs: options of `checkpoint`: swap_inputs, context_fn, group_swap, early_stop.

    Returns:
        The module.

    Raises:
        TypeError: not a module, or an unknown option.
        ValueError: an unknown policy.
    """
    _check_module("checkpoint_wrapper", module)
    unknown = sorted(set(checkpoint_kwargs) - set(_OPTIONS))
    if unknown:
        raise TypeError(f"checkpoint_wrapper takes the options {', '.join(_OPTIONS)} of checkpoint, got {unknown}.")
    if isinstance(policy, str):
        if policy != "full":
            raise ValueError(f'checkpoint_wrapper: policy is "full" or a function like policy_fn, got {policy!r}.')
    elif checkpoint_kwargs.get("policy_fn") is not None:
        raise TypeError("checkpoint_wrapper got two policies: policy and policy_fn; leave one out.")
    else:
        _check_callable("checkpoint_wrapper", "policy", policy)
        checkpoint_kwargs["policy_fn"] = policy
    options = _OPTIONS | checkpoint_kwargs
    _check_checkpoint(options["policy_fn"], options["context_fn"], options["swap_inputs"])
    return _wrapped(module, port().checkpoint, **options)


def _wrapped(module: M, run: Callable[..., Any], **options: Any) -> M:
    """Call a module's forward by `run`."""
    return port().wrap(module, functools.partial(_run, run, options))


def _run(
    run: Callable[..., Any], options: dict[str, Any], forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    return run(forward, args, kwargs, **options)


def checkpoint_exclude_wrapper(module: M, *, save_output: bool = True) -> M:
    """Leave a module out of the checkpoint that it is in: what it saves is kept, and it is not computed again.

    Args:
        module: changed in place.
        save_output: keep its output, too, which is handed back in the second run. False computes the module again for
            it, which frees the output.

    Returns:
        The module.

    Raises:
        TypeError: not a module.
    """
    _check_module("checkpoint_exclude_wrapper", module)
    return _wrapped(module, port().run_excluded, save_output=save_output)


def swap_wrapper(
    module: M, offload_to: Literal["cpu"] = "cpu", policy_fn: Policy | None = None, group_swap: bool = False
) -> M:
    """Let what a module saves wait on the host, whoever calls it; names of parameters and of its children stay.

    Args:
        module: changed in place.
        offload_to: where to; "cpu" is the host's memory.
        policy_fn: see `swap`.
        group_swap: see `swap`.

    Returns:
        The module.

    Raises:
        TypeError: not a module, or `policy_fn` can't be called.
        ValueError: another place than "cpu".
    """
    _check_module("swap_wrapper", module)
    if offload_to != "cpu":
        raise ValueError(f'swap_wrapper: offload_to is "cpu", the host\'s memory, got {offload_to!r}.')
    if policy_fn is not None:
        _check_callable("swap_wrapper", "policy_fn", policy_fn)
    return _wrapped(module, port().swap, policy_fn=policy_fn, group="", group_swap=group_swap)


def swap_tensor_wrapper(target: Any, tag: str | None = None, group_swap: bool = False) -> Any:
    """Let what backward saves of one tensor wait on the host, inside of a `checkpoint` or a `swap`.

        def forward(self, x):                     # runs under checkpoint(...)
            h = swap_tensor_wrapper(self.up(x))   # saved by what uses it, swapped and not computed again

    Args:
        target: a tensor; it is returned as it is.
        tag: name of its group; default one of its own.
        group_swap: copy the group as one.

    Raises:
        TypeError: not a tensor.
        RuntimeError: outside of `checkpoint` and `swap`.
    """
    if not port().is_tensor(target):
        raise TypeError(f"swap_tensor_wrapper takes a tensor, got {type(target).__name__}; swap_wrapper takes modules.")
    return port().swap_tensor(target, tag or "tagged tensors", group_swap)


def _check_checkpoint(policy_fn: Any, context_fn: Any, swap_inputs: Any) -> None:
    if policy_fn is not None and context_fn is not None:
        raise ValueError("checkpoint takes policy_fn or context_fn, not both: each decides what is computed again.")
    for name, value in (("policy_fn", policy_fn), ("context_fn", context_fn)):
        if value is not None:
            _check_callable("checkpoint", name, value)
    port().check_checkpoint(policy_fn, swap_inputs)


def _check_callable(caller: str, name: str, value: Any) -> None:
    if not callable(value):
        raise TypeError(f"{caller}: {name} is called, and {value!r} can't be.")


def _check_module(caller: str, module: Any) -> None:
    if not port().is_module(module):
        raise TypeError(f"{caller} takes a module, got {type(module).__name__}; pass functions to checkpoint or swap.")
