"""Blocks of an elementwise optimizer: parameters of one group and dtype, and the memory of their states.

Note [Runs]
    The parameters of a group in `hp_fsdp.fully_shard` look into one buffer, and so do their gradients. Where two
    parameters touch, and their gradients touch in the same way, they are one *run*, which one entry of one fused call
    updates: a bucket of two hundred parameters costs what a single tensor does. States always lie in one buffer, in the
    order of the parameters, of which ``state`` has views. Any other parameters are runs of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, repeat
from operator import add, is_
from typing import Any

import torch

from hp_dtensor.torch.extend import DTensor, wrap
from hp_optim.options import sparse_gradient
from hp_optim.torch.states.kernel_ranges import Runs
from hp_optim.torch.states.loaded import Moved, check_state, counters, facts_of, told, value_for
from hp_platform import get_platform
from hp_platform.torch.internals import get_grad

Members = tuple[dict[str, Any], list[torch.Tensor], list[str]]
"""A group, parameters of it that have one dtype and device, and their names."""

_data_ptr = torch.Tensor.data_ptr
_is_contiguous = torch.Tensor.is_contiguous
_numel = torch.Tensor.numel
_END: tuple[tuple[None], ...] = ((None,),)
_FUSED = ("cpu", "cuda")


class Block:
    """The parameters of a group with one dtype on one device, and their states in one buffer each.

    A step is two calls: `look`, after which nothing is refused any more, and `step`.

    Args:
        group: hyperparameters, read at each step.
        parameters: in the group's order; DTensors count as their local tensors here.
        names: of the parameters.
        state: the optimizer's; what is in it is copied, and replaced by views.

    Raises:
        ValueError: a state that is not laid out as its parameter.
    """

    owner = "AdamW"

    def __init__(self, group: dict[str, Any], parameters: list[torch.Tensor], names: list[str], state: Any) -> None:
        self.group, self.parameters, self.names = group, parameters, names
        self.keys = self._state_keys(state)
        self.facts = list(map(facts_of, parameters))
        self.sizes = [parameter.numel() for parameter in parameters]
        self.filled = [parameter for parameter, size in zip(parameters, self.sizes) if size]
        self.offsets = [0]
        for size in self.sizes:
            self.offsets.append(self.offsets[-1] + self._extent(size))
        device = parameters[0].device
        self.itemsize = parameters[0].element_size()
        self.flat = {key: self._memory(key) for key in self.keys}
        self.shown_flat = self._shown_memory()
        self.fused = _fused(group, device)
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)  # bfloat16 counts to 256
        self.steps = torch.zeros(len(parameters), dtype=dtype, device=device if self.fused else "cpu")
        self.states = [state[parameter] for parameter in parameters]
        self._lay_out()

    def _state_keys(self, state: Any) -> list[str]:
        """Name the states."""
        keys = ["exp_avg", "exp_avg_sq"]
        if self.group["amsgrad"] or any("max_exp_avg_sq" in state.get(each, ()) for each in self.parameters):
            keys.append("max_exp_avg_sq")
        return keys

    def _shaped_keys(self) -> list[str]:
        """Name the states that may be set and have a parameter's shape."""
        return self.keys

    def _extent(self, elements: int) -> int:
        """Return how far it is from a parameter's states to the next one's."""
        return elements

    def _memory(self, key: str) -> torch.Tensor:
        """Allocate memory for a state, of zeros."""
        like = self.parameters[0]
        return torch.zeros(self.offsets[-1], dtype=like.dtype, device=like.device)

    def _shown_memory(self) -> dict[str, torch.Tensor]:
        """Return the memory of which the optimizer's state has views."""
        return self.flat

    def _lay_out(self) -> None:
        """Put views into the state, with the values that it had, or zeros."""
        self._check_states()
        self.contiguous = all(map(_is_contiguous, self.filled))
        self.strides = [parameter.stride() for parameter in self.parameters]
        self.cuts: list[int] | None = None
        self.places: list[int] = []
        self.kinds: list[type] = []
        self.views: dict[str, list[torch.Tensor]] = {
            key: [self._view(flat, number) for number in range(len(self.parameters))]
            for key, flat in self.shown_flat.items()
        }
        for key, views in self.views.items():
            values = [value_for(view, state.get(key), self.shown_flat[key]) for state, view in zip(self.states, views)]
            for state, view, value in zip(self.states, views, values):
                if value is None:
                    view.zero_()
                elif value is not view:
                    view.copy_(value)
                state[key] = view
        self.steps.copy_(counters(self.owner, self.names, self.states, self.steps))
        for number, state in enumerate(self.states):
            state["step"] = self.steps[number]
        self._note_shown()
        self._note_steps()

    def _check_states(self) -> None:
        """Refuse states that are not laid out as their parameters."""
        if list(map(facts_of, self.parameters)) != self.facts:
            raise Moved
        for name, parameter, state in zip(self.names, self.parameters, self.states):
            for key in self._shaped_keys():
                check_state(self.owner, name, parameter, key, state.get(key))

    def _note_shown(self) -> None:
        """Take note of what is in the state, of which nothing else may be there in the next step."""
        self.shown: list[Any] = [*chain.from_iterable(map(dict.values, self.states)), None]

    def _view(self, flat: torch.Tensor, number: int) -> torch.Tensor:
        """Return a parameter's part of a state."""
        parameter = self.parameters[number]
        return wrapped_like(view_like(flat[self.offsets[number] : self.offsets[number + 1]], parameter), parameter)

    def _note_steps(self) -> None:
        self.counts: list[float] = self.steps.tolist()

    def rejoin(self, group: dict[str, Any], state: Any) -> None:
        """Go on with another dictionary of hyperparameters, and of states.

        Args:
            group: of the same parameters.
            state: the optimizer's.
        """
        self.group, self.states = group, [state[parameter] for parameter in self.parameters]
        self.adopt()

    def adopt(self) -> None:
        """Take over states that were set from outside, and memory in which elements lie in another order."""
        if not self.contiguous or not all(map(_is_contiguous, self.filled)):
            if [parameter.stride() for parameter in self.parameters] != self.strides:
                self._check_states()
                self.flat = {key: torch.zeros_like(flat) for key, flat in self.flat.items()}
                self.shown_flat = self._shown_memory()
                self._lay_out()
        if not self._shows():
            self._lay_out()

    def _shows(self) -> bool:
        """Tell whether the states are what was put into them, and nothing else."""
        values = chain.from_iterable(chain(map(dict.values, self.states), _END))
        return all(map(is_, values, self.shown))

    def look(self) -> list[torch.Tensor]:
        """Find the gradients, and take over what was set from outside; no value of a parameter or state changes.

        Returns:
            The memory of each run's gradients.

        Raises:
            RuntimeError: a sparse gradient, or one that is not as its parameter; memory with gaps.
            Moved: see there.
        """
        gradients: list[Any] = list(map(get_grad, self.parameters))
        kinds = list(map(type, gradients))
        if kinds != self.kinds:
            self._note_present(kinds, gradients)
        places = list(map(_data_ptr, self.trained))
        if places != self.places and list(map(facts_of, self.parameters)) != self.facts:
            raise Moved
        self.adopt()
        if self.group["amsgrad"] and "max_exp_avg_sq" not in self.keys:
            self._add_largest()
        if kinds != self.kinds:  # laid out anew
            self._note_present(kinds, gradients)
        if not self.present:
            return []
        chosen = gradients if self.all_filled else [gradients[at] for at in self.present]
        if not self.contiguous or not all(map(_is_contiguous, chosen)):
            chosen = self._like_parameters(self.present, chosen)
        self._join(places, chosen)
        return [
            torch.as_strided(chosen[first], (size,), (1,), chosen[first].storage_offset())
            for first, size in zip(self.runs.first, self.runs.sizes)
        ]

    def step(self, gradients: list[torch.Tensor], scale: torch.Tensor | None, found: torch.Tensor | None) -> None:
        """Update the parameters that have gradients.

        Args:
            gradients: see `look`.
            scale: what the gradients are divided by; see ``torch.amp.GradScaler``.
            found: one where some gradient is not finite, which leaves everything as it is.
        """
        self._count()
        if gradients:
            self.runs.update(gradients, self.group, self.fused, scale, found)
        if found is not None:
            self.steps -= self.counted * found.to(self.steps.device)
            if not self.all_present:
                self._note_steps()

    def _note_present(self, kinds: list[type], gradients: list[Any]) -> None:
        """Take note of which parameters have gradients."""
        for name, gradient in zip(self.names, gradients):
            if gradient is not None and gradient.layout is not torch.strided:
                raise sparse_gradient(self.owner, name)
        self.kinds = kinds
        self.have = [at for at, gradient in enumerate(gradients) if gradient is not None]
        self.present = [at for at in self.have if self.sizes[at]]
        self.trained = [self.parameters[at] for at in self.present]
        self.all_present = len(self.have) == len(gradients)
        self.all_filled = len(self.present) == len(gradients)
        self.counted = torch.zeros_like(self.steps)
        self.counted[self.have] = 1
        self.cuts = None

    def _count(self) -> None:
        """Count a step of the parameters that have gradients."""
        self.steps += self.counted
        if not self.all_present:  # else all are as far from each other as before
            for at in self.have:
                self.counts[at] += 1

    def _like_parameters(self, present: list[int], gradients: list[Any]) -> list[Any]:
        """Return gradients whose elements lie in memory as the parameters' do."""
        made = []
        for at, gradient in zip(present, gradients):
            parameter = self.parameters[at]
            if gradient.layout is not torch.strided:
                raise sparse_gradient(self.owner, self.names[at])
            strides = parameter.stride() if _dense(parameter) else torch.empty(parameter.shape, device="meta").stride()
            if gradient.stride() != strides and gradient.shape == parameter.shape:
                copy = torch.empty_strided(parameter.shape, strides, dtype=gradient.dtype, device=gradient.device)
                gradient = copy.copy_(gradient)
            made.append(gradient)
        return made

    def _add_largest(self) -> None:
        """Make the state that ``amsgrad`` needs, which was switched on."""
        self.keys.append("max_exp_avg_sq")
        self.flat["max_exp_avg_sq"] = torch.zeros_like(self.flat["exp_avg_sq"])
        self.shown_flat = self._shown_memory()
        self._lay_out()

    def _join(self, places: list[int], gradients: list[Any]) -> None:
        """Join parameters that touch, whose gradients touch in the same way; see Note [Runs]."""
        others = list(map(_data_ptr, gradients))
        if self.cuts is not None and places == self.places and self._as_before(others, gradients):
            return
        if list(map(facts_of, self.parameters)) != self.facts:
            raise Moved
        for at, gradient in zip(self.present, gradients):
            if facts_of(gradient) != self.facts[at]:
                raise RuntimeError(
                    f"{self.owner}: the gradient of {self.names[at]!r} is a {told(facts_of(gradient))}, the parameter a"
                    f" {told(self.facts[at])}. Compute gradients anew where the memory of a parameter is replaced"
                )
        cuts = self._cuts(places, others, gradients)
        if cuts != self.cuts or places != self.places:
            self.runs = self._joined(cuts)
        self.cuts, self.places, self.others = cuts, places, others

    def _as_before(self, others: list[int], gradients: list[Any]) -> bool:
        """Tell whether gradients can be joined as in the last step, if not at the same addresses."""
        runs = self.runs
        if len(runs.first) == len(others):  # each parameter by itself
            return list(map(_numel, gradients)) == runs.sizes
        if others != self.others:
            sizes = [stop - start for start, stop in zip(runs.first, [*runs.first[1:], len(others)])]
            shifts = [others[start] - self.others[start] for start in runs.first]
            moved = chain.from_iterable(map(repeat, shifts, sizes))
            if others != list(map(add, self.others, moved)):
                return False
        return all(
            gradients[first].untyped_storage().nbytes() >= (gradients[first].storage_offset() + size) * self.itemsize
            for first, size in zip(runs.first, runs.sizes)
        )

    def _cuts(self, places: list[int], others: list[int], gradients: list[Any]) -> list[int]:
        """List where runs begin: parameters, counted among those with gradients."""
        storages = [
            (parameter.untyped_storage().data_ptr(), gradient.untyped_storage().data_ptr())
            for parameter, gradient in zip(self.trained, gradients)
        ]
        cuts = [0]
        for n in range(1, len(places)):
            at, before = self.present[n], self.present[n - 1]
            span = self.sizes[before] * self.itemsize
            if (
                places[n] != places[n - 1] + span
                or others[n] != others[n - 1] + span
                or storages[n] != storages[n - 1]  # allocators put tensors next to each other, too
                or self.offsets[at] != self.offsets[before] + self.sizes[before]
                or self.counts[at] != self.counts[before]
            ):
                cuts.append(n)
        return cuts

    def _joined(self, cuts: list[int]) -> Runs:
        """Return the runs that begin at these parameters, counted among those with gradients."""
        memory, steps = [], []
        for start, stop in zip(cuts, [*cuts[1:], len(self.present)]):
            first, last = self.present[start], self.present[stop - 1]
            low, high = self.offsets[first], self.offsets[last + 1]
            memory.append([self._own_memory(first, high - low), *(self.flat[key][low:high] for key in self.keys)])
            steps.append(self.steps[first])
        return Runs.of(cuts, memory, steps)

    def _own_memory(self, first: int, elements: int) -> torch.Tensor:
        """Return elements that begin with a parameter's, as they lie in memory."""
        parameter = self.parameters[first]
        if not _dense(parameter):
            raise RuntimeError(
                f"AdamW: the elements of parameter {self.names[first]!r} are not next to each other in memory"
                f" (shape {tuple(parameter.shape)}, strides {parameter.stride()}). Make it contiguous"
            )
        return torch.as_strided(parameter, (elements,), (1,), parameter.storage_offset())


