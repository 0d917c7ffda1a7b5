"""``pardist fit``, ``validate``, ``test`` and ``predict``: Lightning's command line with this package's strategies."""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
import traceback
from collections.abc import Sequence
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

from lightning_pardist.registry import TABLE
from lightning_pardist.trainer.deepspeed_config import DeepSpeedConfig

_DEEPSPEED = "--deepspeed-config"
_PROFILE = "--profile-steps"
REFUSALS = (ValueError, TypeError, RuntimeError, ImportError, MisconfigurationException)
#: An error whose traceback has only these packages is caused by settings on the command line.
_SETTING_UP = ("lightning_pardist", "lightning", "jsonargparse", "contextlib", "functools")


class _RefusedError(Exception):
    """Command-line arguments are invalid; the message is a sentence."""


class _CLI(LightningCLI):
    """``LightningCLI`` that distinguishes invalid settings from errors of the user's classes."""

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        try:
            super().parse_arguments(parser, args)
        except argparse.ArgumentError as error:
            raise _RefusedError(_shortened(str(error))) from error

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except REFUSALS as error:
            if not is_about_settings(error):
                raise
            raise _RefusedError(_shortened(str(error))) from error


def train(arguments: Sequence[str], *, from_process: bool) -> int:
    """Run a command of the Trainer.

    Args:
        arguments: The command and its options.
        from_process: Whether they are the arguments of this process.

    Returns:
        The exit status: 2 if an option is refused.
    """
    # Make the user's modules importable, as `python script.py` and `python -m` do and a console script does not.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    own = {"prog": "pardist", "exit_on_error": False}
    by_command = {"exit_on_error": False, "epilog": _strategies_in_help()}
    try:
        found, translated = _translate_deepspeed(list(arguments))
        found, profiled = _translate_profile(found)
    except (ValueError, argparse.ArgumentError) as error:
        return _refused(error)
    try:
        _CLI(
            save_config_kwargs={"overwrite": True},
            parser_kwargs={**own, **{name: dict(by_command) for name in _CLI.subcommands()}},
            args=None if from_process and not (translated or profiled) else found,
        )
    except _RefusedError as error:
        return _refused(error)
    return 0


def module_and_data(arguments: Sequence[str]) -> tuple[Any, Any, dict[str, Any]]:
    """Instantiate ``--model`` and ``--data``, without a Trainer and without memory for the module's parameters.

    Args:
        arguments: Arguments as for ``pardist fit``, without the command.

    Returns:
        The module, whose parameters have no values; the data; the given settings of the Trainer.

    Raises:
        PlanError: If an option is invalid, with a sentence; or no data was given.
    """
    from lightning_pardist.planner.errors import PlanError
    from lightning_pardist.planner.skipped_kernels import SkippedKernels

    try:
        made = _Planned(
            run=False, args=list(arguments), save_config_callback=None, parser_kwargs={"exit_on_error": False}
        )
        config = made.config
        if config.get("data") is None:
            raise _RefusedError("There is no batch: pass a LightningDataModule with --data.")
        data = config.pop("data")
        with SkippedKernels():
            module = made.parser.instantiate_classes(config).model
        parser = LightningArgumentParser(exit_on_error=False)
        parser.add_lightning_class_args(LightningDataModule, "data", subclass_mode=True)
        given = parser.parse_object({"data": data})
        return module, parser.instantiate_classes(given).data, dict(config.trainer)
    except (_RefusedError, argparse.ArgumentError) as error:
        raise PlanError(_shortened(str(error))) from None


class _Planned(_CLI):
    """Parser that instantiates neither module nor Trainer."""

    def instantiate_classes(self) -> None:
        self.config_init = self.config

    def _add_instantiators(self) -> None:
        """Do nothing: no class is instantiated."""


def _refused(error: Exception) -> int:
    print(f"pardist: {error}", file=sys.stderr)
    return 2


def _strategies_in_help() -> str:
    names = textwrap.fill(", ".join(entry.name for entry in TABLE), 110)
    return f"Strategies of this package, for --trainer.strategy (described by `pardist strategies`): {names}"


def is_about_settings(error: BaseException) -> bool:
    """Return whether an error's traceback contains only the parser, Lightning and this package, no user code."""
    link: BaseException | None = error
    while link is not None:
        frames = traceback.walk_tb(link.__traceback__)
        if any(frame.f_globals.get("__name__", "").split(".")[0] not in _SETTING_UP for frame, _ in frames):
            return False
        link = link.__cause__ or link.__context__
    return True


def _shortened(message: str) -> str:
    """Shorten a parser's message to one line, without the generic lines on alternative types."""
    lines = [line.strip() for line in message.splitlines()]
    noise = ("Does not validate against", "Subtypes:", "Errors:", "Given value type:")
    lines = [line.removeprefix("- ") for line in lines if line and not line.startswith(noise)]
    told = [line for line in lines if not line.startswith(("Expected a ", "Given value:"))]
    return " ".join(lines if told == lines[:1] else told or lines)


def _translate_deepspeed(arguments: list[str]) -> tuple[list[str], bool]:
    """Replace ``--deepspeed-config FILE`` by the options that the configuration sets.

    Raises:
        ValueError: If the file is invalid, or an option is set on the command line as well.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
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
            raise ValueError(f"--trainer.{name} is set on the command line and by {_DEEPSPEED}. Remove one of the two.")
    batch = {name: getattr(config, name) for name in ("micro_batch_size", "global_batch_size")}
    extra = [f"--trainer.{name}={value}" for name, value in own.items()]
    if any(batch.values()):
        extra.append("--trainer.callbacks+=lightning_pardist.callbacks.ExpectedBatchSize")
        extra += [f"--trainer.callbacks.{name}={value}" for name, value in batch.items() if value]
    return [*rest, *extra], True


def _translate_profile(arguments: list[str]) -> tuple[list[str], bool]:
    """Replace ``--profile-steps N`` by the options of the profiling callback.

    Raises:
        ArgumentError: If N is not an integer.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(_PROFILE, type=int)
    found, rest = parser.parse_known_args(arguments)
    if found.profile_steps is None:
        return arguments, False
    callback = "--trainer.callbacks+=lightning_pardist.callbacks.StepProfile"
    return [*rest, callback, f"--trainer.callbacks.steps={found.profile_steps}"], True
