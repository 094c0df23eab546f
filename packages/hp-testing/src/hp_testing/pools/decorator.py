"""Pytest tests whose body runs on ranks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from hp_testing.pools.pool import RankError, run
from hp_testing.pools.reference import BODY, refer


def on_ranks(
    *world_sizes: int, thorough: tuple[int, ...] = (), timeout: float = 60.0
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run a pytest test on every rank of a pool, once for each world size.

        @on_ranks(1, 2, 4)
        @pytest.mark.parametrize("op", ["sum", "max"])
        def test_all_reduce(op): ...      # test_all_reduce[sum-ranks1] and so on

    The body finds the default process group initialised. What it takes from pytest (parametrized values, fixtures such
    as `tmp_path`) is pickled; it may also take `ranks`, the world size.

    Args:
        *world_sizes: the numbers of ranks.
        thorough: more of them, for runs of all tests (`--tier all`) alone.
        timeout: seconds until ranks that haven't returned are killed; while they compute, five times as many.

    Raises:
        TypeError: the test is a method, or no world size was given.
    """
    if not world_sizes or not all(isinstance(size, int) for size in world_sizes):
        raise TypeError(f"on_ranks takes the numbers of ranks, as in @on_ranks(1, 2, 4), got {world_sizes}.")

    def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
        import pytest

        reference = refer(body)
        signature = inspect.signature(body)
        wants_ranks = "ranks" in signature.parameters

        @functools.wraps(body)
        def test(*, ranks: int, **values: Any) -> None:
            __tracebackhide__ = True
            if wants_ranks:
                values["ranks"] = ranks
            try:
                run(ranks, reference, (), values, timeout=timeout)
            except RankError as error:
                failure = str(error)  # the ranks' tracebacks are what matters, not this process's
            else:
                return
            pytest.fail(failure, pytrace=False)

        own = [p.replace(kind=p.KEYWORD_ONLY) for p in signature.parameters.values() if p.name != "ranks"]
        added = inspect.Parameter("ranks", inspect.Parameter.KEYWORD_ONLY)
        test.__signature__ = signature.replace(parameters=[*own, added])  # type: ignore[attr-defined]
        setattr(test, BODY, body)
        sizes = [pytest.param(size, id=f"ranks{size}") for size in world_sizes]
        sizes += [pytest.param(size, id=f"ranks{size}", marks=pytest.mark.thorough) for size in thorough]
        return pytest.mark.parametrize("ranks", sizes)(test)

    return decorate
