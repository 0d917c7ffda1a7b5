"""Expert-parallel strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_pardist.axes.by_name import DataParallel, data_parallel_axis
from lightning_pardist.axes.expert import ExpertAxis, ExpertParallelSize
from lightning_pardist.engines.experts.trial import Dispatch
from lightning_pardist.strategies.strategy import PardistStrategy


class ExpertParallelStrategy(PardistStrategy):
    """Expert parallel: each rank holds some of the experts of every layer and trains on its own samples.

    Experts are detected in a trial run of the user's step: a list of equal modules, or parameters stacked along an
    expert dim, next to a router that chooses among the same number. An all-to-all dispatches tokens to the ranks that
    hold their experts, and another returns the results; every token that the module routes is dispatched, and none is
    dropped that the module keeps. A trial checks that this gives the module's own result; a layer that fails it gathers
    its experts' weights instead. Expert gradients are averaged over the ranks that hold the same experts, all others as
    under data parallelism.

    Args:
        expert_parallel_size: Number of ranks that the experts of a layer are distributed over; it divides the number
            of experts. ``"auto"`` for all ranks.
        experts: Names of the expert lists, or of the modules that own stacked expert parameters, with ``*`` for any
            part of a name. Detected by the router next to them if None.
        expert_dispatch: What is communicated: ``"tokens"``, ``"weights"``, or ``"auto"``: tokens if a trial shows that
            the result is the same, weights otherwise.
        log_expert_load: Whether each training step logs ``"expert_load/<name>"`` for each layer that dispatches
            tokens: the token count of its most loaded expert over all ranks, divided by the mean over its experts.
            Costs one exchange of a number per expert.
        data_parallel: Kind of data parallelism: ``"ddp"`` replicates; ``"zero1"``, ``"zero2"`` and ``"zero3"`` shard
            over all ranks, and expert state over the ranks that hold the same experts.
        data_settings: Settings of the data-parallel strategy, for example ``{"bucket_size_mb": 50}``.
        **kwargs: See :class:`~lightning_pardist.strategies.strategy.PardistStrategy`.

    Raises:
        ValueError: If a setting is out of range; during a run, if no experts are found, or their number is not
            divisible.
    """

    def __init__(
        self,
        *,
        expert_parallel_size: ExpertParallelSize = "auto",
        experts: Sequence[str] | None = None,
        expert_dispatch: Dispatch = "auto",
        log_expert_load: bool = False,
        data_parallel: DataParallel = "ddp",
        data_settings: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        expert = ExpertAxis(
            expert_parallel_size=expert_parallel_size,
            experts=experts,
            expert_dispatch=expert_dispatch,
            log_expert_load=log_expert_load,
        )
        super().__init__(axes=[expert, data_parallel_axis(data_parallel, **(data_settings or {}))], **kwargs)
