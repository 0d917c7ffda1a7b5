"""Local SGD and DiLoCo: islands of ranks that average their parameters every few steps."""

from __future__ import annotations

from typing import Any

from lightning_pardist.axes.local_sgd import LocalSGDAxis, OuterSize, SyncEvery
from lightning_pardist.axes.served_islands import ServedIslandsAxis
from lightning_pardist.engines.common.block_quantization import Compression
from lightning_pardist.strategies.hybrid import HybridStrategy


class LocalSGDStrategy(HybridStrategy):
    """Local SGD and DiLoCo: each island trains independently and parameters are averaged every ``sync_every`` steps.

    Between two synchronisations gradients are communicated inside an island only. Every ``sync_every`` steps a rank
    sends ``2 Psi (K-1)/K`` for the ``Psi`` parameters that it holds, with ``K`` islands (local SGD, arXiv 1805.09767).
    Results equal those of one process that trains the ``K`` models one after the other on their shares of each batch
    and averages them; with ``sync_every=1`` and SGD they equal those of ``pardist_ddp``.

    With an outer learning rate or momentum this is DiLoCo (arXiv 2311.08105): the difference between the parameters of
    the last synchronisation and the mean over islands is the gradient of an outer SGD step with Nesterov momentum. It
    keeps two more fp32 values for each parameter that a rank holds.

    Islands synchronise before validation, checkpoints and the end of training as well. A checkpoint keeps the optimizer
    states of every island and the outer momentum; on a different number of islands all islands load the optimizer
    states of the first one.

    Args:
        outer_parallel_size: Number of islands: ``"node"`` for one per host; ``"auto"`` for one per host on several
            hosts, and on a single host for the number of ranks that the other degrees leave.
        sync_every: Optimizer steps between two averages; ``"epoch"`` averages at the end of each epoch.
        start_local_step: Number of initial optimizer steps in which gradients are averaged over all islands, as under
            ``pardist_ddp`` (post-local SGD, arXiv 1808.07217).
        outer_lr: Learning rate of the outer optimizer; 1 uses the mean unchanged.
        outer_momentum: Nesterov momentum of the outer optimizer.
        sync_before_validation: Whether islands synchronise before validation and test; otherwise each evaluates its own
            weights, and logged values are means over islands.
        outer_compression: Compression of the parameter differences: ``"bf16"``, ``"int8"`` or ``"int4"``, with the
            rounding error added to the next differences; None for no compression.
        fragments: Number of parts of the model that synchronise in turn, evenly spread over ``sync_every`` steps
            (Streaming DiLoCo, arXiv 2501.18512).
        fragment_sync_delay: Steps between the start of a fragment's synchronisation and the use of its result; the
            communication overlaps with these steps.
        fragment_mixing: Fraction of its own weights that an island keeps when it applies the result.
        outer_server: ``"HOST:PORT"`` of a ``pardist outer-server`` through which islands that are separate jobs
            synchronise; such jobs may start, fail and restart at any time. All ranks of this job form one island, and
            ``outer_parallel_size`` is the number of shares that the data is divided into. Validation and checkpoints
            then use the island's own weights.
        island: Index of this job's island, from 0; by default the variable ``PARDIST_ISLAND``.
        **kwargs: Settings inside each island, and all others: see :class:`~lightning_pardist.HybridStrategy`.

    Raises:
        ValueError: If a setting is out of range, or the degrees do not fit each other or the number of ranks; during a
            run, if a callback keeps weight averages of its own.
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
                    f"outer_server={outer_server!r} with outer_parallel_size={outer_parallel_size!r} and"
                    f" sync_every={sync_every!r}: islands in separate jobs cannot derive these from each other. Set"
                    " both to numbers."
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
                    f"{', '.join(wrong)} of {type(self).__name__} is only for islands of one job. Leave it out with"
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
            raise ValueError(f"island={island} is only used with outer_server. Set outer_server, or leave island out.")
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
