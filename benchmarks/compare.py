"""Compare two commits in turns: equality of losses and ratio of speeds. ``python -m benchmarks.compare --help``.

[Note: one workload] Models, data and the measuring loop come from this checkout for both commits; only the package is
the commit's own, from a worktree. A change of the benchmarks thus makes no difference between the commits, and an older
commit can be compared although its internals have other names: only names of strategies are used of the package.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.harness import RankSet
from benchmarks.report import quartiles
from benchmarks.settings import Settings
from benchmarks.workloads import WORKLOADS, sizes_of

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "lightning_pardist"
#: Revision that stands for the files of this checkout, committed or not.
WORKING_TREE = "."
_STRATEGIES = ("pardist_ddp", "pardist_zero2", "pardist_zero3", "pardist_tp", "pardist_pp")
_START_TIMEOUT_S, _ROUND_TIMEOUT_S = 180.0, 900.0


class _Child(subprocess.Popen[bytes]):
    """Process with the one method of multiprocessing's that the harness needs besides ``kill``."""

    def join(self) -> None:
        self.wait()


class CommitRanks(RankSet):
    """Ranks of one commit.

    Args:
        package: Folder that contains only the commit's package.
        strategy: Name, with arguments as in ``pardist_ddp@bucket_size_mb=10``.
        settings: Settings of the run.
        folder: Folder for the ranks' output.
    """

    def __init__(self, package: Path, strategy: str, *, settings: Settings, folder: Path) -> None:
        self._package, self._strategy = package, strategy
        super().__init__(package.name, single=False, settings=settings, folder=folder, own_network=False)

    def _start(self, there: Connection, environment: dict[str, str], log: Path) -> _Child:
        path = os.pathsep.join([str(self._package), str(ROOT)])
        command = [sys.executable, "-m", "benchmarks.commit_rank", str(there.fileno())]
        command += [json.dumps(asdict(self._settings)), self._strategy]
        with log.open("wb") as printed:
            return _Child(
                command,
                # Outside the checkout, which Python would otherwise put first on the path.
                cwd=log.parent,
                env=os.environ | environment | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                pass_fds=[there.fileno()],
                stdout=printed,
                stderr=subprocess.STDOUT,
            )


@dataclass
class Measured:
    """Measurements of one commit on one workload under one strategy.

    Attributes:
        round_s: Median step time of every round, in seconds.
        cpu_s: CPU seconds per rank and step of every round.
        losses: Losses of every step, by rank.
    """

    round_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)

    def add(self, reports: list[dict[str, Any]]) -> None:
        """Add the reports of a round, one per rank."""
        step_s = [statistics.fmean(times) for times in zip(*(report["step_s"] for report in reports), strict=True)]
        self.round_s.append(statistics.median(step_s))
        self.cpu_s.append(statistics.fmean(report["cpu_s"] for report in reports) / len(step_s))
        self.losses = self.losses or [[] for _ in reports]
        for known, report in zip(self.losses, reports, strict=True):
            known.extend(report["losses"])


def measure_pair(
    packages: tuple[Path, Path], strategy: str, settings: Settings, *, say: Callable[[str], None] = print
) -> tuple[Measured, Measured]:
    """Train both commits in turns, A B, B A, A B, ..., to balance the order effect.

    Args:
        packages: Folders with each commit's package.
        strategy: Name of the strategy.
        settings: Settings of the run.
        say: Called with progress messages.

    Raises:
        RuntimeError: If a rank fails, with its output.
    """
    found = (Measured(), Measured())
    with tempfile.TemporaryDirectory(prefix="pardist-compare-") as folder:
        sets: list[CommitRanks] = []
        try:
            sets += [CommitRanks(package, strategy, settings=settings, folder=Path(folder)) for package in packages]
            for ranks, package in zip(sets, packages, strict=True):
                for report in ranks.expect("imported", _START_TIMEOUT_S):
                    _check_package(Path(report["package"]), package)
            for ranks in sets:
                ranks.go()
                ranks.expect("ready", _START_TIMEOUT_S)
            for number in range(settings.rounds):
                order = (0, 1) if number % 2 == 0 else (1, 0)
                for index in order:
                    sets[index].go()
                    found[index].add(sets[index].expect("round", _ROUND_TIMEOUT_S))
                times = ", ".join(f"{each.round_s[-1] * 1e3:.1f}" for each in found)
                say(f"{settings.model} {strategy}, round {number + 1}/{settings.rounds}: {times} ms a step")
        finally:
            for ranks in sets:
                ranks.close()
    return found


def _check_package(used: Path, wanted: Path) -> None:
    if used.parent.resolve() != wanted.resolve() and used.resolve() != (wanted / PACKAGE).resolve():
        raise RuntimeError(f"A rank imported {used}, not the package under {wanted}: remove it from sys.path.")


def loss_difference(one: Measured, other: Measured) -> float:
    """Return the largest relative difference of losses over ranks and steps; infinite if a loss is not finite."""
    pairs = itertools.chain(*(zip(a, b, strict=True) for a, b in zip(one.losses, other.losses, strict=True)))
    largest = 0.0
    for ours, theirs in pairs:
        if not (math.isfinite(ours) and math.isfinite(theirs)):
            return math.inf
        largest = max(largest, abs(ours - theirs) / max(abs(ours), abs(theirs), 1e-30))
    return largest


