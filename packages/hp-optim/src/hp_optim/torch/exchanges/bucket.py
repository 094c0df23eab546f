"""Buckets: parameters of Muon that are exchanged together, where they are, and what ranks agree on for it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hp_dtensor.torch.extend import DTensor, refuse_foreign
from hp_optim.muon.ownership import OwnerPlan, Placed, assign, placed_as
from hp_optim.muon.rules import Matrix, Orthogonalization
from hp_optim.options import broken_gradient
from hp_optim.torch.exchanges.exchange import Exchanger, Flags
from hp_optim.torch.newton_schulz import compute_dtype, orthogonalize
from hp_platform import get_platform
from hp_platform.extend import own_rank
from hp_platform.torch.internals import get_grad, without_torch_function


def placed_on(parameter: torch.Tensor, name: str, matrices: tuple[Matrix, ...], settings: Orthogonalization) -> Placed:
    """Describe a parameter, plain or a DTensor, to the planner; see `hp_optim.muon.ownership.placed_as`.

    Raises:
        TypeError: a DTensor of torch's own.
        ValueError: a partial parameter.
    """
    refuse_foreign(parameter, f"Muon: parameter {name!r}")
    return placed_as(name, parameter.shape, layout_of(parameter), matrices, settings)


def device_for(parameter: torch.Tensor, meshes: set[Any]) -> torch.device:
    """Return the device on which matrices are exchanged and computed.

    Args:
        parameter: one of those on one device.
        meshes: of all parameters.
    """
    device = local_device(parameter)
    if device.type == "cpu" and any(mesh.device_type != "cpu" for mesh in meshes):
        device = torch.device(get_platform().devices.current_device())  # offloaded: computed where ranks communicate
    return device


def plan_for(placed: Sequence[Placed], world: Sequence[int]) -> OwnerPlan:
    """Return the owners.

    Args:
        placed: see `placed_on`.
        world: the ranks that exchange.

    Raises:
        ValueError: a rank can't tell which part of a parameter another has.
    """
    try:
        return assign(placed, world)
    except ValueError as error:
        raise ValueError(
            f"Muon: a layout is not the same on all ranks: {error}. Where fully_shard cuts tensor parallel parts of"
            " different sizes, make the features divide by the ranks, or shard another dim by shard_placement_fn"
        ) from error


def meshes_of(parameters: Sequence[torch.Tensor]) -> set[Any]:
    """Return the meshes of those that are DTensors."""
    return {parameter._spec.mesh for parameter in parameters if isinstance(parameter, DTensor)}


def is_distributed(parameter: torch.Tensor) -> bool:
    """Tell whether several ranks have a part of a parameter."""
    return isinstance(parameter, DTensor) and parameter._spec.mesh.size() > 1


def layout_of(parameter: torch.Tensor) -> Any:
    """Return the layout of a DTensor, None of a plain tensor."""
    return parameter._spec if isinstance(parameter, DTensor) else None


def local_device(parameter: torch.Tensor) -> torch.device:
    """Return where a parameter's local tensor is."""
    with without_torch_function():
        return parameter.device


Group = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Member:
    """A parameter of Muon.

    Attributes:
        number: of its group.
        name: for errors.
        parameter: plain, or a DTensor.
        state: the optimizer's, of this parameter.
        matrices: of which it is made.
    """

    number: int
    name: str
    parameter: torch.Tensor
    state: dict[str, Any]
    matrices: Any


