"""AdamW on runs of memory: neighbouring parameters are updated as one tensor.

Note [Runs]
    The parameters of a group in `hp_fsdp.fully_shard` look into one buffer, and so do their gradients. Where two
    parameters touch, and their gradients touch in the same way, they are one *run*, which one entry of one fused call
    updates: a bucket of two hundred parameters costs what a single tensor does. States always lie in one buffer, in the
    order of the parameters, of which ``state`` has views. Any other parameters are runs of their own.

Note [Tails]
    On CPU a kernel computes whole vectors of elements, and the rest of a tensor one by one, where the compiler may
    contract a product and a sum. So the last elements of a shard would have other bits than the same elements in the
    middle of another. They are copied to where a whole vector follows, and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import is_, itemgetter
from typing import Any

import torch
from torch.optim.adamw import adamw

from hp_dtensor.torch.extend import DTensor, refuse_foreign, wrap
from hp_optim.options import check_number, parameter_names, sparse_gradient

__all__ = ["AdamW"]

_plain = torch._C.DisableTorchFunctionSubclass
_get_grad = torch.Tensor.grad.__get__  # type: ignore[attr-defined]
_data_ptr = torch.Tensor.data_ptr
_is_contiguous = torch.Tensor.is_contiguous
_VECTOR = 64
"""Elements that every kernel divides into whole vectors."""
_FUSED = ("cpu", "cuda")
_fused_kernel: Any = torch._fused_adamw_
_listed_kernel: Any = adamw


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
    ) -> None:
        self._blocks: list[_Block] = []
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, foreach=foreach, fused=fused)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as of ``torch.optim.Optimizer``; they get their states.

        Raises:
            ValueError, TypeError: see `AdamW`; the optimizer is as it was.
        """
        super().add_param_group(param_group)
        number = len(self.param_groups) - 1
        try:
            _check(self.param_groups[number], number)
        except Exception:
            del self.param_groups[number]
            raise
        self._blocks += self._laid_out(number)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, this class's or ``torch.optim.AdamW``'s, into the memory of the present one."""
        super().load_state_dict(state_dict)
        self._blocks = [block for number in range(len(self.param_groups)) for block in self._laid_out(number)]

    def _laid_out(self, number: int) -> list[_Block]:
        """Lay a group's states out, with the values that there are; what has no memory yet is left out."""
        group = self.param_groups[number]
        names = parameter_names(group, number)
        alike: dict[Any, list[int]] = {}
        with torch.no_grad(), _plain():
            for at, parameter in enumerate(group["params"]):
                if not parameter.is_meta:
                    alike.setdefault((parameter.dtype, parameter.device), []).append(at)
            return [
                _Block(group, [group["params"][at] for at in numbers], [names[at] for at in numbers], self.state)
                for numbers in alike.values()
            ]

    def _complete(self) -> list[_Block]:
        """Return what all parameters are in; some may have got memory since."""
        if sum(len(block.parameters) for block in self._blocks) != sum(len(g["params"]) for g in self.param_groups):
            self._blocks = [block for number in range(len(self.param_groups)) for block in self._laid_out(number)]
        return self._blocks

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the parameters.

        Args:
            closure: computes the loss again and its gradients.

        Raises:
            RuntimeError: a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for block in self._complete():
            with _plain():
                block.step(scale, found)
        return loss


def _check(group: dict[str, Any], number: int) -> None:
    if not group["params"]:
        raise ValueError(f"AdamW: group {number} has no parameters; leave it out")
    check_number("AdamW", "lr", group["lr"])
    check_number("AdamW", "weight_decay", group["weight_decay"])
    for name, parameter in zip(parameter_names(group, number), group["params"]):
        refuse_foreign(parameter, f"AdamW: parameter {name!r}")
        if not parameter.is_floating_point():
            raise TypeError(
                f"AdamW: parameter {name!r} is of {parameter.dtype}, and only floating-point ones are updated. Freeze"
                " it, or give it to torch.optim.AdamW"
            )


