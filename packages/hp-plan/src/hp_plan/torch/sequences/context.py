"""A model that takes whole sequences, and computes on its part of them.

See Note [Whole sequences at the border] in `hp_plan.features.sequences`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import struct
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import nn

from hp_dtensor import DeviceMesh
from hp_pipeline import PipelinedModel
from hp_plan.features.loss import IGNORED
from hp_plan.features.sequences import caps_logits
from hp_plan.torch.sequences.context_guard import ContextGuard
from hp_platform import collectives, get_process_group_ranks
from hp_platform.extend import agree, map_nested, share_bytes
from hp_styles import context_parallel_shard, context_parallel_unshard
from hp_styles.extend import hook
from hp_styles.torch.extend import refuse_compiled

T = torch.Tensor
_NUMBERS = struct.Struct("<qq?")  # of labels, a digest, and whether the guard is asked
_TOKENS = ("input_ids", "inputs_embeds", "position_ids", "attention_mask", "token_type_ids", "labels")
_CACHES = ("past_key_values", "past_key_value", "cache_params")
_OF_PADDING = (
    "cp: {} label(s) are predicted by tokens of padding, as the first token's after padding on the left is, where"
    " attention that caps its logits takes the mean of all tokens in one process, and of none here: make them -100"
)


@functools.lru_cache(maxsize=1024)
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def is_attention(module: nn.Module) -> bool:
    """Return True for attention as transformers writes it: causal or not, with a mask that its model makes."""
    return hasattr(module, "is_causal") and "attention_mask" in _parameters(type(module).forward)


def counts_tokens(model: nn.Module) -> bool:
    """Return True if the model's loss is a function that takes shifted labels and the number of tokens."""
    if getattr(model, "loss_type", None) is None:
        return False
    loss = getattr(model, "loss_function", None)
    return callable(loss) and {"shift_labels", "num_items_in_batch"} <= set(_parameters(loss))


