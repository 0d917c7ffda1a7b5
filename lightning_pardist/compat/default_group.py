"""Default process group as user code sees it in a step: the data-parallel ranks, which have different samples.

Code that gathers over the world by itself (``dist.all_gather`` in a contrastive loss) expects ranks with different
samples. Under tensor and pipeline parallelism the world also has ranks with the same samples, which would silently be
counted several times. While a step runs, torch's functions therefore treat the data-parallel group as the default
group for user code, and for user code only: size, rank and collectives are consistent. torch, Lightning and this
package see the world. A ``DistributedSampler`` without arguments counts as user code at any time of a run, and so does
the code that loaders call to make batches, in the process or in forked workers (a dataset that keeps every n-th
sample, for example).

[Note: one property] ``dist.all_reduce(x)``, ``dist.get_world_size()`` and ``dist.group.WORLD`` all look the default
group up in ``torch.distributed.distributed_c10d._world.default_pg``, which has no public hook. The replacement getter
looks for the caller on the stack. The group that it returns is used for nothing else, so it can be told apart from a
group that the caller has passed.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed import c10d_logger, distributed_c10d
from torch.distributed.nn import functional as nn_functional
from torch.overrides import handle_torch_function

from lightning_pardist.compat.contract import Private

_SEEN = "collectives of user code under tensor and pipeline parallelism"
_C10D = "torch.distributed.distributed_c10d"
NAMES = (
    Private(f"{_C10D}._world", _SEEN, "pass the group by name"),
    Private(f"{_C10D}._World", _SEEN, "pass the group by name"),
    Private(f"{_C10D}._World.default_pg", _SEEN, "pass the group by name"),
    Private(f"{_C10D}._update_default_pg", "ranks of a job that only serve",
            "destroy the default group, and make one for each part of the job"),
)  # fmt: skip

#: Files of torch's functions between the lookup and their caller.
_API = frozenset({distributed_c10d.__file__, c10d_logger.__file__, nn_functional.__file__, __file__})
#: Functions that create groups; their ranks are always those of the world.
_ABOUT_GROUPS = frozenset({"new_group", "new_subgroups", "new_subgroups_by_enumeration", "split_group"})
#: Collectives whose result depends on the number of ranks.
_COUNTING = frozenset(
    {
        *("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_gather"),
        *("all_gather_into_tensor", "all_gather_single", "all_gather_object", "gather", "gather_object"),
    }
)
_HANDLE = handle_torch_function.__code__
_SAMPLER = str(Path("torch", "utils", "data", "distributed.py"))


class DefaultGroup:
    """Substitute for the default process group, as seen by user code in the steps of a run. Not collective.

    Args:
        group: This rank's data-parallel group, created for this purpose and passed to no other code.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.depth = 0
        self._warned: set[tuple[CodeType, int]] = set()

    def attach(self) -> None:
        """Install the substitute."""
        world = distributed_c10d._world
        _attached.append(self)
        world.__class__ = _WorldOfRun

    def detach(self) -> None:
        """Restore the world as the default group."""
        if self in _attached:
            _attached.remove(self)
        if not _attached:
            distributed_c10d._world.__class__ = distributed_c10d._World

    def seen_from(self, frame: FrameType | None, world: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
        """Return the default group for the caller of a torch function.

        Args:
            frame: The innermost frame of torch's own function.
            world: The group of all ranks.
        """
        call = _Call(frame, self.group)
        if world is None or call.names & _ABOUT_GROUPS or call.named not in (None, world):
            return world
        if call.caller is not None and call.caller.f_code.co_filename.endswith(_SAMPLER):
            return self.group
        while not call.is_users:
            overridden = _overridden(call.caller)
            if overridden is None:
                return world
            call = _Call(overridden, self.group)
        if call.named is None and (self.depth or _loads(call.caller)):
            return self.group
        if call.caller is not None and call.names & _COUNTING:
            self._warn(
                call.caller,
                f"This combines values of all {world.size()} ranks, but only {self.group.size()} of them see different"
                " samples: the samples of the others count several times. Use self.all_gather, sync_dist=True, or"
                " group=self.trainer.strategy.data_group.",
            )
        return world

    def world_size_read(self, frame: FrameType | None, world_size: int) -> None:
        """Warn if user code reads the world size from the Trainer in a step or while it configures optimizers.

        Args:
            frame: Innermost frame to search from: of Lightning, or of the caller that reads it from the strategy.
            world_size: The value that is returned.
        """
        if not self.depth or world_size == self.group.size():
            return
        while frame is not None and frame.f_code.co_name == "world_size":
            frame = frame.f_back
        if frame is not None and not frame.f_code.co_filename.startswith(_LIBRARIES):
            self._warn(
                frame,
                f"This reads a world_size of {world_size} ranks, of which only {self.group.size()} see different"
                f" samples: a learning rate or loss scaled by it is {world_size // self.group.size()} times that of one"
                ' process with these batches. Use self.trainer.distributed_sampler_kwargs["num_replicas"].',
            )

    def _warn(self, frame: FrameType, text: str) -> None:
        line = frame.f_code, frame.f_lineno
        if line not in self._warned:
            self._warned.add(line)
            # Explicitly: the lookup does not happen at the line that the warning is about.
            warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno)


