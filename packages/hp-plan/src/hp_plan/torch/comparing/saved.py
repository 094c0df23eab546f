"""What backward needs of a model, counted by its forward on meta."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

T = torch.Tensor


def saved_bytes(model: nn.Module, length: int, width: int) -> tuple[int, int] | None:
    """Count what a sample saves up to its logits.

    Args:
        model: on meta.
        length: tokens of the sample.
        width: entries of a hidden state.

    Returns:
        Bytes of hidden states, and of the rest; None where the forward does not run on meta.
    """
    own = {each.untyped_storage()._cdata for each in (*model.parameters(), *model.buffers())}
    kept: dict[int, tuple[T, bool]] = {}

    def pack(tensor: T) -> T:
        number = tensor.untyped_storage()._cdata
        if number not in own:
            kept.setdefault(number, (tensor.detach(), tensor.dim() > 1 and tensor.shape[-1] == width))
        return tensor

    trains = model.training
    ids = torch.zeros(1, length, dtype=torch.int64, device="meta")
    try:
        with torch.random.fork_rng([]), saved_tensors_hooks(pack, lambda tensor: tensor), _Fused():
            model.train()(input_ids=ids, use_cache=False)
    except Exception:  # whatever a model does that shapes alone do not allow
        return None
    finally:
        model.train(trains)
    sizes = {True: 0, False: 0}
    for tensor, hidden in kept.values():
        sizes[hidden] += tensor.untyped_storage().nbytes()
    return sizes[True], sizes[False]


class _Fused(TorchFunctionMode):
    """Attention that saves what a fused kernel saves: on meta, torch's own would save its weights."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            given = dict(zip(("query", "key", "value"), args)) | (kwargs or {})
            return _Attention.apply(given["query"], given["key"], given["value"])
        if func is T.__bool__ and args[0].is_meta:
            return True  # that a mask hides nothing, and that nothing is packed
        return func(*args, **(kwargs or {}))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: T, key: T, value: T) -> T:
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: T) -> Any:
        raise AssertionError("nothing is differentiated")
