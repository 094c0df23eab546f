"""Reading a MindSpore Cell for a plan, its tensors' contents too, and adapting one besides styles and sharding."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn

from hp_dtensor import DeviceMesh, DTensor, implicit_replication
from hp_dtensor.mindspore.extend import replicate_parameters
from hp_fsdp.extend import watch_optimizers
from hp_plan.plan import ParallelPlan
from hp_plan.port import Compare
from hp_plan.sections import PrecisionSection
from hp_plan.structure.outline import ModelOutline, ModuleOutline, declared_table, named_by
from hp_styles.mindspore.extend import kind as parallel_kind


def base(model: nn.Cell) -> nn.Cell:
    """Return the model that a plan's patterns name: ``model`` itself."""
    return model


def named_modules(model: nn.Cell) -> Iterator[tuple[str, nn.Cell]]:
    return model.cells_and_names()


def named_parameters(model: nn.Cell) -> Iterator[tuple[str, mindspore.Parameter]]:
    """List every parameter under its dotted name in the model, a shared one under each of its names.

    A Parameter's own `name` is changed by whatever holds it, an optimizer for one; its place is not.
    """
    for name, module in model.cells_and_names():
        for key, parameter in module._params.items():
            if parameter is not None:
                yield f"{name}.{key}" if name else key, parameter


def is_empty(model: nn.Cell) -> bool:
    """Return False: a Cell's parameters get their memory where it is built."""
    return False


def dtype(name: str | None) -> Any:
    return None if name is None else getattr(mindspore, name)


def outline(model: nn.Cell) -> ModelOutline:
    places: dict[int, list[str]] = {}
    for name, parameter in named_parameters(model):
        places.setdefault(id(parameter), []).append(name)
    prefix = getattr(model, "base_model_prefix", "")
    parameters = {id(parameter): parameter for _, parameter in named_parameters(model)}.values()
    modules = dict(named_modules(model))
    return ModelOutline(
        modules={name: _outline(module) for name, module in modules.items()},
        parameters=tuple(names[0] for names in places.values()),
        elements=sum(parameter.size for parameter in parameters),
        trained=sum(parameter.size for parameter in parameters if parameter.requires_grad),
        tied=tuple(tuple(names) for names in places.values() if len(names) > 1),
        base=prefix if prefix and isinstance(getattr(model, prefix, None), nn.Cell) else "",
        config=getattr(model, "config", None),
        own_table=declared_table(model, "tp_plan", [*modules, *(name for names in places.values() for name in names)]),
        embedding=named_by(model, "get_input_embeddings", modules.items()),
        head=named_by(model, "get_output_embeddings", modules.items()),
    )


def _outline(module: nn.Cell) -> ModuleOutline:
    head_dim = getattr(module, "head_dim", None)
    kind = "container" if isinstance(module, (nn.CellList, nn.CellDict)) else parallel_kind(module)
    out_features = module.weight.shape[0] if kind == "linear" else None
    return ModuleOutline(type(module).__name__, kind, out_features, head_dim if isinstance(head_dim, int) else None)


def example(rows: int, tokens: int) -> dict[str, Tensor]:
    """Return inputs of a shape that make a causal language model return its loss."""
    ids = mindspore.mint.zeros((rows, tokens), dtype=mindspore.int64)
    return {"input_ids": ids, "labels": ids}


def replicate_rest(model: nn.Cell, mesh: DeviceMesh) -> None:
    for _, module in named_modules(model):
        replicate_parameters(module, mesh)
    watch_optimizers()  # one that was made before has whole states


def keep_border_plain(model: nn.Cell, mesh: DeviceMesh, plain: Callable[[Any], Any]) -> None:
    """See Note [Plain tensors at the border] in `hp_plan.application`.

    Args:
        model: the model.
        mesh: of the tensor parallel ranks.
        plain: makes the model's output plain.
    """
    # Of the class as it is: fully_shard, applied later, runs the method that is put on the Cell here inside its gather.
    construct = vars(model).get("construct") or type(model).construct.__get__(model)

    def inside_replication(*inputs: Any, **keywords: Any) -> Any:
        with implicit_replication():
            return plain(construct(*inputs, **keywords))

    model.construct = inside_replication  # A Cell has no hook that runs where its construct raised.


