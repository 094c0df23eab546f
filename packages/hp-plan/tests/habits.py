"""What users do with a model besides calling it: hooks, losses of their own, frozen parts, reads and writes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hp_dtensor import DTensor
from hp_plan import ParallelPlan

Model = Any
Inputs = dict[str, Any]


@dataclass(frozen=True)
class Habit:
    """Something that a user does, in one process and under a plan alike.

    Attributes:
        built: called with the model before the plan is applied.
        applied: called with the model after that.
        loss: computes the loss of a batch in the place of `model(**inputs)["loss"]`.
        stepped: called with the model, its optimizer, the inputs and the step's number after each step.
        stages: does something that a model in stages has, too.
        context: does something that a model on parts of a sequence has, too.
        needs: a part of the family's name or of its tables that it makes sense with.
        optimizer: makes the optimizer; None is the plan's own.
        clip: clips gradients in the place of the plan's own function.
    """

    built: Callable[[Model], None] | None = None
    applied: Callable[[Model], None] | None = None
    loss: Callable[[Model, Inputs], torch.Tensor] | None = None
    stepped: Callable[[Model, Any, Inputs, int], None] | None = None
    stages: bool = False
    context: bool = True
    needs: Callable[[ParallelPlan, str], bool] = lambda plan, family: True
    optimizer: Callable[[list[nn.Parameter]], Any] | None = None
    clip: Callable[[list[nn.Parameter]], Any] | None = None

    def fits(self, plan: ParallelPlan, family: str) -> bool:
        """Return True if a user would do so under this plan."""
        staged, cut = plan.mesh.pp > 1, plan.mesh.cp > 1
        return (self.stages or not staged) and (self.context or not cut) and self.needs(plan, family)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The members of the outermost lists of modules."""
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    return [block for name in outer for block in model.get_submodule(name)]


def first(output: Any) -> torch.Tensor:
    """The first tensor of a module's output."""
    return output[0] if isinstance(output, tuple) else output


def _linears(block: nn.Module) -> list[nn.Module]:
    found = [module for module in block.modules() if "weight" in dict(module.named_parameters(recurse=False))]
    return [module for module in found if module.weight.dim() == 2]


def _scale_output(model: Model) -> None:
    """A temperature on a block's result."""

    def scale(module: nn.Module, inputs: Any, output: Any) -> Any:
        return (output[0] * 0.9, *output[1:]) if isinstance(output, tuple) else output * 0.9

    blocks(model)[0].register_forward_hook(scale)


def _scale_in_place(model: Model) -> None:
    def scale(module: nn.Module, inputs: Any, output: Any) -> None:
        first(output).mul_(0.9)

    _linears(blocks(model)[-1])[-1].register_forward_hook(scale)


def _shift_input(model: Model) -> None:
    module = _linears(blocks(model)[0])[0]
    module.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 0.01, *inputs[1:]))


def _scale_gradients(model: Model) -> None:
    for _, parameter in sorted(model.named_parameters())[::3]:
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: gradient * 0.5)


def _scale_gradients_later(model: Model) -> None:
    for _, parameter in sorted(model.named_parameters())[1::3]:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_halve)


