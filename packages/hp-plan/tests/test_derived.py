"""Tables that are read off a model's structure, and what stays whole."""

from __future__ import annotations

import pytest
from families import FAMILIES
from family_cells import CELLS, plan_of

from hp_plan import ParallelPlan, PlanError, build_model, lint
from hp_plan.structure.outline import ModelOutline, ModuleOutline
from hp_plan.structure.style_tables import choose_styles, derived_table, style_notes
from hp_plan.torch.models import outline

pytestmark = pytest.mark.framework("torch")  # transformers' models are PyTorch's

DERIVED = """stablelm gpt2 opt bloom falcon gptj gpt_oss lfm2 mamba2 bamba bert roberta t5 bart whisper vit clip llava
    qwen2_vl qwen3_vl""".split()


def chosen(name, cell="tp 2"):
    plan = plan_of(FAMILIES[name], CELLS[cell])
    return choose_styles(plan, outline(build_model(plan, device="meta")))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "gpt2",
            {
                "transformer.h.*.attn.c_attn": "colwise_gather_output",
                "transformer.h.*.attn.c_proj": "rowwise_split_input",
                "transformer.h.*.mlp.c_fc": "colwise",
                "transformer.h.*.mlp.c_proj": "rowwise",
                "transformer.wte": "embedding_rowwise",
                "lm_head": "colwise_gather_output",
            },
        ),
        (
            "bloom",
            {
                "transformer.h.*.self_attention.query_key_value": "colwise",
                "transformer.h.*.self_attention.dense": "rowwise",
                "transformer.h.*.mlp.dense_h_to_4h": "colwise",
                "transformer.h.*.mlp.dense_4h_to_h": "rowwise",
                "transformer.h.*.mlp.gelu_impl": "pointwise",
                "transformer.word_embeddings": "embedding_rowwise",
                "lm_head": "colwise_gather_output",
            },
        ),
        (
            "falcon",  # One head of keys and values, in one matrix with the queries.
            {
                "transformer.h.*.self_attention.query_key_value": "colwise_gather_output",
                "transformer.h.*.self_attention.dense": "rowwise_split_input",
                "transformer.h.*.mlp.dense_h_to_4h": "colwise",
                "transformer.h.*.mlp.dense_4h_to_h": "rowwise",
                "transformer.word_embeddings": "embedding_rowwise",
                "lm_head": "colwise_gather_output",
            },
        ),
        (
            "mamba2",
            {
                "backbone.embeddings": "embedding_rowwise",
                "lm_head": "colwise_gather_output",
                "backbone.layers.*": "plain",
            },
        ),
    ],
)
def test_a_table_is_read_off_the_structure(name, expected):
    choice = chosen(name)
    assert (dict(choice.table), choice.origin) == (expected, "structure")


@pytest.mark.parametrize("name", DERIVED)
def test_every_attention_and_mlp_of_these_families_is_found(name):
    """Outside of plain parts, no linear layer of a block is left whole."""
    choice = chosen(name)
    regions = tuple(pattern for pattern, style in choice.table.items() if style == "plain")
    left = [one for one in choice.whole if not one.startswith(regions)]
    known = ("embed", "position", "relative_attention_bias", "wpe", "projection", "projector", "merger", "classifier")
    known += ("transform.dense", "lm_head.dense", "mamba", "conv.in_proj", "conv.out_proj")
    assert [one for one in left if not any(word in one for word in known)] == []


def test_a_part_of_the_model_brings_its_table():
    choice = chosen("llava")
    assert choice.origin == "model and structure"
    assert choice.table["model.language_model.layers.*.mlp.down_proj"] == "rowwise"
    assert choice.table["model.vision_tower.encoder.layers.*.mlp.fc2"] == "rowwise"


def test_experts_are_sharded_as_they_lie():
    gpt_oss, mixtral = chosen("gpt_oss").table, chosen("mixtral").table
    assert gpt_oss["model.layers.*.mlp.experts.gate_up_proj"] == "rowwise", "transposed, gate and up alternate"
    assert gpt_oss["model.layers.*.mlp.experts.down_proj"] == "colwise"
    assert mixtral["model.layers.*.mlp.experts.gate_up_proj"] == "packed_colwise"
    assert mixtral["model.layers.*.mlp.experts"] == gpt_oss["model.layers.*.mlp.experts"] == "moe_tp_experts"


