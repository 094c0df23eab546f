"""Muon: momentum on the shards, whole matrices at their owners."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import Optimizer

from hp_optim.head_wise import all_rules
from hp_optim.newton_schulz import Orthogonalization
from hp_optim.options import broken_gradient, check_group, muon_defaults, parameter_names, sparse_gradient
from hp_optim.ownership import Placed
from hp_optim.rules import MatrixRule, rule_of, split
from hp_optim.torch.agreement import check_alike
from hp_optim.torch.exchange import Exchanger, Flags
from hp_optim.torch.layouts import is_distributed, layout_of, local_device, placed_on, plan_for
from hp_optim.torch.momenta import Momenta
from hp_optim.torch.newton_schulz import compute_dtype, orthogonalize
from hp_platform.extend import own_rank

__all__ = ["Muon"]

_plain = torch._C.DisableTorchFunctionSubclass
_get_grad = torch.Tensor.grad.__get__  # type: ignore[attr-defined]
_requires_grad = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_is_sparse = torch.Tensor.is_sparse.__get__  # type: ignore[attr-defined]


class Muon(Optimizer):
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
        TypeError: a parameter that is a DTensor of torch's own.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 0.02,
        weight_decay: float = 0.1,
        matched_adamw_rms: float = 0.2,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_variant: str = "asym5",
        ns_coefficients: Sequence[float] | Sequence[Sequence[float]] | None = None,
        ns_epsilon: float = 1e-10,
        head_wise: bool = False,
        head_dim: int | None = None,
        head_wise_patterns: Sequence[str] | None = None,
        *,
        ns_dtype: str | None = None,
        rules: Sequence[MatrixRule] = (),
    ) -> None:
        self._rules = all_rules(rules, head_wise, head_dim, head_wise_patterns)
        self._buckets: list[_Bucket] | None = None
        self._places: Any = Momenta()
        self._matrices: dict[torch.Tensor, Any] = {}
        defaults = muon_defaults(
            lr,
            weight_decay,
            matched_adamw_rms,
            momentum,
            nesterov,
            ns_steps,
            ns_variant,
            ns_coefficients,
            ns_epsilon,
            ns_dtype,
        )
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as of ``torch.optim.Optimizer``; they get their states.

        Raises:
            ValueError, TypeError: see `Muon`; the optimizer is as it was.
        """
        super().add_param_group(param_group)
        number = len(self.param_groups) - 1
        try:
            self._take(self.param_groups[number], number)
        except Exception:
            del self.param_groups[number]
            raise
        self._buckets = None

    def _take(self, group: dict[str, Any], number: int) -> None:
        """Check a group and make its states."""
        check_group("Muon", group, number)
        settings = Orthogonalization.of_group(group)
        names = parameter_names(group, number)
        if self._rules and "param_names" not in group:
            raise ValueError(
                "Muon: rules and head_wise go by names, and the parameters have none. Pass model.named_parameters(), or"
                ' the pairs of it, as params, or as "params" of a group'
            )
        matrices = {}
        for name, parameter in zip(names, group["params"]):
            matrices[parameter] = split(parameter.shape, rule_of(name, self._rules), name)
            placed_on(parameter, name, matrices[parameter], settings)
        self._matrices.update(matrices)
        self._make_states(group)

    def _make_states(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            if "momentum_buffer" not in self.state[parameter] and not parameter.is_meta:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
        self._places.place(group["params"], self.state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, as of ``torch.optim.Optimizer``; parameters that it does not know begin anew."""
        super().load_state_dict(state_dict)
        self._buckets = None
        for group in self.param_groups:
            self._make_states(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters; all ranks of their meshes call it.

        Args:
            closure: computes the loss again and its gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._buckets is None:
            self._buckets = self._bucketed()
        for bucket in self._buckets:
            with _plain():
                bucket.step()
        return loss

    def _bucketed(self) -> list[_Bucket]:
        """Sort the parameters by what is exchanged together: one dtype, on one device."""
        sorted_: dict[tuple[torch.dtype, torch.device], list[tuple[dict[str, Any], str, torch.Tensor]]] = {}
        for number, group in enumerate(self.param_groups):
            self._make_states(group)
            for name, parameter in zip(parameter_names(group, number), group["params"]):
                sorted_.setdefault((parameter.dtype, local_device(parameter)), []).append((group, name, parameter))
        return [_Bucket(members, self.state, self._matrices, self._places) for members in sorted_.values()]


class _Bucket:
    """Parameters of one dtype that are exchanged together.

    Args:
        members: their groups, names and the parameters.
        state: the optimizer's.
        matrices: of each parameter.
        places: reads and writes the momenta.
    """

    def __init__(
        self,
        members: Sequence[tuple[dict[str, Any], str, torch.Tensor]],
        state: Any,
        matrices: dict[torch.Tensor, Any],
        places: Any,
    ) -> None:
        self.members = list(members)
        self.state = state
        self.matrices = matrices
        self.places = places
        self.planned: Any = None
        self.distinct = list({id(group): group for group, _, _ in members}.values())
        self.distributed = any(is_distributed(parameter) for _, _, parameter in members)

    def step(self) -> None:
        """Update them. DTensors count as their local tensors here."""
        settings = {id(group): Orthogonalization.of_group(group) for group in self.distinct}
        members = [parameter for _, _, parameter in self.members]
        trains = list(map(_requires_grad, members))
        if not self.distributed:  # else ranks can't know which gradients the others have
            trains = [each and gradient is not None for each, gradient in zip(trains, map(_get_grad, members))]
        layouts = list(map(layout_of, members))  # they change where experts move to other ranks
        if self.planned != (trains, settings, layouts):
            self.planned = None
            self._plan([member for member, each in zip(self.members, trains) if each], settings)
            self.planned = (trains, settings, layouts)
        if not self.parameters:
            return
        gradients: list[Any] = list(map(_get_grad, self.parameters))
        flags = self._flags(gradients)
        momenta, updates = self._momenta(gradients)
        arrived = self.exchanger.to_owners(updates, flags)
        del updates
        results = [self._orthogonalized(batch, plan) for batch, plan in zip(arrived.batches, self.batches)]
        steps, flags = self.exchanger.to_holders(results, arrived, flags)
        if flags.broken.any():
            names = [name for name, broken in zip(self.names, flags.broken) if broken]
            warnings.warn(broken_gradient("Muon", names), RuntimeWarning, stacklevel=4)
            return
        self._apply(momenta, steps, flags.present)

    def _plan(self, active: list[tuple[dict[str, Any], str, torch.Tensor]], settings: dict[int, Any]) -> None:
        """Choose the owners of the parameters that are trained."""
        self.groups = [group for group, _, _ in active]
        self.names = [name for _, name, _ in active]
        self.parameters = [parameter for _, _, parameter in active]
        if not active:
            return
        placed: list[Placed] = [
            placed_on(parameter, name, self.matrices[parameter], settings[id(group)])
            for group, name, parameter in active
        ]
        plan, device = plan_for(placed, self.parameters)
        check_alike(plan, device)
        shapes = [tuple(parameter.shape) for parameter in self.parameters]
        self.exchanger = Exchanger(plan, own_rank(), shapes, self.parameters[0].dtype, device)
        self.batches = self.exchanger.exchange.batches
        self.here = [at for at, parameter in enumerate(self.parameters) if parameter.numel()]

    def _flags(self, gradients: Sequence[Any]) -> Flags:
        present = np.array([gradient is not None for gradient in gradients])
        for name, gradient in zip(self.names, gradients):
            if gradient is not None and _is_sparse(gradient):
                raise sparse_gradient("Muon", name)
        broken = np.zeros(len(gradients), dtype=bool)
        numbers = [at for at in self.here if present[at]]
        if numbers:
            own = [gradients[at] for at in numbers]
            # The kernel of the Euclidean norm is the fast one. Where that overflows, the largest value decides.
            if not torch.stack(torch._foreach_norm(own)).isfinite().all():
                largest = torch.stack(torch._foreach_norm(own, float("inf")))
                broken[numbers] = ~torch.isfinite(largest).cpu().numpy()
        return Flags(present, broken)

    def _momenta(self, gradients: Sequence[Any]) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """Return new momenta, to be kept once all ranks have agreed, and what is orthogonalized."""
        if not self.here:
            return {}, {}
        factors = {at: float(self.groups[at]["momentum"]) for at in self.here}
        parameters = [self.parameters[at] for at in self.here]
        momenta = dict(zip(self.here, self.places.scaled(parameters, self.state, list(factors.values()))))
        _add(momenta, gradients, self.here)
        updates = dict(momenta)
        ahead = [at for at in self.here if self.groups[at]["nesterov"]]
        if ahead:
            updates.update(zip(ahead, torch._foreach_mul([momenta[at] for at in ahead], [factors[at] for at in ahead])))
            _add(updates, gradients, ahead)
        return momenta, {at: update.contiguous() for at, update in updates.items()}

    def _orthogonalized(self, batch: torch.Tensor, plan: Any) -> torch.Tensor:
        settings: Orthogonalization = plan.settings
        dtype = compute_dtype(batch.dtype, batch.device, settings.dtype)
        orthogonalize(batch, settings.coefficients, settings.epsilon, dtype=dtype, out=batch)
        return batch.mul_(settings.scale(plan.rows, plan.columns))

    def _apply(self, momenta: dict[int, torch.Tensor], updates: dict[int, torch.Tensor], present: np.ndarray) -> None:
        for group in self.distinct:
            chosen = [at for at in self.here if self.groups[at] is group and present[at]]
            if not chosen:
                continue
            parameters = [self.parameters[at] for at in chosen]
            self.places.store(parameters, self.state, [momenta[at] for at in chosen])
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
