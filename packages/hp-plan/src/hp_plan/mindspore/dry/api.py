"""Playing a plan without memory: not on MindSpore, which has no tensors without."""

from __future__ import annotations

from typing import Any, NoReturn

_TORCH_ONLY = (
    "{}: a dry run plays a plan on PyTorch's meta device, and MindSpore has none. Play the same plan with PyTorch, in"
    " an environment that has it: HYPER_PARALLEL_PLATFORM=torch"
)


def dry_run(plan: Any, **options: Any) -> NoReturn:
    """Refuse.

    Raises:
        NotImplementedError: always; it names what to do.
    """
    raise NotImplementedError(_TORCH_ONLY.format("dry_run"))


def fit(plan: Any, **options: Any) -> NoReturn:
    """Refuse, as `dry_run`.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(_TORCH_ONLY.format("fit"))


def simulate_rank(plan: Any, **options: Any) -> NoReturn:
    """Refuse, as `dry_run`.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(_TORCH_ONLY.format("simulate_rank"))


def tune(plan: Any, **options: Any) -> NoReturn:
    """Refuse, as `dry_run`.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(_TORCH_ONLY.format("tune"))


def probe(ranks: Any = None) -> NoReturn:
    """Refuse, as `dry_run`.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(_TORCH_ONLY.format("probe"))
