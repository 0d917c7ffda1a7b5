"""The ``pardist`` command: training by a ``LightningCLI``, planning, diagnosis, and inspection of checkpoints.

[Note: start-up] torch and Lightning are imported only when a command needs them, which keeps ``pardist --help`` and
``pardist strategies`` fast.
"""

from __future__ import annotations

import difflib
import importlib
import platform
import sys
from collections.abc import Callable, Sequence
from importlib import metadata

from lightning_pardist._version import __version__

_USAGE = """\
usage: pardist {fit,validate,test,predict} --model CLASS [--data CLASS] [-c CONFIG] [--trainer.strategy NAME] ...
       pardist plan --model CLASS --data CLASS --devices N [--num-nodes N] [--device NAME | PROFILE.json] ...
       pardist strategies
       pardist inspect CHECKPOINT [--tensors] [--check]
       pardist convert FOLDER FILE.ckpt | FILE.ckpt FOLDER [--overwrite]
       pardist doctor [--strategy NAME] [--devices N] [--num-nodes N] [--timeout SECONDS]
       pardist outer-server [--host ADDRESS] [--port PORT] [--timeout SECONDS]
       pardist --version

fit, validate, test and predict take every option of LightningCLI, listed by `pardist fit --help`, and
--deepspeed-config FILE, which sets --trainer.strategy and the other Trainer settings that the file contains.
plan predicts which strategy fits and is fastest on devices that need not be available; see `pardist plan --help`.
strategies lists the registered strategies, what each splits and when to choose it.
inspect shows the contents of a checkpoint file or folder; convert converts one form to the other.
outer-server runs the outer steps for islands that are separate jobs (LocalSGDStrategy(outer_server=...)).
doctor, launched like the training (srun, torchrun, mpirun), shows each rank's environment and whether training could
start.

Exit status: 0 on success; 1 if a command fails or finds a problem; 2 if the request is invalid or cannot be met.
"""
#: Function of each command, imported on use.
_COMMANDS = {
    "plan": "lightning_pardist.cli.plan:main",
    "strategies": "lightning_pardist.cli.strategies:main",
    "inspect": "lightning_pardist.cli.checkpoints:inspect",
    "convert": "lightning_pardist.cli.checkpoints:convert",
    "doctor": "lightning_pardist.cli.doctor:main",
    "outer-server": "lightning_pardist.cli.outer_server:main",
}
_TRAINER_COMMANDS = ("fit", "validate", "test", "predict")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a ``pardist`` command.

    Args:
        argv: Arguments after the program's name; by default those of the process.

    Returns:
        The exit status.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE, end="")
        return 0
    if arguments[0] == "--version":
        print(_versions())
        return 0
    if place := _COMMANDS.get(arguments[0]):
        module, _, name = place.partition(":")
        command: Callable[[Sequence[str]], int] = getattr(importlib.import_module(module), name)
        return command(arguments[1:])
    # Leading options, such as a config file before the command, are handled by the parser.
    if arguments[0] not in _TRAINER_COMMANDS and not arguments[0].startswith("-"):
        print(f"pardist: unknown command {arguments[0]!r}. {_advice(arguments[0])}", file=sys.stderr)
        return 2
    from lightning_pardist.cli.train import train

    return train(arguments, from_process=argv is None)


def _advice(command: str) -> str:
    known = (*_TRAINER_COMMANDS, *_COMMANDS)
    if near := difflib.get_close_matches(command, known, n=1):
        return f"Did you mean {near[0]!r}? `pardist --help` lists all commands."
    return f"Use one of {', '.join(known)}."


def _versions() -> str:
    found = [f"lightning_pardist {__version__}", f"python {platform.python_version()}"]
    for package in ("torch", "lightning"):
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            found.append(f"{package} not installed")
    return ", ".join(found)