class Bucket:
    """Parameters of one dtype on one device. DTensors count as their local tensors in a step.

    Args:
        members: at least one.
        world: the ranks that exchange; this one alone where no parameter is distributed.
        device: on which matrices are exchanged and computed.
        places: reads and writes the momenta.

    Attributes:
        members: see above.
        shared: several ranks exchange.
    """

    def __init__(self, members: Sequence[Member], world: Sequence[int], device: torch.device, places: Any) -> None:
        self.members, self.world, self.device, self.places = list(members), list(world), device, places
        self.shared = len(self.world) > 1
        self.chosen: list[bool] | None = None

    def choose(self, chosen: list[bool], settings: Sequence[Orthogonalization]) -> list[str]:
        """Choose the owners of some parameters, and return a line for each; nothing is communicated.

        Args:
            chosen: whether a parameter is updated, for each.
            settings: of each group.

        Raises:
            ValueError, TypeError: a layout that matrices can't be exchanged in.
        """
        active = [member for member, each in zip(self.members, chosen) if each]
        placed = [placed_on(each.parameter, each.name, each.matrices, settings[each.number]) for each in active]
        self.plan = plan_for(placed, self.world)
        self.names = [each.name for each in active]
        self.numbers = [each.number for each in active]
        self.parameters = [each.parameter for each in active]
        self.states = [each.state for each in active]
        self.here = [at for at, parameter in enumerate(self.parameters) if parameter.numel()]
        self.chosen = chosen
        return [each.line(str(self.members[0].parameter.dtype)) for each in placed]

    def build(self) -> None:
        """Prepare the exchange of what was chosen; all ranks do."""
        shapes = [tuple(parameter.shape) for parameter in self.parameters]
        dtype = self.members[0].parameter.dtype
        self.exchanger = Exchanger(self.plan, own_rank(), shapes, dtype, self.device)
        self.batches = self.exchanger.exchange.batches

    def step(
        self,
        groups: Sequence[Group],
        settings: Sequence[Orthogonalization],
        trains: list[bool],
        digest: bytes,
        alarm: bool,
        problems: list[Exception],
    ) -> bool:
        """Update the parameters; all ranks of the world call it together.

        Args:
            groups: hyperparameters.
            settings: of each group.
            trains: whether a parameter is trained, for each.
            digest: of the hyperparameters.
            alarm: this rank can't step, or not by this plan.
            problems: what keeps this rank from it is added.

        Returns:
            False if any rank raised the alarm, or ranks have different digests: nothing is changed.
        """
        if not self.shared:  # else ranks can't know which gradients the others have
            present = [each and get_grad(member.parameter) is not None for member, each in zip(self.members, trains)]
            if present != self.chosen:
                self.choose(present, settings)
                self.build()
            if not self.parameters:
                return True
        none = np.zeros(len(self.parameters), dtype=bool)
        flags, momenta, updates = Flags(none, none, True), {}, {}
        try:
            if not alarm:
                gradients = list(map(get_grad, self.parameters))
                flags = self._flags(gradients, digest)
                momenta, updates = self._momenta(groups, gradients)
        except Exception as problem:  # whatever it is, the others have to hear of it
            if not self.shared:
                raise
            problems.append(problem)
            alarm, flags = True, Flags(none, none, True)
        if alarm:
            self.exchanger.alarm(flags)
            return False
        arrived = self.exchanger.to_owners(updates, flags)
        del updates
        results = [self._orthogonalized(batch, plan) for batch, plan in zip(arrived.batches, self.batches)]
        steps, flags = self.exchanger.to_holders(results, arrived, flags)
        if flags.alarm:
            return False
        if flags.broken.any():
            names = [name for name, broken in zip(self.names, flags.broken) if broken]
            warnings.warn(broken_gradient("Muon", names), RuntimeWarning, stacklevel=6)
            return True
        self._apply(groups, momenta, steps, flags.present)
        return True

    def _flags(self, gradients: Sequence[Any], digest: bytes) -> Flags:
        present = np.array([gradient is not None for gradient in gradients], dtype=bool)
        broken = np.zeros(len(gradients), dtype=bool)
        numbers = [at for at in self.here if present[at]]
        if numbers:
            own = [gradients[at] for at in numbers]
            # The kernel of the Euclidean norm is the fast one. Where that overflows, the largest value decides.
            if not torch.stack(torch._foreach_norm(own)).isfinite().all():
                largest = torch.stack(torch._foreach_norm(own, float("inf")))
                broken[numbers] = ~torch.isfinite(largest).cpu().numpy()
        return Flags(present, broken, digest=digest)

    def _momenta(
        self, groups: Sequence[Group], gradients: Sequence[Any]
    ) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """Return new momenta, to be kept once all ranks have agreed, and what is orthogonalized."""
        if not self.here:
            return {}, {}
        factors = {at: float(groups[self.numbers[at]]["momentum"]) for at in self.here}
        parameters, states = [self.parameters[at] for at in self.here], [self.states[at] for at in self.here]
        momenta = dict(zip(self.here, self.places.scaled(parameters, states, list(factors.values()))))
        _add(momenta, gradients, self.here)
        updates = dict(momenta)
        ahead = [at for at in self.here if groups[self.numbers[at]]["nesterov"]]
        if ahead:
            updates.update(zip(ahead, torch._foreach_mul([momenta[at] for at in ahead], [factors[at] for at in ahead])))
            _add(updates, gradients, ahead)
        return momenta, {at: update.contiguous() for at, update in updates.items()}

    def _orthogonalized(self, batch: torch.Tensor, plan: Any) -> torch.Tensor:
        settings: Orthogonalization = plan.settings
        dtype = compute_dtype(batch.dtype, batch.device, settings.dtype)
        orthogonalize(batch, settings.coefficients, settings.epsilon, dtype=dtype, out=batch)
        return batch.mul_(settings.scale(plan.rows, plan.columns))

    def _apply(
        self,
        groups: Sequence[Group],
        momenta: dict[int, torch.Tensor],
        updates: dict[int, torch.Tensor],
        present: np.ndarray,
    ) -> None:
        for number in dict.fromkeys(self.numbers):
            chosen = [at for at in self.here if self.numbers[at] == number and present[at]]
            if not chosen:
                continue
            group, parameters = groups[number], [self.parameters[at] for at in chosen]
            self.places.store(parameters, [self.states[at] for at in chosen], [momenta[at] for at in chosen])
            steps = [updates[at].to(parameters[0].device) for at in chosen]
            lr: Any = group["lr"]
            if isinstance(lr, torch.Tensor):
                lr = lr.to(steps[0].device)
            decay = 1 - lr * group["weight_decay"]
            if isinstance(decay, torch.Tensor) or decay != 1:
                torch._foreach_mul_(parameters, decay)
            torch._foreach_mul_(steps, lr)
            torch._foreach_sub_(parameters, steps)


