"""loss_parallel: the loss of logits whose classes are sharded."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager

from hp_styles import port

__all__ = ["loss_parallel"]


def loss_parallel(*, z_loss: float = 0.0) -> AbstractContextManager[None]:
    """Inside, ``F.cross_entropy`` is of logits sharded on the class dim, and nothing of their size is communicated.

    Two all-reduces of row-sized tensors, forward, give the loss (a third, of a number, where a mean is over sharded
    rows); the gradient is local. Cross entropy of sharded classes is computed so outside, too: the context adds the
    z-loss, takes plain targets and class weights as replicated where the rows are not sharded, and refuses logits that
    would have to be gathered.

    Example:
        >>> logits = distribute_tensor(torch.randn(4, 16, requires_grad=True), mesh, [Shard(1)])
        >>> with loss_parallel(z_loss=1e-4):
        ...     loss = F.cross_entropy(logits, target)
        ...     loss.backward()

    Args:
        z_loss: factor of ``logsumexp(logits)**2``, which is added to the loss of each row that is not ignored; it keeps
            the softmax's normaliser near one. Default 0: none. Where the loss is recomputed (checkpointing), backward
            belongs inside.

    Returns:
        A context manager. A loss of rows sharded on another axis is ``Partial()`` there (``reduction="none"``: sharded
        as they are), and replicated on the axis of the classes.

    Raises:
        ValueError: ``z_loss`` is negative or not finite; inside: logits that are not sharded on the class dim, targets
            that are probabilities, or a plain target for logits of sharded rows.
        RuntimeError: on leaving, where ``z_loss`` was given and no loss was computed inside.
        NotImplementedError: ``z_loss`` on MindSpore, where ``ops.cross_entropy`` of sharded classes gathers nothing
            anyway, and where its logits are placed is not checked.

    Source: Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3; the z-loss: Chowdhery et al., "PaLM",
    arXiv:2204.02311, section 5.
    """
    if not (z_loss >= 0 and math.isfinite(z_loss)):
        raise ValueError(f"loss_parallel: z_loss must be a finite number of at least 0, got {z_loss}")
    return port.modules().sharded_loss(z_loss=z_loss)
