"""Messages between stages: any nest of tensors and plain values, over a link for each pair and direction.

Note [What goes before a message]
    The first message of a channel is led by a header of two numbers, what follows and how many bytes of description:
    the structure of the nest, the shape and dtype of each tensor and whether it needs a gradient, and the values that
    are no tensors. While messages stay alike nothing but tensors is sent, and receives are posted before they are
    needed. Headers and descriptions are sent from the host where the channel's group can, else from its device. A
    message that differs is an error of the sender, unless one of the two stages was declared with
    ``dyn_shape=True``; then each message has a header.

Note [A stage that failed]
    A rank whose stage raised goes on sending and receiving, so that nobody waits for it in vain: zeros of the known
    shapes where a channel's messages are known, a header that says "failed" where they are not; for
    such a message there is no gradient either. When all are done the ranks tell each other who failed, and all raise.

Note [A communicator for each channel]
    gloo and mccl tell messages of two ranks apart by tags. nccl and hccl do not: all messages between two ranks of a
    group are in one order, in which a receive that was posted ahead would hold up every message after it, and
    collectives too. There each channel has a group of its two ranks. A communicator comes to be with its first message,
    for which both ranks wait, so the first messages are sent before any other, on all ranks in one order of all
    channels: what a schedule sends first decides nothing. Groups are kept for the next schedule of the same ranks.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from hp_pipeline.port import port
from hp_pipeline.stages.layouts import TensorLayout, distributed
from hp_platform import get_platform
from hp_platform.extend import bytes_to_tensor, tensor_to_bytes
from hp_platform.groups import when_groups_end

WINDOW = 2
"""How many messages of a channel are received ahead, where the backend can."""


class Link(NamedTuple):
    """A channel's way to the other rank.

    Attributes:
        group: holds both ranks.
        peer: the other one's rank inside the group.
        tag: of the channel's messages.
        window: how many messages are received ahead; 0 posts a receive when its message is needed.
    """

    group: Any
    peer: int
    tag: int
    window: int


_groups: dict[tuple[Any, int, int, int], Any] = {}
when_groups_end(_groups.clear)


def links(group: Any, device: Any, routes: Sequence[tuple[int, int]], *, ahead: bool = True) -> list[Link | None]:
    """Link this rank to the others, by Note [A communicator for each channel]; all ranks call it alike.

    Args:
        group: the pipeline's ranks.
        device: where this rank's messages are.
        routes: of all channels of the pipeline, the sender's and the receiver's rank inside the group.
        ahead: receive messages ahead, where the backend can.

    Returns:
        For each channel its link, None where this rank is at neither end.
    """
    platform = get_platform()
    own, members = platform.groups.rank(group), platform.groups.ranks(group)
    window = WINDOW if ahead and platform.collectives.receives_ahead(group, device) else 0
    tagged = platform.collectives.has_tags(group, device)
    numbers: Counter[tuple[int, int]] = Counter()
    result: list[Link | None] = []
    for tag, (source, target) in enumerate(routes, 1):
        key = group, source, target, numbers[source, target]
        numbers[source, target] += 1
        if own not in (source, target):
            result.append(None)
            continue
        peer = target if own == source else source
        if tagged:
            result.append(Link(group, peer, tag, window))
            continue
        place = int(members[peer] > members[own])  # inside of a group ranks follow their global order
        if key not in _groups:
            pair = platform.groups.second_group([members[source], members[target]])
            _greet(pair, place, device, own == source)
            _groups[key] = pair
        result.append(Link(_groups[key], place, 0, window))
    return result


def _greet(pair: Any, peer: int, device: Any, sends: bool) -> None:
    """Send a first message, with which the communicator comes to be."""
    collectives, tensor = get_platform().collectives, port().of_one_element(device)
    (collectives.send if sends else collectives.recv)(tensor, peer, group=pair)


_SAME, _DESCRIBED, _BROKEN = range(3)
_HEADER = struct.Struct("<qq")  # one of these, and the bytes of a description
_NO_LAYOUTS: Mapping[int, TensorLayout] = MappingProxyType({})


class Failed:
    """Stands for a message whose sender had failed before the channel's messages were known."""


FAILED = Failed()


class _Pickler(pickle.Pickler):
    """Writes plain values: a tensor inside of one would come without its gradient, and without its rank's device."""

    def persistent_id(self, obj: Any) -> None:
        if port().is_tensor(obj):
            raise TypeError("it has an object that holds a tensor")


class Again(NamedTuple):
    """Stands for a tensor that another place of the message has as well, so that it arrives as one."""

    place: int


class Signature(NamedTuple):
    """What messages of a channel look like.

    Attributes:
        structure: what the leaves are put together by.
        leaves: for each (True, description), or (False, value).
        needed: for each, whether it needs a gradient.
        layouts: of local tensors of distributed ones, by place.
        joined: places of tensors that have memory in common with another one.
    """

    structure: Any
    leaves: tuple[Any, ...]
    needed: tuple[bool, ...]
    layouts: Mapping[int, TensorLayout]
    joined: tuple[int, ...]

    def to_bytes(self) -> bytes:
        """Write it for another rank: the nest itself, of the leaves' places."""
        data = io.BytesIO()
        nest = port().unflatten(list(range(len(self.leaves))), self.structure)
        _Pickler(data).dump((nest, self.leaves, self.needed, dict(self.layouts), self.joined))
        return data.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> Signature:
        """Read what ``to_bytes`` wrote."""
        nest, *rest = pickle.loads(data)
        return cls(port().flatten(nest)[1], *rest)


