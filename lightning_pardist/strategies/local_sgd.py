"""Local SGD and DiLoCo: islands of ranks that meet every few steps, over any strategy inside."""

from __future__ import annotations

from typing import Any

from lightning_pardist.axes.local_sgd import LocalSGDAxis, OuterSize, SyncEvery
from lightning_pardist.axes.served_islands import ServedIslandsAxis
from lightning_pardist.engines.common.block_codes import Compression
from lightning_pardist.strategies.hybrid import HybridStrategy


class LocalSGDStrategy(HybridStrategy):
    """Each island trains by itself and averages its parameters with the others' every ``sync_every`` steps.

    Between two averages gradients travel inside an island only. Every ``sync_every`` steps a rank sends
    ``2 Psi (K-1)/K`` for the ``Psi`` parameters that it holds, on ``K`` islands (local SGD, arXiv 1805.09767). The
    numbers are those of one process that trains the ``K`` models one after the other on their shares of each batch and
    averages them; with ``sync_every=1`` and SGD they are those of ``pardist_ddp``.

    With an outer learning rate or momentum this is DiLoCo (arXiv 2311.08105): the difference between the parameters of
    the last meeting and the islands' mean is the gradient of a step of SGD with Nesterov momentum. It keeps two fp32
    values more for each parameter that a rank holds.

    Validation, checkpoints and the end of training are meetings as well. A checkpoint keeps the optimizers of every
    island and the outer momentum; on another number of islands all go on with the first one's optimizers.

    Args:
        outer_parallel_size: Number of islands: ``"node"`` for one a host, ``"auto"`` for the same on several hosts and
            for all ranks that the other degrees leave on one.
        sync_every: Optimizer steps between two averages; ``"epoch"`` for the end of each epoch.
        start_local_step: Optimizer steps from the start of training in which gradients are averaged over all islands,
            as under ``pardist_ddp`` (post-local SGD, arXiv 1808.07217).
        outer_lr: Step size of the outer optimizer; 1 takes the mean as it is.
        outer_momentum: Its Nesterov momentum.
        sync_before_validation: Whether islands meet before validation and test; otherwise each evaluates its own
            weights, and logged values are means over islands.
        outer_compression: How differences travel: ``"bf16"``, ``"int8"`` or ``"int4"``, with what rounding leaves
            behind added to the next ones; in full if None.
        fragments: Parts of the model that meet in turns, evenly spread over ``sync_every`` steps (Streaming DiLoCo,
            arXiv 2501.18512).
        fragment_sync_delay: Steps that an island goes on before it takes in what a meeting has come to, so that it is
            on its way meanwhile.
        fragment_mixing: Share of its own weights that an island keeps then.
        outer_server: ``"HOST:PORT"`` of a ``pardist outer-server`` where islands meet that are jobs of their own, and
            that may come, die and come back: all ranks of this job are one island, and ``outer_parallel_size`` is the
            number of shares that the data is divided into. Validation and checkpoints are of its own weights, then.
        island: Which of them this job is, from 0; by default the variable ``PARDIST_ISLAND``.
        **kwargs: What each island does, and everything else: see :class:`~lightning_pardist.HybridStrategy`.

    Raises:
        ValueError: If a setting is out of range, or the degrees do not fit each other or the number of ranks; during a
            run, if a callback keeps averages of its own.
    """

    def __init__(
        self,
        *,
        outer_parallel_size: OuterSize = "auto",
        sync_every: SyncEvery = 32,
        start_local_step: int = 0,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        sync_before_validation: bool = True,
        outer_compression: Compression | None = None,
        fragments: int = 1,
        fragment_sync_delay: int = 0,
        fragment_mixing: float = 0.0,
        outer_server: str | None = None,
        island: int | None = None,
        **kwargs: Any,
    ) -> None:
        if outer_server is not None:
            if not isinstance(outer_parallel_size, int) or not isinstance(sync_every, int):
                raise ValueError(
                    f"outer_server={outer_server!r} with outer_parallel_size={outer_parallel_size!r} and sync_every="
                    f"{sync_every!r}: islands of their own do not know of each other. Set both to numbers."
                )
            inside = {
                "start_local_step": start_local_step,
                "sync_before_validation": not sync_before_validation,
                "outer_compression": outer_compression,
                "fragments": fragments - 1,
                "fragment_sync_delay": fragment_sync_delay,
                "fragment_mixing": fragment_mixing,
            }
            if wrong := [name for name, value in inside.items() if value]:
                raise ValueError(
                    f"{', '.join(wrong)} of {type(self).__name__} is for islands of one job. Leave it out with"
                    f" outer_server={outer_server!r}."
                )
            served = ServedIslandsAxis(
                outer_server=outer_server,
                island=island,
                islands=outer_parallel_size,
                sync_every=sync_every,
                outer_lr=outer_lr,
                outer_momentum=outer_momentum,
            )
            super().__init__(outer=served, **kwargs)
            return
        if island is not None:
            raise ValueError(f"island={island} is for jobs that meet at a server. Set outer_server, or leave it out.")
        outer = LocalSGDAxis(
            outer_parallel_size=outer_parallel_size,
            sync_every=sync_every,
            start_local_step=start_local_step,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            sync_before_validation=sync_before_validation,
            outer_compression=outer_compression,
            fragments=fragments,
            fragment_sync_delay=fragment_sync_delay,
            fragment_mixing=fragment_mixing,
        )
        super().__init__(outer=outer, **kwargs)
