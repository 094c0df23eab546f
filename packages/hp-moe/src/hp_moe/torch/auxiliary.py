"""The auxiliary loss of transformers' models over the tokens of all ranks.

Note [No mean of means]
    The loss multiplies each expert's share of the choices by its mean probability. Of both, the factors of all tokens
    are means over ranks, but their product is none: losses of each rank's own tokens, averaged, are another loss, with
    other gradients. So shares and means are taken over all ranks before they are multiplied.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch import nn

from hp_dtensor import DTensor, Replicate
from hp_platform import get_platform

T = torch.Tensor


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
            _check(name, own, _loss(layers, top_k, mask, None)[0], layers[0].dtype, over)
            checked = True
        value, part = _loss(layers, top_k, mask, over)
        total = value + (part - part.detach())  # the value of all ranks, the gradient of this one
        if output.loss is not None:
            change: Any = options.router_aux_loss_coef * (total - own)
            if isinstance(output.loss, DTensor):
                change = DTensor.from_local(change, output.loss.device_mesh, [Replicate()])
            output.loss = output.loss + change.to(output.loss.dtype)
        output.aux_loss = total
        return output

    return model.register_forward_hook(exchange, with_kwargs=True)


def _loss(layers: list[T], top_k: int, mask: T | None, group: Any) -> tuple[T, T]:
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


def _check(name: str, got: T, expected: T, dtype: torch.dtype, group: Any) -> None:
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
    differing = torch.tensor(int(not close), device=got.device)
    get_platform().collectives.all_reduce(differing, group=group)
    if differing:
        where = f" on {int(differing)} of {get_platform().groups.size(group)} ranks; this one"
        raise ValueError(
            f"global_auxiliary_loss: the loss of {name} has another formula{where} computed {float(got):.6g}, and"
            f" experts * sum(share of choices * mean probability) of its tokens is {float(expected):.6g}. Set"
            " output_router_logits = False, and use load_balance_coeff of MoE, or a loss of your own"
        )
