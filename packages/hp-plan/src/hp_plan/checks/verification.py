"""Results of comparing a plan with one process."""

from __future__ import annotations

from dataclasses import dataclass

TORCH_ONLY = (
    "verify runs on PyTorch only: on MindSpore, lint the plan, then compare the losses of a few steps with those of "
    "one rank (--nproc 1 and a plan without [mesh]) or of PyTorch (examples/compare_frameworks.py)"
)


@dataclass(frozen=True)
class ModuleDifference:
    """Difference of one module from the one-process program.

    Each number is the largest difference of an element over the largest element of the one-process tensor.

    Attributes:
        module: its name.
        output: of what it computed in forward.
        gradient: of its own parameters' gradients.
        weight: of its own parameters and buffers after the optimizer's step.
    """

    module: str
    output: float
    gradient: float
    weight: float

    @property
    def largest(self) -> float:
        """Largest of the three."""
        return max(self.output, self.gradient, self.weight)


@dataclass(frozen=True)
class VerifyResult:
    """A comparison of a plan with one process.

    Attributes:
        steps: for each optimizer step, every module that computes or has parameters, in forward order.
        losses: relative difference of the loss at each step.
        tolerance: the largest difference that passes.
        ranks: number of ranks that the plan ran on.
        notes: parts left out of the model's computation on both sides, such as dropout.
    """

    steps: tuple[tuple[ModuleDifference, ...], ...]
    losses: tuple[float, ...]
    tolerance: float
    ranks: int
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[ModuleDifference, ...]:
        """Modules with their largest differences over the steps."""
        return tuple(
            ModuleDifference(
                same[0].module,
                max(row.output for row in same),
                max(row.gradient for row in same),
                max(row.weight for row in same),
            )
            for same in zip(*self.steps, strict=True)
        )

    @property
    def largest(self) -> float:
        """Largest relative difference of all."""
        return max([*self.losses, *(row.largest for rows in self.steps for row in rows)])

    @property
    def passed(self) -> bool:
        """True if nothing differs by more than the tolerance."""
        return self.largest <= self.tolerance

    @property
    def first(self) -> str | None:
        """First module in forward order that differs; None if none does.

        One wrong output makes every gradient wrong, then every weight, then every output of the next step. So the first
        kind of difference that there was decides: of the first step's outputs, its gradients, its weights, and so on.
        """
        for rows in self.steps:
            for kind in ("output", "gradient", "weight"):
                for row in rows:
                    if getattr(row, kind) > self.tolerance:
                        return row.module
        return None
