"""Exact distributed evaluation: every sample is evaluated once, on any number of ranks.

Lightning's distributed sampler repeats samples until the dataset size is divisible by the number of ranks, which biases
metrics. Here no sample is repeated, and all ranks still run the same number of batches: a rank with one sample fewer
splits its last batch in two. Only if there is nothing to split (batches of one sample) does a rank run out one batch
early. It then receives a *filler* batch, which is not passed to the user's step and hooks, and the other ranks reduce
and gather within that step over the ranks that have a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler
from typing_extensions import override

from lightning_pardist.compat.lightning_functions import update_dataloader
from lightning_pardist.compat.lightning_loops import (
    EVALUATION_STEP,
    PREPARE_DATALOADER,
    REQUIRES_DISTRIBUTED_SAMPLER,
    active_loop,
    combine_mode,
    combine_spec,
    combined_loader,
    data_connector,
    is_sequential,
    logger_connector,
    method,
    replace,
    restore,
)
from lightning_pardist.compat.loaders import batches_of, with_batches
from lightning_pardist.compat.pytree import tree_unflatten
from lightning_pardist.runtime.environments.program import global_seed

_EXACT_STAGES = (RunningStage.SANITY_CHECKING, RunningStage.VALIDATING, RunningStage.TESTING)


class ShardSampler(UnrepeatedDistributedSampler):
    """Sampler of every ``num_replicas``-th index of another sampler, with none repeated and none dropped.

    A subclass of the sampler that Lightning's own strategies use for this, so that ``isinstance`` checks still hold.

    Args:
        sampler: Indices of the whole dataset, in the same order on every rank.
        num_replicas: Number of ranks over which the indices are divided.
        rank: Share of this rank, ``0 <= rank < num_replicas``.
        limit: Use only this many of the indices.
    """

    def __init__(
        self, sampler: Sequence[int] | Sampler[int], *, num_replicas: int, rank: int, limit: int | None = None
    ) -> None:
        # Lightning's constructor raises if a rank would have no sample.
        DistributedSampler.__init__(
            self,
            sampler,  # type: ignore[arg-type]
            num_replicas=num_replicas,
            rank=rank,
            shuffle=False,
            seed=global_seed(),
        )
        self.sampler = sampler
        total = len(sampler)  # type: ignore[arg-type]
        self.total_size = total if limit is None else min(total, limit)
        self.num_samples = _share(self.total_size, rank, num_replicas)

    @override
    def __iter__(self) -> Iterator[int]:  # type: ignore[override]
        for position, index in enumerate(self.sampler):
            if position >= self.total_size:
                return
            if position % self.num_replicas == self.rank:
                yield index

    def __len__(self) -> int:
        return self.num_samples

    @override
    def set_epoch(self, epoch: int) -> None:
        """Forward the epoch to the wrapped sampler, if it has a ``set_epoch``."""
        super().set_epoch(epoch)
        if callable(set_epoch := getattr(self.sampler, "set_epoch", None)):
            set_epoch(epoch)


class ShardBatchSampler(BatchSampler):
    """Batch sampler over a rank's share that forwards ``set_epoch``, also when a loader uses it as ``sampler``."""

    def set_epoch(self, epoch: int) -> None:
        """Forward the epoch to the wrapped sampler."""
        if callable(set_epoch := getattr(self.sampler, "set_epoch", None)):
            set_epoch(epoch)


class EvenBatchSampler(ShardBatchSampler):
    """Batch sampler over a :class:`ShardSampler` with the same number of batches on every rank.

    Attributes:
        filler_batches: Number of filler batches at the end on this rank (0 or 1).
    """

    def __init__(self, sampler: ShardSampler, batch_size: int) -> None:
        super().__init__(sampler, batch_size, drop_last=False)
        self.shard = sampler
        most = math.ceil(sampler.total_size / sampler.num_replicas)
        self.num_batches = math.ceil(most / batch_size)
        self.sizes = _batch_sizes(len(sampler), self.num_batches, batch_size)
        self.filler_batches = self.num_batches - len(self.sizes)
        lengths = [_share(sampler.total_size, rank, sampler.num_replicas) for rank in range(sampler.num_replicas)]
        self._real_batches = [len(_batch_sizes(length, self.num_batches, batch_size)) for length in lengths]

    def ranks_with_batch(self, batch_idx: int) -> list[int]:
        """Return the ranks whose batch at this index is not a filler; equal on every rank."""
        return [rank for rank, batches in enumerate(self._real_batches) if batch_idx < batches]

    def __iter__(self) -> Iterator[list[int]]:
        indices = iter(self.shard)
        for size in self.sizes:
            yield [next(indices) for _ in range(size)]
        for _ in range(self.filler_batches):
            yield [next(iter(self.shard.sampler))]

    def __len__(self) -> int:
        return self.num_batches


