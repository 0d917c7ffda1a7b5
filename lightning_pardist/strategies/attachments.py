"""What stands in for functions and methods of others while a run lasts."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Protocol


class Attachable(Protocol):
    """Takes the place of methods of the Trainer, say."""

    def attach(self) -> None:
        """Take it."""
        ...

    def detach(self) -> None:
        """Give it back, also what a failure has left of :meth:`attach`."""
        ...


class Attachments:
    """Several that are given back together, latest first; one that fails to leaves no other in place."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def attach(self, attachable: Attachable) -> None:
        """Attach one more."""
        self._stack.callback(attachable.detach)
        attachable.attach()

    def detach(self) -> None:
        """Detach all. May be used again."""
        self._stack.close()
