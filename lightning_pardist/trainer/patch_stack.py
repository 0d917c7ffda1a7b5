"""Stack of monkey patches that last for a run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from functools import update_wrapper
from typing import Any, Protocol


class Patchable(Protocol):
    """Interface of objects that replace methods while attached."""

    def attach(self) -> None:
        """Replace the methods."""
        ...

    def detach(self) -> None:
        """Restore the methods, also after an :meth:`attach` that failed halfway."""
        ...


class Patch:
    """Replacement of one instance attribute while attached; a previous instance attribute is restored.

    Args:
        of: The object to patch. Its class is not changed.
        name: Name of the attribute.
        value: The replacement.
    """

    def __init__(self, of: object, name: str, value: Any) -> None:
        self._attributes = of.__dict__
        self._name = name
        self._value = value
        self._before: dict[str, Any] = {}

    def attach(self) -> None:
        """Set the replacement. Not collective."""
        self._before = {self._name: self._attributes[self._name]} if self._name in self._attributes else {}
        self._attributes[self._name] = self._value

    def detach(self) -> None:
        """Restore the previous state of the attribute. Not collective."""
        self._attributes.pop(self._name, None)
        self._attributes.update(self._before)


class OwnMethod:
    """Replacement of a method of one object: copies of the object, and pickled ones, have their own method.

    A function as instance attribute would be shared with copies, and act on the original.

    Args:
        of: The object.
        name: Name of the method.
        call: What is called in its place.
    """

    def __init__(self, of: object, name: str, call: Callable[..., Any]) -> None:
        before = getattr(of, name)
        # First, since it copies the attributes of another replacement.
        update_wrapper(self, before)
        self._of, self._name, self._call, self._before = of, name, call, before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the replacement."""
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A bound method is copied with what it is bound to, here the copy that is being made.
        return copy.deepcopy(self._before, memo)

    def __reduce__(self) -> Any:
        return _method_of, (self._of, self._name)


def _method_of(of: object, name: str) -> Any:
    return getattr(type(of), name).__get__(of)


class PatchStack:
    """Stack of patches that are detached in reverse order, all of them even if one fails."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def attach(self, attachable: Patchable) -> None:
        """Attach a patch and push it onto the stack."""
        self._stack.callback(attachable.detach)
        attachable.attach()

    def detach(self) -> None:
        """Detach all patches. The stack can be reused."""
        self._stack.close()
