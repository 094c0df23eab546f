"""Profiles on PyTorch."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from hp_platform import get_platform


class Profiler:
    """A profile that is under way: operators, kernels, and forwards by the names of their modules.

    Args:
        model: under training.
        path: of the trace that `close` writes.
    """

    def __init__(self, model: Any, path: Path) -> None:
        self._path = path
        self._ranges: list[record_function] = []
        stages = [model] if isinstance(model, nn.Module) else list(model.stages.values())
        named = [(name, module) for stage in stages for name, module in stage.named_modules() if name]
        self._hooks = [hook for name, module in named for hook in self._hooked(name, module)]
        activities = [ProfilerActivity.CPU]
        if get_platform().devices.kind == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()

    def _hooked(self, name: str, module: nn.Module) -> list[Any]:
        def enter(*_: Any) -> None:
            self._ranges.append(record_function(f"hp.forward({name})"))
            self._ranges[-1].__enter__()

        def leave(*_: Any) -> None:
            self._ranges.pop().__exit__(None, None, None)

        first = module.register_forward_pre_hook(enter, prepend=True)
        return [first, module.register_forward_hook(leave, always_call=True)]

    def named(self, name: str) -> AbstractContextManager[Any]:
        """Name what runs inside."""
        return record_function(name)

    def close(self) -> None:
        """Stop, and write the trace."""
        for hook in self._hooks:
            hook.remove()
        get_platform().devices.synchronize()
        self._profile.stop()
        part = self._path.with_name(f".{self._path.name}")
        self._profile.export_chrome_trace(str(part))
        os.replace(part, self._path)
