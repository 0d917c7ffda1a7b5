"""What a strategy asks of whatever serves its data axis."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor


class DataEngine(Protocol):
    """Keeps gradients, and whatever else it shards, right over the ranks that see different samples.

    Attributes:
        is_reduced: Whether gradients were synchronised since :meth:`step_done` was called last.
    """

    is_reduced: bool

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

    def held_bytes(self) -> int:
        """Bytes that the engine holds on this rank beside parameters, gradients and optimizer state."""
        ...

    def detach(self) -> None:
        """Remove every trace from the module. Not collective."""
        ...
