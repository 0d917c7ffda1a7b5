"""What a process says before it ends, whether or not anybody still reads it.

The terminal may have been closed, or the process at the other end of a pipe killed. A print raises there, and a thread
that was to end the process would end itself.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import NoReturn, TextIO


def say(text: str, stream: TextIO | None = None) -> None:
    """Write a line to standard error, if it can be written.

    Args:
        text: The line.
        stream: Where to write instead.
    """
    # ValueError where the stream has been closed.
    with suppress(OSError, ValueError):
        print(text, file=stream or sys.stderr, flush=True)


def leave(status: int = 1) -> NoReturn:
    """End this process at once, from any thread."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(status)
