"""Balance of experts' loads: counts, biases that follow them, and auxiliary losses, of transformers' models too.

Note [No mean of means]
    The loss multiplies each expert's share of the choices by its mean probability. Of both, the factors of all tokens
    are means over ranks, but their product is none: losses of each rank's own tokens, averaged, are another loss, with
    other gradients. So shares and means are taken over all ranks before they are multiplied.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn

from hp_dtensor import DTensor, Replicate
from hp_moe.layer.checks import check_counted_together
from hp_platform import get_platform
from hp_platform.extend import reduce_numbers
from hp_platform.torch.internals import in_backward

T = torch.Tensor


def add_counts(layer: Any, counts: T) -> None:
    """Add counts of a forward to a layer's, in training, and not where backward computes a block again."""
    if layer.training and not recomputes():
        layer.tokens_per_expert.add_(counts)


def recomputes() -> bool:
    """Tell whether backward is computing a forward again."""
    return in_backward()


def update_expert_bias(moe: nn.Module, lr: float = 1e-3, *, group: Any = None) -> None:
    """Raise the bias of experts with fewer tokens than the mean, lower that of those with more; counts begin anew.

    Once a step, on all ranks. Counts are integers summed over all ranks, so that biases stay the same on each. Source:
    Wang et al., arXiv:2408.15664, algorithm 1.

    Args:
        moe: a ``MoE``, or a model with some.
        lr: how much a bias changes.
        group: the ranks whose tokens count; None is all.

    Raises:
        ValueError: there is no ``MoE`` inside, or ranks of the group have others.
    """
    layers = dict(_layers(moe))
    sizes = {name: len(layer.expert_bias) for name, layer in layers.items()}
    check_counted_together("update_expert_bias", moe, sizes, "MoE inside, which has biases to update.", group)
    groups, collectives = get_platform().groups, get_platform().collectives
    counts = torch.cat([layer.tokens_per_expert for layer in layers.values()])
    if groups.is_initialized():
        collectives.all_reduce(counts, group=groups.default_group() if group is None else group)
    with torch.no_grad():
        for layer, own in zip(layers.values(), counts.split(list(sizes.values())), strict=True):
            layer.expert_bias += lr * torch.sign(own.sum() - own * len(own))
            layer.tokens_per_expert.zero_()


def _layers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, child in module.named_modules():
        if isinstance(getattr(child, "expert_bias", None), torch.Tensor) and hasattr(child, "tokens_per_expert"):
            yield name, child


def balance_loss(scores: T, counts: T, top_k: int, group: Any = None) -> T:
    """Compute ``experts * sum(share of tokens * mean score)``: 1 where all are equal.

    Args:
        scores: ``[tokens, experts]``; each token's are divided by their sum.
        counts: tokens that chose each expert.
        top_k: choices a token.
        group: ranks with further tokens of the same sequences; None is none.
    """
    tokens = torch.tensor(len(scores), device=scores.device)
    size = 1
    if group is not None:
        size = get_platform().groups.size(group)
        together = torch.cat([counts, tokens.view(1)])
        get_platform().collectives.all_reduce(together, group=group)
        counts, tokens = together[:-1], together[-1]
    shares = counts / (tokens * top_k)
    means = (scores / scores.sum(-1, keepdim=True)).sum(0) / tokens
    # A rank's part of the loss of all; ranks' gradients are averaged, as those of other losses are.
    return size * scores.shape[1] * (shares * means).sum()


class MoEAuxLossAutoScaler(torch.autograd.Function):
    """An auxiliary loss beside the graph: its gradient is added where backward comes through."""

    scale: float | T = 1.0

    @classmethod
    def set_loss_scale(cls, scale: float | T) -> None:
        """Set the factor of auxiliary losses' gradients, such as that of a loss scaler, or 1 over micro-batches."""
        cls.scale = scale

    @staticmethod
    def forward(ctx: Any, output: T, loss: T) -> T:
        ctx.save_for_backward(loss)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: T) -> tuple[T, T]:
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss) * MoEAuxLossAutoScaler.scale


def attach_loss(output: T, loss: T) -> T:
    """Return the output; backward through it also runs backward from the loss."""
    return MoEAuxLossAutoScaler.apply(output, loss)


