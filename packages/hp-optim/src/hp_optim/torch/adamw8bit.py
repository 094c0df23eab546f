"""AdamW whose states have eight bits an element; see Note [Codes] in `hp_optim.torch.states.quantized`."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import torch

from hp_dtensor.torch.extend import DTensor
from hp_optim.options import parameter_names
from hp_optim.torch.adamw import AdamW
from hp_optim.torch.states.blocks import Block, Members, Resident, view_like, wrapped_like
from hp_optim.torch.states.loaded import INTO_ANY_LAYOUT
from hp_optim.torch.states.momenta import held, release
from hp_optim.torch.states.quantized import (
    BLOCK,
    CODED_NUMEL,
    check_blocks,
    decoded_mean,
    decoded_square,
    dithers,
    encoded_mean,
    encoded_square,
    nearest,
    update,
)
from hp_platform.torch.internals import without_torch_function

_CODES = {"exp_avg": "exp_avg_code", "exp_avg_sq": "exp_avg_sq_code"}
_SCALES = {"exp_avg": "exp_avg_scale", "exp_avg_sq": "exp_avg_sq_scale"}
_DECODE = {"exp_avg": decoded_mean, "exp_avg_sq": decoded_square}


class AdamW8bit(AdamW):
    """`AdamW` with states of 2.03 bytes an element in place of 8: codes of eight bits, and a scale for 256 of them.

    Blocks of 256 are those of the whole parameter, so the codes do not depend on the layout and the number of ranks.
    Parameters of fewer than 4,096 elements have states in float32. The step is compiled where torch can.

    ``state_dict()`` has the states of ``torch.optim.AdamW``, in float32: they load into it, and into any layout, and
    loading them here gives the same codes. ``state_dict(coded=True)`` has the codes, for the layout that they have now.

    Args:
        params: parameters, pairs of a name and a parameter, or groups of either.
        lr: the learning rate; a tensor of one element is read at each step.
        betas: of the averages of gradients and of their squares.
        eps: added to the denominator.
        weight_decay: decoupled.
        maximize: ascend.
        compiled: compile the step; once a process, some seconds. Default: on CPU and CUDA; where it fails, a warning.

    Raises:
        ValueError: as `AdamW`; a parameter whose layout cuts blocks of 256 elements.
        TypeError: as `AdamW`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        maximize: bool = False,
        *,
        compiled: bool | None = None,
    ) -> None:
        self._compiled = compiled
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize)

    _keys = ("exp_avg", "exp_avg_sq", *_CODES.values())

    def _placing(self) -> Resident:
        return CodedBlocks(self._compiled)

    def _kind(self, parameter: torch.Tensor) -> tuple[Any, ...]:
        return *super()._kind(parameter), _elements(parameter) >= CODED_NUMEL

    def _check(self, group: dict[str, Any], number: int) -> None:
        super()._check(group, number)
        if group["amsgrad"]:
            raise amsgrad(f"group {number}")
        for name, parameter in zip(parameter_names(group, number), group["params"]):
            if isinstance(parameter, DTensor) and parameter.numel() >= CODED_NUMEL:
                spec = parameter._spec
                check_blocks(name, spec.shape, spec.placements, tuple(spec.mesh.shape))

    def state_dict(self, *, coded: bool = False) -> dict[str, Any]:
        """Return the state; see `AdamW8bit`.

        Args:
            coded: the codes and their scales, not the values in float32.
        """
        self._current(Block.adopt)
        packed = super().state_dict()
        if coded:
            return packed
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        with torch.no_grad(), without_torch_function():
            states = {at: _decoded(state, parameters[at]) for at, state in packed["state"].items()}
        return {**packed, "state": states}


