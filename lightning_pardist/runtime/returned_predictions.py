"""Predictions on their way from ranks by fork or spawn to the process that called for them.

They go through files: a rank has ended before its caller reads what it returned, and a pipe takes next to nothing.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

_MISSING = object()


class ReturnedPredictions:
    """A folder that the caller makes, ranks write to, and the caller reads and removes."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="pardist-predictions-"))

    def send(self, predictions: list[Any] | None, *, batch_rank: int, several_loaders: bool) -> None:
        """Write what this rank has predicted, unless a rank with the same samples has.

        Args:
            predictions: By batch; with several loaders, by loader and batch. None where there were no samples.
            batch_rank: Which part of the samples this rank had.
            several_loaders: Whether they are by loader.
        """
        if predictions is None or (file := self._folder / str(batch_rank)).exists():
            return
        by_loader = predictions if several_loaders else [predictions]
        unfinished = self._folder / f"{batch_rank}.{os.getpid()}"
        try:
            torch.save(by_loader, unfinished)
        except Exception as error:
            rank_zero_warn(
                "trainer.predict returns None: ranks are started by fork or spawn (a notebook, say), and what"
                f" predict_step returns cannot be pickled ({error}). Return tensors, write predictions by a"
                " BasePredictionWriter callback, or predict with devices=1."
            )
            return
        unfinished.rename(file)

    def receive(self) -> list[Any] | None:
        """The predictions of all ranks: the first batch of each, the second of each, and so on."""
        files = sorted(
            (path for path in self._folder.iterdir() if path.name.isdigit()), key=lambda path: int(path.name)
        )
        if not files:
            return None
        by_rank = [torch.load(path, weights_only=False) for path in files]
        if len(files) > 1:
            rank_zero_info(
                f"trainer.predict returns the batches of {len(files)} ranks in turns: the first of each, then the"
                " second."
            )
        loaders = [
            [batch for batch in chain.from_iterable(zip_longest(*parts, fillvalue=_MISSING)) if batch is not _MISSING]
            for parts in zip(*by_rank, strict=True)
        ]
        return loaders if len(loaders) > 1 else loaders[0]

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)
