"""The ``pardist doctor`` command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_pardist.registry import TABLE

_SIZES = ("pipeline_parallel_size", "data_shard_size", "tensor_parallel_size")


def main(arguments: Sequence[str]) -> int:
    """Report whether training could start.

    Args:
        arguments: Arguments after ``pardist doctor``.

    Returns:
        0 if training could start, 1 if not.
    """
    parser = argparse.ArgumentParser(
        "pardist doctor",
        description=(
            "Checks whether training could start here, and warns of common problems. Launch it like the training"
            " (srun, torchrun, mpirun)."
        ),
    )
    names = [entry.name for entry in TABLE]
    parser.add_argument("--strategy", choices=names, metavar="NAME", help="a name that `pardist strategies` lists")
    parser.add_argument("--devices", type=_count, help="value of Trainer(devices=)")
    parser.add_argument("--num-nodes", type=_count, default=1, help="value of Trainer(num_nodes=)")
    parser.add_argument("--accelerator", default="auto", help="value of Trainer(accelerator=)")
    for name in _SIZES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=_count, help=f"value of the strategy's {name}")
    parser.add_argument("--timeout", type=_positive, default=60.0, help="seconds to wait for other ranks, per step")
    parser.add_argument("--megabytes", type=_positive, default=16.0, help="size of the messages that measure bandwidth")
    parser.add_argument(
        "--save", metavar="FILE", help="measure devices and links, and write a profile for `pardist plan --device FILE`"
    )
    parser.add_argument(
        "--disk", metavar="FOLDER", help="with --save: measure the folder's disk by writing 128 MiB per rank"
    )
    found = parser.parse_args(list(arguments))
    if found.disk is not None and (found.save is None or not Path(found.disk).is_dir()):
        parser.error(f"--disk {found.disk} needs an existing folder, and --save FILE for the result")

    from lightning_pardist.doctor import Options, examine

    return examine(
        Options(
            strategy=found.strategy,
            devices=found.devices,
            num_nodes=found.num_nodes,
            accelerator=found.accelerator,
            sizes={name: size for name in _SIZES if (size := getattr(found, name)) is not None},
            timeout_s=found.timeout,
            megabytes=found.megabytes,
            save=found.save,
            disk=found.disk,
        )
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value
