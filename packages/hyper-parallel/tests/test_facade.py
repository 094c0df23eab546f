from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import hyper_parallel


@pytest.mark.parametrize("package", hyper_parallel.PACKAGES)
def test_every_public_name_is_here(package):
    module = importlib.import_module(package)
    for name in module.__all__:
        assert getattr(hyper_parallel, name) is getattr(module, name)
        assert name in dir(hyper_parallel)


def test_no_two_packages_have_one_name():
    names = [name for package in hyper_parallel.PACKAGES for name in importlib.import_module(package).__all__]
    assert len(names) == len(set(names))


def test_importing_it_imports_no_framework():
    code = "import sys, hyper_parallel, hp_plan; hp_plan.ParallelPlan(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_name_that_nobody_has():
    with pytest.raises(AttributeError, match="module 'hyper_parallel' has no attribute 'fully_sharded'"):
        _ = hyper_parallel.fully_sharded
