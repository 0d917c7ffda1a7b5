"""Output and exit of a process that is about to end, robust to a closed terminal or pipe.

The terminal may have been closed, or the process at the other end of a pipe killed. A print then raises, and would
end the thread that is about to end the process.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import NoReturn, TextIO


def write_stderr(text: str, stream: TextIO | None = None) -> None:
    """Write a line to standard error; do nothing if it cannot be written.

    Args:
        text: The line.
        stream: Stream to write to instead of standard error.
    """
    # ValueError if the stream has been closed.
    with suppress(OSError, ValueError):
        print(text, file=stream or sys.stderr, flush=True)


def exit_now(status: int = 1) -> NoReturn:
    """End this process immediately, from any thread."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(status)