def _add(targets: dict[int, torch.Tensor], gradients: Sequence[Any], numbers: Sequence[int]) -> None:
    """Add gradients where this rank has some."""
    own = [at for at in numbers if gradients[at] is not None]
    if own:
        torch._foreach_add_([targets[at] for at in own], [gradients[at] for at in own])


@dataclass(frozen=True)
class Look:
    """What a plan is for.

    Attributes:
        edition: of the members.
        trains: whether a parameter is trained, for each.
        settings: of each group.
        layouts: of the parameters; they change where experts move to other ranks.
    """

    edition: int
    trains: list[bool]
    settings: list[Orthogonalization]
    layouts: list[Any]


@dataclass(frozen=True, eq=False)
class Plan:
    """What all ranks have agreed on.

    Attributes:
        look: what it is for.
        world: the ranks.
        buckets: those that several ranks exchange come first.
        places: of each bucket, the numbers of its members.
        groups: those with members that several ranks exchange.
        lines: a description of what ranks exchange, the same on all of them.
    """

    look: Look
    world: list[int]
    buckets: list[Bucket]
    places: list[list[int]]
    groups: list[int]
    lines: list[str]

    @property
    def shared(self) -> bool:
        """Whether several ranks exchange something."""
        return self.buckets[0].shared if self.buckets else False
