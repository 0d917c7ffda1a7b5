"""The ``pardist inspect`` and ``pardist convert`` commands."""

from __future__ import annotations

import argparse
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_pardist.checkpoint.convert import Contents


def inspect(arguments: Sequence[str]) -> int:
    """Print the contents of a checkpoint.

    Args:
        arguments: Path of the checkpoint, and options.

    Returns:
        The exit status: 2 if there is no such checkpoint or it cannot be used as asked, 1 if it is damaged.
    """
    parser = argparse.ArgumentParser(
        "pardist inspect", description="Shows the contents of a checkpoint file or folder without loading its tensors."
    )
    parser.add_argument("checkpoint", help="a .ckpt file, or a folder of shards")
    parser.add_argument("--tensors", action="store_true", help="list the module's tensors")
    parser.add_argument("--check", action="store_true", help="compare every byte with the checksums")
    _allow_code(parser)
    options = parser.parse_args(arguments)

    def run() -> None:
        from lightning_pardist.checkpoint.convert import contents

        found = contents(options.checkpoint, check=options.check, weights_only=_weights_only(options))
        print(_described(found, tensors=options.tensors), end="")
        if options.check:
            print("checksums      match")

    return _answered("inspect", run)


def convert(arguments: Sequence[str]) -> int:
    """Write a checkpoint in the other form.

    Args:
        arguments: Paths of the checkpoint and of the output, and options.

    Returns:
        The exit status: 2 if there is no such checkpoint or it cannot be used as asked, 1 if it is damaged.
    """
    parser = argparse.ArgumentParser(
        "pardist convert",
        description="Converts a folder of shards to a single Lightning file, or a file to a folder, one tensor at a"
        " time.",
    )
    parser.add_argument("source", help="a folder of shards, or a .ckpt file")
    parser.add_argument("target", help="the .ckpt file or folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing target")
    _allow_code(parser)
    options = parser.parse_args(arguments)

    def run() -> None:
        from fsspec.core import url_to_fs

        from lightning_pardist.checkpoint.convert import contents, to_file, to_folder
        from lightning_pardist.checkpoint.manifest import is_folder

        filesystem, target = url_to_fs(options.target)
        if filesystem.exists(target) and not options.overwrite:
            raise FileExistsError(f"{options.target} exists. Pass --overwrite to replace it, or name another target.")
        change = to_file if is_folder(options.source) else to_folder
        change(options.source, options.target, weights_only=_weights_only(options))
        print(_described(contents(options.target, weights_only=_weights_only(options)), tensors=False), end="")

    return _answered("convert", run)


def _allow_code(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow-code", action="store_true", help="load objects other than tensors and plain values, which runs code"
    )


def _weights_only(options: argparse.Namespace) -> bool:
    return not options.allow_code


def _answered(command: str, run: Callable[[], None]) -> int:
    from lightning_pardist.checkpoint.errors import DamagedCheckpointError, NotACheckpointError

    status = 2
    try:
        run()
    except pickle.UnpicklingError as error:
        message = str(error).replace("pass weights_only=False", "pass --allow-code")
    except (NotACheckpointError, FileExistsError, ValueError) as error:
        message = str(error)
    except FileNotFoundError as error:
        message = f"{error.filename} does not exist." if error.filename else str(error)
    except (DamagedCheckpointError, OSError) as error:
        message, status = str(error), 1
    else:
        return 0
    print(f"pardist {command}: {message}", file=sys.stderr)
    return status


def _described(found: Contents, *, tensors: bool) -> str:
    about, versions = found.about, found.about.get("versions", {})
    lines = [
        ("checkpoint", found.path),
        ("form", f"{found.form}, {found.files} file(s), {_size(found.file_bytes)}"),
        ("step, epoch", f"{about.get('global_step')}, {about.get('epoch')}"),
        ("module", f"{len(found.module)} tensors, {found.num_elements:,} elements, {_size(found.module_bytes)}"),
        *((f"optimizer {index}", _size(size)) for index, size in enumerate(found.optimizers)),
        ("saved by", _origin(about)),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
    ]
    text = "".join(f"{name:14} {value}\n" for name, value in lines)
    if tensors:
        width = max((len(name) for name in found.module), default=0)
        text += "".join(
            f"  {name:{width}}  {dtype:9} {tuple(shape)}\n" for name, (dtype, shape) in found.module.items()
        )
    return text


def _origin(about: dict[str, Any]) -> str:
    if "strategy" not in about:
        return "unknown"
    return f"{about['strategy']}, {about['degrees']}, {about['world_size']} rank(s), {about['saved']}"


def _size(number: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"
