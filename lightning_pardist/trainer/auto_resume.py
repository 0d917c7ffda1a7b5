"""Resumes a restarted job from the newest checkpoint that it wrote."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import wraps
from typing import Any, Literal

import lightning.pytorch as pl
import torch.distributed as dist
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import ClusterEnvironment
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_pardist.axes.base import RunContext
from lightning_pardist.checkpoint.atomic import local_path, recover
from lightning_pardist.checkpoint.coordination import together, world_coordinator
from lightning_pardist.checkpoint.errors import DamagedCheckpointError
from lightning_pardist.checkpoint.folder import FolderReader
from lightning_pardist.checkpoint.full_file import verify_file
from lightning_pardist.checkpoint.manifest import is_folder, verify_files
from lightning_pardist.collectives import barrier
from lightning_pardist.compat.lightning_loops import checkpoint_connector
from lightning_pardist.runtime.environments.external import ExternalEnvironment
from lightning_pardist.runtime.environments.program import program_key
from lightning_pardist.runtime.job_counts import next_call_number
from lightning_pardist.trainer.checkpoints import Checkpoints

Resume = Literal["auto", "always", "never"]

_FOLDER = "pardist_resume"
_REMEMBERED = 8


@dataclass(frozen=True)
class _Notes:
    """Record for a job's next start: paths of its checkpoints, newest last, and identifiers of its launchers."""

    paths: list[str] = field(default_factory=list)
    starters: list[str] = field(default_factory=list)


