"""The default process group that user code sees in a step: the ranks that see different samples.

Code that gathers over the world by itself (``dist.all_gather`` in a contrastive loss, say) means the ranks with other
samples. Under tensor and pipeline parallelism the world has ranks with the same samples as well, which would be counted
several times, without a word. So while a step runs, torch's functions answer user code, and nobody else, as if the
default group were that of the batch: size, rank and collectives agree. torch, Lightning and this package see the
world. A ``DistributedSampler`` without arguments is user code in this sense at any time of a run, and so is what
loaders call to make batches, in the process or in workers by fork: a dataset that keeps every n-th sample, say.

[Note: one property] ``dist.all_reduce(x)``, ``dist.get_world_size()`` and ``dist.group.WORLD`` all look the default
group up in ``torch.distributed.distributed_c10d._world.default_pg``, which has no public hook. Its getter looks for the
caller on the stack. The group that it hands out is nobody else's, and so can be told from one that a caller has named.
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

#: torch's own functions between the lookup and whoever calls them.
_API = frozenset({distributed_c10d.__file__, c10d_logger.__file__, nn_functional.__file__, __file__})
#: Functions about groups themselves, whose ranks are those of the world.
_ABOUT_GROUPS = frozenset({"new_group", "new_subgroups", "new_subgroups_by_enumeration", "split_group"})
#: Collectives whose result depends on who takes part.
_COUNTING = frozenset(
    {
        *("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_gather"),
        *("all_gather_into_tensor", "all_gather_single", "all_gather_object", "gather", "gather_object"),
    }
)
_HANDLE = handle_torch_function.__code__
_SAMPLER = str(Path("torch", "utils", "data", "distributed.py"))


class DefaultGroup:
    """Shows user code another default process group in the steps of a run. Attached for a run; not collective.

    Args:
        group: This rank's group of the batch, made for this purpose and passed to nobody.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.depth = 0
        self._warned: set[tuple[CodeType, int]] = set()

    def attach(self) -> None:
        """Begin to answer."""
        world = distributed_c10d._world
        _attached.append(self)
        world.__class__ = _WorldOfRun

    def detach(self) -> None:
        """The world is the default group again."""
        if self in _attached:
            _attached.remove(self)
        if not _attached:
            distributed_c10d._world.__class__ = distributed_c10d._World

    def seen_from(self, frame: FrameType | None, world: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
        """The default group for whoever asks.

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
                f"This combines values of all {world.size()} ranks, of which only {self.group.size()} see"
                " different samples: those of the others count several times. Use self.all_gather, sync_dist=True, or"
                " group=self.trainer.strategy.data_group.",
            )
        return world

    def world_size_read(self, frame: FrameType | None, world_size: int) -> None:
        """Warn if user code asks the Trainer for the number of ranks in a step, or where it makes its optimizers.

        Args:
            frame: Of Lightning, or of whoever asks the strategy.
            world_size: The answer.
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
            # By itself: the lookup is not made at the line that the warning is about.
            warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno)


class _Call:
    """A call of torch's functions about process groups, as the stack shows it.

    Attributes:
        caller: Who called the outermost of them.
        names: Of these functions.
        named: The group that one of them was given by its caller; None for the default.
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
        """Whether user code called; torch's differentiable collectives have their backward called by autograd."""
        caller = self.caller
        return self._differentiable or (caller is not None and not caller.f_code.co_filename.startswith(_LIBRARIES))


def _loads(frame: FrameType | None) -> bool:
    """Whether a loader has called, at whatever distance; a worker by fork has the frames of who made it."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_LOADERS):
            return True
        frame = frame.f_back
    return False


def _overridden(outer: FrameType | None) -> FrameType | None:
    """Where a mode, or a tensor with its own version of torch's functions, was asked in the middle of a call."""
    while outer is not None:
        before = outer.f_back
        if outer.f_code is _HANDLE and before is not None and before.f_code.co_filename in _API:
            return before
        outer = before
    return None


_attached: list[DefaultGroup] = []


def exchange_attached(others: list[DefaultGroup]) -> list[DefaultGroup]:
    """Let others answer in place of those that do, who are returned: for a thread with process groups of its own."""
    before = list(_attached)
    _attached[:] = others
    return before


@contextmanager
def in_step() -> Iterator[None]:
    """Around user code of a step, its backward included: the default group is that of the batch. Not collective."""
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
    """The caller's caller has asked a strategy for the number of ranks: a warning, if it should have another."""
    if _attached:
        _attached[-1].world_size_read(sys._getframe(2), world_size)


def show_as_default(group: dist.ProcessGroup) -> None:
    """Let torch, and everybody who asks it, take a group for that of all ranks. Not collective."""
    distributed_c10d._update_default_pg(group)


def number_groups_from(number: int) -> None:
    """Name further groups from a number on: ranks whose defaults differed have made different numbers of them."""
    distributed_c10d._world.group_count = max(number, distributed_c10d._world.group_count)


class _WorldOfRun(distributed_c10d._World):
    """torch's record of process groups, while a :class:`DefaultGroup` is attached."""

    @property
    def default_pg(self) -> Any:
        """The default process group for the caller."""
        world = distributed_c10d._World.default_pg.fget(self)  # type: ignore[attr-defined]
        return _attached[-1].seen_from(sys._getframe(1), world) if _attached else world

    @default_pg.setter
    def default_pg(self, value: Any) -> None:
        distributed_c10d._World.default_pg.fset(self, value)  # type: ignore[attr-defined]


def _folder(package: str) -> str:
    found = importlib.util.find_spec(package)
    return str(Path(found.origin).parent) + "/" if found is not None and found.origin is not None else "\0"


#: Where callers are not user code.
_LIBRARIES = tuple(
    _folder(name) for name in ("torch", "lightning", "lightning_pardist", "lightning_utilities", "torchmetrics")
)
#: Where batches are made: by torch's loaders, or by an iterable of the user's own that the Trainer was given.
_LOADERS = (
    _folder("torch") + str(Path("utils", "data")),
    _folder("lightning") + str(Path("pytorch", "utilities", "combined_loader.py")),
    _folder("lightning") + str(Path("pytorch", "loops", "fetchers.py")),
)
