"""The running command, and what its environment says beside ranks."""

from __future__ import annotations

import hashlib
import os
import sys

#: Which island this job is, where several meet at an outer server.
ISLAND_VARIABLE = "PARDIST_ISLAND"


def program_key() -> str:
    """A short name for this script and its arguments, equal when the same command runs again."""
    return hashlib.sha256("\0".join(sys.argv).encode()).hexdigest()[:12]


def asks_for_alias() -> bool:
    """Whether ``PARDIST_ALIAS_PYTORCH_LIGHTNING`` is set; by the process that started this one only where it can be."""
    value = os.environ.get("PARDIST_ALIAS_PYTORCH_LIGHTNING", "0")
    if value == "inherited":
        return "pytorch_lightning" not in sys.modules and "lightning_fabric" not in sys.modules
    return value not in ("", "0")


def given_seed() -> int | None:
    """What ``seed_everything`` was given; None if it was not called."""
    seed = os.environ.get("PL_GLOBAL_SEED")
    return None if seed is None else int(seed)


def global_seed() -> int:
    """What ``seed_everything`` was given; 0 if it was not called."""
    return given_seed() or 0


def given_island() -> str:
    """Which island of several jobs this one is, as the environment says; empty if it does not."""
    return os.environ.get(ISLAND_VARIABLE, "")
