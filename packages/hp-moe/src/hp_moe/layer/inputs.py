"""What a layer of experts may be called with, and what all ranks are told where one of them is not.

Note [What is wrong on one rank]
    A rank whose inputs are wrong takes part in the exchange of numbers all the same, and says there that they are. All
    ranks then exchange words and raise the same error, before any of them sends a row: none waits for another.
"""

from __future__ import annotations

import functools
import itertools
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import hp_dtensor
from hp_dtensor import DeviceMesh, Partial, Replicate, Shard
from hp_moe.layer.experts import Description
from hp_moe.port import Traits, port

Tensor = Any
Restore = Callable[[Tensor], Tensor]

_BYTES = 640


def problem(own: Description, parameter: Any, tokens: Tensor, chosen: Tensor, weights: Tensor) -> str | None:
    """Say what is wrong with the shapes, dtypes and devices of a call; None if nothing is.

    Args:
        own: the module of experts.
        parameter: one of its parameters.
        tokens: ``[tokens, hidden]``.
        chosen: ``[tokens, choices]``, numbers of experts.
        weights: ``[tokens, choices]``.
    """
    shape, choices = tuple(tokens.shape), tuple(chosen.shape)
    if len(shape) != 2 or shape[1] != own.hidden:
        return f"has tokens of shape {shape}; its experts take [tokens, {own.hidden}]"
    if len(choices) != 2 or choices[0] != shape[0] or tuple(weights.shape) != choices:
        return f"has choices of shape {choices} and weights of shape {tuple(weights.shape)} for {shape[0]} tokens"
    if choices[1] > own.experts:
        return f"has {choices[1]} choices a token, but there are {own.experts} experts"
    f = port()
    at, experts = f.traits(tokens), f.traits(parameter)
    for what, each, numbers in (
        ("tokens", at, "floating"),
        ("choices", f.traits(chosen), "integer"),
        ("weights", f.traits(weights), "floating"),
    ):
        if each.numbers != numbers:
            return f"has {what} of {each.dtype}; they must have {'an' if numbers[0] == 'i' else 'a'} {numbers} dtype"
        if each.device != experts.device:
            return f"has {what} on {each.device}, but its experts are on {experts.device}: bring both to one device"
    return None


@functools.cache
def kind(choices: int, tokens: Traits, weights: Traits, settings: str) -> tuple[int, str]:
    """Return what ranks must have in common, as a number and in words: what they exchange rows by."""
    recorded = [name for name, each in (("tokens", tokens), ("weights", weights)) if each.recorded]
    words = (
        f"{choices} {'choice' if choices == 1 else 'choices'} a token, tokens of {tokens.dtype}, weights of"
        f" {weights.dtype}, {'gradients of ' + ' and '.join(recorded) if recorded else 'no gradients'},"
        f" {settings}"
    )
    return zlib.crc32(words.encode()), words


def wrong_values(own: Description, chosen: Tensor, weights: Tensor) -> str:
    """Say which choices are none of the experts, and which weights are not finite; empty if none."""
    rows, factors = port().listed(chosen), port().listed(weights)
    places = list(itertools.product(range(len(rows)), range(len(rows[0]) if rows else 0)))
    said = []
    unknown = [place for place in places if not 0 <= rows[place[0]][place[1]] < own.experts]
    if unknown:
        token, choice = unknown[0]
        sentinel = (
            f"; in transformers' own expert parallelism {own.experts} is an expert of another rank: load the model"
            " without an ep_size"
            if rows[token][choice] == own.experts
            else ""
        )
        said.append(
            f"chose expert {rows[token][choice]} for token {token}, but there are experts 0 to {own.experts - 1}"
            f" ({_times(len(unknown), 'such choice')}){sentinel}"
        )
    wild = [place for place in places if not math.isfinite(factors[place[0]][place[1]])]
    if wild:
        token, choice = wild[0]
        said.append(
            f"has weight {factors[token][choice]} for expert {rows[token][choice]} of token {token}"
            f" ({_times(len(wild), 'weight')} not finite): look at the router's logits"
        )
    return " and ".join(said)