class Message(NamedTuple):
    """A nest that has come, or goes.

    Attributes:
        leaves: tensors and plain values.
        needed: for each leaf, whether it needs a gradient.
        structure: what the leaves are put together by.
        layouts: of those leaves that are local tensors of distributed ones, by place.
        origins: their layouts on another mesh, from which they came and to which their gradients go back.
        joined: places of tensors that had memory in common with another one, where they came from.
    """

    leaves: list[Any]
    needed: Sequence[bool]
    structure: Any
    layouts: Mapping[int, TensorLayout] = _NO_LAYOUTS
    origins: Mapping[int, TensorLayout] = _NO_LAYOUTS
    joined: tuple[int, ...] = ()

    @classmethod
    def of(cls, tree: Any) -> Message:
        """Take a nest apart."""
        leaves, structure = port().flatten(tree)
        if len(leaves) > 1:
            _join_same(leaves)
        layouts = {place: TensorLayout.of(leaf) for place, leaf in enumerate(leaves) if distributed(leaf)}
        for place in layouts:
            leaves[place] = leaves[place].to_local()
        needed = [port().is_tensor(leaf) and port().needs_gradient(leaf) for leaf in leaves]
        joined = _joined(leaves) if len(leaves) > 1 else ()
        return cls(leaves, needed, structure, layouts, joined=joined)

    def signature(self) -> Signature:
        """Say what the message looks like."""
        return Signature(
            self.structure,
            tuple([(True, port().describe(leaf)) if port().is_tensor(leaf) else (False, leaf) for leaf in self.leaves]),
            tuple(self.needed),
            self.layouts,
            self.joined,
        )


class Packed(NamedTuple):
    """A message as it is sent.

    Attributes:
        tensors: that are sent.
        signature: of the message.
        data: the signature's bytes; none if the receiver has it.
    """

    tensors: list[Any]
    signature: Signature
    data: bytes


