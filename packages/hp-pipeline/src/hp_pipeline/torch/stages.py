"""The stages that are cut out of a model, with stand-ins for what other stages run: Note [How a model is split]."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

T = torch.Tensor

Form = Callable[[T, Any], Any]
FORMS: tuple[Form, ...] = (lambda hidden, rest: hidden, lambda hidden, rest: (hidden,), lambda *both: both)
"""What a block returns: its hidden states, or a tuple of them, or a pair."""


class Relay:
    """The hidden states of the forward under way.

    Attributes:
        received: from the stage before.
        sent: what the last block of the stage returned.
    """

    __slots__ = ("received", "sent")

    def __init__(self) -> None:
        self.received: T | None = None
        self.sent: T | None = None

    def blank(self, *shape: int) -> T:
        """Return zeros of a shape that take the memory of one element."""
        hidden = self.sent if self.sent is not None else self.received
        assert hidden is not None, "stand-ins run in a stage's forward"
        return hidden.detach().new_zeros(()).expand(shape)

    def clear(self) -> None:
        """Forget the hidden states."""
        self.received = self.sent = None


class PassThrough(nn.Module):
    """A block of another stage.

    Args:
        block: the block; its plain attributes are the stand-in's, for models read some.
        relay: of the stage.
        form: one of ``FORMS``.
        role: ``"inject"`` returns what the stage received; ``"capture"`` keeps what it gets, and returns zeros.
    """

    def __init__(self, block: nn.Module, relay: Relay, form: Form, role: str = "") -> None:
        super().__init__()
        vars(self).update(_plain(block))
        self.relay, self.form, self.role = relay, form, role

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden: Any = args[0] if args else kwargs["hidden_states"]
        if self.role == "capture":
            self.relay.sent = hidden
            hidden = self.relay.blank(*hidden.shape)
        elif self.role == "inject":
            hidden = self.relay.received
        return self.form(hidden, None)


class _Placeholder(nn.Module):
    """A module that is not a block: returns the first tensor of numbers, or zeros for a tensor of indices.

    Args:
        relay: of the stage.
        features: the size of the last dim of zeros in place of the numbers.
        embeds: what it gets are indices, of any dtype.
    """

    def __init__(self, relay: Relay, features: int | None, embeds: bool) -> None:
        super().__init__()
        self.relay, self.features, self.embeds = relay, features, embeds

    @property
    def weight(self) -> T:
        """A tensor of the hidden states' dtype, which models read in a forward."""
        if self.relay.received is None and self.relay.sent is None:
            raise AttributeError("weight")
        return self.relay.blank()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, T)]
        numbers = [each for each in tensors if each.is_floating_point()]
        if numbers and not self.embeds:
            whole = numbers[0]
            return whole if self.features is None else self.relay.blank(*whole.shape[:-1], self.features)
        assert self.relay.received is not None, "the first stage has its own embeddings"
        return self.relay.blank(*(tensors[0].shape if tensors else ()), self.relay.received.shape[-1])


def is_stand_in(module: nn.Module) -> bool:
    """Tell whether a module of a stage stands for what another stage runs."""
    return isinstance(module, (PassThrough, _Placeholder))


def placeholder(module: nn.Module, relay: Relay, ahead: bool) -> nn.Module:
    """Return a stand-in for a module that is not a block; ``ahead`` if it runs before the blocks."""
    features = module.out_features if isinstance(module, nn.Linear) and not ahead else None
    return _Placeholder(relay, features, isinstance(module, nn.Embedding))


def copied(module: nn.Module) -> Any:
    """Copy a module without what is in it: the parameters, buffers and children are the same objects."""
    clone = object.__new__(type(module))
    own = vars(nn.Module())
    for name, value in vars(module).items():
        vars(clone)[name] = copy.copy(value) if name in own and isinstance(value, (dict, set)) else value
    return clone


def without_parameters(module: nn.Module) -> Any:
    """Copy a module that has no parameters, and all in it: each stage has its own buffers."""
    clone = copied(module)
    for name, child in module._modules.items():
        clone._modules[name] = None if child is None else without_parameters(child)
    return clone


def _plain(module: nn.Module) -> dict[str, Any]:
    kinds = (bool, int, float, str, tuple, type(None))
    return {
        name: value for name, value in vars(module).items() if not name.startswith("_") and isinstance(value, kinds)
    }