class AutoResume:
    """Records the checkpoints of a fit, and resumes a later start of the same job from the newest.

    The record is a file in ``default_root_dir``, one for each job, command and ``fit`` in the script.

    Args:
        trainer: The Trainer, before ``fit`` runs.
        context: Context of its strategy; the process group exists.
        checkpoints: Writes the checkpoints.
        environment: Environment of the launcher that started this process.
        mode: ``"auto"`` resumes if the launcher's data show that this job was started before, ``"always"`` if the same
            command has left a record, ``"never"`` does not.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        context: RunContext,
        checkpoints: Checkpoints,
        environment: ClusterEnvironment | None,
        mode: Resume,
    ) -> None:
        self._trainer = trainer
        self._context = context
        self._checkpoints = checkpoints
        self._mode = mode
        self._environment = environment if isinstance(environment, ExternalEnvironment) else None
        job = self._environment.job_key if self._environment is not None and mode == "auto" else None
        #: Whether this job may be started again, so that a record is useful.
        self._takes_notes = mode == "always" or job is not None
        self._warned = False
        self._starters: list[str] = []
        #: Instance attribute ``save_checkpoint`` of the Trainer before the run, set if user code replaced the method.
        self._saved_by: dict[str, Any] | None = None
        #: The replacement of that method during the run, which user code may replace in turn.
        self._saves: Callable[..., None] | None = None
        # Equal on all ranks, and in a later run of the same script.
        parts = (job, program_key(), f"fit{next_call_number('fits')}")
        self._fs, root = url_to_fs(str(trainer.default_root_dir))
        self._folder = f"{root}/{_FOLDER}/{'-'.join(part for part in parts if part)}"
        #: Path of the checkpoint that a run saves when a signal stops it.
        self.stopped_path = f"{self._folder}/stopped.ckpt"
        self._is_local = isinstance(self._fs, LocalFileSystem)

    def attach(self) -> None:
        """Choose the checkpoint to resume from, and record those that will be written. Collective over the world."""
        if not self._takes_notes:
            return
        trainer = self._trainer
        connector, save, resume = checkpoint_connector(trainer), trainer.save_checkpoint, None
        noted = self._noted() if trainer.is_global_zero else _Notes()
        if self._was_started_before(noted):
            resume = self._newest(self._context.broadcast(noted.paths))
        elif trainer.is_global_zero and self._fs.exists(self._notes_path):
            # Left by another job of the same name.
            with suppress(OSError):
                self._fs.rm(self._notes_path)
        if resume is not None:
            start = connector.resume_start

            @wraps(start)
            def resume_start(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
                rank_zero_info(f"This job was started before: continuing from {resume}.")
                start(resume, weights_only=False)

            connector.__dict__["resume_start"] = resume_start

        if trainer.is_global_zero and not self._is_writable():
            self._warn_about("no part of this path can be written")

        @wraps(save)
        def save_and_note(filepath: Any, weights_only: bool | None = None, storage_options: Any = None) -> None:
            save(filepath, weights_only, storage_options)
            if not weights_only and trainer.is_global_zero:
                self._note(str(filepath))

        self._saved_by = {name: of for name, of in trainer.__dict__.items() if name == "save_checkpoint"}
        trainer.__dict__["save_checkpoint"] = self._saves = save_and_note

    def detach(self) -> None:
        """Restore the Trainer's methods; after a run that ended well, remove the checkpoint of an earlier stop."""
        own = self._trainer.__dict__
        if self._saved_by is not None and own.get("save_checkpoint") is self._saves:
            del own["save_checkpoint"]
            own.update(self._saved_by)
        self._saved_by = self._saves = None
        checkpoint_connector(self._trainer).__dict__.pop("resume_start", None)
        ended_normally = self._trainer.state.status == "running"
        if ended_normally and self._trainer.is_global_zero and self._fs.exists(self.stopped_path):
            # The run has ended well, even if a folder has become read-only.
            with suppress(OSError):
                self._fs.rm(self.stopped_path, recursive=True)

    def save(self) -> str:
        """Save a checkpoint to resume from, which is either complete or absent. Collective over the world.

        Returns:
            Path of the checkpoint.

        Raises:
            OSError: On the first rank, if ``default_root_dir`` cannot be written.
            RuntimeError: On the other ranks, with its reason.
        """
        path = self._name(self.stopped_path)

        def make_folder() -> None:
            if self._trainer.is_global_zero:
                self._fs.makedirs(self._folder, exist_ok=True)

        together(world_coordinator(), f"Saving {path}", make_folder)
        pl.Trainer.save_checkpoint(self._trainer, path, weights_only=False)
        # It may be written in the background, and this process may end next.
        self._checkpoints.finish()
        barrier(self._context.device)
        if self._trainer.is_global_zero:
            self._note(path)
        return path

    def _name(self, path: str) -> str:
        return path if self._is_local else str(self._fs.unstrip_protocol(path))

    def _was_started_before(self, noted: _Notes) -> bool:
        """Return whether any host records an earlier start; later joined hosts do not. Collective over the world."""
        if self._mode == "always" or self._environment is None:
            return self._mode == "always"
        own = (self._environment.restart_count, self._environment.starter)
        group = self._context.distributed.start_group
        everyone: list[Any] = [own] * group.size()
        if group.size() > 1:
            dist.all_gather_object(everyone, own, group=group)
        self._starters = sorted({starter for _, starter in everyone if starter})
        known = bool(set(self._starters) & set(noted.starters))
        return max(count for count, _ in everyone) > 0 or bool(self._context.broadcast(known))

    def _newest(self, paths: list[str]) -> str | None:
        """Return the last of these checkpoints that is complete and unaltered. Collective over the world."""
        return next((path for path in reversed(paths) if self._is_complete(path)), None)

    def _is_complete(self, path: str) -> bool:
        """Return whether a checkpoint of either form exists, complete and unaltered. Collective over the world."""
        group, is_first = self._context.distributed.start_group, self._trainer.is_global_zero
        # A folder is put in its place before other ranks look at it.
        form, reason = self._context.broadcast(_form_of(path) if is_first else (None, None))
        reasons = [reason]
        if form is not None and (form == "folder" or is_first):
            reasons = [_damage(path, form, group.rank(), group.size())]
        if group.size() > 1:
            everyone: list[Any] = [reasons] * group.size()
            dist.all_gather_object(everyone, reasons, group=group)
            reasons = [each for found in everyone for each in found]
        found = [each for each in reasons if each is not None]
        if any(found):
            rank_zero_warn(f"Not continuing from {path}: {next(filter(None, found))}")
        return form is not None and not found

    @property
    def _notes_path(self) -> str:
        return f"{self._folder}/notes.json"

    def _noted(self) -> _Notes:
        try:
            with self._fs.open(self._notes_path) as file:
                return _Notes(**json.load(file))
        except (OSError, ValueError, TypeError):
            return _Notes()

    def _note(self, path: str) -> None:
        """Record a checkpoint; failures are warned about, since training does not need the record."""
        # A path that is written again becomes the newest.
        paths = [*(other for other in self._noted().paths if other != path), path][-_REMEMBERED:]
        part = f"{self._folder}/notes.part"
        try:
            self._fs.makedirs(self._folder, exist_ok=True)
            with self._fs.open(part, "w") as file:
                json.dump(asdict(_Notes(paths, self._starters)), file)
            self._fs.mv(part, self._notes_path)
        except Exception as error:
            # Filesystems have errors of their own. The next checkpoint is recorded if it was a passing one.
            self._warn_about(str(error))

    def _is_writable(self) -> bool:
        """Return False if the folder of the record is local, and neither it nor its next parent can be written."""
        if not self._is_local:
            return True
        known = self._folder
        while not os.path.exists(known) and os.path.dirname(known) != known:
            known = os.path.dirname(known)
        return os.path.isdir(known) and os.access(known, os.W_OK | os.X_OK)

    def _warn_about(self, reason: str) -> None:
        if self._warned:
            return
        self._warned = True
        rank_zero_warn(
            f"Checkpoints of this run cannot be recorded in {self._folder} ({reason}): a restart of the job does not"
            " resume from them by itself, and a signal cannot save. Set default_root_dir to a folder that can be"
            ' written, or resume="never" on the strategy.'
        )


def _form_of(path: str) -> tuple[str | None, str | None]:
    """Return ``"folder"`` or ``"file"``, and None; None and what is wrong with the checkpoint if it has no form."""
    try:
        if (plain := local_path(path)) is not None:
            recover(plain)
        return ("folder" if is_folder(path) else "file"), None
    except OSError as error:
        return None, str(error)


def _damage(path: str, form: str, share: int, shares: int) -> str | None:
    """Return what is wrong with a checkpoint; empty if it does not exist, None if nothing is.

    Args:
        path: The checkpoint.
        form: ``"folder"`` or ``"file"``.
        share: Index of the share of a folder's files to verify.
        shares: Number of shares.
    """
    try:
        if form == "folder":
            verify_files(path, FolderReader(path).manifest, share=share, shares=shares)
        else:
            verify_file(path)
    except FileNotFoundError:
        # Callbacks remove checkpoints that are not among the best.
        return ""
    except (OSError, DamagedCheckpointError) as error:
        return str(error)
    return None