def _halve(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def _backward_hook(model: Model) -> None:
    def scale(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        return tuple(None if each is None else each * 0.5 for each in inputs)

    _linears(blocks(model)[-1])[0].register_full_backward_hook(scale)


def _freeze_some(model: Model) -> None:
    for _, parameter in sorted(model.named_parameters())[::2]:
        parameter.requires_grad_(False)


def _freeze_blocks(model: Model) -> None:
    for block in blocks(model)[:1]:
        block.requires_grad_(False)


def _freeze_embeddings(model: Model) -> None:
    model.get_input_embeddings().requires_grad_(False)


def _unfreeze(model: Model, optimizer: Any, inputs: Inputs, step: int) -> None:
    if step == 0:
        for parameter in model.parameters():
            parameter.requires_grad_(True)


def _two_forwards(model: Model, inputs: Inputs) -> torch.Tensor:
    second = {name: value.flip(0) if torch.is_tensor(value) else value for name, value in inputs.items()}
    return 0.5 * model(**inputs)["loss"] + 0.5 * model(**second)["loss"] ** 2


def _own_loss(model: Model, inputs: Inputs) -> torch.Tensor:
    given = {name: value for name, value in inputs.items() if name != "labels"}
    if "decoder_start_token_id" in vars(model.config) and model.config.is_encoder_decoder:
        given["decoder_input_ids"] = inputs["labels"].roll(1, 1).clamp(min=0)
    logits = model(**given)["logits"]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())


def _smoothed_loss(model: Model, inputs: Inputs) -> torch.Tensor:
    output = model(**inputs)
    return output["loss"] + 1e-3 * output["logits"].logsumexp(-1).square().mean()


def _hidden_loss(model: Model, inputs: Inputs) -> torch.Tensor:
    output = model(**inputs, output_hidden_states=True)
    states = output["hidden_states"] if "hidden_states" in output else output["decoder_hidden_states"]
    return output["loss"] + 1e-2 * states[1].square().mean()


def _caught_loss(model: Model, inputs: Inputs) -> torch.Tensor:
    """A loss of an activation alone, caught by a hook: the model's own loss is not used."""
    caught: list[torch.Tensor] = []
    module = _linears(blocks(model)[-1])[0]
    handle = module.register_forward_hook(lambda module, inputs, output: caught.append(first(output)))
    try:
        model(**inputs)
    finally:
        handle.remove()
    loss = caught[0].square().mean()
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def _router_loss(model: Model, inputs: Inputs) -> torch.Tensor:
    logits = model(**inputs, output_router_logits=True)["router_logits"]
    return sum(each.logsumexp(-1).square().mean() for each in logits)  # type: ignore[return-value]


def _norm_loss(model: Model, inputs: Inputs) -> torch.Tensor:
    norm = next(each for name, each in sorted(model.named_parameters()) if "norm" in name or "ln" in name)
    term = norm.square().sum()
    return model(**inputs)["loss"] + 1e-3 * (term.full_tensor() if isinstance(term, DTensor) else term)


def _embedded(model: Model, inputs: Inputs) -> torch.Tensor:
    given = {name: value for name, value in inputs.items() if name != "input_ids"}
    return model(**given, inputs_embeds=model.get_input_embeddings()(inputs["input_ids"]))["loss"]


def _evaluate(model: Model, optimizer: Any, inputs: Inputs, step: int) -> None:
    model.eval()
    with torch.no_grad():
        model(**inputs)
    model.train()


def _evaluate_in_inference_mode(model: Model, optimizer: Any, inputs: Inputs, step: int) -> None:
    model.eval()
    with torch.inference_mode():
        model(**{name: value.clone() if torch.is_tensor(value) else value for name, value in inputs.items()})
    model.train()


def _reload(model: Model, optimizer: Any, inputs: Inputs, step: int) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _decay_by_hand(model: Model, optimizer: Any, inputs: Inputs, step: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.99)


def _generate(model: Model, optimizer: Any, inputs: Inputs, step: int) -> None:
    model.eval()
    with torch.no_grad():
        model.generate(inputs["input_ids"][:, :4], max_new_tokens=3, do_sample=False)
    model.train()


def _forget_a_step(model: Model, optimizer: Any, inputs: Inputs, step: int) -> None:
    """A step that is computed and skipped, as of an infinite loss."""
    model(**inputs)["loss"].backward()
    optimizer.zero_grad()


def _unused_forward(model: Model, optimizer: Any, inputs: Inputs, step: int) -> None:
    """A forward with gradients that no backward follows."""
    model(**inputs)


def _read(model: Model, optimizer: Any, inputs: Inputs, step: int) -> None:
    repr(model)
    sum(parameter.numel() for parameter in model.parameters())
    [name for name, value in model.state_dict().items() if value.isnan().any()]


def _checkpointing(model: Model) -> None:
    model.activation_checkpointing_enable()


def _recomputes(plan: ParallelPlan, family: str) -> bool:
    """Models that don't ask for float32: a second run is not inside `Float64`."""
    return family in ("gpt_neox", "gpt2", "bert", "roberta", "opt", "bloom")


def _adds_once(plan: ParallelPlan, family: str) -> bool:
    return plan.run.accumulate == 1


def _routes(plan: ParallelPlan, family: str) -> bool:
    return family in ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "granitemoe", "gpt_oss")


