"""Protocols that a framework implements for hp-plan: the differences between torch's Module and MindSpore's Cell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from hp_dtensor import DeviceMesh
from hp_plan.plan import ParallelPlan
from hp_plan.reading.diagnostics import Diagnostic
from hp_plan.sections import PrecisionSection
from hp_plan.structure.outline import ModelOutline
from hp_platform.extend import load_port

Module = Any
Compare = Callable[[bool, Sequence[Any], Mapping[str, Any]], None]  # training, inputs by place and by name


class Models(Protocol):
    """Reading and changing a model; `<framework>/models.py`."""

    def base(self, model: Module) -> Module:
        """Get the model that a plan's patterns name: the one inside its wrapper."""
        ...

    def named_modules(self, model: Module) -> Iterable[tuple[str, Module]]:
        """List every module by its name, the model itself first, as `""`."""
        ...

    def is_empty(self, model: Module) -> bool:
        """Tell whether the model has no memory yet."""
        ...

    def dtype(self, name: str | None) -> Any:
        """Get the dtype of this name; None of None."""
        ...

    def outline(self, model: Module) -> ModelOutline:
        """Read the model's names, kinds and shapes."""
        ...

    def example(self, rows: int, tokens: int) -> dict[str, Any]:
        """Make inputs of this shape, whose values nothing reads."""
        ...

    def replicate_rest(self, model: Module, mesh: DeviceMesh) -> None:
        """Turn the parameters that no style has sharded into replicated DTensors."""
        ...

    def keep_border_plain(self, model: Module, mesh: DeviceMesh, plain: Callable[[Any], Any]) -> None:
        """Take and return plain tensors; see Note [Plain tensors at the border] in `hp_plan.application`."""
        ...

    def compare_samples(self, model: Module, compare: Compare) -> None:
        """Compare the model's inputs between the ranks that share samples, before anything is computed with them."""
        ...

    def sum_beside_parameters(self, model: Module) -> None:
        """Let adapters of single parameters leave these where they are, for what shards them."""
        ...

    def lacks_products(self, key: str, form: str, kernels: str) -> tuple[str, str] | None:
        """Tell what keeps this process from products of a format of `[precision]`, and what to do; None if nothing."""
        ...

    def lower_precision(self, model: Module, section: PrecisionSection, names: Sequence[str]) -> None:
        """Let the Linear modules and experts of these names multiply in eight bits; they stay the objects they are."""
        ...

    def shard_adapters(self, model: Module) -> None:
        """Shard the adapters of single parameters like these."""
        ...

    def make_exact(self, model: Module) -> None:
        """Let the bits of a token depend on the tokens before it alone, in training and in generation."""
        ...

    def spread_attention(self, model: Module) -> None:
        """Let attention that caps its logits be one that a context parallel style finds."""
        ...

    def border_of(self, mesh: DeviceMesh, data: DeviceMesh, load_balance: bool) -> Any:
        """Get what takes whole sequences; see Note [Whole sequences at the border] in `hp_plan.features.sequences`."""
        ...

    def compilers(self) -> Sequence[str]:
        """List the names of the framework's compilers."""
        ...

    def compile(self, module: Module, backend: str) -> None:
        """Compile a module into one graph, in its first call."""
        ...

    def balance_all_tokens(self, model: Module) -> None:
        """Let a model's load balancing loss be that of the tokens of all ranks."""
        ...

    def adapt_library_methods(self, model: Module, *, tensor_parallel: bool) -> None:
        """Make methods that a library gave the model work on its shards."""
        ...

    def named_tensors(self, model: Module) -> Iterable[tuple[str, Any]]:
        """List parameters and buffers, each once."""
        ...

    def describe(self, tensor: Any) -> str:
        """Name shape and dtype."""
        ...

    def is_comparable(self, value: Any) -> bool:
        """Tell whether it is a plain tensor with memory."""
        ...

    def digests(self, tensors: Sequence[Any]) -> list[int]:
        """Compute a signed number of 64 bits for each tensor, which differs where contents do."""
        ...

    def overwrite(self, tensor: Any, fill: Callable[[Any], Any]) -> None:
        """Let `fill` write to the tensor's memory."""
        ...


class Build(Protocol):
    """Building what a plan describes; `<framework>/build.py`."""

    def build_empty(self, plan: ParallelPlan) -> Module:
        """Build the model without its parameters' memory."""
        ...

    def check_model_section(self, plan: ParallelPlan, *, run_code: bool) -> Sequence[Diagnostic]:
        """Check the plan's [model] section against what can be built."""
        ...

    def check_fit(self, plan: ParallelPlan, model: Module) -> Sequence[Diagnostic]:
        """Check that the weights that the plan reads are those of the model."""
        ...


class Verifier(Protocol):
    """Running a plan's model to look for faults; `torch/verify.py`."""

    def refusal_under_cp(self, plan: ParallelPlan) -> str | None:
        """Call the model once, over all ranks as `cp`, and get why it is refused."""
        ...


def models() -> Models:
    """Get the framework's way to read and change a model."""
    return load_port(Models, "models")


def build() -> Build:
    """Get the framework's way to build what a plan describes."""
    return load_port(Build, "build")


def verifier() -> Verifier:
    """Get the framework's way to run a plan's model and look for faults."""
    return load_port(Verifier, "verify")
