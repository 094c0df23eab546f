"""Memory of stages that steps move: parameters sharded over further ranks, saved tensors on the host.

Note [Who gathers and reduces]
    A sharded module gathers its parameters around each forward and backward, and reduces gradients after each. In a
    run the schedule does both: UNSHARD gathers all of a stage, RESHARD frees it, and REDUCE_GRAD, after the last
    backward of the stage, reduces what all micro-batches have left. Between UNSHARD and REDUCE_GRAD nothing is
    communicated, so a stage that raises on one rank leaves no other waiting; that rank goes on gathering and reducing
    like the others. Between runs the modules do it themselves again.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from typing import Any

from hp_pipeline.orders.pipeline import COMPUTE, SHARDING, SWAPPING, MetaStepType, Order, Pipeline, compute_parts, lower
from hp_pipeline.port import ShardedModule, Swapper, port
from hp_pipeline.running.slices import MicroBatchState

_T = MetaStepType


class ShardedStage:
    """The sharded modules of a stage.

    Args:
        module: the stage's; without sharded modules all methods do nothing.
    """

    def __init__(self, module: Any) -> None:
        self.modules: list[ShardedModule] = port().sharded_modules(module)
        self.outermost: list[ShardedModule] = port().outermost(self.modules)
        self._gathering: list[Any] | None = None

    def begin(self) -> None:
        """Before a run: leave gathering and reducing to the schedule."""
        for module in self.outermost:
            module.set_is_last_backward(False)
            module.set_requires_gradient_sync(False)
            module.set_reshard_after_forward(False)
            module.set_reshard_after_backward(False)

    def free(self) -> None:
        """Free gathered parameters, by whomever: after an optimizer's step they would be those of before."""
        self._gathering = self._gathering or []
        self.reshard()

    def unshard(self) -> None:
        """Gather all parameters; forward waits for them."""
        if self._gathering is None:
            self._gathering = [module.unshard(async_op=True) for module in self.modules]

    def reshard(self) -> None:
        """Free the gathered parameters."""
        if self._gathering is not None:
            self._wait()
            self._gathering = None
            for module in self.modules:
                module.reshard()

    def _wait(self) -> None:
        """Wait for what no forward waited for, because another stage had failed."""
        for handle in self._gathering or ():
            if handle is not None:
                handle.wait()

    def reduce(self, failed: bool) -> None:
        """Start to reduce the gradients of all micro-batches; readers of gradients wait for them.

        Args:
            failed: the stage raised on this rank, so that gradients may be missing.
        """
        if failed:
            self._wait()
        for module in self.outermost:
            module.set_is_last_backward(True)
            module.set_requires_gradient_sync(True)
            port().reduce_gradients(module, failed and self._gathering is not None)

    def end(self) -> None:
        """After a run: let the modules gather and reduce by themselves again.

        From now on parameters are freed after each forward: what the user chose there cannot be read, and what stays
        gathered would not see an optimizer's step.
        """
        self.free()
        for module in self.outermost:
            module.set_is_last_backward(True)
            module.set_requires_gradient_sync(True)
            module.set_reshard_after_forward(True)
            module.set_reshard_after_backward(True)


def lowered(order: Order, pipeline: Pipeline, rank: int, stages: Collection[tuple[int, Any]], *, swap: bool) -> Order:
    """Add all other steps to an order, for a rank's own stages those of sharding and swapping that it has not."""
    kinds = {each.step_type for each in order[rank]}
    sharded = [index for index, module in stages if not kinds & SHARDING and port().sharded_modules(module)]
    swapped = [index for index, _ in stages if swap and not kinds & SWAPPING]
    return lower(order, pipeline, sharded=sharded, swapped=swapped)


def refuse_order(order: Order, rank: int, stages: Collection[tuple[int, Any]], overlap: Any) -> str | None:
    """Return the error of an order that sharded stages cannot run, or None.

    Args:
        order: all steps.
        rank: this one.
        stages: of this rank, with their modules.
        overlap: runs pairs of steps in two threads, or None.
    """
    steps = order[rank]
    modules = dict(stages)
    for each in steps:
        forward, backward = (part.stage_index or 0 for part in each.sub_steps or (each, each))
        if overlap is not None and each.sub_steps and forward == backward and overlap.meets(forward, backward):
            if port().sharded_modules(modules[forward]):
                return (
                    f"{each} runs a forward and a backward of stage {forward} in two threads, but a module that"
                    " fully_shard was called on is in one of them at a time; leave overlap out, or the sharding"
                )
    reduced = {each.stage_index for each in steps if each.step_type is _T.REDUCE_GRAD}
    parts = [part for each in steps for part in compute_parts(each)]
    trained = {part.stage_index for part in parts if part.step_type in COMPUTE - {_T.FORWARD}}
    missing = [index for index, module in stages if index in trained - reduced and port().sharded_modules(module)]
    if not missing:
        return None
    return (
        f"The parameters of the stages {missing} are sharded, but exec_order has no REDUCE_GRAD for them; assign"
        " lower(order, pipeline, sharded=stages), or computing steps alone"
    )


MOVES: dict[_T, Callable[[MicroBatchState], None]] = {
    _T.OFFLOAD: lambda flow: flow.swap.launch_offload(),
    _T.WAIT_OFFLOAD: lambda flow: flow.swap.wait_offload(),
    _T.LOAD: lambda flow: flow.swap.launch_load(),
    _T.WAIT_LOAD: lambda flow: flow.swap.wait_load(),
}
"""What each type of step does with what a forward has saved."""


def swapper_of(swap: Any) -> Swapper | None:
    """Return what moves saved tensors.

    Args:
        swap: True for hp-offload's, False for none, or an object with its method ``saving``.

    Raises:
        ModuleNotFoundError: hp-offload is not installed.
        TypeError: another object.
    """
    if swap is True:
        try:
            return importlib.import_module("hp_offload").SwapManager()
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "swap=True moves saved tensors by hp-offload, which is not installed: pip install hp-offload, or pass"
                " an object with a method saving(name, module)."
            ) from error
    if swap is False or swap is None:
        return None
    if not callable(getattr(swap, "saving", None)):
        raise TypeError(
            f"swap is True, False, or an object with a method saving(name, module), as hp_offload.SwapManager() is; got"
            f" {type(swap).__name__}."
        )
    return swap