class Channel:
    """One end of a channel.

    Args:
        name: for errors: "stage 0 -> stage 1, forward".
        link: the way to the other end.
        device: where received tensors are.
        dynamic: messages may differ.
    """

    def __init__(self, name: str, link: Link, device: Any, dynamic: bool) -> None:
        self.name, self.link, self.device, self.dynamic = name, link, device, dynamic
        self.signature: Signature | None = None
        self._posted: deque[tuple[list[Any], list[Any]]] = deque()
        self._left = 0
        self._sent: dict[Any, list[tuple[Any, Any, int]]] = defaultdict(list)
        self.overwritten = False
        self._version = port().version
        self._collectives = get_platform().collectives

    # ---- sending ----
    def send(self, message: Message, piece: Any) -> None:
        """Send a message of a piece; its memory stays as it is until ``release``.

        Raises:
            TypeError: a tensor that cannot be sent, or a value that cannot be pickled.
            ValueError: a message unlike those before.
        """
        self.post(self.pack(message), piece)

    def pack(self, message: Message) -> Packed:
        """Return what ``post`` sends of a message; whatever may be wrong with it is raised here, before all of it."""
        tensors = [leaf for leaf in message.leaves if port().is_tensor(leaf)]
        for leaf in tensors:
            why = port().refuse(leaf, self.device)
            if why:
                raise TypeError(f"{self.name}: the stage returned {why}.")
        signature = message.signature()
        try:
            same = bool(signature == self.signature)
        except Exception:  # of values that compare element by element, such as arrays of NumPy
            same = False
        if same:
            return Packed(tensors, signature, b"")
        if not self.dynamic and self.signature is not None:
            raise ValueError(
                f"{self.name}: the stage returned {_shown(signature)}, and {_shown(self.signature)} before. Messages"
                " that differ need PipelineStage(..., dyn_shape=True). Where all will be like this one, as after a"
                " stage was frozen, set gradients to zero and run again."
            )
        try:
            return Packed(tensors, signature, signature.to_bytes())
        except Exception as error:  # pickle raises what it likes
            raise TypeError(
                f"{self.name}: the stage returned {_shown(signature)}, which pickle cannot write for the next rank:"
                f" {error}. Return tensors and plain values in tuples, lists and dictionaries."
            ) from error

    def post(self, packed: Packed, piece: Any) -> None:
        """Send a message: see ``send``."""
        tensors, signature, data = packed
        if self.dynamic or data:
            self._header(_DESCRIBED if data else _SAME, len(data), piece)
            if data:
                self._put(bytes_to_tensor(data, self.link.group), piece)
            self.signature = signature
        for leaf in tensors:
            self._put(port().sendable(leaf), piece)

    def send_failed(self, piece: Any) -> bool:
        """Send what the receiver waits for, without a message; return whether a gradient comes for it."""
        if self.signature is None or self.dynamic:
            self._header(_BROKEN, 0, piece)
            return False
        for is_tensor, value in self.signature.leaves:
            if is_tensor:
                self._put(port().empty(value, self.device), piece)
        return True

    def _header(self, kind: int, size: int, piece: Any) -> None:
        self._put(bytes_to_tensor(_HEADER.pack(kind, size), self.link.group), piece)

    def _put(self, tensor: Any, piece: Any) -> None:
        group, peer, tag, _ = self.link
        handle = self._collectives.send(tensor, peer, group=group, tag=tag, async_op=True)
        self._sent[piece].append((handle, tensor, self._version(tensor)))

    def release(self, piece: Any) -> None:
        """Let go of what was sent of a piece, which the receiver has, and note whether somebody wrote to it before."""
        for handle, tensor, version in self._sent.pop(piece, ()):
            handle.wait()
            if self._version(tensor) != version:
                self.overwritten = True

    # ---- receiving ----
    def expect(self, count: int) -> None:
        """Begin to receive so many messages."""
        self._left = count
        self._post()

    def _post(self) -> None:
        if self.signature is not None and not self.dynamic:
            while self._left and len(self._posted) < self.link.window:
                self._posted.append(self._begin())

    def _begin(self) -> tuple[list[Any], list[Any]]:
        """Begin to receive a message whose signature is known."""
        assert self.signature is not None
        self._left -= 1
        tensors = [port().empty(value, self.device) for is_tensor, value in self.signature.leaves if is_tensor]
        return tensors, [self._get(tensor) for tensor in tensors]

    def _get(self, tensor: Any) -> Any:
        group, peer, tag, _ = self.link
        return self._collectives.recv(tensor, peer, group=group, tag=tag, async_op=True)

    def receive(self, piece: Any, outputs: Message | None) -> Message | Failed:
        """Wait for the next message.

        Args:
            piece: what it is of.
            outputs: what the message is the gradients of.
        """
        if self._posted:
            tensors, handles = self._posted.popleft()
        elif (self.signature is None or self.dynamic) and not self._read_header():
            self._left -= 1
            return FAILED
        else:
            tensors, handles = self._begin()
        assert self.signature is not None
        structure, leaves, needed, layouts, joined = self.signature
        for handle in handles:
            handle.wait()
        if self._left:
            self._post()
        if len(tensors) < len(leaves):
            received = iter(tensors)
            tensors = [next(received) if is_tensor else value for is_tensor, value in leaves]
        return Message(tensors, needed, structure, layouts, joined=joined)

    def _read_header(self) -> bool:
        """Read what goes before a message; return whether a message follows."""
        kind, size = _HEADER.unpack(self._read(_HEADER.size))
        if kind == _DESCRIBED:
            self.signature = Signature.from_bytes(self._read(size))
        return kind != _BROKEN

    def _read(self, size: int) -> bytes:
        """Wait for so many bytes."""
        tensor = bytes_to_tensor(bytes(size), self.link.group)
        self._get(tensor).wait()
        return tensor_to_bytes(tensor)

    # ---- a run ----
    def describe_again(self) -> None:
        """Let the next message be described, for it may differ from those before."""
        self.signature = None

    def finish(self) -> None:
        """Wait until all that was sent has been taken.

        Raises:
            ValueError: it was written to before.
        """
        for piece in list(self._sent):
            self.release(piece)
        if self.overwritten:
            self.overwritten = False
            raise ValueError(
                f"{self.name}: the stage wrote to a tensor that it had returned, while it was being sent, so that the"
                " next stage may have got other values. Return a new tensor for each micro-batch: output.clone()"
            )

    def forget(self) -> None:
        """Drop what is under way, after an error from which the ranks cannot go on."""
        self._left, self.overwritten = 0, False
        self._sent.clear()
        self._posted.clear()


def _join_same(leaves: list[Any]) -> None:
    """Put a stand-in in the place of each tensor that is there before."""
    first: dict[int, int] = {}
    for place, leaf in enumerate(leaves):
        if port().is_tensor(leaf) and first.setdefault(id(leaf), place) != place:
            leaves[place] = Again(first[id(leaf)])


def _joined(leaves: Sequence[Any]) -> tuple[int, ...]:
    """List the places of the tensors that have memory in common."""
    spans = sorted((*port().memory(leaf), place) for place, leaf in enumerate(leaves) if port().is_tensor(leaf))
    pairs = [
        (place, other) for at, (_, end, place) in enumerate(spans) for begin, _, other in spans[at + 1 :] if begin < end
    ]
    return tuple(sorted({place for pair in pairs for place in pair}))


def _shown(signature: Signature) -> str:
    texts = []
    for place, (is_tensor, value) in enumerate(signature.leaves):
        if not is_tensor:
            texts.append(repr(value))
            continue
        layout = f", {signature.layouts[place]}" if place in signature.layouts else ""
        need = " with a gradient" if signature.needed[place] else ""
        texts.append(f"{value[1]} of shape {value[0]}{layout}{need}")
    return f"({', '.join(texts)})"
