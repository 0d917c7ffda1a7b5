"""``DataLoader``: which sampler its iterators ask, and another one in its place."""

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
    """What a loader's iterators draw from: indices, or lists of them."""
    return loader._index_sampler


def index_sampler_name(loader: DataLoader[Any]) -> str:
    """The attribute that it is looked up by."""
    return "batch_sampler" if loader._auto_collation else "sampler"


def batches_of(loader: DataLoader[Any]) -> BatchSampler | None:
    """Torch's own sampler of batches: ``batch_sampler``, or ``sampler`` beside ``batch_size=None``.

    None if there is another, or if the loader has made an iterator for itself, which draws from what there was.
    """
    if any(isinstance(each, _BaseDataLoaderIter) for name, each in vars(loader).items() if name != "_iterator"):
        return None
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return sampler if type(sampler) is BatchSampler else None


def with_batches(loader: DataLoader[Any], batches: Iterable[Any]) -> DataLoader[Any]:
    """A copy of a loader that draws from another sampler of batches.

    The constructor of the loader's class is not called: that of a subclass may do anything with its arguments.
    """
    made = copy.copy(loader)
    made.__dict__["_iterator"] = None
    made.__dict__[index_sampler_name(loader)] = batches
    if isinstance(batches, BatchSampler) and loader.batch_sampler is not None:
        made.__dict__["sampler"] = batches.sampler
    return made
