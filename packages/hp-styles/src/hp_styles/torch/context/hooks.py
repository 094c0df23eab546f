"""The hooks of context parallelism on a module.

Note [Entered and left]
    A hook before forward puts a frame on this thread's stack, and in it the mode that intercepts attention; a hook
    after it, which is called on an error too, takes both away. Recomputation under activation checkpointing calls the
    module again, perhaps on a thread of autograd's, and so its hooks. A second hook after forward, not called on an
    error, tells whether attention was met at all: without it, the module would have attended within each rank's part.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from hp_dtensor import DeviceMesh, DTensor
from hp_platform.torch.internals import in_backward, without_all_torch_functions
from hp_styles.context.plan import Settings
from hp_styles.context.rounds import Rounds
from hp_styles.inputs import check_output, find_input, hook, with_inputs
from hp_styles.torch.context.agreement import AttentionAgreement, end_round
from hp_styles.torch.context.attention import ContextGroup, attend, attend_inside, capped_attention
from hp_styles.torch.context.call import Call, call_of, left_out, mapped, refuse_compiled
from hp_styles.torch.context.exchange import CUT, Transfer, like

T = torch.Tensor
_SEQUENCE = 2


@dataclass
class _Frame:
    """A module that runs.

    Attributes:
        module: the module.
        mode: the mode that intercepts attention in it, if any.
        early: of q, k and v those that are sent before attention.
        arriving: those on their way.
        sources: the projections' outputs with their versions, which show writes.
        query: its input that is the queries, where they are an input.
        inside: heads and length of the sequence inside, where they are an input.
        agreement: the comparison of its attention over the ranks.
    """

    module: nn.Module
    agreement: AttentionAgreement
    mode: _Attention | None = None
    early: tuple[str, ...] = ()
    arriving: dict[str, Transfer] = field(default_factory=dict)
    sources: dict[str, tuple[T, int]] = field(default_factory=dict)
    query: T | None = None
    inside: tuple[int, int] = (1, 0)


class _Frames(threading.local):
    def __init__(self) -> None:
        self.stack: list[_Frame] = []
        self.whole = False  # see `whole_sequences`

    def of(self, module: nn.Module) -> _Frame | None:
        """Return the frame of ``module``, if it is the innermost."""
        return self.stack[-1] if self.stack and self.stack[-1].module is module else None


_frames = _Frames()


@contextlib.contextmanager
def whole_sequences() -> Iterator[None]:
    """Inside, on this thread, modules of the style attend to what they are passed, as if it were not a part."""
    before, _frames.whole = _frames.whole, True
    try:
        yield
    finally:
        _frames.whole = before


def sees_whole_sequences() -> bool:
    """Tell whether this thread is inside of `whole_sequences`."""
    return _frames.whole


class _Attention(TorchFunctionMode):
    """A mode in which torch's attention is computed over the group."""

    def __init__(self, group: ContextGroup, frame: _Frame) -> None:
        super().__init__()
        self.group, self.frame, self.calls = group, frame, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.calls += 1
            options = kwargs or {}
            if self.group.size == 1 and not any(isinstance(x, DTensor) for x in (*args, *options.values())):
                return func(*args, **options)
            if self.frame.query is not None:
                return attend_inside(self.group, self.frame.agreement, *args, **options)
            if self.frame.early and self.frame.agreement.round.late is None:
                _check_sources(self.frame, self.calls, *args, **options)
            return attend(self.group, self.frame.agreement, self.frame.arriving, *args, **options)
        if func is capped_attention:
            self.calls += 1
            return attend(
                self.group, self.frame.agreement, self.frame.arriving, *args, enable_gqa=True, **(kwargs or {})
            )
        if func is F.multi_head_attention_forward:
            raise NotImplementedError(
                "ContextParallel: nn.MultiheadAttention calls attention where it can't be intercepted; use a module"
                " that calls torch.nn.functional.scaled_dot_product_attention"
            )
        return func(*args, **(kwargs or {}))


