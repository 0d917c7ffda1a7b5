"""Identity of the running command, and environment variables other than ranks."""

from __future__ import annotations

import hashlib
import os
import sys

#: Variable with the island of this job, when several jobs train together through an outer server.
ISLAND_VARIABLE = "PARDIST_ISLAND"


def program_key() -> str:
    """Return a short key of this script and its arguments, equal when the same command runs again."""
    return hashlib.sha256("\0".join(sys.argv).encode()).hexdigest()[:12]


def asks_for_alias() -> bool:
    """Return whether ``PARDIST_ALIAS_PYTORCH_LIGHTNING`` is set; inherited, it counts only if still possible."""
    value = os.environ.get("PARDIST_ALIAS_PYTORCH_LIGHTNING", "0")
    if value == "inherited":
        return "pytorch_lightning" not in sys.modules and "lightning_fabric" not in sys.modules
    return value not in ("", "0")


def given_seed() -> int | None:
    """Return the seed given to ``seed_everything``; None if it was not called."""
    seed = os.environ.get("PL_GLOBAL_SEED")
    return None if seed is None else int(seed)


def global_seed() -> int:
    """Return the seed given to ``seed_everything``; 0 if it was not called."""
    return given_seed() or 0


def given_island() -> str:
    """Return the island of this job from the environment; empty if it is not set."""
    return os.environ.get(ISLAND_VARIABLE, "")
