"""Parser errors of Lightning's command line, with advice for settings of other strategies."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any


def explain_errors(cli: ModuleType, advise: Callable[[str], str | None]) -> None:
    """Replace the messages of parser errors for which there is advice. Idempotent.

    Args:
        cli: The imported module ``lightning.pytorch.cli``.
        advise: Maps the parser's message to the message shown in its place, or to None to keep it.
    """
    parser_class = cli.LightningArgumentParser
    error = getattr(parser_class.error, "__wrapped__", parser_class.error)

    @wraps(error)
    def explained(parser: Any, message: str, *args: Any, **kwargs: Any) -> Any:
        return error(parser, advise(message) or message, *args, **kwargs)

    parser_class.error = explained
