from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys

import pytest
from torch import nn

from hp_plan import Diagnostic, ParallelPlan, lint
from hp_plan.checks.checks import CHECKS
from hp_plan.extend import examine, style_notes

pytestmark = pytest.mark.framework("torch")  # transformers' models are PyTorch's

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}


def plan_of(config="Qwen3Config", overrides=(), **sections):
    model = {"config": config, "overrides": {**SMALL, **dict(overrides)}}
    return {"model": model, "data": {"sequence_length": 32}, **sections}


def texts(tables, world_size=None):
    return [str(diagnostic) for diagnostic in lint(tables, world_size, run_model_code=True)]


@pytest.mark.parametrize("config", ["LlamaConfig", "Qwen3Config", "MistralConfig"])
@pytest.mark.parametrize("styles", ["auto", "auto-sequence"])
@pytest.mark.parametrize("tied", [True, False])
def test_nothing_is_wrong_with_the_automatic_tables(config, styles, tied):
    tables = plan_of(
        config,
        {"tie_word_embeddings": tied},
        styles=styles,
        mesh={"tp": 2, "dp_shard": 2},
        fsdp={"groups": ["model.layers.*"]},
    )
    assert lint(tables, 4) == ()
    assert lint(ParallelPlan.from_dict(tables), 4) == ()


def test_all_findings_come_at_once():
    tables = plan_of(
        overrides={"hiddn_size": 3},
        mesh={"tp": 4, "dp_shard": 3, "cp": 2},
        fsdp={"groups": ["model.layer.*", "model.layers"]},
        optimizr={},
        schedule={"warmup_steps": 101},
        data={"sequence_length": 128},
    )
    assert texts(tables, 8) == [
        "optimizr: there is no section or key 'optimizr'; did you mean 'optimizer'?",
        "mesh: the mesh dp_shard 3 x cp 2 x tp 4 has 24 ranks, but there are 8; start 24 ranks (--nproc 24) or "
        "change the "
        "sizes in [mesh]",
        "data.batch_size: the global batch of 8 does not divide over dp_replicate 1 x dp_shard 3 = 3 ranks; "
        "make it 6 or "
        "another multiple of 3",
        "schedule.warmup_steps: 101 warm-up steps in a run of 100; make it at most 100",
        "model.overrides.hiddn_size: Qwen3Config has no setting 'hiddn_size'; did you mean 'hidden_size' or "
        "'hidden_act'?",
        "mesh.tp: model.layers.*.self_attn.k_proj has 2 heads of size 8, which tp = 4 does not divide; make "
        "mesh.tp one of "
        "1, 2, or the number of heads a multiple of 4",
        "mesh.tp: model.layers.*.self_attn.v_proj has 2 heads of size 8, which tp = 4 does not divide; make "
        "mesh.tp one of "
        "1, 2, or the number of heads a multiple of 4",
        "fsdp.groups[0]: 'model.layer.*' matches no module; did you mean 'model.layers.*' or 'model.layers' or "
        "'model.layers.*.mlp'?",
        "fsdp.groups[1]: 'model.layers' matches model.layers, a ModuleList, which is never called; group its members: "
        "'model.layers.*'",
        "data.sequence_length: 128 tokens per sample, but the model's max_position_embeddings is 64; make it at "
        "most 64, or "
        "raise max_position_embeddings in [model.overrides]",
    ]


@pytest.mark.parametrize(("key", "value"), [("packing", True), ("weights", [1.0, 2.0])])
def test_samples_without_an_order_of_files_can_not_keep_it(key, value):
    (found,) = [each for each in lint({"data": {"shuffle": False, key: value}}) if each.key == "data.shuffle"]
    assert found.message == f"got false, but with data.{key} samples do not follow the order of files"
    assert found.fix == f"leave it out, or leave data.{key} out"


