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

    How is found out by one run of the module's own step on a batch, of which nothing remains: pairs of linear layers,
    attention by heads, embeddings and output heads by vocabulary, convolutions by channels; the rest stays whole on
    every rank. The plan, with the collectives that a step will send, is logged at the start. User code keeps its global
    shapes; an operator that cannot run on parts runs on whole tensors, and is named in the plan.

    Each rank holds about ``1/t`` of parameters, gradients and optimizer state (t tensor ranks). Outside of steps
    parameters are ``DTensor``s; checkpoints are Lightning's plain ones, and the module is plain again after the run.

    Args:
        tensor_parallel_size: Ranks over which a layer is split; ``"auto"`` for all of them, ``"node"`` for those of one
            node. The other ranks make up the data axis.
        plan: Overrides what is found: glob patterns of module or parameter names to ``"column"``, ``"row"``,
            ``"vocab"``, ``"replicate"`` or a torch ``ParallelStyle``.
        on_indivisible: What to do with an entry of ``plan`` whose size the tensor size does not divide: ``"error"`` or
            ``"replicate"``.
        sequence_parallel: Keep activations between split layers split along the sequence, dim 1 of three. Sends the
            same, and holds ``1/t`` of them.
        data_parallel: What the data axis does: ``"ddp"`` replicates, ``"zero1"``, ``"zero2"`` and ``"zero3"`` shard.
        data_settings: Settings of the data axis' own strategy, ``{"bucket_size_mb": 50}`` say.
        sample: A batch to run the step on, or a function that makes one. By default the first one of its loader, or
            the module's ``example_input_array`` where that cannot be read unnoticed.
        init: Gives values to the own parameters of one submodule that was built on ``meta``, in place of its
            ``reset_parameters``. Such a module is created layer by layer, of which each rank keeps its part.
        **kwargs: See :class:`~lightning_pardist.strategies.strategy.PardistStrategy`.

    Raises:
        ValueError: If a setting is out of range; during a run, if ``plan`` does not fit the module, no sample can be
            had, or a callback needs whole parameters.
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
        """How a module would be split, without any process group: ``print`` it. Not collective; changes nothing.

        Args:
            module: As it is before training, on any device.
            sample: A batch as ``training_step`` takes it, on the module's device.
            tensor_parallel_size: Number of tensor ranks.
            plan: As for the strategy.
            on_indivisible: As for the strategy.
            sequence_parallel: As for the strategy.

        Raises:
            ValueError: If ``plan`` does not fit the module.
        """
        axis = TensorAxis(plan=plan, on_indivisible=on_indivisible, sequence_parallel=sequence_parallel)
        with trial_run.without_trace(module):
            return axis.find_plan(
                module,
                lambda: trial_run.run(module, "training_step", sample),
                tp_size=tensor_parallel_size,
            )
