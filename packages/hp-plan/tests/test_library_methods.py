"""What transformers' models do besides forward, under a plan: beams, and saved checkpoints."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers
from families import FAMILIES
from family_cells import Cell, plan_of
from torch.distributed import distributed_c10d

from hp_plan import apply, build_model
from hp_plan.torch.library import pretrained
from hp_platform import get_platform
from hp_testing import on_ranks

pytestmark = pytest.mark.framework("torch")


@on_ranks(2)
@pytest.mark.parametrize(("name", "beams"), [("gpt2", 3), ("t5", 2)])
def test_generated_and_saved_as_in_one_process(name, beams, tmp_path):
    plan = plan_of(FAMILIES[name], Cell({"tp": 2}))
    one = build_model(plan).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in one.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    state = {name: value.clone() for name, value in one.state_dict().items()}
    prompt = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    options = {"max_new_tokens": 5, "do_sample": False, "num_beams": beams, "pad_token_id": 0}
    expected = one.generate(prompt, **options)
    model = build_model(plan).eval()
    model.load_state_dict(state)
    model = apply(model, plan).eval()
    assert model.generate(prompt, **options).tolist() == expected.tolist()
    model.save_pretrained(tmp_path)
    saved_as(tmp_path, one, state)


@on_ranks(2)
def test_a_sharded_model_is_saved_as_what_it_is(tmp_path):
    plan = plan_of(FAMILIES["llama"], Cell({"dp_shard": 2}), ("model.layers.*",))
    one = build_model(plan)
    state = {name: value.clone() for name, value in one.state_dict().items()}
    model = build_model(plan)
    model.load_state_dict(state)
    apply(model, plan).save_pretrained(tmp_path)
    saved_as(tmp_path, one, state)


@on_ranks(2)
def test_one_rank_saves_a_whole_state_alone(tmp_path):
    plan = plan_of(FAMILIES["llama"], Cell({"tp": 2}))
    one = build_model(plan)
    state = {name: value.clone() for name, value in one.state_dict().items()}
    model = apply(build_model(plan), plan)
    if get_platform().groups.rank() == 1:
        model.save_pretrained(tmp_path / "1", state_dict=dict(state))
        assert not list(tmp_path.glob("1/*.safetensors"))  # transformers writes on rank 0
    else:
        model.save_pretrained(tmp_path / "0", state_dict=dict(state))
        saved_as(tmp_path / "0", one, state)


@on_ranks(2)
def test_a_rank_that_saves_alone_says_for_whom_it_waits(tmp_path):
    plan = plan_of(FAMILIES["llama"], Cell({"dp_shard": 2}), ("model.layers.*",))
    model = apply(build_model(plan), plan)
    store = distributed_c10d._get_default_store()
    if get_platform().groups.rank() == 0:
        limit = store.timeout
        store.set_timeout(timedelta(seconds=1))
        try:
            with (
                pytest.warns(UserWarning, match="rank 0: save_pretrained") as told,
                mock.patch.object(pretrained, "_PATIENCE", 0.2),
                pytest.raises(TimeoutError) as raised,
            ):
                model.save_pretrained(tmp_path)
        finally:
            store.set_timeout(limit)
        assert "every rank has to call it, but ranks [1] have not yet: call it outside of" in str(raised.value)
        assert [str(each.message) for each in told] == [f"rank 0: {raised.value}"]
    get_platform().collectives.barrier()


def saved_as(path: Path, one: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
    """The class that the config names loads it."""
    assert json.loads((path / "config.json").read_text())["architectures"] == [type(one).__name__]
    read = getattr(transformers, type(one).__name__).from_pretrained(path, dtype=torch.float64)
    assert type(read) is type(one)
    assert all(torch.equal(value, state[name]) for name, value in read.state_dict().items())


@on_ranks(2)
def test_whole_weights_are_loaded_and_the_inner_model_is_called_alone():
    plan = plan_of(FAMILIES["llama"], Cell({"tp": 2}))
    one = build_model(plan)
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.mul_(1.5)
    model = apply(build_model(plan), plan)
    model.load_state_dict(one.state_dict())
    tokens = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    got, expected = (each.model(input_ids=tokens).last_hidden_state for each in (model, one))
    torch.testing.assert_close(got, expected)
    got.square().sum().backward()
    expected.square().sum().backward()
    gradient = model.model.layers[0].mlp.up_proj.weight.grad.full_tensor()
    torch.testing.assert_close(gradient, one.model.layers[0].mlp.up_proj.weight.grad)
    torch.testing.assert_close(model(input_ids=tokens).logits, one(input_ids=tokens).logits)


@on_ranks(2)
@pytest.mark.parametrize("axis", ["tp", "dp_shard"])
def test_a_vocabulary_grows_before_the_plan(axis):
    model = apply(build_model(plan_of(FAMILIES["llama"], Cell({axis: 2}))), plan_of(FAMILIES["llama"], Cell({axis: 2})))
    with pytest.raises(NotImplementedError, match=r"resize them before hp_plan\.apply"):
        model.resize_token_embeddings(64)
    assert model.resize_token_embeddings() is model.get_input_embeddings()