def attach(module: nn.Module, mesh: DeviceMesh, settings: Settings, rounds: Rounds) -> None:
    """Register the hooks.

    Args:
        module: whose attention is over the sharded sequence.
        mesh: of one axis.
        settings: the style's.
        rounds: see `ContextGroup`.

    Raises:
        RuntimeError: the module has such hooks already.
        ValueError: a degree or an order of ranks that does not fit, a projection that the module does not have, or
            nothing to send early.
    """
    if getattr(module, "_context_parallel", False):
        raise RuntimeError(
            f"ContextParallel: {type(module).__name__} already has a context parallel style; apply only one"
        )
    degrees = settings.ulysses_degree, settings.inner_ring_degree
    group = ContextGroup(mesh, degrees, settings.load_balance, rounds)
    if settings.projections and group.degrees.ulysses == 1 and group.size > 1:
        raise ValueError(
            f"AsyncContextParallel: with ulysses_degree=1 over {group.size} ranks no projection's output is sent before"
            " attention, and the ring overlaps its exchanges itself; use ContextParallel"
        )
    for name, path in settings.projections.items():
        _projection(module, path).register_forward_hook(hook(_sender(group, name, settings)))
    module._context_parallel = True  # type: ignore[assignment]
    if settings.takes_qkv:
        module.register_forward_pre_hook(hook(_receiver(group, settings)), with_kwargs=True)
        module.register_forward_hook(hook(_giver(group, settings)))
    else:
        module.register_forward_pre_hook(hook(_enter(group, settings)), with_kwargs=True)
    if not settings.takes_qkv or group.degrees.ring > 1:
        module.register_forward_hook(_check_met)
    module.register_forward_hook(_end_alone)
    module.register_forward_hook(_leave, always_call=True)
    if settings.use_local_output:
        module.register_forward_hook(_local_outputs)


def enclose(root: nn.Module, rounds: Rounds, mesh: DeviceMesh, load_balance: bool) -> None:
    """Register hooks on a module around those of a style: one call of it is a round.

    Args:
        root: the module.
        rounds: of the style.
        mesh: of one axis.
        load_balance: the style's.
    """

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        rounds.enter(module)
        if _frames.whole:
            return
        if mesh.size() > 1 and rounds.current.fault is None:
            rounds.current.fault = _cut_otherwise(mesh, load_balance, args, kwargs) or left_out(module, args, kwargs)

    def end(module: nn.Module, args: Any, output: Any) -> None:
        if rounds.open == [module] and not _frames.whole:
            end_round(rounds.current, rounds)

    root.register_forward_pre_hook(hook(enter), with_kwargs=True)
    root.register_forward_hook(hook(end))
    root.register_forward_hook(hook(lambda module, args, output: rounds.leave(module)), always_call=True)


def _cut_otherwise(mesh: DeviceMesh, load_balance: bool, args: Any, kwargs: dict[str, Any]) -> Exception | None:
    """Return the error for an input that was sharded with the other ``load_balance``."""
    for name, x in (*enumerate(args), *kwargs.items()):
        cut = getattr(x, CUT, None)
        if cut is not None and cut[0] == mesh and cut[1] != load_balance:
            return ValueError(
                f"ContextParallel: input {name!r} of shape {tuple(x.shape)} is sharded with load_balance={cut[1]}, the"
                f" style has load_balance={load_balance}; pass the same to context_parallel_shard and to the style"
            )
    return None


def _agreement_of(
    module: nn.Module, group: ContextGroup, call: Call, args: Any, kwargs: Any, early: bool
) -> AttentionAgreement:
    backward = in_backward()
    now = group.rounds.of(group.number, backward=backward)
    now.fault = now.fault or _cut_otherwise(group.mesh, group.load_balance, args, kwargs)
    return AttentionAgreement(group, group.number, group.rounds, group.compared_degrees, call, now, early)


def _enter(group: ContextGroup, settings: Settings) -> Any:
    early = tuple(settings.projections) if group.size > 1 else ()

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        refuse_compiled("ContextParallel")
        if _frames.whole:
            return args, kwargs
        call, positional, named = Call(type(module).__name__), args, kwargs
        if group.size > 1:
            call, positional, named = call_of(module, args, kwargs)
        _open(_Frame(module, _agreement_of(module, group, call, args, kwargs, bool(early)), early=early), group)
        return positional, named

    return enter


