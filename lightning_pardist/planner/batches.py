"""Inspection and resizing of sample batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_pardist.compat.pytree import tree_leaves, tree_map_only
from lightning_pardist.planner.errors import PlanError
from lightning_pardist.planner.words import sentence


def first_batch(data: Any) -> Any:
    """Return the first batch of a loader or a data module, or the given batch.

    Raises:
        PlanError: If there is no batch, or no tensor in it, or the data's own code fails (its error is the cause).
    """
    kind = type(data).__name__
    if isinstance(data, pl.LightningDataModule):
        with _naming(f"{kind}.prepare_data()"):
            data.prepare_data()
        with _naming(f"{kind}.setup('fit')"):
            data.setup("fit")
        with _naming(f"{kind}.train_dataloader()"):
            data = data.train_dataloader()
    if hasattr(data, "__iter__") and not isinstance(data, (Tensor, Mapping, tuple, list, str)):
        with _naming(f"the first batch of {kind}"):
            data = next(iter(data), None)
    if data is None:
        raise PlanError("There is no batch: pass a batch, a DataLoader that is not empty, or a LightningDataModule.")
    if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(data)):
        raise PlanError(f"The batch, a {type(data).__name__}, contains no tensor, so nothing can be planned with it.")
    return data


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Context that raises errors of the data's code as :class:`PlanError` with the failing call."""
    try:
        yield
    except Exception as error:
        raise PlanError(f"{what} failed: {type(error).__name__}: {sentence(error)}") from error


def samples_of(batch: Any) -> int:
    """Return the most frequent size of dim 0 over a batch's tensors; 0 if no tensor has dims."""
    sizes = [leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
    return max(set(sizes), key=sizes.count) if sizes else 0


def tokens_of(batch: Any) -> int:
    """Return the number of elements of the largest 2-dim integer tensor; 0 if there is none."""
    found = [leaf.numel() for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim == 2
             and not leaf.is_floating_point() and not leaf.is_complex() and leaf.dtype != torch.bool]  # fmt: skip
    return max(found, default=0)


def resized(batch: Any, samples: int) -> Any:
    """Return a batch with a number of samples, repeating or dropping samples of the given one.

    Args:
        batch: Batch with samples along dim 0 of its tensors; tensors of other lengths are not changed.
        samples: Number of samples.
    """
    have = samples_of(batch)
    if have in (0, samples):
        return batch
    index = torch.arange(samples) % have
    return tree_map_only(Tensor, lambda leaf: leaf[index] if leaf.ndim and leaf.shape[0] == have else leaf, batch)
