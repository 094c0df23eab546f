"""Small models with experts, and the same in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hp_dtensor import DTensor
from hp_platform import get_platform

COMMON: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
OWN: dict[str, dict[str, Any]] = {
    "Qwen3MoeConfig": {},
    "MixtralConfig": {"intermediate_size": 8, "num_local_experts": 6},
    "GptOssConfig": {"intermediate_size": 8, "num_local_experts": 6},
    "OlmoeConfig": {"intermediate_size": 8},
    "Glm4MoeConfig": {"n_routed_experts": 6, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "DeepseekV3Config": {
        "n_routed_experts": 6,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "head_dim": None,
    },
    "Qwen3NextConfig": {
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "shared_expert_intermediate_size": 8,
        "layer_types": ["full_attention", "full_attention"],
    },
}
"""What configurations have beside, or instead of, COMMON; None leaves an entry out."""


def build(name: str, num_experts: int = 6) -> Any:
    """Build a family's model in float64, its weights drawn from one seed."""
    import transformers

    both = {**COMMON, **OWN[name]}
    both |= {key: num_experts for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in both}
    settings = {key: value for key, value in both.items() if value is not None or "token_id" in key}
    config = getattr(transformers, name)(**settings)
    config._experts_implementation = config._attn_implementation = "eager"  # torch's grouped product has no float64
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return model


def experts(model: nn.Module) -> list[nn.Module]:
    """List the modules of experts."""
    return [module for name, module in model.named_modules() if name.endswith(".experts")]


class Float64(TorchFunctionMode):
    """Gives float64 where a model's code asks for float32: its routers and norms do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args = tuple(torch.float64 if each is torch.float32 else each for each in args)
        return func(*args, **{k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()})


def sum_over_ranks(tensor: torch.Tensor) -> None:
    """Sum a tensor over all ranks, in place; in float64 on every device."""
    platform = get_platform()
    platform.collectives.all_reduce(tensor, group=platform.groups.default_group())


def saved_bytes(run: Callable[[], Any], parameters: Iterable[torch.Tensor]) -> tuple[int, int]:
    """Run a forward; count the bytes that it saves for backward beside parameters: of numbers, and of indices.

    A view counts as the tensor that it keeps, and a tensor counts once.
    """
    storages: dict[int, tuple[bool, int]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = (tensor.is_floating_point(), storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run()  # stays, and with it all that is saved: no address is used twice
    for parameter in parameters:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        storages.pop(local.untyped_storage().data_ptr(), None)
    del out
    floating, integers = ([size for is_float, size in storages.values() if is_float is kind] for kind in (True, False))
    return sum(floating), sum(integers)


class Wraps:
    """Stands for `hp_pipeline.CommComputeOverlap`: notes the exchanges that it is given."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def wrap_dispatch(self, function, *, stage):
        return lambda *args: (self.calls.append("dispatch"), function(*args))[1]

    def wrap_combine(self, function, last, *, stage):
        return lambda *args: (self.calls.append("combine"), function(*args))[1]
