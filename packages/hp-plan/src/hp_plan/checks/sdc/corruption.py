"""What was found of silent data corruption, and the error that ends a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, Literal


class Verdict(Enum):
    """How a corruption is taken.

    Attributes:
        TRANSIENT: once; the same work done again was right.
        PERSISTENT: each time.
        IRREPRODUCIBLE: the same work gives other bits without a fault, so nothing can be compared.
        UNDECIDED: results differ, and nobody knows which is right.
    """

    TRANSIENT = "transient"
    PERSISTENT = "persistent"
    IRREPRODUCIBLE = "irreproducible"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Corruption:
    """Bits that differ where the same work was done twice.

    Attributes:
        step: from 1.
        ranks: the rank that is wrong; several where it is one of them and nobody knows which.
        hosts: theirs.
        where: "weight" or "moment" (after the step), "compute" (of a module), or "wire": what arrived was not sent.
        name: of the parameter, of a state as `parameter/state`, of the first module whose bits differ with its phase as
            `forward model.layers.0.mlp`, or of the group of parameters that was gathered.
        verdict: see `Verdict`.
        bits: the sums of bits that differ: those of the ranks, then the others' (`hp_plan.Reading.bits`).
        action: what became of it, for people.
    """

    step: int
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    where: Literal["weight", "moment", "compute", "wire"]
    name: str
    verdict: Verdict
    bits: tuple[int, ...]
    action: str = ""

    def __str__(self) -> str:
        what = {"compute": "", "wire": "what arrived of ", "weight": "weight ", "moment": "state "}[self.where]
        if len(self.ranks) == 1:
            who = f"rank {self.ranks[0]} ({self.hosts[0]})"
        else:
            shown = ", ".join(map(str, self.ranks[:4])) + (", ..." if len(self.ranks) > 4 else "")
            hosts = ", ".join(dict.fromkeys(self.hosts[:4]))
            who = f"one of ranks {shown} ({hosts})" if self.ranks else "an unknown rank"
        action = f": {self.action}" if self.action else ""
        return f"step {self.step}: {self.verdict.value} corruption of {what}{self.name} on {who}{action}"

    def to_dict(self) -> dict[str, Any]:
        """Return the values as JSON has them; `from_dict` reads them."""
        return {**asdict(self), "verdict": self.verdict.value}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Corruption:
        """Read what `to_dict` has written."""
        plain = {name: tuple(each) if isinstance(each, list) else each for name, each in values.items()}
        return cls(**{**plain, "verdict": Verdict(values["verdict"])})


class CorruptionError(RuntimeError):
    """Silent data corruption that a run can't go on with; raised on all ranks alike.

    Attributes:
        corruptions: what was found.
    """

    def __init__(self, message: str, corruptions: tuple[Corruption, ...]) -> None:
        super().__init__(message)
        self.corruptions = corruptions

    def __reduce__(self) -> tuple[Any, ...]:
        return CorruptionError, (str(self), self.corruptions)
