"""Local SGD: islands of ranks that average their parameters every few steps, over any strategy inside."""

from __future__ import annotations

from typing import Any

from lightning_pardist.axes.local_sgd import LocalSGDAxis, OuterSize
from lightning_pardist.strategies.hybrid import HybridStrategy


class LocalSGDStrategy(HybridStrategy):
    """Each island trains by itself and averages its parameters with the others' every ``sync_every`` steps.

    Between two averages gradients travel inside an island only. Every ``sync_every`` steps a rank sends
    ``2 Psi (K-1)/K`` for the ``Psi`` parameters that it holds, on ``K`` islands (local SGD, arXiv 1805.09767). The
    numbers are those of one process that trains the ``K`` models one after the other on their shares of each batch and
    averages them; with ``sync_every=1`` and SGD they are those of ``pardist_ddp``.

    Validation, checkpoints and the end of training average first. Optimizer state stays with its island: a checkpoint
    holds the first island's, from which all go on, so that momenta differ after a resume unless ``K`` is 1.

    Args:
        outer_parallel_size: Number of islands: ``"node"`` for one a host, ``"auto"`` for the same on several hosts and
            for all ranks that the other degrees leave on one.
        sync_every: Optimizer steps between two averages.
        **kwargs: What each island does, and everything else: see :class:`~lightning_pardist.HybridStrategy`.

    Raises:
        ValueError: If a setting is out of range, or the degrees do not fit each other or the number of ranks; during a
            run, if a callback keeps averages of its own.
    """

    def __init__(self, *, outer_parallel_size: OuterSize = "auto", sync_every: int = 32, **kwargs: Any) -> None:
        outer = LocalSGDAxis(outer_parallel_size=outer_parallel_size, sync_every=sync_every)
        super().__init__(outer=outer, **kwargs)
