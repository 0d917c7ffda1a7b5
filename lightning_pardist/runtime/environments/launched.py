"""Environment variables between this package's launcher and the ranks it starts."""

from __future__ import annotations

import os

_PARENT = "PARDIST_PARENT_PID"


def child_environment(local_rank: int) -> dict[str, str]:
    """Return the environment variables for a child process of this one.

    Args:
        local_rank: The child's index on this node.
    """
    return os.environ | {"LOCAL_RANK": str(local_rank), _PARENT: str(os.getpid())}


def launcher_pid() -> int | None:
    """Return the process id of the rank that started this one; None if something else did."""
    value = os.environ.get(_PARENT)
    return int(value) if value is not None and int(value) != os.getpid() else None


def wants_full_tracebacks() -> bool:
    """Return whether every rank shows its traceback and the chain of causes: ``PARDIST_TRACEBACK=full``."""
    return os.environ.get("PARDIST_TRACEBACK") == "full"
