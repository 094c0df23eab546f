"""Which platform is chosen, and the errors when none can be."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

import hp_platform
from hp_platform import get_platform
from hp_platform.platforms.ports import SettingError, choose_kind, platform_name


@pytest.fixture
def choose(monkeypatch):
    """`platform_name` or `get_platform` anew, with these frameworks installed and these imported."""

    def choose(wanted=None, installed=(), imported=(), of=platform_name):
        monkeypatch.delenv("HYPER_PARALLEL_PLATFORM", raising=False)
        if wanted is not None:
            monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", wanted)
        for name in ("torch", "mindspore"):
            if name in imported:
                monkeypatch.setitem(sys.modules, name, sys.modules.get(name, pytest))
            else:
                monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: pytest.__spec__ if name in installed else None)
        return of()

    return choose


def test_importing_the_package_imports_no_framework():
    code = "import hp_platform, hp_testing, sys; print({'torch', 'mindspore'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout == "set()\n"


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
def test_mindspore_is_chosen(choose, wanted, installed, imported):
    assert choose(wanted, installed, imported) == "mindspore"


def test_an_unknown_name_lists_the_choices(choose):
    with pytest.raises(ValueError) as caught:
        choose("jax", ["torch"])
    assert str(caught.value) == "HYPER_PARALLEL_PLATFORM='jax' is not a platform. Choose one of: torch, mindspore."
    assert choose("torch", ["torch"]) == "torch"


def test_no_framework_tells_how_to_install_one(choose):
    with pytest.raises(ImportError) as caught:
        choose()
    assert (
        str(caught.value) == "no framework is installed: hp-platform needs one of torch, mindspore. "
        "Install one with: pip install 'hp-platform[torch]' or pip install 'hp-platform[mindspore]'"
    )


@pytest.mark.parametrize(("name", "other"), [("torch", "mindspore"), ("mindspore", "torch")])
def test_a_named_framework_that_is_missing(choose, name, other):
    with pytest.raises(ImportError) as caught:
        choose(name, [other], of=get_platform.__wrapped__)
    assert (
        str(caught.value)
        == f"HYPER_PARALLEL_PLATFORM={name}, but {name} is not installed. Install it with: pip install"
        f" 'hp-platform[{name}]'"
    )


def test_every_public_name_resolves():
    for name in hp_platform.__all__:
        assert getattr(hp_platform, name) is not None
        assert name in dir(hp_platform)
    with pytest.raises(AttributeError, match="module 'hp_platform' has no attribute 'nothing'"):
        _ = hp_platform.nothing


def test_a_device_that_is_not_there(monkeypatch):
    monkeypatch.setenv("HYPER_PARALLEL_DEVICE", "abacus")
    kinds = "is not a kind of device. Choose one of: cpu, cuda, npu"
    with pytest.raises(ValueError, match=f"DEVICE='abacus' {kinds}; (torch|mindspore) .* finds on this machine: cpu"):
        _ = type(get_platform().devices)().kind
    monkeypatch.setenv("HYPER_PARALLEL_DEVICE", "cpu")
    assert type(get_platform().devices)().kind == "cpu"


def test_a_kind_of_device_that_is_elsewhere(monkeypatch):
    monkeypatch.setenv("HYPER_PARALLEL_DEVICE", "cuda")
    with pytest.raises(SettingError) as caught:
        choose_kind(lambda: ("cpu", "npu"), "torch 2.13")
    assert str(caught.value) == (
        "HYPER_PARALLEL_DEVICE='cuda', but torch 2.13 finds on this machine: cpu, npu. Set it to one of these, or "
        "unset it."
    )
    for kind in ("cpu", "npu"):
        monkeypatch.setenv("HYPER_PARALLEL_DEVICE", kind)
        assert choose_kind(lambda: ("cpu", "npu"), "torch 2.13") == kind
    monkeypatch.delenv("HYPER_PARALLEL_DEVICE")
    assert choose_kind(lambda: ("cpu", "npu"), "torch 2.13") == "npu"


def test_the_name_of_the_device():
    assert get_platform().devices.name().strip()


def test_the_memory_of_the_device():
    total = get_platform().devices.total_memory()
    assert total is None or total > 1 << 28


def test_the_device_of_the_environment(monkeypatch):
    monkeypatch.setenv("HYPER_PARALLEL_DEVICE", "cpu")
    assert type(get_platform().devices)().kind == "cpu"
    monkeypatch.delenv("HYPER_PARALLEL_DEVICE")
    devices = type(get_platform().devices)()
    assert devices.kind == devices.present()[-1]