def _even_sampler(loader: object) -> EvenBatchSampler | None:
    if not isinstance(loader, DataLoader):
        return None
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return sampler if isinstance(sampler, EvenBatchSampler) else None


def _share(total: int, rank: int, num_replicas: int) -> int:
    return (total - rank + num_replicas - 1) // num_replicas


def _batch_sizes(samples: int, batches: int, batch_size: int) -> list[int]:
    """Return the sizes of ``batches`` batches, or of one fewer if there are not enough samples."""
    full, rest = divmod(samples, batch_size)
    sizes = [batch_size] * full + ([rest] if rest else [])
    if len(sizes) < batches and sizes and sizes[-1] > 1:
        last = sizes.pop()
        sizes += [last - last // 2, last // 2]
    return sizes


class ExactEvaluation:
    """Patches the Trainer so that its evaluation loops process every sample once.

    Args:
        trainer: The Trainer to patch. Only loaders that Lightning would give a distributed sampler are changed.
        group: Process group of the data axis.
        sit_out: Called on a rank that has no samples to predict and skips the predict loop without running hooks.
    """

    def __init__(self, trainer: Trainer, *, group: dist.ProcessGroup, sit_out: Callable[[], None]) -> None:
        self.group = group
        self._join_without_samples = sit_out
        self.num_replicas = group.size()
        self.rank = group.rank()
        self._trainer = trainer
        self._connector: Any = data_connector(trainer)
        self._original = method(self._connector, PREPARE_DATALOADER)
        self._loops: list[Any] = [trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop]
        #: Ranks of the group that have a batch in the current step; None if all have one.
        self.present: list[int] | None = None
        self._told: LightningModule | None = None

    def attach(self) -> None:
        """Patch the loaders and loops."""
        replace(self._connector, PREPARE_DATALOADER, self._prepare)
        for loop in self._loops:
            replace(loop, EVALUATION_STEP, partial(self._step, loop, method(loop, EVALUATION_STEP)))
        if not self._trainer.predicting:
            return
        loop, module = self._trainer.predict_loop, self._trainer.lightning_module
        loop.run = partial(self._predict, loop, loop.run)  # type: ignore[method-assign]
        if not module.allow_zero_length_dataloader_with_multiple_devices:
            # With fewer samples than ranks, some ranks have nothing to predict.
            module.allow_zero_length_dataloader_with_multiple_devices = True
            self._told = module

    def detach(self) -> None:
        """Restore the Trainer."""
        restore(self._connector, PREPARE_DATALOADER)
        for loop in self._loops:
            restore(loop, EVALUATION_STEP)
        self._trainer.predict_loop.__dict__.pop("run", None)
        if self._told is not None:
            self._told.allow_zero_length_dataloader_with_multiple_devices = False
            self._told = None

    def _predict(self, loop: Any, run: Callable[[], Any]) -> Any:
        """Replacement for the predict loop's ``run``."""
        predictions = run()
        if loop.skip:
            self._join_without_samples()
        return predictions

    def _step(
        self, loop: Any, original: Callable[..., None], batch: Any, batch_idx: int, dataloader_idx: int, *rest: Any
    ) -> None:
        """Replacement for the loop's step, including its hooks and progress tracking."""
        loaders = combined_loader(loop).flattened
        if is_sequential(loop):
            sampler = _even_sampler(loaders[dataloader_idx])
            present = list(range(self.num_replicas)) if sampler is None else sampler.ranks_with_batch(batch_idx)
        else:
            batch, present = self._parallel_batch(loop, batch, batch_idx)
        if self.rank not in present:
            self._skip(loop, batch, dataloader_idx)
            return
        self.present = present if len(present) < self.num_replicas else None
        try:
            original(batch, batch_idx, dataloader_idx, *rest)
        finally:
            self.present = None

    def _parallel_batch(self, loop: Any, batch: Any, batch_idx: int) -> tuple[Any, list[int]]:
        """Return the batch and the ranks that have one for a :class:`CombinedLoader` that reads all loaders in step."""
        everyone = range(self.num_replicas)
        samplers = [_even_sampler(loader) for loader in combined_loader(loop).flattened]
        have = [list(everyone) if one is None else one.ranks_with_batch(batch_idx) for one in samplers]
        combined = combined_loader(loop)
        if combine_mode(combined) == "min_size":
            return batch, [rank for rank in everyone if all(rank in ranks for ranks in have)]
        if combine_mode(combined) == "max_size":
            # An exhausted loader contributes None, as on one process.
            pieces = combine_spec(combined).flatten_up_to(batch)
            pieces = [piece if self.rank in ranks else None for piece, ranks in zip(pieces, have, strict=True)]
            batch = tree_unflatten(pieces, combine_spec(combined))
        return batch, [rank for rank in everyone if any(rank in ranks for ranks in have)]

    def _skip(self, loop: Any, batch: Any, dataloader_idx: int) -> None:
        progress = loop.batch_progress
        progress.increment_ready()
        logger_connector(self._trainer).on_batch_start(
            batch, dataloader_idx if is_sequential(loop) and loop.num_dataloaders > 1 else None
        )
        progress.increment_started()
        progress.increment_processed()
        logger_connector(self._trainer).on_batch_end()
        progress.increment_completed()

    def own_batch_counts(self) -> list[int]:
        """Return how many batches of each loader this rank runs in the evaluation that is starting, without fillers.

        Outside of prediction, 0 stands for a loader without an :class:`EvenBatchSampler`.
        """
        trainer = self._trainer
        if trainer.predicting:
            return [] if trainer.predict_loop.skip else [int(number) for number in trainer.num_predict_batches]
        combined: Any = combined_loader(active_loop(trainer))
        samplers = [_even_sampler(loader) for loader in combined.flattened]
        return [0 if one is None else one.num_batches - one.filler_batches for one in samplers]

    def _is_distributed(self, dataloader: DataLoader[Any]) -> bool:
        # Looked up on each call: it is patched when the samples are not divided over ranks.
        return bool(method(self._connector, REQUIRES_DISTRIBUTED_SAMPLER)(dataloader))

    def _prepare(self, dataloader: object, shuffle: bool, mode: RunningStage) -> object:
        if not isinstance(dataloader, DataLoader) or not self._is_distributed(dataloader):
            return self._original(dataloader, shuffle, mode)
        if mode == RunningStage.PREDICTING:
            shard = ShardSampler(_order(dataloader.sampler), num_replicas=self.num_replicas, rank=self.rank)
            return update_dataloader(dataloader, shard, mode=mode)
        batches = batches_of(dataloader)
        if batches is not None and isinstance(batches.sampler, DistributedSampler):
            # The inner sampler is distributed already: each rank has its share, as with a loader of single samples.
            return with_batches(dataloader, batches)
        if mode in _EXACT_STAGES:
            return self._exact(dataloader, batches, mode)
        if batches is None or (type(dataloader) is DataLoader and dataloader.batch_size is not None):
            return self._original(dataloader, shuffle, mode)
        # Lightning re-instantiates a DataLoader subclass, whose constructor may do more than forward its arguments. A
        # custom batch sampler would lose its batch size there, or have its batches divided although each rank draws
        # them independently.
        return with_batches(dataloader, self._share_of(dataloader, batches, shuffle=shuffle))

    def _share_of(self, dataloader: DataLoader[Any], batches: BatchSampler, *, shuffle: bool) -> BatchSampler:
        """Return a batch sampler over this rank's share for training, drawn as Lightning does for a plain loader."""
        settings: dict[str, Any] = {
            "num_replicas": self.num_replicas,
            "rank": self.rank,
            "seed": global_seed(),
            "shuffle": shuffle and not self._trainer.overfit_batches,  # type: ignore[attr-defined]
        }
        own = batches.sampler
        if dataloader.batch_size is None:
            settings["shuffle"] = isinstance(own, RandomSampler)
        if isinstance(own, RandomSampler | SequentialSampler):
            sampler: DistributedSampler[Any] = DistributedSampler(own.data_source, **settings)  # type: ignore[arg-type]
        else:
            sampler = DistributedSamplerWrapper(own, **settings)
        return ShardBatchSampler(sampler, batches.batch_size, batches.drop_last)

    def _exact(self, dataloader: DataLoader[Any], batches: BatchSampler | None, mode: RunningStage) -> DataLoader[Any]:
        if batches is None:
            shard = ShardSampler(_order(dataloader.sampler), num_replicas=self.num_replicas, rank=self.rank)
            return update_dataloader(dataloader, shard, mode=mode)
        order, batch_size = _order(batches.sampler), batches.batch_size
        limit = len(order) // batch_size * batch_size if batches.drop_last else None
        shard = ShardSampler(order, num_replicas=self.num_replicas, rank=self.rank, limit=limit)
        fewest, most = shard.total_size // self.num_replicas, math.ceil(shard.total_size / self.num_replicas)
        if math.ceil(fewest / batch_size) != math.ceil(most / batch_size):
            return with_batches(dataloader, EvenBatchSampler(shard, batch_size))
        return with_batches(dataloader, ShardBatchSampler(shard, batch_size, drop_last=False))


def _order(own: Any) -> Any:
    """Return the evaluation order, as in Lightning: the dataset's own, unless the user passed a custom sampler."""
    return range(len(own.data_source)) if isinstance(own, RandomSampler | SequentialSampler) else own
