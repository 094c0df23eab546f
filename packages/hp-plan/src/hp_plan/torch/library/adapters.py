"""Adapters of the library peft in a plan's model, of single parameters too, and parameters that a plan freezes.

Note [Adapters in place]
    An adapter is put into the model itself, without a wrapper around it: the model keeps its class, so its table of
    styles, its blocks, its loss and `generate` are found as without. The matrices of the model have other names then
    (`q_proj.base_layer.weight`); `hp_plan.features.adapters` knows both.

    What is drawn depends on the seed and a matrix's name alone, so it is the same for any mesh, and in each stage.

Note [Sums beside parameters]
    peft wraps a module to adapt one of its parameters, and registers a parametrization of it for the length of a call:
    the module then has other parameters than those that `fully_shard` gathers and that styles have placed. Here the
    module's attribute hides the parameter for as long. It is the sum of the parameter and of what the adapter adds.

    Expert e gets `scaling * B_e A_e`. A has `rank` rows for one expert after the other. B has `rank` blocks of columns,
    each with one column for each expert. So where experts are spread over ranks, A is sharded by its rows and B by the
    columns of each block, and the same formula holds for a rank's own experts.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import json
import math
import tempfile
import types
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hp_dtensor import DTensor, Partial, Placement, Replicate, Shard, StridedShard, implicit_replication
from hp_dtensor.extend import mark_summed_gradients, sums_gradients
from hp_dtensor.torch.extend import distribute_parameter
from hp_plan.features.adapters import ADAPTER, ALL_LINEAR, check_frozen, frozen, is_of_adapter, saved_name
from hp_plan.plan import ParallelPlan
from hp_plan.reading.diagnostics import Diagnostic, PlanError
from hp_plan.sections import AdapterSection
from hp_plan.structure.outline import matches_nothing, matching

_FILE = "adapter_model.safetensors"


def without_adapter(plan: ParallelPlan) -> ParallelPlan:
    """Return the plan of the same model without its adapter."""
    return dataclasses.replace(plan, adapter=AdapterSection())


def freeze(model: nn.Module, plan: ParallelPlan) -> None:
    """Freeze the parameters that `[model] freeze` names.

    Raises:
        PlanError: a pattern matches nothing, or all is frozen.
    """
    named = dict(model.named_parameters())
    if faults := check_frozen(plan, named):
        raise PlanError(faults)
    for name, parameter in named.items():
        if frozen(plan, name):
            parameter.requires_grad_(False)


def add_adapter(model: nn.Module, plan: ParallelPlan, dtype: torch.dtype) -> None:
    """Put the plan's adapter into a model, whose own parameters are frozen; see Note [Adapters in place].

    Args:
        model: with the names that it has without an adapter.
        plan: with an adapter.
        dtype: of the model's weights.

    Raises:
        PlanError: a target matches nothing, peft refuses it, or the adapter to go on from doesn't fit.
    """
    peft, section = _peft(), plan.adapter
    linear = [name for name, each in model.named_modules() if isinstance(each, _linear_kinds())]
    targets: Any = ALL_LINEAR
    if section.targets != (ALL_LINEAR,):
        targets = _named(section.targets, linear, "adapter.targets", "Linear module")
    trainable = [name for name, each in model.named_modules() if name and any(True for _ in each.parameters())]
    whole = _named(section.modules, trainable, "adapter.modules", "module with parameters")
    config = peft.LoraConfig(
        base_model_name_or_path=plan.model.path,
        r=section.rank,
        lora_alpha=section.alpha,
        lora_dropout=section.dropout,
        target_modules=targets,
        modules_to_save=whole or None,
        use_rslora=section.rslora,
        task_type=_task(model),
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of names in transformers that peft still reads
            peft.inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    except (ValueError, NotImplementedError) as error:
        fix = _others(linear, whole, str(error))
        raise PlanError([Diagnostic("adapter.targets", f"peft: {error}", fix)]) from error
    own = torch.float64 if dtype is torch.float64 else torch.float32
    own = own if section.dtype is None else getattr(torch, section.dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_of_adapter(name))
        if is_of_adapter(name):
            parameter.data = parameter.data.to(own)
    if not any(parameter.is_meta for parameter in model.parameters()):
        fill_adapter(model, plan)


def _others(linear: list[str], whole: Iterable[str], refused: str) -> str:
    """Say what else can have an adapter.

    Args:
        linear: names of the model's Linear modules.
        whole: ends of names of the modules that are trained whole.
        refused: peft's error, which quotes the modules that it refuses.
    """
    free = [name for name in linear if not any(f".{each}." in f".{name}." for each in whole)]
    ends = dict.fromkeys(name.rpartition(".")[2] for name in free)
    named = ", ".join(end for end in ends if f"'{end}'" not in refused)
    if named:
        return f"name some of {named} alone"
    return "leave [adapter] out: there is no Linear module" if not linear else "name fewer modules in adapter.modules"


def _peft() -> Any:
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise ImportError("[adapter] needs peft: pip install 'hp-plan[peft]'") from error


@functools.cache
def _linear_kinds() -> tuple[type, ...]:
    return (nn.Linear, importlib.import_module("transformers.pytorch_utils").Conv1D)


def _task(model: nn.Module) -> str | None:
    """Return what peft calls the kind of a model, which decides the class that reads the adapter."""
    name = type(model).__name__
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return "CAUSAL_LM"
    if name.endswith("ForSequenceClassification"):
        return "SEQ_CLS"
    return "SEQ_2_SEQ_LM" if name.endswith("ForConditionalGeneration") and hasattr(model, "encoder") else None


def _named(patterns: Iterable[str], names: list[str], key: str, what: str) -> list[str]:
    """Return names as peft takes them: ends of names as they are, and whole names for patterns.

    Raises:
        PlanError: a pattern matches nothing.
    """
    found, faults = [], []
    for number, pattern in enumerate(patterns):
        ends = [name for name in names if name == pattern or name.endswith(f".{pattern}")]
        own = [pattern] if ends else matching(pattern, names)
        if not own:
            tails = [tail for tail in dict.fromkeys(name.rpartition(".")[2] for name in names) if not tail.isdigit()]
            faults.append(matches_nothing(f"{key}[{number}]", pattern, [*tails, *names], what=what))
        found += own
    if faults:
        raise PlanError(faults)
    return found


def fill_adapter(model: nn.Module, plan: ParallelPlan) -> None:
    """Give an adapter's parameters, of a whole model or of this rank's shards, their initial values.

    Args:
        model: that has memory.
        plan: its seed decides them, or the folder that it names.

    Raises:
        PlanError: the folder has no adapter that fits.
    """
    saved = None if plan.adapter.weights is None else _saved(Path(plan.adapter.weights))
    wrong = []
    with torch.no_grad(), implicit_replication():
        for name, parameter in model.named_parameters():
            key = saved_name(name)
            if key is None:
                continue
            if saved is None:
                whole = _drawn(name, tuple(parameter.shape), plan.run.seed)
            else:
                whole = saved.get(key)
                if whole is None or whole.shape != parameter.shape:
                    wrong.append(key)
                    continue
            if whole is not None:
                parameter.copy_(whole.to(parameter.device, parameter.dtype))
    if wrong:
        message = f"{plan.adapter.weights} has no {wrong[0]!r} of this shape"
        raise PlanError([Diagnostic("adapter.weights", message, "take its rank, targets and modules")])


def _drawn(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor | None:
    """Draw A as a Linear draws its weights, and set B to 0; None for a module that is trained whole.

    Of an embedding the two change places.
    """
    if any(part in name.split(".") for part in ("lora_B", "lora_embedding_A")):
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") % 2**63)
    if "lora_A" in name.split("."):
        return nn.init.kaiming_uniform_(torch.empty(shape), a=math.sqrt(5), generator=generator)
    return torch.empty(shape).normal_(generator=generator) if "lora_embedding_B" in name.split(".") else None


def _saved(folder: Path) -> Mapping[str, torch.Tensor]:
    from safetensors.torch import load_file

    file = folder / _FILE
    if not file.is_file():
        message = f"{folder} has no {_FILE}"
        raise PlanError([Diagnostic("adapter.weights", message, "give the folder of an adapter that peft has saved")])
    return load_file(file)


def adapter_texts(model: Any) -> dict[str, bytes]:
    """Return the files that peft reads beside an adapter's weights.

    Args:
        model: with an adapter.
    """
    config = model.peft_config[ADAPTER]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        texts = {file.name: file.read_bytes() for file in Path(folder).iterdir()}
    content = json.loads(texts["adapter_config.json"])
    content["inference_mode"] = True
    return {**texts, "adapter_config.json": json.dumps(content, indent=2, sort_keys=True).encode()}


def sum_beside_parameters(model: nn.Module) -> None:
    """Let the adapters of parameters in a model leave these registered; see Note [Sums beside parameters]."""
    for module in model.modules():
        if _adapts_parameter(module):
            module.forward = types.MethodType(_forward, module)  # a copy of the module binds it to itself


def shard_adapters(model: nn.Module) -> None:
    """Shard the adapters of parameters as styles have sharded these; see Note [Sums beside parameters]."""
    wrappers: list[Any] = list(filter(_adapts_parameter, model.modules()))
    for wrapper in wrappers:
        inner, parameter = _adapted(wrapper)
        if not isinstance(parameter, DTensor) or all(each.is_replicate() for each in parameter.placements):
            continue
        if parameter.dim() == 3:  # hp_moe.place_experts moves experts, without what is beside them
            inner.tied_to_experts = "adapters of their parameters"
        for name, first in wrapper.lora_A.items():
            second, rank = wrapper.lora_B[name], wrapper.r[name]
            pairs = [_beside(each, rank, inner, parameter.dim()) for each in parameter.placements]
            for module, placements in zip((first, second), zip(*pairs, strict=True), strict=True):
                distribute_parameter(module.weight, parameter.device_mesh, placements)
                if sums_gradients(inner):
                    mark_summed_gradients(module)


def _beside(placement: Any, rank: int, inner: nn.Module, dims: int) -> tuple[Placement, Placement]:
    """Return the placements of A and B on a mesh axis where those of the parameter are ``placement``."""
    out = dims - (1 if getattr(inner, "is_transposed", False) else 2)
    if placement.is_replicate():
        return Replicate(), Replicate()
    if placement.dim == 0 and dims == 3:
        return Shard(0), StridedShard(1, rank)
    if placement.dim == out:
        return Replicate(), dataclasses.replace(placement, dim=0)
    return dataclasses.replace(placement, dim=1), Replicate()


def _adapts_parameter(module: nn.Module) -> bool:
    return (
        isinstance(getattr(module, "parameter_name", None), str) and {"base_layer", "lora_A"} <= module._modules.keys()
    )


def _adapted(wrapper: Any) -> tuple[Any, torch.Tensor]:
    """Return the module that has the adapted parameter, and the parameter."""
    inner = wrapper.get_base_layer()
    return inner, getattr(inner, wrapper.parameter_name)


def _forward(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the module inside with a sum in place of its parameter."""
    inner, parameter = _adapted(self)
    active = [name for name in self.active_adapters if name in self.lora_A]
    plain = self.disable_adapters or self.merged or not active or kwargs.get("adapter_names") is not None
    if plain or self.parameter_name not in inner._parameters:
        return type(self).forward(self, x, *args, **kwargs)
    pairs = [(self.lora_A[name].weight, self.lora_B[name].weight) for name in active]
    if sums_gradients(inner):
        parameter, pairs = (
            _local(parameter, parameter),
            [tuple(_local(each, parameter) for each in pair) for pair in pairs],
        )
    for name, pair in zip(active, pairs, strict=True):
        parameter = _sum(parameter, *pair, self.r[name], self.scaling[name], getattr(inner, "is_transposed", False))
    own = vars(inner)
    own[self.parameter_name] = parameter
    try:
        return self.base_layer(x, *args, **kwargs)
    finally:
        del own[self.parameter_name]


def _sum(
    parameter: torch.Tensor, first: torch.Tensor, second: torch.Tensor, rank: int, scaling: float, transposed: bool
) -> torch.Tensor:
    with torch.autocast(parameter.device.type, enabled=False):
        first, second = first.to(parameter.dtype), second.to(parameter.dtype)
        if parameter.dim() == 2:
            return torch.addmm(parameter, second, first, alpha=scaling)
        first = first.unflatten(0, (-1, rank))  # (experts, rank, in)
        second = second.unflatten(1, (rank, -1)).permute(2, 0, 1)  # (experts, out, rank)
        if transposed:
            first, second = second.mT, first.mT
        return torch.baddbmm(parameter, second, first, alpha=scaling)


def _local(value: Any, parameter: Any) -> torch.Tensor:
    """Return this rank's part, whose gradient is a part of a sum where the parameter is sharded and it is not."""
    pairs = zip(value.placements, parameter.placements, strict=True)
    whole = [each.is_replicate() and not of_parameter.is_replicate() for each, of_parameter in pairs]
    return value.to_local(
        grad_placements=[Partial() if w else each for w, each in zip(whole, value.placements, strict=True)]
    )
