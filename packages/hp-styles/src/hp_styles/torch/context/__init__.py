"""Context parallelism on PyTorch: hooks, the exchange of Ulysses, the ring, the kernels."""

from hp_styles.torch.context.hooks import attach
from hp_styles.torch.context.sequence import shard, unshard

__all__ = ["attach", "shard", "unshard"]
