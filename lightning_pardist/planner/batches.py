"""What is in a sample batch, and batches of another size like it."""

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
    """The batch of a loader or a data module, or the batch that was given.

    Raises:
        PlanError: If there is none, or no tensor in it, or the data's own code fails, whose error is the cause.
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
        raise PlanError("There is no batch: pass one, a DataLoader that has one, or a LightningDataModule.")
    if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(data)):
        raise PlanError(f"The batch, a {type(data).__name__}, has no tensor in it: nothing can be planned with it.")
    return data


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Say what of the data failed; the error itself is the cause."""
    try:
        yield
    except Exception as error:
        raise PlanError(f"{what} failed: {type(error).__name__}: {sentence(error)}") from error


def samples_of(batch: Any) -> int:
    """The size that the first dims of most of a batch's tensors have; 0 if none has any."""
    sizes = [leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
    return max(set(sizes), key=sizes.count) if sizes else 0


def tokens_of(batch: Any) -> int:
    """Numbers in the largest tensor of integers with two dims; 0 if there is none."""
    found = [leaf.numel() for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim == 2
             and not leaf.is_floating_point() and not leaf.is_complex() and leaf.dtype != torch.bool]  # fmt: skip
    return max(found, default=0)


def resized(batch: Any, samples: int) -> Any:
    """A batch of so many samples, those of the given one repeated or left out.

    Args:
        batch: Its tensors have samples along their first dims; those of other lengths stay as they are.
        samples: How many.
    """
    have = samples_of(batch)
    if have in (0, samples):
        return batch
    index = torch.arange(samples) % have
    return tree_map_only(Tensor, lambda leaf: leaf[index] if leaf.ndim and leaf.shape[0] == have else leaf, batch)
