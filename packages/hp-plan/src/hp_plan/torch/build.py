"""Building what a plan declares: the model, whole or as each rank's shards, its optimizer and its schedule.

Note [Buffers are computed again]
A buffer that no file has, such as rotary frequencies, was computed by a constructor, on meta. transformers' models
compute them once more where they initialise weights, which is asked for here, without drawing any. What is still as it
was before that is found by two runs over different contents, and refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hp_checkpoint.extend import Entry, Ranks, load_tensors, open_checkpoint
from hp_checkpoint.torch.extend import DTYPES
from hp_dtensor import DeviceMesh, implicit_replication, init_parameters
from hp_dtensor.torch.extend import local_view, materialize, wrap
from hp_optim import AdamW, AdamW8bit, ChainedOptimizer
from hp_pipeline import PipelinedModel
from hp_plan.application import apply
from hp_plan.features.adapters import base_name, is_of_adapter
from hp_plan.features.homes import visits
from hp_plan.features.loss import reference_plan
from hp_plan.features.optimizers import grouped, muon_and_adamw, optimized, scheduled_together, swapped
from hp_plan.plan import ParallelPlan
from hp_plan.reading.diagnostics import Diagnostic, PlanError
from hp_plan.sections import schedule_factor
from hp_plan.structure.model_source import (
    check_function,
    check_returned,
    check_weights,
    failed,
    load_weights,
    model_function,
)
from hp_plan.torch.library import folders, pretrained
from hp_plan.torch.library.adapters import add_adapter, fill_adapter, freeze, without_adapter
from hp_plan.torch.library.folders import ignored_names, saved_tensors, ties_of
from hp_plan.torch.library.placed import NotPlacedError, converted_entries
from hp_plan.torch.training.objectives import Objective, check_objective_sources
from hp_platform import get_platform

# Keys of [model], one of which says what the model is.
_SOURCES = ("config", "path", "function")


def build_model(
    plan: ParallelPlan, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> nn.Module:
    """Build the whole model of `plan.model`, the same on every rank: `build_parallel_model` takes less memory.

    Args:
        plan: the plan.
        device: where; `"meta"` for shapes alone. None is the default device.
        dtype: of the weights; None is `plan.run.dtype`.

    Raises:
        PlanError: the model can't be built from what the plan says.
        ImportError: the plan names a configuration class and transformers isn't installed.
    """
    chosen: torch.dtype = getattr(torch, plan.run.dtype) if dtype is None else dtype
    diagnostics = check_model_section(plan)
    if diagnostics:
        raise PlanError(diagnostics)
    section = plan.model
    on = torch.device(device) if device is not None else contextlib.nullcontext()
    with on, _default_dtype(chosen), _drawing(plan.run.seed):
        try:
            if section.function is not None:
                model = model_function(section.function, section.folder)(**section.overrides)
            elif section.path is not None:
                on_meta = device is not None and torch.device(device).type == "meta"
                model = folders.build(section, dtype=chosen, empty=on_meta)
            else:
                model = pretrained.build(str(section.config), section.overrides, task=section.task, dtype=chosen)
        except PlanError:
            raise
        except Exception as error:  # Whatever the user's own function or transformers' validation raises.
            key = next(name for name in _SOURCES if getattr(section, name) is not None)
            raise failed(key, getattr(section, key), error) from error
    if section.function is not None:
        check_returned(section.function, model, nn.Module)
    if section.weights_file is not None and not any(parameter.is_meta for parameter in model.parameters()):
        _load_weights(model, section.weights_file)
    if section.freeze and plan.adapter.kind is None:
        freeze(model, plan)
    if plan.adapter.kind is not None:
        with _drawing(plan.run.seed):  # peft draws weights too, before those of the plan replace them
            add_adapter(model, plan, chosen)
    return model


@contextlib.contextmanager
def _drawing(seed: int) -> Iterator[None]:
    """Draw from a seed on the host and on the default device; afterwards the caller's generators go on as before."""
    device = torch.get_default_device()
    own: dict[str, Any] = {} if device.type in ("cpu", "meta") else {"device_type": device.type}
    with torch.random.fork_rng([device] if own else [], **own):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach devices that are not in use
        if own:
            torch.get_device_module(device).manual_seed(seed)
        yield


