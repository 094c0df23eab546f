"""What runs where in a model, read off a forward of fake tensors.

Note [What runs where]
    Which modules run before the blocks and which after is read off a forward of fake tensors, the
    blocks replaced by recorders that begin a new graph. A parameter runs before if the first block's input has a
    gradient for it, and after if the outputs have. The same forward tells what cannot be cut: a block that does not
    take just what the one before returned, or takes something else that parameters or other blocks have part in. At
    last stages are cut out of the recorders, and run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hp_pipeline.stages.split import SplitError
from hp_pipeline.torch.stages import FORMS, Cut, Form, PassThrough, Relay, copied, cut_stage, shared_names

T = torch.Tensor
_PLAIN = ("ForMaskedLMLoss", "ForTokenClassification")


def trace(model: nn.Module, path: str, inputs: Mapping[str, Any]) -> Cut:
    """Find out how stages are cut out of a model: Note [What runs where].

    Args:
        model: the model.
        path: the name of its list of blocks.
        inputs: keyword inputs, of which shapes and dtypes are used.

    Raises:
        ValueError: the model cannot be cut there.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), _unchecked():
        fake = {name: _empty(each) if isinstance(each, T) else each for name, each in inputs.items()}
        return _Trace(model, path, fake).cut()


class _Untraceable(Exception):
    """What a model does cannot be cut."""


class _Call:
    """A recorder's call."""

    __slots__ = ("kwargs", "received", "returned")

    def __init__(self, received: T, kwargs: dict[str, Any], returned: T) -> None:
        self.received, self.kwargs, self.returned = received, kwargs, returned


class _Recorder(PassThrough):
    """A block of the traced model: keeps what it gets, and begins a new graph."""

    def __init__(self, block: nn.Module, form: Form, calls: list[_Call], marks: tuple[T, T]) -> None:
        super().__init__(block, Relay(), form)
        self.calls, self.marks = calls, marks

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        received, *others = args or (kwargs.pop("hidden_states", None),)
        if not isinstance(received, T) or received.dim() != 3:
            raise _Untraceable(f"block {len(self.calls)} takes no hidden states of 3 dims first")
        if self.calls and (received is not self.calls[-1].returned or received._version != 0):
            raise _Untraceable(f"block {len(self.calls)} does not take just what block {len(self.calls) - 1} returns")
        others = {f"positional input {place + 1}": each for place, each in enumerate(others)}
        leaf = torch.empty(received.shape, dtype=received.dtype, device=received.device, requires_grad=True)
        hidden, rest = self.marks
        self.calls.append(_Call(received, {**others, **kwargs}, leaf + hidden.to(leaf.dtype)))
        return self.form(self.calls[-1].returned, rest)


class _Watch(TorchDispatchMode):
    """Marks all tensors that are computed from one, also below `vmap`, with which masks are made."""

    def __init__(self, tensor: T) -> None:
        super().__init__()
        self.seen = {id(tensor): tensor}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.reaches((args, kwargs)):
            self.seen.update((id(leaf), leaf) for leaf in pytree.tree_leaves(result) if isinstance(leaf, T))
        return result

    def reaches(self, tree: Any) -> bool:
        """Return True if the tensor has part in one of a nest."""
        return any(id(leaf) in self.seen for leaf in pytree.tree_leaves(tree))


