from __future__ import annotations

import importlib

import pytest

import hyper_parallel


@pytest.mark.parametrize("package", hyper_parallel.PACKAGES)
def test_every_public_name_resolves(package):
    module = importlib.import_module(package)
    for name in module.__all__:
        assert getattr(module, name) is not None, name
