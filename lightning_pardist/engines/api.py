"""What a strategy asks of whatever serves its data axis."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer


class DataEngine(Protocol):
    """Keeps gradients, and whatever else it shards, right over the ranks that see different samples."""

    @property
    def is_reduced(self) -> bool:
        """Whether gradients were synchronised since :meth:`step_done` was called last."""
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

    def clip_grad_norm(self, optimizer: Optimizer, max_norm: float) -> Tensor:
        """Scale an optimizer's gradients to a global norm of at most ``max_norm``; the norm before. Collective."""
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

    def held_bytes(self) -> int:
        """Bytes that the engine holds on this rank beside parameters, gradients and optimizer state."""
        ...

    def detach(self) -> None:
        """Remove every trace from the module. Not collective."""
        ...
