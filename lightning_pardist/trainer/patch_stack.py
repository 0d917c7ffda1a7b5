"""Stack of monkey patches that last for a run."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Protocol


class Patchable(Protocol):
    """Interface of objects that replace methods while attached."""

    def attach(self) -> None:
        """Take it."""
        ...

    def detach(self) -> None:
        """Give it back, also what a failure has left of :meth:`attach`."""
        ...


class Patch:
    """An attribute of one object that has another value while attached; one that the object has of its own comes back.

    Args:
        of: The object. Its class stays as it is.
        name: The attribute.
        value: In its place.
    """

    def __init__(self, of: object, name: str, value: Any) -> None:
        self._attributes = of.__dict__
        self._name = name
        self._value = value
        self._before: dict[str, Any] = {}

    def attach(self) -> None:
        """Set it. Not collective."""
        self._before = {self._name: self._attributes[self._name]} if self._name in self._attributes else {}
        self._attributes[self._name] = self._value

    def detach(self) -> None:
        """Set it back. Not collective."""
        self._attributes.pop(self._name, None)
        self._attributes.update(self._before)


class PatchStack:
    """Detaches patches in reverse order; a failure leaves no other patch in place."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def attach(self, attachable: Patchable) -> None:
        """Attach one more."""
        self._stack.callback(attachable.detach)
        attachable.attach()

    def detach(self) -> None:
        """Detach all. May be used again."""
        self._stack.close()
