"""Tensor-parallel strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import lightning.pytorch as pl
from torch import nn

from lightning_pardist.axes.by_name import DataParallel, data_parallel_axis
from lightning_pardist.axes.tensor import TensorAxis, TensorParallelSize
from lightning_pardist.engines.tensor import TensorParallelPlan
from lightning_pardist.strategies.strategy import PardistStrategy
from lightning_pardist.trainer import trial_run


class TensorParallelStrategy(PardistStrategy):
    """Tensor parallel: shards each layer's weights over ranks with the same samples (Megatron-LM, arXiv 1909.08053).

    The plan is derived from a trial run of the module's own step on one batch, which leaves no side effects: pairs of
    linear layers are split, attention by heads, embeddings and output heads by vocabulary, convolutions by channels;
    all other parameters are replicated. The plan, with the collectives of a step, is logged at the start. User code
    sees global shapes; an operator that cannot run on shards runs on full tensors and is named in the plan.

    Each rank holds about ``1/t`` of parameters, gradients and optimizer state (t tensor ranks). Outside of steps
    parameters are ``DTensor``s; checkpoints have Lightning's format, and parameters are plain again after the run.

    Args:
        tensor_parallel_size: Number of ranks that a layer is split over; ``"auto"`` for all ranks, ``"node"`` for those
            of one node. The remaining ranks form the data axis.
        plan: Overrides of the derived plan: a mapping from glob patterns of module or parameter names to
            ``"column"``, ``"row"``, ``"vocab"``, ``"replicate"`` or a torch ``ParallelStyle``.
        on_indivisible: What to do with an entry of ``plan`` whose size is not divisible by the tensor size: ``"error"``
            or ``"replicate"``.
        sequence_parallel: Whether activations between split layers are sharded along the sequence, dim 1 of three.
            Communication is the same, and each rank holds ``1/t`` of these activations.
        data_parallel: Kind of data parallelism: ``"ddp"`` replicates, ``"zero1"``, ``"zero2"`` and ``"zero3"`` shard.
        data_settings: Settings of the data-parallel strategy, for example ``{"bucket_size_mb": 50}``.
        sample: A batch for the trial run, or a function that returns one. By default the first batch of the loader, or
            the module's ``example_input_array`` if the loader cannot be read without side effects.
        init: For modules built on ``meta``: a function that initializes the direct parameters of one submodule, in
            place of its ``reset_parameters``. The module is materialized layer by layer, and each rank keeps its
            shards.
        **kwargs: See :class:`~lightning_pardist.strategies.strategy.PardistStrategy`.

    Raises:
        ValueError: If a setting is out of range; during a run, if ``plan`` does not fit the module, no sample
            is available, or a callback needs full parameters.
    """

    def __init__(
        self,
        *,
        tensor_parallel_size: TensorParallelSize = "auto",
        plan: Mapping[str, Any] | None = None,
        on_indivisible: Literal["error", "replicate"] = "error",
        sequence_parallel: bool = False,
        data_parallel: DataParallel = "ddp",
        data_settings: Mapping[str, Any] | None = None,
        sample: Any = None,
        init: Callable[[nn.Module], None] | None = None,
        **kwargs: Any,
    ) -> None:
        tensor = TensorAxis(
            tensor_parallel_size=tensor_parallel_size,
            plan=plan,
            on_indivisible=on_indivisible,
            sequence_parallel=sequence_parallel,
            sample=sample,
            init=init,
        )
        super().__init__(axes=[tensor, data_parallel_axis(data_parallel, **(data_settings or {}))], **kwargs)

    @classmethod
    def plan(
        cls,
        module: pl.LightningModule,
        sample: Any,
        *,
        tensor_parallel_size: int = 2,
        plan: Mapping[str, Any] | None = None,
        on_indivisible: Literal["error", "replicate"] = "error",
        sequence_parallel: bool = False,
    ) -> TensorParallelPlan:
        """Return the plan for a module without a process group, to be printed. Not collective; no side effects.

        Args:
            module: The module before training, on any device.
            sample: A batch for ``training_step``, on the module's device.
            tensor_parallel_size: Number of tensor ranks.
            plan: As for the strategy.
            on_indivisible: As for the strategy.
            sequence_parallel: As for the strategy.

        Raises:
            ValueError: If ``plan`` does not fit the module.
        """
        axis = TensorAxis(plan=plan, on_indivisible=on_indivisible, sequence_parallel=sequence_parallel)
        with trial_run.without_side_effects(module):
            return axis.find_plan(
                module,
                lambda: trial_run.run(module, "training_step", sample),
                tp_size=tensor_parallel_size,
            )
