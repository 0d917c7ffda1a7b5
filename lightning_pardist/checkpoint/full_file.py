"""Full checkpoint: a single file that ``torch.load`` reads without this package, verified before use.

torch's format is a zip archive with a CRC-32 per record, so no further checksum is needed: files written by Lightning
or ``torch.save`` are verified in the same way, and a copy of the file stays verifiable.
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
#: First byte of a pickle; torch before version 1.6 wrote its files as pickles.
_PICKLE_START = b"\x80"
_CHUNK_BYTES = 2**22


def save_file(state: Any, path: str | os.PathLike[str]) -> None:
    """Save a file for ``torch.load`` atomically. Not collective.

    Args:
        state: Object for ``torch.save``, with :class:`~.stream.LazyTensor` objects for tensors that are read when they
            are written.
        path: Local path or URL.

    Raises:
        OSError: From the filesystem; the previous content of ``path`` is then unchanged.
    """
    with complete_file(path) as stream:
        write_archive(state, stream)


def load_file(path: str | os.PathLike[str], *, map_location: Any = "cpu", weights_only: bool | None = None) -> Any:
    """Load a file of :func:`save_file` or ``torch.save``, with tensors in host memory by default. Not collective.

    Tensors of a local file are memory-mapped: a page is read on first access, and writes do not change the file. Does
    not verify checksums; see :func:`verify_file`.

    Args:
        path: Local path or URL.
        map_location: As for ``torch.load``.
        weights_only: As for ``torch.load``. By default no code from the file is run.

    Raises:
        NotACheckpointError: If it is not a torch file.
        DamagedCheckpointError: If its structure cannot be read.
        pickle.UnpicklingError: If it holds objects that need code to load, with the classes and two remedies.
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
            raise DamagedCheckpointError(_damaged(path, "torch cannot unpickle it")) from error
        raise pickle.UnpicklingError(_needs_code(path, classes)) from None
    except (FileNotFoundError, DamagedCheckpointError):
        raise
    except (RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        raise DamagedCheckpointError(_damaged(path, f"torch cannot read it ({error})")) from error


def verify_file(path: str | os.PathLike[str]) -> None:
    """Read a whole checkpoint file and compare every record with its checksum. Not collective.

    Files in the format of torch before version 1.6 have no checksums and always pass.

    Args:
        path: Local path or URL.

    Raises:
        DamagedCheckpointError: If the file is truncated or altered, with its name.
        FileNotFoundError: If the file does not exist.
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
        # All records mismatch, even those of one byte: the file was written with torch's checksums switched off.
        return
    if wrong:
        raise DamagedCheckpointError(_damaged(path, f"record {wrong[0]!r} does not match its checksum ({reason})"))


def _check_kind(stream: IO[bytes], path: str | os.PathLike[str]) -> None:
    """Raise :class:`NotACheckpointError` for a file not in torch's format; torch's own error would be unclear."""
    start = stream.read(len(_ZIP_START))
    if start == _ZIP_START:
        stream.seek(0)
        with suppress(zipfile.BadZipFile), zipfile.ZipFile(stream) as archive:
            if not any(name.endswith("data.pkl") for name in archive.namelist()):
                raise NotACheckpointError(
                    f"{os.fspath(path)} is not a checkpoint: it is a zip archive that torch.save did not write."
                )
    elif start and not start.startswith(_PICKLE_START):
        raise NotACheckpointError(f"{os.fspath(path)} is not a checkpoint: torch.save did not write it.")
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
    # The old format does not support the query; torch's error message names the class.
    return [str(error).splitlines()[-1]] if "GLOBAL" in str(error) else []


def _needs_code(path: str | os.PathLike[str], classes: list[str]) -> str:
    return (
        f"The checkpoint {os.fspath(path)} holds objects other than tensors and plain values: {', '.join(classes)}."
        " Loading them runs code. Allow the classes with torch.serialization.add_safe_globals([...]) before loading,"
        " or, if you trust the file, pass weights_only=False."
    )
