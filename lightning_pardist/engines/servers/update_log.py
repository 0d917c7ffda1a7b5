"""Log of what a server did, in order, as lines of JSON, from which one process can repeat it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

#: An update with a worker's gradients, a turn without any, a worker's receipt of the newest values, and the loss of a
#: worker, without which the others continue.
Did = Literal["update", "tick", "pull", "lost"]
_RUN = "run"


@dataclass(frozen=True)
class Entry:
    """One action of a server.

    Attributes:
        did: Kind of the action.
        worker: Rank of the worker.
        turn: Number of the worker's turn that it belongs to, from 1; a meeting belongs to the turn before.
        optimizer: Index of the optimizer.
        ahead: Updates by which the worker was ahead of the slowest.
        staleness: Updates by others since the values that the gradients were computed from.
        numbers: Settings of the optimizer's groups, as set by the worker's schedulers.
    """

    did: Did
    worker: int
    turn: int
    optimizer: int
    ahead: int = 0
    staleness: int = 0
    numbers: tuple[float, ...] = ()


def next_run(folder: str | os.PathLike[str]) -> Path:
    """Return the folder for the logs of a further run, beside earlier ones: a restarted job has several."""
    runs = [int(path.name.removeprefix(_RUN)) for path in _runs_in(Path(folder))]
    return Path(folder) / f"{_RUN}{max(runs, default=-1) + 1}"


def _runs_in(folder: Path) -> list[Path]:
    return [path for path in folder.glob(f"{_RUN}*") if path.name.removeprefix(_RUN).isdecimal()]


class UpdateLog:
    """Writes the entries of one server, in order. Not thread-safe by itself.

    Args:
        folder: Folder with the logs of all servers of the run.
        server: Rank of this server.
        owners: For each optimizer, the rank that holds each of its parameters.
        workers: Ranks of the workers.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        server: int,
        owners: Sequence[Sequence[int]],
        workers: Sequence[int],
    ) -> None:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        self._file: TextIO | None = (path / f"server{server}.jsonl").open("w")
        self._write({"server": server, "owners": [list(each) for each in owners], "workers": list(workers)})

    def add(self, entry: Entry) -> None:
        """Write one entry."""
        self._write({name: value for name, value in asdict(entry).items() if value != ()})

    def flush(self) -> None:
        """Write all buffered entries to the file."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Close the file at the end of the run."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _write(self, fields: dict[str, object]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(fields) + "\n")


@dataclass(frozen=True)
class ServerLog:
    """Log of one server.

    Attributes:
        server: Rank of the server.
        owners: For each optimizer, the rank that holds each of its parameters.
        workers: Ranks of the workers.
        entries: Entries in order.
    """

    server: int
    owners: list[list[int]]
    workers: list[int]
    entries: list[Entry]


def read_logs(folder: str | os.PathLike[str]) -> list[ServerLog]:
    """Read the logs of all servers of a run.

    Args:
        folder: The folder that ``update_log`` was set to, if it contains one run, or one of the folders ``run0``,
            ``run1`` in it.

    Raises:
        FileNotFoundError: If there are no logs.
        RuntimeError: If there are several runs.
    """
    path = Path(folder)
    runs = _runs_in(path)
    if len(runs) > 1:
        names = ", ".join(sorted(each.name for each in runs))
        raise RuntimeError(f"{path} has several runs ({names}), each of which began with its own weights. Pass the"
                           " folder of one of them.")  # fmt: skip
    paths = sorted((runs[0] if runs else path).glob("server*.jsonl"))
    if not paths:
        raise FileNotFoundError(f"{path} has no server*.jsonl. Set update_log to a folder, and train.")
    return [ServerLog(**_fields(each)) for each in paths]


def _fields(path: Path) -> dict[str, Any]:
    head, *lines = (json.loads(line) for line in path.read_text().splitlines())
    return {**head, "entries": list(_entries(lines))}


def _entries(lines: Sequence[dict[str, Any]]) -> Iterator[Entry]:
    for line in lines:
        yield Entry(**{**line, "numbers": tuple(line.get("numbers", ()))})
