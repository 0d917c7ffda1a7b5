"""Checks that training uses the configured batch size."""

from __future__ import annotations

import lightning.pytorch as pl
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_pardist.compat.lightning_loops import combined_loader


class ExpectedBatchSize(pl.Callback):
    """Callback that raises before the first step if a training loader has another batch size than configured.

    Args:
        micro_batch_size: Samples per rank and batch; None for any.
        global_batch_size: Samples per optimizer step over all ranks and accumulated batches; None for any.
    """

    def __init__(self, micro_batch_size: int | None = None, global_batch_size: int | None = None) -> None:
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = global_batch_size

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check the batch size of the training loaders.

        Raises:
            ValueError: If it differs from the configured one; the message gives both numbers.
        """
        combined = combined_loader(trainer.fit_loop)
        loaders = [] if combined is None else combined.flattened
        replicas = trainer.distributed_sampler_kwargs["num_replicas"] if trainer.distributed_sampler_kwargs else 1
        for loader in loaders:
            size = getattr(loader.batch_sampler, "batch_size", None) if isinstance(loader, DataLoader) else None
            if size is None:
                continue
            if self.micro_batch_size is not None and size != self.micro_batch_size:
                raise ValueError(
                    f"The training loader has batch_size={size}, but {self.micro_batch_size} samples a rank were asked"
                    f" for. Use DataLoader(batch_size={self.micro_batch_size})."
                )
            found = size * replicas * trainer.accumulate_grad_batches
            if self.global_batch_size is not None and found != self.global_batch_size:
                raise ValueError(
                    f"A step takes {size} samples x {replicas} ranks x {trainer.accumulate_grad_batches} accumulated"
                    f" batches = {found}, but {self.global_batch_size} were asked for. Change the loader's batch_size,"
                    " the number of ranks or accumulate_grad_batches."
                )
