"""Functions and modules whose activations are computed again or wait on the host, and models that follow a plan."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from hp_offload.homes.placing import Placed
from hp_offload.homes.planning import ParameterVisits
from hp_offload.planning import BudgetError, plan_memory
from hp_offload.port import Tensor, link, port
from hp_offload.saved import CheckpointPolicy, MemoryPlan, Saved, size
from hp_platform import get_platform
from hp_platform.extend import own_rank, reduce_numbers

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


def trace_saved(
    model: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[[Any], Any] | None = None,
) -> list[Saved]:
    """Run one step of a model, and measure what it saves for backward.

    Each storage is listed once. Parameters, buffers and the arguments are left out. What a block is given, what several
    blocks save, and what no block computes can neither be computed again nor swapped, so its `recompute` is infinite.
    Gradients, buffers and random numbers are as before afterwards.

    Args:
        model: a module without checkpoints or swaps; its blocks are the modules whose name ends with the first number
            in it, such as "model.layers.3".
        args: of its forward.
        kwargs: keyword arguments of its forward.
        loss: maps the output to the scalar that the step differentiates. Default: its `"loss"`, else the sum of what
            requires gradients.

    Returns:
        What is saved, in the order of making. Times are seconds of this device, measured operation by operation.

    Raises:
        TypeError: not a module.
        ValueError: nothing requires gradients.
        NotImplementedError: a block runs twice; on MindSpore.
    """
    if not port().is_module(model):
        raise TypeError(f"trace_saved takes a module, got {type(model).__name__}.")
    return port().trace(model, tuple(args), dict(kwargs or {}), loss)


def apply_memory_plan(model: M, plan: MemoryPlan) -> M:
    """Let the blocks of a model follow a plan; names of parameters and modules stay, gradients have the same bits.

    Args:
        model: the one that was traced, changed in place.
        plan: of `plan_memory`.

    Returns:
        The model.

    Raises:
        TypeError: not a module, or not a plan.
        ValueError: the plan names a block that the model has not; in the first step, a site that its block has not.
        NotImplementedError: on MindSpore.
    """
    if not port().is_module(model):
        raise TypeError(f"apply_memory_plan takes a module, got {type(model).__name__}.")
    if not isinstance(plan, MemoryPlan):
        raise TypeError(f"apply_memory_plan takes the MemoryPlan of plan_memory, got {type(plan).__name__}.")
    port().apply(model, plan)
    return model


def fit_memory(
    model: M, budget: int, *, bandwidth: float = 25e9, in_flight: int = 1, placed: Placed | None = None
) -> M:
    """Let a model keep what it saves within a budget, by a plan that is made in its first step.

    The first call with gradients traces a step of its own, with the arguments of the call, then plans and applies the
    plan; the traced step itself holds everything at once. With several ranks, all of which make that call, the plan is
    rank 0's, measured there: collectives inside of blocks stay in one order.

    Args:
        model: a module, changed in place; every rank calls this.
        budget: see `plan_memory`.
        bandwidth: see `plan_memory`; the default is that of PCIe 4.0 with 16 lanes.
        in_flight: see `plan_memory`.
        placed: what `place` returned for this model. The cache is then of the same budget, and planned too.

    Returns:
        The model. Its first call raises ValueError on every rank if the budget is below the least possible.

    Raises:
        TypeError: not a module.
        NotImplementedError: on MindSpore.
    """
    if not port().is_module(model):
        raise TypeError(f"fit_memory takes a module, got {type(model).__name__}.")

    def fit(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        saved = trace_saved(model, args, kwargs)
        visits = None if placed is None else placed.visits()
        plan = _shared_plan(saved, budget, bandwidth, in_flight, visits)
        apply_memory_plan(model, plan)
        if placed is not None:
            placed.resize(plan.cache)

    port().before_first_step(model, fit)
    return model


def _shared_plan(
    saved: Sequence[Saved], budget: int, bandwidth: float, in_flight: int, visits: ParameterVisits | None
) -> MemoryPlan:
    """Make a plan on rank 0 and return it on every rank."""
    failure: ValueError | None = None
    plan = MemoryPlan({}, 0, 0.0)
    if own_rank() == 0:
        try:
            plan = plan_memory(saved, budget, bandwidth, in_flight=in_flight, visits=visits)
        except ValueError as error:
            failure = error
    # Every rank has the same number of codes: a failure is the one after the cache, and then the least budget.
    own = [plan.policies.get(each.site, CheckpointPolicy.MUST_SAVE) for each in saved]
    least = failure.least if isinstance(failure, BudgetError) else 0
    groups = get_platform().groups
    first = [*own, plan.cache, int(failure is not None), least] if own_rank() == 0 else [0] * (len(own) + 3)
    group = groups.default_group() if groups.is_initialized() else None
    *codes, cache, failed, least = reduce_numbers(first, "sum", group)
    if failure is not None:
        raise failure
    if failed:
        raise BudgetError(budget, least) if least else ValueError("fit_memory: rank 0 has no plan; its error says why.")
    sizes = {each.site: each.bytes for each in saved if each.alias_of is None}
    policies = {each.site: CheckpointPolicy(code) for each, code in zip(saved, codes)}
    return MemoryPlan(policies, plan.predicted_peak, plan.predicted_step, sizes, cache)


_TOLERANCE = 0.05


class MemoryPlanWarning(UserWarning):
    """A step saves more, or less, than its plan of memory says: plan again, with arguments like these."""


class MemoryCheck:
    """Counts the bytes of a model's second step, and compares them with the plan's.

    The first step names what is saved; from the second one on the shapes are those of training.

    Attributes:
        planned: bytes of each site.
        blocks: those whose second step is not over.
    """

    def __init__(self, plan: MemoryPlan) -> None:
        self.planned = plan.bytes
        self.blocks: set[str] = set()
        self._expected: Counter[CheckpointPolicy] = Counter()
        self._counted: Counter[CheckpointPolicy] = Counter()

    def add(self, policy: CheckpointPolicy, planned: int, tensor: Tensor) -> None:
        """Count a saved tensor whose storage the plan counts."""
        if planned:
            self._expected[policy] += planned
            self._counted[policy] += link().nbytes(link().storage(tensor))

    def finish(self, block: str) -> None:
        """End a block's second forward; after the last one warn if the bytes are off by more than 5%."""
        self.blocks.discard(block)
        total, off = self._expected.total(), self._counted.total() - self._expected.total()
        if self.blocks or abs(off) <= _TOLERANCE * total:
            return
        kinds = ", ".join(
            f"{size(self._counted[policy])} {word} (planned {size(self._expected[policy])})"
            for policy, word in (
                (CheckpointPolicy.MUST_SAVE, "kept"),
                (CheckpointPolicy.MUST_SWAP, "swapped"),
                (CheckpointPolicy.MUST_RECOMPUTE, "computed again"),
            )
        )
        warnings.warn(
            f"The second step under a plan of memory saves {off / total:+.0%} of what the plan counts: {kinds}. Its"
            " peak is off by as much. Trace and plan with arguments of the shapes that training has.",
            MemoryPlanWarning,
            stacklevel=2,
        )
