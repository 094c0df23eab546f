"""Plans of Cells: built, linted, their weights read by name, their optimizers those of torch by definition."""

from __future__ import annotations

import math
from pathlib import Path

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn
from safetensors.numpy import save_file

from hp_plan import (
    ParallelPlan,
    PlanError,
    build_model,
    build_optimizer,
    build_schedule,
    dry_run,
    fit,
    generating,
    lint,
    log_probabilities,
    simulate_rank,
    tune,
    verify,
)
from hp_plan.extend import examine, propose, style_notes
from hp_plan.mindspore.build import build_empty
from hp_plan.mindspore.models import named_parameters, outline
from hp_plan.sections import schedule_factor
from hp_platform import get_platform

EXAMPLES = Path(__file__).parents[4] / "examples"
SMALL = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
}


@pytest.fixture(autouse=True)
def _examples(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


def tables(overrides=(), **sections):
    model = {"function": "mindspore_qwen3:qwen3", "overrides": {**SMALL, **dict(overrides)}}
    return {"model": model, "data": {"sequence_length": 16}, **sections}


def texts(given, world_size=None):
    return [str(diagnostic) for diagnostic in lint(given, world_size, run_model_code=True)]


def values(model):
    return {name: parameter.asnumpy() for name, parameter in named_parameters(model)}


def test_the_example_has_no_faults():
    assert lint(EXAMPLES / "mindspore_qwen3_fsdp_tp.toml", 4, run_model_code=True) == ()


def test_the_same_seed_builds_the_same_model():
    one, two, other = (values(build_model(ParallelPlan.from_dict(tables(run={"seed": seed})))) for seed in (1, 1, 2))
    assert one.keys() == two.keys()
    assert all((one[name] == two[name]).all() for name in one)
    assert (one["lm_head.weight"] != other["lm_head.weight"]).any()


def test_names_and_kinds_are_read_without_weights():
    read = outline(build_empty(ParallelPlan.from_dict(tables({"tie_word_embeddings": True}))))
    assert read.type_name == "Qwen3ForCausalLM"
    assert read.base == "model"
    assert read.tied == (("model.embed_tokens.weight", "lm_head.weight"),)
    assert "model.layers.0.self_attn.q_norm.weight" in read.parameters
    assert {name: read.modules[name].kind for name in ("model.embed_tokens", "lm_head", "model.layers")} == {
        "model.embed_tokens": "embedding",
        "lm_head": "linear",
        "model.layers": "container",
    }


def test_faults_of_a_plan_for_cells():
    given = tables(
        mesh={"dp_shard": 2, "tp": 4},
        styles={
            "model.layers.*.self_attn.k_pro": "rowwise",
            "model.layers.*.self_attn.k_proj": "colwise",
            "model.norm": "colwise",
        },
        fsdp={"groups": ["model.layers"]},
    )
    found = texts(given, 8)
    assert len(found) == 4
    assert "k_pro' matches no module; did you mean 'model.layers.*.self_attn.k_proj'" in found[0]
    assert "'colwise' on model.norm, which is a Qwen3RMSNorm; it is for a Linear" in found[1]
    assert "k_proj has 2 heads of size 4, which tp = 4 does not divide" in found[2]
    assert "a CellList, which is never called; group its members: 'model.layers.*'" in found[3]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"model": {}}, "model: [model] has no 'function'; write function = "),
        (
            {"model": {"config": "Qwen3Config"}},
            'which runs on PyTorch, but this process runs MindSpore; write function = "module:function", which '
            'returns a Cell, or platform = "torch" in [run]',
        ),
        (
            {"run": {"platform": "torch"}},
            "run.platform: the plan is for torch, but this process runs mindspore; set",
        ),
        (
            tables({"hiden_size": 3}),
            "building mindspore_qwen3:qwen3 failed: TypeError: qwen3() got an unexpected",
        ),
    ],
)
def test_a_model_that_can_not_be_built(given, expected):
    (text,) = texts(given)
    assert expected in text


def test_a_module_of_torch_is_no_cell(tmp_path, monkeypatch):
    (tmp_path / "torch_models.py").write_text(
        "class Module:\n    __module__ = 'torch.nn.modules.module'\n"
        "class Net(Module):\n    pass\n"
        "def net():\n    return Net()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert texts({"model": {"function": "torch_models:net"}}) == [
        "run.platform: torch_models:net returned a Net, a model of torch, but this process runs mindspore; write "
        'platform = "torch" in [run]'
    ]


