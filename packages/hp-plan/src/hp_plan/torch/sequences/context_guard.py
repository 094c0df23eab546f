"""A check that a model on parts of a sequence computes what it computes on the whole.

Note [Parts and the whole]
    A model may derive something from what it is passed besides each token and its place: positions from the length, a
    scale, the inputs of a decoder. On a part of a sequence that is something else, and nothing fails. So the first time
    that a model is called in some way (with these inputs, with padding or without), one sample of the call is computed
    twice without gradients: whole, by each rank for itself, and in parts. Where the outputs differ by more than the
    dtype explains, the call is refused on all ranks, with the first module whose outputs differ; a model whose outputs
    of the whole differ from time to time can't be compared, which a warning says. The sample is cut off
    after `_LONGEST` tokens, modules are in evaluation mode meanwhile, and buffers and random generators are put back.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hp_dtensor import DTensor, implicit_replication
from hp_platform import get_platform
from hp_platform.extend import share_numbers
from hp_styles.torch.extend import whole_sequences

T = torch.Tensor
_LONGEST = 4096  # tokens
_MANY = 0.3  # of a rank's tokens: experts may be chosen otherwise for some, by rounding errors

_off = False


@contextlib.contextmanager
def unguarded() -> Iterator[None]:
    """Inside, nothing is compared: whoever enters it does."""
    global _off
    before, _off = _off, True
    try:
        yield
    finally:
        _off = before


class ContextGuard:
    """See Note [Parts and the whole].

    Args:
        model: under the plan.
        cut: returns a call's inputs with this rank's part of those that belong to tokens.
        shard: returns this rank's part of tensors by name.
        chunks: number of chunks that a sequence is divided into.
        group: all ranks of the model, which call it together.
    """

    def __init__(
        self,
        model: nn.Module,
        cut: Callable[[dict[str, Any]], dict[str, Any]],
        shard: Callable[[dict[str, T]], dict[str, T]],
        chunks: int,
        group: Any,
    ) -> None:
        self._model, self._cut, self._shard, self._chunks, self._group = model, cut, shard, chunks, group
        self._known: set[tuple[str, ...]] = set()
        self.running = False

    def asks(self, inputs: Mapping[str, Any], padded: bool) -> bool:
        """Return True if the model was not called in this way before."""
        return not (self.running or _off) and self._way(inputs, padded) not in self._known

    def _way(self, inputs: Mapping[str, Any], padded: bool) -> tuple[str, ...]:
        return (*sorted(inputs), "" if padded else "whole")

    def compare(self, inputs: dict[str, Any], tokens: Mapping[str, T], padded: bool) -> None:
        """Compare a sample of a call; all ranks of the group do.

        Args:
            inputs: of the call, by name.
            tokens: those of them that belong to tokens, [samples, length, ...].
            padded: whether some tokens are padding.

        Raises:
            NotImplementedError: on all ranks: the parts' outputs are not those of the whole.
        """
        sample = {name: value for name, value in inputs.items() if name not in ("labels", "num_items_in_batch")}
        if "use_cache" in inspect.signature(type(self._model).forward).parameters:
            sample["use_cache"] = False
        length = max(value.shape[1] for value in tokens.values())
        length = min(length, _LONGEST // self._chunks * self._chunks)
        mask = sample.get("attention_mask")
        row = 0 if mask is None else int(mask[:, :length].sum(1).argmin())  # with the most padding
        for name in sample.keys() & tokens.keys():
            value = sample[name].detach()
            sample[name] = value[:1, :length] if len(value) == 1 else value[row : row + 1, :length]
        mask = sample.get("attention_mask")
        counts = mask.bool() if mask is not None else torch.ones(1, length, dtype=torch.bool)
        places = self._shard({"input_ids": torch.arange(length)[None]})["input_ids"][0]

        def outputs(whole: bool) -> dict[str, T]:
            with self._without_traces():
                return self._outputs(sample if whole else self._cut(sample), whole=whole)

        whole, parts = outputs(True), outputs(False)
        differing = self._of_all(self._first(whole, parts, counts.cpu()[0], places), len(whole))
        self._known.add(self._way(inputs, padded))
        if differing is None:
            return
        changing = self._of_all(self._first(whole, outputs(True), counts.cpu()[0], torch.arange(length)), len(whole))
        model = type(self._model).__name__
        if changing is not None:
            warnings.warn(
                f"cp: {model} computes something else each time that it is passed the same inputs, first in"
                f" {list(whole)[changing] or 'its outputs'!r}: it draws at random, or counts its calls, of which there"
                " were 3 for this comparison. So its parts of a sequence were not compared with the whole",
                stacklevel=2,
            )
            return
        self._known.remove(self._way(inputs, padded))
        raise NotImplementedError(
            f"cp: {model} computes something else of its part of a sequence than of the whole one, first in"
            f" {list(whole)[differing] or 'its outputs'!r}: it derives something from the length or from all tokens"
            " that it is passed (positions, a scale, a decoder's inputs). Pass what it derives by name, such as"
            " position_ids, or leave cp out"
        )

    def _of_all(self, first: int | None, count: int) -> int | None:
        """Return the lowest number of a module that any rank found, of so many; None if none did."""
        everyone = share_numbers([first is not None, count if first is None else first], self._group)
        return min(place for _, place in everyone) if any(differs for differs, _ in everyone) else None

    def _outputs(self, inputs: dict[str, Any], *, whole: bool) -> dict[str, T]:
        """Return the first output of each module without others inside, in the order of the first calls, then the last.

        Args:
            inputs: by name.
            whole: compute whole sequences, or parts of them.
        """
        found: dict[str, T] = {}

        def keep(name: str) -> Any:
            def run(module: nn.Module, args: Any, output: Any) -> None:
                tensor = _tensor_of(output)
                if tensor is not None:
                    found.setdefault(name, tensor.detach().clone())

            return run

        leaves = [(name, each) for name, each in self._model.named_modules() if next(each.children(), None) is None]
        handles = [each.register_forward_hook(keep(name)) for name, each in leaves]
        try:
            with implicit_replication(), whole_sequences() if whole else contextlib.nullcontext():
                output = self._model.forward(**inputs)  # inside of the call that asks, which has gathered parameters
        finally:
            for handle in handles:
                handle.remove()
        last = _tensor_of(output)
        return found if last is None else {**found, "": last}

    def _first(self, whole: Mapping[str, T], parts: Mapping[str, T], counts: T, places: T) -> int | None:
        """Return the number of the first module whose outputs differ, if the model's outputs do."""

        def differs(name: str) -> bool:
            expected, got = whole[name], parts.get(name)
            if expected.dim() < 2 or expected.shape[1] != len(counts) or got is None:
                return False
            if got.dim() != expected.dim() or got.shape[1] != len(places) or not expected.is_floating_point():
                return False
            mine = counts.to(got.device)[places]
            expected, got = (each[0, mine].flatten(1).double() for each in (expected[:, places.to(got.device)], got))
            if not len(got):
                return False
            sizes = expected.norm(dim=1)
            errors = (got - expected).norm(dim=1) / sizes.clamp(min=sizes.median().item() or 1.0)
            far = ~(errors < torch.finfo(whole[name].dtype).eps ** 0.6)  # also what is no number
            return bool(far.double().mean() > _MANY)

        if not differs(""):
            return None
        return next(place for place, name in enumerate(whole) if differs(name))

    @contextlib.contextmanager
    def _without_traces(self) -> Iterator[None]:
        """Run the model such that nothing of it stays."""
        modules = [(module, dict(vars(module))) for module in self._model.modules()]
        buffers = [(buffer, buffer.detach().clone()) for buffer in self._model.buffers()]
        self.running = True
        for module, _ in modules:
            module.training = False
        try:
            with torch.no_grad(), get_platform().random.drawing(0, "cpu", get_platform().devices.current_device()):
                yield
        finally:
            self.running = False
            for module, before in modules:
                own = vars(module)
                for name in [
                    each for each in own if not each.startswith("_") and own[each] is not before.get(each, own)
                ]:
                    own.pop(name) if name not in before else own.update({name: before[name]})
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


def _tensor_of(output: Any) -> T | None:
    """Return the first tensor of an output, as a plain one."""
    values = (
        output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else [output]
    )
    tensor = next((value for value in values if isinstance(value, T)), None)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