def _decodes(plan: ParallelPlan, family: str) -> bool:
    return family not in ("bert", "roberta", "mamba2", "bamba", "jamba", "granitemoehybrid", "lfm2", "qwen3_next")


def _alone(plan: ParallelPlan, family: str) -> bool:
    return family not in ("t5", "bart")


HABITS: dict[str, Habit] = {
    "an output scaled by a hook": Habit(built=_scale_output, stages=True),
    "an output scaled in place": Habit(built=_scale_in_place, stages=True),
    "an output scaled in place after apply": Habit(applied=_scale_in_place),
    "an input shifted by a hook": Habit(built=_shift_input, stages=True),
    "gradients scaled by hooks": Habit(built=_scale_gradients, stages=True),
    "gradients scaled by hooks after apply": Habit(applied=_scale_gradients),
    "gradients scaled after they are added": Habit(applied=_scale_gradients_later, needs=_adds_once),
    "a backward hook": Habit(built=_backward_hook, stages=True),
    "some parameters frozen": Habit(built=_freeze_some, stages=True),
    "a block frozen": Habit(built=_freeze_blocks, stages=True),
    "embeddings frozen": Habit(built=_freeze_embeddings, stages=True),
    "a block frozen after apply": Habit(applied=_freeze_blocks),
    "unfrozen after a step": Habit(built=_freeze_blocks, stepped=_unfreeze),
    "two forwards, one backward": Habit(loss=_two_forwards),
    "a loss of one's own": Habit(loss=_own_loss, context=False),
    "a z-loss": Habit(loss=_smoothed_loss, context=False),
    "a loss of hidden states": Habit(loss=_hidden_loss, context=False),
    "a loss of an activation alone": Habit(loss=_caught_loss, context=False),
    "a loss of routers alone": Habit(loss=_router_loss, context=False, needs=_routes),
    "a penalty on a norm": Habit(loss=_norm_loss),
    "embeddings as inputs": Habit(loss=_embedded, context=False, needs=_alone),
    "evaluation between steps": Habit(stepped=_evaluate),
    "inference mode between steps": Habit(stepped=_evaluate_in_inference_mode),
    "a reload between steps": Habit(stepped=_reload, stages=True),
    "a decay by hand": Habit(stepped=_decay_by_hand, stages=True),
    "generation between steps": Habit(stepped=_generate, context=False, needs=_decodes),
    "a step that is skipped": Habit(stepped=_forget_a_step),
    "a forward without backward": Habit(stepped=_unused_forward),
    "reads between steps": Habit(stepped=_read, stages=True),
    "recomputed by transformers": Habit(built=_checkpointing, needs=_recomputes),
    "torch's AdamW": Habit(optimizer=lambda own: torch.optim.AdamW(own, lr=0.01), stages=True),
    "torch's SGD": Habit(optimizer=lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9, foreach=False), stages=True),
    "torch's Adafactor": Habit(optimizer=lambda own: torch.optim.Adafactor(own, lr=0.01), stages=True),
    "torch's clipping": Habit(clip=lambda own: nn.utils.clip_grad_norm_(own, 0.3)),
    "gradients clipped by value": Habit(clip=lambda own: nn.utils.clip_grad_value_(own, 1e-3), stages=True),
}
