"""Transfer of predictions from ranks started by fork or spawn to the calling process.

They go through files: a rank has exited before the caller reads its result, and a pipe's buffer is too small.
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
    """Temporary folder that the calling process creates, ranks write to, and the calling process reads and removes."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="pardist-predictions-"))

    def send(self, predictions: list[Any] | None, *, batch_rank: int, several_loaders: bool) -> None:
        """Write this rank's predictions, unless a rank with the same samples has written them.

        Args:
            predictions: Predictions by batch; with several loaders, by loader and batch. None if there were no samples.
            batch_rank: Index of this rank's part of the samples.
            several_loaders: Whether the predictions are nested by loader.
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
        """Return the predictions of all ranks: the first batch of each rank, the second of each, and so on."""
        files = sorted(
            (path for path in self._folder.iterdir() if path.name.isdigit()), key=lambda path: int(path.name)
        )
        if not files:
            return None
        by_rank = [torch.load(path, weights_only=False) for path in files]
        if len(files) > 1:
            rank_zero_info(
                f"trainer.predict returns the batches of {len(files)} ranks interleaved: the first batch of each rank,"
                " then the second."
            )
        loaders = [
            [batch for batch in chain.from_iterable(zip_longest(*parts, fillvalue=_MISSING)) if batch is not _MISSING]
            for parts in zip(*by_rank, strict=True)
        ]
        return loaders if len(loaders) > 1 else loaders[0]

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)
