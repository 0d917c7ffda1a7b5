"""Constant global batch size on any number of ranks, by gradient accumulation."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.utils.data import BatchSampler, DataLoader
from typing_extensions import override


class GlobalBatchSize(pl.Callback):
    """Fixes the number of samples per optimizer step, whatever the number of ranks.

    A rank's batch size is that of its training loader, or the largest smaller size that divides its share, and as many
    batches as needed are accumulated. The samples of a step are then the same on any number of ranks, for a
    ``DistributedSampler`` and a dataset whose length is a multiple of the global batch. Settings that Lightning counts
    in batches (``limit_train_batches``, ``val_check_interval``) count these batches; steps and epochs do not change.

    Args:
        global_batch_size: Samples of one optimizer step, over all ranks and accumulated batches. Preferably a multiple
            of every number of ranks that may take part.

    Raises:
        ValueError: If it is not positive; at the start of a run, if ranks or loaders do not fit it, or if another
            setting accumulates gradients as well.
    """

    def __init__(self, global_batch_size: int) -> None:
        if global_batch_size < 1:
            raise ValueError(f"global_batch_size={global_batch_size} is not positive. Use the samples of one step.")
        self.global_batch_size = global_batch_size
        self._batches: int | None = None
        #: Functions that undo the changes to strategy and loaders.
        self._at_end: list[Callable[[], object]] = []

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Adjust the training loaders when the Trainer sets them up."""
        if stage != "fit":
            return
        # Left from the last run: a checkpoint saved after it stores how gradients were accumulated.
        if trainer.accumulate_grad_batches == self._batches:
            trainer.accumulate_grad_batches = 1
        self._batches = None
        self._refuse_other_accumulation(trainer, pl_module)
        strategy = trainer.strategy
        process = strategy.process_dataloader

        @wraps(process)
        def fit_and_process(dataloader: object) -> object:
            if trainer.training:
                self._fit(trainer, dataloader)
            return process(dataloader)

        strategy.__dict__["process_dataloader"] = fit_and_process
        self._at_end.append(lambda: strategy.__dict__.pop("process_dataloader", None))

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Restore strategy and loaders."""
        while self._at_end:
            self._at_end.pop()()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Restore strategy and loaders after a failed run."""
        self.teardown(trainer, pl_module, "fit")

    def _refuse_other_accumulation(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        other, callbacks = "", trainer.callbacks  # type: ignore[attr-defined]
        if trainer.accumulate_grad_batches != 1:
            other = f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches})"
        elif any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks):
            other = "GradientAccumulationScheduler"
        elif not module.automatic_optimization:
            other = "manual optimization"
        if other:
            raise ValueError(
                f"GlobalBatchSize({self.global_batch_size}) decides how many batches are accumulated, and so does"
                f" {other}. Remove one of the two."
            )

    def _fit(self, trainer: pl.Trainer, loader: object) -> None:
        """Set a training loader's batch size and the number of accumulated batches.

        Raises:
            ValueError: If they cannot make up the global batch.
        """
        replicas = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
        wanted = self.global_batch_size
        if wanted % replicas:
            raise ValueError(
                f"global_batch_size={wanted} cannot be divided evenly among {replicas} data-parallel ranks. Use a"
                f" multiple of {replicas}, such as {-(-wanted // replicas) * replicas}, or another number of ranks."
            )
        sampler = loader.batch_sampler if isinstance(loader, DataLoader) else None
        size = getattr(sampler, "batch_size", None)
        if not isinstance(size, int):
            raise ValueError(
                f"GlobalBatchSize({wanted}) cannot determine how many samples a batch of {type(loader).__name__} has."
                " Use a DataLoader(batch_size=...), or a batch_sampler with a batch_size."
            )
        share = wanted // replicas
        fitting = next(number for number in range(min(size, share), 0, -1) if share % number == 0)
        if fitting != size:
            self._resize(loader, sampler, size, fitting)
        batches = share // fitting
        # Loaders are set up twice if configure_optimizers needs the number of steps.
        before = trainer.accumulate_grad_batches if self._batches is None else self._batches
        if before != batches and (self._batches is not None or before != 1):
            raise ValueError(
                f"GlobalBatchSize({wanted}) has to accumulate {batches} batches of this training loader, but another"
                f" loader or setting needs {before}. Give all training loaders the same batch_size, and leave"
                " accumulation to this callback."
            )
        self._batches = batches
        trainer.accumulate_grad_batches = batches
        rank_zero_info(f"A step takes {fitting} samples x {replicas} ranks x {batches} batches = {wanted} samples.")

    def _resize(self, loader: Any, sampler: Any, size: int, fitting: int) -> None:
        if type(sampler) is not BatchSampler:
            raise ValueError(
                f"Batches of {size} samples do not add up to global_batch_size={self.global_batch_size}, and the batch"
                f" size of a {type(sampler).__name__} cannot be changed. Have it make batches of {fitting}."
            )

        def set_size(number: int) -> None:
            sampler.batch_size = number
            # DataLoader refuses assignment to it; the length of an iterable-style loader is computed from it.
            loader.__dict__["batch_size"] = number

        set_size(fitting)
        self._at_end.append(lambda: set_size(size))
