"""Log-probabilities of given tokens, without the logits of all of them in memory.

Note [The head in chunks]
    The model runs as it does in training, up to its head. In place of the head stands one that computes the logits of
    a chunk of tokens, takes of each its log-probability and its entropy, and drops them; a backward computes them
    again. The model gets the logits of the last position back, does to them what it does to logits (caps or scales
    them), and so shows whether that was done to the chunks, too.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from hp_dtensor import DTensor, Replicate, implicit_replication
from hp_fsdp import FSDPModule
from hp_fsdp.extend import kept_gathered
from hp_pipeline import PipelinedModel
from hp_plan.torch.generation.exact.forward import exact, is_exact
from hp_plan.torch.generation.stages import forwards_of
from hp_plan.torch.training.objectives import upcast
from hp_styles.torch.extend import as_computed

T = torch.Tensor
_CHUNK = 1024
_checked: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class TokenProbabilities(NamedTuple):
    """What `log_probabilities` returns, each of shape (batch, length - 1).

    Attributes:
        log_probabilities: of token i + 1 after the tokens up to i.
        entropy: of the distribution that token was drawn from, in nats.
    """

    log_probabilities: T
    entropy: T


def log_probabilities(
    model: nn.Module,
    ids: T,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    attention_mask: T | None = None,
) -> TokenProbabilities:
    """Compute how probable a model takes each token of given texts to be, given those before it.

    The same function serves an actor (with gradients, in training mode), a reference (under `torch.no_grad`) and texts
    that were generated. The logits of all tokens are never in memory: those of a chunk are computed, used and dropped,
    and computed again in a backward. Where a plan shards the head by `tp`, each rank has the logits of its part of the
    vocabulary, and ranks exchange some numbers a token (Shoeybi et al., arXiv:1909.08053, section 3).

    Args:
        model: a causal language model of transformers, plain or under a plan. Every rank of the plan calls it. Under
            `pp` it runs forwards alone, so call it under `torch.no_grad()`; train with `model.run`.
        ids: (batch, length) of token ids, on this rank; the batch may be empty, and the rank takes part all the same.
            The ranks of a pipeline pass the same, and get the same.
        temperature: what logits are divided by, as sampling does; more than 0.
        chunk: tokens whose logits are in memory at once. Default: 1,024, which are 512 MiB in float32 for a vocabulary
            of 128 Ki.
        attention_mask: (batch, length), 1 for tokens and 0 for padding, on the left or on the right. Default: no
            padding. Places with padding on either side of a prediction are 0.

    Returns:
        `log_probabilities` and `entropy`, (batch, length - 1), in float32; in float64 for a model in float64. Both
        carry gradients, unless under `torch.no_grad()`.

    Raises:
        ValueError: numbers out of their range, shapes that do not fit, ranks of a pipeline with different texts.
        NotImplementedError: a model with `cp`, one with `pp` where gradients are recorded, one without a head or with
            one that is a group of `fully_shard` of its own, or that does to its logits what is not known here.
    """
    refuse_cut_texts(model, "log_probabilities")
    forwards = forwards_of(model, "log_probabilities") if isinstance(model, PipelinedModel) else None
    _check(model if forwards is None else forwards.last, ids, temperature, chunk, attention_mask)
    if forwards is None and isinstance(model.get_output_embeddings(), FSDPModule):  # type: ignore[operator]
        raise NotImplementedError(
            "log_probabilities: the head is a group of fully_shard of its own, which each chunk would gather, as often"
            " as a rank has chunks; leave it out of fsdp.groups, so that it is in the outermost group"
        )
    if forwards is not None:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "log_probabilities: a model under pp computes them without gradients alone; call it under"
                " torch.no_grad(), and train with model.run(...)"
            )
        forwards.compare({"ids": ids, "attention_mask": attention_mask, "temperature": temperature})
    batch = len(ids)
    if not batch:  # models of transformers take no batch of none: a row that counts nowhere stands in
        ids = ids.new_zeros((1, ids.shape[1]))
        attention_mask = None if attention_mask is None else torch.ones_like(ids)
    options: dict[str, Any] = {"use_cache": False}
    if attention_mask is not None:
        options["attention_mask"] = attention_mask
        options["position_ids"] = (attention_mask.long().cumsum(-1) - 1).clamp_min(0)
    if forwards is None:
        with _giving_terms(model, temperature, chunk):
            found = model(input_ids=ids, **options)
        values = [found[name][:batch] for name in TokenProbabilities._fields]
    else:
        with _giving_terms(forwards.last, temperature, chunk) if forwards.is_last else contextlib.nullcontext():
            found = forwards.run(input_ids=ids, **options) or {}
        values = [forwards.from_last(found.get(name))[:batch] for name in TokenProbabilities._fields]
    if attention_mask is not None:
        counts = (attention_mask[:batch, 1:] * attention_mask[:batch, :-1]).bool()
        values = [torch.where(counts, value, 0.0) for value in values]
    return TokenProbabilities(*values)


@contextlib.contextmanager
def _giving_terms(model: Any, temperature: float, chunk: int | None) -> Iterator[None]:
    """Inside, a model, or the last stage of one, returns the fields of `TokenProbabilities` by name."""
    outer = vars(model).get("forward")
    inner: Callable[..., Any] = model.forward

    # In place of forward, so that what gathers and frees parameters sees these results as the model's.
    def forward(*args: Any, input_ids: T, **options: Any) -> dict[str, T]:
        with _chunked(model, input_ids, temperature, chunk or _CHUNK) as head:
            output = inner(*args, input_ids=input_ids, **options)
        head.check(model, output)
        return dict(zip(TokenProbabilities._fields, head.taken(), strict=True))

    own = model.get_output_embeddings()
    model.forward = forward
    try:
        with kept_gathered([own]) if isinstance(own, FSDPModule) else contextlib.nullcontext():
            yield
    finally:
        if outer is None:
            del model.forward
        else:
            model.forward = outer


def _check(model: Any, ids: Any, temperature: float, chunk: int | None, attention_mask: Any) -> None:
    if not callable(getattr(model, "get_output_embeddings", None)) or model.get_output_embeddings() is None:
        raise NotImplementedError(
            f"log_probabilities: {type(model).__name__} has no head that get_output_embeddings() returns; take a causal"
            " language model of transformers"
        )
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"log_probabilities: ids must be integers of shape (batch, length), got {_told(ids)}")
    if ids.shape[1] < 1:
        raise ValueError("log_probabilities: ids without a token: the length must be at least 1")
    if not temperature > 0:
        raise ValueError(f"log_probabilities: temperature must be more than 0, got {temperature}")
    if chunk is not None and chunk < 1:
        raise ValueError(f"log_probabilities: chunk must be at least 1 token, got {chunk}")
    if attention_mask is not None and attention_mask.shape != ids.shape:
        raise ValueError(
            f"log_probabilities: attention_mask has shape {tuple(attention_mask.shape)}, and ids {tuple(ids.shape)}"
        )


def refuse_cut_texts(model: nn.Module, caller: str) -> None:
    """Refuse a model whose ranks have parts of a text."""
    if any(getattr(module, "_context_parallel", False) for module in model.modules()):
        raise NotImplementedError(f"{caller}: a model under cp is not supported; apply the plan without cp")


def _told(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return type(value).__name__


@contextlib.contextmanager
def _chunked(model: Any, ids: T, temperature: float, chunk: int) -> Iterator[_ChunkedHead]:
    """Inside, the model's head is one in chunks."""
    original = model.get_output_embeddings()
    places = [
        (module, name) for module in model.modules() for name, child in module._modules.items() if child is original
    ]
    head = _ChunkedHead(original, _scaling(model.config), ids, temperature, chunk)
    for module, name in places:
        module._modules[name] = head
    try:
        yield head
    finally:
        for module, name in places:
            module._modules[name] = original