def test_bfloat16_is_refused_where_the_cpu_has_no_kernels(monkeypatch):
    given = tables(run={"dtype": "bfloat16"}, fsdp={"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"})
    wrong = (
        "got 'bfloat16', for which MindSpore has no matrix product on the CPU; make it 'float32', or run the plan on"
    )
    assert texts(given) == [f"{key}: {wrong} an Ascend NPU" for key in ("run.dtype", "fsdp.param_dtype")]
    monkeypatch.setattr(type(get_platform().devices), "kind", "npu")
    assert texts(given) == []


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_the_example_computes_in_other_dtypes(dtype):
    plan = ParallelPlan.from_dict(tables(run={"dtype": dtype}))
    assert texts(plan.to_dict()) == []
    output = build_model(plan)(Tensor([[1, 2, 3]]))
    assert output["logits"].dtype == getattr(mindspore, dtype)


def batch_norm(size):
    return nn.SequentialCell(nn.BatchNorm1d(size))


def test_running_statistics_are_refused():
    assert texts({"model": {"function": f"{__name__}:batch_norm", "overrides": {"size": 3}}}) == [
        "model.function: 0 is a BatchNorm1d, whose running statistics a sharded step does not keep; use a norm without "
        "them, such as LayerNorm"
    ]


def test_msrun_is_told_how_many_ranks(monkeypatch):
    monkeypatch.setenv("MS_ROLE", "MS_WORKER")
    monkeypatch.setenv("MS_WORKER_NUM", "3")
    (text,) = texts(tables(mesh={"tp": 2}), 3)
    assert text.endswith("; start 2 ranks (msrun --worker_num=2 --local_worker_num=2) or change the sizes in [mesh]")


def test_weights_are_read_by_name(tmp_path):
    source = values(build_model(ParallelPlan.from_dict(tables(run={"seed": 3}))))
    save_file(source, tmp_path / "model.safetensors")
    given = tables()
    given["model"]["weights"] = str(tmp_path)
    read = values(build_model(ParallelPlan.from_dict(given)))
    assert all((read[name] == source[name]).all() for name in source)
    assert lint(given, run_model_code=True) == ()
    source["model.norm.weigt"] = source.pop("model.norm.weight")
    source["lm_head.weight"] = source["lm_head.weight"][:3]
    save_file(source, tmp_path / "model.safetensors")
    with pytest.raises(PlanError) as raised:
        build_model(ParallelPlan.from_dict(given))
    found = {diagnostic.message.replace(str(tmp_path), "FILE") for diagnostic in raised.value.diagnostics}
    assert found == {
        "'lm_head.weight' has shape (3, 16) in FILE, but (16, 16) in the model",
        "FILE has no 'model.norm.weight'",
        "FILE has 'model.norm.weigt', but the model does not",
    }
    given["model"]["weights"] = str(tmp_path / "nowhere")
    assert "nowhere does not exist; give a safetensors file" in texts(given)[0]


def layer_norm(size):
    return nn.SequentialCell(nn.LayerNorm((size,)))


NORMED = {"overrides": {"size": 3}, "function": f"{__name__}:batch_norm"}
RECOMPUTE = ["model.layers.*.mlp"]


