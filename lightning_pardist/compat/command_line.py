"""Errors of Lightning's command line, in which a setting of another strategy is told what takes its place."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any


def explain_errors(cli: ModuleType, advise: Callable[[str], str | None]) -> None:
    """Let the parser say something else where there is something to say. Harmless when called again.

    Args:
        cli: ``lightning.pytorch.cli``, imported.
        advise: Takes the parser's message; returns what is said instead, or None.
    """
    parser_class = cli.LightningArgumentParser
    error = getattr(parser_class.error, "__wrapped__", parser_class.error)

    @wraps(error)
    def explained(parser: Any, message: str, *args: Any, **kwargs: Any) -> Any:
        return error(parser, advise(message) or message, *args, **kwargs)

    parser_class.error = explained
