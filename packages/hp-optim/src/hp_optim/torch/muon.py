"""Muon: momentum on the shards, whole matrices at their owners."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from operator import is_
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from hp_dtensor.torch.extend import refuse_foreign
from hp_optim.muon.arguments import MuonArguments
from hp_optim.muon.ownership import world_of
from hp_optim.muon.rules import MatrixRule, Orthogonalization, rule_of, split
from hp_optim.options import (
    agree_on,
    check_group,
    check_once,
    check_options,
    parameter_names,
    sparse_gradient,
)
from hp_optim.torch.exchanges.bucket import (
    Bucket,
    Look,
    Member,
    Plan,
    device_for,
    is_distributed,
    layout_of,
    local_device,
    meshes_of,
    placed_on,
)
from hp_optim.torch.finiteness import told
from hp_optim.torch.states.loaded import Roster, begin_anew, check_state, compact, has_memory
from hp_optim.torch.states.momenta import Momenta, release
from hp_platform.extend import own_rank
from hp_platform.torch.internals import get_grad, get_requires_grad, get_shape, without_torch_function

_BUFFER = "momentum_buffer"
_KEPT = ("_rules", "_places", "_matrices")


class Muon(MuonArguments, Optimizer):
    """Momentum whose matrices are orthogonalized, by Newton-Schulz iteration (Jordan et al., 2024).

    With g the gradient of a weight W of r rows and c columns, and d, N the learning rate and weight decay::

        buf = momentum * buf + g
        u = momentum * buf + g if nesterov else buf
        W = (1 - d * N) * W - d * matched_adamw_rms * sqrt(max(r, c)) * orthogonalized(u)

    The factor makes the update's root mean square that of AdamW's, so that its learning rate and weight decay can be
    used (Moonlight, Liu et al., 2025). Parameters may be plain tensors or DTensors of any layout. Where they are
    sharded, the momentum is, too: two all-to-alls a step bring each matrix to the rank that orthogonalizes it, and the
    results back, however many matrices there are. Weights have the same bits for any layout and number of ranks.

    Where a gradient is infinite or not a number, all ranks warn and leave weights and states as they are.

    Example:
        >>> optimizer = Muon(matrices.named_parameters(), lr=2e-3)
        >>> loss.backward(); optimizer.step()

    Args:
        params: parameters, pairs of a name and a parameter, or groups of either. Each has two dims, or more of which
            the leading ones count matrices (experts), or a rule says which matrices it holds.
        lr: the learning rate; a tensor of one element is read at each step.
        weight_decay: decoupled, as AdamW's.
        matched_adamw_rms: the root mean square of an update, over ``lr``.
        momentum: between 0 and 1.
        nesterov: look ahead.
        ns_steps: number of iterations.
        ns_variant: "asym5", "legacy" or "polar_express"; see `hp_optim.NS_VARIANTS`.
        ns_coefficients: three numbers, or three for each step, in place of the variant's.
        ns_epsilon: added to the norm by which a matrix is divided.
        head_wise: orthogonalize each head of attention projections by itself. It needs names.
        head_dim: rows of a head.
        head_wise_patterns: fnmatch patterns of the projections. Default: `hp_optim.HEAD_WISE_PATTERNS`.
        ns_dtype: dtype of the iteration's products, "float32", "bfloat16" or "float64". Default: bfloat16 on
            accelerators, float32 on CPU, float64 for float64 parameters.
        rules: which matrices parameters hold; names are matched.

    Raises:
        ValueError: a number out of its range, an unknown variant or dtype, a parameter that is no matrix or that a rule
            does not fit, an empty group, a parameter in two groups; at the first step, other parameters on other ranks.
        TypeError: a parameter that is a DTensor of torch's own, or no floating-point tensor.
    """

    def _begin(self, params: Iterable[Any], defaults: dict[str, Any], rules: Sequence[MatrixRule]) -> None:
        self._rules = rules
        self._places: Any = Momenta()
        self._matrices: dict[torch.Tensor, Any] = {}
        self._forget()
        Optimizer.__init__(self, params, defaults)

    def _forget(self) -> None:
        """Begin without members and a plan."""
        self._roster, self._plan = Roster(), None
        self._edition = 0
        self._members: list[Member] = []
        self._parameters: list[torch.Tensor] = []
        self._without_memory: list[torch.Tensor] = []
        self._shapes: list[torch.Size] = []
        self._buffers: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has; it makes its plan when it needs it."""
        kept = {key: self.__dict__[key] for key in _KEPT}
        return {**super().__getstate__(), **kept, "state": compact(self.state)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_places" in state:  # else it is called by load_state_dict
            self._forget()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as of ``torch.optim.Optimizer``; they get their states.

        Raises:
            ValueError, TypeError: see `Muon`; the optimizer is as it was.
        """
        current = self._roster.holds(self.param_groups, self.state)
        super().add_param_group(param_group)
        number = len(self.param_groups) - 1
        group = self.param_groups[number]
        try:
            check_group("Muon", group, number, known=self.defaults)
            self._take(group, number)
        except Exception:
            del self.param_groups[number]
            raise
        self._make_states(group)
        if current:  # else a step finds it with what else was changed
            self._enlist()

    def _take(self, group: dict[str, Any], number: int) -> None:
        """Check a group and find its matrices."""
        check_options("Muon", group, number, self.defaults)
        settings = Orthogonalization.of_group(group)
        names = parameter_names(group, number)
        if self._rules and "param_names" not in group:
            raise ValueError(
                "Muon: rules and head_wise go by names, and the parameters have none. Pass model.named_parameters(), or"
                ' the pairs of it, as params, or as "params" of a group'
            )
        matrices = {}
        for name, parameter in zip(names, group["params"]):
            refuse_foreign(parameter, f"Muon: parameter {name!r}")
            if not parameter.is_floating_point():
                raise TypeError(
                    f"Muon: parameter {name!r} is of {parameter.dtype}, and only floating-point ones are updated. Leave"
                    " it out, or give it to an optimizer of torch"
                )
            matrices[parameter] = split(parameter.shape, rule_of(name, self._rules), name)
            placed_on(parameter, name, matrices[parameter], settings)
        self._matrices.update(matrices)

    def _make_states(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            if _BUFFER not in self.state[parameter] and has_memory(parameter):
                self.state[parameter][_BUFFER] = torch.zeros_like(parameter, requires_grad=False)
        self._places.place(group["params"], self.state)

    def _enlist(self) -> None:
        """Take note of what there is; see Note [Roster] in `hp_optim.torch.states.loaded`."""
        self._members = [
            Member(number, name, parameter, self.state[parameter], self._matrices[parameter])
            for number, group in enumerate(self.param_groups)
            for name, parameter in zip(parameter_names(group, number), group["params"])
        ]
        self._parameters = [member.parameter for member in self._members]
        self._without_memory = [each for each in self._parameters if not has_memory(each)]
        self._roster = Roster(self.param_groups, self.state)
        self._edition += 1
        with without_torch_function():
            self._shapes = list(map(get_shape, self._parameters))
        self._buffers = [member.state.get(_BUFFER) for member in self._members]

    def _renew(self) -> None:
        """Take over what was replaced from outside."""
        check_once("Muon", self.param_groups)
        for number, group in enumerate(self.param_groups):
            self._take(group, number)
        named = [
            pair
            for number, group in enumerate(self.param_groups)
            for pair in zip(parameter_names(group, number), group["params"])
        ]
        with without_torch_function():
            for name, parameter in named:
                begin_anew("Muon", name, parameter, self.state[parameter], [_BUFFER])
                check_state("Muon", name, parameter, _BUFFER, self.state[parameter].get(_BUFFER))
        self._matrices = {parameter: self._matrices[parameter] for _, parameter in named}
        self._places.keep(self._matrices)
        for group in self.param_groups:
            self._make_states(group)
        self._enlist()

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as of ``torch.optim.Optimizer``."""
        self._places.settle()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, as of ``torch.optim.Optimizer``; parameters that it does not know begin anew.

        Raises:
            ValueError, TypeError: a state that is not laid out as its parameter, a number out of its range; the
                optimizer is as it was.
        """
        before = {"state": self.state, "param_groups": self.param_groups}
        hold = self.register_load_state_dict_pre_hook(lambda _, loaded: self._places.held(loaded))  # after all others
        try:
            super().load_state_dict(state_dict)
            for number, group in enumerate(self.param_groups):
                check_options("Muon", group, number, self.defaults)
                for name, parameter in zip(parameter_names(group, number), group["params"]):
                    release(self.state[parameter])
                    with without_torch_function():
                        check_state("Muon", name, parameter, _BUFFER, self.state[parameter].get(_BUFFER))
            self._renew()
        except Exception:
            self.__dict__.update(before)
            raise
        finally:
            hold.remove()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters; all ranks of their meshes call it.

        Args:
            closure: computes the loss again and its gradients.

        Raises:
            ValueError: ranks have different parameters or hyperparameters, on all of them.
            RuntimeError: a sparse gradient, or states of another shape, on all of them; nothing is changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    def _update(self) -> None:
        """Step as planned; where some rank can't, or has another plan by now, all of them plan anew or raise."""
        problems: list[Exception] = []
        look = self._tried(problems)
        plan = self._plan
        if plan is None or (not plan.shared and (problems or plan.look != look)):
            plan = self._agreed(look, problems)
        alarm = bool(problems) or plan.look != look
        for _ in range(2):
            if self._stepped(plan, alarm, problems):
                return
            plan, alarm = self._agreed(look, problems), False
        raise AssertionError("Muon: all ranks agreed, and then one did not")

    def _tried(self, problems: list[Exception]) -> Look | None:
        """Look at what there is; note why this rank can't step."""
        try:
            return self._look()
        except Exception as problem:  # whatever it is, the others have to hear of it
            problems.append(problem)
            return None

    def _look(self) -> Look:
        """Take over what was replaced, and check what there is; nothing is communicated."""
        renewed = self._plan is None or not self._roster.holds(self.param_groups, self.state)
        if not renewed:
            buffers = [member.state.get(_BUFFER) for member in self._members]
            with without_torch_function():
                renewed = list(map(get_shape, self._parameters)) != self._shapes
            renewed = renewed or not all(map(is_, buffers, self._buffers)) or self._got_memory()
        if renewed:
            self._renew()
        for number, group in enumerate(self.param_groups):
            check_options("Muon", group, number, self.defaults)
        settings = list(map(Orthogonalization.of_group, self.param_groups))
        with without_torch_function():
            for member, gradient in zip(self._members, map(get_grad, self._parameters)):
                if gradient is None:
                    continue
                if gradient.layout is not torch.strided:
                    raise sparse_gradient("Muon", member.name)
                if renewed and gradient.shape != member.parameter.shape:
                    raise RuntimeError(
                        f"Muon: the gradient of {member.name!r} has shape {tuple(gradient.shape)}, the parameter"
                        f" {tuple(member.parameter.shape)}. Compute gradients anew where memory is replaced"
                    )
            trains, layouts = list(map(get_requires_grad, self._parameters)), list(map(layout_of, self._parameters))
        return Look(self._edition, trains, settings, layouts)

    def _got_memory(self) -> bool:
        """Tell whether a parameter that was on the meta device is no more."""
        return any(has_memory(each) for each in self._without_memory)

    def _agreed(self, look: Look | None, problems: list[Exception]) -> Plan:
        """Return a plan that all ranks have made alike; they call it together, and raise together."""
        old, self._plan = self._plan, None
        made: list[Plan] = []

        def describe() -> list[str]:
            if problems:
                raise problems.pop()  # nothing of this frame holds it
            assert look is not None
            made.append(self._planned(look))
            return made[0].lines

        agree_on("Muon", describe, old.world if old is not None and old.shared else self._world())
        plan = made[0]
        if old is not None and old.shared and plan.world != old.world:
            agree_on("Muon", lambda: plan.lines, plan.world)
        for bucket in plan.buckets:
            if bucket.shared:
                with without_torch_function():
                    bucket.build()
        self._plan = plan
        return plan

    def _world(self) -> list[int]:
        """List the ranks that have parts of the parameters."""
        meshes = meshes_of([each for group in self.param_groups for each in group["params"]])
        return world_of(meshes) or [own_rank()]

    def _planned(self, look: Look) -> Plan:
        """Sort the parameters by what is exchanged together, one dtype on one device, and choose owners."""
        sorted_: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for at, parameter in enumerate(self._parameters):
            sorted_.setdefault((parameter.dtype, local_device(parameter)), []).append(at)
        meshes, world = meshes_of(self._parameters), self._world()
        made: list[tuple[Bucket, list[int]]] = []
        for places in sorted_.values():
            ranks = world if any(is_distributed(self._parameters[at]) for at in places) else [own_rank()]
            device = device_for(self._parameters[places[0]], meshes)
            made.append((Bucket([self._members[at] for at in places], ranks, device, self._places), places))
        made.sort(key=lambda each: not each[0].shared)  # all ranks hear of a problem before anything is changed
        lines: list[str] = []
        numbers: dict[int, None] = {}
        with without_torch_function():
            for bucket, places in made:
                if bucket.shared:
                    numbers |= dict.fromkeys(member.number for member in bucket.members)
                    lines += bucket.choose([look.trains[at] for at in places], look.settings)
        lines = [f"ranks {world}", *(told(number, self.param_groups[number]) for number in numbers), *lines]
        return Plan(look, world, [bucket for bucket, _ in made], [places for _, places in made], list(numbers), lines)

    def _stepped(self, plan: Plan, alarm: bool, problems: list[Exception]) -> bool:
        """Update the parameters, and tell whether no rank had a problem; if one had, nothing is changed."""
        said = [told(number, self.param_groups[number]) for number in plan.groups if not alarm]
        digest = hashlib.blake2b("".join(said).encode(), digest_size=4).digest()
        for bucket, places in zip(plan.buckets, plan.places):
            trains = [plan.look.trains[at] for at in places]
            with without_torch_function():
                if not bucket.step(self.param_groups, plan.look.settings, trains, digest, alarm, problems):
                    return False
        return True
