"""Reading a torch Module for a plan, its tensors' contents too, and adapting one besides styles and sharding."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.conv import _ConvNd

from hp_dtensor import DeviceMesh, DTensor, Replicate, distribute_tensor, implicit_replication
from hp_dtensor.torch.extend import become
from hp_fsdp.extend import Roster
from hp_moe import GroupedExperts, global_auxiliary_loss
from hp_plan.features.sequences import caps_logits
from hp_plan.plan import ParallelPlan
from hp_plan.port import Compare
from hp_plan.structure.outline import ExpertsOutline, ModelOutline, ModuleOutline, declared_table, named_by
from hp_plan.torch.generation.exact.forward import make_exact as make_exact
from hp_plan.torch.library import pretrained as library
from hp_plan.torch.library.adapters import shard_adapters as shard_adapters
from hp_plan.torch.library.adapters import sum_beside_parameters as sum_beside_parameters
from hp_plan.torch.library.low_precision import lacks_products as lacks_products
from hp_plan.torch.library.low_precision import lower_precision as lower_precision
from hp_plan.torch.library.pretrained import save_whole
from hp_plan.torch.sequences import context
from hp_platform.extend import map_nested
from hp_styles.extend import hook
from hp_styles.torch.extend import is_low_precision, refuse_compiled, run_low_precision
from hp_styles.torch.extend import modules as styles_modules

Plain = Callable[[Any], Any]


# What a model keeps that adds a load balancing loss to its own.
_BALANCE = ("router_aux_loss_coef", "num_experts_per_tok")


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return model.named_modules()


def is_empty(model: nn.Module) -> bool:
    """Return True if parameters are on meta."""
    return any(parameter.is_meta for parameter in model.parameters())


def dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def base(model: nn.Module) -> nn.Module:
    """Return the model that a plan's patterns name: the one that a ``PeftModel`` wraps, else ``model`` itself."""
    wraps = hasattr(model, "peft_config") and hasattr(model, "get_base_model")
    return model.get_base_model() if wraps else model  # type: ignore[operator]


def outline(model: nn.Module) -> ModelOutline:
    """Read the names, kinds and shapes of the model; for a ``PeftModel``, of the model that it wraps."""
    model = base(model)
    prefix = getattr(model, "base_model_prefix", "")
    modules = dict(model.named_modules())
    parameters = tuple(name for name, _ in model.named_parameters())
    names = [*modules, *parameters]
    return ModelOutline(
        modules={name: _outline(styles_modules.base_layer(module)) for name, module in modules.items()},
        parameters=parameters,
        elements=sum(parameter.numel() for parameter in model.parameters()),
        trained=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        tied=_tied_names(model),
        base=prefix if prefix and isinstance(getattr(model, prefix, None), nn.Module) else "",
        config=getattr(model, "config", None),
        own_table=declared_table(model, "tp_plan", names),
        own_expert_table=declared_table(model, "ep_plan", names),
        embedding=named_by(model, "get_input_embeddings", modules.items()),
        head=named_by(model, "get_output_embeddings", modules.items()),
        counts_tokens=context.counts_tokens(model),
        balances=all(isinstance(getattr(model, name, None), (int, float)) for name in _BALANCE),
    )


def _outline(module: nn.Module) -> ModuleOutline:
    parallel = styles_modules.kind(module)
    kind = "container" if isinstance(module, (nn.ModuleList, nn.ModuleDict)) else parallel
    shapes = {name: tuple(value.shape) for name, value in module._parameters.items() if value is not None}
    sides: tuple[int | None, int | None] = (None, None)
    if kind in ("linear", "transposed"):
        sides = shapes["weight"] if kind == "transposed" else shapes["weight"][::-1]  # type: ignore[assignment]
    return ModuleOutline(
        type(module).__name__,
        kind,  # type: ignore[arg-type]
        out_features=sides[1],
        head_dim=_head_dim(module),
        in_features=sides[0],
        shapes=shapes,
        experts=_experts(module),
        own_forward=isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward,
        attention=context.is_attention(module),
        convolution=isinstance(module, _ConvNd),
    )


def _head_dim(module: nn.Module) -> int | None:
    for name in ("head_dim", "attention_head_size", "key_value_proj_dim"):
        size = getattr(module, name, None)
        if isinstance(size, int):
            return size
    return None


def _experts(module: nn.Module) -> ExpertsOutline | None:
    owner: Any = module
    if isinstance(module, GroupedExperts):
        return ExpertsOutline(*owner.w2.shape[::2])
    if not hasattr(module, "is_transposed") or not hasattr(module, "is_concatenated"):
        return None
    down = owner.down_proj.shape
    normed = any(True for child in module.children() for _ in child.parameters())
    return ExpertsOutline(
        down[0],
        down[1 if owner.is_transposed else 2],
        owner.is_transposed,
        not owner.is_concatenated,
        getattr(module, "has_gate", True),
        normed,
    )


