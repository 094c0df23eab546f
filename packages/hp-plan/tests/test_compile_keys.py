"""`[compile]` of a plan: blocks are one graph, with the losses and gradients of eager ones."""

from __future__ import annotations

import importlib
import warnings

import pytest
import torch

from hp_plan import ParallelPlan, apply, build_model, lint
from hp_plan.torch.extend import backward_loss
from hp_testing import device_type, on_ranks

# Dynamo asks every tensor for its gradient, and hides that warning from users, but not from a filter that raises.
pytestmark = [pytest.mark.framework("torch"), pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")]
SIZES = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 32}
SMALL = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}
BLOCKS = ["model.layers.*"]


def llama(**sections) -> ParallelPlan:
    data = {"data": {"batch_size": 4, "sequence_length": 8}, "run": {"dtype": "float64"}}
    layers = {"num_hidden_layers": 4 if "pp" in sections.get("mesh", {}) else 2}
    return ParallelPlan.from_dict({"model": {"config": "LlamaConfig", "overrides": SMALL | layers}, **data, **sections})


def compiler():
    """Prepare Dynamo; return its counters."""
    with warnings.catch_warnings():  # imports warn
        warnings.simplefilter("ignore")
        importlib.import_module("torch._inductor.compile_fx")
    torch._dynamo.reset()
    counters = importlib.import_module("torch._dynamo.utils").counters
    counters.clear()
    return counters


def step(plan):
    model = apply(build_model(plan).to(device_type()), plan)
    tokens = torch.arange(32, device=device_type()).view(4, 8) % 16
    for _ in range(2):
        model.zero_grad()
        loss = backward_loss(plan, model, tokens)
    local = [getattr(each.grad, "to_local", lambda each=each: each.grad)() for each in model.parameters()]
    return [torch.as_tensor(0.0 if loss is None else loss), *local]


@pytest.mark.not_on("torch-npu-sim", reason="torch_npu computes SiLU's backward by a kernel that can't be traced here")
@on_ranks(2)
@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({"mesh": {"dp_shard": 2}}, marks=pytest.mark.thorough),
        {"mesh": {"dp_shard": 2}, "memory": {"recompute": BLOCKS}, "run": {"dtype": "float64", "accumulate": 2}},
        pytest.param({"mesh": {"pp": 2}}, marks=pytest.mark.thorough),
        {"mesh": {"pp": 2}, "pipeline": {"schedule": "zbv"}},
    ],
    ids=["fsdp", "computed again", "1f1b", "zbv"],
)
def test_blocks_are_one_graph(sections):
    eager = step(llama(**sections))
    counters = compiler()
    compiled = step(llama(**sections, compile={"blocks": BLOCKS, "backend": "aot_eager"}))
    assert counters["stats"]["unique_graphs"] > 0 and not counters["graph_break"]
    for got, wanted in zip(compiled, eager, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"mesh": {"tp": 2}}, "compile.blocks: got blocks to compile with mesh.tp = 2, but its DTensors meet plain"),
        ({"mesh": {"cp": 2}}, "compile.blocks: got blocks to compile with mesh.cp = 2, but attention"),
        ({"memory": {"swap": BLOCKS}}, "compile.blocks: got blocks to compile with memory.swap, but"),
        ({"memory": {"budget": "1GiB"}}, "compile.blocks: got blocks to compile with memory.budget, but"),
        (
            {"compile": {"blocks": BLOCKS, "backend": "inducter"}},
            "compile.backend: there is no compiler 'inducter'; did",
        ),
        ({"compile": {"backend": "eager"}}, "compile.backend: got 'eager', which nothing uses without blocks"),
        (
            {"compile": {"blocks": ["model.layer.*"]}},
            "compile.blocks[0]: 'model.layer.*' matches no module; did you mean",
        ),
        ({"compile": {"blocks": ["model.layers"]}}, "compile.blocks[0]: 'model.layers' matches model.layers, a Mod"),
        (
            {"mesh": {"dp_shard": 2}, "compile": {"blocks": ["model"]}},
            "compile.blocks[0]: 'model' matches model, but model.layers.0 inside of it gathers its",
        ),
    ],
)
def test_what_can_not_be_one_graph_is_refused(sections, expected):
    texts = [str(diagnostic) for diagnostic in lint(llama(**{"compile": {"blocks": BLOCKS}, **sections}))]
    assert any(text.startswith(expected) for text in texts), texts


@on_ranks(2)
@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_a_model_whose_ranks_talk_at_its_border_is_not_compiled(axis):
    compiler()
    model = apply(build_model(llama(mesh={axis: 2})).to(device_type()), llama(mesh={axis: 2}))
    tokens = torch.arange(32, device=device_type()).view(4, 8) % 16
    model.compile(backend="eager")
    with pytest.raises(NotImplementedError, match=f"a plan with {axis}: modules with this style can't be compiled"):
        model(input_ids=tokens)
    model._compiled_call_impl = None
    if axis == "cp":
        model.model.layers[0].compile(backend="eager")
        with pytest.raises(NotImplementedError, match="ContextParallel: modules with this style can't be compiled"):
            model(input_ids=tokens)