@pytest.mark.parametrize(
    ("fix", "sections", "ways"),
    [
        ("leave it out, or write the stages as Cells", {"mesh": {"pp": 2}}, [{"mesh": {}}]),
        ("leave it out; the axes are dp_replicate, dp_shard, tp", {"mesh": {"cp": 2}}, [{"mesh": {"dp_shard": 2}}]),
        ("make it 'float32'", {"run": {"dtype": "bfloat16"}}, [{"run": {"dtype": "float32"}}]),
        (
            "write swap in its place, or make mesh.tp 1",
            {"memory": {"recompute": RECOMPUTE}, "mesh": {"tp": 2}},
            [{"memory": {"swap": RECOMPUTE}}, {"mesh": {"tp": 1}}],
        ),
        ("leave [adapter] out, or train on PyTorch", {"adapter": {"kind": "lora"}}, [{"adapter": {}}]),
        ("leave [compile] out", {"compile": {"blocks": ["model.layers.*"]}}, [{"compile": {}}]),
        ("leave [memory] out", {"memory": {"budget": "20GiB"}}, [{"memory": {}}]),
        ("leave it out; memory.swap", {"memory": {"homes": {RECOMPUTE[0]: "host"}}}, [{"memory": {"swap": RECOMPUTE}}]),
        ("shard the states", {"optimizer": {"name": "adamw8bit"}}, [{"optimizer": {}, "mesh": {"dp_shard": 2}}]),
        (
            "or train on PyTorch",
            {"objective": {"kind": "dpo"}, "data": {"format": "preference", "sequence_length": 16}},
            [{"objective": {}, "data": {"sequence_length": 16}}],
        ),
        ("leave [profile] out", {"profile": {"start": 2}}, [{"profile": {}}]),
        ("leave [monitor] out", {"monitor": {"every": 1}}, [{"monitor": {}}]),
        ("leave [sdc] out", {"sdc": {"replay_every": 1}}, [{"sdc": {}}]),
        ("use a norm without them", {"model": NORMED}, [{"model": {**NORMED, "function": f"{__name__}:layer_norm"}}]),
        ('write function = "package.module:function"', {"model": {}}, [{"model": tables()["model"]}]),
        (
            'write function = "module:function", which returns a Cell',
            {"model": {"config": "Qwen3Config"}},
            [{"model": tables()["model"]}],
        ),
    ],
)
def test_what_a_finding_says_helps(fix, sections, ways):
    assert any(fix in text for text in texts({**tables(), **sections}))
    for way in ways:
        assert texts({**tables(), **sections, **way}) == []


def adamw(weights, gradients, rates, beta1, beta2, eps, decay):
    """torch's definition, in float64."""
    average, square = 0.0, 0.0
    for step, (gradient, lr) in enumerate(zip(gradients, rates), start=1):
        weights = weights * (1 - lr * decay)
        average = beta1 * average + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient**2
        root = np.sqrt(square) / math.sqrt(1 - beta2**step) + eps
        weights = weights - lr / (1 - beta1**step) * average / root
    return weights


