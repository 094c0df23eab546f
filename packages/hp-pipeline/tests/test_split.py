"""Splits as values: what each stage has, what it costs, and what is refused."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pipeline_transformers import batch, build
from torch import nn

from hp_dtensor import init_device_mesh
from hp_fsdp import fully_shard
from hp_pipeline import Pipeline, PipelineStage, ScheduleGPipe, placed, schedules, simulate, split_model
from hp_pipeline.extend import SplitError
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")  # transformers' models are PyTorch's


def on_meta(family, head="ForCausalLM", **options):
    with torch.device("meta"):
        return build(family, head, **options)


def test_stages_have_the_models_own_parameters_and_no_others():
    model = build("Gemma2")
    before = {name: (id(module), dict(vars(module))) for name, module in model.named_modules()}
    split = split_model(model, 3, split=[1, 2, 1])
    named = dict(model.named_parameters(remove_duplicate=False))
    seen = set()
    for index in range(3):
        stage = split.stage(index)
        assert stage is split.stage(index)
        assert set(stage.state_dict()) == {name for name, _ in stage.named_parameters(remove_duplicate=False)}
        for name, parameter in stage.named_parameters():
            assert parameter is named[name]
            seen.add(name)
        summary = split.stages[index]
        owners = (*summary.blocks, *summary.modules)
        assert all(name.startswith(owners) for name in stage.state_dict())
        assert summary.parameters == sum(each.numel() * each.element_size() for each in stage.parameters())
    assert seen == set(named)
    assert [stage.blocks for stage in split.stages][1] == ("model.layers.1", "model.layers.2")
    assert split.stages[0].modules == ("model.embed_tokens",)
    (info,) = split.shared
    assert (info.parameter, info.shared_stage) == ("model.embed_tokens.weight", (0, 2))
    assert [[each.parameter for each in split.shared_in(index)] for index in range(3)] == [
        ["model.embed_tokens.weight"],
        [],
        ["lm_head.weight"],
    ]
    assert {name: (id(module), dict(vars(module))) for name, module in model.named_modules()} == before


def test_a_model_on_meta_is_split_without_memory():
    model = on_meta("Llama", hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, vocab_size=128256)
    split = split_model(model, 4)
    assert all(each.is_meta for index in range(4) for each in split.stage(index).parameters())
    # The head costs as much as some blocks, so the last stage has fewer.
    counts = [len(stage.blocks) for stage in split.stages]
    assert counts == [20, 20, 21, 19]
    times = [stage.forward for stage in split.stages]
    assert max(times) - min(times) <= times[0] / counts[0]  # a block


def test_counted_operations_are_those_of_the_shapes():
    split = split_model(
        on_meta("Llama"), 2, example={"input_ids": torch.zeros(3, 10, dtype=torch.int64, device="meta")}
    )
    block = 4 * 16 * 16 + 3 * 16 * 24  # q, k and v, o, the three of the MLP
    attention = 4 * 30 * 5 * 16
    assert split.stages[0].forward == 2 * (2 * 30 * block + attention)
    assert split.stages[1].weight == 2 * 30 * (2 * block + 16 * 37)
    assert split.stages[0].input == 2 * (2 * 30 * block + 2 * attention)
    experts = split_model(on_meta("Mixtral"), 4).stages[1]
    assert experts.weight == 2 * 128 * (block - 3 * 16 * 24 + 2 * 3 * 16 * 24 + 4 * 16)  # two experts of four, a router


def test_costs_are_those_of_a_pipeline():
    split = split_model(on_meta("Llama"), 4, costs=[0.0, 1.0, 2.0, 1.0, 1.0, 0.5])
    cost = split.cost()
    assert cost.forward == (1.0, 2.0, 1.0, 1.5)
    pipeline = Pipeline(placed("line", 4), micro_batches=8, cost=cost)
    assert simulate(schedules.one_f_one_b(pipeline), pipeline).makespan > 8 * 3 * 2
    assert split_model(on_meta("Llama"), 2, costs=[0.0, 5.0, 1.0, 1.0, 1.0, 1.0]).stages[0].blocks == (
        "model.layers.0",
    )
    counted = split_model(on_meta("Llama"), 2)
    assert counted.cost(1e6).forward[0] == counted.stages[0].forward / 1e6


def test_splits_by_hand():
    model = on_meta("Llama")

    def counts(**options):
        return [len(stage.blocks) for stage in split_model(model, **options).stages]

    assert counts(stages=3, split="even") == [2, 1, 1]
    assert counts(stages=2, split=[3, 1]) == [3, 1]
    assert counts(stages=3, split=["model.layers.1", "model.layers.2"]) == [1, 1, 2]
    assert counts(stages=1) == [4]
    sizes = [stage.parameters for stage in split_model(model, 4).stages]
    assert counts(stages=2, memory=sizes[0] + 2 * sizes[1]) == [2, 2]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stages": 5}, r"5 stages cannot be cut out of 4 blocks \(model.layers.0 to model.layers.3\).*from 1 to 4"),
        ({"stages": 0}, "0 stages cannot be cut out of 4 blocks"),
        ({"stages": 2, "split": [3, 2]}, r"split=\[3, 2\] must list 2 numbers of blocks.* sum to 4"),
        ({"stages": 2, "split": ["model.layers.9"]}, r"split names \['model.layers.9'\], and the blocks are"),
        ({"stages": 2, "split": ["model.layers.1", "model.layers.2"]}, "must name the first block of each of the 2"),
        ({"stages": 2, "split": "odd"}, "split is 'auto', 'even', the number of blocks.*got 'odd'"),
        ({"stages": 2, "costs": [1.0] * 4}, "costs has 4 entries, and the model 6 units.* 4 blocks"),
        ({"stages": 2, "costs": [1.0] * 5 + [-1.0]}, "costs must not be negative, got -1.0"),
        ({"stages": 2, "memory": 10}, "no cut of 4 blocks into 2 stages keeps each stage within 10 bytes"),
        ({"stages": 2, "memory": 10, "split": "even"}, "memory=10 limits split='auto' alone, got split='even'"),
        ({"stages": 2, "blocks": "model.blocks"}, r"no list of blocks 'model.blocks'; .* \['model.layers'\]"),
    ],
)
def test_numbers_that_do_not_fit(options, text):
    with pytest.raises(ValueError, match=text):
        split_model(on_meta("Llama"), **options)
    if options in ({"stages": 2, "memory": 10}, {"stages": 2, "memory": 10, "split": "even"}):
        assert len(split_model(on_meta("Llama"), 2, memory=10**6).stages) == 2
    if "blocks" in options:
        assert len(split_model(on_meta("Llama"), 2, blocks="model.layers").stages) == 2


class Skipping(nn.Module):
    """Blocks in a list, run in ways that cannot be cut."""

    def __init__(self, way):
        super().__init__()
        self.way, self.embed, self.head = way, nn.Embedding(9, 4), nn.Linear(4, 9)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, input_ids):
        first = x = self.embed(input_ids)
        cache, rest = {}, None
        for index, block in enumerate(self.blocks):
            if self.way == "returned":
                x, rest = block(x, chosen=rest)
                rest = None if rest is None else rest.argmax()
                continue
            if self.way == "chosen":
                x, rest = block(x, chosen=rest), x.argmax()
                continue
            if self.way == "filled":
                x = block(x, cache=cache)
                continue
            if self.way == "between":
                x = x + 1
            if self.way != "one left out" or index:
                x = block(x, first) if self.way == "beside" else block(x)
        return self.head(x + first if self.way == "around" else x)


@pytest.mark.parametrize(
    ("way", "text"),
    [
        ("between", "block 1 does not take just what block 0 returns"),
        ("beside", "block 0 takes positional input 1, which depends on parameters or on other blocks"),
        ("returned", "block 1 takes chosen, which other blocks return beside their hidden states"),
        ("chosen", "block 2 takes chosen, which depends on parameters or on other blocks"),
        ("filled", "block 0 takes cache, a dict that other blocks may fill"),
        ("around", "embed runs both before and after the blocks"),
        ("one left out", "the model calls 2 of its 3 blocks"),
    ],
)
def test_blocks_that_cannot_be_cut(way, text):
    with pytest.raises(ValueError, match=f"split_model: Skipping cannot be cut at blocks: {text}"):
        split_model(Skipping(way), 2)


def test_a_refused_split_tells_the_problem_from_the_advice():
    with pytest.raises(SplitError) as refused:
        split_model(Skipping("one left out"), 2)
    error, again = refused.value, pickle.loads(pickle.dumps(refused.value))
    assert error.problem == "Skipping cannot be cut at blocks: the model calls 2 of its 3 blocks."
    assert error.advice.startswith("If its forward needs other inputs than input_ids, pass example=")
    assert str(error) == str(again) == f"split_model: {error.problem} {error.advice}"


class Part(nn.Module):
    """A stage of `Skipping`, written by hand; the last returns a loss."""

    def __init__(self, whole, start, stop):
        super().__init__()
        self.way, self.start = whole.way, start
        self.blocks = whole.blocks[start:stop]
        self.embed = whole.embed if start == 0 else None
        self.head = whole.head if stop == len(whole.blocks) else None

    def forward(self, x, first=None):
        if self.embed is not None:
            first = x = self.embed(x)
        for index, block in enumerate(self.blocks, self.start):
            x = x + 1 if self.way == "between" else x
            x = block(x) if self.way != "one left out" or index else x
        if self.head is None:
            return x, first
        return self.head(x + first if self.way == "around" else x).square().mean()


def compare(loss, model, stages, inputs, **options):
    """Run stages on one rank, and compare losses and gradients with those of one process."""
    expected = [loss(part) for part in inputs.chunk(2)]
    sum(each / 2 for each in expected).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    parts = [PipelineStage(stage, index, len(stages), "cpu") for index, stage in enumerate(stages)]
    losses = ScheduleGPipe(parts, 2, placement=[0] * len(stages), **options).run(inputs)
    torch.testing.assert_close(losses, [each.detach() for each in expected])
    torch.testing.assert_close({name: parameter.grad for name, parameter in model.named_parameters()}, gradients)


@on_ranks(1)
@pytest.mark.parametrize("way", ["between", "around", "one left out"])
def test_blocks_that_cannot_be_cut_are_stages_written_by_hand(way):
    whole = Skipping(way)
    ids = torch.randint(9, (4, 5))
    compare(lambda part: whole(part).square().mean(), whole, [Part(whole, 0, 2), Part(whole, 2, 3)], ids)


class Translator(nn.Module):
    """An encoder, and a decoder whose blocks take what it returns."""

    config = SimpleNamespace(is_encoder_decoder=True)

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.encoder = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.decoder = nn.ModuleList(nn.Bilinear(4, 4, 4) for _ in range(2))

    def encode(self, source):
        return self.encoder[1](self.encoder[0](self.embed(source)).tanh())

    def forward(self, source):
        memory = hidden = self.encode(source)
        for block in self.decoder:
            hidden = block(hidden, memory)
        return hidden.square().mean()


class Encoding(nn.Module):
    def __init__(self, whole):
        super().__init__()
        self.embed, self.encoder = whole.embed, whole.encoder

    def forward(self, source):
        return Translator.encode(self, source)


class Decoding(nn.Module):
    def __init__(self, whole, place):
        super().__init__()
        self.block, self.place = whole.decoder[place], place

    def forward(self, memory, hidden=None):
        hidden = self.block(memory if hidden is None else hidden, memory)
        return hidden.square().mean() if self.place else hidden


@on_ranks(1)
def test_an_encoder_and_a_decoder_are_stages_that_are_joined_by_boundaries():
    whole = Translator()
    with pytest.raises(ValueError, match="Translator is an encoder and a decoder.* join them by boundaries="):
        split_model(whole, 3)
    stages = [Encoding(whole), Decoding(whole, 0), Decoding(whole, 1)]
    compare(whole, whole, stages, torch.randint(9, (4, 5)), boundaries=[(0, 1), (0, 2), (1, 2)])


@on_ranks(1)
def test_a_model_without_a_list_of_blocks_is_stages_written_by_hand():
    first, last = nn.Linear(3, 3), nn.Linear(3, 2)
    whole = nn.Sequential(first, last)
    with pytest.raises(ValueError, match="Sequential has no list of blocks, .*; write its stages by hand"):
        split_model(whole, 2)
    tail = nn.Sequential(last, nn.Softplus(), nn.Flatten(0), Mean())
    compare(lambda x: tail(first(x)), whole, [first, tail], torch.randn(4, 3))


class Mean(nn.Module):
    def forward(self, x):
        return x.mean()


class Placed(Skipping):
    """A model whose forward needs more than tokens."""

    def forward(self, input_ids, places):  # type: ignore[override]
        x = self.embed(input_ids) * places.unsqueeze(-1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_a_forward_that_needs_other_inputs_is_split_by_an_example():
    model, ids, places = Placed(""), torch.randint(9, (2, 5)), torch.randn(2, 5)
    text = "Placed cannot be cut at blocks: TypeError: .*'places'. If its forward needs other .* pass example="
    with pytest.raises(ValueError, match=text):
        split_model(model, 2)
    split = split_model(model, 2, example={"input_ids": ids, "places": places})
    hidden = split.stage(0)(ids, places=places)
    with pytest.raises(ValueError, match=r"inputs \[places\], this one with \[\]; pass all but input_ids .* to run"):
        split.stage(1)(*hidden)
    assert torch.equal(split.stage(1)(*hidden, places=places), model(ids, places))


def test_models_that_cannot_be_cut():
    with pytest.raises(ValueError, match="T5ForConditionalGeneration is an encoder and a decoder"):
        split_model(on_meta("T5", "ForConditionalGeneration", d_model=16, d_ff=8, d_kv=8, num_heads=2), 2)
    with pytest.raises(ValueError, match=r"Mixtral.*config.output_router_logits is set: the load balancing loss takes"):
        split_model(on_meta("Mixtral", output_router_logits=True), 2)
    split_model(on_meta("Mixtral", output_router_logits=False), 2)
    model, _ = with_images(("llama", "clip_vision_model", "Llava"))
    model.config.text_config.output_hidden_states = True
    with pytest.raises(ValueError, match=r"Llava.*\.config\.text_config\.output_hidden_states is set: those of other"):
        split_model(model, 2, blocks="model.language_model.layers")
    model.config.text_config.output_hidden_states = False
    split_model(model, 2, blocks="model.language_model.layers")
    model = on_meta("Llama")
    model.forward = lambda *args: None
    with pytest.raises(
        ValueError, match="the forward of this LlamaForCausalLM has been replaced; split the model first"
    ):
        split_model(model, 2)
    del model.forward
    stage = split_model(model, 2).stage(0)
    stage.register_forward_hook(lambda *_: None)
    whole, (ids, _), calls = build("Llama"), batch(2), []
    split = split_model(whole, 2)
    inner = split.stage(0).forward
    split.stage(0).forward = lambda *args, **kwargs: (calls.append("wrapped"), inner(*args, **kwargs))[1]
    assert torch.equal(run(split, ids).logits, whole(ids).logits) and calls == ["wrapped"]
    model.scale = nn.Parameter(torch.ones(1, device="meta"))
    with pytest.raises(ValueError, match=r"has \['scale'\] of its own, .* put them into a module"):
        split_model(model, 2)
    model.scale = None
    model.scales = nn.ParameterList([torch.ones(1, device="meta")])
    split_model(model, 2)
    with pytest.raises(ValueError, match=r"2 lists of modules, \['a.blocks', 'b.blocks'\]; pass .* blocks="):
        split_model(nn.ModuleDict({"a": Skipping(""), "b": Skipping("")}), 2)


def as_tuple(outputs):
    return outputs if type(outputs) is tuple else (outputs,)


def run(split, *args, **kwargs):
    outputs: Any = args
    for index in range(len(split.stages)):
        outputs = split.stage(index)(*as_tuple(outputs), **kwargs)
    return outputs


@pytest.mark.parametrize(
    ("family", "head"),
    [("Bert", "ForMaskedLM"), ("Qwen2", "ForTokenClassification"), ("OPT", "ForCausalLM"), ("Falcon", "ForCausalLM")],
)
def test_stages_after_each_other_return_what_the_model_does(family, head):
    model = build(
        family, head, **({"word_embed_proj_dim": 8, "do_layer_norm_before": False} if family == "OPT" else {})
    )
    model.eval()
    ids, _ = batch(2)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    assert torch.equal(
        run(split_model(model, 3), ids, attention_mask=mask).logits, model(ids, attention_mask=mask).logits
    )


@pytest.mark.parametrize("family", ["Gemma2", "GPT2"])
def test_stages_of_a_model_on_meta_are_initialised_and_loaded_by_themselves(family):
    whole, ids = build(family), batch(2)[0]
    split = split_model(on_meta(family), 3)
    for index in range(3):
        stage = split.stage(index)
        names = list(stage.state_dict())
        stage.to_empty(device="cpu")
        stage.init_weights()  # buffers that are in no state dict; it also ties weights, and must not bring one back
        assert list(stage.state_dict()) == names
        stage.load_state_dict({name: whole.state_dict()[name] for name in names})
    assert torch.equal(run(split, ids).logits, whole(ids).logits)


def test_a_stage_that_has_both_ends_keeps_its_tie():
    stage = split_model(on_meta("Gemma2"), 1).stage(0)
    stage.to_empty(device="cpu")
    stage.init_weights()
    assert stage.lm_head.weight is stage.model.embed_tokens.weight


@pytest.mark.parametrize("when", ["before", "after"])
def test_blocks_that_are_recomputed(when):
    def recompute(model):  # renamed in the course of transformers 5
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()

    whole, model = build("Llama").train(), build("Llama").train()
    if when == "before":
        recompute(model)
    split = split_model(model, 3)
    for index in range(3):
        if when == "after":
            recompute(split.stage(index))
        blocks = [split.stage(index).get_submodule(name) for name in split.stages[index].blocks]
        assert blocks and all(block.gradient_checkpointing for block in blocks)
    ids, labels = batch(2)
    run(split, ids, labels=labels).loss.backward()
    whole(ids, labels=labels).loss.backward()
    for (name, parameter), own in zip(whole.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter.grad, own.grad), name


def with_images(name):
    """Build a model of images and text; return it and its inputs."""
    import transformers

    text = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "head_dim": 8}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "model_type": name[0]}
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": 8, "patch_size": 4, "projection_dim": 16, "model_type": name[1]}
    options = {"vision_feature_layer": -1} if name[2] == "Llava" else {"mm_tokens_per_image": 4}
    config = getattr(transformers, f"{name[2]}Config")(
        text_config=text, vision_config=vision, image_token_index=63, image_token_id=63, **options
    )
    model = getattr(transformers, f"{name[2]}ForConditionalGeneration")(config).eval()
    ids = torch.randint(5, (2, 8), generator=torch.Generator().manual_seed(3))
    ids[:, 1:5] = 63
    inputs = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 8, 8)}
    return model, inputs if name[2] == "Llava" else {**inputs, "token_type_ids": (ids == 63).long()}


@pytest.mark.parametrize(
    "name", [("llama", "clip_vision_model", "Llava"), ("gemma3_text", "siglip_vision_model", "Gemma3")]
)
def test_images_enter_at_the_first_stage_and_masks_at_all(name):
    model, inputs = with_images(name)
    with pytest.raises(ValueError, match=r"has 2 lists of modules, \['model.vision_tower.*; pass that of the blocks"):
        split_model(model, 3)
    split = split_model(model, 3, blocks="model.language_model.layers")
    with pytest.raises(ValueError, match=r"Inputs that only the first stage uses are found by split_model\(..., exam"):
        split.stage(1)(*as_tuple(split.stage(0)(**inputs)))
    split = split_model(model, 3, blocks="model.language_model.layers", example=inputs)
    assert "model.vision_tower" in split.stages[0].modules
    hidden = split.stage(0)(**inputs)
    # Tokens of images see each other in Gemma: all stages make their masks of the types of tokens.
    later = {key: value for key, value in inputs.items() if key == "token_type_ids"}
    for index in (1, 2):
        hidden = split.stage(index)(*as_tuple(hidden), **later)
    assert torch.equal(hidden.logits, model(**inputs).logits)


def test_a_head_that_reads_tokens_asks_for_them_on_later_stages():
    model = build("Llama", "ForSequenceClassification", pad_token_id=3)
    split = split_model(model, 2)
    ids, _ = batch(3)
    ids[0, 4:] = ids[1, 3:] = 3
    hidden = split.stage(0)(ids)
    assert torch.equal(split.stage(1)(hidden, input_ids=ids).logits, model(ids).logits)
    with pytest.raises(ValueError, match=r"uses input_ids beyond its embedding.*run\(input_ids=...\) by keyword"):
        split.stage(1)(hidden)


def test_inputs_that_a_stage_cannot_serve():
    split = split_model(build("Llama"), 2)
    with pytest.raises(ValueError, match="in stages takes no output_hidden_states: those of other stages"):
        split.stage(0)(batch(2)[0], output_hidden_states=True)
    whole = build("Llama")(batch(2)[0]).logits
    assert torch.equal(run(split, batch(2)[0]).logits, whole)
    with pytest.raises(TypeError, match="takes what the stage before returns, hidden states; got int"):
        split.stage(1)(3)
    ids, _ = batch(2)
    text = (
        r"stage before was run with the keyword inputs \[attention_mask\], this one with \[\]; pass all but input_ids"
    )
    with pytest.raises(ValueError, match=text):
        split.stage(1)(*split.stage(0)(ids, torch.ones_like(ids)))
    with pytest.raises(ValueError, match=r"keyword inputs \[\], this one with \[attention_mask\]"):
        split.stage(1)(split.stage(0)(ids), attention_mask=torch.ones_like(ids))
    torch.testing.assert_close(run(split, ids, attention_mask=torch.ones_like(ids)).logits, whole)
    with pytest.raises(ValueError, match="index=2 is not one of 2 stages"):
        split.stage(2)


@on_ranks(1)
def test_a_sharded_model_is_split_first():
    mesh, ids = init_device_mesh(device_type(), (1,)), batch(2, device=device_type())[0]
    whole, model = (build("Llama").to(device_type()) for _ in range(2))
    fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError, match="of LlamaForCausalLM is a DTensor; split the model first, and shard its"):
        split_model(model, 2)
    split = split_model(build("Llama").to(device_type()), 2)
    for index in range(2):
        fully_shard(split.stage(index), mesh=mesh)
    assert torch.equal(run(split, ids).logits, whole(ids).logits)


def test_micro_batches_are_weighted_by_their_tokens():
    model = build("Llama").float()
    model.loss_function = None
    del model._loss_function
    split = split_model(model, 2)
    last = split.stage(1)
    ids, labels = batch(4, ignored=True)
    items = last.prepare_batch({"labels": labels}, 2)["num_items_in_batch"]
    assert items == labels[:, 1:].ne(-100).sum() / 2
    assert last.prepare_batch({"labels": labels, "shift_labels": None}, 2)["num_items_in_batch"] == items
    shifted = last.prepare_batch({"labels": labels, "shift_labels": labels[:, :4]}, 2)["num_items_in_batch"]
    assert shifted == labels[:, :4].ne(-100).sum() / 2
    assert last.prepare_batch({"labels": labels, "num_items_in_batch": 10}, 2)["num_items_in_batch"] == 5
    assert last.prepare_batch({"labels": labels}, 1) == {"labels": labels}
    hidden = split.stage(0)(ids)
    losses = [
        last(own, labels=part, num_items_in_batch=items).loss
        for own, part in zip(hidden.chunk(2), labels.chunk(2), strict=True)
    ]
    torch.testing.assert_close(torch.stack(losses).mean(), model(ids, labels=labels).loss, rtol=1e-5, atol=1e-6)
    inline = split_model(on_meta("Qwen2", "ForTokenClassification"), 2).stage(1)
    with pytest.raises(ValueError, match=r"averages its loss by itself, and the micro-batches have \[9, 5\] labels"):
        inline.prepare_batch({"labels": labels}, 2)
    assert inline.prepare_batch({"labels": ids}, 2) == {"labels": ids}
    model = build("Llama")
    model.loss_function = lambda logits, labels, vocab_size, num_items_in_batch=None, **more: logits.sum()
    custom = split_model(model, 2).stage(1)
    with pytest.raises(ValueError, match="Pass num_items_in_batch, or equal numbers of labels"):
        custom.prepare_batch({"labels": labels}, 2)
    assert custom.prepare_batch({"labels": labels, "num_items_in_batch": 10}, 2)["num_items_in_batch"] == 5