@dataclass(frozen=True)
class _Runs:
    """Runs of a block and what does not change from step to step; see Note [Runs].

    Attributes:
        first: the first parameter of each.
        sizes: number of elements of each.
        ends: how many of them are whole vectors.
        full: the runs that have whole vectors.
        left: the runs that have elements behind them; see Note [Tails].
        parameters: memory that is updated, one tensor for each run, whole vectors of it.
        states: the same of each state.
        steps: the step counter of each.
        tails: what is left of parameters, then of each state.
        rows: where `tails` are copied, of parameters, then of gradients, then of each state.
        scratch: the same with whole vectors.
    """

    first: list[int]
    sizes: list[int]
    ends: list[int]
    full: list[int]
    left: list[int]
    parameters: list[torch.Tensor]
    states: list[list[torch.Tensor]]
    steps: list[torch.Tensor]
    tails: list[list[torch.Tensor]]
    rows: list[list[torch.Tensor]]
    scratch: list[torch.Tensor]


class _Block:
    """The parameters of a group with one dtype on one device, and their states in one buffer each.

    Args:
        group: hyperparameters, read at each step.
        parameters: in the group's order; DTensors count as their local tensors here.
        names: of the parameters.
        state: the optimizer's; what is in it is copied, and replaced by views.
    """

    def __init__(self, group: dict[str, Any], parameters: list[torch.Tensor], names: list[str], state: Any) -> None:
        self.group, self.parameters, self.names = group, parameters, names
        self.keys = ["exp_avg", "exp_avg_sq"]
        if group["amsgrad"] or any("max_exp_avg_sq" in state.get(parameter, ()) for parameter in parameters):
            self.keys.append("max_exp_avg_sq")
        self.sizes = [parameter.numel() for parameter in parameters]
        self.offsets = [0]
        for size in self.sizes:
            self.offsets.append(self.offsets[-1] + size)
        device = parameters[0].device
        self.itemsize = parameters[0].element_size()
        self.flat = {key: torch.zeros(self.offsets[-1], dtype=parameters[0].dtype, device=device) for key in self.keys}
        self.fused = _fused(group, device)
        self.steps = torch.zeros(len(parameters), device=device if self.fused else "cpu")
        self.states = [state[parameter] for parameter in parameters]
        self._lay_out()

    def _lay_out(self) -> None:
        """Put views into the state, with the values that it had."""
        self.contiguous = all(map(_is_contiguous, self.parameters))
        self.strides = [parameter.stride() for parameter in self.parameters]
        self.cuts: list[int] | None = None
        self.cut_places: list[int] = []
        self.kinds: list[type] = []
        self.views: dict[str, list[torch.Tensor]] = {key: [] for key in (*self.keys, "step")}
        for number, (parameter, state) in enumerate(zip(self.parameters, self.states)):
            strides = parameter.stride() if _dense(parameter) else None
            for key in self.keys:
                place = self.flat[key][self.offsets[number] : self.offsets[number + 1]]
                view = place.view(parameter.shape)
                if strides is not None and self.sizes[number]:
                    view = place.as_strided(parameter.shape, strides, place.storage_offset())
                if key in state:
                    view.copy_(state[key])
                state[key] = wrap(view, parameter._spec) if isinstance(parameter, DTensor) else view
                self.views[key].append(state[key])
            counter = self.steps[number]
            if "step" in state:
                counter.copy_(torch.as_tensor(state["step"]))
            state["step"] = counter
            self.views["step"].append(counter)
        self._note_steps()

    def _note_steps(self) -> None:
        self.counts: list[float] = self.steps.tolist()

    def _adopt(self) -> None:
        """Take over states that were set from outside, and memory in which elements lie in another order."""
        if not self.contiguous or not all(map(_is_contiguous, self.parameters)):
            if [parameter.stride() for parameter in self.parameters] != self.strides:
                self.flat = {key: torch.zeros_like(flat) for key, flat in self.flat.items()}
                self._lay_out()
        for key, views in self.views.items():
            if not all(map(is_, map(itemgetter(key), self.states), views)):
                for state, view in zip(self.states, views):
                    if state[key] is not view:
                        view.copy_(torch.as_tensor(state[key]).to(view.dtype))
                        state[key] = view
                self._note_steps()
                self.cuts = None

    def step(self, scale: torch.Tensor | None, found: torch.Tensor | None) -> None:
        """Update the parameters that have gradients.

        Args:
            scale: what the gradients are divided by; see ``torch.amp.GradScaler``.
            found: one where some gradient is not finite, which leaves everything as it is.
        """
        self._adopt()
        gradients: list[Any] = list(map(_get_grad, self.parameters))
        kinds = list(map(type, gradients))
        if kinds != self.kinds:
            self._note_present(kinds, gradients)
        if self.group["amsgrad"] and len(self.keys) == 2:
            self._add_largest()
        self._count()
        if self.present:
            chosen = [gradients[at] for at in self.present]
            if not self.contiguous or not all(map(_is_contiguous, chosen)):
                chosen = self._like_parameters(self.present, chosen)
            runs = self._runs(chosen)
            parts = [
                torch.as_strided(chosen[first], (size,), (1,), chosen[first].storage_offset())
                for first, size in zip(runs.first, runs.sizes)
            ]
            self._update(runs, parts, scale, found)
        if found is not None:
            self.steps -= self.counted * found.to(self.steps.device)
            if not self.all_present:
                self._note_steps()

    def _note_present(self, kinds: list[type], gradients: list[Any]) -> None:
        """Take note of which parameters have gradients."""
        for name, gradient in zip(self.names, gradients):
            if gradient is not None and gradient.is_sparse:
                raise sparse_gradient("AdamW", name)
        self.kinds = kinds
        self.have = [at for at, gradient in enumerate(gradients) if gradient is not None]
        self.present = [at for at in self.have if self.sizes[at]]
        self.all_present = len(self.have) == len(gradients)
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
            strides = parameter.stride() if _dense(parameter) else torch.empty(parameter.shape, device="meta").stride()
            if gradient.stride() != strides:
                copy = torch.empty_strided(parameter.shape, strides, dtype=gradient.dtype, device=gradient.device)
                gradient = copy.copy_(gradient)
            made.append(gradient)
        return made

    def _add_largest(self) -> None:
        """Make the state that ``amsgrad`` needs, which was switched on."""
        self.keys.append("max_exp_avg_sq")
        self.flat["max_exp_avg_sq"] = torch.zeros_like(self.flat["exp_avg_sq"])
        self._lay_out()

    def _runs(self, gradients: list[Any]) -> _Runs:
        """Join parameters that touch, whose gradients touch in the same way; see Note [Runs]."""
        places = list(map(_data_ptr, map(self.parameters.__getitem__, self.present)))
        others = list(map(_data_ptr, gradients))
        if self.cuts is not None and places == self.places:
            if [other - others[n] for other, n in zip(others, self.starts)] == self.distances:
                return self.runs
        cuts = self._cuts(places, [other - place for other, place in zip(others, places)])
        self.places = places
        self.starts = [start for start, stop in zip(cuts, [*cuts[1:], len(places)]) for _ in range(start, stop)]
        self.distances = [other - others[n] for other, n in zip(others, self.starts)]
        if cuts != self.cuts or places != self.cut_places:
            self.runs = self._cut(cuts, self.present)
            self.cut_places = places
        self.cuts = cuts
        return self.runs

    def _cuts(self, places: list[int], distances: list[int]) -> list[int]:
        """List where runs begin: parameters, counted among those with gradients."""
        cuts = [0]
        for n in range(1, len(places)):
            at, before = self.present[n], self.present[n - 1]
            if (
                distances[n] != distances[n - 1]
                or places[n] != places[n - 1] + self.sizes[before] * self.itemsize
                or self.offsets[at] != self.offsets[before + 1]
                or self.counts[at] != self.counts[before]
            ):
                cuts.append(n)
        return cuts

    def _cut(self, cuts: list[int], present: list[int]) -> _Runs:
        whole, sizes, counters = [], [], []
        for start, stop in zip(cuts, [*cuts[1:], len(present)]):
            first, last = present[start], present[stop - 1]
            low, high = self.offsets[first], self.offsets[last + 1]
            parameter = self.parameters[first]
            if not _dense(parameter):
                raise RuntimeError(
                    f"AdamW: the elements of parameter {self.names[first]!r} are not next to each other in memory"
                    f" (shape {tuple(parameter.shape)}, strides {parameter.stride()}). Make it contiguous"
                )
            memory = torch.as_strided(parameter, (high - low,), (1,), parameter.storage_offset())
            whole.append([memory, *(self.flat[key][low:high] for key in self.keys)])
            sizes.append(high - low)
            counters.append(self.steps[first])
        vector = _VECTOR if self.steps.device.type == "cpu" and self.flat["exp_avg"].device.type == "cpu" else 1
        ends = [size - size % vector for size in sizes]
        full = [n for n, end in enumerate(ends) if end]
        left = [n for n, (end, size) in enumerate(zip(ends, sizes)) if end < size]
        tails = [[tensors[k][ends[n] :] for n in left for tensors in (whole[n],)] for k in range(len(self.keys) + 1)]
        scratch = [self.flat["exp_avg"].new_zeros(len(left), vector) for _ in range(len(self.keys) + 2)]
        rows = [[each[row, : sizes[n] - ends[n]] for row, n in enumerate(left)] for each in scratch]
        return _Runs(
            first=list(cuts),
            sizes=sizes,
            ends=ends,
            full=full,
            left=left,
            parameters=[whole[n][0][: ends[n]] for n in full] + list(scratch[0]),
            states=[
                [whole[n][k][: ends[n]] for n in full] + list(scratch[k + 1]) for k in range(1, len(self.keys) + 1)
            ],
            steps=[counters[n] for n in (*full, *left)],
            tails=tails,
            rows=rows,
            scratch=scratch,
        )

    def _update(
        self, runs: _Runs, gradients: list[torch.Tensor], scale: torch.Tensor | None, found: torch.Tensor | None
    ) -> None:
        group = self.group
        parts = [gradients[n][: runs.ends[n]] for n in runs.full] + list(runs.scratch[1])
        if runs.left:
            # Parameters, gradients, states: what is left of a vector, with zeros behind it.
            torch._foreach_copy_(
                [row for rows in runs.rows for row in rows],
                [*runs.tails[0], *(gradients[n][runs.ends[n] :] for n in runs.left), *_flatten(runs.tails[1:])],
            )
        beta1, beta2 = group["betas"]
        largest = runs.states[2] if group["amsgrad"] else []
        states: Any = [runs.parameters, parts, *runs.states[:2], largest]
        options: dict[str, Any] = {
            "weight_decay": group["weight_decay"],
            "eps": group["eps"],
            "maximize": group["maximize"],
        }
        if self.fused:
            lr = group["lr"]
            if isinstance(lr, torch.Tensor) and lr.device != self.steps.device:
                lr = lr.to(self.steps.device)
            _fused_kernel(
                *states,
                runs.steps,
                lr=lr,
                beta1=beta1,
                beta2=beta2,
                amsgrad=group["amsgrad"],
                grad_scale=scale,
                found_inf=found,
                **options,
            )
        else:
            _listed_kernel(
                *states,
                [step - 1 for step in runs.steps],
                foreach=group["foreach"] is not False and len(runs.steps) > 0,
                amsgrad=group["amsgrad"],
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                **options,
            )
        if runs.left:
            torch._foreach_copy_(
                _flatten(runs.tails), [*runs.rows[0], *(row for rows in runs.rows[2:] for row in rows)]
            )


def _flatten(lists: Iterable[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [tensor for each in lists for tensor in each]


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
    return not group["foreach"] and device.type in _FUSED
