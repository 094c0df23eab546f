"""A world of ranks of which this process plays one, on tensors without memory.

Note [A dry world]
The process groups have torch's "fake" backend, and new tensors go to the meta device, where operators compute shapes
alone. What ranks tell each other as host numbers or bytes (`hp_platform.communication.agreement`) has to have values:
the others are taken to say what this rank says, but for those that a `Peers` speaks for. A collective of tensors on the
meta device does nothing, and the host's memory is on the meta device as well. What torch compiles runs uncompiled. Code
above the port is the one that real ranks run, and does not ask whether its world is dry.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from hp_platform import collectives as checked
from hp_platform import groups
from hp_platform.devices import devices as here
from hp_platform.port import Capabilities, Handle
from hp_platform.torch import collectives, devices, port

T = torch.Tensor
value_observers: list[Callable[[str], None]] = []
"""Are told what was taken for the values of a whole tensor that has none."""
_META = torch.device("meta")
_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


class Peers(Protocol):
    """What other ranks of a dry world say."""

    def gather(self, payload: bytes, ranks: Sequence[int]) -> list[bytes]:
        """Return what each of some ranks says where this one says a payload; all of them say something now."""
        ...

    def send(self, payload: bytes, rank: int, tag: int) -> None:
        """Give a message to a rank."""
        ...

    def receive(self, rank: int, tag: int) -> bytes:
        """Wait for a message of a rank."""
        ...


class Alike:
    """Peers that say what this rank says, and send nothing."""

    def gather(self, payload: bytes, ranks: Sequence[int]) -> list[bytes]:
        """Return the payload once for each rank."""
        return [payload] * len(ranks)

    def send(self, payload: bytes, rank: int, tag: int) -> None:
        """Forget the message."""

    def receive(self, rank: int, tag: int) -> bytes:
        """Refuse: only stages send each other messages, and each of them has a process of its own.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(f"a dry world of one process has no message of rank {rank}")


class _Done:
    def wait(self) -> None:
        """Do nothing."""


_DONE: Handle = _Done()


@contextlib.contextmanager
def dry_world(size: int, rank: int, *, peers: Peers | None = None, kind: str | None = None) -> Iterator[None]:
    """Be one rank of a world without the others and without memory: Note [A dry world].

    Example:
        >>> with dry_world(1024, 17):
        ...     model = apply(build_model(plan, device="meta"), plan)

    Args:
        size: number of ranks of the world.
        rank: this process's.
        peers: what other ranks say; None is the same as this one.
        kind: of the device that is played, "cpu", "cuda" or "npu": kernels are chosen by it, and its backend decides
            who averages and whether messages have tags. None is this machine's.

    Raises:
        RuntimeError: there is a world of processes already.
    """
    kind = here.kind if kind is None else kind
    spoken = spoken_collectives(Alike() if peers is None else peers, _BACKENDS[kind])
    with alone_in_world(size, rank, spoken, _devices(kind)), _kernels_without_memory(), _Values(), _without_autocast():
        with torch.compiler.set_stance("force_eager"):
            yield


@contextlib.contextmanager
def alone_in_world(size: int, rank: int, played: Any, own: Any) -> Iterator[None]:
    """Make process groups of which no other rank is there.

    Args:
        size: number of ranks of the world.
        rank: this process's.
        played: the port's collectives meanwhile.
        own: the port's devices meanwhile.

    Raises:
        RuntimeError: there is a world of processes already.
    """
    if groups.is_initialized():
        raise RuntimeError(
            "a dry world can't begin in a process that has a process group: run it before init_process_group, or in a"
            " process of its own"
        )
    before = port.collectives, port.devices
    groups.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        port.collectives, port.devices = played, own
        checked.renew()
        yield
    finally:
        port.collectives, port.devices = before
        checked.renew()
        groups.destroy_process_group()


@contextlib.contextmanager
def _kernels_without_memory() -> Iterator[None]:
    """Give the meta device kernels that torch has for others alone."""
    library = torch.library.Library("aten", "IMPL")
    try:
        _register_attention(library)
        _register_grouped_products(library)
        yield
    finally:
        library._destroy()


def _devices(played: str) -> Any:
    """Make the port's devices: the current one and the host are meta, whose tensors count as having memory.

    What copies on side streams does the same copies at once, as on CPU.
    """
    own = {name: value for name, value in vars(devices).items() if not name.startswith("__")}

    def kind_of(device: torch.device) -> str:
        return played if device.type == "meta" else device.type

    def capabilities(kind: str) -> Capabilities:
        return replace(devices.capabilities(kind), streams=False, pinned_memory=False)

    own |= {
        "current_device": lambda kind: _META,
        "host_device": lambda: _META,
        "has_memory": lambda tensor: True,
        "kind_of": kind_of,
        "capabilities": capabilities,
    }
    return types.SimpleNamespace(**own)


