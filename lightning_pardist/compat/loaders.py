"""``DataLoader``: the sampler that its iterators draw from, and copies with another sampler."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lightning_pardist.compat.contract import Private

_RESUME = "going on in the middle of an epoch without loading what was trained on"
NAMES = (
    Private("torch.utils.data.DataLoader._index_sampler", _RESUME, "load batches and drop them"),
    Private("torch.utils.data.DataLoader._auto_collation", _RESUME, "batch_sampler is not None"),
    Private(
        "torch.utils.data.dataloader._BaseDataLoaderIter",
        "loaders that keep an iterator of their own",
        "a loader made anew",
    ),
    Private("torch.utils.data.DataLoader._iterator", "copies of loaders with persistent workers", "a loader made anew"),
)


def index_sampler(loader: DataLoader[Any]) -> Any:
    """Return the sampler that a loader's iterators draw from: it yields indices, or lists of them."""
    return loader._index_sampler


def index_sampler_name(loader: DataLoader[Any]) -> str:
    """Return the name of the loader's attribute that holds the index sampler."""
    return "batch_sampler" if loader._auto_collation else "sampler"


def batches_of(loader: DataLoader[Any]) -> BatchSampler | None:
    """Return torch's own batch sampler: ``batch_sampler``, or ``sampler`` together with ``batch_size=None``.

    None if the sampler is of another class, or if the loader holds an iterator of its own, which draws from the old
    sampler.
    """
    if any(isinstance(each, _BaseDataLoaderIter) for name, each in vars(loader).items() if name != "_iterator"):
        return None
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return sampler if type(sampler) is BatchSampler else None


def with_batches(loader: DataLoader[Any], batches: Iterable[Any]) -> DataLoader[Any]:
    """Return a copy of a loader that draws from another batch sampler.

    The constructor of the loader's class is not called: a subclass may do anything with its arguments.
    """
    made = copy.copy(loader)
    made.__dict__["_iterator"] = None
    made.__dict__[index_sampler_name(loader)] = batches
    if isinstance(batches, BatchSampler) and loader.batch_sampler is not None:
        made.__dict__["sampler"] = batches.sampler
    return made
