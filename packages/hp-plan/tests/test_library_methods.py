"""What transformers' models do besides forward, under a plan: beams, and saved checkpoints."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers

from hp_plan import apply, build_model
from hp_testing import on_ranks

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports tests by their path
from families import FAMILIES
from family_cells import Cell, plan_of

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


def saved_as(path: Path, one: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
    """The class that the config names loads it."""
    assert json.loads((path / "config.json").read_text())["architectures"] == [type(one).__name__]
    read = getattr(transformers, type(one).__name__).from_pretrained(path, dtype=torch.float64)
    assert type(read) is type(one)
    assert all(torch.equal(value, state[name]) for name, value in read.state_dict().items())
