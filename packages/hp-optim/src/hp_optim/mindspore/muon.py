"""Muon for MindSpore: momentum on the shards, whole matrices at their owners.

Each message to owners begins with its flags: which gradients of the sender are not finite, and whether it can't step by
this plan. There is such a message between any two ranks, so all of them know after the first exchange.

The Newton-Schulz iteration is that of `hp_optim.torch.newton_schulz`; see its notes [Gram iteration] and [Padded
matrices].

Note [Numbers as tensors]
    A Python number beside a tensor of float64 is rounded to float32 by MindSpore's kernels, so it is made a tensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, ops
from mindspore.experimental.optim.optimizer import Optimizer

from hp_dtensor import SkipDTensorDispatch
from hp_dtensor.mindspore.extend import DTensor, local_mode, local_view, set_local
from hp_optim.muon.arguments import MuonArguments
from hp_optim.muon.ownership import OwnerPlan, Placed, gathers_of, owner_plan, placed_as, world_of
from hp_optim.muon.rules import MatrixRule, Orthogonalization, rule_of, split
from hp_optim.options import (
    agree_on,
    broken_gradient,
    check_gradients,
    check_group,
    check_options,
)
from hp_platform import collectives, get_platform
from hp_platform.extend import own_rank

Triple = tuple[float, float, float]
_RESTART = 5


def compute_dtype(dtype: Any, kind: str, name: str | None = None) -> Any:
    """Choose the dtype of the products.

    Args:
        dtype: of the parameters.
        kind: of device.
        name: the dtype. Default: bfloat16 on accelerators, float32 on CPU, float64 for float64 parameters.

    Raises:
        ValueError: bfloat16 on CPU, where MindSpore has no kernels for it.
    """
    if name == "bfloat16" and kind == "cpu":
        raise ValueError("Muon: ns_dtype='bfloat16', and MindSpore's kernels on CPU have no bfloat16; use 'float32'")
    if name is not None:
        return getattr(mindspore, name)
    if dtype == mindspore.float64:
        return dtype
    return mindspore.float32 if kind == "cpu" else mindspore.bfloat16


def scalar(value: float, like: Tensor) -> Tensor:
    """Return a number in the dtype of a tensor; see Note [Numbers as tensors]."""
    return Tensor(value, like.dtype)


def orthogonalize(batch: Tensor, coefficients: Sequence[Triple], epsilon: float) -> Tensor:
    """Bring the singular values of matrices near one. Each matrix has the same result in any batch.

    Args:
        batch: ``[matrices, rows, columns]``, in the dtype of the products.
        coefficients: of each step.
        epsilon: added to the norm by which each matrix is divided.
    """
    rows, columns = batch.shape[-2:]
    x = _padded(batch)
    norm = ops.sqrt((x * x).sum(-1, keepdims=True).sum(-2, keepdims=True))
    x = x / (norm + scalar(epsilon, batch))
    x = _swapped(x) if rows > columns else x
    gram = max(rows, columns) >= 2 * min(rows, columns) and batch.dtype != mindspore.bfloat16
    x = _by_gram_matrices(x, coefficients) if gram else _directly(x, coefficients)
    return (_swapped(x) if rows > columns else x)[:, :rows, :columns]


def _padded(x: Tensor) -> Tensor:
    """Fill matrices up with zeros to whole cache lines."""
    for dim in (-2, -1):
        lacking = -x.shape[dim] % (64 // x.itemsize)
        if lacking:
            shape = list(x.shape)
            shape[dim] = lacking
            x = ops.cat((x, ops.zeros(tuple(shape), dtype=x.dtype)), dim)
    return x


def _swapped(x: Tensor) -> Tensor:
    return ops.swapaxes(x, -1, -2)


def _directly(x: Tensor, coefficients: Sequence[Triple]) -> Tensor:
    for a, b, c in ((scalar(each, x) for each in step) for step in coefficients):
        gram = ops.bmm(x, _swapped(x))
        x = a * x + ops.bmm(b * gram + c * ops.bmm(gram, gram), x)
    return x


def _by_gram_matrices(x: Tensor, coefficients: Sequence[Triple]) -> Tensor:
    one = ops.eye(x.shape[-2], x.shape[-2], x.dtype)
    for start in range(0, len(coefficients), _RESTART):
        gram = ops.bmm(x, _swapped(x))
        product: Any = None
        for a, b, c in ((scalar(each, x) for each in step) for step in coefficients[start : start + _RESTART]):
            factor = a * one + b * gram + c * ops.bmm(gram, gram)
            product = factor if product is None else ops.bmm(factor, product)
            gram = ops.bmm(ops.bmm(factor, gram), factor)
        x = ops.bmm(product, x)
    return x


class Exchanger:
    """One rank's part of a plan, for local tensors of given shapes.

    Args:
        plan: the owners.
        rank: of this process.
        shapes: of the local tensors, one for each parameter.
        dtype: of what is exchanged.
    """

    def __init__(self, plan: OwnerPlan, rank: int, shapes: Sequence[tuple[int, ...]], dtype: Any) -> None:
        self.exchange = plan.exchange(rank)
        self.shapes, self.dtype, self.world = list(shapes), dtype, len(plan.world)
        self.group = get_platform().groups.new_group(plan.world) if self.world > 1 else None
        gathers = gathers_of(self.exchange, shapes)
        self.index = {
            name: Tensor(getattr(gathers, name).astype(np.int32))
            for name in ("sent", "batches", "results_sent", "locals")
        }

    def to_owners(
        self, tensors: Sequence[Tensor], broken: np.ndarray, *, alarm: bool = False
    ) -> tuple[list[Tensor], np.ndarray, bool]:
        """Bring the matrices together; a collective, if there are other ranks.

        Args:
            tensors: this rank's part of each parameter's matrices; with an alarm there are none.
            broken: whether it has a gradient that is not finite, for each parameter.
            alarm: this rank can't step by this plan.

        Returns:
            The batches, ``[matrices, rows, columns]``, ``broken`` of any rank, and whether any raised the alarm; then
            there are no batches.
        """
        flat = _joined([ops.reshape(each, (-1,)) for each in tensors], self.dtype)
        if self.group is not None:
            there = self.exchange
            stream = ops.zeros((sum(there.send_sizes),), dtype=self.dtype) if alarm else self._gathered(flat, "sent")
            head = np.append(broken, alarm)
            arrived, heads = self._sent(stream, there.send_sizes, there.receive_sizes, head)
            broken, alarm = heads.max(axis=0)[:-1] > 0, bool(heads[:, -1].max() > 0) or alarm
            flat = _joined([flat, arrived], self.dtype) if not alarm else flat
        if alarm:
            return [], broken, True
        matrices = self._gathered(flat, "batches")
        batches, start = [], 0
        for batch in self.exchange.batches:
            part = matrices[start : start + batch.elements]
            batches.append(ops.reshape(part, (len(batch.members), batch.rows, batch.columns)))
            start += batch.elements
        return batches, broken, False

    def to_holders(self, results: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's part of each parameter's results; a collective, if there are other ranks.

        Args:
            results: of each batch.
        """
        flat = _joined([ops.reshape(each, (-1,)) for each in results], self.dtype)
        if self.group is not None:
            there = self.exchange
            sizes = there.results_send_sizes, there.results_receive_sizes
            arrived, _ = self._sent(self._gathered(flat, "results_sent"), *sizes, np.empty(0, dtype=bool))
            flat = _joined([flat, arrived], self.dtype)
        parts = self._gathered(flat, "locals")
        tensors, start = [], 0
        for shape in self.shapes:
            size = int(np.prod(shape, dtype=np.int64))
            tensors.append(ops.reshape(parts[start : start + size], shape))
            start += size
        return tensors

    def _gathered(self, flat: Tensor, name: str) -> Tensor:
        index = self.index[name]
        return ops.gather(flat, index, 0) if index.size else ops.zeros((0,), dtype=self.dtype)

    def _sent(
        self, stream: Tensor, send: Sequence[int], receive: Sequence[int], head: np.ndarray
    ) -> tuple[Tensor, np.ndarray]:
        """Exchange a stream with a head before each message; return what came without heads, and the heads."""
        size = len(head)
        first, pieces, start = Tensor(head.astype(np.float32)).astype(self.dtype), [], 0
        for elements in send:
            pieces += [first, stream[start : start + elements]] if size else [stream[start : start + elements]]
            start += elements
        outgoing = _joined(pieces, self.dtype)
        arrived = ops.zeros((sum(receive) + size * self.world,), dtype=self.dtype)
        collectives.all_to_all(
            arrived, outgoing, [size + each for each in receive], [size + each for each in send], group=self.group
        )
        heads, bodies, start = [], [], 0
        for elements in receive:
            heads.append(arrived[start : start + size].astype(mindspore.float32).asnumpy())
            bodies.append(arrived[start + size : start + size + elements])
            start += size + elements
        return _joined(bodies, self.dtype), np.stack(heads)