def test_styles_that_do_not_fit_the_model():
    tables = plan_of(
        overrides={"tie_word_embeddings": True},
        mesh={"tp": 2},
        styles={
            "model.layers.*.self_attn.q_pro": "colwise",
            "model.layers.*.self_attn.k_proj": "colwis",
            "lm_head": "colwise_gather_output",
            "model.norm": "colwise",
            "model.layers.*.mlp.*_proj": "rowwise",
            "model.layers.0.mlp.up_proj": "colwise",
            "model.embed_tokens.weight": "embedding_rowwise",
        },
    )
    assert texts(tables) == [
        "styles.\"model.layers.*.self_attn.q_pro\": 'model.layers.*.self_attn.q_pro' matches no module; did you mean "
        "'model.layers.*.self_attn.q_proj' or 'model.layers.*.self_attn.v_proj' or 'model.layers.*.self_attn.o_proj'?",
        "styles.\"model.layers.*.self_attn.k_proj\": there is no style 'colwis'; did you mean 'colwise' or "
        "'colwise_rep' or "
        "'rowwise'?",
        "styles.\"model.norm\": 'colwise' on model.norm, which is a Qwen3RMSNorm; it is for a Linear",
        "styles.\"model.embed_tokens.weight\": 'model.embed_tokens.weight' matches a parameter, but "
        "'embedding_rowwise' is for a module; leave the last part off, or take a style for parameters: colwise, "
        "rowwise, replicate, packed_colwise, packed_rowwise, grouped_gemm",
        "styles.\"model.layers.0.mlp.up_proj\": 2 styles on model.layers.0.mlp.up_proj: 'model.layers.*.mlp.*_proj' = "
        "'rowwise' and 'model.layers.0.mlp.up_proj' = 'colwise'; make the patterns exclude each other, or remove one",
        'styles."model.embed_tokens": model.embed_tokens.weight and lm_head.weight are one tensor with '
        "'replicate' and "
        "'colwise_gather_output'; give them styles that shard the same dim, such as 'embedding_rowwise' and "
        "'colwise_gather_output'",
    ]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({}, "model: [model] has neither 'config' nor 'path' nor 'function'; give one: config = \"Qwen3Config\", path"),
        (
            {"config": "Qwen3Confg"},
            "model.config: transformers has no configuration class 'Qwen3Confg'; did you mean 'Qwen3Config'",
        ),
        (
            {"config": "LlamaConfig", "overrides": {"hidden_size": 30}},
            "The hidden size (30) is not a multiple of the number of attention heads (32).; correct [model.overrides]",
        ),
        ({"function": "torch.nn"}, "model.function: got 'torch.nn', expected a module and a function; write it as"),
        ({"function": "torch.nn:Linearr"}, "module 'torch.nn' has no 'Linearr'; did you mean 'Linear'"),
        (
            {"function": "no_such_module:model"},
            "can't import 'no_such_module': No module named 'no_such_module'; check",
        ),
        (
            {"function": "torch.nn:Linear", "overrides": {"in_feature": 3}},
            "building torch.nn:Linear failed: TypeError: Linear.__init__() got an unexpected keyword argument "
            "'in_feature'",
        ),
    ],
)
def test_a_model_that_can_not_be_built(model, expected):
    (text,) = texts({"model": model})
    assert expected in text


def test_what_a_function_returns_is_looked_at(tmp_path, monkeypatch):
    (tmp_path / "returned_models.py").write_text(
        "class Cell:\n    __module__ = 'mindspore.nn.cell'\n"
        "class Net(Cell):\n    pass\n"
        "def cell():\n    return Net()\n"
        "def nothing():\n    pass\n"
        "def something():\n    from torch import nn\n    return nn.ReLU()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert texts({"model": {"function": "returned_models:cell"}}) == [
        "run.platform: returned_models:cell returned a Net, a model of mindspore, but this process runs torch; write "
        'platform = "mindspore" in [run]'
    ]
    # Its command then runs on that framework; a process of one's own is told how to.
    written = lint({"model": {"function": "returned_models:cell"}, "run": {"platform": "mindspore"}})
    assert [each.fix for each in written] == ["set HYPER_PARALLEL_PLATFORM=mindspore before anything is imported"]
    assert texts({"model": {"function": "returned_models:nothing"}}) == [
        "model.function: returned_models:nothing returned a NoneType, expected a model of torch (nn.Module); return "
        "the model from the function"
    ]
    assert texts({"model": {"function": "returned_models:something"}}) == []


