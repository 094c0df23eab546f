"""Context parallelism on PyTorch: hooks, the exchange of Ulysses, the ring, the kernels, the gather of keys."""

from hp_styles.torch.context.attention import attention_over, cut_in_place
from hp_styles.torch.context.exchange import shard, unshard
from hp_styles.torch.context.hooks import attach, enclose
from hp_styles.torch.context.sparse import attach_sparse

__all__ = ["attach", "attach_sparse", "attention_over", "cut_in_place", "enclose", "shard", "unshard"]
