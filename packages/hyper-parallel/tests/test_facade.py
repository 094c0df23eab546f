from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys

import pytest

import hyper_parallel
from hyper_parallel import facade

NOT_FOR_USERS = {"lazy_exports"}


@pytest.mark.parametrize("package", facade.PUBLIC)
def test_every_public_name_is_here(package):
    module = importlib.import_module(package)
    assert set(facade.PUBLIC[package]) == set(module.__all__) - NOT_FOR_USERS
    for name in facade.PUBLIC[package]:
        assert getattr(hyper_parallel, name) is getattr(module, name)
        assert name in dir(hyper_parallel)


def test_no_two_packages_have_one_name():
    names = [name for inside in facade.PUBLIC.values() for name in inside]
    assert len(names) == len(set(names))


def test_importing_it_imports_no_framework():
    code = "import sys, hyper_parallel, hp_plan; hp_plan.ParallelPlan(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_package_that_is_not_installed_is_named(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "hp_fsdp" else find(name))
    monkeypatch.delitem(vars(hyper_parallel), "fully_shard", raising=False)
    with pytest.raises(ImportError, match="fully_shard is in hp-fsdp, which is not installed: pip install hp-fsdp"):
        from hyper_parallel import fully_shard  # noqa: F401
    assert "fully_shard" not in dir(hyper_parallel)


def test_a_name_that_nobody_has():
    with pytest.raises(AttributeError, match="module 'hyper_parallel' has no attribute 'fully_sharded'"):
        _ = hyper_parallel.fully_sharded