def test_no_code_of_a_plan_is_run_unless_asked_for(tmp_path, monkeypatch):
    (tmp_path / "dangerous_code.py").write_text("raise SystemExit('the code ran')\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("raise SystemExit('the code ran')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("dangerous_code:model", "package.module:model", "no_such_module:model"):
        tables = {"model": {"function": name, "folder": str(tmp_path)}, "schedule": {"warmup_steps": 101}}
        with pytest.warns(UserWarning, match=r"function is code and was not run.*run_model_code=True"):
            assert [diagnostic.key for diagnostic in lint(tables)] == ["schedule.warmup_steps"]
    with pytest.raises(SystemExit, match="the code ran"):
        lint(tables | {"model": {"function": "dangerous_code:model"}}, run_model_code=True)
    assert not {"dangerous_code", "package"} & {*sys.modules}
    (diagnostic,) = lint({"model": {"function": "dangerous_code:model", "folder": "nowhere"}})
    assert diagnostic.key == "model.folder"


def test_a_class_that_is_no_causal_language_model():
    assert texts({"model": {"config": "CLIPConfig"}}) == [
        "model.config: transformers builds no causal language model from CLIPConfig; write task in [model]: one of "
        "'base', 'image-classification', 'zero-shot-image-classification', or a model class's name"
    ]


@pytest.mark.parametrize(
    ("section", "value", "expected"),
    [
        ("optimizer", {"lr": float("inf")}, "optimizer.lr: got inf (float), expected a finite number"),
        ("optimizer", {"eps": float("nan")}, "optimizer.eps: got nan (float), expected a number more than 0.0"),
        ("optimizer", {"weight_decay": float("inf")}, "optimizer.weight_decay: got inf (float), expected a finite"),
        (
            "optimizer",
            {"betas": [float("nan"), 2]},
            "optimizer.betas: got [nan, 2] (list), expected a list of 2 numbers, each at least 0.0 and less than 1.0",
        ),
        ("optimizer", {"betas": [0.9, 1.0]}, "each at least 0.0 and less than 1.0"),
        ("optimizer", {"muon_momentum": 1.0}, "expected a number of at least 0.0 and less than 1.0"),
        ("optimizer", {"name": "moun"}, "'muon'"),
        ("schedule", {"final": float("inf")}, "schedule.final: got inf (float), expected a finite number"),
        ("run", {"grad_clip": float("nan")}, "run.grad_clip: got nan (float), expected a number more than 0.0"),
    ],
)
def test_numbers_that_no_training_can_use(section, value, expected):
    (text,) = texts(plan_of(**{section: value}))
    assert expected in text


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (
            {"muon": ["model.layers.*.mlp.*.weight"]},
            "which name = 'adamw' does not use; leave it out, or make optimizer.name",
        ),
        ({"name": "muon", "muon": ["model.layer.*"]}, "optimizer.muon[0]: 'model.layer.*' matches no parameter"),
        ({"name": "muon", "muon": ["model.norm.weight"]}, "matches model.norm.weight of shape ("),
    ],
)
def test_patterns_of_parameters_that_an_optimizer_cannot_have(optimizer, expected):
    (text,) = texts(plan_of(optimizer=optimizer))
    assert expected in text


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"optimizer": {"name": "sgd", "swap_slices": 4}}, "optimizer.swap_slices: the states of sgd can't be on the"),
        ({"optimizer": {"swap_slices": -1}}, "optimizer.swap_slices: got -1 (int), expected a number of at least 0"),
        ({"optimizer": {"swap_slice": 4}}, "[optimizer] has no key 'swap_slice'; did you mean 'swap_slices'?"),
        ({"optimizer": {"name": "adamw8"}}, "did you mean 'adamw' or 'adamw8bit'?"),
    ],
)
def test_states_that_an_optimizer_cannot_have(sections, expected):
    (text,) = texts(plan_of(**sections))
    assert expected in text


def test_a_module_whose_own_import_fails(tmp_path, monkeypatch):
    (tmp_path / "needs_missing.py").write_text("import no_such_framework.nn\n")
    (tmp_path / "needs_names.py").write_text("from torch import no_such_name\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert texts({"model": {"function": "needs_missing:model"}}) == [
        "model.function: 'needs_missing' was found, but one of its own imports failed: No module named "
        "'no_such_framework'; install no_such_framework, or take an environment that has what it imports"
    ]
    (text,) = texts({"model": {"function": "needs_names:model"}})
    assert "one of its own imports failed: cannot import name 'no_such_name' from 'torch'" in text
    assert text.endswith("; correct its imports, or take an environment that has what it imports")
    (tmp_path / "no_such_framework").mkdir()
    (tmp_path / "no_such_framework" / "nn.py").touch()
    for name, wrong in (("needs_missing", "import no_such_framework.nn"), ("needs_names", "from torch import nn")):
        (tmp_path / f"{name}.py").write_text(f"{wrong}\nfrom torch.nn import ReLU as model\n")
        importlib.invalidate_caches()
        assert texts({"model": {"function": f"{name}:model"}}) == []
    (text,) = texts({"model": {"function": "torch.no_such_module:model"}})
    assert text.endswith("; check the name, and that the module's folder is on PYTHONPATH or is [model] folder")


