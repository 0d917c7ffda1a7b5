"""FSDP under a pipeline: pre- and post-forward run inside the replaced ``forward``.

[Note: what a pipeline costs] A stage runs ``m`` forwards and ``m`` backwards per step. Each gathers the stage's units
again, and each backward reduces their gradients, so a rank sends ``3 m Psi (N-1)/N`` for the ``Psi`` parameters of its
stage, where ``2 Psi (N-1)/N`` would suffice. In return a rank never holds more of its stage than one unit. Units that
stay gathered through the step save the gathers, gradients that stay unsharded through it save the reductions.
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
    """Keeps FSDP's per-step state apart for interleaved micro-batches.

    See :class:`~lightning_pardist.engines.data_engine.MicrobatchContext`.

    Args:
        runtime: Backward runtime of the sharded module.
        finish: Reduces what is left when all micro-batches have run. Collective over the mesh.
    """

    def __init__(self, runtime: BackwardRuntime, finish: Callable[[], None]) -> None:
        self._runtime = runtime
        self._finish = finish

    def agree(self, count: int) -> int:
        """Return the number of micro-batches that every rank can make, so that all gather equally often. Collective.

        Args:
            count: Number of micro-batches that this rank can make.
        """
        sequencer = self._runtime.sequencer
        if sequencer.size == 1:
            return count
        least = torch.tensor([count])
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=sequencer.group)
        return int(least)

    def begin(self, turn: Hashable) -> None:
        """Start or resume a micro-batch: forwards and backwards belong to it from now on. Not collective."""
        self._runtime.turn = turn

    def finish(self) -> None:
        """Finish after all micro-batches have run; ``.grad`` is complete afterwards. Collective over the mesh."""
        self._runtime.turn = None
        self._finish()


class UnitForward:
    """Replaces a unit's ``forward``: gathers the unit before it and frees it after it, as its hooks would do.

    A pipeline calls a module to find its place in the model, and runs ``forward`` only on the ranks that hold the
    module. The call must not gather anything, and the run may end before post-forward hooks.

    Args:
        unit: The unit; its forward hooks are removed.
        runtime: Backward runtime of the sharded module.
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
        """Run the module's own forward with the unit gathered. Collective over the shard group."""
        self.runtime.before_forward(self.unit)
        inside, inside_kwargs = self.unit.state.pre_forward(args, kwargs)
        output = self.forward(*inside, **inside_kwargs)
        output = _restore_passed_through_inputs(output, (args, kwargs), (inside, inside_kwargs))
        return self.unit.state.post_forward(args, output)

    def remove(self) -> None:
        """Restore the module's own ``forward``, but not the hooks. Not collective."""
        if self.module.__dict__.get("forward") is self:
            del self.module.__dict__["forward"]
            if self._own is not None:
                self.module.__dict__["forward"] = self._own


def _restore_passed_through_inputs(output: Any, given: Any, inside: Any) -> Any:
    """Return an output in which inputs that the module returned unchanged are the caller's own objects."""
    before, after = tree_leaves(given), tree_leaves(inside)
    originals = {
        id(new): old
        for old, new in zip(before, after, strict=True)
        if new is not old and isinstance(new, torch.Tensor) and new.dtype == old.dtype
    }
    if not any(id(leaf) in originals for leaf in tree_leaves(output)):
        return output
    return tree_map(lambda leaf: originals.get(id(leaf), leaf), output)