def _tied_names(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    by_tensor: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_tensor.setdefault(id(parameter), []).append(name)
    return tuple(tuple(names) for names in by_tensor.values() if len(names) > 1)


def example(rows: int, tokens: int) -> dict[str, torch.Tensor]:
    """Return inputs of a shape that make a causal language model return its loss."""
    ids = torch.zeros(rows, tokens, dtype=torch.int64, device="cpu")
    return {"input_ids": ids, "labels": ids}


def replicate_rest(model: nn.Module, mesh: DeviceMesh) -> None:
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            become(parameter, distribute_tensor(parameter.detach(), mesh, [Replicate()]))
    for module in model.modules():
        if is_low_precision(module):
            run_low_precision(module)


def keep_border_plain(model: nn.Module, mesh: DeviceMesh, plain: Plain) -> None:
    """See Note [Plain tensors at the border] in `hp_plan.application`.

    Args:
        model: the model.
        mesh: of the tensor parallel ranks.
        plain: makes the model's output plain.
    """
    running: list[contextlib.ExitStack] = []
    for module in _with_base(model):
        _run_inside_replication(module, mesh, plain, running)
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for block in module:
                _take_distributed_inputs(block, mesh)


def compare_samples(model: nn.Module, compare: Compare) -> None:
    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        refuse_compiled("a plan with tp")
        compare(module.training, args, kwargs)

    model.register_forward_pre_hook(hook(enter), prepend=True, with_kwargs=True)


def spread_attention(model: nn.Module) -> None:
    config = getattr(base(model), "config", None)
    if caps_logits(config) and config._attn_implementation == "eager":  # type: ignore[union-attr]
        library.capped_attention_of(base(model))


def border_of(mesh: DeviceMesh, data: DeviceMesh, load_balance: bool) -> context.Border:
    """Return what takes whole sequences, of a model or of its stages."""
    return context.Border(mesh, data, load_balance)


def _with_base(model: nn.Module) -> list[nn.Module]:
    """List a model and the one inside that has no head, which users call by itself."""
    inner = getattr(model, getattr(model, "base_model_prefix", "") or " ", None)
    return [model, inner] if isinstance(inner, nn.Module) and inner is not model else [model]


def _run_inside_replication(
    module: nn.Module, mesh: DeviceMesh, plain: Plain, running: list[contextlib.ExitStack]
) -> None:
    """Let a module's forward, where it is not a part of another's that runs, have plain inputs and outputs."""
    roster = _roster(module)

    def enter(module: nn.Module, inputs: Any) -> None:
        nonlocal roster
        if not roster.complete():  # adapters or a head that joined later: their gradients would be each rank's own
            replicate_rest(module, mesh)
            roster = _roster(module)
        stack = contextlib.ExitStack()
        stack.enter_context(implicit_replication())
        running.append(stack)

    def leave(module: nn.Module, inputs: Any, output: Any) -> Any:
        if running:
            running.pop().close()
        return output if running else plain(output)

    module.register_forward_pre_hook(hook(enter), prepend=True)
    module.register_forward_hook(hook(leave), always_call=True)


def _roster(model: nn.Module) -> Roster:
    return Roster(model.modules(), model.parameters(), ("_parameters", "_modules"))


def _take_distributed_inputs(block: nn.Module, mesh: DeviceMesh) -> None:
    """Activation checkpointing computes a block again in backward, outside the model's forward, from these inputs."""

    def convert(value: Any) -> Any:
        return DTensor.from_local(value, mesh, [Replicate()]) if type(value) is torch.Tensor else value

    def enter(module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if not module.training:
            return None
        named = {name: map_nested(convert, value) for name, value in keywords.items()}
        return map_nested(convert, tuple(inputs)), named

    block.register_forward_pre_hook(hook(enter), with_kwargs=True)


def adapt_library_methods(model: nn.Module, *, tensor_parallel: bool) -> None:
    """Adapt the methods of transformers' models besides forward to a plan."""
    if tensor_parallel:
        library.replicate_inside(model)
    library.refuse_resizing(model)
    save_whole(model)


def compilers() -> list[str]:
    return torch.compiler.list_backends(exclude_tags=())


def compile(module: nn.Module, backend: str) -> None:
    module.compile(backend=backend, fullgraph=True)


def balance_all_tokens(model: nn.Module) -> None:
    global_auxiliary_loss(base(model))


def loss_inputs(plan: ParallelPlan, tokens: torch.Tensor) -> dict[str, Any]:
    """Return the inputs that make a causal language model return the loss of predicting each token from those before.

    Args:
        plan: tells whether the model is transformers' own.
        tokens: (samples, sequence length).
    """
    # transformers fills a key-value cache unless told that nothing is generated.
    options = {"use_cache": False} if plan.model.of_transformers else {}
    return {"input_ids": tokens, "labels": tokens, **options}


def batch_of(
    tokens: torch.Tensor, labels: torch.Tensor | None, positions: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Return what an objective takes.

    Args:
        tokens: (samples, sequence length).
        labels: as of `backward_loss`.
        positions: as of `backward_loss`.
    """
    batch = {"input_ids": tokens, "labels": tokens if labels is None else labels}
    return batch if positions is None else {**batch, "position_ids": positions}


_ROW = 1024  # numbers of 8 bytes


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def describe(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def is_comparable(value: Any) -> bool:
    plain = type(value) in (torch.Tensor, nn.Parameter, nn.Buffer)
    return plain and not value.is_meta and value.layout is torch.strided and not value.is_quantized


def digests(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [int(each) for each in [digest(tensor) for tensor in tensors]]  # all are begun before one is waited for


@torch.no_grad()
def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return a number, still on the device, that differs where bytes or their order do."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if len(flat) % (8 * _ROW):
        flat = F.pad(flat, (0, -len(flat) % (8 * _ROW)))
    numbers = flat.view(torch.int64).view(-1, _ROW)
    rows = torch.arange(1, len(numbers) + 1, device=flat.device) * 0x9E3779B97F4A7C1
    columns = torch.arange(1, _ROW + 1, device=flat.device) * 0x5851F42D4C957F2D
    return (numbers.sum(1) * rows).sum() + (numbers.sum(0) * columns).sum() + tensor.numel()


@torch.no_grad()
def overwrite(tensor: torch.Tensor, fill: Callable[[torch.Tensor], Any]) -> None:
    """Let a function write to contiguous memory of the tensor's contents, and keep what it wrote."""
    memory = tensor.detach().contiguous()
    fill(memory)
    if memory.data_ptr() != tensor.data_ptr():
        tensor.copy_(memory)
