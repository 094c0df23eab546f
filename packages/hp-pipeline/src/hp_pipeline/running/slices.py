"""What the slices of a sequence pass on to each other inside of a stage.

Note [Slices]
    A sequence that is cut into slices goes through a stage slice by slice, and each token meets those before it: the
    keys and values of causal attention, the state of a recurrence. A stage puts such tensors into its ``SequenceState``
    and finds there what earlier slices put. Each slice has a graph of its own. Backward goes through the slices from
    the last to the first; that of a later slice leaves the gradients of what it took of an earlier one, whose backward
    then begins from its outputs and from what it had put.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hp_pipeline.messages.channels import Message
from hp_pipeline.port import Arrival, port
from hp_pipeline.stages.stage import PipelineStage

# ---- cutting a batch ----


class BatchDimSpec:
    """The dim along which an input is cut into micro-batches.

    Args:
        batch_dim: the dim; -1 leaves the input whole, so that every micro-batch gets all of it.
    """

    def __init__(self, batch_dim: int) -> None:
        if not isinstance(batch_dim, int) or batch_dim < -1:
            raise ValueError(
                f"BatchDimSpec: batch_dim must be a dim from 0, or -1 for an input not cut; got {batch_dim}."
            )
        self.batch_dim = batch_dim

    def __repr__(self) -> str:
        """Write the constructor."""
        return f"BatchDimSpec({self.batch_dim})"

    @classmethod
    def from_tuple(cls, dims: Sequence[int]) -> tuple[BatchDimSpec, ...]:
        """Return the dims of positional inputs."""
        return tuple(map(cls, dims))

    @classmethod
    def from_dict(cls, dims: Mapping[str, int]) -> dict[str, BatchDimSpec]:
        """Return the dims of keyword inputs."""
        return {name: cls(dim) for name, dim in dims.items()}


Dim = BatchDimSpec | int


class Kind(NamedTuple):
    """A way to cut inputs, and how errors speak of it."""

    option: str
    dim: int
    parts: str
    size: str


BATCH = Kind("batch_dim", 0, "micro-batches", "rows")
SEQUENCE = Kind("seq_dim", 1, "slices", "tokens")


def cut(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    parts: int,
    args_dims: Sequence[Dim] | None,
    kwargs_dims: Mapping[str, Dim] | None,
    kind: Kind = BATCH,
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Cut a batch into micro-batches, or sequences into slices.

    Tensors, also those in lists, tuples and dictionaries, are cut along ``kind.dim`` unless ``args_dims`` or
    ``kwargs_dims`` say otherwise; what is no tensor, or has no dims, is every part's.

    Raises:
        ValueError: a size that does not divide, a dim that a tensor has not, an object that holds tensors, or a name
            that no input has.
    """
    dims = list(args_dims or ())
    if len(dims) > len(args):
        raise ValueError(f"args_{kind.option} names {len(dims)} inputs, but {len(args)} positional ones were given.")
    unknown = set(kwargs_dims or ()) - set(kwargs)
    if unknown:
        raise ValueError(f"kwargs_{kind.option} names {sorted(unknown)}, but the keyword inputs are {sorted(kwargs)}.")
    dims += [kind.dim] * (len(args) - len(dims))
    columns = [_pieces(f"input {place}", value, dim, parts, kind) for place, (value, dim) in enumerate(zip(args, dims))]
    named = {
        name: _pieces(f"input {name!r}", value, (kwargs_dims or {}).get(name, kind.dim), parts, kind)
        for name, value in kwargs.items()
    }
    return [
        (tuple(column[part] for column in columns), {name: column[part] for name, column in named.items()})
        for part in range(parts)
    ]


