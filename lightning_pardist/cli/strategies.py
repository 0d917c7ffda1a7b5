"""The ``pardist strategies`` command."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence

from lightning_pardist.registry import TABLE


def main(arguments: Sequence[str]) -> int:
    """Print the table of registered strategies.

    Args:
        arguments: Arguments of the command; none are accepted but help.

    Returns:
        The exit status.
    """
    if arguments in (["-h"], ["--help"]):
        print("usage: pardist strategies\n\nLists the registered strategies, what each splits and when to choose it.")
        return 0
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
