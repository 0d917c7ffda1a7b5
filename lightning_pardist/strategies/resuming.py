"""A job that is started again goes on from the newest checkpoint that it has written."""

from __future__ import annotations

import itertools
import json
import zipfile
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
import torch.distributed as dist
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_pardist.environments.external import ExternalEnvironment
from lightning_pardist.environments.program import program_key

if TYPE_CHECKING:
    from lightning_pardist.strategies.base import PardistStrategy

Resume = Literal["auto", "always", "never"]
RESUME_MODES = ("auto", "always", "never")

_FOLDER = "pardist_resume"
_REMEMBERED = 8

#: Fits in this process: equal on all ranks, and when the same script runs again.
_fits = itertools.count()


class Resuming:
    """Notes which checkpoints a fit writes, and lets a later start of the same job continue from the newest.

    The notes lie beside the logs, in ``default_root_dir``: one file for each job, command and ``fit`` in the script.

    Args:
        trainer: The Trainer, about to fit.
        strategy: Its strategy; the process group exists.
        mode: ``"auto"`` continues where the launcher says that this job was started before, ``"always"`` wherever the
            same command has left a note, ``"never"`` does not.
    """

    def __init__(self, trainer: pl.Trainer, strategy: PardistStrategy, mode: Resume) -> None:
        self._trainer = trainer
        self._strategy = strategy
        self._mode = mode
        environment = strategy.cluster_environment
        job = environment.job_key if isinstance(environment, ExternalEnvironment) and mode == "auto" else None
        parts = (job, program_key(), f"fit{next(_fits)}")
        self._fs, root = url_to_fs(str(trainer.default_root_dir))
        self._folder = f"{root}/{_FOLDER}/{'-'.join(part for part in parts if part)}"
        #: Where a run that was asked to stop leaves its checkpoint.
        self.stopped_path = f"{self._folder}/stopped.ckpt"
        self._is_local = isinstance(self._fs, LocalFileSystem)

    def attach(self) -> None:
        """Choose the checkpoint to continue from, and note those that will be written. Collective over the world."""
        trainer = self._trainer
        connector, save, resume = trainer._checkpoint_connector, trainer.save_checkpoint, None
        if self._was_started_before():
            resume = self._strategy.broadcast(self._newest() if trainer.is_global_zero else None)
        if resume is not None:
            start = connector.resume_start

            @wraps(start)
            def resume_start(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
                rank_zero_info(f"This job was started before: continuing from {resume}.")
                start(resume, weights_only=False)

            connector.__dict__["resume_start"] = resume_start

        @wraps(save)
        def save_and_note(filepath: Any, weights_only: bool | None = None, storage_options: Any = None) -> None:
            save(filepath, weights_only, storage_options)
            if not weights_only and trainer.is_global_zero:
                self._note(str(filepath))

        if self._mode != "never":
            trainer.__dict__["save_checkpoint"] = save_and_note

    def detach(self) -> None:
        """Give the Trainer its methods back; after a run that has ended well, remove what a stop has left."""
        self._trainer.__dict__.pop("save_checkpoint", None)
        self._trainer._checkpoint_connector.__dict__.pop("resume_start", None)
        ended_well = self._trainer.state.status == "running"
        if ended_well and self._trainer.is_global_zero and self._fs.exists(self.stopped_path):
            self._fs.rm(self.stopped_path, recursive=True)

    def save(self) -> str:
        """Save a checkpoint to continue from: complete or absent. Collective over the world.

        Returns:
            Its path.
        """
        part, first = f"{self._folder}/incomplete.ckpt", self._trainer.is_global_zero
        if first:
            self._fs.makedirs(self._folder, exist_ok=True)
        self._strategy.barrier("folder")
        pl.Trainer.save_checkpoint(self._trainer, self._name(part), weights_only=False)
        if first:
            if self._fs.exists(self.stopped_path):
                self._fs.rm(self.stopped_path, recursive=True)
            self._fs.mv(part, self.stopped_path, recursive=self._fs.isdir(part))
            self._note(self._name(self.stopped_path))
        self._strategy.barrier("saved")
        return self._name(self.stopped_path)

    def _name(self, path: str) -> str:
        return path if self._is_local else str(self._fs.unstrip_protocol(path))

    def _was_started_before(self) -> bool:
        """Whether some host knows of an earlier start: one that joins later does not."""
        if self._mode != "auto":
            return self._mode == "always"
        environment = self._strategy.cluster_environment
        own = environment.restart_count if isinstance(environment, ExternalEnvironment) else 0
        if self._strategy.world_size == 1:
            return own > 0
        counts: list[Any] = [None] * self._strategy.world_size
        dist.all_gather_object(counts, own)
        return bool(max(counts) > 0)

    def _newest(self) -> str | None:
        return next((path for path in reversed(self._noted()) if self._is_complete(path)), None)

    def _noted(self) -> list[str]:
        try:
            with self._fs.open(f"{self._folder}/notes.json") as file:
                return list(json.load(file))
        except (OSError, ValueError):
            return []

    def _note(self, path: str) -> None:
        # A path that is written again becomes the newest.
        paths = [*(other for other in self._noted() if other != path), path][-_REMEMBERED:]
        self._fs.makedirs(self._folder, exist_ok=True)
        with self._fs.open(f"{self._folder}/notes.part", "w") as file:
            json.dump(paths, file)
        self._fs.mv(f"{self._folder}/notes.part", f"{self._folder}/notes.json")

    @staticmethod
    def _is_complete(path: str) -> bool:
        """Whether a checkpoint is there, and its file was written to the end: torch's format has its index there."""
        fs, found = url_to_fs(path)
        if fs.isdir(found):
            return True
        if not fs.exists(found):
            return False
        with fs.open(found, "rb") as file:
            return bool(zipfile.is_zipfile(file))