def compare_samples(model: nn.Cell, compare: Compare) -> None:
    construct = vars(model).get("construct") or type(model).construct.__get__(model)

    def of_same_samples(*inputs: Any, **keywords: Any) -> Any:
        compare(model.training, inputs, keywords)
        return construct(*inputs, **keywords)

    model.construct = of_same_samples


def sum_beside_parameters(model: nn.Cell) -> None:
    """Do nothing: there are no adapters."""


def shard_adapters(model: nn.Cell) -> None:
    """Do nothing: there are no adapters."""


def lacks_products(key: str, form: str, kernels: str) -> tuple[str, str] | None:
    return "this version does not support it on MindSpore", "leave [precision] out"


def lower_precision(model: nn.Cell, section: PrecisionSection, names: Sequence[str]) -> None:
    """Do nothing: a plan that has names of layers is refused."""


def make_exact(model: nn.Cell) -> NoReturn:
    """Refuse exact generation.

    Raises:
        NotImplementedError: always; `check_exact` refuses it before.
    """
    raise NotImplementedError("run.generation: Cells do not generate")


def spread_attention(model: nn.Cell) -> None:
    """Do nothing: `border_of` refuses the axis."""


def border_of(mesh: DeviceMesh, data: DeviceMesh, load_balance: bool) -> NoReturn:
    """Refuse the axis `cp`.

    Raises:
        NotImplementedError: always; `check_mesh` refuses it before.
    """
    raise NotImplementedError("cp: plans of MindSpore have no such axis; use hp_styles.ContextParallel")


def adapt_library_methods(model: nn.Cell, *, tensor_parallel: bool) -> None:
    """Do nothing: Cells have no methods from a library."""


def forward_loss(plan: ParallelPlan, model: nn.Cell, tokens: Tensor) -> Tensor:
    """Return the loss of predicting each token from those before it, as a causal language model computes it.

    Args:
        plan: of the model.
        model: called with `input_ids` and `labels`, returns a mapping with `loss`.
        tokens: (samples, sequence length).
    """
    return model(tokens, tokens)["loss"]


def compilers() -> list[str]:
    """List none: `check_compile` refuses [compile]."""
    return []


def compile(module: nn.Cell, backend: str) -> NoReturn:
    """Refuse to compile.

    Raises:
        NotImplementedError: always; `check_compile` refuses it before.
    """
    raise NotImplementedError("[compile]: blocks of Cells are not compiled")


def balance_all_tokens(model: nn.Cell) -> None:
    """Do nothing: transformers' models, which add such a loss, are PyTorch's."""


def named_tensors(model: nn.Cell) -> Iterator[tuple[str, Parameter]]:
    """List parameters, running statistics among them, each once."""
    seen: set[int] = set()
    for name, parameter in named_parameters(model):
        if id(parameter) not in seen:
            seen.add(id(parameter))
            yield name, parameter


def describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).lower()}"


def is_comparable(value: Any) -> bool:
    """Return True for a plain tensor."""
    return isinstance(value, Tensor) and not isinstance(value, DTensor)


def digests(tensors: Sequence[Tensor]) -> list[int]:
    return [_digest(tensor) for tensor in tensors]


def _digest(tensor: Tensor) -> int:
    wide = tensor.astype(mindspore.float32) if tensor.dtype == mindspore.bfloat16 else tensor
    data = np.ascontiguousarray(wide.asnumpy()).tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def overwrite(tensor: Parameter, fill: Callable[[Tensor], Any]) -> None:
    """Let a function write to memory with the tensor's contents, and keep what it wrote."""
    memory = Tensor(tensor.asnumpy(), tensor.dtype) if tensor.dtype != mindspore.bfloat16 else tensor.value().copy()
    fill(memory)
    tensor.set_data(memory)