def test_a_function_is_found_in_the_folder_that_the_plan_names(tmp_path, monkeypatch):
    (tmp_path / "foldered_model.py").write_text("import torch\ndef model():\n    return torch.nn.Linear(2, 2)\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert "can't import 'foldered_model'" in texts({"model": {"function": "foldered_model:model"}})[0]
    monkeypatch.chdir(tmp_path.parent)
    assert texts({"model": {"function": "foldered_model:model", "folder": tmp_path.name}}) == []
    assert texts({"model": {"function": "foldered_model:model", "folder": "nowhere"}}) == [
        "model.folder: the folder nowhere does not exist; give the folder of the function's module, or leave it out"
    ]


def test_sharding_options_on_a_mesh_that_shards_nothing_are_named():
    fsdp = {"groups": ["model.layers.*"], "param_dtype": "bfloat16"}
    assert texts(plan_of(mesh={"tp": 2}, fsdp=fsdp)) == [
        "fsdp: groups, param_dtype would have no effect: the mesh tp 2 shards over no dp_shard or cp axis; leave "
        "[fsdp] out, or make mesh.dp_shard at least 2 (run.dtype is the dtype of the weights without it)"
    ]
    for mesh in ({}, {"dp_shard": 2}, {"dp_replicate": 2}, {"dp_replicate": 2, "tp": 2}):
        assert texts(plan_of(mesh=mesh, fsdp=fsdp)) == [], "an axis dp_shard is there, if of one rank"
    assert texts(plan_of(mesh={"tp": 2}, fsdp={"reshard_after_forward": True})) == [], "as without it"


@pytest.mark.parametrize(
    ("variables", "knob"),
    [(("RANK", "WORLD_SIZE"), "torchrun --standalone --nproc-per-node 2"), ((), "--nproc 2")],
)
def test_the_launcher_in_use_is_told_how_many_ranks(monkeypatch, variables, knob):
    for variable in variables:
        monkeypatch.setenv(variable, "3")
    (text,) = texts(plan_of(mesh={"tp": 2}), 3)
    assert text.endswith(f"; start 2 ranks ({knob}) or change the sizes in [mesh]")


@pytest.mark.parametrize(
    ("mesh", "problem"),
    [
        ({"ep": 4}, "ep = 4 does not fit the 1 ranks that share a copy of the model, dp_shard 1; raise mesh.dp_shard:"),
        ({"dp_replicate": 2, "ep": 2}, "a copy of the model, dp_shard 1; raise mesh.dp_shard"),
        (
            {"dp_shard": 3, "tp": 2, "ep": 4},
            "the 6 ranks that share a copy of the model, dp_shard 3 x tp 2; make it one of 2, 3, 6, or raise",
        ),
        (
            {"pp": 2, "tp": 4, "ep": 2},
            "tp 4: it is a multiple of tp = 4, whose ranks have the same tokens, or divides the others; make it one",
        ),
    ],
)
def test_experts_are_spread_over_ranks_that_share_a_copy(mesh, problem):
    assert any(text.startswith("mesh.ep: ") and problem in text for text in texts(plan_of(mesh=mesh)))


def test_a_model_without_a_table_needs_styles():
    tables = {
        "model": {"function": "torch.nn:Linear", "overrides": {"in_features": 4, "out_features": 4}},
        "mesh": {"tp": 2},
    }
    assert texts(tables) == [
        "styles: there is no tensor parallel table for Linear (model_type None), and none can be "
        "derived from its structure; write [styles] with one pattern = style per line, or give the model such a table "
        "as `tp_plan`"
    ]


class Declared(nn.Module):
    """A model of one's own that says how it can be spread."""

    def __init__(self, table) -> None:
        super().__init__()
        self.tp_plan = table
        self.tokens, self.last = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.last

    def forward(self, input_ids, labels=None):
        hidden = self.tokens(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return {"logits": self.last(hidden)}


def test_a_model_declares_its_styles_and_ends():
    plan = ParallelPlan.from_dict({"model": {"function": "m:f"}, "mesh": {"tp": 2}})
    report = examine(plan, [], model=Declared({"blocks.*": "colwise"}))
    assert report.diagnostics == ()
    assert style_notes(plan, report.model) == [
        "styles = 'auto' come from the model and structure: "
        "blocks.* = colwise, tokens = embedding_rowwise, last = colwise_gather_output"
    ]


@pytest.mark.parametrize(
    "table, problem",
    [
        ({"block.*": "colwise"}, "Declared.tp_plan: 'block.*' matches no module; did you mean 'blocks.*'"),
        ({"blocks.*": "columns"}, "there is no style 'columns'"),
        (["blocks.*"], "Declared.tp_plan is not a table of pattern = style, but ['blocks.*']"),
        ({"blocks.*": 1}, "Declared.tp_plan is not a table of pattern = style, but {'blocks.*': 1}"),
    ],
)
def test_a_wrong_declaration_is_refused(table, problem):
    plan = ParallelPlan.from_dict({"model": {"function": "m:f"}, "mesh": {"tp": 2}})
    (diagnostic,) = lint(plan, model=Declared(table))
    assert problem in str(diagnostic)


@pytest.mark.parametrize("config", ["Gemma2Config", "StableLmConfig", "MixtralConfig"])
def test_sequence_parallel_is_for_every_family_with_a_table(config):
    assert texts(plan_of(config, styles="auto-sequence", mesh={"tp": 2})) == []


def test_settings_that_a_model_asks_for_by_name_are_known():
    known = {"head_dim": 8, "experts_implementation": "eager"}
    assert texts(plan_of("MixtralConfig", known)) == []
    assert texts(plan_of("MistralConfig", {"head_dm": 8})) == [
        "model.overrides.head_dm: MistralConfig has no setting 'head_dm'; did you mean 'head_dim'?"
    ]
    part = {"config": "Qwen3VLConfig", "task": "image-text-to-text", "overrides": {"vision_config": {"num_head": 8}}}
    assert texts({"model": part})[0].startswith("model.overrides.vision_config.num_head:")


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("seq2seq-lmm", "model.task: transformers has no task 'seq2seq-lmm'; did you mean 'seq2seq-lm'?"),
        (
            "masked-lm",
            "model.task: transformers builds no masked-lm model from T5Config; write task in [model]: one of",
        ),
        ("T5Model2", "model.task: transformers has no model class 'T5Model2'; did you mean 'T5Model'"),
    ],
)
def test_a_task_that_a_configuration_has_not(task, expected):
    (text,) = texts({"model": {"config": "T5Config", "task": task}})
    assert text.startswith(expected)