def _pieces(what: str, value: Any, dim: Dim, parts: int, kind: Kind) -> list[Any]:
    place = (dim if isinstance(dim, BatchDimSpec) else BatchDimSpec(dim)).batch_dim
    if place >= 0 and not port().is_tensor(value):
        leaves, structure = port().flatten(value)
        if len(leaves) != 1 or leaves[0] is not value:  # a nest
            pieces = [_pieces(f"{what}, in its leaf {at},", leaf, dim, parts, kind) for at, leaf in enumerate(leaves)]
            return [port().unflatten([each[part] for each in pieces], structure) for part in range(parts)]
        held = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
        if any(map(port().is_tensor, held.values())):
            raise ValueError(
                f"{what} is a {type(value).__name__} that holds tensors, which are not cut into {kind.parts}: pass a"
                f" dictionary, list or tuple of them, or leave it whole by a {kind.option} of -1."
            )
    shape = port().shape(value) if port().is_tensor(value) else ()
    if place < 0 or not shape:
        return [value] * parts
    if place >= len(shape):
        raise ValueError(f"{what} has shape {shape} and no dim {place} to cut; name its dim, or -1 to leave it whole.")
    if shape[place] % parts:
        raise ValueError(
            f"{what} has {shape[place]} {kind.size} along dim {place}, which {parts} {kind.parts} do not divide; its"
            f" shape is {shape}."
        )
    return port().cut(value, place, parts)


KEYWORD = "seq_state"
"""The keyword by which a stage takes its state."""


class _Taken(NamedTuple):
    """What a slice took of an earlier one."""

    source: SequenceState
    name: str
    arrival: Any


class SequenceState:
    """What a stage keeps of the earlier slices of a sequence, and leaves to later ones: Note [Slices].

    A stage's module that runs in slices takes it by the keyword ``seq_state``. For a module that also runs on whole
    sequences, ``SequenceState()`` is that of a sequence in one slice::

        def forward(self, x, seq_state):
            query, key, value = self.qkv(x).chunk(3, -1)
            key = seq_state.extend("key", key, dim=1)
            value = seq_state.extend("value", value, dim=1)

    Args:
        index: the slice, from 0.
        slices: into how many the sequence is cut.
        before: the state of the slice before.

    Attributes:
        index: the slice, from 0.
        slices: into how many the sequence is cut.
    """

    def __init__(self, index: int = 0, slices: int = 1, before: SequenceState | None = None) -> None:
        self.index, self.slices = index, slices
        self._before = before
        self._values: dict[str, Any] = {}
        self._gradients: dict[str, Any] = {}
        self._taken: list[_Taken] = []
        self._earlier: dict[str, list[Any]] = {}
        self._closed = False
        self._recording = port().is_recording()

    def put(self, name: str, tensor: Any) -> None:
        """Leave a tensor to later slices.

        Args:
            name: by which they take it; of this module alone, such as ``"layers.0.key"``.
            tensor: what is left; not to be written to.

        Raises:
            ValueError: this slice has put something under the name before.
            RuntimeError: gradients are not recorded here though the stage's are: they would be lost.
        """
        if self._closed:  # the stage is computed again, for its backward
            return
        if name in self._values:
            raise ValueError(
                f"SequenceState: slice {self.index} has put {name!r} already; each layer needs a name of its own."
            )
        if self._recording and not port().is_recording():
            raise RuntimeError(
                f"SequenceState: {name!r} is put where no gradients are recorded, so those of later slices would be"
                " lost. Put it outside of no_grad; a checkpoint must not be reentrant (use_reentrant=False)."
            )
        self._values[name] = tensor

    def earlier(self, name: str) -> list[Any]:
        """List what the earlier slices have put under a name, the first slice's first; gradients flow back to them."""
        if name not in self._earlier:
            self._earlier[name] = [self._take(state, name) for state in self._chain() if name in state._values]
        return list(self._earlier[name])

    def extend(self, name: str, tensor: Any, dim: int) -> Any:
        """Put a tensor, and return it behind those of the earlier slices, joined along a dim."""
        self.put(name, tensor)
        earlier = self.earlier(name)
        return port().concatenate([*earlier, tensor], dim) if earlier else tensor

    def _chain(self) -> list[SequenceState]:
        chain: list[SequenceState] = []
        state = self._before
        while state is not None:
            chain.append(state)
            state = state._before
        return chain[::-1]

    def _take(self, source: SequenceState, name: str) -> Any:
        value = source._values[name]
        arrival = port().arrive([port().detach(value)], [port().needs_gradient(value)])
        self._taken.append(_Taken(source, name, arrival))
        return arrival.tensors[0]

    # ---- for the runner ----
    def close(self) -> None:
        """End the slice's forward."""
        self._closed = True

    def arrivals(self) -> list[Any]:
        """List the roots of the slice's graph that earlier slices put."""
        return [taken.arrival for taken in self._taken]

    def roots(self) -> list[tuple[Any, Any]]:
        """List what the slice put and later slices differentiated, with their gradients."""
        gradients, self._gradients = self._gradients, {}
        return [(self._values[name], gradient) for name, gradient in gradients.items()]

    def pass_back(self) -> None:
        """Leave the gradients of what was taken to the slices that put it, after backward."""
        for source, name, arrival in self._taken:
            (gradient,) = arrival.gradients()
            if gradient is not None:
                own = source._gradients.get(name)
                source._gradients[name] = gradient if own is None else own + gradient
        self._taken, self._earlier = [], {}


