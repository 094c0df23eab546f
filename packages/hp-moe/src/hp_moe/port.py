"""What a framework supplies to hp-moe."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from hp_dtensor import DeviceMesh, Placement
from hp_moe.routes.dispatch import Sources
from hp_platform.extend import load_port

Tensor = Any
Module = Any


class Transfer(Protocol):
    """Tensors on their way between the ranks of a group, forward and backward.

    ``end(*begin(*ahead(*tensors)))`` is an exchange. Forward runs from ``begin`` to ``end``. Backward runs from ``end``
    to ``ahead``: what is computed between ``ahead`` and ``end``, its gradients are under the exchange of gradients.

    Attributes:
        early: backward begins in the node of ``begin``, which comes after that of ``end``: who calls ``begin`` has
            nodes of its own around it.
    """

    early: bool

    def ahead(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Mark the place where backward waits."""
        ...

    def begin(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Begin to exchange; return what is filled when ``end`` returns."""
        ...

    def end(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Wait for what ``begin`` returned, and return it."""
        ...


class Traits(NamedTuple):
    """What a tensor is.

    Attributes:
        dtype: its name.
        numbers: ``"integer"``, ``"floating"`` or ``"other"``.
        device: that it is on; empty where there is one only.
        recorded: operations on it are, for a gradient.
    """

    dtype: str
    numbers: str
    device: str
    recorded: bool


class Port(Protocol):
    """Rows of tokens and modules of experts; `<framework>/port.py`. All of it is differentiable that has gradients."""

    # ---- modules ----
    def is_weight(self, value: Any) -> bool:
        """Tell whether a value is a tensor of three dims."""
        ...

    def distribute(
        self,
        module: Module,
        mesh: DeviceMesh,
        placements: Mapping[str, tuple[Placement, ...]],
        src_data_rank: int | None,
    ) -> None:
        """Lay out parameters of a module."""
        ...

    def replace_forward(self, module: Module, forward: Callable[..., Any]) -> None:
        """Let a module's calls run ``forward(module, ...)``; its hooks stay, and copies of it run their own."""
        ...

    def belongings(
        self, module: Module, names: Sequence[str], cut: Placement, axes: int, optimizers: Sequence[Any]
    ) -> list[str]:
        """List what moves with parameters to other ranks: themselves, gradients, states in optimizers.

        Args:
            module: of experts.
            names: of its parameters.
            cut: their placement on the first mesh axis.
            axes: of their mesh.
            optimizers: whose states move.

        Raises:
            NotImplementedError: something keeps them from moving.
        """
        ...

    def move(self, module: Module, names: Sequence[str], cut: Placement, optimizers: Sequence[Any]) -> None:
        """Lay parameters, their gradients and states out by another placement on the first mesh axis."""
        ...

    def named_modules(self, model: Module) -> Iterable[tuple[str, Module]]:
        """List a model's modules and their names, the model among them."""
        ...

    # ---- inputs ----
    def traits(self, value: Tensor) -> Traits:
        """Return what a tensor is."""
        ...

    def listed(self, value: Tensor) -> list[Any]:
        """Return a tensor's numbers, on the host."""
        ...

    def pinned(self, out: Tensor, chosen: Tensor, name: str) -> Tensor:
        """Return a layer's output; backward raises where a block that was computed again chose other experts."""
        ...

    # ---- numbers ----
    def slots(self, chosen: Tensor, table: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Look numbers up in a table; return them flat, and how many are none of its places, which count as 0."""
        ...

    def not_finite(self, values: Tensor) -> Tensor:
        """Count values that are not finite."""
        ...

    def count(self, slots: Tensor, size: int) -> Tensor:
        """Count how often each number below a size occurs."""
        ...

    def order(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return the places of numbers in ascending order, equal ones as they come; and where each place is there."""
        ...

    def copies(self, slots: Tensor, token: Tensor, tokens: int, widths: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """List what goes to each rank once.

        Args:
            slots: for each choice of any token, the number of its expert among all that ranks compute.
            token: of each choice.
            tokens: their number.
            widths: how many experts each rank computes.

        Returns:
            The token of each copy, ordered by rank; for each choice its copy's place among those to that rank; the
            copies to each rank.
        """
        ...

    def message(self, parts: Sequence[Tensor | tuple[int, ...]], like: Tensor) -> Tensor:
        """Join tensors of integers and plain integers, on the device of a tensor; plain ones are sent there once."""
        ...

    def split(self, numbers: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """Cut a tensor into parts."""
        ...

    def exchange_numbers(
        self, message: Tensor, sent: Sequence[int], received: Sequence[int], group: Any
    ) -> Callable[[], tuple[list[int], list[int]]]:
        """Begin to exchange integers with all ranks; return what waits, and returns those sent and received."""
        ...

    def positions(self, blocks: Sequence[tuple[int, int]], like: Tensor) -> Tensor:
        """List the numbers of blocks (first, count), one after the other, on the device of a tensor."""
        ...

    def seats(self, slots: Tensor, size: int, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
        """Give each number below ``size`` so many seats, which its occurrences take as they come; no wait of the host.

        Returns:
            For each occurrence its seat, ``number * capacity + place``, or ``size * capacity`` where none is left; for
            each seat its occurrence, or their number where it is empty; the occurrences without one, for each number.
        """
        ...

    def recomputes(self) -> bool:
        """Tell whether backward is computing a forward again."""
        ...

    def spoiled(self, values: Tensor, wrong: Tensor) -> Tensor:
        """Return values as they are where ``wrong`` is 0, else infinite or not a number; no wait of the host."""
        ...

    def ordered_range(self, slots: Tensor, first: int, width: int, count: int) -> Tensor:
        """List the places of numbers from ``first`` on below ``first + width``, which are ``count``, as they ascend."""
        ...

    def counted(self, count: int, times: int, like: Tensor) -> Tensor:
        """List the numbers below a count, each so many times."""
        ...

    def repeated_table(self, table: tuple[int, ...], sizes: Sequence[int], like: Tensor) -> Tensor:
        """List the numbers of a table, each as often as its size says, on the device of a tensor."""
        ...

    def repeated_numbers(self, counts: Tensor | Sequence[int], like: Tensor) -> Tensor:
        """List each place of ``counts`` as often as it says."""
        ...

    # ---- rows ----
    def take(self, rows: Tensor, places: Tensor) -> Tensor:
        """Return the rows at some places."""
        ...

    def spread(self, rows: Tensor, order: Tensor, inverse: Tensor, times: int) -> Tensor:
        """Repeat each row so many times and put the copies in an order, of numbers row * times + copy."""
        ...

    def transfer(self, group: Any, sent: Sequence[Sequence[int]], received: Sequence[Sequence[int]]) -> Transfer:
        """Plan to exchange tensors with the ranks of a group; ranks without rows take part.

        Args:
            group: of the ranks; None is this one alone.
            sent: for each tensor the rows to each rank.
            received: the rows from each.
        """
        ...

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
        """Send rows to the ranks of a group and receive theirs, at once."""
        ...

    def padded(self, rows: Tensor, size: int) -> Tensor:
        """Append rows of zeros up to a number of rows."""
        ...

    def gathered(self, rows: Tensor, group: Any) -> Tensor:
        """Return the rows of all ranks of a group, equally many of each, one rank after the other."""
        ...

    def scattered(self, rows: Tensor, group: Any) -> Tensor:
        """Sum rows over the ranks of a group and return this rank's part of them."""
        ...

    def combined(self, rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        """Sum the rows of each token with weights ``[tokens, choices]``; rows are in an order as ``spread`` makes."""
        ...

    def summed(self, rows: Tensor, places: Tensor, count: int) -> Tensor:
        """Add rows to ``count`` rows of zeros, at places."""
        ...

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return rows one part after the other."""
        ...

    def ones(self, rows: Tensor) -> Tensor:
        """Return a weight of one for each row."""
        ...

    # ---- experts ----
    def piece_sums(self) -> Any:
        """Return what keeps the gradients of pieces over the passes of a step.

        Raises:
            NotImplementedError: the framework has nothing for it.
        """
        ...

    def in_pieces(
        self,
        sums: Any,
        sources: Sources,
        group: Any,
        leaves: Sequence[Tensor],
        weights: Mapping[str, Tensor],
        guests: Mapping[str, Tensor],
        rows: Tensor,
        run: Callable[[Tensor, list[int], Callable[[str], Tensor]], Tensor],
    ) -> Tensor:
        """Compute each source's rows for each expert by themselves, and add gradients up in a fixed tree.

        Args:
            sums: from ``piece_sums``.
            sources: the pieces.
            group: of the ranks.
            leaves: the parameters, whose gradients are replaced by the sums over the passes of a step.
            weights: their parts here, by name.
            guests: the parts of replicated experts, by name, if there are any.
            rows: in the order of pieces.
            run: computes rows of one expert, from their number and the function that returns its parts.
        """
        ...

    def grouped(self, rows: Tensor, weight: Tensor, sizes: Sequence[int], transposed: bool, kernel: bool) -> Tensor:
        """Multiply each group of rows by a matrix of its own; with ``kernel``, by one kernel for all where there is."""
        ...

    def held(self, weight: Tensor) -> Tensor:
        """Return a weight of grouped products whose gradient backward computes when it comes to this place."""
        ...

    def repeated(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """Repeat each row so many times."""
        ...

    def recomputed(self, function: Callable[..., Tensor], *values: Tensor) -> Tensor:
        """Apply a function without parameters, of which backward saves the inputs alone."""
        ...

    def is_swiglu(self, module: Module) -> bool:
        """Tell whether packed experts compute ``silu(gate) * up``, and nothing else, between their products."""
        ...

    def swiglu(self, inner: Sequence[Tensor], weights: Tensor | None) -> Tensor:
        """Return ``silu(gate) * up * weights``, of which backward saves the inputs alone.

        Args:
            inner: gate and up projection ``[rows, features]``, or one tensor with both, one after the other.
            weights: ``[rows, 1]``; None is 1.
        """
        ...

    def cast(self, value: Tensor, like: Tensor) -> Tensor:
        """Return a value in the dtype of another."""
        ...

    def varying(self, value: Any) -> Tensor:
        """Return the local part of a replicated DTensor, whose gradient is a part of a sum."""
        ...


@functools.cache
def port() -> Port:
    """Get what the framework in use supplies."""
    return load_port(Port)