def refusal(name: str, said: str, words: str, ranks: Sequence[int], group: Any, like: Tensor) -> ValueError:
    """Exchange words; return the error of all ranks.

    Args:
        name: of the layer.
        said: what is wrong on this rank; empty if nothing is.
        words: what this rank's inputs are: ``kind``.
        ranks: of the group.
        group: of the ranks that the layer's experts are spread over; None is this rank alone.
        like: integers on the device that numbers are exchanged on.
    """
    own = f"{said}\n{words}".encode()[:_BYTES].ljust(_BYTES, b"\n")
    sizes = [_BYTES] * len(ranks)
    _, arrived = port().exchange_numbers(port().message([tuple(own) * len(ranks)], like), sizes, sizes, group)()
    texts = [bytes(arrived[at : at + _BYTES]).decode(errors="ignore") for at in range(0, len(arrived), _BYTES)]
    problems, kinds = zip(*(text.rstrip("\n").rpartition("\n")[::2] for text in texts), strict=True)
    parts = [f"rank {rank} {each}" for rank, each in zip(ranks, problems, strict=True) if each]
    if not parts:
        parts = [f"rank {rank} has {each}" for rank, each in zip(ranks, kinds, strict=True)]
        parts.append("all ranks must have the same")
    return ValueError(f"{name}: {'; '.join(parts)}.")


def _times(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def local_inputs(
    name: str, experts: DeviceMesh | None, features: DeviceMesh | None, inputs: Sequence[Tensor]
) -> tuple[list[Tensor], Restore]:
    """Return this rank's tokens, choices and weights, and what makes of its result the layer's.

    Args:
        name: of the layer.
        experts: the mesh axis that experts are spread over, if there is one.
        features: the mesh axis that the features of each are sharded over, if there is one.
        inputs: of the layer.

    Raises:
        ValueError: tokens on other ranks than those that experts are spread over.
    """
    if features is not None:
        return _varying(features, inputs)
    mesh = next((value.device_mesh for value in inputs if isinstance(value, hp_dtensor.DTensor)), None)
    if mesh is None:
        return list(inputs), lambda out: out
    # Replicated activations: each rank takes its share of the tokens, so that none is computed twice.
    assert experts is not None
    if mesh.ndim != 1 or not _ranks(mesh) <= _ranks(experts):
        raise ValueError(
            f"{name}: its tokens are DTensors on {mesh}, whose ranks are not among those that experts are"
            f" spread over, {experts}: gradients of experts would be parts that nobody adds up. Spread experts"
            " over all these ranks, or use ExpertTensorParallel on a mesh of both axes"
        )
    whole = [_replicated(each, mesh) for each in inputs]
    shape = whole[0].shape

    def restore(out: Tensor) -> Tensor:
        return hp_dtensor.DTensor.from_local(out, mesh, [Shard(0)], shape=shape).redistribute(mesh, [Replicate()])

    return [each.redistribute(mesh, [Shard(0)]).to_local() for each in whole], restore


def _varying(mesh: DeviceMesh, inputs: Sequence[Tensor]) -> tuple[list[Tensor], Restore]:
    """Return the tokens, which all ranks of the axis have; results are added up over it."""
    plain = not any(isinstance(each, hp_dtensor.DTensor) for each in inputs)
    whole = [_replicated(each, mesh) for each in inputs]

    def restore(out: Tensor) -> Tensor:
        total = hp_dtensor.DTensor.from_local(out, mesh, [Partial()]).redistribute(mesh, [Replicate()])
        return total.to_local() if plain else total

    return [port().varying(each.redistribute(mesh, [Replicate()])) for each in whole], restore


def local_part(parameter: Any, features: DeviceMesh | None) -> Tensor:
    """Return the part of a parameter that this rank computes with."""
    if not isinstance(parameter, hp_dtensor.DTensor):
        return parameter
    placements = parameter.placements
    if features is not None and placements[-1].is_replicate():  # a bias that is added once, on one rank
        parameter = parameter.redistribute(parameter.device_mesh, [*placements[:-1], Partial()])
    return parameter.to_local()


def _replicated(value: Tensor, mesh: DeviceMesh) -> Any:
    if isinstance(value, hp_dtensor.DTensor):
        return value
    return hp_dtensor.DTensor.from_local(value, mesh, [Replicate()])


def _ranks(mesh: DeviceMesh) -> set[int]:
    return set(mesh.ranks.flatten().tolist())