def _load_weights(model: nn.Module, path: str) -> None:
    parameters = dict(model.named_parameters())  # Of those that are one tensor, the first.

    def assign(name: str, tensor: torch.Tensor) -> None:
        with torch.no_grad():
            parameters[name].copy_(tensor)

    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    load_weights(path, shapes, framework="pt", assign=assign)


def build_empty(plan: ParallelPlan) -> nn.Module:
    """Build the model of `plan.model` without weights: names and shapes only."""
    return build_model(plan, device="meta")


def check_model_section(plan: ParallelPlan, *, run_code: bool = True) -> list[Diagnostic]:
    """Check `[model]` before anything is built: neither or both kinds, unknown names.

    Args:
        plan: the plan.
        run_code: import the module of `[model] function` to look for it there.
    """
    section, objective = plan.model, check_objective_sources(plan, run_code=run_code)
    given = [name for name in _SOURCES if getattr(section, name) is not None]
    if len(given) != 1:
        got = " and ".join(map(repr, given)) if given else "neither 'config' nor 'path' nor 'function'"
        fix = 'give one: config = "Qwen3Config", path = "folder/of/a/model" or function = "package.module:function"'
        return [Diagnostic("model", f"[model] has {got}", fix), *objective]
    weights = [*check_weights(section.weights_file), *objective]
    if section.function is not None:
        return [*check_function(section.function, section.folder, run_code=run_code), *weights]
    if section.path is not None:
        return [*folders.check_folder(section), *weights]
    try:
        config = pretrained.config_class(str(section.config))
        pretrained.model_class(config, section.task)
    except PlanError as error:
        return [*error.diagnostics, *objective]
    return [*pretrained.check_settings(config, section.overrides), *weights]


def check_fit(plan: ParallelPlan, model: nn.Module) -> list[Diagnostic]:
    """Check that the weights that the plan reads are those of the model, by their names and shapes.

    Args:
        plan: the plan.
        model: of the plan, on any device.
    """
    if not plan.model.folder_has_weights:
        return []
    own = model if plan.adapter.kind is None else build_empty(without_adapter(plan))
    return folders.check_fit(own, plan.model)


def build_optimizer(plan: ParallelPlan, parameters: Iterable[Any]) -> Any:
    """Build the optimizer of `plan.optimizer` for those of `parameters` that are trained.

    Args:
        plan: the plan.
        parameters: `model.named_parameters()`, or `model.parameters()` where the plan goes by no names.

    Returns:
        An optimizer of torch's; for `muon` an `hp_optim.ChainedOptimizer`, for `adamw8bit` or states on the host one of
        hp_optim's.

    Raises:
        ValueError: the plan goes by names, and the parameters have none.
    """
    section = plan.optimizer
    trained = optimized(parameters, plan)
    if section.name == "muon":
        return swapped(muon_and_adamw(trained, plan), plan)
    groups = grouped(trained, plan)
    if section.name == "adamw8bit" or (section.name == "adamw" and section.swap_slices):
        kind = AdamW8bit if section.name == "adamw8bit" else AdamW
        return swapped(kind(groups, lr=section.lr, betas=section.betas, eps=section.eps), plan)
    if section.name == "adamw":
        make = functools.partial(torch.optim.AdamW, betas=section.betas, eps=section.eps)
    else:
        make = functools.partial(torch.optim.SGD, momentum=section.momentum)
    # torch takes one parameter at a time where they are not plain tensors, unless told otherwise.
    return make(groups, lr=section.lr, weight_decay=section.weight_decay, foreach=True)