def global_auxiliary_loss(model: nn.Module, *, group: Any = None) -> Any:
    """Let the load balancing loss that a transformers model adds to its loss be that of the tokens of all ranks.

    A hook on the model's forward exchanges the loss of this rank's own tokens for it, in ``loss`` and ``aux_loss``:
    Note [No mean of means]. The value is the same on all ranks; the gradient is this rank's part, times the number of
    ranks, as gradients are averaged over them. Nothing happens in calls without ``output_router_logits``.

    Example:
        >>> global_auxiliary_loss(model)  # model.config.output_router_logits is True

    Args:
        model: a causal language model with ``router_aux_loss_coef``.
        group: ranks with parts of the tokens; default all. Ranks that have the same tokens may be among them, where
            each token is on as many ranks as others.

    Returns:
        A handle; its ``remove()`` ends it.

    Raises:
        ValueError: a model without such a loss; in forward, one that computes another formula than Switch
            Transformers' over softmax, or returns a tuple.
    """
    name = type(model).__name__
    for needed in ("router_aux_loss_coef", "num_experts_per_tok"):
        if not isinstance(getattr(model, needed, None), (int, float)):
            raise ValueError(
                f"global_auxiliary_loss: {name} has no {needed}: pass the model that computes the loss, such as"
                " Qwen3MoeForCausalLM"
            )
    signature, checked, options = inspect.signature(model.forward), False, cast(Any, model)

    def exchange(module: Any, inputs: Any, keywords: Any, output: Any) -> Any:
        nonlocal checked
        own = getattr(output, "aux_loss", None)
        if own is None:
            if isinstance(output, tuple) and (keywords.get("output_router_logits") or _switched_on(module)):
                raise ValueError(f"global_auxiliary_loss: {name} returned a tuple: leave return_dict=False out")
            return None
        mask = signature.bind_partial(*inputs, **keywords).arguments.get("attention_mask")
        layers = [_whole(each) for each in output.router_logits]
        top_k, own = options.num_experts_per_tok, _whole(own)
        over = get_platform().groups.default_group() if group is None else group
        if not checked:
            _check_loss(name, own, _auxiliary_loss(layers, top_k, mask, None)[0], layers[0].dtype, over)
            checked = True
        value, part = _auxiliary_loss(layers, top_k, mask, over)
        total = value + (part - part.detach())  # the value of all ranks, the gradient of this one
        if output.loss is not None:
            change: Any = options.router_aux_loss_coef * (total - own)
            if isinstance(output.loss, DTensor):
                change = DTensor.from_local(change, output.loss.device_mesh, [Replicate()])
            output.loss = output.loss + change.to(output.loss.dtype)
        output.aux_loss = total
        return output

    return model.register_forward_hook(exchange, with_kwargs=True)


def _auxiliary_loss(layers: list[T], top_k: int, mask: T | None, group: Any) -> tuple[T, T]:
    """Return the loss of all ranks, and this rank's part of it times their number."""
    chances = [each.softmax(-1) for each in layers]
    chosen = torch.cat([each.detach().topk(top_k, -1).indices for each in chances])
    own = torch.cat(chances)
    own = own if own.dtype is torch.float64 else own.float()
    experts = own.shape[1]
    if mask is None:
        counts, rows = torch.bincount(chosen.flatten(), minlength=experts), len(own)
    else:
        counted = mask.reshape(-1).to(own.device).repeat(len(layers)) != 0
        counts, rows = torch.bincount(chosen[counted].flatten(), minlength=experts), counted.sum()
        own = own * counted.unsqueeze(-1)
    numbers = torch.cat([counts, torch.as_tensor(rows, device=counts.device).view(1)])
    sums = own.sum(0)
    everywhere, size = sums.detach().clone(), 1
    if group is not None:
        size = get_platform().groups.size(group)
        get_platform().collectives.all_reduce(numbers, group=group)
        get_platform().collectives.all_reduce(everywhere, group=group)
    shares, total = numbers[:-1].to(own.dtype) / numbers[-1], numbers[-1]
    return experts * (shares * everywhere / total).sum(), size * experts * (shares * sums / total).sum()


def _whole(value: Any) -> T:
    """Return all of a DTensor, on each rank."""
    if not isinstance(value, DTensor):
        return value
    return value.redistribute(value.device_mesh, [Replicate()] * value.device_mesh.ndim).to_local()


def _switched_on(module: Any) -> bool:
    return bool(getattr(getattr(module, "config", None), "output_router_logits", False))


def _check_loss(name: str, got: T, expected: T, dtype: torch.dtype, group: Any) -> None:
    """Refuse a loss of another formula, on all ranks alike.

    Args:
        name: of the model.
        got: the loss that it computed.
        expected: the same by the formula that is known.
        dtype: of the logits that it is computed from, in which some versions of transformers add up.
        group: of the ranks.
    """
    tolerance = max(1e-3, 4 * torch.finfo(dtype).eps)
    close = not got.isfinite() or torch.allclose(got.double(), expected.double(), rtol=tolerance, atol=1e-5)
    (differing,) = reduce_numbers([int(not close)], "sum", group)
    if differing:
        where = f" on {differing} of {get_platform().groups.size(group)} ranks; this one"
        raise ValueError(
            f"global_auxiliary_loss: the loss of {name} has another formula{where} computed {float(got):.6g}, and"
            f" experts * sum(share of choices * mean probability) of its tokens is {float(expected):.6g}. Set"
            " output_router_logits = False, and use load_balance_coeff of MoE, or a loss of your own"
        )