class _Call:
    """A call of torch's process-group functions, as found on the stack.

    Attributes:
        caller: Frame that called the outermost of these functions.
        names: Names of these functions.
        named: The group that the caller passed to one of them; None for the default.
    """

    def __init__(self, frame: FrameType | None, handed_out: dist.ProcessGroup) -> None:
        self.names: set[str] = set()
        self.named: dist.ProcessGroup | None = None
        self._differentiable = False
        while frame is not None and frame.f_code.co_filename in _API:
            self.names.add(frame.f_code.co_name)
            self._differentiable = frame.f_code.co_filename == nn_functional.__file__
            group = frame.f_locals.get("group")
            if isinstance(group, dist.ProcessGroup) and group is not handed_out:
                self.named = group
            frame = frame.f_back
        self.caller = frame

    @property
    def is_users(self) -> bool:
        """Whether user code is the caller; backward of torch's differentiable collectives is called by autograd."""
        caller = self.caller
        return self._differentiable or (caller is not None and not caller.f_code.co_filename.startswith(_LIBRARIES))


def _loads(frame: FrameType | None) -> bool:
    """Return whether a loader is on the stack; a forked worker has the frames of the process that forked it."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_LOADERS):
            return True
        frame = frame.f_back
    return False


def _overridden(outer: FrameType | None) -> FrameType | None:
    """Return the frame in which a mode or a tensor subclass overrode a torch function, in the middle of a call."""
    while outer is not None:
        before = outer.f_back
        if outer.f_code is _HANDLE and before is not None and before.f_code.co_filename in _API:
            return before
        outer = before
    return None


_attached: list[DefaultGroup] = []


def exchange_attached(others: list[DefaultGroup]) -> list[DefaultGroup]:
    """Replace the attached substitutes and return the previous ones: for a thread with process groups of its own."""
    before = list(_attached)
    _attached[:] = others
    return before


@contextmanager
def in_step() -> Iterator[None]:
    """Return a context for user code of a step, its backward included: the default group is the data-parallel one.

    Not collective.
    """
    current = _attached[-1] if _attached else None
    if current is None:
        yield
        return
    current.depth += 1
    try:
        yield
    finally:
        current.depth -= 1


def world_size_read(world_size: int) -> None:
    """Warn if the caller's caller is user code that reads the world size from a strategy in a step."""
    if _attached:
        _attached[-1].world_size_read(sys._getframe(2), world_size)


def show_as_default(group: dist.ProcessGroup) -> None:
    """Make a group the default process group of torch, for all code. Not collective."""
    distributed_c10d._update_default_pg(group)


def number_groups_from(number: int) -> None:
    """Number further groups from ``number`` on: ranks with different default groups have created unequal numbers."""
    distributed_c10d._world.group_count = max(number, distributed_c10d._world.group_count)


class _WorldOfRun(distributed_c10d._World):
    """torch's record of process groups while a :class:`DefaultGroup` is attached."""

    @property
    def default_pg(self) -> Any:
        """Default process group for the calling code."""
        world = distributed_c10d._World.default_pg.fget(self)  # type: ignore[attr-defined]
        return _attached[-1].seen_from(sys._getframe(1), world) if _attached else world

    @default_pg.setter
    def default_pg(self, value: Any) -> None:
        distributed_c10d._World.default_pg.fset(self, value)  # type: ignore[attr-defined]


def _folder(package: str) -> str:
    found = importlib.util.find_spec(package)
    return str(Path(found.origin).parent) + "/" if found is not None and found.origin is not None else "\0"


#: Folders whose code is not user code.
_LIBRARIES = tuple(
    _folder(name) for name in ("torch", "lightning", "lightning_pardist", "lightning_utilities", "torchmetrics")
)
#: Files that make batches: torch's loaders, and Lightning's loops over an iterable of the user's own.
_LOADERS = (
    _folder("torch") + str(Path("utils", "data")),
    _folder("lightning") + str(Path("pytorch", "utilities", "combined_loader.py")),
    _folder("lightning") + str(Path("pytorch", "loops", "fetchers.py")),
)