def spoken_collectives(peers: Peers, backend: str) -> Any:
    """Make the port's collectives: host tensors get what the peers say, those on the meta device are left as they are.

    Args:
        peers: what other ranks say.
        backend: whose ways are played, "gloo", "nccl" or "hccl".
    """

    def told(tensor: T, group: Any) -> T:
        """Return [ranks, *shape], by as many operations for any number of ranks: whoever counts them sees these too."""
        payloads = peers.gather(_bytes(tensor), dist.get_process_group_ranks(group))
        return _tensor(b"".join(payloads), tensor, (len(payloads), *tensor.shape))

    def all_reduce(tensor: T, op: str, group: Any, async_op: bool) -> Handle | None:
        if not tensor.is_meta:
            stacked = told(tensor, group)
            reduced = {"max": stacked.amax, "min": stacked.amin, "product": stacked.prod}.get(op, stacked.sum)(0)
            with torch.no_grad():
                tensor.copy_(reduced / len(stacked) if op == "avg" else reduced)
        return _DONE if async_op else None

    def all_gather(output: T, tensor: T, group: Any, async_op: bool) -> Handle | None:
        if not tensor.is_meta:
            with torch.no_grad():
                output.view(-1).copy_(told(tensor, group).view(-1))
        return _DONE if async_op else None

    def broadcast(tensor: T, group_src: int, group: Any, async_op: bool) -> Handle | None:
        if not tensor.is_meta:
            with torch.no_grad():
                tensor.copy_(told(tensor, group)[group_src])
        return _DONE if async_op else None

    def reduce_scatter(output: T, tensor: T, op: str, group: Any, async_op: bool) -> Handle | None:
        if not output.is_meta:
            whole = tensor.clone()
            all_reduce(whole, op, group, False)
            with torch.no_grad():
                output.view(-1).copy_(whole.view(group.size(), -1)[group.rank()])
        return _DONE if async_op else None

    def all_to_all(
        output: T, tensor: T, received: list[int], sent: list[int], group: Any, async_op: bool
    ) -> Handle | None:
        """Take what each peer would send here: what this rank keeps for itself, as often as it fits."""
        if not output.is_meta and output.numel():
            size, rank = group.size(), group.rank()
            sizes = sent or [len(tensor) // size] * size
            own = tensor.split(sizes)[rank]
            rows = [row % len(own) for count in received or sizes for row in range(count)]
            with torch.no_grad():
                output.copy_(own[rows])
        return _DONE if async_op else None

    def send(tensor: T, dst: int, group: Any, tag: int, async_op: bool) -> Handle | None:
        if not tensor.is_meta:
            peers.send(_bytes(tensor), dist.get_global_rank(group, dst), tag)
        return _DONE if async_op else None

    def recv(tensor: T, src: int, group: Any, tag: int, async_op: bool) -> Handle | None:
        if not tensor.is_meta:
            with torch.no_grad():
                tensor.copy_(_tensor(peers.receive(dist.get_global_rank(group, src), tag), tensor, tensor.shape))
        return _DONE if async_op else None

    played: dict[str, Callable[..., Any]] = {
        "all_reduce": all_reduce,
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
        "all_to_all": all_to_all,
        "broadcast": broadcast,
        "send": send,
        "recv": recv,
        "barrier": lambda group: None,
        "averages": lambda tensor, group: backend == "nccl",
        "has_tags": lambda group, device: backend == "gloo",
        "receives_ahead": lambda group, device: backend != "hccl",
        "pending": lambda work, kind, group: work,
    }
    own = {name: value for name, value in vars(collectives).items() if not name.startswith("__")}
    return types.SimpleNamespace(**{**own, **played})


def _bytes(tensor: T) -> bytes:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _tensor(payload: bytes, like: T, shape: Sequence[int]) -> T:
    if not payload:
        return torch.empty(shape, dtype=like.dtype)
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8).view(like.dtype).view(shape)


class _Values(TorchFunctionMode):
    """Whole tensors without values, read on the host: zeros, so nothing is padded, missing or not finite."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, or answer what it would read."""
        if func in _READS and args[0].is_meta:
            dtype = args[0].dtype
            known = torch.float32 if dtype is torch.bfloat16 else dtype
            zeros = torch.zeros(tuple(args[0].shape), dtype=known, device="cpu")
            for observer in value_observers:
                observer("an array is zeros")
            return zeros.tolist() if func is T.tolist else zeros.numpy()
        return func(*args, **(kwargs or {}))


_READS = (T.tolist, T.numpy)


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    """Say that the meta device has no autocast, where torch refuses the question."""
    asked = torch.is_autocast_enabled

    def is_autocast_enabled(*device: str) -> bool:
        return device != ("meta",) and asked(*device)

    torch.is_autocast_enabled = is_autocast_enabled
    try:
        yield
    finally:
        torch.is_autocast_enabled = asked


def _register_attention(library: torch.library.Library) -> None:
    """Let attention on the meta device keep what the CPU's kernel keeps; torch takes it apart there otherwise."""

    def attention(
        q: T,
        k: T,
        v: T,
        attn_mask: T | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> T:
        mask = attn_mask
        if mask is not None and mask.dtype is torch.bool:
            mask = torch.empty(mask.shape, dtype=q.dtype, device=_META)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(q, k, v, dropout_p, is_causal, attn_mask=mask, scale=scale)[0]

    assert library.m is not None
    for key in ("AutogradMeta", "Meta"):
        library.m.impl("scaled_dot_product_attention", key, attention, False)


def _register_grouped_products(library: torch.library.Library) -> None:
    """Let grouped products on the meta device take each dtype that the CPU's kernel takes."""

    def grouped_mm(
        rows: T, matrices: T, offs: T | None = None, bias: T | None = None, out_dtype: torch.dtype | None = None
    ) -> T:
        shape = [rows.shape[-2], matrices.shape[-1]]
        if rows.dim() == matrices.dim() == 2:  # the groups are of the inner dim
            assert offs is not None
            shape = [len(offs), *shape]
        elif rows.dim() == matrices.dim() == 3:
            shape = [len(rows), *shape]
        return rows.new_empty(shape, dtype=out_dtype or rows.dtype)

    library.impl("_grouped_mm", grouped_mm, "Meta")