IGNORED = -100
"""The label of a token that has no part in the loss."""
LOSS_INPUTS = ("labels", "shift_labels", "num_items_in_batch", "start_positions", "end_positions")
REFUSED = {
    "past_key_values": "a cache of all blocks is on no rank",
    "use_cache": "a cache of all blocks is on no rank",
    "output_hidden_states": "those of other stages are not on this rank",
    "output_attentions": "those of other stages are not on this rank",
    "output_router_logits": "the load balancing loss takes those of all blocks, which are on several ranks",
}
"""Keyword inputs for which a stage would need what other stages have."""
SOME_STAGES = {"input_ids", "inputs_embeds", *LOSS_INPUTS, *REFUSED}
"""Keyword inputs that not every stage takes."""


@dataclass(frozen=True)
class Cut:
    """How stages are cut out of a model.

    Attributes:
        model: the whole model.
        path: the name of the list of blocks.
        before: the modules with parameters that run before the blocks.
        after: those that run after them.
        form: the place in ``FORMS`` of what blocks return.
        first_only: the inputs, beside ``input_ids``, that later stages do not use.
        needs_ids: later stages use ``input_ids`` too, beyond the embedding.
        loss: how labels are averaged: ``"shifted"``, ``"plain"``: over all tokens, of a causal model all but the first;
            ``"custom"``: by a function that takes ``num_items_in_batch``; ``"inline"``: by the model's own.
    """

    model: nn.Module
    path: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    form: int = 0
    first_only: tuple[str, ...] = ()
    needs_ids: bool = False
    loss: str = "inline"


def cut_stage(cut: Cut, first: int, end: int) -> Any:
    """Return the module that runs the blocks from first to before end."""
    relay, original, prefix = Relay(), cut.model, ""
    root = node = copied(original)
    blocks = original.get_submodule(cut.path)
    assert isinstance(blocks, nn.ModuleList)
    is_first, is_last = first == 0, end == len(blocks)
    for part in cut.path.split("."):
        for name, child in original._modules.items():
            full = prefix + name
            if name == part or child is None:
                continue
            if full in cut.before and not is_first:
                node._modules[name] = placeholder(child, relay, ahead=True)
            elif full in cut.after and not is_last:
                node._modules[name] = placeholder(child, relay, ahead=False)
            elif full not in cut.before and full not in cut.after:
                node._modules[name] = without_parameters(child)
        original, prefix = original.get_submodule(part), f"{prefix}{part}."
        clone = copied(original)
        node._modules[part] = node = clone
    roles = {first - 1: "inject", end: "capture"}
    for index, (name, block) in enumerate(blocks.named_children()):
        if not first <= index < end:
            node._modules[name] = PassThrough(block, relay, FORMS[cut.form], roles.get(index, ""))
    _untie(root, cut.path)
    root.forward = _Forward(root, relay, cut, is_first, is_last)
    if is_last:
        root.prepare_batch = root.forward.prepare_batch
    return root


def _untie(root: Any, path: str) -> None:
    """Leave of the weights that transformers ties anew, whenever it initialises, those that are in the stage."""
    names = {name for name, _ in root.named_parameters(remove_duplicate=False)}
    node, prefix, tied = root, "", {}
    for part in path.split("."):
        for target, source in getattr(node, "all_tied_weights_keys", {}).items():
            if prefix + target in names and prefix + source in names:
                tied[prefix + target] = prefix + source
        if hasattr(node, "all_tied_weights_keys"):
            node._tied_weights_keys = node.all_tied_weights_keys = {}
        node, prefix = node.get_submodule(part), f"{prefix}{part}."
    if hasattr(root, "all_tied_weights_keys"):
        root._tied_weights_keys = root.all_tied_weights_keys = tied


