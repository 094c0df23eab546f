"""Blocks that follow a plan of memory.

Note [How a block follows its plan]
    A block is a region (`hp_offload.torch.regions.region`). Of what it saves, some stays in the graph, some is swapped,
    and the rest has slots that a second run fills. In its first call the sites are named as the trace named them; from
    then on what is saved as number n is treated as in the first call. Outputs of heavy operations that the plan keeps
    or swaps are handed back in the second run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from hp_offload.api import MemoryCheck
from hp_offload.saved import CheckpointPolicy, MemoryPlan, block_of, near
from hp_offload.torch.around import Around
from hp_offload.torch.regions.functions import Filling, Site, Walk, is_function
from hp_offload.torch.regions.region import run_region
from hp_offload.torch.regions.sites import KeptOutput, Key, SitePasses
from hp_offload.torch.swapping import Packed, SwapRun, address_of, is_placed, kept, stays
from hp_offload.torch.tracing import Sites, blocks_of, walking
from hp_platform.torch.heavy import mark
from hp_platform.torch.internals import without_torch_function

T = torch.Tensor
KEEP, SWAP, RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_SWAP, CheckpointPolicy.MUST_RECOMPUTE


def apply(model: nn.Module, plan: MemoryPlan) -> None:
    """Let the blocks of a model follow a plan."""
    blocks = blocks_of(model)
    by_block: dict[str, dict[str, CheckpointPolicy]] = {}
    for site, policy in plan.policies.items():
        block = block_of(site)
        if block in blocks:
            by_block.setdefault(block, {})[site] = policy
        elif policy is not KEEP:
            raise ValueError(
                f"apply_memory_plan: {site!r} is to be {'swapped' if policy is SWAP else 'computed again'}, and"
                f" the model has no block {block!r}{near(block, blocks)}. A block is a module whose name ends with"
                " its first number."
            )
    swaps = SWAP in plan.policies.values()
    check = MemoryCheck(plan)
    for name, policies in by_block.items():
        if swaps or set(policies.values()) != {KEEP}:
            block = blocks[name]
            mark(block)
            check.blocks.add(name)
            planned = _Planned(name, policies, block, swaps, check)
            block.forward = Around(planned.run, block.forward)


class _Planned:
    """A block and its part of a plan."""

    def __init__(
        self,
        name: str,
        policies: Mapping[str, CheckpointPolicy],
        module: nn.Module,
        swaps: bool,
        check: MemoryCheck,
    ) -> None:
        self.name, self.policies, self.swaps, self.check = name, policies, swaps, check
        self._module = module
        self.runs_again = RECOMPUTE in policies.values()
        self.table: list[CheckpointPolicy] | None = None
        """What becomes of what is saved as number n; None before the first call."""
        self.planned_bytes: list[int] = []
        """What the plan counts for what is saved as number n; 0 where the storage is another's."""
        self.functions = True
        """The plan keeps the output of a function (`hp_offload.torch.regions.functions`), as far as is known."""

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        passes = _PlannedPasses(self)
        if self.table is not None:
            result = run_region(forward, args, kwargs, name=self.name, passes=passes)
            if self.name in self.check.blocks:
                self.check.finish(self.name)
            return result
        sites = passes.sites = Sites(self.name, (args, kwargs))
        with walking(self._module, sites, self.name):
            result = run_region(forward, args, kwargs, name=self.name, passes=passes)
        passes.sites = None
        missing = [site for site in self.policies if site not in passes.seen]
        if missing:
            raise ValueError(
                f"apply_memory_plan: the block {self.name!r} saves no {missing[0]!r}{near(missing[0], passes.seen)};"
                " trace the model as it is now, with inputs like these."
            )
        self.table, self.functions = passes.chosen, passes.keeps_functions()
        return result


class _PlannedPasses(SitePasses):
    """One run of a planned block."""

    def __init__(self, planned: _Planned) -> None:
        self._swap = SwapRun(planned.name)
        super().__init__(planned.name, {}, self._swap)
        self._planned, self.functions = planned, planned.functions
        self.sites: Sites | None = None
        self.seen: dict[str, CheckpointPolicy] = {}
        self.chosen: list[CheckpointPolicy] = []
        # Outputs of heavy operations, by address: position, memory, layout, version.
        self._outputs: dict[int, tuple[int, StorageWeakRef, tuple[Any, ...], int]] = {}
        # What becomes of what the function that runs saves, but for its arguments; by address.
        self._own: dict[int, CheckpointPolicy] = {}

    @contextlib.contextmanager
    def first(self, walk: Walk) -> Iterator[None]:
        if self._planned.swaps:
            self._swap.open()
        with super().first(walk):
            yield

    @contextlib.contextmanager
    def again(self, filling: Filling) -> Iterator[None]:
        self._swap.begin_backward()
        with super().again(filling):
            yield

    def keep(self, key: Key, out: T) -> None:
        """Note an output; it is kept where it is saved."""
        position = len(self._reached)
        super().keep(key, out)
        with without_torch_function():
            if not stays(out):
                storage = out.untyped_storage()
                layout = out.dtype, out.shape, out.stride(), out.storage_offset()
                self._outputs[address_of(out)] = position, StorageWeakRef(storage), layout, out._version

    def call(self, key: Key, site: Site) -> T:
        """Call a function, and note its output if nothing else that it saves is to be computed again."""
        self._own.clear()
        out = self.watch(site)
        if RECOMPUTE in self._own.values():
            super().keep(key, out)
            return out
        self.keep(key, out)
        with without_torch_function():
            if address_of(out) in self._own:  # the function saves its output itself
                self._keep_output(out, self._own[address_of(out)])
        return out

    def keeps_functions(self) -> bool:
        """Tell if an output of a function is handed back."""
        return any(is_function(self._reached[position][0]) for position in self._kept)

    def pack(self, index: int, tensor: T) -> Packed | None:
        """Keep, swap or compute again."""
        policy = self._policy(index, tensor)
        if self._watched is not None and not self._watched.note(index, tensor):
            self._own[address_of(tensor)] = policy
        if policy is RECOMPUTE:
            return None
        if policy is KEEP and stays(tensor):
            return kept(tensor)
        self._keep_output(tensor, policy)
        return self._swap.pack(tensor) if policy is SWAP else self._swap.kept(tensor)

    def _keep_output(self, tensor: T, policy: CheckpointPolicy) -> None:
        """Keep the output of a heavy operation whose storage a tensor has, for the second run if there will be one."""
        if not self._planned.runs_again:
            return
        output = self._outputs.get(address_of(tensor))
        if output is not None and not output[1].expired() and output[0] not in self._kept:
            position, _, layout, version = output
            if tensor.dtype is layout[0] and tensor._version == version:
                alias = tensor.detach().as_strided(*layout[1:])
                self._kept[position] = self._group.out(alias) if policy is SWAP else KeptOutput(alias)

    def _policy(self, index: int, tensor: T) -> CheckpointPolicy:
        if self.sites is None:
            planned, check = self._planned, self._planned.check
            table = planned.table or self.chosen
            policy = table[index] if index < len(table) else KEEP
            if self._planned.name in check.blocks and index < len(planned.planned_bytes):
                check.add(policy, planned.planned_bytes[index], tensor)
            return policy
        policy, nbytes = KEEP, 0
        site, new = (None, False) if is_placed(tensor) else self.sites.site(tensor)
        if site is not None:
            policy = self.seen[site] = self._planned.policies.get(site, KEEP)
            nbytes = self._planned.check.planned.get(site, 0) if new else 0
        self.chosen.append(policy)
        self._planned.planned_bytes.append(nbytes)
        return policy
