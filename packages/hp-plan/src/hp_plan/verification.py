"""What comparing a plan with one process gives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModuleDifference:
    """How far one module is from the one-process program.

    Each number is the largest difference of an element over the largest element of the one-process tensor.

    Attributes:
        module: its name.
        output: of what it computed in forward.
        gradient: of its own parameters' gradients.
        weight: of its own parameters after the optimizer's steps.
    """

    module: str
    output: float
    gradient: float
    weight: float

    @property
    def largest(self) -> float:
        """The largest of the three."""
        return max(self.output, self.gradient, self.weight)


@dataclass(frozen=True)
class VerifyResult:
    """A comparison of a plan with one process.

    Attributes:
        rows: every module that computes or has parameters, in forward order.
        loss: largest relative difference of the loss over the steps.
        tolerance: the largest difference that passes.
        ranks: how many ranks the plan ran on.
        steps: optimizer steps that were compared.
    """

    rows: tuple[ModuleDifference, ...]
    loss: float
    tolerance: float
    ranks: int
    steps: int

    @property
    def largest(self) -> float:
        """The largest relative difference of all."""
        return max([self.loss, *(row.largest for row in self.rows)])

    @property
    def passed(self) -> bool:
        """Whether nothing differs by more than the tolerance."""
        return self.largest <= self.tolerance

    @property
    def first(self) -> str | None:
        """The first module in forward order that differs, None where none does.

        A wrong forward pass makes every gradient wrong, those of earlier modules too; so the first wrong output decides
        where there is one, and the first wrong gradient or weight where all outputs are right.
        """
        outputs = [row.module for row in self.rows if row.output > self.tolerance]
        others = [row.module for row in self.rows if row.largest > self.tolerance]
        return next(iter([*outputs, *others]), None)
