"""What depends on other libraries' code: refusals by name, if they would misread sharded modules.

Tested with torch 2.13, accelerate 1.15 and transformers 5.23; the function of torchtitan is known by its name, and
tested by the copy in tests/test_other_libraries.py.

Note [Callers by name]
    DDP, torch's own fully_shard, accelerate and transformers look for torch's classes, find none, and go on as with an
    unsharded module: they would broadcast shards over one another, or save rank 0's shards as the model. The called
    method (``state_dict``, ``named_parameters``) does not show the purpose of the call, so the module looks at the
    caller, that is, who called the method of the module (or the hook of the optimizer) that calls a check here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

_FULL = "full_state_dict(model), called on all ranks (from hp_fsdp import full_state_dict)"
_REPLICATING = {
    "torch.nn.parallel.distributed": "DistributedDataParallel",
    "torch.distributed._composable.replicate": "replicate",
}


def check_parameters() -> None:
    """Raise TypeError if a wrapper that would shard or replicate parameters once more asks for them."""
    for name, _ in _callers(3):  # they ask by way of Module.parameters
        wrapper = _REPLICATING.get(name)
        if wrapper is not None:
            raise TypeError(
                f"{wrapper} around modules of fully_shard: each rank has other parts of their parameters,"
                " and fully_shard reduces their gradients already. Leave it out; to replicate over some ranks and shard"
                " over others give fully_shard a mesh of two axes"
            )
        if name == "torch.distributed.fsdp._fully_shard._fsdp_init":
            raise TypeError(
                "torch's fully_shard on a module that hp_fsdp.fully_shard sharded, or around one: its parameters are"
                " sharded already. Take one of the two for the whole model; with accelerate and transformers leave"
                " their FSDP settings out, because they call torch's"
            )


def own_mark() -> None:
    """Raise TypeError if torch's FullyShardedDataParallel marks modules as its own."""
    raise TypeError(
        "FullyShardedDataParallel around modules of hp_fsdp.fully_shard: their parameters are sharded already. Leave it"
        " out; with accelerate and transformers leave their FSDP settings out, because they wrap with it"
    )


def check_state() -> None:
    """Raise TypeError if a library takes a sharded state for a full one."""
    for name, frame in _callers(50):
        if name == "torch.nn.modules.module":  # of a module around this one
            continue
        if name == "torch.distributed.checkpoint.state_dict":
            if getattr(frame.f_locals.get("info"), "full_state_dict", False):
                raise TypeError(
                    "torch's get_model_state_dict cannot gather parameters of fully_shard. Take the function of the"
                    " same name, with the same options: from hp_fsdp import get_model_state_dict, set_model_state_dict"
                )
        elif name == "accelerate.accelerator":
            raise TypeError(
                "accelerate takes the state of a module of hp_fsdp.fully_shard for a full one (get_state_dict,"
                f" save_model, save_state). Save {_FULL}, or get_model_state_dict(model) and"
                " get_optimizer_state_dict(model, optimizer) with torch.distributed.checkpoint"
            )
        elif name == "transformers.modeling_utils" and frame.f_code.co_name == "save_pretrained":
            raise TypeError(
                "save_pretrained takes the state of a module of hp_fsdp.fully_shard for a full one. Give it the"
                f" state: model.save_pretrained(path, state_dict=state), with state = {_FULL}; in a Trainer, override"
                " save_model"
            )
        return


def check_optimizer_state(optimizer: Any) -> None:
    """Raise TypeError if a trainer would save rank 0's part of an optimizer's states as all of them."""
    for name, frame in _callers(12):
        if (name.partition(".")[0], frame.f_code.co_name) in (
            ("transformers", "_save_optimizer_and_scheduler"),
            ("accelerate", "save_accelerator_state"),
        ):
            raise TypeError(
                f"{name} saves the states of {type(optimizer).__name__} on one rank, which has its own part of them,"
                " sharded by hp_fsdp.fully_shard. Save get_optimizer_state_dict(model, optimizer) of hp_fsdp with"
                " torch.distributed.checkpoint; a Trainer saves the model alone with"
                " TrainingArguments(save_only_model=True)"
            )


def check_prepared() -> None:
    """Raise TypeError if accelerate would leave out its mixed precision."""
    for name, frame in _callers(1):
        dtype = getattr(frame.f_locals.get("self"), "mixed_precision", "no")
        if name == "accelerate.accelerator" and dtype != "no":
            raise TypeError(
                f"accelerate's mixed_precision={dtype!r} (of a Trainer: bf16, fp16) is not for"
                " modules of hp_fsdp.fully_shard, which cast by themselves. Leave it out, and shard with"
                " fully_shard(module, mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16))"
            )


def check_modules() -> None:
    """Raise TypeError if torchtitan would find no module to switch off the division of gradients in."""
    for name, frame in _callers(1):
        if name.startswith("torchtitan.") and frame.f_code.co_name == "disable_fsdp_gradient_division":
            raise TypeError(
                "torchtitan's disable_fsdp_gradient_division looks for torch's FSDPModule and finds none in a model of"
                " hp_fsdp.fully_shard, whose gradients would stay divided by the number of ranks. Call"
                " model.set_gradient_divide_factor(1.0, recurse=True) instead"
            )


def _callers(most: int) -> Iterator[tuple[str, FrameType]]:
    """List the frames above that of the function which called a check, innermost first, with their modules' names."""
    frame: FrameType | None = sys._getframe(3)
    for _ in range(most):
        if frame is None:
            return
        yield frame.f_globals.get("__name__", ""), frame
        frame = frame.f_back
