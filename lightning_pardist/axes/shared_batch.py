"""Base class of axes whose ranks share one batch: steps on split tensors, synchronized random state."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torchmetrics import Metric
from typing_extensions import override

from lightning_pardist.axes.base import ParallelAxis
from lightning_pardist.axes.first_batch import batch_checksum, broadcast_batch, warn_of_different_batches
from lightning_pardist.engines.common.devices import device_in_use, random_state
from lightning_pardist.engines.tensor import TensorRuntime
from lightning_pardist.trainer.random_numbers import random_draws_message
from lightning_pardist.trainer.resumable_loaders import rng_state, set_rng_state

_ABSENT = object()
#: Methods of a LightningModule that pass tensors to the Trainer, which supports plain tensors only.
_REPORTS = ("log", "log_dict", "all_gather", "print")


class SharedBatchAxis(ParallelAxis):
    """Axis whose ranks see the same samples and run the user's step on split tensors of global shape.

    Attributes:
        kind: Kind of the axis' rank groups, for messages.
        runtime: Runtime that executes steps; None outside of a Trainer's run.
    """

    kind: ClassVar[str]

    def __init__(self) -> None:
        self.runtime: TensorRuntime | None = None
        self._wrapped: list[tuple[nn.Module, str, Any]] = []
        #: Whether random state has differed between ranks before; whether samples have.
        self._has_drifted = self._has_shared = False
        #: Operators for which it has been logged that each rank draws its own random numbers.
        self._told_draws: set[str] = set()

    @override
    def compile_refusal(self, whole_step: bool) -> str:
        return (
            "computes on split tensors, whose operators are handled one by one in Python: a compiler would trace"
            " through that. Leave compile out, or use pardist_zero3"
        )

    # --- steps --------------------------------------------------------------------------------------------------

    @override
    def running(self) -> AbstractContextManager[None]:
        return nullcontext() if self.runtime is None else self.runtime.step()

    @override
    def run_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.runtime is None:
            return step(*args, **kwargs)
        args, kwargs = self._agree(self.runtime, (args, kwargs))
        output = self.plain(step(*args, **kwargs))
        if new := sorted(self.runtime.group.drawn - self._told_draws):
            self._told_draws.update(new)
            how = f"each {self.kind} rank for its part of a tensor that is split ({', '.join(new)})"
            rank_zero_info(random_draws_message("A step", how))
        return output

    @override
    def backward(self, run: Callable[[], None]) -> None:
        if self.runtime is None:
            run()
            return
        with self.runtime.step():
            run()

    @override
    def plain(self, tree: Any) -> Any:
        """Convert split tensors and parameters to plain ones, for code outside steps. Collective if there are any."""
        return tree if self.runtime is None else self.runtime.plain(tree)

    @override
    def part_of(self, tensor: Tensor) -> tuple[Tensor, Any] | None:
        return None if self.runtime is None else self.runtime.part_of(tensor)

    @override
    def of_part(self, part: Tensor, split: Any) -> Tensor:
        return super().of_part(part, split) if self.runtime is None else self.runtime.of_part(part, split)

    # --- synchronized samples and random state ------------------------------------------------------------------

    def _share_random_state(self, group: dist.ProcessGroup) -> None:
        """Broadcast the first rank's random state: sampling, dropout of whole tensors. Collective over the group."""
        # Includes the state of each rank's own device.
        states = [rng_state()]
        dist.broadcast_object_list(states, group_src=0, group=group)
        set_rng_state(states[0])

    def _agree(self, runtime: TensorRuntime, given: Any) -> Any:
        """Synchronize samples and random state over the ranks of one group. Collective over the group.

        Costs one small all-gather per step. Random state drifts apart if one rank draws numbers that others do not (for
        example to plot on the first rank). Dropout would then be silently wrong, and the sample order would differ.

        Args:
            runtime: Runtime of the group.
            given: Arguments of this rank's step.

        Returns:
            The arguments; the first rank's if ranks were given different samples.
        """
        group = runtime.group.process_group
        samples, states = runtime.check_same_call("step", self._checksum(given), _random_fingerprint()).unbind(1)
        if (states != states[0]).any():
            self._share_random_state(group)
            if not self._has_drifted:
                # From now on fingerprints include elements on accelerators too, beginning with this step's samples.
                self._has_drifted = True
                samples = runtime.check_same_call("step", self._checksum(given), 0).unbind(1)[0]
        if (samples != samples[0]).any():
            if not self._has_shared:
                self._has_shared = True
                if group.rank() == 0:
                    warn_of_different_batches(f"a {self.kind} group")
            given = broadcast_batch(given, group=group, device=self.context.device)
        return given

    def _checksum(self, given: Any) -> int:
        """Return a checksum of a batch, which reads elements on accelerators once random state has differed."""
        return batch_checksum(given, reads_accelerators=self._has_drifted)

    # --- outputs of a step -------------------------------------------------------------------------------------

    def _wrap_reports(self, module: pl.LightningModule) -> None:
        """Wrap logging methods and metrics to receive plain tensors, and let metrics reduce over the batch group."""
        for child in module.modules():
            if isinstance(child, pl.LightningModule):
                for name in _REPORTS:
                    self._wrap(child, name)
            elif isinstance(child, Metric):
                self._wrap(child, "update")
                if child.process_group is None:
                    self._replace(child, "process_group", self.context.batch_group)

    def _wrap(self, owner: nn.Module, name: str) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self.context.plain((args, kwargs))
            return original(*args, **kwargs)

        self._replace(owner, name, wrapped)

    def _replace(self, owner: nn.Module, name: str, value: Any) -> None:
        self._wrapped.append((owner, name, owner.__dict__.get(name, _ABSENT)))
        owner.__dict__[name] = value

    def _unwrap(self) -> None:
        for owner, name, before in reversed(self._wrapped):
            if before is _ABSENT:
                owner.__dict__.pop(name, None)
            else:
                owner.__dict__[name] = before
        self._wrapped.clear()


def _random_fingerprint() -> int:
    """Return a checksum of the random state of torch (host and device), numpy and Python."""
    state = random_state(device_in_use())
    result = zlib.crc32(pickle.dumps((state.numpy, state.python)))
    result = zlib.crc32(state.host.numpy().tobytes(), result)
    return result if state.own is None else zlib.crc32(state.own.numpy().tobytes(), result)
