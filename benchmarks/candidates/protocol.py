"""Interface between the harness and a candidate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Protocol

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from benchmarks.settings import Settings
from lightning_pardist.engines.common.memory import held_bytes


class PassesBeforeSteps(Protocol):
    """Gate as seen by candidates; see :class:`benchmarks.rank.Gate`."""

    def before_step(self, held: object) -> None:
        """Call before every step with a function that returns the bytes held."""
        ...

    def took(self, loss: Tensor) -> None:
        """Call after a step with its loss."""
        ...


class Candidate(Protocol):
    """One way to train the workload.

    Attributes:
        name: Name on the command line.
        title: One-line description for the report.
        single: Whether it runs on one process, regardless of the number of devices.
    """

    name: str
    title: str
    single: bool

    def run(self, settings: Settings, gate: PassesBeforeSteps) -> None:
        """Train :attr:`Settings.total_steps` steps in this rank's process, passing the gate before each.

        LOCAL_RANK, RANK, WORLD_SIZE, NODE_RANK, MASTER_ADDR and MASTER_PORT are set as by torchrun, unless
        ``single``. Time until the first step counts as set-up. The process is killed at the gate after the last round.
        """
        ...


def held_by(
    net: nn.Module,
    optimizers: Iterable[Optimizer],
    *,
    wrapper: nn.Module | None = None,
    replicas: int | None = None,
) -> dict[str, int]:
    """Return the bytes of model states of a candidate that does not count them itself.

    Args:
        net: The module.
        optimizers: Its optimizers.
        wrapper: torch DDP's wrapper, which stores gradients a second time unless they are views of its buckets.
        replicas: Number of ranks that train on different samples; all if None.
    """
    held = held_bytes([net], optimizers)
    copies = 0
    if isinstance(wrapper, DistributedDataParallel) and not wrapper.gradient_as_bucket_view:
        copies = sum(p.numel() * p.element_size() for p in net.parameters() if p.requires_grad)
    count = {} if replicas is None else {"replicas": replicas}
    return asdict(held) | {"bucket_copies": copies, "total": held.total + copies} | count
