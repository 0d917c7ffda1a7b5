"""Measure strategies and baselines in turns, then write JSON, Markdown and a chart."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path

from benchmarks import network
from benchmarks.settings import Settings

_BASELINES = ("ddp", "torch_ddp", "one_process")


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark that the command line describes; return the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments)
    # Must precede the first thread: an unprivileged user cannot unshare a network namespace in a threaded process.
    own_network = options.network == "own" and options.accelerator == "cpu" and network.isolate()

    if options.accelerator == "cpu":
        os.environ["OMP_NUM_THREADS"] = "1"

    from benchmarks import devices, harness, machine, profiling, report, workloads
    from benchmarks.candidates import find

    if why := devices.missing(options.accelerator):
        print(why, file=sys.stderr)
        return 2

    try:
        settings = Settings(
            model=options.model,
            tiny=options.tiny,
            model_options=dict(options.size) or None,
            devices=options.devices,
            batch_size=options.batch_size,
            rounds=options.rounds,
            steps=options.steps,
            warmup=options.warmup,
            accelerator=options.accelerator,
            precision=options.precision,
        )
        sizes = workloads.sizes_of(settings)
        names = options.only or [*options.strategies, *options.baselines]
        candidates = {name: find(name) for name in dict.fromkeys(names)}
        if options.profile:
            return profiling.profile_all(settings, options.profile, Path(options.output))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    started = datetime.now(timezone.utc)
    try:
        results = harness.measure(
            settings,
            {name: candidate.single for name, candidate in candidates.items()},
            own_network=own_network,
            patience_s=options.patience,
            limit_s=options.limit,
            keep_going=options.keep_going,
            say=lambda text: print(text, flush=True),
        )
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    results["run"] |= {
        "date": started.isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks", *arguments]),
        "machine": machine.describe(),
        "model": settings.model,
        "sizes": sizes,
        "batch_size": workloads.batch_size_of(settings),
        "devices": settings.devices,
        "rounds": min(len(result["rounds"]) for result in results["candidates"].values()),
        "steps": settings.steps,
        "warmup": settings.warmup,
        "accelerator": settings.accelerator,
        "precision": settings.precision,
        "threads": os.environ.get("OMP_NUM_THREADS", "all"),
        "tokens_a_sample": sizes.get("context"),
        "flops_a_sample": workloads.flops_of(settings),
        "strategies": [name for name in options.strategies if name in results["candidates"]],
        "baselines": [name for name in options.baselines if name in results["candidates"]],
        "titles": {name: candidate.title for name, candidate in candidates.items()},
    }
    stem = f"{started:%Y-%m-%d}-{settings.model}-{settings.devices}{options.suffix}"
    files = report.write(results, Path(options.output), stem)
    print(report.markdown(results))
    print("Written: " + ", ".join(str(file) for file in files))
    for name, text in results["run"]["failed"].items():
        print(f"{name} failed: {text}", file=sys.stderr)
    differing = report.differing_losses(results)
    for text in differing:
        print(text, file=sys.stderr)
    return 1 if differing or results["run"]["failed"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--strategies",
        nargs="+",
        default=["pardist_ddp"],
        metavar="NAME",
        help="registered strategy names, with arguments as in pardist_ddp@bucket_size_mb=10",
    )
    parser.add_argument(
        "--baselines",
        nargs="*",
        default=list(_BASELINES),
        metavar="NAME",
        help=f"what to compare with (default: {' '.join(_BASELINES)}; also: torch_ddp_views)",
    )
    parser.add_argument("--model", default="gpt", help="gpt (much to compute) or mlp (much to send)")
    parser.add_argument(
        "--size",
        nargs="+",
        type=_size,
        default=[],
        metavar="NAME=NUMBER",
        help="sizes of the model, such as layers=12 dim=512",
    )
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu", help="what ranks train on")
    parser.add_argument(
        "--precision",
        choices=("32-true", "bf16-mixed"),
        default="32-true",
        help="as Trainer(precision=) takes it, for loops by hand as well",
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="of strategies and baselines, measure only those of these names"
    )
    parser.add_argument(
        "--keep-going", action="store_true", help="go on without a candidate that fails; the exit status tells"
    )
    parser.add_argument(
        "--profile",
        nargs="+",
        metavar="NAME",
        help="instead of measuring, profile some steps of each of these candidates on one rank",
    )
    parser.add_argument("--tiny", action="store_true", help="a model of test size")
    parser.add_argument("--devices", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--batch-size", type=int, default=0, help="samples a rank and step (default: the model's own)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every candidate (default: 5)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps a round (default: 10)")
    parser.add_argument("--warmup", type=int, default=3, help="steps dropped at the start of a round (default: 3)")
    parser.add_argument(
        "--patience",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="how long to wait before a turn for other programs to be quiet (default: not)",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="begin no further round after this time, and report what there is (default: none)",
    )
    parser.add_argument(
        "--network",
        choices=("own", "shared"),
        default="own",
        help="own: count bytes on a loopback interface of our own where the system allows it",
    )
    parser.add_argument("--output", default="logs/benchmarks", metavar="FOLDER", help="where the three files go")
    parser.add_argument(
        "--suffix", default="", metavar="TEXT", help="added to the files' names, which are DATE-MODEL-DEVICES"
    )
    return parser


def _size(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    try:
        return name, int(number)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=NUMBER") from None


if __name__ == "__main__":
    sys.exit(main())
