"""Atomic writes: a file or folder appears under its name only when it is complete.

Data is written next to its target under a hidden name that contains host and process id, flushed to disk and then
renamed. A process killed at any moment leaves the previous content and at most one temporary, which the next save in
that folder removes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import re
import shutil
import socket
import time
import zlib
from collections.abc import Iterator
from typing import IO, Any, cast

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

_numbers = itertools.count()
_TEMPORARY = re.compile(r"^\.pardist-(?P<kind>tmp|old)-(?P<tag>[0-9a-f]{8})-(?P<host>.+)-(?P<pid>\d+)-(?P<number>\d+)$")
#: Seconds without a change after which a temporary of another host counts as abandoned.
ABANDONED_AFTER_S = 24 * 3600.0


def local_path(path: str | os.PathLike[str]) -> str | None:
    """Return the path on this machine's filesystem, or None for a remote one (``s3://``, ``memory://``)."""
    filesystem, plain = url_to_fs(os.fspath(path))
    return str(plain) if isinstance(filesystem, LocalFileSystem) else None


def temporary_name(path: str, kind: str = "tmp") -> str:
    """Return a hidden name next to ``path``, unique to this process and call.

    It does not contain the target's own name, because programs search for checkpoints by a part of their names.
    """
    folder, name = os.path.split(path)
    return os.path.join(folder, f".pardist-{kind}-{_tag(name)}-{_host()}-{os.getpid()}-{next(_numbers)}")


@contextlib.contextmanager
def complete_file(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Write a file that appears under its name once the block has succeeded and the data is flushed. Not collective.

    Args:
        path: Local path or fsspec URL. An existing file is replaced atomically.

    Yields:
        A binary file to write to.

    Raises:
        OSError: From the filesystem; the previous content of ``path`` is then unchanged.
    """
    goal = local_path(path)
    if goal is None:
        filesystem, plain = url_to_fs(os.fspath(path))
        filesystem.makedirs(os.path.dirname(plain), exist_ok=True)
        # Object stores publish an upload when it is finished; other remote filesystems move a temporary.
        with filesystem.transaction, filesystem.open(plain, "wb") as stream:
            yield stream
        return
    folder = os.path.dirname(goal) or "."
    os.makedirs(folder, exist_ok=True)
    remove_abandoned(folder)
    temporary = temporary_name(goal)
    try:
        with open(temporary, "xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        if os.path.isdir(goal) and not os.path.islink(goal):
            replace_folder(temporary, goal)
        else:
            os.replace(temporary, goal)
        sync_folder(folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        raise


def replace_folder(temporary: str, goal: str) -> None:
    """Rename ``temporary``, a flushed file or folder, to ``goal``, replacing an existing one.

    If the system can exchange two names atomically, a complete ``goal`` exists at any moment. Otherwise the old one is
    first renamed to a hidden name, from which :func:`recover` restores it.

    Raises:
        OSError: From the filesystem.
    """
    if not os.path.lexists(goal):
        os.rename(temporary, goal)
        _discard_aside(goal)
    elif os.path.islink(goal):
        os.remove(goal)
        os.rename(temporary, goal)
    elif _exchange(temporary, goal):
        discard(temporary)
    else:
        old = temporary_name(goal, "old")
        os.rename(goal, old)
        os.rename(temporary, goal)
        _discard_aside(goal)
    sync_folder(os.path.dirname(goal) or ".")


def recover(path: str) -> bool:
    """Restore what a replacement set aside if it was killed between its two renames. Not collective.

    Args:
        path: Local path that does not exist.

    Returns:
        Whether ``path`` exists now.
    """
    if os.path.lexists(path):
        return True
    aside = _aside(path)
    if not aside:
        return False
    os.rename(max(aside, key=os.path.getmtime), path)
    return True


def discard(path: str) -> None:
    """Remove a local file or folder, if it exists; a folder is first renamed to a hidden name."""
    if os.path.islink(path) or os.path.isfile(path):
        os.remove(path)
    elif os.path.isdir(path):
        hidden = path if _TEMPORARY.match(os.path.basename(path)) else temporary_name(path)
        if hidden != path:
            os.rename(path, hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def remove_abandoned(folder: str) -> None:
    """Remove temporaries in a local folder whose writing process has ended. Not collective; call it on one rank."""
    with contextlib.suppress(OSError):
        for entry in os.listdir(folder):
            found = _TEMPORARY.match(entry)
            # A checkpoint set aside may be the only one left; it is removed when its successor is complete.
            if found is None or found["kind"] == "old" or not _is_abandoned(os.path.join(folder, entry), found):
                continue
            discard(os.path.join(folder, entry))


def sync_folder(folder: str) -> None:
    """Flush a folder's entries to disk; ignored on network filesystems without support for it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def _aside(path: str) -> list[str]:
    folder, name = os.path.split(path)
    if not os.path.isdir(folder or "."):
        return []
    found = [(entry, _TEMPORARY.match(entry)) for entry in os.listdir(folder or ".")]
    wanted = ("old", _tag(name))
    return [os.path.join(folder, entry) for entry, m in found if m is not None and (m["kind"], m["tag"]) == wanted]


def _discard_aside(path: str) -> None:
    for old in _aside(path):
        discard(old)


def _is_abandoned(path: str, found: re.Match[str]) -> bool:
    if found["host"] != _host():
        return time.time() - os.path.getmtime(path) > ABANDONED_AFTER_S
    if int(found["pid"]) == os.getpid():
        return False
    try:
        os.kill(int(found["pid"]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _exchange(first: str, second: str) -> bool:
    """Exchange two names atomically (``renameat2``, Linux), and return whether the system supports it."""
    swap: Any = getattr(_libc(), "renameat2", None)
    if swap is None:
        return False
    at_cwd, exchange = -100, 2
    result = swap(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), exchange)
    return cast(int, result) == 0


def _tag(name: str) -> str:
    return f"{zlib.crc32(os.fsencode(name)):08x}"


def _host() -> str:
    return re.sub(r"[^\w.]", "_", socket.gethostname())


def _libc() -> Any:
    try:
        return ctypes.CDLL(None, use_errno=True)
    except OSError:
        return None