def row(model: str, strategy: str, base: Measured, head: Measured, tolerance: float) -> tuple[str, bool]:
    """Return a line of the table, and whether the losses are equal."""
    speed = quartiles([theirs / ours for theirs, ours in zip(base.round_s, head.round_s, strict=True)])
    work = statistics.median(theirs / ours for theirs, ours in zip(base.cpu_s, head.cpu_s, strict=True))
    difference = loss_difference(base, head)
    equal = difference <= tolerance
    losses = (
        "bit for bit" if difference == 0 else f"within {difference:.1e}" if equal else f"DIFFER by {difference:.1e}"
    )
    low, middle, high = speed
    times = " | ".join(f"{statistics.median(each.round_s) * 1e3:.1f}" for each in (base, head))
    cells = f"{model} | `{strategy}` | {times} | {middle:.3f} ({low:.3f}-{high:.3f}) | {work:.3f} | {losses}"
    return f"| {cells} |", equal


@contextmanager
def worktrees(revisions: list[str], folder: Path) -> Iterator[list[Path]]:
    """Check out commits as worktrees, and remove the worktrees at the end.

    Args:
        revisions: Revisions in git's syntax, or ``"."`` for the files of this checkout as they are.
        folder: Where to create the worktrees.

    Yields:
        One folder per revision that contains only a link to its package.

    Raises:
        ValueError: If git cannot resolve a revision, or it has no package.
    """
    made: list[Path] = []
    links: list[Path] = []
    try:
        for number, revision in enumerate(revisions):
            tree = ROOT
            if revision != WORKING_TREE:
                commit = _git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}", failure=f"{revision!r}")
                tree = folder / f"tree{number}"
                _git("worktree", "add", "--detach", "--quiet", str(tree), commit, failure=f"a worktree of {revision!r}")
                made.append(tree)
            if not (tree / PACKAGE / "__init__.py").is_file():
                raise ValueError(f"{revision!r} holds no {PACKAGE}/. Name a commit of this project.")
            link = folder / f"commit{number}"
            link.mkdir()
            (link / PACKAGE).symlink_to(tree / PACKAGE)
            links.append(link)
        yield links
    finally:
        for tree in made:
            _git("worktree", "remove", "--force", str(tree), failure="the worktree")


def _git(*arguments: str, failure: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or ["git does not know it"]
        raise ValueError(f"git cannot give {failure}: {reason[0]}.")
    return done.stdout.strip()


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison that the command line describes.

    Returns:
        0 if all losses are equal, 1 if some differ or a rank fails, 2 if an argument is invalid.
    """
    options = _parser().parse_args(arguments)
    load = machine.load_average()
    lines, all_equal = [], True
    with tempfile.TemporaryDirectory(prefix="pardist-commits-") as folder:
        try:
            runs = [_settings(options, model) for model in options.models]
            with worktrees([options.base, options.head], Path(folder)) as (base, head):
                for settings, strategy in itertools.product(runs, options.strategies):
                    pair = measure_pair((base, head), strategy, settings, say=lambda text: print(text, flush=True))
                    line, equal = row(settings.model, strategy, *pair, options.tolerance)
                    lines.append(line)
                    all_equal &= equal
        except ValueError as error:
            print(f"compare: {error}", file=sys.stderr)
            return 2
        except RuntimeError as error:
            print(f"compare: {error}", file=sys.stderr)
            return 1
    names = [f"{name}, ms" for name in (options.base, options.head)]
    columns = ("model", "strategy", *names, f"speed of {options.head} (quartiles)", "CPU", "losses")
    print("\n".join(["", f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns), *lines, ""]))
    print(
        f"Speed: step time of {options.base} over that of {options.head}, median over {options.rounds} rounds in turns;"
        f" more than 1: {options.head} is faster. CPU: the same of the CPU time per rank and step."
    )
    print(f"{options.devices} ranks; load average before {load[0]:.2f}, after {machine.load_average()[0]:.2f}.")
    if not all_equal:
        print(f"compare: losses differ by more than {options.tolerance:g} of their size", file=sys.stderr)
    return 0 if all_equal else 1


def _settings(options: argparse.Namespace, model: str) -> Settings:
    settings = Settings(
        model=model,
        tiny=options.tiny,
        devices=options.devices,
        batch_size=options.batch_size,
        rounds=options.rounds,
        steps=options.steps,
        warmup=options.warmup,
    )
    sizes_of(settings)
    return settings


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__.splitlines()[0])
    parser.add_argument("base", help="a commit, as git names it")
    parser.add_argument("head", nargs="?", default=WORKING_TREE, help="another one (default: the files as they are)")
    parser.add_argument("--models", nargs="+", default=list(WORKLOADS), metavar="NAME", help="default: all workloads")
    parser.add_argument("--strategies", nargs="+", default=list(_STRATEGIES), metavar="NAME")
    parser.add_argument("--tiny", action="store_true", help="models of test size")
    parser.add_argument("--devices", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--batch-size", type=int, default=0, help="samples a rank and step (default: the model's own)")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each commit (default: 8)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps a round (default: 10)")
    parser.add_argument("--warmup", type=int, default=3, help="steps dropped at the start of a round (default: 3)")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-5,
        help="largest relative difference of losses that is none; 0 for bit for bit (default: 1e-5)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