class _Forward:
    """The forward of a stage: the model's own, fed with what was received.

    Beside hidden states it returns the names of its keyword inputs if there are any, such as an attention mask: that a
    later stage does not have it would not show otherwise.

    Attributes:
        cache: of keys and values, which the stage's blocks add theirs to; see `caching`.
    """

    def __init__(self, root: nn.Module, relay: Relay, cut: Cut, first: bool, last: bool) -> None:
        self.root, self.relay = root, relay
        self.first, self.last = first, last
        self.first_only, self.needs_ids, self.loss = cut.first_only, cut.needs_ids, cut.loss
        self.own = list(inspect.signature(type(root).forward).parameters)[1:]
        self.cache: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kind, whole = type(self.root).__name__, self.first and self.last
        for name in REFUSED.keys() & kwargs.keys():
            if kwargs[name] is not None and kwargs[name] is not False and not whole:
                raise ValueError(f"{kind} in stages takes no {name}: {REFUSED[name]}; leave it out.")
        if self.first:
            args, kwargs = (), {**dict(zip(self.own, args, strict=False)), **kwargs}
        names = shared_names(kwargs, self.first_only)
        if not self.first:
            kwargs = {name: value for name, value in kwargs.items() if name not in self.first_only}
        if self.cache is not None:
            kwargs = {**kwargs, "past_key_values": self.cache, "use_cache": True}
        elif "use_cache" in self.own and not whole:
            kwargs["use_cache"] = False
        if not self.last:
            kwargs = {name: value for name, value in kwargs.items() if name not in LOSS_INPUTS}
            if "logits_to_keep" in self.own:
                kwargs["logits_to_keep"] = 1  # of zeros
        try:
            if not self.first:
                kwargs = self._received(names, args, kwargs)
            result = type(self.root).forward(self.root, **kwargs)
            hidden = self.relay.sent
        finally:
            self.relay.clear()
        return result if self.last else (hidden, names) if names else hidden

    def _received(self, names: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Take the hidden states; return the model's inputs."""
        kind = type(self.root).__name__
        hidden, before = (*args, "", "")[:2]
        if not isinstance(hidden, T) or not isinstance(before, str) or len(args) > 2:
            got = ", ".join(type(each).__name__ for each in args) or "nothing"
            raise TypeError(f"A later stage of {kind} takes what the stage before returns, hidden states; got {got}.")
        if names != before:
            raise ValueError(
                f"{kind}: the stage before was run with the keyword inputs [{before}], this one with [{names}]; pass"
                " all but input_ids (first stage) and labels (last stage) to run() on every rank. Inputs that only the"
                " first stage uses are found by split_model(..., example=)."
            )
        self.relay.received = hidden
        kwargs.pop("inputs_embeds", None)
        if kwargs.get("input_ids") is None:
            if self.needs_ids:
                raise ValueError(
                    f"{kind} uses input_ids beyond its embedding, here on a later stage: pass run(input_ids=...) by"
                    " keyword on every rank."
                )
            kwargs["input_ids"] = torch.full((), -1, device=hidden.device).expand(hidden.shape[:-1])
        return kwargs

    def prepare_batch(self, kwargs: Mapping[str, Any], micro_batches: int) -> Mapping[str, Any]:
        """Weight the micro-batches' losses by their tokens: their mean is that of the whole batch.

        A schedule calls it on its whole batch's keyword inputs.

        Raises:
            ValueError: the model averages by itself, and micro-batches have different numbers of labels.
        """
        shifted = kwargs.get("shift_labels")
        labels = kwargs.get("labels") if shifted is None else shifted
        if micro_batches == 1 or labels is None:
            return kwargs
        items = kwargs.get("num_items_in_batch")
        if self.loss in ("shifted", "plain") and items is None:
            items = count_labels(labels, self.loss == "shifted" and shifted is None)
        if self.loss != "inline" and items is not None:
            return {**kwargs, "num_items_in_batch": items / micro_batches}
        if not labels.is_floating_point():
            for without_first in (False, True)[: labels.dim()]:
                counts = [int(count_labels(part, without_first)) for part in labels.chunk(micro_batches)]
                if len(set(counts)) > 1:
                    raise ValueError(
                        f"{type(self.root).__name__} averages its loss by itself, and the micro-batches have {counts}"
                        f" labels other than {IGNORED}: the mean of their losses is not that of the batch. Pass"
                        f" {'num_items_in_batch, or ' if self.loss == 'custom' else ''}equal numbers of labels."
                    )
        return kwargs


@contextlib.contextmanager
def caching(stage: nn.Module, cache: Any) -> Iterator[None]:
    """Inside, the blocks of a stage of `split_model` add their keys and values to a cache in each forward.

    Args:
        stage: the module of the stage.
        cache: of transformers, with layers of all blocks of the model: models read the length of the texts before from
            the first layer, also where its block is in another stage. None is no cache.

    Raises:
        TypeError: a module that is no stage of `split_model`.
    """
    forward = vars(stage).get("forward")
    if not isinstance(forward, _Forward):
        raise TypeError(f"{type(stage).__name__} is no stage of split_model: its blocks take no cache")
    before, forward.cache = forward.cache, cache
    try:
        yield
    finally:
        forward.cache = before


def shared_names(kwargs: Mapping[str, Any], first_only: Sequence[str]) -> str:
    """Name the keyword inputs that all stages take."""
    shared = (name for name, value in kwargs.items() if value is not None and name not in SOME_STAGES)
    return ",".join(sorted(name for name in shared if name not in first_only))


def count_labels(labels: T, without_first: bool) -> T:
    """Count the labels that have a part in the loss; a causal model predicts no token for the first of a row."""
    return (labels[..., 1:] if without_first else labels).ne(IGNORED).sum()