def refuse_slices(module: Callable[..., Any]) -> str | None:
    """Say why a stage's module cannot run in slices of sequences, or None."""
    try:
        parameters = inspect.signature(port().call_of(module)).parameters
    except (TypeError, ValueError):  # written in C
        parameters = {}
    if KEYWORD in parameters:
        return None
    return (
        f"takes no {KEYWORD!r}, so tokens of a slice would not meet those of the slices before. Let it take the keyword"
        f" {KEYWORD!r}, a SequenceState, and pass on its keys and values (or whatever later tokens need) by it; a"
        " module whose tokens do not meet may ignore it"
    )


def check_slices(stages: Sequence[PipelineStage], slices: int) -> None:
    """Refuse stages that cannot run in so many slices.

    Raises:
        ValueError: a stage without backward, or whose module takes no state.
    """
    for stage in stages if slices > 1 else ():
        if not stage.has_backward:
            raise ValueError(
                f"seq_slices={slices} is for training; a stage with has_backward=False runs whole sequences,"
                " seq_slices=1."
            )
        why = refuse_slices(stage.submodule)
        if why:
            raise ValueError(f"seq_slices={slices}: the module of {stage} {why}.")


def whole_losses(losses: Sequence[Any], slices: int, *, mean: bool) -> list[Any]:
    """Return the loss of each micro-batch.

    Args:
        losses: of all slices, those of a micro-batch one after the other.
        slices: into how many sequences are cut.
        mean: take the mean of a micro-batch's slices, else the sum.
    """
    if slices == 1:
        return list(losses)
    divisor = slices if mean else 1
    return [sum(losses[at + 1 : at + slices], losses[at]) / divisor for at in range(0, len(losses), slices)]


# ---- state of a micro-batch between its steps ----


class MicroBatchState:
    """What a stage keeps of one piece between its steps.

    Attributes:
        arrivals: what came from the stages before.
        outputs: what the stage returned, until backward.
        gradients: for the outputs, one list of leaves from each stage after it, by that stage.
        deferred: the gradients of weights that backward put off.
        swap: what moves saved tensors to the host and back; None where they stay.
        state: what slices of the sequence pass on to each other; None where sequences are whole.
        joined: inputs that had memory in common in the stage that they came from: that stage, the input, its version.
    """

    __slots__ = ("arrivals", "deferred", "gradients", "joined", "outputs", "state", "swap")

    def __init__(self) -> None:
        self.arrivals: list[Arrived] = []
        self.outputs: Message | None = None
        self.gradients: dict[int, Sequence[Any]] = {}
        self.deferred: Any = None
        self.swap: Any = None
        self.state: SequenceState | None = None
        self.joined: list[tuple[int, Any, int]] = []

    def watch_joined(self, source: int, tensors: Sequence[Any]) -> None:
        """Note inputs that were views of the same memory where they came from: here each has its own."""
        self.joined += [(source, tensor, port().version(tensor)) for tensor in tensors]

    def check_joined(self, stage: int) -> None:
        """Refuse a write to one of them.

        Raises:
            ValueError: the stage wrote to one.
        """
        joined, self.joined = self.joined, []
        for source, tensor, version in joined:
            if port().version(tensor) != version:
                raise ValueError(
                    f"stage {stage} wrote in place to an input that has memory in common with another one, as views of"
                    f" one tensor in stage {source} have: write to a clone() of it, or pass the whole tensor once"
                )


class Arrived(NamedTuple):
    """A message at the root of a stage's graph."""

    source: int
    arrival: Arrival
    message: Message
