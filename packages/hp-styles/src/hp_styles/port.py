"""Protocols that a framework implements for hp-styles: the differences between torch's Module and MindSpore's Cell."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from hp_dtensor import DeviceMesh, Placement
from hp_platform.extend import load_port

if TYPE_CHECKING:
    from hp_dtensor.extend import TensorSpec
    from hp_styles.context.plan import Settings
    from hp_styles.context.rounds import Rounds

Module = Any
Tensor = Any
Placements = tuple[Placement, ...]
SparseStyle = Any  # a style of `hp_styles.context.sparse`, which is above this module


@dataclass(frozen=True)
class Gathered:
    """Layouts of a Linear's product whose operands are gathered for it; placements, one per mesh axis.

    Args:
        blocks: number of equal blocks of output features that the weight and the bias are seen in, ``[blocks, features,
            ...]``: what one axis cuts of a block can be gathered while another axis has the blocks.
        inputs: of the input between layers, and of the one that is multiplied.
        weights: of the weight in blocks, and of the one that is multiplied.
        outputs: of the product, and of the output between layers.
        output_gradient: of the output's gradient that is multiplied.
        input_gradient: of its product with the weight.
        weight_gradient: of its product with the input, in blocks.
        bias: of the bias in blocks that is added to the output between layers.
    """

    blocks: int
    inputs: tuple[Placements, Placements]
    weights: tuple[Placements, Placements]
    outputs: tuple[Placements, Placements]
    output_gradient: Placements
    input_gradient: Placements
    weight_gradient: Placements
    bias: Placements


class Modules(Protocol):
    """Modules, their parameters and values; `<framework>/modules.py`.

    Attributes:
        Tensor: the framework's class of tensors.
    """

    Tensor: type

    def named_modules(self, module: Module) -> dict[str, Module]:
        """List all modules inside, the module itself among them, each under every name that it has."""
        ...

    def named_parameters(self, module: Module) -> dict[str, Any]:
        """List all parameters, each under every name that it has."""
        ...

    def kind(self, module: Module) -> str:
        """Tell a "linear" from an "embedding" and from "other"."""
        ...

    def input_features(self, module: Module) -> int | None:
        """Count the features of a linear layer's input; None of another module."""
        ...

    def output_features(self, module: Module) -> int:
        """Count the features of a linear layer's output."""
        ...

    def sized_dim(self, module: Module) -> tuple[int, int] | None:
        """Return the dim of a module's input that its weights give a size, and the size, where they tell."""
        ...

    def described(self, module: Module) -> str:
        """Name a module's class, for an error."""
        ...

    def partition(
        self, module: Module, mesh: DeviceMesh, layouts: Mapping[str, tuple[Placement, ...]], src_data_rank: int | None
    ) -> None:
        """Lay out a module's own parameters, those that `layouts` doesn't name replicated."""
        ...

    def place(
        self, module: Module, name: str, mesh: DeviceMesh, placement: Placement, src_data_rank: int | None
    ) -> None:
        """Lay out one parameter."""
        ...

    def replicate(self, module: Module, mesh: DeviceMesh, src_data_rank: int | None) -> None:
        """Replicate all parameters inside."""
        ...

    def replicate_statistics(self, module: Module, mesh: DeviceMesh, src_data_rank: int | None) -> None:
        """Replicate a module's running statistics, or refuse what can't be kept alike."""
        ...

    def redistribute(self, x: Any, spec: TensorSpec) -> Any:
        """Move a DTensor to a layout."""
        ...

    def redistribute_shared(self, x: Any, spec: TensorSpec, src: TensorSpec | None = None) -> Any:
        """Move a value, which is a part as `src` says where it is plain; readers that follow share what was moved."""
        ...

    def refuse_foreign(self, x: Tensor, what: str) -> None:
        """Refuse a DTensor of the framework's own."""
        ...

    def around_calls(self, module: Module) -> None:
        """Let `hp_styles.inputs` know where a call of the module begins and ends."""
        ...

    def runs_again(self) -> bool:
        """Tell whether autograd runs a module again, with what ranks have compared."""
        ...

    def run_replicated(self, module: Module, mesh: DeviceMesh) -> None:
        """Run the module's forward on whole plain tensors; results are replicated DTensors."""
        ...

    def run_pointwise(self, module: Module) -> None:
        """Run the forward of a module of one input on this rank's part of it, laid out as it is."""
        ...

    def run_experts(self, module: Module, mesh: DeviceMesh) -> None:
        """Run the forward of experts on this rank's part of the weights; the results are summed over the ranks."""
        ...

    def run_gathered(self, module: Module, mesh: DeviceMesh, layouts: Gathered) -> None:
        """Run the product of a linear layer on operands that are gathered for it, in forward and in backward."""
        ...

    def run_overlapped(
        self, module: Module, mesh: DeviceMesh, op: Literal["gather", "scatter"], dim: int
    ) -> Callable[[Tensor], bool]:
        """Run a linear layer with the collective of its input or its output under its product, where that pays.

        Args:
            module: the layer.
            mesh: of one axis.
            op: "gather" its input along `dim`, or "scatter" its output.
            dim: the sequence.

        Returns:
            A function that tells of an input (a DTensor or this rank's part) whether the layer gathers it by itself.
        """
        ...

    def divide_inside(self, module: Module, mesh: DeviceMesh) -> None:
        """Divide a plain input, one that each rank of a region has, by the number of ranks."""
        ...

    def sharded_loss(self, *, z_loss: float) -> AbstractContextManager[None]:
        """Compute cross entropies over sharded classes inside."""
        ...


class Context(Protocol):
    """Context parallelism; `<framework>/context`."""

    def attach(self, module: Module, mesh: DeviceMesh, settings: Settings, rounds: Rounds) -> None:
        """Let a module's attention see the keys of all ranks."""
        ...

    def attach_sparse(self, module: Module, mesh: DeviceMesh, style: SparseStyle) -> None:
        """Let a part of sparse attention see what all ranks have."""
        ...

    def enclose(self, root: Module, rounds: Rounds, mesh: DeviceMesh, load_balance: bool) -> None:
        """Let a root's calls begin and end the rounds of its attention."""
        ...

    def attention_over(self, mesh: DeviceMesh, lengths: Iterable[int]) -> AbstractContextManager[None]:
        """Let attention inside see the keys of all ranks; sequences have these lengths on a rank."""
        ...

    def cut_in_place(
        self, buffers: Sequence[Tensor], parts: Sequence[Tensor], restored: Sequence[Tensor]
    ) -> AbstractContextManager[None]:
        """Let buffers hold their parts; at the end, those of `restored`, what they held before."""
        ...

    def shard(self, whole: Tensor, mesh: DeviceMesh, seq_dim: int, load_balance: bool) -> Tensor:
        """Get this rank's part of a sequence."""
        ...

    def unshard(self, local: Tensor, mesh: DeviceMesh, seq_dim: int, load_balance: bool) -> Tensor:
        """Put a sequence together of all ranks' parts."""
        ...


@functools.cache
def modules() -> Modules:
    """Get what the framework does with modules."""
    return load_port(Modules, "modules")


@functools.cache
def context() -> Context:
    """Get what the framework does for context parallelism."""
    return load_port(Context, "context")
