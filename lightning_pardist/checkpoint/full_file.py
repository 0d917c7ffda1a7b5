"""Full checkpoint: the single file that ``torch.load`` reads without this package, verified before use.

torch's format is a zip archive that keeps a CRC-32 with every record, so a checkpoint needs no checksum of ours: a file
that Lightning or ``torch.save`` wrote is checked as well as our own, and nothing is lost when it is copied.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from contextlib import suppress
from typing import IO, Any

import torch
from fsspec.core import url_to_fs

from lightning_pardist.checkpoint.atomic import complete_file, local_path
from lightning_pardist.checkpoint.errors import DamagedCheckpointError, NotACheckpointError
from lightning_pardist.checkpoint.stream import write_archive

_ZIP_START = b"PK\x03\x04"
#: Of a pickle, as which torch before version 1.6 began its files.
_PICKLE_START = b"\x80"
_CHUNK_BYTES = 2**22


def save_file(state: Any, path: str | os.PathLike[str]) -> None:
    """Save a file for ``torch.load`` atomically. Not collective.

    Args:
        state: What ``torch.save`` takes, :class:`~.stream.LazyTensor` objects for tensors that are read when their turn
            comes.
        path: Local path or URL.

    Raises:
        OSError: From the filesystem; what was at ``path`` before is still there then.
    """
    with complete_file(path) as stream:
        write_archive(state, stream)


def load_file(path: str | os.PathLike[str], *, map_location: Any = "cpu", weights_only: bool | None = None) -> Any:
    """Read a file of :func:`save_file` or ``torch.save``, tensors in host memory. Not collective.

    Tensors of a local file are memory-mapped: a page is read when it is touched, and writing to one leaves the file as
    it is. Damage is looked for by :func:`verify_file`, not here.

    Args:
        path: Local path or URL.
        map_location: As ``torch.load`` takes it.
        weights_only: As ``torch.load`` takes it. By default no code from the file is run.

    Raises:
        NotACheckpointError: If it is no file of torch at all.
        DamagedCheckpointError: If it cannot be read for its structure.
        pickle.UnpicklingError: If it holds objects that take code to build, with the classes and two ways out.
    """
    plain = local_path(path)
    try:
        if plain is None:
            filesystem, remote = url_to_fs(os.fspath(path))
            with filesystem.open(remote, "rb") as stream:
                _check_kind(stream, path)
                return torch.load(stream, map_location=map_location, weights_only=weights_only)
        with open(plain, "rb") as local:
            _check_kind(local, path)
        mapped = _is_zip(plain)
        return torch.load(plain, map_location=map_location, weights_only=weights_only, mmap=mapped)
    except pickle.UnpicklingError as error:
        if not (classes := _classes_that_take_code(path, error)):
            raise DamagedCheckpointError(_damaged(path, "torch cannot read its pickled part")) from error
        raise pickle.UnpicklingError(_needs_code(path, classes)) from None
    except (FileNotFoundError, DamagedCheckpointError):
        raise
    except (RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        raise DamagedCheckpointError(_damaged(path, f"torch cannot read it ({error})")) from error


def verify_file(path: str | os.PathLike[str]) -> None:
    """Read a whole checkpoint file and compare every record with its checksum. Not collective.

    Files in torch's format of before version 1.6 have no checksums, and pass.

    Args:
        path: Local path or URL.

    Raises:
        DamagedCheckpointError: If the file is truncated or altered, with its name.
        FileNotFoundError: If there is none.
    """
    filesystem, plain = url_to_fs(os.fspath(path))
    with filesystem.open(plain, "rb") as stream:
        start = stream.read(len(_ZIP_START))
        if not start:
            raise DamagedCheckpointError(_damaged(path, "it is empty"))
        try:
            archive = zipfile.ZipFile(stream)
        except Exception as error:
            if start == _ZIP_START:
                raise DamagedCheckpointError(_damaged(path, f"it is truncated ({error})")) from None
            return
        with archive:
            _verify_records(archive, path)


def _verify_records(archive: zipfile.ZipFile, path: str | os.PathLike[str]) -> None:
    wrong: list[str] = []
    reason = ""
    for record in archive.infolist():
        try:
            with archive.open(record) as stream:
                while stream.read(_CHUNK_BYTES):
                    pass
        except Exception as error:
            wrong.append(record.filename)
            reason = str(error)
    if len(wrong) > 1 and len(wrong) == len(archive.infolist()) and "CRC" in reason:
        # Every record, down to the ones of a byte: written with torch's checksums switched off.
        return
    if wrong:
        raise DamagedCheckpointError(_damaged(path, f"record {wrong[0]!r} does not match its checksum ({reason})"))


def _check_kind(stream: IO[bytes], path: str | os.PathLike[str]) -> None:
    """Refuse what is no file of torch, before torch says so in numbers."""
    start = stream.read(len(_ZIP_START))
    if start == _ZIP_START:
        stream.seek(0)
        with suppress(zipfile.BadZipFile), zipfile.ZipFile(stream) as archive:
            if not any(name.endswith("data.pkl") for name in archive.namelist()):
                raise NotACheckpointError(f"{os.fspath(path)} is no checkpoint, but an archive of something else.")
    elif start and not start.startswith(_PICKLE_START):
        raise NotACheckpointError(f"{os.fspath(path)} is no checkpoint: it does not begin like a file of torch.save.")
    stream.seek(0)


def _is_zip(path: str) -> bool:
    with open(path, "rb") as stream:
        return stream.read(len(_ZIP_START)) == _ZIP_START


def _damaged(path: str | os.PathLike[str], reason: str) -> str:
    return f"The checkpoint {os.fspath(path)} is damaged: {reason}. Resume from another one, or copy it again."


def _classes_that_take_code(path: str | os.PathLike[str], error: Exception) -> list[str]:
    try:
        filesystem, plain = url_to_fs(os.fspath(path))
        with filesystem.open(plain, "rb") as stream:
            if classes := torch.serialization.get_unsafe_globals_in_checkpoint(stream):
                return sorted(classes)
    except Exception:
        pass
    # Files in the old format cannot be asked; torch's own words name the class.
    return [str(error).splitlines()[-1]] if "GLOBAL" in str(error) else []


def _needs_code(path: str | os.PathLike[str], classes: list[str]) -> str:
    return (
        f"The checkpoint {os.fspath(path)} holds objects other than tensors and plain values: {', '.join(classes)}."
        " Loading them runs code. Allow the classes with torch.serialization.add_safe_globals([...]) before loading,"
        " or, if you trust the file, pass weights_only=False."
    )