class _Trace:
    """A forward of a model on fake tensors: Note [What runs where]."""

    def __init__(self, model: nn.Module, path: str, inputs: dict[str, Any]) -> None:
        self.model, self.path, self.inputs = model, path, inputs
        self.name, self.count = type(model).__name__, len(model.get_submodule(path))  # type: ignore[arg-type]
        self.calls: list[_Call] = []
        self.marks = torch.zeros(()), torch.zeros(())  # of the hidden states of blocks, and of what else they return

    def cut(self) -> Cut:
        """Find out how stages are cut, and cut some out of the recorders to prove it."""
        problems = []
        for form in range(len(FORMS)):
            skeleton = self.skeleton(form)
            try:
                with _Watch(self.marks[0]) as hidden, _Watch(self.marks[1]) as rest:
                    output = self.run(skeleton, self.inputs)
                if len(self.calls) != self.count:
                    raise _Untraceable(f"the model calls {len(self.calls)} of its {self.count} blocks")
                break
            except Exception as error:  # what a model raises
                problems.append(f"{type(error).__name__}: {error}" if not isinstance(error, _Untraceable) else error)
        else:
            self.refuse(str(problems[0]))
        self.check_between(hidden, rest, output)
        before, after = self.sides(skeleton, output)
        cut = Cut(skeleton, self.path, before, after, form, loss=self.loss(skeleton))
        cut = dataclasses.replace(cut, first_only=self.first_only(skeleton))
        needs_ids = self.run_stages(cut)
        return dataclasses.replace(cut, model=self.model, needs_ids=needs_ids)

    def refuse(self, problem: str) -> None:
        raise SplitError(
            f"{self.name} cannot be cut at {self.path}: {problem}.",
            "If its forward needs other inputs than input_ids, pass example=; else write its stages by hand.",
        )

    def skeleton(self, form: int) -> Any:
        """Copy the model with fake tensors and recorders for blocks, without hooks; tied parameters become separate."""
        blocks = self.model.get_submodule(self.path)
        return self.fake_module(self.model, {}, blocks, form)

    def fake_module(self, module: nn.Module, copies: dict[nn.Module, Any], blocks: nn.Module, form: int) -> Any:
        if module in copies:
            return copies[module]
        clone = copies[module] = copied(module)
        clone._forward_hooks, clone._forward_pre_hooks = OrderedDict(), OrderedDict()
        vars(clone).pop("_output_capturing_hooks_installed", None)  # transformers installs its own again
        for tensors in (clone._parameters, clone._buffers):
            tensors.update((name, _fake(each)) for name, each in tensors.items() if each is not None)
        for name, child in module.named_children():
            clone._modules[name] = (
                _Recorder(child, FORMS[form], self.calls, self.marks)
                if module is blocks
                else self.fake_module(child, copies, blocks, form)
            )
        return clone

    def run(self, module: Any, inputs: Mapping[str, Any], *args: Any) -> Any:
        self.calls.clear()
        options = {"use_cache": False} if "use_cache" in _signature(module) else {}
        with torch.enable_grad():
            return module(*args, **{**options, **inputs})

    def check_between(self, hidden: _Watch, rest: _Watch, output: Any) -> None:
        """Raise if blocks take or leave anything beside hidden states that a stage would not have."""
        for index, call in enumerate(self.calls):
            for name, value in call.kwargs.items():
                trained = any(isinstance(leaf, T) and leaf.requires_grad for leaf in pytree.tree_leaves(value))
                if trained or hidden.reaches(value):
                    self.refuse(f"block {index} takes {name}, which depends on parameters or on other blocks")
                if rest.reaches(value):
                    self.refuse(f"block {index} takes {name}, which other blocks return beside their hidden states")
                if isinstance(value, (MutableMapping, list, set)) and not value and self.shares(name):
                    self.refuse(f"block {index} takes {name}, a {type(value).__name__} that other blocks may fill")
        if rest.reaches(_results(output)):
            self.refuse("the model returns what blocks do beside their hidden states")

    def shares(self, name: str) -> bool:
        """Return False for a cache that the configuration says no two blocks share."""
        return name != "shared_kv_states" or getattr(text_config(self.model), "num_kv_shared_layers", None) != 0

    def sides(self, skeleton: nn.Module, output: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the modules that run before and after the blocks."""
        named = {name: each for name, each in skeleton.named_parameters() if each.requires_grad}
        outputs = [leaf for leaf in _results(output) if isinstance(leaf, T) and leaf.requires_grad]
        earlier = _gradients(outputs, [call.returned for call in self.calls[:-1]])
        if any(gradient is not None for gradient in earlier):
            self.refuse("what follows the blocks takes what others than the last return")
        first = self.calls[0].received
        sides = []
        for roots in ([first] if first.requires_grad else [], outputs):
            gradients = _gradients(roots, list(named.values()))
            sides.append({name for name, gradient in zip(named, gradients, strict=True) if gradient is not None})
        before, after = [], []
        for module in _siblings(skeleton, self.path):
            names = {name for name in named if name.startswith(module + ".")}
            if names & sides[0] and names & sides[1]:
                self.refuse(f"{module} runs both before and after the blocks")
            if any(True for _ in skeleton.get_submodule(module).parameters()):
                (after if names & sides[1] else before).append(module)
        return tuple(before), tuple(after)

    def loss(self, skeleton: Any) -> str:
        """Return how the model averages its loss over labels: see ``Cut``."""
        function, taken = getattr(skeleton, "loss_function", None), []
        if function is None or "labels" not in _signature(skeleton):
            return "inline"

        def stand_in(*args: Any, **kwargs: Any) -> T:
            taken.append("num_items_in_batch" in kwargs)
            return torch.zeros(())

        skeleton._loss_function = stand_in
        try:
            labels = torch.zeros_like(self.inputs["input_ids"])
            self.run(skeleton, {**self.inputs, "labels": labels, "num_items_in_batch": 1})
        except Exception:  # labels of another form
            return "inline"
        finally:
            del skeleton._loss_function
        if taken != [True]:
            return "inline"
        name = getattr(function, "__name__", "")
        return "shifted" if name == "ForCausalLMLoss" else "plain" if name in _PLAIN else "custom"

    def first_only(self, skeleton: Any) -> tuple[str, ...]:
        """List the inputs that have part in the first block's hidden states, and in nothing else (images).

        One that the model's forward cannot be called without is every stage's.
        """
        names, own = [], _signature(skeleton)
        required = {name for name, each in own.items() if each.default is each.empty}
        for name, value in self.inputs.items():
            if name == "input_ids" or name in required or not isinstance(value, T):
                continue
            with _Watch(value) as watch:
                output = self.run(skeleton, self.inputs)
            if not watch.reaches((_results(output), [call.kwargs for call in self.calls])):
                names.append(name)
        return tuple(names)

    def run_stages(self, cut: Cut) -> bool:
        """Run stages of one recorder each; return True if later ones use the tokens beyond their embedding."""
        self.run(cut.model, self.inputs)
        hidden = self.calls[0].received.detach()
        uses, names = False, shared_names(self.inputs, cut.first_only)
        for index in sorted({0, min(1, self.count - 1), self.count - 1}):
            stage = cut_stage(cut, index, index + 1)
            received, watch = hidden.clone(), _Watch(self.inputs["input_ids"])
            try:
                with watch if index else contextlib.nullcontext():
                    output = self.run(stage, self.inputs, *([received, names] if index else []))
            except Exception as error:  # what a model raises
                self.refuse(f"its stage of block {index} alone fails: {type(error).__name__}: {error}")
            (call,) = self.calls
            if index and call.received is not received:
                self.refuse(f"block {index} alone does not get what its stage received")
            if index < self.count - 1 and (output[0] if names else output) is not call.returned:
                self.refuse(f"the stage of block {index} does not return what the block does")
            uses |= watch.reaches((_results(output), call.kwargs))
        return uses


def text_config(model: nn.Module) -> Any:
    """Return the configuration of a model's text part, which is that of the model itself where there is no other."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _results(output: Any) -> list[Any]:
    """List what a model returns, but for the hidden states that it adds for information."""
    if isinstance(output, Mapping):
        output = [value for name, value in output.items() if not name.endswith("hidden_states")]
    return pytree.tree_leaves(output)


@contextlib.contextmanager
def _unchecked() -> Iterator[None]:
    """Let transformers not check values, by its own switch: fake tensors have none."""
    switch = "TRANSFORMERS_DISABLE_TORCH_CHECK"
    before = os.environ.get(switch)
    os.environ[switch] = "1"
    try:
        yield
    finally:
        del os.environ[switch]
        if before is not None:
            os.environ[switch] = before


def _fake(tensor: T) -> T:
    empty = _empty(tensor)
    return nn.Parameter(empty) if isinstance(tensor, nn.Parameter) and tensor.is_floating_point() else empty


def _empty(tensor: T) -> T:
    return torch.empty_like(tensor, device="cpu")  # where the model is, meta too, has no part in this


def _gradients(outputs: list[T], inputs: list[T]) -> tuple[T | None, ...]:
    if not outputs or not inputs:
        return (None,) * len(inputs)
    ones = [torch.ones_like(each) for each in outputs]
    return torch.autograd.grad(outputs, inputs, ones, retain_graph=True, allow_unused=True)


def _siblings(model: nn.Module, path: str) -> Iterator[str]:
    """List the modules beside those that lead to the blocks."""
    prefix = ""
    for part in path.split("."):
        for name, _ in model.named_children():
            if name != part:
                yield prefix + name
        model, prefix = model.get_submodule(part), f"{prefix}{part}."


def _signature(module: Any) -> Mapping[str, Any]:
    return inspect.signature(type(module).forward).parameters