def build_schedule(plan: ParallelPlan, optimizer: Any) -> Any:
    """Build the learning rate schedule of `plan.schedule` over `plan.run.steps`; step it after the optimizer."""
    section, steps = plan.schedule, plan.run.steps
    if isinstance(optimizer, ChainedOptimizer):
        return scheduled_together(build_schedule(plan, each) for each in optimizer.optimizers.values())
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule_factor(section, step, steps))


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# Models whose weights are the same bits where they are drawn shard by shard: those that sweep_initial_weights.py finds.
# In the constructors of others random numbers are drawn that nothing draws again.
DRAWN_ALIKE = frozenset(
    """
    BambaForCausalLM BartForConditionalGeneration BertForMaskedLM BloomForCausalLM CohereForCausalLM
    DeepseekV2ForCausalLM DeepseekV3ForCausalLM Ernie4_5_MoeForCausalLM Exaone4ForCausalLM FalconForCausalLM
    GPTJForCausalLM GPTNeoXForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM GemmaForCausalLM Glm4ForCausalLM
    Glm4MoeForCausalLM GptOssForCausalLM GraniteForCausalLM GraniteMoeForCausalLM GraniteMoeHybridForCausalLM
    JambaForCausalLM Lfm2ForCausalLM LlamaForCausalLM Mamba2ForCausalLM MistralForCausalLM MixtralForCausalLM
    NemotronForCausalLM OPTForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM OlmoForCausalLM OlmoeForCausalLM
    Phi3ForCausalLM PhiForCausalLM PhimoeForCausalLM Qwen2ForCausalLM Qwen2MoeForCausalLM
    Qwen2VLForConditionalGeneration Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3VLForConditionalGeneration
    RobertaForMaskedLM SmolLM3ForCausalLM StableLmForCausalLM Starcoder2ForCausalLM T5ForConditionalGeneration
    WhisperForConditionalGeneration
    """.split()
)
_AT_ONCE = 1 << 28  # bytes of the files, over all ranks


def build_parallel_model(plan: ParallelPlan, mesh: DeviceMesh | None = None) -> Any:
    """Build the model of `plan.model` with the plan applied, such that no rank has all of it.

    It is `apply(build_model(plan), plan, mesh)`, with the same weights, in less memory: where the weights are those of
    a folder (`[model] path`), each rank reads its shards alone, and where they are drawn on CPU for a family that is
    tested for it (`nox -s families`), a rank has its shards and one whole tensor at a time. In all other cases
    each rank builds the whole model first: drawn weights with `pp`, on an accelerator or of other families, a `[model]
    function`, the weights of a file, and a folder whose tensors transformers has to transpose or to compute, of which a
    warning tells the first. Those that it merges, cuts or renames are read where they are.

    Args:
        plan: the plan.
        mesh: as `apply` takes it.

    Raises:
        PlanError: as `build_model` and `apply`.
        CheckpointError: the folder's weights can't be read; on all ranks.
    """
    model = begin(plan)
    return finish(apply(model, plan, mesh), plan)


def build_objective(
    plan: ParallelPlan, build: Callable[[ParallelPlan], Any] = build_parallel_model
) -> Objective | None:
    """Build the plan's objective, with the model that it compares with; None for the model's own loss.

    Args:
        plan: the plan.
        build: builds that model, by default under the plan.

    Raises:
        PlanError: as `build_parallel_model`, of the second model.
    """
    if not plan.objective.is_own:
        return None
    other = reference_plan(plan)
    return Objective(plan, None if other is None else build(other))


def begin(plan: ParallelPlan, *, weights: bool = True) -> nn.Module:
    """Build the model to apply a plan to: on meta where `finish` can give it its weights.

    Args:
        plan: the plan.
        weights: False where the caller sets all that is trained and all buffers; then no weight is drawn or read that
            need not be.
    """
    section = plan.model
    if not weights and section.of_transformers and not (visits(plan) or plan.adapter.kind or section.freeze):
        empty = build_empty(plan)
        if _all_trained(empty):  # some models freeze parameters themselves
            return empty
    if visits(plan):
        return build_model(plan, device="cpu")  # the device never holds all of it
    if plan.adapter.modules or (plan.adapter.kind is not None and not section.folder_has_weights):
        return _whole(plan)  # modules that are trained whole begin as copies
    if section.folder_has_weights:
        empty = build_empty(plan)
        try:
            _shards(_unadapted(plan, empty), str(section.path))
        except NotPlacedError as error:
            warnings.warn(f"[model] path: each rank builds the whole model, for {error}", stacklevel=2)
            return _whole(plan)
        return empty
    drawn = section.of_transformers and section.weights_file is None
    if not drawn or plan.mesh.pp > 1 or get_platform().devices.kind != "cpu":
        return _whole(plan)
    empty = build_empty(plan)
    return empty if type(empty).__name__ in DRAWN_ALIKE else _whole(plan)