def test_a_table_that_forgets_that_gate_and_up_are_one_matrix():
    """As that of Inkling: a rank's half of the features would be all of the gate."""
    packed = chosen("mixtral").table
    name = "model.layers.*.mlp.experts.gate_up_proj"
    plan = plan_of(FAMILIES["mixtral"], CELLS["tp 2"])
    model = build_model(plan, device="meta")
    model.config.base_model_tp_plan = {
        pattern.removeprefix("model."): "colwise" if pattern == name else style for pattern, style in packed.items()
    }
    assert choose_styles(plan, outline(model)).table[name] == "packed_colwise"
    written = ParallelPlan.from_dict({**plan.to_dict(), "styles": {**packed, name: "colwise"}})
    said = [str(each) for each in lint(written)]
    assert said == [
        f"styles.\"{name}\": 'colwise' on a matrix that holds a gate's features and then those of up; write"
        " 'packed_colwise', which shards each of the two"
    ]
    assert not lint(ParallelPlan.from_dict({**plan.to_dict(), "styles": dict(packed)}))


def linear(into, out):
    return ModuleOutline("Linear", "linear", out, None, into)


def attention(heads, *, head_dim: int | None = 4, output=16, keys=16):
    owner = ModuleOutline("Attention", head_dim=head_dim)
    names = {"q_proj": linear(16, heads * 4), "k_proj": linear(16, keys), "v_proj": linear(16, keys)}
    inside = {f"a.{name}": module for name, module in {**names, "o_proj": linear(output, 16)}.items()}
    return ModelOutline({"": ModuleOutline("Model"), "a": owner, **inside})


def test_heads_decide_how_attention_is_cut():
    apart = {"a.q_proj": "colwise", "a.k_proj": "colwise", "a.v_proj": "colwise", "a.o_proj": "rowwise"}
    assert derived_table(attention(4), 2) == apart
    few = {name: style for name, style in apart.items() if name not in ("a.k_proj", "a.v_proj")}
    assert derived_table(attention(4, keys=4), 2) == few, "one head of keys and values stays whole"
    gathered = dict.fromkeys(("a.q_proj", "a.k_proj", "a.v_proj"), "colwise_gather_output")
    assert derived_table(attention(4), 3) == {**gathered, "a.o_proj": "rowwise_split_input"}
    assert derived_table(attention(4, head_dim=None), 2) == {}
    assert derived_table(attention(4, output=12), 2) == {}, "the output reads something else"


def test_what_has_a_style_is_left_alone():
    assert "a.q_proj" not in derived_table(attention(4), 2, styled=["a.q_proj"])


def test_an_mlp_whose_shapes_disagree_stays_whole():
    inside = {"m.fc1": linear(8, 32), "m.fc2": linear(16, 8)}
    assert derived_table(ModelOutline({"": ModuleOutline("Model"), "m": ModuleOutline("Mlp"), **inside}), 2) == {}


def test_a_pattern_stands_for_layers_that_are_alike_only():
    modules = {"": ModuleOutline("Model"), "l": ModuleOutline("ModuleList", "container")}
    for layer, inner in ((0, 16), (1, 12)):
        modules |= {f"l.{layer}": ModuleOutline("Mlp"), f"l.{layer}.fc1": linear(8, 16)}
        modules[f"l.{layer}.fc2"] = linear(inner, 8)
    assert derived_table(ModelOutline(modules), 2) == {"l.0.fc1": "colwise", "l.0.fc2": "rowwise"}


def test_lint_says_what_was_chosen():
    plan = plan_of(FAMILIES["gpt2"], CELLS["tp 2"])
    first, second = style_notes(plan, outline(build_model(plan, device="meta")))
    assert first.startswith("styles = 'auto' come from the structure: transformer.h.*.")
    assert "transformer.h.*.attn.c_attn = colwise_gather_output" in first
    assert second == "replicated on all 2 tensor parallel ranks: transformer.wpe"


def test_a_model_of_which_nothing_is_known_is_refused():
    plan = plan_of(FAMILIES["gpt2"], CELLS["tp 2"])
    model = ModelOutline({"": ModuleOutline("Net"), "body": linear(4, 4)})
    with pytest.raises(
        PlanError, match="no tensor parallel table for Net .*, and none can be derived from its structure; write"
    ):
        choose_styles(plan, model)
    assert style_notes(plan, model) == []
