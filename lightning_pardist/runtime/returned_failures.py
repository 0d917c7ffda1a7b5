"""Failure reports of ranks started by fork or spawn, for the calling process.

They are returned in files, since a pipe holds 64 KiB before it blocks the writer: a rank that is killed meanwhile
leaves half a message, on which the reader would wait.
"""

from __future__ import annotations

import pickle
import shutil
import tempfile
import time
from pathlib import Path

from lightning_pardist.runtime.watchdog import FailureReport


class ReturnedFailures:
    """Temporary folder that the calling process creates, failing ranks write to, and the calling process removes."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="pardist-failures-"))

    def send(self, report: FailureReport) -> None:
        """Write this rank's report."""
        file = self._folder / f"{time.monotonic_ns():020d}.{max(report.rank, 0)}"
        unfinished = file.with_name(f"unfinished-{file.name}")
        unfinished.write_bytes(pickle.dumps(report))
        unfinished.rename(file)

    def first(self) -> FailureReport | None:
        """Return the report that was written first; None if there is none."""
        files = sorted(path for path in self._folder.iterdir() if path.name[0].isdigit())
        report: FailureReport | None = pickle.loads(files[0].read_bytes()) if files else None
        return report

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)