def _open(frame: _Frame, group: ContextGroup | None) -> None:
    if group is not None:
        frame.mode = _Attention(group, frame)
        frame.mode.__enter__()
    _frames.stack.append(frame)


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    if _frames.of(module) is not None:
        frame = _frames.stack.pop()
        mode, frame.mode = frame.mode, None  # they hold each other, and the call's tensors
        if mode is not None:
            mode.__exit__(None, None, None)


def _end_alone(module: nn.Module, args: Any, output: Any) -> None:
    """End the round of a module that nothing encloses."""
    frame = _frames.of(module)
    if frame is not None and not frame.agreement.rounds.open and not in_backward():
        end_round(frame.agreement.round, frame.agreement.rounds)


def _check_met(module: nn.Module, args: Any, output: Any) -> None:
    frame = _frames.of(module)
    if frame is not None and frame.mode is not None and not frame.mode.calls:
        raise RuntimeError(
            f"ContextParallel: {type(module).__name__} ran without a call of "
            "torch.nn.functional.scaled_dot_product_attention, so each rank attended only to its own part of the "
            "sequence. Give a transformers model attn_implementation='sdpa'; for a module that takes q, k and v"
            " as inputs, name them (qkv_indices= or qkv_kwarg_names=)"
        )


# ---- q, k and v are the module's inputs ----
def _receiver(group: ContextGroup, settings: Settings) -> Any:
    def receive(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        refuse_compiled("ContextParallel")
        if _frames.whole:
            return args, kwargs
        args, kwargs = tuple(args), dict(kwargs)
        qkv = [find_input(module, args, kwargs, settings, which) for which in range(3)]
        q: T = qkv[0][1]
        head, seq = settings.head_dim % q.dim(), settings.seq_dim % q.dim()
        agreement = _agreement_of(module, group, Call(type(module).__name__), args, kwargs, False)

        def checked() -> tuple[T, ...]:
            parts = group.locals(*(x for _, x in qkv), head, seq)  # type: ignore[call-arg]
            group.copies(parts[0].shape[head], parts[1].shape[head])
            return tuple(x.movedim((head, seq), (1, 2)) if x.dim() > 2 else x for x in parts)

        parts, _ = agreement.of(checked, [x for _, x in qkv], None)
        with without_all_torch_functions():
            sent = group.to_heads(tuple(x.movedim((1, 2), (head, seq)) for x in parts), {}, head, seq)
        args, kwargs = with_inputs(args, kwargs, [where for where, _ in qkv], sent)
        _open(
            _Frame(module, agreement, query=q, inside=(sent[0].shape[head], sent[0].shape[seq])),
            group if group.degrees.ring > 1 else None,
        )
        return args, kwargs

    return receive


def _giver(group: ContextGroup, settings: Settings) -> Any:
    def give(module: nn.Module, args: Any, output: Any) -> Any:
        frame = _frames.of(module)
        if frame is None:  # see `whole_sequences`
            return output
        assert frame.query is not None  # the hook before made it
        several = isinstance(output, (tuple, list))
        first, *others = output if several else (output,)
        if not isinstance(first, T) or any(isinstance(x, T) for x in others):
            raise NotImplementedError(
                f"ContextParallel on {type(module).__name__}: the output must be a tensor, alone or first among "
                f"other values, got {[type(x).__name__ for x in (first, *others)]}; attention weights are not "
                "redistributed"
            )
        ndim, (heads, length) = frame.query.dim(), frame.inside
        head, seq = settings.head_dim % ndim, settings.seq_dim % ndim
        check_output(module, tuple(first.shape), heads, length, head, seq)
        with without_all_torch_functions():
            result = group.to_sequence(first, head, seq)
        if frame.agreement.round.late is not None:
            query = frame.query.to_local() if isinstance(frame.query, DTensor) else frame.query
            result = result.new_zeros([query.shape[d] if d in (0, seq) else n for d, n in enumerate(result.shape)])
        result = like(result, frame.query)
        if not several:
            return result
        return type(output)(result, *others) if hasattr(output, "_fields") else type(output)((result, *others))

    return give


def _local_outputs(module: nn.Module, args: Any, output: Any) -> Any:
    return mapped(output, lambda x: x.to_local() if isinstance(x, DTensor) else x)


# ---- projections whose output is sent at once ----
def _projection(module: nn.Module, path: str) -> nn.Module:
    try:
        return module.get_submodule(path)
    except AttributeError:
        names = [name for name, _ in module.named_modules() if name]
        raise ValueError(
            f"AsyncContextParallel: {type(module).__name__} has no submodule {path!r}; it has {names}"
        ) from None


def _heads_apart(x: T, settings: Settings) -> T:
    """View a projection's output as [batch, heads, sequence, head size]."""
    if x.dim() == 3 and settings.head_size:
        if x.shape[2] % settings.head_size == 0:
            return x.unflatten(2, (-1, settings.head_size)).transpose(1, 2)
    elif x.dim() == 4:
        return x.movedim((settings.head_dim, settings.seq_dim), (1, 2))
    raise ValueError(
        f"AsyncContextParallel: a projection's output must be [batch, sequence, heads * head_size], with head_size="
        f" given, or have 4 dims; got shape {tuple(x.shape)}, head_size={settings.head_size}"
    )


def _version(x: T) -> int:
    return 0 if x.is_inference() else x._version


def _sender(group: ContextGroup, name: str, settings: Settings) -> Any:
    def send(module: nn.Module, args: Any, output: Any) -> None:
        frame = _frames.stack[-1] if _frames.stack else None
        if frame is None or frame.mode is None or frame.mode.group is not group or not frame.early:
            return  # called from elsewhere
        if name in frame.arriving:
            raise RuntimeError(f"AsyncContextParallel: {name}'s projection ran twice before attention")
        local = output.to_local() if isinstance(output, DTensor) else output

        def checked() -> tuple[T, ...]:
            x = _heads_apart(local, settings)
            group.check_halves(x, f"the output of {name}'s projection", _SEQUENCE)
            group.copies(x.shape[1], None) if name == "q" else group.copies(None, x.shape[1])
            return (x,)

        (x,), _ = frame.agreement.of(checked, (local,), None)
        with without_all_torch_functions():
            copies = group.copies(x.shape[1], None) if name == "q" else group.copies(None, x.shape[1])
            frame.arriving[name] = transfer = Transfer(group.plan(1, 2))
            frame.sources[name] = x, _version(x)
            transfer.start(x.repeat_interleave(copies, 1) if copies > 1 else x)

    return send


def _check_sources(frame: _Frame, calls: int, query: T, key: T, value: T, *args: Any, **more: Any) -> None:
    """Refuse if attention reads something else than what is on its way."""
    if calls > 1:
        raise RuntimeError("AsyncContextParallel: attention is called twice in one forward; use ContextParallel")
    absent = [name for name in frame.early if name not in frame.sources]
    if absent:
        raise RuntimeError(
            f"AsyncContextParallel: attention is called before the projections of {', '.join(absent)} ran; leave them"
            " out"
        )
    for name, x in zip("qkv", (query, key, value), strict=True):
        if name not in frame.sources:
            continue
        local = x.to_local() if isinstance(x, DTensor) else x
        with without_all_torch_functions():
            sent, version = frame.sources[name]
            same = local.data_ptr() == sent.data_ptr() and local.shape == sent.shape and local.dtype == sent.dtype
            strides = zip(local.stride(), sent.stride(), sent.shape, strict=False)
            if not same or any(a != b for a, b, n in strides if n > 1) or _version(local) != version:
                raise RuntimeError(
                    f"AsyncContextParallel: {name} in attention, of shape {tuple(x.shape)}, is not the output of the"
                    f" projection that {name}_proj names, with its heads apart: something in between (rotary positions,"
                    f" a norm) changes it. Name the last module before attention, or leave {name}_proj out: {name} is"
                    " then sent at attention"
                )
