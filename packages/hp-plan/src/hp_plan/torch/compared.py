"""A model under a plan beside the same model in one process, in float64 and without chance, tensor by tensor."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from hp_dtensor import DTensor
from hp_plan.checks.verification import ModuleDifference, VerifyResult
from hp_plan.plan import ParallelPlan
from hp_plan.port import models
from hp_plan.torch.library.compat import casts
from hp_plan.torch.training.parts import Part, parts
from hp_platform import get_platform
from hp_platform.extend import reduce_numbers, share_bytes
from hp_styles.extend import runs_on_parts

_KINDS = ("output", "gradient", "weight")
# Of the largest gradient, or weight: some have none but rounding errors, such as a key's bias under a softmax.
_FLOOR = 1e-6
# A gradient of less, in relation to the largest, is of rounding errors alone. AdamW divides it by its own size, so what
# it makes of the weight is compared with the largest weight.
_ROUNDING = 1e-13


class Compared:
    """The differences of each step, by module in the order in which modules finish."""

    def __init__(self, plan: ParallelPlan, single: nn.Module, parallel: Any) -> None:
        self._single, self._parts = single, list(parts(plan, parallel, single))
        self._compared = _innermost(single, self._parts)
        self._parameters = dict(single.named_parameters(remove_duplicate=False))
        self._own = {name: weight for part in self._parts for name, weight in part.parameters().items()}
        self._somewhere = _on_any_rank(self._parameters, self._own)
        self._rounding: set[str] = set()  # parameters whose last gradient was of rounding errors
        self._expected: dict[str, list[torch.Tensor]] = {}  # of each call
        self._steps: list[dict[str, dict[str, float]]] = []
        self._losses: list[float] = []

    def begin_step(self) -> None:
        """Begin a new step."""
        self._steps.append({})

    def begins(self, micro: int) -> None:
        """Note the number of a whole model's micro-batch that runs next."""
        for part in self._parts:
            part.begins(micro)

    @contextlib.contextmanager
    def expected_outputs(self) -> Iterator[None]:
        """Record the output of each module of the one-process model."""
        self._expected.clear()
        with _after_forward(self._single, self._compared, self._keep):
            yield

    def ranks(self, loss: float, tolerance: float) -> bool:
        """Compare the one-process programs of all ranks; return True if they do not differ.

        Args:
            loss: of this rank's.
            tolerance: relative difference of the sums of tensors that passes.
        """
        own: dict[str, tuple[float, float] | None] = {"loss ": (loss, abs(loss))}
        own |= {f"output {name}": _sums(calls) for name, calls in self._expected.items()}
        for name, parameter in self._parameters.items():
            own[f"gradient {name}"] = None if parameter.grad is None else _sums([parameter.grad])
        everyone = [json.loads(each) for each in share_bytes(json.dumps(own).encode(), _everyone())]
        apart = {key: _apart([each.get(key) for each in everyone]) for key in dict.fromkeys(itertools.chain(*everyone))}
        if all(each <= tolerance for each in apart.values()):
            return True
        self._losses.append(apart.pop("loss "))
        self._steps[-1].clear()
        for key, difference in apart.items():
            kind, name = key.split(" ", 1)
            self._note(name if kind == "output" else name.rpartition(".")[0], kind, difference)
        return False

    @contextlib.contextmanager
    def outputs(self, rows: slice, places: Sequence[int], *, batch: int) -> Iterator[None]:
        """Compare the output of each module with the recorded one.

        Args:
            rows: this rank's samples.
            places: its tokens of each.
            batch: number of samples of the recorded outputs.
        """
        with contextlib.ExitStack() as hooks:
            for part in self._parts:
                calls: Counter[str] = Counter()

                def compare(name: str, output: torch.Tensor, part: Part = part, calls: Any = calls) -> None:
                    got, expected = _whole(output), self._expected[name]
                    # A module may be called several times in a forward, and a stage runs one for each micro-batch.
                    mine = _samples(expected[calls[name] % len(expected)], got, part.samples(rows), batch)
                    calls[name] += 1
                    mine = _tokens_of(mine, got, places)
                    if mine.shape != got.shape and next(part.module.get_submodule(name).parameters(), None) is None:
                        return  # an activation of tokens that experts have ordered: what follows it is compared
                    self._note(name, "output", _difference(got, mine))

                hooks.enter_context(part.counting())
                hooks.enter_context(_after_forward(part.module, self._compared & part.names, compare))
            yield

    def _keep(self, name: str, output: torch.Tensor) -> None:
        self._expected.setdefault(name, []).append(output.detach().clone())  # what follows may write to it
        self._note(name, "output", 0.0)

    def loss(self, got: float | None, expected: float) -> None:
        """Compare the loss: the global one is the mean of those of the ranks that have one."""
        total, count = reduce_numbers([got or 0.0, got is not None], "sum", _everyone())
        got_and_expected = torch.tensor([total / count, expected], dtype=torch.float64)
        self._losses.append(_difference(*got_and_expected))

    def tensors(self, kind: str, read: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        """Compare a tensor of every parameter, such as its gradient; one that no rank has differs."""
        largest = max((_largest(read(parameter)) for parameter in self._parameters.values()), default=0.0)
        for name, parameter in self._parameters.items():
            module = name.rpartition(".")[0]
            if name not in self._own:
                self._note(module, kind, 0.0 if name in self._somewhere else math.inf)
                continue
            got, expected = read(self._own[name]), read(parameter)
            got = None if got is None else _whole(got)  # all ranks together, whatever this one expects
            if (got is None) != (expected is None):
                self._note(module, kind, math.inf)
            elif got is not None and expected is not None:
                floor = 1.0 if kind == "weight" and name in self._rounding else _FLOOR
                self._note(module, kind, _difference(got, expected, floor=floor * largest))
            if kind == "gradient" and _largest(expected) < _ROUNDING * largest:
                self._rounding.add(name)

    def leave_out_unseen(self) -> None:
        """Forget the outputs of modules that the loss does not see, as of a pooler: a stage computes them of zeros."""
        for name in self._compared:
            around = name  # the module, or the first around it that has parameters
            while around and next(self._single.get_submodule(around).parameters(), None) is None:
                around = around.rpartition(".")[0]
            own = [each for each in self._single.get_submodule(around).parameters() if each.requires_grad]
            if own and all(each.grad is None for each in own):
                self._steps[-1].get(name, {}).pop("output", None)

    def buffers(self) -> None:
        """Compare the buffers of this rank, as weights of their modules: what forward writes may be of its samples."""
        own = {name: buffer for part in self._parts for name, buffer in part.buffers().items()}
        for name, buffer in self._single.named_buffers(remove_duplicate=False):
            if name in own:
                got = _whole(own[name])
                self._note(name.rpartition(".")[0], "weight", _difference(got.double(), buffer.double()))
            else:
                self._note(name.rpartition(".")[0], "weight", 0.0)

    def result(self, tolerance: float) -> VerifyResult:
        """Return the largest differences of all ranks."""
        numbers = [row.get(kind, 0.0) for step in self._steps for row in step.values() for kind in _KINDS]
        largest = iter(reduce_numbers([*self._losses, *numbers], "max", _everyone()))
        losses = tuple(next(largest) for _ in self._losses)
        steps = tuple(
            tuple(ModuleDifference(name, next(largest), next(largest), next(largest)) for name in step)
            for step in self._steps
        )
        return VerifyResult(steps, losses, tolerance, get_platform().groups.size())

    def _note(self, module: str, kind: str, difference: float) -> None:
        row = self._steps[-1].setdefault(module, {})
        row[kind] = max(row.get(kind, 0.0), difference)


def _innermost(single: nn.Module, parallel: Sequence[Part]) -> set[str]:
    """List the modules without others inside, and experts as a whole: each holds tokens of other samples together.

    A module of a stage that has no inputs of its own there is left out, as is what runs on parts of the features.
    """
    names = [name for name, _ in single.named_modules()]
    on_parts = {name for part in parallel for name, each in part.module.named_modules() if runs_on_parts(each)}
    experts = {name for name, module in models().outline(single).modules.items() if module.experts is not None}
    regions = _on_any_rank(names, on_parts) | experts
    inside = tuple(f"{name}." for name in regions)
    leaves = {name for name, module in single.named_modules() if next(module.children(), None) is None}
    chosen = {name for name in leaves if not name.startswith(inside)} | regions
    return chosen & _on_any_rank(names, {name for part in parallel for name in part.names})


def _on_any_rank(names: Iterable[str], own: Container[str]) -> set[str]:
    """Return those of the names, the same list on all ranks, that any rank has among its own."""
    listed = list(names)
    flags = reduce_numbers([name in own for name in listed], "max", _everyone())
    return {name for name, flag in zip(listed, flags, strict=True) if flag}


def _samples(expected: torch.Tensor, got: torch.Tensor, rows: slice, batch: int) -> torch.Tensor:
    """Return the part of an output for some samples of the batch: samples, or samples times tokens, come first."""
    if got.shape == expected.shape or not expected.ndim or len(expected) % batch:
        return expected
    each = len(expected) // batch
    return expected[rows.start * each : rows.stop * each]


def _tokens_of(expected: torch.Tensor, got: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
    """Return the part of an output for some tokens: those of a dim of their own, or of one with the samples."""
    if got.ndim == expected.ndim > 1 and len(got) == 1 < len(expected) and torch.equal(expected[:1], expected[-1:]):
        expected = expected[:1]  # the same for each sample, as of positions
    different = [dim for dim, (own, whole) in enumerate(zip(got.shape, expected.shape, strict=False)) if own != whole]
    if len(different) != 1 or got.ndim != expected.ndim:
        return expected
    if got.shape[different[0]] == len(places):
        return expected.index_select(different[0], torch.tensor(places, device=expected.device))
    samples = len(got) // len(places) if different == [0] else 0
    return expected.unflatten(0, (samples, -1))[:, places].flatten(0, 1) if samples else expected


@contextlib.contextmanager
def _after_forward(model: nn.Module, names: set[str], seen: Callable[[str, torch.Tensor], None]) -> Iterator[None]:
    """Call `seen` with the name and the first output tensor of each named module after it has run."""

    def hook(name: str) -> Any:
        def run(module: nn.Module, inputs: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if isinstance(tensor, torch.Tensor):
                seen(name, tensor)

        return run

    named = [(name, module) for name, module in model.named_modules() if name in names]
    handles = [module.register_forward_hook(hook(name)) for name, module in named]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _sums(tensors: Iterable[torch.Tensor]) -> tuple[float, float]:
    """Return the sum of all elements, and that of their sizes."""
    real = [(torch.view_as_real(each) if each.is_complex() else each).double() for each in tensors]
    sums = [(each.sum().item(), each.abs().sum().item()) for each in real]
    return sum(each for each, _ in sums), sum(size for _, size in sums)


def _apart(sums: Sequence[Sequence[float] | None]) -> float:
    """Return the largest difference from the first, over its size; infinite where some have none."""
    some = [each for each in sums if each is not None]
    if not some or len(some) < len(sums):
        return math.inf if some else 0.0
    largest = max(abs(each[0] - some[0][0]) for each in some) / (some[0][1] or 1.0)
    return largest if math.isfinite(largest) else math.inf


def _largest(tensor: torch.Tensor | None) -> float:
    return 0.0 if tensor is None or not tensor.numel() else tensor.detach().abs().max().item()


def _difference(got: torch.Tensor, expected: torch.Tensor, *, floor: float = 0.0) -> float:
    """Largest difference over the largest expected element, or `floor` where that is more.

    Infinite where shapes differ or a number isn't one.
    """
    if got.shape != expected.shape:
        return math.inf
    if not expected.numel():
        return 0.0
    scale = max(expected.abs().max().item(), floor) or 1.0
    largest = (got - expected.to(got.device)).abs().max().item() / scale
    return largest if math.isfinite(largest) else math.inf


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _everyone() -> Any:
    groups = get_platform().groups
    return groups.new_group(range(groups.size()))


_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)
_DRAWS = {torch.rand, torch.randn, torch.randint, torch.randperm, torch.rand_like, torch.randn_like, torch.bernoulli}
_DRAWS |= {torch.multinomial, torch.normal, torch.Tensor.bernoulli_, torch.Tensor.uniform_, torch.Tensor.normal_}
_GROUPED = tuple(
    function for owner, name in ((F, "grouped_mm"), (torch, "_grouped_mm")) if (function := getattr(owner, name, None))
)


class Float64(TorchFunctionMode):
    """Inside, explicit requests for float32 give float64, and dropout keeps everything.

    Models raise a norm's or a softmax's input to float32 for accuracy. In a float64 comparison that loses accuracy, and
    would hide every error below 1e-7. A mode sees calls before any tensor subclass does. Grouped products have no
    kernel for float64, so they are one product a group. Which elements dropout drops is a draw of a generator that two
    programs don't share; that it was left out is in `notes`.

    Attributes:
        notes: changes to the model's computation, and what it draws at random, each once.
        trains: the model runs, and is not being built.
        lowers: layers multiply in eight bits.
    """

    def __init__(self, *, lowers: bool = False) -> None:
        super().__init__()
        self.lowers = lowers
        self.notes: list[str] = []
        self.trains = False

    def __enter__(self) -> Float64:
        super().__enter__()
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.lowers and func is torch.Tensor.to and not torch.compiler.is_compiling():
            if casts():
                return func(*args, **(kwargs or {}))  # `products_in_float64` knows better
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if item is torch.float32 else item for item in args)
        kwargs = {key: torch.float64 if item is torch.float32 else item for key, item in (kwargs or {}).items()}
        if func in _DROPOUTS:
            return self._without_dropout(func, args, kwargs)
        if func is F.scaled_dot_product_attention and kwargs.get("dropout_p"):
            self._note("scaled_dot_product_attention", kwargs["dropout_p"])
            kwargs["dropout_p"] = 0.0
        if self.trains and func is torch.rand and args in ((()), ([],), ((),)) and kwargs.get("generator") is None:
            self._say("torch.rand([]), as layers are dropped by, gave 0.5: two programs don't draw alike")
            return torch.tensor(0.5, dtype=kwargs.get("dtype") or torch.float64, device=kwargs.get("device"))
        if self.trains and func in _DRAWS and kwargs.get("generator") is None:
            self._say(f"{func.__name__} was called: two programs don't draw alike, so differences may be of chance")
        if func in _GROUPED and args[0].dtype is torch.float64:
            return _grouped_product(*args, **kwargs)
        return func(*args, **kwargs)

    def _without_dropout(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        bound = inspect.signature(func).bind(*args, **kwargs)
        bound.apply_defaults()
        if bound.arguments["training"] and bound.arguments["p"]:
            self._note(func.__name__, bound.arguments["p"])
        return bound.arguments["input"]

    def _note(self, name: str, p: float) -> None:
        self._say(f"{name} of p = {p:g} was set to 0: two programs don't draw alike")

    def _say(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


def _grouped_product(
    a: torch.Tensor, b: torch.Tensor, *, offs: torch.Tensor, bias: Any = None, out_dtype: Any = None
) -> torch.Tensor:
    """`grouped_mm` of a (rows, k) and b (groups, k, columns): each run of rows times its group's matrix."""
    ends = offs.tolist()
    parts = [a[start:end] @ b[group] for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False))]
    product = torch.cat([*parts, a.new_zeros(len(a) - ends[-1], b.shape[-1])])
    return product if bias is None else product + bias
