"""``pardist``: a ``LightningCLI`` with every strategy registered, and commands that explain them."""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Callable, Sequence

from lightning.pytorch.cli import LightningCLI

from lightning_pardist import doctor
from lightning_pardist.cli_checkpoints import convert, inspect
from lightning_pardist.registry import TABLE
from lightning_pardist.strategies.deepspeed_config import DeepSpeedConfig

_USAGE = """\
usage: pardist {fit,validate,test,predict} --model CLASS [--data CLASS] [-c CONFIG] [--trainer.strategy NAME] ...
       pardist strategies
       pardist inspect CHECKPOINT [--tensors] [--check]
       pardist convert FOLDER FILE.ckpt | FILE.ckpt FOLDER
       pardist doctor [--devices N] [--num-nodes N] [--timeout SECONDS]

fit, validate, test and predict take --deepspeed-config FILE, which stands for --trainer.strategy and what else of the
Trainer the file sets, and every option of LightningCLI; `pardist fit --help` lists them.
strategies lists the registered strategies, what each splits and when to choose it.
inspect says what is inside a checkpoint of either form; convert writes it in the other one.
doctor, started like the training (srun, torchrun, mpirun), shows what each rank sees and says whether it could start.
"""
_DEEPSPEED = "--deepspeed-config"
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
    try:
        arguments, translated = _translate_deepspeed(arguments)
    except ValueError as error:
        print(f"pardist: {error}", file=sys.stderr)
        return 2
    LightningCLI(save_config_kwargs={"overwrite": True}, args=arguments if argv is not None or translated else None)
    return 0


def _translate_deepspeed(arguments: list[str]) -> tuple[list[str], bool]:
    """Put what a DeepSpeed configuration says in the place of ``--deepspeed-config FILE``.

    Raises:
        ValueError: If the file cannot be used, or an option says what it says already.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(_DEEPSPEED)
    found, rest = parser.parse_known_args(arguments)
    if found.deepspeed_config is None:
        return arguments, False
    config = DeepSpeedConfig.read(found.deepspeed_config)
    config.warn()
    own = {"strategy": f"lightning_pardist.{config.strategy_class}"}
    own |= {f"strategy.{name}": json.dumps(value) for name, value in config.strategy.items()}
    for name in ("precision", "gradient_clip_val", "accumulate_grad_batches"):
        if getattr(config, name) is not None:
            own[name] = str(getattr(config, name))
    for name in own:
        if any(argument.partition("=")[0] == f"--trainer.{name}" for argument in rest):
            raise ValueError(f"--trainer.{name} and {_DEEPSPEED} both set it. Leave it out of one of them.")
    batch = {name: getattr(config, name) for name in ("micro_batch_size", "global_batch_size")}
    extra = [f"--trainer.{name}={value}" for name, value in own.items()]
    if any(batch.values()):
        extra.append("--trainer.callbacks+=lightning_pardist.callbacks.ExpectedBatchSize")
        extra += [f"--trainer.callbacks.{name}={value}" for name, value in batch.items() if value]
    return [*rest, *extra], True


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
