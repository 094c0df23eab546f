"""docs/adapters.md: its programs on two ranks, against one process; what its libraries would get wrong, refused."""

from __future__ import annotations

import contextlib
import json
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hp_fsdp import (
    MixedPrecisionPolicy,
    full_state_dict,
    fully_shard,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from hp_plan import ParallelPlan, apply
from hp_testing import on_ranks

pytestmark = [
    pytest.mark.framework("torch"),
    pytest.mark.not_on("torch-npu-sim", reason="the programs ask for CPUs; nothing of the device in it"),
]

PAGE = Path(__file__).parents[3] / "docs" / "adapters.md"
STEPS = 3


def program(name: str) -> str:
    (found,) = re.findall(rf"^```python {name}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return found


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Rows of tokens, the same on every rank."""

    def __init__(self, rows: int) -> None:
        self.rows = torch.randint(24, (rows, 6), generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads)).double()


def sharded() -> LlamaForCausalLM:
    model = llama()
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


@contextlib.contextmanager
def launched() -> Iterator[None]:
    """The variables that a launcher sets, and accelerate's singletons new."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}
    with mock.patch.dict(os.environ, variables):
        try:
            yield
        finally:
            AcceleratorState._reset_state(True)
            GradientState._reset_state()


def expected(rows: torch.Tensor, lr: float) -> dict[str, torch.Tensor]:
    """Weights of one process after the steps, each with its share of the rows."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    for batch in rows.chunk(STEPS):
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def saved(path: Path, reference: dict[str, torch.Tensor]) -> None:
    dist.barrier()
    read = LlamaForCausalLM.from_pretrained(path, dtype=torch.float64).state_dict()
    assert list(read) == list(reference)
    for name, value in read.items():
        torch.testing.assert_close(value, reference[name], atol=1e-9, rtol=1e-9, msg=name)


@on_ranks(2, timeout=120.0)
def test_accelerate_as_in_one_process(tmp_path: Path):
    # A step is two micro-batches of two rows on each of two ranks.
    tokens = Tokens(STEPS * 8)
    names: dict[str, Any] = {"model": llama(), "loader": DataLoader(tokens, batch_size=2), "path": tmp_path}
    with launched():
        text = program("accelerate").replace("lr=0.01", "lr=0.01, weight_decay=0.0")
        exec(compile(text, str(PAGE), "exec"), names)
        assert names["accelerator"].num_processes == 2
    saved(tmp_path, expected(tokens.rows, 0.01))
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


@on_ranks(2)
def test_a_saved_model_loads_by_what_its_config_names(tmp_path: Path):
    """Of the class's name; a Trainer's label smoothing shifts labels for names that transformers knows."""
    model = sharded()
    assert model._get_name() in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    state = full_state_dict(model, cpu=True)
    if dist.get_rank() == 0:
        model.save_pretrained(tmp_path, state_dict=state)
    dist.barrier()
    (name,) = json.loads((tmp_path / "config.json").read_text())["architectures"]
    named = getattr(transformers, name).from_pretrained(tmp_path, dtype=torch.float64)
    found = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert type(named) is type(found) is LlamaForCausalLM
    for key, value in found.state_dict().items():
        assert torch.equal(value, llama().state_dict()[key]), key


@on_ranks(2, timeout=120.0)
def test_the_trainer_as_in_one_process(tmp_path: Path):
    tokens = Tokens(STEPS * 8)
    settings = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 1,
        "learning_rate": 0.01,
        "weight_decay": 0.0,
        "adam_epsilon": 1e-8,
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
        "optim": "adamw_torch",
        "save_strategy": "steps",
        "save_steps": 2,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "logging_strategy": "no",
    }
    names: dict[str, Any] = {"model": llama(), "settings": settings, "rows": tokens, "path": str(tmp_path)}
    with launched():
        exec(compile(program("trainer"), str(PAGE), "exec"), names)
        assert names["trainer"].args.world_size == 2 and names["trainer"].state.global_step == STEPS
        assert names["trainer"].model_wrapped is names["model"]
    saved(tmp_path, expected(tokens.rows, 0.01))
    assert (tmp_path / "checkpoint-2" / "model.safetensors").exists()


@on_ranks(2, timeout=120.0)
def test_a_trainer_saves_a_planned_model_from_all_ranks(tmp_path: Path):
    settings = {"max_steps": 3, "save_steps": 2, "save_only_model": True, "report_to": [], "disable_tqdm": True}
    tokens = Tokens(12)
    with launched():
        arguments = TrainingArguments(str(tmp_path), use_cpu=True, dataloader_pin_memory=False, **settings)
        model = apply(
            llama(), ParallelPlan.from_dict({"mesh": {"dp_shard": 2}, "fsdp": {"groups": ["model.layers.*"]}})
        )
        trainer = Trainer(model, arguments, train_dataset=tokens)
        trainer.train()
        trainer.save_model(str(tmp_path / "end"))
    saved(tmp_path / "end", full_state_dict(model, cpu=True))
    between = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-2", dtype=torch.float64).state_dict()
    assert not torch.equal(between["lm_head.weight"], llama().state_dict()["lm_head.weight"])
    with launched(), warnings.catch_warnings():  # and an adapter that joins the planned model, in peft's own format
        # peft 0.21 reads a name that transformers 5.23 calls deprecated
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        adapted: Any = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
        arguments = TrainingArguments(str(tmp_path / "lora"), use_cpu=True, dataloader_pin_memory=False, **settings)
        Trainer(adapted, arguments, train_dataset=tokens).train()
        loaded = PeftModel.from_pretrained(llama(), str(tmp_path / "lora" / "checkpoint-3"))
    expected = get_peft_model_state_dict(adapted, full_state_dict(adapted, cpu=True))
    found = get_peft_model_state_dict(loaded)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert all(value.any() for value in found.values())


@on_ranks(2, timeout=120.0)
def test_what_accelerate_would_get_wrong(tmp_path: Path):
    model = sharded()
    tokens = Tokens(2).rows
    with launched():
        accelerator = Accelerator()
        optimizer = torch.optim.AdamW(model.parameters())
        prepared, stepper = accelerator.prepare(model, optimizer)
        assert prepared is model
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        reference = llama()
        reference(input_ids=tokens, labels=tokens).loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        own: Any = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        torch.testing.assert_close(own.full_tensor(), norm, atol=1e-10, rtol=1e-10)
        stepper.step()
        whole = "takes the state of a module of hp_fsdp.fully_shard for a full one"
        for save in (accelerator.get_state_dict, lambda net: accelerator.save_model(net, str(tmp_path))):
            for net in (model, nn.Sequential(model)):
                with pytest.raises(TypeError, match=f"accelerate {whole}"):
                    save(net)
        with pytest.raises(TypeError, match=f"accelerate {whole}"):
            accelerator.save_state(str(tmp_path))
        with pytest.raises(TypeError, match=f"save_pretrained {whole}"):
            model.save_pretrained(tmp_path)
        state = full_state_dict(model)
        if accelerator.is_main_process:
            model.save_pretrained(tmp_path / "whole", state_dict=dict(state))  # it empties what it is given
        saved(tmp_path / "whole", state)
        parts = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(parts, checkpoint_id=tmp_path / "parts")
        again = sharded()
        loaded = {"model": get_model_state_dict(again)}
        dcp.load(loaded, checkpoint_id=tmp_path / "parts")
        set_model_state_dict(again, loaded["model"])
        assert all(torch.equal(value, state[name]) for name, value in full_state_dict(again).items())
        with pytest.raises(TypeError, match="DistributedDataParallel around"):
            accelerator.prepare_model(nn.Sequential(model))
        accelerator._models.clear()
        with pytest.raises(TypeError, match=r"accelerate.checkpointing saves the states of AdamW on one rank"):
            accelerator.save_state(str(tmp_path))
        assert optimizer.state_dict()["state"]
    with launched(), pytest.raises(TypeError, match=r"accelerate's mixed_precision='bf16'.*MixedPrecisionPolicy"):
        Accelerator(mixed_precision="bf16").prepare(sharded())
    with launched():
        own = fully_shard(llama(), mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        assert Accelerator().prepare(own)(input_ids=tokens).logits.dtype == torch.bfloat16


@on_ranks(2, timeout=120.0)
def test_what_the_trainer_would_get_wrong(tmp_path: Path):
    model = sharded()
    with launched():
        arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True)
        trainer = Trainer(model, arguments)
        optimizer = trainer.create_optimizer()
        tokens = Tokens(2).rows
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            with pytest.raises(TypeError, match="in a Trainer, override save_model"):
                trainer.save_model()
            with pytest.raises(TypeError, match=r"transformers.trainer saves the states of AdamW on one rank"):
                trainer._save_optimizer_and_scheduler(str(tmp_path))