class Border:
    """Whole sequences become this rank's part, and losses those of all tokens.

    Args:
        mesh: of the context parallel ranks.
        data: of all ranks with the same weights and other tokens.
        load_balance: the plan's.
    """

    def __init__(self, mesh: DeviceMesh, data: DeviceMesh, load_balance: bool) -> None:
        self._mesh, self._data, self._load_balance = mesh, data, load_balance
        self._guard: ContextGuard | None = None
        self._last: T | None = None  # the largest position of the call
        self._capped = False  # attention is not torch's
        self._padding: NotImplementedError | None = None  # why padding is refused

    def attach(self, model: nn.Module, plain: Callable[[Any], Any]) -> None:
        """Register the hooks of a model.

        Args:
            model: the model; its `loss_function` is set.
            plain: makes the model's output plain.
        """
        loss, sizes = _CountedLoss(model, self._mesh), [0, 0]
        self._capped = caps_logits(getattr(model, "config", None))
        self._guard = guard = ContextGuard(model, self._part, self._shard, self._chunks(), self._data.get_group())
        for each in model.modules():
            if _changes_frequencies(each):
                self._see_last_position(each)

        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            refuse_compiled("a plan with cp")
            if guard.running:
                return None
            parts = self.parts(type(module).forward, args, kwargs)
            loss.expected = "labels" in parts
            sizes[:] = _rows(parts).shape[:2]
            return (), parts

        def whole(module: nn.Module, args: Any, output: Any) -> Any:
            if guard.running:
                return None
            if not loss.expected:
                return output if loss.called else self._gathered(plain(output), *sizes)
            loss.refuse()

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if guard.running:
                return
            loss.expected = loss.called = False

        model.register_forward_pre_hook(hook(enter), prepend=True, with_kwargs=True)
        model.register_forward_hook(hook(whole))
        model.register_forward_hook(hook(leave), always_call=True)

    def compare(self, model: nn.Module, spread: Callable[[], None], length: int) -> None:
        """Compare parts with the whole, of a model that is to be cut into stages: see `context_guard`.

        Args:
            model: whole.
            spread: gives its attention the style; afterwards the model is as it was.
            length: of a sequence, at most.

        Raises:
            NotImplementedError: on all ranks: the parts' outputs are not those of the whole.
        """
        length = max(self._chunks(), length // self._chunks() * self._chunks())
        vocabulary = getattr(getattr(model, "config", None), "vocab_size", 256)
        tokens = torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(0))
        tokens = tokens.to(next(model.parameters()).device)
        mask = torch.ones_like(tokens)
        mask[:, : length // 4] = 0
        before = [
            (vars(each), {name: _copied(value) for name, value in vars(each).items()}) for each in model.modules()
        ]
        try:
            spread()
            guard = ContextGuard(model, self._part, self._shard, self._chunks(), self._data.get_group())
            guard.compare({"input_ids": tokens}, {"input_ids": tokens}, padded=False)
            inputs = {"input_ids": tokens, "attention_mask": mask}
            try:
                guard.compare(inputs, inputs, padded=True)
            except NotImplementedError as error:  # no reason against a model that is never padded
                self._padding = error
        finally:
            for own, values in before:
                own.clear()
                own.update(values)

    def _chunks(self) -> int:
        return self._mesh.size() * (2 if self._load_balance else 1)

    def attach_stages(self, model: PipelinedModel) -> None:
        """Let `run` take whole sequences: stages send each other parts."""
        original, stages = model.run, list(model.stages.values())
        self._capped = caps_logits(getattr(model, "config", None))
        losses = [_CountedLoss(stage, self._mesh, several=True) for stage in stages]

        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            parts = self.parts(type(stages[0]).forward, args, kwargs)
            parts["position_ids"] = parts["position_ids"].expand(len(_rows(parts)), -1)  # which are cut into batches
            for loss in losses:
                loss.expected, loss.called = "labels" in parts, False
            results = original(**parts)
            if results and "labels" in parts and not any(loss.called for loss in losses):
                losses[-1].refuse()
            for loss in losses:
                loss.expected = False
            return results

        model.run = run

    def parts(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a model's inputs, by name, with the number of tokens in the loss.

        Raises:
            NotImplementedError: inputs whose part is not known.
            ValueError: lengths that differ or do not divide, inputs that differ between the ranks of `cp`, or that
                another rank refuses.
        """
        inputs = {**dict(zip(_parameters(forward)[1:], args, strict=False)), **kwargs}
        inputs, tokens, parts, total = self._agree(inputs)
        if "labels" in tokens:
            items = inputs.get("num_items_in_batch")  # the caller's is of the batch that the ranks of `cp` share
            count, ranks = (total, self._data.size()) if items is None else (items, self._mesh.size())
            count = torch.as_tensor(count, device=None if isinstance(count, T) else tokens["labels"].device)
            parts.update(shift_labels=parts["labels"], num_items_in_batch=count.double() / ranks)
        return {**inputs, **parts}

    def _cut(self, inputs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, T], dict[str, Any]]:
        """Return the inputs with shifted labels, those of them that belong to tokens, and this rank's part of these."""
        _check(inputs)
        inputs = {name: value for name, value in inputs.items() if value is not None}
        if "shift_labels" in inputs:
            inputs["labels"] = inputs.pop("shift_labels")
        elif "labels" in inputs:  # each token's label is the token after it
            inputs["labels"] = F.pad(inputs["labels"], (0, 1), value=IGNORED)[..., 1:]
        tokens = {name: inputs[name] for name in _TOKENS if isinstance(inputs.get(name), T)}
        length = _length(tokens)
        if "position_ids" not in tokens:
            tokens["position_ids"] = torch.arange(length, device=_rows(tokens).device)[None]
        self._last = tokens["position_ids"].max()
        return inputs, tokens, self._shard(tokens)

    def _shard(self, tokens: dict[str, T]) -> dict[str, T]:
        return context_parallel_shard(tokens, self._mesh, load_balance=self._load_balance)

    def _part(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs with this rank's part of those that belong to tokens."""
        inputs, _, parts = self._cut(inputs)
        return {**inputs, **parts}

    def _see_last_position(self, rotary: nn.Module) -> None:
        """Let frequencies that depend on the length be those of the whole sequence: its last position comes along."""

        def enter(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            named = dict(zip(_parameters(type(module).forward)[1:], args, strict=False)) | kwargs
            positions = named["position_ids"]
            assert self._last is not None  # the model was called
            last = self._last.to(positions).expand(*positions.shape[:-1], 1)
            return (), {**named, "position_ids": torch.cat([positions, last], -1)}

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            return map_nested(lambda each: each[..., :-1, :], output)

        rotary.register_forward_pre_hook(hook(enter), with_kwargs=True)
        rotary.register_forward_hook(hook(leave))

    def _agree(self, inputs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, T], dict[str, Any], int]:
        """Cut the inputs, and count the labels of all ranks with other tokens.

        Raises:
            NotImplementedError: inputs whose part is not known.
            ValueError: on all of these ranks: ranks of `cp` are passed different inputs, or a rank refuses its own.
        """
        cut: list[tuple[dict[str, Any], dict[str, T], dict[str, Any]]] = []
        padding = [0]

        def own() -> bytes:
            cut.append(self._cut(inputs))
            tokens = cut[0][1]
            labels, digest = tokens.get("labels"), _digest(tokens)
            count = torch.zeros_like(digest) if labels is None else (labels != IGNORED).sum()
            mask = tokens.get("attention_mask")
            zeros = unseen = torch.zeros_like(digest)
            if mask is not None:
                zeros = (mask == 0).sum()
                unseen = zeros if labels is None else ((labels != IGNORED) & (mask == 0)).sum()
            *numbers, padding[0], of_padding = torch.stack([count, digest, zeros, unseen]).tolist()
            if padding[0] and self._padding is not None:
                raise self._padding
            if labels is not None and of_padding and self._capped:
                raise ValueError(_OF_PADDING.format(of_padding))
            return _NUMBERS.pack(*numbers, self._guard is not None and self._guard.asks(inputs, padding[0] > 0))

        group = self._data.get_group()
        members = get_process_group_ranks(group)

        def failed(texts: Mapping[int, str], error: Exception | None) -> Exception:
            some = "; ".join(f"rank {members[place]}: {text}" for place, text in list(texts.items())[:4])
            return error or ValueError(f"cp: inputs are refused by {some}")

        rows = dict(zip(members, agree(own, failed, functools.partial(share_bytes, group=group))))
        numbers = [_NUMBERS.unpack(rows[rank]) for rank in self._data.ranks.reshape(-1).tolist()]
        size = self._mesh.size()  # `cp` is the innermost axis of the mesh, wherever its ranks are
        if any(digest != numbers[place - place % size][1] for place, (_, digest, _) in enumerate(numbers)):
            raise ValueError(
                f"cp: its {size} ranks are passed different inputs, but they share each sample: pass the same whole"
                f" sequences on all of them ({', '.join(cut[0][1])})"
            )
        if any(asks for *_, asks in numbers):
            assert self._guard is not None  # it was asked
            self._guard.compare(inputs, cut[0][1], padding[0] > 0)
        return *cut[0], sum(count for count, *_ in numbers[::size])

    def _gathered(self, value: Any, samples: int, length: int) -> Any:
        """Gather what has this rank's tokens: [samples, length, ...], or [samples * length, ...] as a router's."""
        if isinstance(value, T):
            if value.shape[:2] == (samples, length):
                return self._gather(value)
            if value.dim() == 2 and len(value) == samples * length:
                return self._gather(value.unflatten(0, (samples, length))).flatten(0, 1)
            return value
        if isinstance(value, dict):
            for key in list(value):
                value[key] = self._gathered(value[key], samples, length)  # in place, as in `plain`
            return value
        if type(value) in (list, tuple):
            return type(value)(self._gathered(each, samples, length) for each in value)
        return value

    def _gather(self, part: T) -> T:
        """Gather a part; the mean of the ranks' gradients is then that of one process, as each has the whole loss."""
        if part.requires_grad:
            size = self._mesh.size()
            part = part.view_as(part)
            part.register_hook(lambda gradient: gradient * size)
        return context_parallel_unshard(part, self._mesh, load_balance=self._load_balance)


class _CountedLoss:
    """A model's `loss_function`, which is to be given shifted labels and the number of tokens.

    Its value is the mean over the ranks that share samples, its gradient that of this rank's tokens: whatever is
    computed of the loss has the gradient of one process in the mean of the ranks'.

    Args:
        model: the model, or a stage of it.
        mesh: of the context parallel ranks.
        several: the loss is asked for several times, for each micro-batch.

    Attributes:
        expected: labels were passed, and the loss has not been asked for, or not for the last time.
        called: it has, with what it needs.
    """

    def __init__(self, model: Any, mesh: DeviceMesh, *, several: bool = False) -> None:
        self.expected = self.called = False
        self._mesh, self._several = mesh, several
        self._name, self._loss = type(model).__name__, model.loss_function
        model.loss_function = self

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Compute the loss.

        Raises:
            NotImplementedError: the model did not hand on the shifted labels, or their number.
        """
        if self.expected and (options.get("shift_labels") is None or options.get("num_items_in_batch") is None):
            self.refuse()
        counted = self.expected
        self.expected, self.called = counted and self._several, counted or self.called
        loss = self._loss(*args, **options)
        if not counted or not isinstance(loss, T) or loss.dim():
            return loss
        mean = loss.detach().clone()
        collectives.all_reduce(mean, "avg", group=self._mesh.get_group())
        return loss - loss.detach() + mean

    def refuse(self) -> NoReturn:
        """Refuse a model that computes its loss in another way.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            f"cp: {self._name} does not pass shift_labels and num_items_in_batch to its loss_function, so its loss"
            " is of this rank's tokens alone; call it without labels, and compute the loss from its logits"
        )


def _copied(value: Any) -> Any:
    """Copy what a module keeps its hooks, parameters and modules in."""
    return copy.copy(value) if isinstance(value, (dict, set)) else value


def _check(inputs: Mapping[str, Any]) -> None:
    """Refuse inputs whose part is not known.

    Raises:
        NotImplementedError: a key/value cache, a mask of queries and keys, or tensors of unknown meaning.
    """
    for name, value in inputs.items():
        if name in _CACHES and value is not None:
            raise NotImplementedError(
                f"cp: {name} is passed, but a cache would hold each rank's own tokens: decoding and generate() are not"
                " supported; generate with a model without cp"
            )
        if name == "logits_to_keep" and not (isinstance(value, int) and value == 0):
            raise NotImplementedError(f"cp: {name} = {value!r} chooses places of a whole sequence; leave it out")
        if not isinstance(value, T) or not value.dim() or name == "num_items_in_batch":
            continue
        if name not in (*_TOKENS, "shift_labels"):
            known = ", ".join(_TOKENS)
            raise NotImplementedError(
                f"cp: the input {name!r} of shape {tuple(value.shape)} may belong to tokens, of which each rank has a"
                f" part; those that are sharded are {known}"
            )
        if name == "attention_mask" and value.dim() != 2:
            raise NotImplementedError(
                f"cp: an attention_mask of shape {tuple(value.shape)}; pass one of padding, [batch, sequence], or"
                " position_ids that start anew in each packed document"
            )


def _changes_frequencies(module: nn.Module) -> bool:
    """Return True for rotary positions as of transformers whose frequencies depend on the largest one."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return "position_ids" in _parameters(type(module).forward) and any(
        isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds
    )


def _rows(tokens: Mapping[str, Any]) -> T:
    """Return the samples."""
    return next(tokens[name] for name in _TOKENS if name in tokens)


def _length(tokens: Mapping[str, T]) -> int:
    """Return the length of the sequence.

    Raises:
        ValueError: inputs of different lengths, or none.
    """
    lengths = {name: value.shape[1] if value.dim() > 1 else None for name, value in tokens.items()}
    if len(set(lengths.values())) != 1 or None in lengths.values():
        raise ValueError(f"cp: the inputs must be [batch, sequence, ...] of one length, got lengths {lengths}")
    return _rows(tokens).shape[1]


def _digest(tokens: Mapping[str, T]) -> T:
    """Return a number that differs where inputs do."""
    total = None
    for value in tokens.values():
        flat = value.detach().reshape(-1)
        numbers = flat.double().view(torch.int64) if flat.is_floating_point() else flat.long()
        weights = torch.arange(1, len(numbers) + 1, device=flat.device) * 0x9E3779B97F4A7C1
        each = ((numbers + 1) * weights).sum()
        total = each if total is None else total * 31 + each
    assert total is not None
    return total
