"""Detection of collectives in the user's step, which in a pipeline not all ranks would reach."""

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
    """Dispatch mode that records collectives over several ranks of one pipeline.

    Args:
        ranks: Global ranks of the pipeline.

    Attributes:
        found: Name of each collective, and the line of user code that calls it.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__()
        self.ranks = set(ranks)
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator; record it if it is a collective."""
        namespace, _, name = func.name().partition("::")
        if namespace in _NAMESPACES and len(self.ranks & self._joined((*args, *(kwargs or {}).values()))) > 1:
            self.found.append(f"{name.split('.')[0].rstrip('_')}{_line()}")
        return func(*args, **(kwargs or {}))

    def _joined(self, arguments: Sequence[Any]) -> set[int]:
        """Return the ranks of a collective's group; all pipeline ranks if its arguments do not contain the group."""
        for argument in arguments:
            if isinstance(argument, dist.ProcessGroup):
                return set(dist.get_process_group_ranks(argument))
            if isinstance(argument, torch.ScriptObject):
                try:
                    return set(dist.get_process_group_ranks(dist.ProcessGroup.unbox(argument)))
                except (RuntimeError, TypeError):
                    # Another C++ object, for example the reduce op.
                    continue
        return self.ranks


def _line() -> str:
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith((*_LIBRARIES, "<")):
            return f" in {Path(frame.filename).name}:{frame.lineno}"
    return ""
