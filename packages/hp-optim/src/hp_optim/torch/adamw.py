"""AdamW on blocks of memory; see Note [Runs] in `hp_optim.torch.states.blocks`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from hp_dtensor.torch.extend import refuse_foreign
from hp_optim.options import broken_gradient, check_group, check_once, check_options, parameter_names
from hp_optim.torch.finiteness import broken_gradients
from hp_optim.torch.states.blocks import Block, Members, Resident
from hp_optim.torch.states.loaded import Moved, Roster, begin_anew, compact, has_memory
from hp_platform.torch.internals import without_torch_function

_KEPT = ("skip_nonfinite", "_places", "_step_supports_amp_scaling")
T = TypeVar("T")


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW`` that updates neighbouring parameters as one tensor, with states from the beginning.

    Parameters may be plain tensors or DTensors of any layout; states are sharded as they are, and no step
    communicates. Every parameter has its state from construction, so that all ranks have the same keys. State dicts are
    those of ``torch.optim.AdamW``, which loads them and whose it loads. Weights have the same bits for any layout.

    Args:
        params: parameters, pairs of a name and a parameter, or groups of either.
        lr: the learning rate; a tensor of one element is read at each step.
        betas: of the averages of gradients and of their squares.
        eps: added to the denominator.
        weight_decay: decoupled.
        amsgrad: divide by the largest average so far.
        maximize: ascend.
        foreach: use the foreach implementation. Default: where there is no fused one.
        fused: use the fused implementation. Default: on CPU and CUDA. With True a GradScaler lets it divide.
        skip_nonfinite: before a step look whether all gradients are finite on all ranks, by an all-reduce of four
            numbers; where they are not, all ranks warn with the parameters' names and leave weights and states as they
            are. Ranks that differ in hyperparameters, or that can't step, are told to all, too. After
            `hp_fsdp.clip_grad_norm_` it is not needed: step only if the norm, the same on all ranks, is finite.

    Raises:
        ValueError: a number out of its range, an empty group, a parameter in two groups.
        TypeError: a parameter that is a DTensor of torch's own, or no floating-point tensor.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        maximize: bool = False,
        *,
        foreach: bool | None = None,
        fused: bool | None = None,
        skip_nonfinite: bool = False,
    ) -> None:
        self.skip_nonfinite = skip_nonfinite
        self._blocks: list[Block] = []
        self._roster = Roster()
        self._without_memory: list[torch.Tensor] = []
        self._places: Any = self._placing()
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, foreach=foreach, fused=fused)

    _keys: tuple[str, ...] = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    """States that have a parameter's shape."""

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has; it lays its states out when it needs them."""
        kept = {key: value for key, value in self.__dict__.items() if key in _KEPT}
        return {**super().__getstate__(), **kept, "state": compact(self.state)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_places" in state:  # else it is called by load_state_dict
            self._blocks, self._roster, self._without_memory = [], Roster(), []

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as of ``torch.optim.Optimizer``; they get their states.

        Raises:
            ValueError, TypeError: see `AdamW`; the optimizer is as it was.
        """
        current = self._roster.holds(self.param_groups, self.state)
        super().add_param_group(param_group)
        number = len(self.param_groups) - 1
        try:
            check_group(type(self).__name__, self.param_groups[number], number, known=self.defaults)
            self._check(self.param_groups[number], number)
        except Exception:
            del self.param_groups[number]
            raise
        if current:
            self._lay_out(self._blocks, [number])
        else:
            self._current(Block.adopt)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as of ``torch.optim.Optimizer``."""
        self._places.settle()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, this class's or ``torch.optim.AdamW``'s, into the memory of the present one.

        Raises:
            ValueError, TypeError: a state that is not laid out as its parameter, a number out of its range; the
                optimizer is as it was.
        """
        before = {"state": self.state, "param_groups": self.param_groups}
        hold = self.register_load_state_dict_pre_hook(lambda _, loaded: self._places.held(loaded))  # after all others
        try:
            super().load_state_dict(state_dict)
            for number, group in enumerate(self.param_groups):
                self._check(group, number)
            self._lay_out([], range(len(self.param_groups)))
        except Exception:
            self.__dict__.update(before)
            raise
        finally:
            hold.remove()

    def _placing(self) -> Resident:
        """Return what makes blocks of parameters."""
        return Resident()

    def _check(self, group: dict[str, Any], number: int) -> None:
        """Raise for hyperparameters and parameters that are not meant for this optimizer."""
        name = type(self).__name__
        check_options(name, group, number, self.defaults)
        for key, meant in (("differentiable", False), ("decoupled_weight_decay", True)):
            if group.get(key, meant) is not meant:
                raise ValueError(f"{name}: group {number} has {key}={group[key]}; give it to torch.optim.AdamW")
        for label, parameter in zip(parameter_names(group, number), group["params"]):
            refuse_foreign(parameter, f"AdamW: parameter {label!r}")
            if not parameter.is_floating_point():
                raise TypeError(
                    f"AdamW: parameter {label!r} is of {parameter.dtype}, and only floating-point ones are updated."
                    " Leave it out, or give it to torch.optim.AdamW"
                )

    def _lay_out(self, blocks: list[Block], numbers: Iterable[int]) -> None:
        """Lay states of groups out, with the values that there are; what has no memory yet is left out."""
        with torch.no_grad(), without_torch_function():
            members = [each for number in numbers for each in self._members(number)]
            self._blocks = self._places.added(blocks, members, self.state)
        self._roster = Roster(self.param_groups, self.state)
        self._without_memory = [each for group in self.param_groups for each in group["params"] if not has_memory(each)]

    def _members(self, number: int) -> list[Members]:
        """Sort a group's parameters by what can be in one block."""
        group = self.param_groups[number]
        alike: dict[Any, Members] = {}
        for name, parameter in zip(parameter_names(group, number), group["params"]):
            if has_memory(parameter):
                _, parameters, names = alike.setdefault(self._kind(parameter), (group, [], []))
                parameters.append(parameter)
                names.append(name)
        return list(alike.values())

    def _kind(self, parameter: torch.Tensor) -> tuple[Any, ...]:
        """Return what parameters of a block have in common."""
        return parameter.dtype, parameter.device

    def _complete(self) -> list[Block]:
        """Return what all parameters are in; see Note [Roster] in `hp_optim.torch.states.loaded`."""
        got_memory = self._without_memory and any(has_memory(each) for each in self._without_memory)
        if got_memory or not self._roster.holds(self.param_groups, self.state):
            self._renew()
        return self._blocks

    def _renew(self) -> None:
        """Lay out the groups that have other parameters than before; the blocks of the rest go on."""
        kept: list[tuple[Block, dict[str, Any]]] = []
        numbers = []
        check_once(type(self).__name__, self.param_groups)
        for number, group in enumerate(self.param_groups):
            self._check(group, number)
            before = self._roster.groups[number] if self._roster.has(number, group) else None
            own = [block for block in self._blocks if block.group is before]
            if sum(len(block.parameters) for block in own) == sum(has_memory(each) for each in group["params"]):
                kept += [(block, group) for block in own]
            else:
                numbers.append(number)
        for block, group in kept:
            block.rejoin(group, self.state)
        self._lay_out([block for block, _ in kept], numbers)

    def _current(self, call: Callable[[Block], T]) -> list[tuple[Block, T]]:
        """Call something of each block, and return what it returns; all blocks have the states that there are."""
        with torch.no_grad(), without_torch_function():
            try:
                return [(block, call(block)) for block in self._complete()]
            except Moved:
                for number, group in enumerate(self.param_groups):
                    for name, parameter in zip(parameter_names(group, number), group["params"]):
                        begin_anew("AdamW", name, parameter, self.state.get(parameter, {}), self._keys)
                self._lay_out([], range(len(self.param_groups)))
                return [(block, call(block)) for block in self._blocks]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters.

        Args:
            closure: computes the loss again and its gradients.

        Raises:
            RuntimeError: a sparse gradient, states of steps with another shape; nothing is changed.
            ValueError: a state that was set and is not laid out as its parameter.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        looked: list[tuple[Block, list[torch.Tensor]]] = []
        problems: list[Exception] = []
        try:
            looked = self._current(Block.look)
        except Exception as problem:  # whatever it is, the others have to hear of it
            if not self.skip_nonfinite:
                raise
            problems.append(problem)
        with without_torch_function():
            if self.skip_nonfinite and self._skips(problems):
                return loss
            gradients = {id(block): own for block, own in looked}
            self._places.visit(self._blocks, lambda block: block.step(gradients[id(block)], scale, found))
        return loss

    def _skips(self, problems: list[Exception]) -> bool:
        """Warn where some rank has a gradient that is not finite; raise where one has a problem."""
        broken = broken_gradients(type(self).__name__, self.param_groups, problems)
        if broken:
            warnings.warn(broken_gradient(type(self).__name__, broken), RuntimeWarning, stacklevel=5)
        return bool(broken)
