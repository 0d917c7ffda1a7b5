"""Validation of single settings."""

from __future__ import annotations

from typing import Any


def positive(name: str, value: float, advice: str) -> float:
    """Return ``value`` if it is positive.

    Raises:
        ValueError: If it is not, with the advice.
    """
    if value <= 0:
        raise ValueError(f"{name}={value} is not positive. {advice}")
    return value


def one_of(name: str, value: Any, allowed: tuple[Any, ...], *, or_else: str = "") -> None:
    """Check that ``value`` is among those allowed.

    Args:
        name: Name of the setting.
        value: Value to check.
        allowed: Allowed values.
        or_else: Description of further allowed values, for the message.

    Raises:
        ValueError: If it is not, with the allowed values.
    """
    # True == 1, but they are not the same setting.
    if not any(value == choice and type(value) is type(choice) for choice in allowed):
        words = [str(choice) for choice in allowed] + ([or_else] if or_else else [])
        raise ValueError(f"{name}={value!r} is unknown. Use {', '.join(words[:-1])} or {words[-1]}.")
