"""Expert-parallel strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_pardist.axes.by_name import DataParallel, data_parallel_axis
from lightning_pardist.axes.expert import ExpertAxis, ExpertParallelSize
from lightning_pardist.engines.experts.trial import Dispatch
from lightning_pardist.strategies.strategy import PardistStrategy


class ExpertParallelStrategy(PardistStrategy):
    """Expert parallel: each rank has some of the experts of every layer, and samples of its own.

    Experts are found in a trial of the user's step: a list of equal modules, or parameters stacked along an expert dim,
    near which a router chooses among as many. Tokens travel by all-to-all to the ranks that have their experts, and
    results back, as many as the router sends (none is dropped that the module keeps). A layer for which that would not
    give what the module computes, which is tried, gathers its experts' weights instead. Gradients of experts are
    averaged over the ranks that share them, all others as under data parallelism.

    Args:
        expert_parallel_size: Ranks that hold the experts of a layer together, which divides their number; ``"auto"``
            for all of them.
        experts: Names of the lists, or of the modules that own stacked parameters, that are taken for experts, with
            ``*`` for any part; found by the router near them if None.
        expert_dispatch: What travels: ``"tokens"``, ``"weights"``, or ``"auto"``: tokens where a trial shows that it
            gives the same.
        log_expert_load: Whether the module logs in each training step, for each layer whose tokens travel, how many
            tokens of all ranks its most loaded expert has had, over the mean of its experts:
            ``"expert_load/<name>"``. It costs one exchange of a number for each expert.
        data_parallel: What the data axis does: ``"ddp"`` replicates; ``"zero1"``, ``"zero2"`` and ``"zero3"`` shard
            over all ranks, and what is of experts over the ranks that share them.
        data_settings: Settings of the data axis' own strategy, ``{"bucket_size_mb": 50}`` say.
        **kwargs: See :class:`~lightning_pardist.strategies.strategy.PardistStrategy`.

    Raises:
        ValueError: If a setting is out of range; during a run, if no experts are found, or they do not divide.
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