class Resident:
    """Blocks that stay on the device."""

    def added(self, blocks: list[Block], members: list[Members], state: Any) -> list[Block]:
        """Return the blocks, and those of more parameters.

        Args:
            blocks: that there are.
            members: the parameters of the others.
            state: the optimizer's; what is in it is copied, and replaced by views.
        """
        return [*blocks, *(Block(*each, state) for each in members)]

    def held(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a state that is to be loaded, without what torch would move or convert."""
        return state_dict

    def settle(self) -> None:
        """Wait until the states can be read."""

    def visit(self, blocks: list[Block], update: Callable[[Block], None]) -> None:
        """Update each block."""
        for block in blocks:
            update(block)


def view_like(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return memory as a tensor of a parameter's shape, whose elements lie as the parameter's do.

    Args:
        flat: as many elements.
        parameter: plain, or a DTensor, which counts as its local tensor here.
    """
    if flat.numel() and _dense(parameter):
        return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())
    return flat.view(parameter.shape)


def wrapped_like(view: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a local tensor as a DTensor of a parameter's layout, if the parameter is a DTensor."""
    return wrap(view, parameter._spec) if isinstance(parameter, DTensor) else view


def _dense(tensor: torch.Tensor) -> bool:
    """Tell whether the elements fill their memory, in any order of the dims."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride()), key=lambda each: each[1]):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _fused(group: dict[str, Any], device: torch.device) -> bool:
    if group["fused"] is not None:
        return bool(group["fused"])
    return not group["foreach"] and get_platform().devices.kind_of(device) in _FUSED