def finish(model: Any, plan: ParallelPlan, *, weights: bool = True) -> Any:
    """Give a model that a plan was applied to memory and weights, if it has none.

    Args:
        model: that of `begin`, or this rank's stages of it.
        plan: the plan.
        weights: as `begin` was told.

    Raises:
        PlanError: a buffer that nobody computes.
    """
    if not any(parameter.is_meta for parameter in model.parameters()):
        return model
    device = get_platform().devices.current_device()
    if not (weights or plan.adapter.kind or plan.model.freeze) and _all_trained(model):
        materialize(model, torch.device(device))
        return model
    if not plan.model.folder_has_weights:
        return _drawn(model, plan.run.seed, torch.device(device))
    materialize(model, torch.device(device))
    compute_buffers(model)
    folder = str(plan.model.path)
    # Of the whole model: this rank may have stages.
    _read_shards(model, folder, _shards(build_empty(without_adapter(plan)), folder))
    if plan.adapter.kind is not None:
        fill_adapter(model, plan)
    return model


def _unadapted(plan: ParallelPlan, empty: nn.Module) -> nn.Module:
    """Return the model without an adapter, on meta."""
    return empty if plan.adapter.kind is None else build_empty(without_adapter(plan))


def _whole(plan: ParallelPlan) -> nn.Module:
    return build_model(plan).to(get_platform().devices.current_device())


def _drawn(model: Any, seed: int, device: torch.device) -> Any:
    """Draw all weights as the whole model's constructor does.

    Raises:
        PlanError: a tensor, of any rank, that nothing has set.
    """
    materialize(model, device)
    with torch.no_grad():
        for each in _signed(model).values():
            each.fill_(_unset(each.dtype))
    with get_platform().random.drawing(seed, "cpu", device):
        init_parameters(model, device=device)
    own = [name for name, each in _signed(model).items() if _is_unset(each)]
    everyone = Ranks().agree(lambda: json.dumps(own).encode(), "draw weights")
    wrong = sorted({name for each in everyone for name in json.loads(each)})
    if wrong:
        message = f"nothing sets {len(wrong)} tensors of the model where its weights are drawn: {', '.join(wrong[:5])}"
        raise PlanError([Diagnostic("model.weights", message, "give weights to start from")])
    return model


