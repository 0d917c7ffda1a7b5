"""``pardist``: a ``LightningCLI`` with every strategy registered, and commands that explain them."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Sequence

from lightning.pytorch.cli import LightningCLI

from lightning_pardist import doctor
from lightning_pardist.cli_checkpoints import convert, inspect
from lightning_pardist.registry import TABLE

_USAGE = """\
usage: pardist {fit,validate,test,predict} --model CLASS [--data CLASS] [-c CONFIG] [--trainer.strategy NAME] ...
       pardist strategies
       pardist inspect CHECKPOINT [--tensors] [--check]
       pardist convert FOLDER FILE.ckpt | FILE.ckpt FOLDER
       pardist doctor [--devices N] [--num-nodes N] [--timeout SECONDS]

fit, validate, test and predict take every option of LightningCLI; `pardist fit --help` lists them.
strategies lists the registered strategies, what each splits and when to choose it.
inspect says what is inside a checkpoint of either form; convert writes it in the other one.
doctor, started like the training (srun, torchrun, mpirun), shows what each rank sees and says whether it could start.
"""
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
    if command := _COMMANDS.get(arguments[0]):
        return command(arguments[1:])
    # Leading options, such as a config file before the command, are the parser's business.
    if arguments[0] not in _TRAINER_COMMANDS and not arguments[0].startswith("-"):
        known = ", ".join((*_TRAINER_COMMANDS, *_COMMANDS))
        print(f"pardist: unknown command {arguments[0]!r}. Use one of {known}.", file=sys.stderr)
        return 2
    # As `python script.py` and `python -m` do, and a console script does not: the user's modules are found from here.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    LightningCLI(save_config_kwargs={"overwrite": True}, args=arguments if argv is not None else None)
    return 0


def list_strategies(arguments: Sequence[str]) -> int:
    """Print the table of registered strategies.

    Args:
        arguments: None are taken.

    Returns:
        The exit status.
    """
    if arguments:
        print(f"pardist strategies: takes no arguments, got {' '.join(arguments)}.", file=sys.stderr)
        return 2
    name_width = max(len(entry.name) for entry in TABLE)
    splits_width = max(len("splits"), *(len(entry.shards) for entry in TABLE))
    print(f"{'strategy':{name_width}}  {'splits':{splits_width}}  when")
    for entry in TABLE:
        print(f"{entry.name:{name_width}}  {entry.shards:{splits_width}}  {entry.when}")
    print(
        textwrap.dedent(
            """
            import lightning_pardist
            Trainer(strategy="NAME", devices=2)                   by name
            Trainer(strategy=lightning_pardist.DDPStrategy(...))  with settings of its class
            """
        ),
        end="",
    )
    return 0


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "strategies": list_strategies,
    "inspect": inspect,
    "convert": convert,
    "doctor": doctor.main,
}
