"""``DataLoader``: which sampler its iterators ask."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from lightning_pardist.compat.contract import Private

_RESUME = "going on in the middle of an epoch without loading what was trained on"
NAMES = (
    Private("torch.utils.data.DataLoader._index_sampler", _RESUME, "load batches and drop them"),
    Private("torch.utils.data.DataLoader._auto_collation", _RESUME, "batch_sampler is not None"),
)


def index_sampler(loader: DataLoader[Any]) -> Any:
    """What a loader's iterators draw from: indices, or lists of them."""
    return loader._index_sampler


def index_sampler_name(loader: DataLoader[Any]) -> str:
    """The attribute that it is looked up by."""
    return "batch_sampler" if loader._auto_collation else "sampler"