def _signed(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return this rank's parts of the tensors whose dtype has a value that nothing sets."""
    local = {name: local_view(each) for name, each in (*model.named_parameters(), *model.named_buffers())}
    return {name: each for name, each in local.items() if each.dtype.is_signed and not each.is_complex()}


def _unset(dtype: torch.dtype) -> float | int:
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min


def _is_unset(local: torch.Tensor) -> bool:
    found = torch.isnan(local) if local.dtype.is_floating_point else local == _unset(local.dtype)
    return bool(found.any())


def _shards(model: nn.Module, folder: str) -> dict[str, Entry]:
    """Return where the model's tensors are in a folder, whatever transformers makes of those that it has.

    Raises:
        NotPlacedError: ranks can't read their shards of them alone.
    """
    saved, own, ties = saved_tensors(folder), model.state_dict(), ties_of(model)
    if not hasattr(model, "config"):
        raise NotPlacedError("a model of another library")
    unread = ignored_names(model)[1]
    names = [name for name in saved if name in own or not any(re.search(pattern, name) for pattern in unread)]
    found = converted_entries(model, {name: saved[name] for name in names})
    for name, value in own.items():
        entries = [found[each] for each in ties.get(name, (name,)) if each in found]
        if not any(entry.kind.shape == tuple(value.shape) for entry in entries):
            raise NotPlacedError(f"'{name}', which the folder lacks or has in another shape")
    return found


def _read_shards(model: Any, folder: str, saved: Mapping[str, Entry]) -> None:
    """Read this rank's shards, a part of the files after the other on all ranks, and convert dtypes."""
    own, place = _by_saved_name(model, saved), Path(folder).absolute()
    manifest = dataclasses.replace(open_checkpoint(place), parts={"model": saved})
    for names in _parts(saved):
        wanted: dict[tuple[str, str], torch.Tensor] = {}
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name in own.keys() & set(names):
            local, dtype = local_view(own[name]), DTYPES[saved[name].kind.dtype]
            wanted["model", name] = own[name]
            if local.dtype != dtype:
                read = torch.empty_like(local, dtype=dtype, requires_grad=False)
                copies.append((local, read))
                spec = getattr(own[name], "_spec", None)
                wanted["model", name] = read if spec is None else wrap(read.detach(), spec)
        load_tensors(wanted, manifest, place, Ranks())
        with torch.no_grad():
            for local, read in copies:
                local.copy_(read)


def _by_saved_name(model: Any, saved: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the model's tensors, each once, by the first of their names that a folder has."""
    tied = getattr(model, "tied_names", {})
    state = model.state_dict(keep_vars=True)
    names: dict[int, list[str]] = {}
    state = {name: value for name, value in state.items() if not is_of_adapter(name)}
    for name, value in state.items():
        names.setdefault(id(value), []).extend(base_name(each) for each in (tied.get(name, name), name))
    tensors = {id(value): value for value in state.values()}
    return {next(name for name in each if name in saved): tensors[key] for key, each in names.items()}


def _parts(saved: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    """Divide the tensors of a folder into parts of about as many bytes, the same on all ranks."""
    part: list[str] = []
    size = 0
    for name, entry in sorted(saved.items(), key=lambda item: _place(item[1])):
        part.append(name)
        size += entry.kind.nbytes
        if size >= _AT_ONCE:
            yield part
            part, size = [], 0
    if part:
        yield part


def _place(entry: Entry) -> tuple[str, int]:
    return min(((chunk.file, chunk.offset) for chunk in entry.chunks), default=(entry.file, entry.offset))


def compute_buffers(model: nn.Module) -> None:
    """Compute the buffers of a model of transformers that no file has: Note [Buffers are computed again].

    Args:
        model: with memory; under a plan, or this rank's stages of it.

    Raises:
        PlanError: a buffer that is still as it was.
    """
    kept = {id(value) for value in model.state_dict(keep_vars=True).values()}
    for value in (*model.parameters(), *model.buffers()):
        value._is_hf_initialized = id(value) in kept  # type: ignore[attr-defined]
    found: list[dict[str, torch.Tensor]] = []
    for content in (0, 1):
        for value in model.buffers():
            if id(value) not in kept:
                value.fill_(content)
        for module in model.modules():
            module._is_hf_initialized = False  # type: ignore[assignment]
        with implicit_replication():  # they write whole tensors, the same on all ranks
            for root in _libraries(model):
                root.initialize_weights()
        found.append({name: value.clone() for name, value in model.named_buffers() if id(value) not in kept})
    wrong = [name for name, value in found[0].items() if not torch.equal(value, found[1][name])]
    if wrong:
        message = f"the buffer '{wrong[0]}' is computed by its module's constructor alone, and no file has it"
        fix = "name the folder's settings by [model] config and overrides, and the folder as weights"
        raise PlanError([Diagnostic("model.path", message, fix)])


def _libraries(model: nn.Module) -> list[Any]:
    """Return the models of transformers that hold all others: the model, or the stages of it."""
    return list(model.stages.values()) if isinstance(model, PipelinedModel) else [model]


def _all_trained(model: Any) -> bool:
    return all(parameter.requires_grad for parameter in model.parameters())
