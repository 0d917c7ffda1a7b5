"""Interface of data-axis engines."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pardist.checkpoint.tensors import Slots
from lightning_pardist.engines.common.gradient_math import Counts


class MicrobatchContext(Protocol):
    """State kept apart for interleaved micro-batches."""

    def agree(self, count: int) -> int:
        """The number of micro-batches, given how many this rank can make. Collective over the data axis."""
        ...

    def begin(self, turn: Hashable) -> None:
        """What runs from now on belongs to this micro-batch. Not collective."""
        ...

    def finish(self) -> None:
        """All have run: complete ``.grad``. Collective over the data axis."""
        ...


class DataEngine(Protocol):
    """Reduces gradients, and manages whatever else is sharded, over the data axis."""

    @property
    def is_reduced(self) -> bool:
        """Whether gradients were synchronised since :meth:`step_done` was called last."""
        ...

    @property
    def has_gradients(self) -> bool:
        """Whether the synchronised gradients are those of any rank, also if none of them is this rank's to keep."""
        ...

    def no_sync(self) -> AbstractContextManager[None]:
        """Gradients accumulate and are not synchronised inside."""
        ...

    def backward(self, loss: Tensor, *, overlap: bool = True) -> AbstractContextManager[None]:
        """Around the call that runs backward from ``loss``. Collective, unless under :meth:`no_sync`."""
        ...

    def reduce(self) -> None:
        """Synchronise what is not synchronised yet. Collective."""
        ...

    def step_done(self) -> None:
        """The optimizer has stepped."""
        ...

    def defer_reduction(self) -> AbstractContextManager[MicrobatchContext | None]:
        """Backward passes inside leave their gradients in ``.grad``; the engine learns of them in :meth:`reduce`.

        Returns:
            A context of who is to be told whose backward runs; of None if nobody needs to know.
        """
        ...

    def grad_power(
        self, params: Iterable[nn.Parameter], norm_type: float = 2.0, counts: Counts | None = None
    ) -> Tensor:
        """Sum of powers of the reduced gradients of some parameters over the data axis. Collective over it.

        Args:
            params: Parameters of the module.
            norm_type: The power; ``inf`` for the largest magnitude in place of a sum.
            counts: Whether a parameter is counted on this rank; all of them if None.

        Returns:
            A scalar in fp32 or wider, equal over the data axis.
        """
        ...

    def local_grads(self, params: Iterable[nn.Parameter]) -> list[Tensor]:
        """What this rank holds of the gradients of some parameters, to be changed in place. Not collective."""
        ...

    def zero_grad(self) -> None:
        """Forget gradients that the engine keeps outside the module's parameters."""
        ...

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state dict of one process, whole at least on the first rank. Collective."""
        ...

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Take this rank's part of a state dict of one process."""
        ...

    def slots(self, optimizer: Optimizer) -> Slots:
        """What an optimizer holds on this rank of the parameters that the user gave it, group by group."""
        ...

    def settle(self, optimizer: Optimizer) -> None:
        """State was put into an optimizer: bring it to where it is kept. Not collective."""
        ...

    def held_bytes(self) -> int:
        """Bytes that the engine holds on this rank beside parameters, gradients and optimizer state."""
        ...

    def detach(self) -> None:
        """Remove every trace from the module. Not collective."""
        ...
