"""What a plan is read against: a model's names, kinds and shapes, without the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class ModuleOutline:
    """One module of a model.

    Attributes:
        type_name: its class.
        kind: what a style can be for; a container holds modules and is never called.
        out_features: of a linear layer.
        head_dim: its attribute of that name, where it is a number: of an attention.
    """

    type_name: str
    kind: Literal["linear", "embedding", "container", "other"] = "other"
    out_features: int | None = None
    head_dim: int | None = None


@dataclass(frozen=True)
class ModelOutline:
    """A model by its names, kinds and shapes.

    Attributes:
        modules: name -> outline, in the order of the model, which itself is `""`.
        parameters: their names, each tensor once.
        elements: how many numbers they have together.
        trained: how many of these numbers get gradients.
        tied: names of parameters that are one tensor, each group in the order of the model.
        base: name of the base model inside the model (`model`), empty where it is the model.
        config: the model's configuration, None where it has none.
        head_table: the model's own tensor parallel styles for what is outside the base model.
    """

    modules: Mapping[str, ModuleOutline]
    parameters: tuple[str, ...] = ()
    elements: int = 0
    trained: int = 0
    tied: tuple[tuple[str, ...], ...] = ()
    base: str = ""
    config: Any = None
    head_table: Mapping[str, str] = field(default_factory=dict)

    @property
    def type_name(self) -> str:
        """The model's class."""
        return self.modules[""].type_name

    @property
    def names(self) -> list[str]:
        """The names of the modules inside."""
        return [name for name in self.modules if name]
