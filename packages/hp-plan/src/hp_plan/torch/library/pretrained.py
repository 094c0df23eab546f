"""Models of transformers under a plan: made by the names in it, generating text, and saved by their own method."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import re
import sys
import time
import warnings
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d

from hp_dtensor import DTensor, implicit_replication
from hp_moe import register_experts
from hp_plan.reading.diagnostics import Diagnostic, PlanError, near_misses
from hp_platform import get_platform
from hp_platform.extend import reduce_numbers
from hp_styles.torch.extend import capped_attention, sees_whole_sequences

# Taken by every configuration of transformers without being a field of it.
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
_CONFIG_KEYS = ("attn_implementation", "experts_implementation", "dtype", "layer_types", "name_or_path", *_TOKENS)
# Settings that a model's code reads: `config.x`, `getattr(config, "x", ...)`, and what a configuration pops.
_READ = re.compile(
    r"""config\.(\w+)|(?:getattr|hasattr)\([\w.]*config\w*,\s*["'](\w+)["']|\.(?:pop|get)\(["'](\w+)["']"""
)
DEFAULT_TASK = "causal-lm"


def transformers() -> Any:
    """Import the library, when a plan needs it."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(
            "a plan with [model] config = ... needs transformers: pip install 'hp-plan[torch]'"
        ) from error


def config_class(name: str) -> type:
    """Return the configuration class of transformers called `name`; `PlanError` with near misses if there is none."""
    library = transformers()
    if not name.endswith("Config") or not hasattr(library, name):
        names = [item for item in dir(library) if item.endswith("Config")]  # A second's work.
        message = f"transformers has no configuration class '{name}'"
        raise PlanError([Diagnostic("model.config", message, near_misses(name, names))])
    return getattr(library, name)


def build(name: str, overrides: Mapping[str, Any], *, task: str | None, dtype: torch.dtype) -> nn.Module:
    """Build the model of a configuration for a task, its weights drawn by torch's generator.

    Args:
        name: the configuration class.
        overrides: its arguments; a part's own (`text_config`) are a dictionary.
        task: `"causal-lm"` (None), `"seq2seq-lm"`, ..., or the name of a model class.
        dtype: of the weights.

    Raises:
        PlanError: there is no such task or class, or none for this configuration.
    """
    model = model_class(config_class(name), task)
    register_experts()
    return from_config(model, config_class(name)(**overrides), dtype=dtype)


def from_config(model: Any, config: Any, *, dtype: torch.dtype) -> nn.Module:
    """Build a model of a class, an automatic one or a model's own, its weights drawn by torch's generator."""
    return (model.from_config if hasattr(model, "from_config") else model._from_config)(config, dtype=dtype)


def model_class(config: type, task: str | None) -> Any:
    """Return the model class that a task, or a class's name, stands for with a configuration.

    Raises:
        PlanError: there is none; the tasks that the configuration has are named.
    """
    library = transformers()
    if task is not None and task[:1].isupper():
        if not hasattr(library, task):
            names = [
                item for item in dir(library) if item.startswith((config.__name__.removesuffix("Config"), "AutoModel"))
            ]
            message = f"transformers has no model class '{task}'"
            raise PlanError([Diagnostic("model.task", message, near_misses(task, names))])
        return getattr(library, task)
    causal = library.AutoModelForCausalLM
    if task in (None, DEFAULT_TASK) and config in causal._model_mapping:
        return causal
    chosen, tasks = task or DEFAULT_TASK, _tasks()
    if chosen not in tasks:
        raise PlanError([Diagnostic("model.task", f"transformers has no task '{task}'", near_misses(chosen, tasks))])
    auto = getattr(library, tasks[chosen])
    if config in auto._model_mapping:
        return auto
    own = [name for name, item in tasks.items() if config in getattr(library, item)._model_mapping]
    fix = f"write task in [model]: one of {', '.join(map(repr, own))}, or a model class's name"
    if task is None:
        message = f"transformers builds no causal language model from {config.__name__}"
        raise PlanError([Diagnostic("model.config", message, fix)])
    raise PlanError([Diagnostic("model.task", f"transformers builds no {task} model from {config.__name__}", fix)])


@functools.cache
def _tasks() -> dict[str, str]:
    """Task -> automatic class: `"seq2seq-lm": "AutoModelForSeq2SeqLM"`."""
    library = transformers()
    named = [item for item in dir(library) if item.startswith("AutoModelFor")]
    usable = [item for item in named if hasattr(getattr(library, item), "_model_mapping")]
    return {"base": "AutoModel", **{_dashed(item.removeprefix("AutoModelFor")): item for item in usable}}


def _dashed(name: str) -> str:
    """`"Seq2SeqLM"` as `"seq2seq-lm"`, `"CausalLM"` as `"causal-lm"`."""
    parts = re.findall(r"Seq2Seq|[A-Z]+(?![a-z])|[A-Z][a-z0-9]+", name)
    return "-".join(part.lower() for part in parts)


def check_settings(config: type, overrides: Mapping[str, Any], *, key: str = "model.overrides") -> list[Diagnostic]:
    """Check that the configuration, those of its parts, or its models' code know every override.

    Args:
        config: the configuration class.
        overrides: its arguments.
        key: where they stand in the plan.
    """
    settings = _settings(config)
    diagnostics = []
    for name, value in overrides.items():
        part = getattr(config, "sub_configs", {}).get(name)
        if isinstance(value, Mapping) and isinstance(part, type) and dataclasses.is_dataclass(part):
            diagnostics += check_settings(part, value, key=f"{key}.{name}")
        elif name not in settings and name not in _read_by_code(config):
            message = f"{config.__name__} has no setting '{name}'"
            diagnostics.append(Diagnostic(f"{key}.{name}", message, near_misses(name, settings)))
    return diagnostics


def _settings(config: type) -> list[str]:
    names = [item.name for item in dataclasses.fields(config)] if dataclasses.is_dataclass(config) else []
    settable = [name for name in dir(config) if isinstance(getattr(config, name, None), property)]
    parts = getattr(config, "sub_configs", {})
    return [*names, *getattr(config, "attribute_map", {}), *parts, *settable, *_CONFIG_KEYS]


@functools.cache
def _read_by_code(config: type) -> frozenset[str]:
    """List the settings that the code of a configuration's models reads although they are not its fields.

    A configuration keeps any argument it is given, and code asks for some with a default (`head_dim`). The sources are
    read as text: importing the models of a large family takes seconds.
    """
    file = Path(inspect.getfile(config))
    texts = [path.read_text(encoding="utf-8") for path in sorted(file.parent.glob("*ing_*.py")) + [file]]
    shared = Path(inspect.getfile(config.__mro__[1])) if len(config.__mro__) > 1 else file
    if shared.name == "configuration_utils.py":
        texts.append(shared.read_text(encoding="utf-8"))
    return frozenset(name for text in texts for groups in _READ.findall(text) for name in groups if name)


def capped_attention_of(model: Any) -> None:
    """Take attention from transformers' registry that a context parallel style finds, and that caps logits."""
    library, masks = transformers(), importlib.import_module("transformers.masking_utils")
    library.AttentionInterface.register(_CAPPED, _capped)
    library.AttentionMaskInterface.register(_CAPPED, masks.sdpa_mask)
    model.set_attn_implementation(_CAPPED)


_CAPPED = "context_parallel"


def _capped(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention as transformers' registry has it: [batch, heads, length, size] to [batch, length, heads, size].

    Raises:
        NotImplementedError: a mask, which the style takes away where it can read it, or sinks and the like.
    """
    if sees_whole_sequences():
        return _attention(query, key, value, attention_mask, scaling, softcap, bool(getattr(module, "is_causal", True)))
    unknown = [name for name in ("s_aux", "position_bias") if others.get(name) is not None]
    if attention_mask is not None or unknown:
        got = unknown or ["attention_mask"]
        raise NotImplementedError(
            f"cp: attention of {type(module).__name__} takes {got}, which is not spread over ranks"
        )
    causal = bool(getattr(module, "is_causal", True))
    options = {"is_causal": causal, "scale": scaling, "dropout_p": dropout}
    return capped_attention(query, key, value, cap=softcap, **options).transpose(1, 2).contiguous(), None


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    cap: float | None,
    causal: bool,
) -> tuple[torch.Tensor, None]:
    """Compute `_capped` in one process, of a whole sequence; True in the mask is seen."""
    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))
    logits = query @ key.transpose(2, 3) * scaling
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    if mask is None and causal:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    logits = logits if mask is None else logits.masked_fill(~mask, -torch.inf)
    return (logits.softmax(-1).nan_to_num() @ value).transpose(1, 2).contiguous(), None


def replicate_inside(model: nn.Module) -> None:
    """Treat plain tensors as replicated in methods of a tensor parallel model.

    Beams of `generate` reorder a cache of DTensors between forwards, and `load_state_dict` takes whole weights.
    """
    for name in ("generate", "load_state_dict"):
        original: Any = getattr(model, name, None)
        if callable(original):
            setattr(model, name, _replicating(original))


def _replicating(method: Any) -> Any:
    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        with implicit_replication():
            return method(*args, **options)

    return call


def refuse_resizing(model: nn.Module) -> None:
    """Let `resize_token_embeddings` say that it comes before the plan: its new weights would be on no other rank."""
    original: Any = getattr(model, "resize_token_embeddings", None)
    if not callable(original):
        return

    @functools.wraps(original)
    def resize_token_embeddings(new_num_tokens: int | None = None, *args: Any, **options: Any) -> Any:
        spread = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        if new_num_tokens is None or not spread:  # without a number it returns the embeddings
            return original(new_num_tokens, *args, **options)
        raise NotImplementedError(
            "resize_token_embeddings: a plan has spread the embeddings over ranks; resize them before hp_plan.apply"
        )

    model.resize_token_embeddings = resize_token_embeddings  # type: ignore[assignment]


_PATIENCE = 10.0  # seconds until a rank says for whom it waits
_meetings = 0


def save_whole(model: nn.Module) -> None:
    """Make `save_pretrained` write full weights: every rank calls it, they gather, and rank 0 writes.

    A state dict of whole tensors needs nobody else: transformers' own method has it.
    """
    if not callable(getattr(model, "save_pretrained", None)):
        return
    original: Any = model.save_pretrained

    @functools.wraps(original)
    def save_pretrained(save_directory: Any, *args: Any, **options: Any) -> None:
        state = options.pop("state_dict", None)
        if state is not None and not any(isinstance(value, DTensor) for value in state.values()):
            original(save_directory, *args, state_dict=state, **options)
            return
        _meet(type(model).__name__)
        writes = get_platform().groups.rank() == 0
        whole = _gathered(model.state_dict() if state is None else state, keep=writes)
        if writes:
            original(save_directory, *args, state_dict=whole, **options)
        reduce_numbers([0], "sum", _everyone())  # others may read what was written

    model.save_pretrained = save_pretrained  # type: ignore[assignment]
    _save_on_all_ranks_of_trainers()


def _save_on_all_ranks_of_trainers() -> None:
    """Let transformers' Trainer, and those of other libraries that inherit it, save a model of `save_whole`.

    A Trainer calls `save_pretrained` on one rank alone, which would wait for the others for ever.
    """
    trainers = sys.modules.get("transformers.trainer")
    original: Any = getattr(getattr(trainers, "Trainer", None), "_save", None)
    if original is None or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def _save(self: Any, output_dir: str | None = None, state_dict: Any = None) -> None:
        if "save_pretrained" not in vars(self.model) and any(
            "save_pretrained" in vars(module) for module in self.model.modules()
        ):
            save_whole(self.model)  # an adapter around a planned model
        if state_dict is None and "save_pretrained" in vars(self.model) and not self.args.should_save:
            self.model.save_pretrained(self.args.output_dir if output_dir is None else output_dir)
        else:
            original(self, output_dir, state_dict)

    trainers.Trainer._save = _save  # type: ignore[union-attr]


def _meet(model: str) -> None:
    """Wait for all ranks in the store: a collective could be joined by another one of ranks that save nothing.

    Raises:
        TimeoutError: a rank did not come within the store's time limit.
    """
    global _meetings
    group = dist.group.WORLD
    if group is None or dist.get_backend(group) == "fake":
        return
    store: Any = c10d._get_default_store()
    keys = [f"hp_plan/save_pretrained/{_meetings}/{rank}" for rank in range(group.size())]
    store.set(keys[group.rank()], "")
    end, told = time.monotonic() + store.timeout.total_seconds(), False
    while True:
        try:
            store.wait(keys, timedelta(seconds=_PATIENCE))
            break
        except dist.DistStoreError:
            late = [rank for rank, key in enumerate(keys) if not store.check([key])]
            text = (
                f"save_pretrained of {model} gathers what a plan has sharded, so every rank has to call it, but ranks"
                f" {late} have not yet: call it outside of `if rank == 0:`, or pass it a whole state_dict (under a"
                " Trainer of transformers, import the Trainer before the plan is applied)"
            )
            if late and time.monotonic() > end:
                raise TimeoutError(text) from None
            if late and not told:
                warnings.warn(f"rank {group.rank()}: {text}", stacklevel=4)
                told = True
    _meetings += 1


def _everyone() -> Any:
    groups = get_platform().groups
    return groups.new_group(range(groups.size()))


def _gathered(state: dict[str, Any], keep: bool) -> dict[str, Any]:
    """Gather the DTensors of a state; a tensor under several names stays one tensor, as savers expect.

    A rank that doesn't keep them frees each at once: the hosts' memory holds one copy, not one for each rank.
    """
    full: dict[int, torch.Tensor] = {}
    for value in state.values():
        if isinstance(value, DTensor) and _identity(value) not in full:
            whole = value.full_tensor().detach()
            full[_identity(value)] = whole.cpu().clone() if keep else whole.new_empty(0)
    return {name: full[_identity(value)] if isinstance(value, DTensor) else value for name, value in state.items()}


def _identity(value: torch.Tensor) -> int:
    """Return the address of the local tensor's memory; an empty one has none, so the object's."""
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.data_ptr() or id(value)
