"""The ``pardist plan`` command."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: Trainer settings that change a step.
_TRAINER = ("precision", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm")


def main(arguments: Sequence[str]) -> int:
    """Plan the training of a module, and print the plan.

    Args:
        arguments: Arguments after ``pardist plan``.

    Returns:
        The exit status: 2 if planning fails, or no candidate fits.
    """
    parser = argparse.ArgumentParser(
        "pardist plan",
        description="Predicts the memory and step time of every strategy on devices that need not be available.",
        epilog="Pass the module and its data as for `pardist fit`: --model my.Module [--model.width 8] --data"
        " my.Data [-c config.yaml]. Of a configuration's trainer settings, only precision, gradient"
        " accumulation and clipping are used.",
        allow_abbrev=False,
    )
    parser.add_argument("--devices", type=_count, required=True, help="value of Trainer(devices=)")
    parser.add_argument("--num-nodes", type=_count, default=1, help="value of Trainer(num_nodes=)")
    parser.add_argument(
        "--device", default="h100", help="a100, h100, h200, b200, mi300x, l40s, cpu, or the .json file of a profile"
    )
    parser.add_argument("--memory-gb", type=float, help="memory of a device in 10^9 bytes, instead of the profile's")
    parser.add_argument("--strategies", help="comma-separated names; by default one per kind of engine")
    parser.add_argument("--precision", help="value of Trainer(precision=)")
    parser.add_argument(
        "--global-batch",
        type=_count,
        help="samples per optimizer step over all ranks; by default one batch per data-parallel rank",
    )
    parser.add_argument("--html", metavar="FILE", help="write an HTML report with charts to a file")
    parser.add_argument("--check", metavar="STRATEGY", help="only simulate the start and two steps of one strategy")
    parser.add_argument(
        "--diff",
        type=int,
        nargs=2,
        metavar="ROW",
        help="show how the second row differs from the first in memory, time and communication",
    )
    parser.add_argument("--json", metavar="FILE", help="write the plan as JSON to a file")
    parser.add_argument("--explain", type=int, metavar="ROW", help="explain a row of the table")
    found, rest = parser.parse_known_args(list(arguments))

    from lightning_pardist.cli.train import REFUSALS, is_about_settings, module_and_data
    from lightning_pardist.planner import PlanError, ProfileError, plan
    from lightning_pardist.planner.profiles import find_profile
    from lightning_pardist.planner.words import sentence

    # `python script.py` adds the folder to the path, a console script does not.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        profile = find_profile(found.device, memory_gb=found.memory_gb)
        module, data, trainer = module_and_data(rest)
        settings: dict[str, Any] = {name: trainer[name] for name in _TRAINER if trainer.get(name) is not None}
        if found.precision is not None:
            settings["precision"] = found.precision
        names = found.strategies.split(",") if found.strategies else None
        if found.check is not None:
            names = [found.check]
        made = plan(
            module,
            data,
            devices=found.devices,
            num_nodes=found.num_nodes,
            device=profile,
            strategies=names,
            global_batch=found.global_batch,
            **settings,
        )
    except (PlanError, ProfileError) as error:
        # If the module's or the data's own code failed, its traceback is more useful than the sentence.
        if error.__cause__ is not None and not is_about_settings(error.__cause__):
            traceback.print_exception(error.__cause__)
        return _refused(str(error))
    except REFUSALS as error:
        if not is_about_settings(error):
            raise
        return _refused(sentence(error))
    for path, content in ((found.json, made.to_json_text), (found.html, made.to_html)):
        try:
            if path:
                Path(path).write_text(content())
        except OSError as error:
            return _refused(f"{path} cannot be written: {error.strerror}.")
    print(made)
    asked = {"--explain": [found.explain], "--diff": found.diff or [None]}
    for option, rows in asked.items():
        if rows == [None]:
            continue
        if not all(0 <= row < len(made.rows) for row in rows):
            return _refused(f"{option} {' '.join(map(str, rows))}: the table has rows 0 to {len(made.rows) - 1}.")
        print(f"\n{made.explain(*rows) if option == '--explain' else made.diff(*rows)}")
    if found.check is not None:
        print(f"{found.check} starts, and takes two steps, on {found.devices} x {found.num_nodes} ranks.")
    return 0 if made.best is not None else _refused(made.why_nothing_fits())


def _refused(message: str) -> int:
    print(f"pardist plan: {message}", file=sys.stderr)
    return 2


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)