def sgd(weights, gradients, rates, momentum, decay):
    total = None
    for gradient, lr in zip(gradients, rates):
        gradient = gradient + decay * weights
        total = gradient if total is None else momentum * total + gradient
        weights = weights - lr * total
    return weights


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_optimizers_and_schedules_are_those_of_torch(name):
    section = {"name": name, "lr": 0.01, "weight_decay": 0.1, "momentum": 0.9, "betas": [0.9, 0.999]}
    schedule = {"kind": "cosine", "warmup_steps": 3, "final": 0.1}
    plan = ParallelPlan.from_dict({"optimizer": section, "schedule": schedule, "run": {"steps": 12}})
    random = np.random.default_rng(0)
    weights, gradients = random.normal(size=(3, 4)), random.normal(size=(12, 3, 4))
    parameter = Parameter(Tensor(weights, mindspore.float32), name="weight")
    optimizer = build_optimizer(plan, [parameter])
    rates = build_schedule(plan, optimizer)
    for gradient in gradients:
        optimizer((Tensor(gradient, mindspore.float32),))
        rates.step()
    lr = [0.01 * schedule_factor(plan.schedule, step, 12) for step in range(12)]
    if name == "adamw":
        expected = adamw(weights, gradients, lr, 0.9, 0.999, 1e-8, 0.1)
    else:
        expected = sgd(weights, gradients, lr, 0.9, 0.1)
    np.testing.assert_allclose(parameter.asnumpy(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_groups_get_the_gradients_of_their_own_parameters(name):
    """Groups reorder parameters, whose gradients are passed by name."""
    groups = [{"patterns": ["*.bias"], "weight_decay": 0.0}, {"patterns": ["b.weight"], "lr_multiple": 0.5}]
    section = {"name": name, "lr": 0.01, "weight_decay": 0.1, "groups": groups}
    plan = ParallelPlan.from_dict({"optimizer": section, "schedule": {"kind": "linear"}, "run": {"steps": 6}})
    random = np.random.default_rng(0)
    names = ["a.weight", "a.bias", "b.weight", "b.bias"]
    weights = {each: random.normal(size=3) for each in names}
    gradients = [{each: random.normal(size=3) for each in names} for _ in range(6)]
    parameters = [Parameter(Tensor(weights[each], mindspore.float32), name=each) for each in names]
    optimizer = build_optimizer(plan, parameters)
    rates = build_schedule(plan, optimizer)
    for step in gradients:
        optimizer.step({each: Tensor(gradient, mindspore.float32) for each, gradient in step.items()})
        rates.step()
    assert len(rates.state_dict()["base_lrs"]) == 3, "as without a chain"
    for parameter in parameters:
        own = parameter.name
        decay, multiple = 0.0 if own.endswith("bias") else 0.1, 0.5 if own == "b.weight" else 1.0
        lr = [multiple * 0.01 * schedule_factor(plan.schedule, step, 6) for step in range(6)]
        listed = [step[own] for step in gradients]
        if name == "adamw":
            expected = adamw(weights[own], listed, lr, 0.9, 0.999, 1e-8, decay)
        else:
            expected = sgd(weights[own], listed, lr, 0.0, decay)
        np.testing.assert_allclose(parameter.asnumpy(), expected, rtol=0, atol=2e-6, err_msg=own)


def test_verify_names_what_to_use():
    with pytest.raises(NotImplementedError, match="verify runs on PyTorch only"):
        verify(ParallelPlan.from_dict(tables()))


@pytest.mark.parametrize(
    ("section", "text"),
    [
        (
            {"swap_slices": 4},
            "optimizer.swap_slices: got states on the host, which this version does not support on Mi",
        ),
        ({"name": "adamw8bit"}, "optimizer.name: got adamw8bit, which this version does not support on MindSpore"),
    ],
)
def test_states_that_mindspore_does_not_have(section, text):
    with pytest.raises(PlanError, match=text):
        build_optimizer(ParallelPlan.from_dict({"optimizer": section}), [Parameter(Tensor(np.ones(3)), name="w")])


class Declared(nn.Cell):
    """A model of one's own that says how it can be spread."""

    def __init__(self, table) -> None:
        super().__init__()
        self.tp_plan = table
        self.tokens, self.last = mint.nn.Embedding(16, 8), mint.nn.Linear(8, 16)
        self.blocks = nn.CellList([mint.nn.Linear(8, 8) for _ in range(2)])

    def get_input_embeddings(self):
        return self.tokens

    def get_output_embeddings(self):
        return self.last


def test_a_model_declares_its_styles_and_ends():
    plan = ParallelPlan.from_dict({"model": {"function": "m:f"}, "mesh": {"tp": 2}})
    report = examine(plan, [], model=Declared({"blocks.*": "colwise"}))
    assert report.diagnostics == ()
    assert style_notes(plan, report.model) == [
        "styles = 'auto' come from the model and structure: "
        "blocks.* = colwise, tokens = embedding_rowwise, last = colwise_gather_output"
    ]
    (wrong,) = lint(plan, model=Declared({"block.*": "colwise"}))
    assert "Declared.tp_plan: 'block.*' matches no module" in str(wrong)


def test_dry_runs_are_refused_by_name():
    plan = ParallelPlan.from_dict({"model": {"config": "LlamaConfig"}})
    for name, ask in {
        "dry_run": lambda: dry_run(plan),
        "fit": lambda: fit(plan, memory="1GiB"),
        "simulate_rank": lambda: simulate_rank(plan, ranks=2),
        "tune": lambda: tune(plan, ranks=2, hardware="cpu"),
    }.items():
        with pytest.raises(NotImplementedError, match=f"{name}: .*MindSpore has none. .*HYPER_PARALLEL_PLATFORM=torch"):
            ask()


def test_a_proposal_says_that_it_was_not_played():
    estimate = propose(tables(), 2, play=dry_run).estimate
    assert "MindSpore has none" in estimate.unplayed and estimate.total > 0 and not estimate.by_kind


def test_generation_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="generating: .*stream_weights"):
        generating(None, seed=0)
    with pytest.raises(NotImplementedError, match="log_probabilities: .*log_softmax"):
        log_probabilities(None, None, chunk=8)
