"""A simulated Ascend NPU: the released torch_npu over a stand-in for CANN that is compiled here, once.

    npu_sim.load()       # before torch is imported; processes started from here on have it as well
    torch.ones(3, device="npu") + 1

Note [Layers of the simulation]
`cann/` is the part of CANN that torch_npu calls: devices whose memory is host memory, with a limit; streams and
events, all synchronous; HCCL between the processes of one machine. `shim/` replaces aten's NPU kernels by the host's,
over the same memory, and stands in for the fused operators. Everything else is torch_npu's own: devices, the caching
allocator, streams, process groups, autograd, the names and arguments of its operators.
"""

from __future__ import annotations

from hp_testing.npu_sim.loading import communicators, load, missing

__all__ = ["communicators", "load", "missing"]
