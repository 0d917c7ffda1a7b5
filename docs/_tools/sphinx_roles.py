"""Turns the Sphinx roles of the package's docstrings into Markdown for mkdocstrings."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_ROLE = re.compile(r":(?:class|meth|func|mod|data|attr|exc):`(~?)([^`]+)`")
_LITERAL = re.compile(r"::$", re.MULTILINE)


def to_markdown(text: str) -> str:
    """``:class:`~package.Name``` becomes ``Name`` as code; ``::`` before an indented block becomes ``:``."""

    def code(match: re.Match[str]) -> str:
        short, path = match.groups()
        return f"`{path.rpartition('.')[2] if short else path.lstrip('.')}`"

    return _LITERAL.sub(":", _ROLE.sub(code, text))


class SphinxRoles(Extension):
    """Rewrites every docstring once it is loaded."""

    def on_instance(self, *, obj: Object, **kwargs: Any) -> None:
        """Called by griffe for every object."""
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)
