"""Registry of everything that can be measured, one file per family.

A family is a module with ``names()`` and ``find(name)``, which returns a :class:`Candidate`, or None if the name
belongs to another family. A new family is added to :data:`FAMILIES`.
"""

from __future__ import annotations

from benchmarks.candidates import lightning_fit, megatron_loop, pipelining_loop, sharded_loop, torch_loop
from benchmarks.candidates.protocol import Candidate

FAMILIES = (torch_loop, sharded_loop, megatron_loop, pipelining_loop, lightning_fit)


def find(name: str) -> Candidate:
    """Return the candidate of this name.

    Raises:
        ValueError: If no family has it.
    """
    for family in FAMILIES:
        candidate = family.find(name)
        if candidate is not None:
            return candidate
    known = ", ".join(name for family in FAMILIES for name in family.names())
    raise ValueError(f"{name!r} is no candidate. Use one of {known}.")


__all__ = ["FAMILIES", "Candidate", "find"]
