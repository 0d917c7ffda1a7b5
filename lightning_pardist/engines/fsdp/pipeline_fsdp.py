"""FSDP under a pipeline: pre- and post-forward run inside the replaced ``forward``.

[Note: what a pipeline costs] A stage runs ``m`` forwards and ``m`` backwards a step. Each gathers the stage's units
anew, and each backward reduces their gradients, so that a rank sends ``3 m Psi (N-1)/N`` for the ``Psi`` parameters of
its stage, where ``2 Psi (N-1)/N`` would do. In return no rank ever holds more of its stage than a unit. Units that stay
gathered through the step save the gathers, gradients that stay whole through it the reductions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_pardist.compat.pytree import tree_leaves, tree_map
from lightning_pardist.engines.fsdp.backward import BackwardRuntime, ShardedUnit


class FSDPMicrobatchContext:
    """Swaps FSDP's per-step state when micro-batches interleave.

    See :class:`~lightning_pardist.engines.data_engine.MicrobatchContext`.

    Args:
        runtime: The sharded module's.
        finish: Reduces what is left when all have run. Collective over the mesh.
    """

    def __init__(self, runtime: BackwardRuntime, finish: Callable[[], None]) -> None:
        self._runtime = runtime
        self._finish = finish

    def agree(self, count: int) -> int:
        """The number of micro-batches that every rank can make: units are gathered as often on all. Collective.

        Args:
            count: How many this rank can make.
        """
        sequencer = self._runtime.sequencer
        if sequencer.size == 1:
            return count
        least = torch.tensor([count])
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=sequencer.group)
        return int(least)

    def begin(self, turn: Hashable) -> None:
        """What runs from now on belongs to this turn. Not collective."""
        self._runtime.turn = turn

    def finish(self) -> None:
        """All micro-batches have run: afterwards ``.grad`` is complete. Collective over the mesh."""
        self._runtime.turn = None
        self._finish()


class UnitForward:
    """Stands in for a unit's ``forward``: gathers it before, frees it after, as its hooks did around its call.

    A pipeline calls a module to find out where it is, and runs its ``forward`` on the ranks that hold it alone: nothing
    is to be gathered for the call, and the run may end before hooks behind the call.

    Args:
        unit: The unit; its hooks are removed.
        runtime: Of the module that it is a unit of.
    """

    def __init__(self, unit: ShardedUnit, runtime: BackwardRuntime) -> None:
        self.unit = unit
        self.runtime = runtime
        self.module: nn.Module = unit.unit.module
        self._own = self.module.__dict__.get("forward")
        self.forward: Callable[..., Any] = self.module.forward
        unit.state.remove_forward_hooks()
        self.module.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, gathered. Collective over the shard group."""
        self.runtime.before_forward(self.unit)
        inside, inside_kwargs = self.unit.state.pre_forward(args, kwargs)
        output = self.forward(*inside, **inside_kwargs)
        output = _handed_through(output, (args, kwargs), (inside, inside_kwargs))
        return self.unit.state.post_forward(args, output)

    def remove(self) -> None:
        """Leave the module as it was, but for its hooks. Not collective."""
        if self.module.__dict__.get("forward") is self:
            del self.module.__dict__["forward"]
            if self._own is not None:
                self.module.__dict__["forward"] = self._own


def _handed_through(output: Any, given: Any, inside: Any) -> Any:
    """An output in which inputs that the module returned as they were are the caller's own objects again."""
    before, after = tree_leaves(given), tree_leaves(inside)
    originals = {
        id(new): old
        for old, new in zip(before, after, strict=True)
        if new is not old and isinstance(new, torch.Tensor) and new.dtype == old.dtype
    }
    if not any(id(leaf) in originals for leaf in tree_leaves(output)):
        return output
    return tree_map(lambda leaf: originals.get(id(leaf), leaf), output)