def _joined(tensors: Sequence[Tensor], dtype: Any) -> Tensor:
    filled = [each for each in tensors if each.size]
    return ops.cat(filled) if filled else ops.zeros((0,), dtype=dtype)


class AllGroupsAtOnce(Optimizer):
    """An optimizer that makes its states with itself, and so takes no group later."""

    _complete = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while the optimizer is made.

        Raises:
            NotImplementedError: it has been made.
        """
        name = type(self).__name__
        if self._complete:
            raise NotImplementedError(
                f"{name}: a group can't be added to an optimizer of MindSpore's, whose states are made with it. Make"
                f" another of all groups, {name}([{{'params': ...}}, {{'params': ...}}])"
            )
        super().add_param_group(param_group)


class Muon(MuonArguments, AllGroupsAtOnce):
    """See `hp_optim.Muon` on PyTorch, whose arguments these are; names are those of the Parameters.

    Call it with the gradients of ``parameters``, in their order: ``optimizer(gradients)``.

    Raises:
        ValueError: a number out of its range, an unknown variant, a parameter that is no matrix or that a rule does not
            fit, an empty group, a parameter in two groups; at the first step, other parameters or settings on other
            ranks, on all of them.
    """

    def _begin(self, params: Iterable[Any], defaults: dict[str, Any], rules: Sequence[MatrixRule]) -> None:
        listed = unnamed(params)
        for number, group in enumerate(listed):
            check_group("Muon", {**defaults, **group}, number, known=defaults)
            compute_dtype(None, get_platform().devices.kind, {**defaults, **group}["ns_dtype"])
        with SkipDTensorDispatch():
            Optimizer.__init__(self, listed, defaults)
        self._rules = rules
        self._placed = self._described()
        self.momentum_buffer = ParameterTuple(
            Parameter(ops.zeros_like(local_view(each)), name=f"momentum_buffer.{each.name}", requires_grad=False)
            for each in self.parameters
        )
        self._exchangers: list[tuple[list[int], Exchanger]] | None = None
        self._complete = True

    def construct(self, gradients: Sequence[Tensor]) -> bool:
        """Update the parameters; all ranks of their meshes call it.

        Args:
            gradients: of ``parameters``, in their order; DTensors of their layouts, or this rank's parts.

        Returns:
            Whether they were updated: False where a gradient is not finite on some rank.
        """
        problems: list[Exception] = []
        locals_: list[Tensor] = []
        placed: list[Placed] | None = None
        try:
            check_gradients("Muon", len(gradients), len(self.parameters))
            for number, group in enumerate(self.param_groups):
                check_options("Muon", group, number)
            locals_, placed = [local_view(each) for each in gradients], self._described()
        except Exception as problem:  # whatever it is, the others have to hear of it
            problems.append(problem)
        with local_mode():
            if self._exchangers is None:
                self._exchangers = self._planned(placed, problems)
            alarm = bool(problems) or placed != self._placed
            done = self._stepped(locals_, alarm)
            if done is None:
                self._exchangers = self._planned(placed, problems)
                done = self._stepped(locals_, False)
        return bool(done)

    def _described(self) -> list[Placed]:
        """Describe the parameters to the planner, with the settings that their groups have now."""
        pairs = zip(self.parameters, self._groups())
        return [_placed(parameter, self._rules, group) for parameter, group in pairs]

    def _groups(self) -> list[dict[str, Any]]:
        """Return the group of each parameter, as it is now."""
        return [group for group in self.param_groups for _ in group["params"]]

    def _stepped(self, gradients: Sequence[Tensor], alarm: bool) -> bool | None:
        """Update the parameters; None where a rank raised the alarm, and nothing is changed."""
        done = [self._step(numbers, exchanger, gradients, alarm) for numbers, exchanger in self._exchangers or ()]
        return None if None in done else all(done)

    def _planned(self, placed: list[Placed] | None, problems: list[Exception]) -> list[tuple[list[int], Exchanger]]:
        """Choose owners, for the parameters of each dtype; all ranks choose the same, or all raise."""
        self._exchangers = None
        sorted_: dict[Any, list[int]] = {}
        for number, parameter in enumerate(self.parameters):
            sorted_.setdefault(parameter.dtype, []).append(number)
        meshes = {each._spec.mesh for each in self.parameters if isinstance(each, DTensor)}
        plans: list[OwnerPlan] = []

        def describe() -> list[str]:
            if problems:
                raise problems.pop()  # nothing of this frame holds it
            assert placed is not None
            self._placed = placed
            plans.extend(owner_plan([self._placed[at] for at in numbers], meshes) for numbers in sorted_.values())
            return [each.line(str(dtype)) for dtype, plan in zip(sorted_, plans) for each in plan.parameters]

        agree_on("Muon", describe, world_of(meshes) or [own_rank()])
        exchangers = []
        for (dtype, numbers), plan in zip(sorted_.items(), plans):
            shapes = [tuple(self.momentum_buffer[number].shape) for number in numbers]
            exchangers.append((numbers, Exchanger(plan, own_rank(), shapes, dtype)))
        return exchangers

    def _step(
        self, numbers: Sequence[int], exchanger: Exchanger, gradients: Sequence[Tensor], alarm: bool
    ) -> bool | None:
        groups = self._groups()
        if alarm:
            exchanger.to_owners([], np.zeros(len(numbers), dtype=bool), alarm=True)
            return None
        momenta, updates = [], []
        for at in numbers:
            group, gradient = groups[at], gradients[at]
            factor = scalar(group["momentum"], gradient)
            momenta.append(self.momentum_buffer[at] * factor + gradient)
            updates.append(momenta[-1] * factor + gradient if group["nesterov"] else momenta[-1])
        broken = np.array([not bool(ops.isfinite(gradients[at]).all()) for at in numbers])
        batches, broken, alarm = exchanger.to_owners(updates, broken)
        if alarm:
            return None
        if broken.any():
            names = [self._placed[at].name for at, flag in zip(numbers, broken) if flag]
            warnings.warn(broken_gradient("Muon", names), RuntimeWarning, stacklevel=4)
            return False
        kind, results = get_platform().devices.kind, []
        for batch, plan in zip(batches, exchanger.exchange.batches):
            settings: Any = plan.settings
            matrices = batch.astype(compute_dtype(batch.dtype, kind, settings.dtype))
            orthogonal = orthogonalize(matrices, settings.coefficients, settings.epsilon).astype(batch.dtype)
            results.append(orthogonal * scalar(settings.scale(plan.rows, plan.columns), orthogonal))
        for at, momentum, update in zip(numbers, momenta, exchanger.to_holders(results)):
            group, parameter = groups[at], self.parameters[at]
            lr = float(group["lr"].asnumpy())
            own = local_view(parameter)
            set_local(self.momentum_buffer[at], momentum)
            set_local(parameter, own * scalar(1 - lr * group["weight_decay"], own) - update * scalar(lr, own))
        return True


def unnamed(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Return groups of Parameters: of Parameters, pairs of a name and a Parameter, or groups of either.

    Args:
        params: an optimizer's argument.
    """
    listed = list(params)
    groups = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
    return [
        {**group, "params": [each[1] if isinstance(each, tuple) else each for each in group["params"]]}
        for group in groups
    ]


def _placed(parameter: Any, rules: Sequence[MatrixRule], group: dict[str, Any]) -> Placed:
    name, spec = parameter.name, parameter._spec if isinstance(parameter, DTensor) else None
    shape = tuple(parameter.shape if spec is None else spec.shape)
    return placed_as(name, shape, spec, split(shape, rule_of(name, rules), name), Orthogonalization.of_group(group))
