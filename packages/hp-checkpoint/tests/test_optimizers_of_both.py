"""Both frameworks save the same optimizer, and each loads what the other saved."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from hp_checkpoint import Checkpointer, save
from hp_platform import get_platform
from hp_testing import as_array, as_tensor, device_type, on_ranks

HASHES = {"adamw": "c1cb5d1f21bc126a", "sgd": "2735fd1bfa482346"}
OPTIONS = {
    "adamw": {"lr": 0.25, "betas": (0.5, 0.75), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "maximize": False},
    "sgd": {"lr": 0.25, "momentum": 0.5, "dampening": 0, "weight_decay": 0, "nesterov": False, "maximize": False},
}
ONLY = {"torch": {"foreach": None, "capturable": False, "fused": True}, "mindspore": {}}
"""Options that one framework alone has."""


class OnTorch:
    """A linear layer and its optimizer."""

    def __init__(self, kind):
        import torch

        self.model = torch.nn.Linear(3, 2, bias=False, device=device_type())
        maker = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[kind]
        own = {"betas": (0.5, 0.75), "weight_decay": 0.0} if kind == "adamw" else {"momentum": 0.5}
        self.optimizer = maker(self.model.parameters(), lr=0.25, **own)

    def step(self, gradient):
        self.model.weight.grad = as_tensor(gradient)
        self.optimizer.step()

    def weight(self):
        return as_array(self.model.weight.detach())


class OnMindSpore:
    """The same."""

    def __init__(self, kind):
        from mindspore import mint
        from mindspore.experimental import optim

        self.model = mint.nn.Linear(3, 2, bias=False)
        maker = {"adamw": optim.AdamW, "sgd": optim.SGD}[kind]
        own = {"betas": (0.5, 0.75), "weight_decay": 0.0} if kind == "adamw" else {"momentum": 0.5}
        self.optimizer = maker(self.model.trainable_params(), lr=0.25, **own)

    def step(self, gradient):
        self.optimizer((as_tensor(gradient),))

    def weight(self):
        return self.model.weight.asnumpy()


def training(kind):
    return (OnTorch if get_platform().name == "torch" else OnMindSpore)(kind)


def gradient(step):
    return np.arange(6, dtype=np.float32).reshape(2, 3) / 4 + step  # powers of two: no rounding


@on_ranks(1)
@pytest.mark.parametrize("kind", list(OPTIONS))
def test_both_frameworks_save_the_same_optimizer(tmp_path, kind):
    run = training(kind)
    for step in range(2):
        run.step(gradient(step))
    Checkpointer(tmp_path, background=False).save(2, run.model, run.optimizer)
    folder = tmp_path / "step-00000002"
    assert hashlib.sha256((folder / "optimizer.safetensors").read_bytes()).hexdigest()[:16] == HASHES[kind]
    saved = json.loads((folder / "state.json").read_text())["optimizer_options"]["weight"]
    for key, value in OPTIONS[kind].items():
        assert saved[key] == ({"__tuple__": list(value)} if isinstance(value, tuple) else value), key


@on_ranks(1)
@pytest.mark.parametrize("other", list(ONLY))
@pytest.mark.parametrize("kind", list(OPTIONS))
def test_each_loads_what_the_other_saved(tmp_path, kind, other):
    weight, momentum = gradient(5), gradient(1)
    if kind == "adamw":
        states = {"step": np.array(2, np.float32), "exp_avg": momentum, "exp_avg_sq": momentum * momentum + 1}
    else:
        states = {"momentum_buffer": momentum}
    state = {
        "model": {"weight": weight},
        "optimizer": {"weight": states},
        "optimizer_options": {"weight": {**OPTIONS[kind], **ONLY[other], "lr": 0.5}},
        **dict.fromkeys(("schedule", "data", "extra", "iteration")),
    }
    save(state, checkpoint_id=tmp_path / "step-00000002")
    run = training(kind)
    Checkpointer(tmp_path, background=False).load(run.model, run.optimizer)
    assert (run.weight() == weight).all()
    new = gradient(2)
    run.step(new)
    if kind == "sgd":
        truth = weight - 0.5 * (0.5 * momentum + new)
    else:
        mean, square = 0.5 * momentum + 0.5 * new, 0.75 * states["exp_avg_sq"] + 0.25 * new * new
        truth = weight - 0.5 * (mean / (1 - 0.5**3)) / (np.sqrt(square / (1 - 0.75**3)) + 1e-8)
    np.testing.assert_allclose(run.weight(), truth, rtol=1e-6)