class _ChunkedHead(nn.Module):
    """Stands for a head; see Note [The head in chunks]."""

    def __init__(self, head: nn.Module, scaling: Callable[[T], T], ids: T, temperature: float, chunk: int) -> None:
        super().__init__()
        self._head = [head]  # in a list it is not a module of this one
        self._scaling, self._ids, self._temperature, self._chunk = scaling, ids, temperature, chunk
        self._exact = is_exact(head)
        self.results: list[T] = []
        self._last: T | None = None

    def forward(self, hidden: T) -> T:
        (head,) = self._head
        batch, length = self._ids.shape
        if isinstance(hidden, DTensor):  # a sequence's shards are gathered, as the head would do
            hidden = hidden.redistribute(placements=[Replicate()] * hidden.device_mesh.ndim)
        if hidden.shape[:2] != (batch, length):
            raise NotImplementedError(
                f"log_probabilities: the head got {tuple(hidden.shape[:2])} positions of {batch} x {length} tokens"
            )
        last: Any = head(hidden[:, -1:])
        with torch.no_grad():
            self._last = self._scaling(last)
        rows, targets = hidden[:, :-1].flatten(0, 1), self._ids[:, 1:].flatten()
        parts = [self._of_chunk(head, *part) for part in zip(rows.split(self._chunk), targets.split(self._chunk))]
        if not parts:  # texts of one token: nothing is predicted
            nothing = upcast(last.new_zeros((batch, 0)))
            self.results = [nothing, nothing]
        else:
            self.results = [torch.cat(values).view(batch, length - 1) for values in zip(*parts)]
        return last

    def taken(self) -> list[T]:
        """Return the results and forget them: their graph has this module, which computes chunks again."""
        results, self.results, self._last = self.results, [], None
        return results

    def check(self, model: nn.Module, output: Any) -> None:
        """Refuse a model that did to its logits what was not done to the chunks."""
        if model in _checked or self._last is None:
            return
        logits = output["logits"]
        whole = logits.full_tensor() if isinstance(logits, DTensor) else logits
        mine = self._last.full_tensor() if isinstance(self._last, DTensor) else self._last
        if whole.shape != mine.shape or not torch.allclose(whole, mine, rtol=0, atol=0, equal_nan=True):
            raise NotImplementedError(
                f"log_probabilities: {type(model).__name__} changes the logits of its head in a way that is not known"
                " here; known are final_logit_softcapping, logit_scale and logits_scaling of its config"
            )
        _checked.add(model)

    def _of_chunk(self, head: nn.Module, rows: T, targets: T) -> tuple[T, T]:
        if torch.is_grad_enabled():
            return checkpoint(self._terms, head, rows, targets, use_reentrant=False)
        return self._terms(head, rows, targets)

    def _terms(self, head: nn.Module, rows: T, targets: T) -> tuple[T, T]:
        with exact(self._exact):
            return self._exact_terms(head, rows, targets)

    def _exact_terms(self, head: nn.Module, rows: T, targets: T) -> tuple[T, T]:
        with as_computed(head):
            logits: Any = head(rows[None])[0]
        logits = self._scaling(logits)
        logits = upcast(logits) / self._temperature
        if isinstance(logits, DTensor):
            return _sharded_terms(logits, targets)
        sums = logits.logsumexp(-1)
        chosen = logits.gather(-1, targets.long()[:, None]).squeeze(-1)
        return chosen - sums, sums - ((logits - sums[:, None]).exp() * logits).sum(-1)


def _sharded_terms(logits: DTensor, targets: T) -> tuple[T, T]:
    """As of whole logits, of those whose classes may be sharded: ranks exchange sums of rows."""
    most = logits.detach().amax(-1, keepdim=True)
    weights = (logits - most).exp()
    sums, weighted = weights.sum(-1), (weights * (logits - most)).sum(-1)
    entropy: Any = sums.log() - weighted / sums
    with implicit_replication():
        losses: Any = F.cross_entropy(logits, targets.long(), reduction="none")
    return -losses.full_tensor(), entropy.full_tensor()


def _scaling(config: Any) -> Callable[[T], T]:
    """Return what a model does to the logits of its head, as far as its config tells."""
    cap = getattr(config, "final_logit_softcapping", None)
    factor, divisor = getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None)

    def scaled(logits: T) -> T:
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        if factor is not None:
            logits = logits * factor
        return logits if divisor is None else logits / divisor

    return scaled
