"""Collectives that a step calls by itself: in a pipeline only those ranks come to them whose stages do."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_pardist.compat.fake_tensors import TorchDispatchMode

_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional")
_LIBRARIES = (sysconfig.get_paths()["purelib"], str(Path(__file__).parents[2]))


class CollectiveCalls(TorchDispatchMode):
    """Notes the collectives of a run that join several ranks of one pipeline.

    Args:
        ranks: Global ranks of the pipeline.

    Attributes:
        found: Name of each, and the line of the user's code that calls it.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__()
        self.ranks = set(ranks)
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a collective, and run it as any operator."""
        namespace, _, name = func.name().partition("::")
        if namespace in _NAMESPACES and len(self.ranks & self._joined((*args, *(kwargs or {}).values()))) > 1:
            self.found.append(f"{name.split('.')[0].rstrip('_')}{_line()}")
        return func(*args, **(kwargs or {}))

    def _joined(self, arguments: Sequence[Any]) -> set[int]:
        """Ranks that a collective joins; all of them if its arguments do not say."""
        for argument in arguments:
            if isinstance(argument, dist.ProcessGroup):
                return set(dist.get_process_group_ranks(argument))
            if isinstance(argument, torch.ScriptObject):
                try:
                    return set(dist.get_process_group_ranks(dist.ProcessGroup.unbox(argument)))
                except (RuntimeError, TypeError):
                    # Another object of C++: the reduction, say.
                    continue
        return self.ranks


def _line() -> str:
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith((*_LIBRARIES, "<")):
            return f" in {Path(frame.filename).name}:{frame.lineno}"
    return ""
