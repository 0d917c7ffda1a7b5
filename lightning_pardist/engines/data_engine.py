"""Interface of the engines that synchronise gradients over the data axis."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pardist.checkpoint.tensors import Slots
from lightning_pardist.engines.common.gradient_math import Counts

#: What :meth:`DataEngine.average_assigned` has found: whether ranks had assigned gradients, and equal ones.
Assigned = Literal["none", "alike", "different"]


class MicrobatchContext(Protocol):
    """Per-micro-batch state of a data engine whose micro-batches run interleaved (pipeline schedules)."""

    def agree(self, count: int) -> int:
        """Return the minimum of ``count``, the possible micro-batches, over ranks. Collective over the data axis."""
        ...

    def begin(self, turn: Hashable) -> None:
        """Switch to the state of a micro-batch before its forward or backward runs. Not collective."""
        ...

    def finish(self) -> None:
        """Complete ``.grad`` after all micro-batches have run. Collective over the data axis."""
        ...


class DataEngine(Protocol):
    """Engine that reduces gradients over the data axis and manages the state that is sharded over it."""

    @property
    def is_reduced(self) -> bool:
        """Whether gradients have been synchronised since the last call of :meth:`step_done`."""
        ...

    @property
    def has_gradients(self) -> bool:
        """Whether any rank holds synchronised gradients, even if this rank's shard holds none of them."""
        ...

    @property
    def scales_reduced_gradients(self) -> bool:
        """Whether a factor on all gradients may be applied to :meth:`local_grads` after the reduction."""
        ...

    @property
    def has_gradient_hooks(self) -> bool:
        """Whether any parameter has a hook of the user's on its gradient."""
        ...

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients inside the context without synchronising them."""
        ...

    def backward(self, loss: Tensor, *, overlap: bool = True) -> AbstractContextManager[None]:
        """Wrap the call that runs backward from ``loss``. Collective, unless under :meth:`no_sync`."""
        ...

    def reduce(self) -> None:
        """Synchronise the gradients that are not synchronised yet. Collective."""
        ...

    def average_assigned(self, params: Iterable[nn.Parameter], weight: float) -> Assigned:
        """Average gradients that user code has assigned. Collective over the data axis if there are some.

        Args:
            params: Parameters of the next step.
            weight: Weight of this rank's gradients.
        """
        ...

    def step_done(self) -> None:
        """Mark the end of the optimizer step."""
        ...

    def defer_reduction(self) -> AbstractContextManager[MicrobatchContext | None]:
        """Leave the gradients of backward passes inside in ``.grad`` until :meth:`reduce` takes them up.

        Returns:
            A context manager that yields the :class:`MicrobatchContext` to switch before each forward and backward, or
            None if the engine keeps no state per micro-batch.
        """
        ...

    def grad_power(
        self, params: Iterable[nn.Parameter], norm_type: float = 2.0, counts: Counts | None = None
    ) -> Tensor:
        """Return the sum of powers of some parameters' reduced gradients. Collective over the data axis.

        Args:
            params: Parameters of the module.
            norm_type: The power; with ``inf``, the largest magnitude is returned instead of a sum.
            counts: Predicate for whether a parameter is counted on this rank; None counts all of them.

        Returns:
            A scalar in fp32 or wider, equal over the data axis.
        """
        ...

    def local_grads(self, params: Iterable[nn.Parameter]) -> list[Tensor]:
        """Return this rank's parts of some parameters' gradients, for in-place changes. Not collective."""
        ...

    def zero_grad(self) -> None:
        """Drop gradients that the engine keeps outside the module's parameters."""
        ...

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the unsharded optimizer state dict, complete at least on the first rank. Collective."""
        ...

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load this rank's part of an unsharded optimizer state dict."""
        ...

    def slots(self, optimizer: Optimizer) -> Slots:
        """Return, per parameter group, what an optimizer holds on this rank of the parameters the user gave it."""
        ...

    def settle(self, optimizer: Optimizer) -> None:
        """Move state that was just loaded into an optimizer to where the engine keeps it. Not collective."""
        ...

    def held_bytes(self) -> int:
        """Return the bytes held on this rank besides parameters, gradients and optimizer state."""
        ...

    def detach(self) -> None:
        """Remove the engine's hooks and attributes from the module. Not collective."""
        ...
