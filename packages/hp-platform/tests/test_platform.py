"""Which platform is chosen, and the errors when none can be."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch

import hp_platform
from hp_platform import get_platform
from hp_platform.testing import device_type, on_ranks


@pytest.fixture
def choose(monkeypatch):
    """`get_platform` anew, with these frameworks installed and these imported."""

    def choose(wanted=None, installed=(), imported=()):
        monkeypatch.delenv("HYPER_PARALLEL_PLATFORM", raising=False)
        if wanted is not None:
            monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", wanted)
        for name in ("torch", "mindspore"):
            if name in imported:
                monkeypatch.setitem(sys.modules, name, sys.modules.get(name, torch))
            else:
                monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: torch.__spec__ if name in installed else None)
        return get_platform.__wrapped__().name

    return choose


def test_importing_the_package_imports_no_framework():
    code = "import hp_platform, hp_platform.testing, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("wanted", "installed", "imported"),
    [
        ("torch", ["torch", "mindspore"], ["mindspore"]),
        ("", ["torch"], []),
        (None, ["torch", "mindspore"], []),
        (None, ["torch", "mindspore"], ["torch"]),
        (None, ["torch", "mindspore"], ["torch", "mindspore"]),
    ],
)
def test_torch_is_chosen(choose, wanted, installed, imported):
    assert choose(wanted, installed, imported) == "torch"


@pytest.mark.parametrize(
    ("wanted", "installed", "imported"),
    [("mindspore", [], []), (None, ["torch", "mindspore"], ["mindspore"]), (None, ["mindspore"], [])],
)
def test_mindspore_is_not_in_this_version(choose, wanted, installed, imported):
    with pytest.raises(NotImplementedError) as caught:
        choose(wanted, installed, imported)
    assert (
        str(caught.value)
        == "the mindspore platform is not available in this version of hp-platform, which has: torch. "
        "Set HYPER_PARALLEL_PLATFORM=torch to use PyTorch."
    )


def test_an_unknown_name_lists_the_choices(choose):
    with pytest.raises(ValueError) as caught:
        choose("jax", ["torch"])
    assert str(caught.value) == "HYPER_PARALLEL_PLATFORM='jax' names no platform. Choose one of: torch, mindspore."


def test_no_framework_tells_how_to_install_one(choose):
    with pytest.raises(ImportError) as caught:
        choose()
    assert (
        str(caught.value) == "no framework is installed: hp-platform needs one of torch, mindspore. "
        "Install one with: pip install 'hp-platform[torch]'"
    )


def test_a_named_framework_that_is_missing(choose):
    with pytest.raises(ImportError) as caught:
        choose("torch", ["mindspore"])
    assert (
        str(caught.value) == "HYPER_PARALLEL_PLATFORM=torch, but torch is not installed. Install it with: pip install"
        " 'hp-platform[torch]'"
    )


def test_every_public_name_resolves():
    for name in hp_platform.__all__:
        assert getattr(hp_platform, name) is not None
        assert name in dir(hp_platform)
    with pytest.raises(AttributeError, match="module 'hp_platform' has no attribute 'nothing'"):
        _ = hp_platform.nothing


def test_a_device_that_is_not_there(monkeypatch):
    monkeypatch.setenv("HYPER_PARALLEL_DEVICE", "abacus")
    with pytest.raises(ValueError, match="HYPER_PARALLEL_DEVICE='abacus', but torch .* finds: cpu"):
        _ = type(get_platform().devices)().kind


def test_the_device_of_the_environment(monkeypatch):
    monkeypatch.setenv("HYPER_PARALLEL_DEVICE", "cpu")
    assert type(get_platform().devices)().kind == "cpu"
    monkeypatch.delenv("HYPER_PARALLEL_DEVICE")
    devices = type(get_platform().devices)()
    assert devices.kind == devices.present()[-1]


@on_ranks(1)
def test_devices():
    devices = get_platform().devices
    assert devices.kind == devices.current_device().type == device_type()
    assert devices.kind in devices.present() and devices.count >= 1
    devices.set_device(0)
    devices.reset_peak_memory()
    before = devices.peak_memory()
    kept = torch.ones(64 << 20, dtype=torch.uint8, device=devices.current_device())
    assert devices.peak_memory() - before > 40 << 20
    del kept
    stream = devices.stream()
    with devices.device_module().stream(stream):
        tensor = torch.ones(2, device=devices.current_device())
    devices.device_module().current_stream().wait_stream(stream)
    devices.synchronize()
    devices.empty_cache()
    assert tensor.sum().item() == 2


@on_ranks(2)
def test_manual_seed_makes_ranks_draw_alike():
    platform = get_platform()
    device = platform.devices.current_device()
    torch.manual_seed(platform.groups.rank())
    hp_platform.manual_seed(7)
    assert platform.random.seeded() == 7
    state = platform.random.get_state(device)
    drawn = torch.rand(4, device=device)
    gathered = torch.empty(8, device=device)
    platform.collectives.all_gather(gathered, drawn, group=torch.distributed.group.WORLD)
    assert torch.equal(gathered[:4], gathered[4:])
    platform.random.set_state(device, state)
    assert torch.equal(torch.rand(4, device=device), drawn)
