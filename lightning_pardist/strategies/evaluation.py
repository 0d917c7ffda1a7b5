"""Evaluation that sees every sample once, on any number of ranks.

Lightning's sampler repeats samples until the dataset divides by the number of ranks, so that metrics come out wrong by
the repeated ones. Here no sample is repeated, and every rank still runs the same number of batches: where a rank has a
sample less, one of its batches is split in two. Only where nothing can be split (batches of one sample) does a rank run
out a batch early. It then gets a *filler* batch, which the strategy does not hand to the user's step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lightning.fabric.utilities.data import _reinstantiate_wrapped_cls
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.data import _get_dataloader_init_args_and_kwargs, _update_dataloader
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler

_EXACT_STAGES = (RunningStage.SANITY_CHECKING, RunningStage.VALIDATING, RunningStage.TESTING)


class ShardSampler(Sampler[int]):
    """Every ``num_replicas``-th index of another sampler, none repeated and none dropped.

    Args:
        sampler: The indices of one process, the same on every rank.
        num_replicas: Ranks that share them.
        rank: Which share to take, ``0 <= rank < num_replicas``.
        limit: Use only this many of the indices.
    """

    def __init__(
        self, sampler: Sequence[int] | Sampler[int], *, num_replicas: int, rank: int, limit: int | None = None
    ) -> None:
        self.sampler = sampler
        self.num_replicas = num_replicas
        self.rank = rank
        total = len(sampler)  # type: ignore[arg-type]
        self.total = total if limit is None else min(total, limit)

    def __iter__(self) -> Iterator[int]:
        for position, index in enumerate(self.sampler):
            if position >= self.total:
                return
            if position % self.num_replicas == self.rank:
                yield index

    def __len__(self) -> int:
        return (self.total - self.rank + self.num_replicas - 1) // self.num_replicas

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the sampler underneath, if it wants it."""
        if callable(set_epoch := getattr(self.sampler, "set_epoch", None)):
            set_epoch(epoch)


class EvenBatchSampler(BatchSampler):
    """Batches of a :class:`ShardSampler`, as many on every rank.

    Attributes:
        filler_batches: Batches at the end that are fillers on this rank (0 or 1).
    """

    def __init__(self, sampler: ShardSampler, batch_size: int) -> None:
        super().__init__(sampler, batch_size, drop_last=False)
        self.shard = sampler
        most = math.ceil(sampler.total / sampler.num_replicas)
        self.num_batches = math.ceil(most / batch_size)
        self.sizes = _batch_sizes(len(sampler), self.num_batches, batch_size)
        self.filler_batches = self.num_batches - len(self.sizes)

    def __iter__(self) -> Iterator[list[int]]:
        indices = iter(self.shard)
        for size in self.sizes:
            yield [next(indices) for _ in range(size)]
        for _ in range(self.filler_batches):
            yield [next(iter(self.shard.sampler))]

    def __len__(self) -> int:
        return self.num_batches


def _batch_sizes(samples: int, batches: int, batch_size: int) -> list[int]:
    """Sizes of ``batches`` batches, or of one less where there are not samples enough to fill them."""
    full, rest = divmod(samples, batch_size)
    sizes = [batch_size] * full + ([rest] if rest else [])
    if len(sizes) < batches and sizes and sizes[-1] > 1:
        last = sizes.pop()
        sizes += [last - last // 2, last // 2]
    return sizes


class ExactEvaluation:
    """Makes the Trainer's evaluation loaders see every sample once.

    Args:
        trainer: Whose loaders are changed, as far as Lightning itself would put a distributed sampler into them.
        num_replicas: Ranks that see different samples.
        rank: This rank among them.
    """

    def __init__(self, trainer: Trainer, *, num_replicas: int, rank: int) -> None:
        self.num_replicas = num_replicas
        self.rank = rank
        self._trainer = trainer
        self._connector: Any = trainer._data_connector
        self._original = self._connector._prepare_dataloader
        self._steps = 0

    def attach(self) -> None:
        """Change loaders from now on."""
        self._connector._prepare_dataloader = self._prepare

    def detach(self) -> None:
        """Leave the Trainer as it was."""
        self._connector.__dict__.pop("_prepare_dataloader", None)

    def start(self) -> None:
        """An evaluation begins."""
        self._steps = 0

    def next_is_filler(self) -> bool:
        """Whether the batch of the next step is a filler; call once a step."""
        step, self._steps = self._steps, self._steps + 1
        loop: Any = self._trainer._evaluation_loop
        if not loop._is_sequential:
            return False
        for loader, batches in zip(loop._combined_loader.flattened, loop.max_batches, strict=True):
            if step < batches:
                sampler = getattr(loader, "batch_sampler", None)
                return isinstance(sampler, EvenBatchSampler) and step >= len(sampler.sizes)
            step -= int(batches)
        return False

    def _prepare(self, dataloader: object, shuffle: bool, mode: RunningStage) -> object:
        if not isinstance(dataloader, DataLoader) or not self._connector._requires_distributed_sampler(dataloader):
            return self._original(dataloader, shuffle, mode)
        if mode == RunningStage.PREDICTING:
            self._allow_rank_without_predictions(dataloader)
            return self._original(dataloader, shuffle, mode)
        if mode not in _EXACT_STAGES:
            return self._original(dataloader, shuffle, mode)
        return self._exact(dataloader, mode)

    def _exact(self, dataloader: DataLoader[Any], mode: RunningStage) -> DataLoader[Any]:
        # As Lightning does: the dataset's own order, unless the user brought a sampler of another kind.
        own = dataloader.sampler
        plain = isinstance(own, RandomSampler | SequentialSampler)
        order: Any = range(len(dataloader.dataset)) if plain else own  # type: ignore[arg-type]
        if type(dataloader.batch_sampler) is not BatchSampler or dataloader.batch_size is None:
            shard = ShardSampler(order, num_replicas=self.num_replicas, rank=self.rank)
            return _update_dataloader(dataloader, shard, mode=mode)
        batch_size = dataloader.batch_size
        limit = len(order) // batch_size * batch_size if dataloader.drop_last else None
        shard = ShardSampler(order, num_replicas=self.num_replicas, rank=self.rank, limit=limit)
        args, kwargs = _get_dataloader_init_args_and_kwargs(dataloader, shard, mode)
        kwargs["drop_last"] = False
        fewest, most = shard.total // self.num_replicas, math.ceil(shard.total / self.num_replicas)
        if math.ceil(fewest / batch_size) != math.ceil(most / batch_size):
            kwargs.update(batch_sampler=EvenBatchSampler(shard, batch_size), sampler=None, shuffle=False, batch_size=1)
        return _reinstantiate_wrapped_cls(dataloader, *args, **kwargs)  # type: ignore[no-any-return]

    def _allow_rank_without_predictions(self, dataloader: DataLoader[Any]) -> None:
        """Fewer samples than ranks: a rank without any has nothing to predict, which Lightning has to be told."""
        sampler = dataloader.sampler
        if isinstance(sampler, Iterable) and len(sampler) < self.num_replicas:  # type: ignore[arg-type]
            self._trainer.lightning_module.allow_zero_length_dataloader_with_multiple_devices = True