def _decoded(state: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """Return a parameter's state with values in place of codes."""
    if _CODES["exp_avg"] not in state:
        return state
    values: dict[str, Any] = {}
    for key, decode in _DECODE.items():
        scales = state[_SCALES[key]]
        codes = torch.as_strided(state[_CODES[key]], (len(scales) * BLOCK,), (1,))
        flat = decode(codes.view(-1, BLOCK), scales).view(-1)[: parameter.numel()]
        values[key] = wrapped_like(view_like(flat, parameter), parameter)
    return {**values, "step": state["step"]}


def amsgrad(what: str) -> ValueError:
    """Return the error for a group, or the group of a parameter, with ``amsgrad``."""
    return ValueError(f"AdamW8bit: {what} has amsgrad=True, which takes one more state; use AdamW")


class CodedBlocks(Resident):
    """Blocks of codes, and blocks of float32 for what has few elements.

    Args:
        compiled: compile the step.
    """

    def __init__(self, compiled: bool | None) -> None:
        self.compiled = compiled

    def added(self, blocks: list[Block], members: list[Members], state: Any) -> list[Block]:
        """Return the blocks, and those of more parameters; see `Resident`."""
        new: list[Block] = []
        for group, parameters, names in members:
            for parameter in parameters:
                release(state[parameter])
            if _elements(parameters[0]) >= CODED_NUMEL:
                new.append(CodedBlock((group, parameters, names), state, self.compiled))
            else:
                new.append(SmallBlock(group, parameters, names, state))
        return [*blocks, *new]

    def held(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """See `Resident`."""
        return held(state_dict, {*_CODES, *_CODES.values(), *_SCALES.values()})


def _elements(parameter: torch.Tensor) -> int:
    return prod(parameter._spec.shape) if isinstance(parameter, DTensor) else parameter.numel()


class SmallBlock(Block):
    """A block whose states are not coded."""

    owner = "AdamW8bit"

    def _state_keys(self, state: Any) -> list[str]:
        return ["exp_avg", "exp_avg_sq"]

    def _add_largest(self) -> None:
        raise amsgrad(f"the group of {self.names[0]!r}")


class CodedBlock(SmallBlock):
    """A block whose states are codes and scales; every parameter begins with a block of 256 elements.

    Args:
        members: the group, its parameters and their names.
        state: the optimizer's.
        compiled: compile the step.
    """

    def __init__(self, members: Members, state: Any, compiled: bool | None) -> None:
        self.compiled = compiled
        super().__init__(*members, state)

    def _state_keys(self, state: Any) -> list[str]:
        return [*_CODES.values(), *_SCALES.values()]

    def _shaped_keys(self) -> list[str]:
        return [*_CODES, *_CODES.values()]

    def _extent(self, elements: int) -> int:
        return -(-elements // BLOCK) * BLOCK

    def _memory(self, key: str) -> torch.Tensor:
        device = self.parameters[0].device
        if key in _SCALES.values():
            return torch.zeros(self.offsets[-1] // BLOCK, dtype=torch.float32, device=device)
        dtype = torch.int8 if key == _CODES["exp_avg"] else torch.uint8
        return torch.zeros(self.offsets[-1], dtype=dtype, device=device)

    def _view(self, flat: torch.Tensor, number: int) -> torch.Tensor:
        if flat.is_floating_point():
            return flat[self.offsets[number] // BLOCK : self.offsets[number + 1] // BLOCK]
        return super()._view(flat, number)

    def _check_states(self) -> None:
        for name, parameter, state, size in zip(self.names, self.parameters, self.states, self.sizes):
            if not parameter.is_contiguous():
                raise RuntimeError(
                    f"AdamW8bit: parameter {name!r} of shape {tuple(parameter.shape)} and strides {parameter.stride()}"
                    " is not contiguous, and blocks follow its rows. Make it contiguous, or give it to AdamW"
                )
            for key in _SCALES.values():
                if key in state and len(state[key]) != self._extent(size) // BLOCK:
                    raise ValueError(
                        f"AdamW8bit: the coded state of {name!r} has {len(state[key])} blocks, and this rank"
                        f" {self._extent(size) // BLOCK}: it is of another layout. {INTO_ANY_LAYOUT}"
                    )
        super()._check_states()

    def _lay_out(self) -> None:
        super()._lay_out()
        coders = list(zip(_CODES, (encoded_mean, encoded_square), nearest(self.parameters[0].device)))
        for number, state in enumerate(self.states):
            for key, encode, rounding in coders:
                if key in state:
                    self._encode(number, state.pop(key), encode, rounding, key)
        self._note_shown()

    def _encode(self, number: int, value: torch.Tensor, encode: Any, rounding: torch.Tensor, key: str) -> None:
        """Take over a state that is no code."""
        parameter, low, high = self.parameters[number], self.offsets[number], self.offsets[number + 1]
        whole = torch.zeros(high - low, dtype=torch.float32, device=parameter.device)
        view_like(whole[: parameter.numel()], parameter).copy_(value)
        codes, scales = encode(whole.view(-1, BLOCK), rounding)
        self.flat[_CODES[key]][low:high] = codes.view(-1)
        self.flat[_SCALES[key]][low // BLOCK : high // BLOCK] = scales

    def _cuts(self, places: list[int], others: list[int], gradients: list[Any]) -> list[int]:
        cuts = set(super()._cuts(places, others, gradients))
        cuts.update(n for n in range(1, len(self.present)) if self.sizes[self.present[n - 1]] % BLOCK)
        return sorted(cuts)

    def _joined(self, cuts: list[int]) -> Any:
        return CodedRuns(self, cuts)


class CodedRuns:
    """Runs of parameters and of their states, as ``[blocks, 256]``; see `hp_optim.torch.states.kernel_ranges.Runs`.

    Args:
        block: whose parameters they are.
        cuts: where runs begin: parameters, counted among those with gradients.

    Attributes:
        first: the first parameter of each.
        sizes: number of elements of each.
    """

    def __init__(self, block: CodedBlock, cuts: list[int]) -> None:
        self.first, self.compiled = list(cuts), block.compiled
        self.sizes: list[int] = []
        self.steps: list[torch.Tensor] = []
        self.memory: list[list[torch.Tensor]] = []
        for start, stop in zip(cuts, [*cuts[1:], len(block.present)]):
            first, last = block.present[start], block.present[stop - 1]
            low = block.offsets[first]
            size = block.offsets[last] + block.sizes[last] - low
            high = low + block._extent(size)
            parameter = block._own_memory(first, size)
            codes = [block.flat[key][low:high].view(-1, BLOCK) for key in _CODES.values()]
            scales = [block.flat[key][low // BLOCK : high // BLOCK] for key in _SCALES.values()]
            self.sizes.append(size)
            self.steps.append(block.steps[first])
            self.memory.append([parameter, *codes, *scales])

    def update(self, gradients: list[torch.Tensor], group: dict[str, Any], *_: Any) -> None:
        """Update the parameters.

        Args:
            gradients: memory of each run.
            group: hyperparameters.
        """
        for (parameter, *states), gradient, step in zip(self.memory, gradients, self.steps):
            numbers, rounding = _numbers(group, step), dithers(step)
            others = (*rounding, numbers)
            end = parameter.numel() - parameter.numel() % BLOCK
            rows = end // BLOCK
            if group["maximize"]:
                gradient = -gradient
            if rows:
                whole = [each[:rows] for each in states]
                blocks = parameter[:end].view(-1, BLOCK), gradient[:end].view(-1, BLOCK)
                update([*blocks, *whole], others, self.compiled)
            if end < parameter.numel():
                tail, filled = parameter.new_zeros(1, BLOCK), gradient.new_zeros(1, BLOCK)
                tail[0, : parameter.numel() - end] = parameter[end:]
                filled[0, : parameter.numel() - end] = gradient[end:]
                update([tail, filled, *(each[rows:] for each in states)], others, self.compiled)
                parameter[end:] = tail[0, : parameter.numel() - end]


def _numbers(group: dict[str, Any], step: torch.Tensor) -> torch.Tensor:
    """Return the factors of a step, in float32: see `hp_optim.torch.states.quantized`."""
    beta1, beta2 = group["betas"]
    count = step.to(torch.float64)
    lr = torch.as_tensor(group["lr"], dtype=torch.float64, device=step.device)
    one = torch.ones_like(count)
    listed = [
        1 - lr * group["weight_decay"],
        lr / (1 - beta1**count),
        (1 - beta2**count) ** -0.5,
        *(one * number for number in (beta1, 1 - beta1, beta2, 1 - beta2, group["eps"])),
    ]
    return torch.stack(listed).to(torch.float32)