def test_a_file_with_every_kind_of_fault_is_read_to_its_end(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text('[model]\nconfig = "Qwen3Config"\n[mesh]\ntp = 3\n[run]\nstep = 3\n')
    assert [diagnostic.key for diagnostic in lint(path, 2)] == ["run.step", "mesh"] + ["mesh.tp"] * 3
    path.write_text("[mesh\n")
    assert lint(path)[0].message.startswith("is not TOML")


def test_transformers_is_asked_for_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"needs transformers: pip install 'hp-plan\[torch\]'"):
        lint(plan_of())


def test_a_finding_reads_as_a_line():
    assert str(Diagnostic("run.steps", "got 0", "write 1")) == "run.steps: got 0; write 1"


def test_the_callers_random_numbers_go_on():
    """A rank that lints alone must not draw other numbers than the rest afterwards."""
    import random

    import numpy as np
    import torch

    from hp_plan import build_model
    from hp_platform import get_platform

    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    plan = ParallelPlan.from_dict(plan_of(run={"seed": 5}))
    assert not lint(plan, run_model_code=True)
    model, same = build_model(plan), build_model(plan)
    assert torch.equal(model.lm_head.weight, same.lm_head.weight), "drawn from the plan's seed all the same"
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1] and random.getstate() == before[2]
    assert get_platform().random.seeded() is None


_TAKEN = (
    ["ParallelPlan"],
    ["ParallelPlan", "ModelOutline"],
    ["ParallelPlan", "Mapping[str, str]", "ModelOutline"],
)


def test_no_check_of_a_plan_is_forgotten():
    """A check that is in no list is made by nobody; those left out are called by one that is in it."""
    called = {"check_model", "check_platform", "check_expert_axis", "check_tied_groups"}
    found = set()
    for folder in ("features", "checks", "structure"):
        package = importlib.import_module(f"hp_plan.{folder}")
        for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            for name, each in inspect.getmembers(importlib.import_module(info.name), inspect.isfunction):
                taken = tuple(inspect.signature(each).parameters.values())
                if name.startswith("check_") and [str(item.annotation) for item in taken] in _TAKEN:
                    found.add(name)
    assert {check.function.__name__ for check in CHECKS} >= found - called
    assert len({check.function for check in CHECKS}) == len(CHECKS)
