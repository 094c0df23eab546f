"""The programs of examples/loops on two ranks, against the same in one process."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from peft import PeftModel
from transformers import LlamaForCausalLM

from hp_plan import MeshSection
from hp_testing import on_ranks

pytestmark = [
    pytest.mark.framework("torch"),
    pytest.mark.not_on("torch-npu-sim", reason="the programs ask for CPUs; nothing of the device in it"),
]
REWARDS = [37, 38, 52, 40, 48, 50, 59, 61, 82, 95, 113, 125, 138, 153]
LOOPS = Path(__file__).parents[3] / "examples" / "loops"


def program(name: str) -> Any:
    specification = importlib.util.spec_from_file_location(f"loop_{name}", LOOPS / f"{name}.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@contextlib.contextmanager
def launched() -> Iterator[None]:
    """The variables that torchrun sets, and accelerate's singletons new."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}
    with mock.patch.dict(os.environ, variables), warnings.catch_warnings():
        # peft 0.21 reads a name that transformers 5.23 calls deprecated.
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        try:
            yield
        finally:
            AcceleratorState._reset_state(True)
            GradientState._reset_state()


def alone(model: Any, batches: list[torch.Tensor], clip: float | None = 1.0) -> list[float]:
    """Losses of one process."""
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    losses = []
    for batch in batches:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def close(got: list[float], expected: list[float]) -> None:
    assert got == pytest.approx(expected, rel=1e-4) and got[-1] < got[0]


@on_ranks(1, 2)
def test_rewards_are_the_same_on_any_ranks(ranks):
    # Of 60 steps the last is above 0.8; the ratio of the first update is checked in the program.
    found = program("grpo").train(steps=14)
    assert [round(each * 512) for each in found] == REWARDS
    assert found[-1] > 3 * found[0]


@on_ranks(2)
def test_a_plain_loop_and_accelerate(tmp_path):
    base = program("lora").base()
    expected = alone(base, [torch.randint(64, (8, 16))] * 5)  # after the model's weights, as in the programs
    close(program("plain").train(), expected)
    with launched():
        close(program("accelerate_loop").train(str(tmp_path / "model")), expected)
    read = LlamaForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True)
    for name, value in read.state_dict().items():
        torch.testing.assert_close(value, base.state_dict()[name], rtol=1e-3, atol=1e-4, msg=name)


@on_ranks(2, timeout=120)
def test_the_trainer_and_its_checkpoints(tmp_path):
    module = program("trainer")
    rows = module.Rows(32).rows
    expected = alone(program("lora").base(), [*rows.chunk(4)])
    with launched():
        close(module.train(str(tmp_path)), expected)
    with launched():
        again = module.train(str(tmp_path / "again"), resume=str(tmp_path / "step-00000002"))
    assert again == pytest.approx(expected, rel=1e-4)
    LlamaForCausalLM.from_pretrained(tmp_path / "step-00000004", local_files_only=True)


@on_ranks(2)
def test_adapters_alone_are_trained_and_saved(tmp_path):
    module = program("lora")
    with launched():
        losses = module.train(str(tmp_path))
        dist.barrier()
        assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".md") == [
            "adapter_config.json",
            "adapter_model.safetensors",
        ]
        read = PeftModel.from_pretrained(module.base(), tmp_path)
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
        one = get_peft_model(module.base(), config)
        tokens = torch.randint(64, (8, 16))
        close(losses, alone(one, [tokens] * 5, clip=None))
    own = one.state_dict()
    for name, value in read.state_dict().items():
        torch.testing.assert_close(value, own[name], rtol=1e-3, atol=1e-4, msg=name)


@on_ranks(2)
@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"tp": 2}], ids=str)
def test_answers_are_generated_and_compared_as_in_one_process(mesh: dict[str, int]):
    module = program("exact_match")
    one = module.base()
    module.train(one, module.rows())
    expected = module.matches(one, module.rows())
    assert 0 < expected.sum() < len(expected), "answers of both kinds"
    assert module.exact_match(MeshSection(**mesh)) == (int(expected.sum()), len(expected))
