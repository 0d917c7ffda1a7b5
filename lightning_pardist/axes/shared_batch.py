"""Base of axes whose ranks work on one batch together: steps on split tensors, and one stream of random numbers."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torchmetrics import Metric
from typing_extensions import override

from lightning_pardist.axes.base import ParallelAxis
from lightning_pardist.axes.first_batch import of_first_rank, warn_of_different_batches
from lightning_pardist.engines.common.devices import device_in_use, random_state
from lightning_pardist.engines.pipeline.nested import flatten
from lightning_pardist.engines.tensor import TensorRuntime
from lightning_pardist.trainer.random_numbers import drawn_apart
from lightning_pardist.trainer.resumable_loaders import rng_state, set_rng_state

_ABSENT = object()
#: Methods of a LightningModule that hand tensors to the Trainer, which knows plain ones only.
_REPORTS = ("log", "log_dict", "all_gather", "print")


class SharedBatchAxis(ParallelAxis):
    """An axis whose ranks see the same samples, and run the user's step on tensors of global shape that are split.

    Attributes:
        kind: Of its groups of ranks, for messages.
        runtime: Runs steps; None outside of a Trainer's run.
    """

    kind: ClassVar[str]

    def __init__(self) -> None:
        self.runtime: TensorRuntime | None = None
        self._wrapped: list[tuple[nn.Module, str, Any]] = []
        #: Whether ranks have once had different random numbers, or samples.
        self._has_drifted = self._has_shared = False
        #: Operators of which the log says that ranks draw their own numbers.
        self._told_draws: set[str] = set()

    @override
    def why_not_compiled(self, whole_step: bool) -> str:
        return (
            "computes on split tensors, whose operators are taken apart one by one in Python: a compiler would trace"
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
            rank_zero_info(drawn_apart("A step", how))
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
        """The same without split tensors and parameters, for code outside of steps. Collective if there are any."""
        return tree if self.runtime is None else self.runtime.plain(tree)

    @override
    def part_of(self, tensor: Tensor) -> tuple[Tensor, Any] | None:
        return None if self.runtime is None else self.runtime.part_of(tensor)

    @override
    def of_part(self, part: Tensor, split: Any) -> Tensor:
        return super().of_part(part, split) if self.runtime is None else self.runtime.of_part(part, split)

    # --- one stream of samples and random numbers ---------------------------------------------------------------

    def _share_random_state(self, group: dist.ProcessGroup) -> None:
        """All ranks of the axis draw the same numbers: samples, dropout of whole tensors. Collective over the group."""
        # Of the device that each computes on: ranks of one host have one each.
        states = [rng_state()]
        dist.broadcast_object_list(states, group_src=0, group=group)
        set_rng_state(states[0])

    def _agree(self, runtime: TensorRuntime, given: Any) -> Any:
        """The same samples on the ranks of one group, and the same random numbers. Collective over the group.

        One small gather a step. Random streams drift where one rank does something that others do not (a picture drawn
        on the first rank, say), and with them dropout, which would be wrong in silence, and the order of samples.

        Args:
            runtime: Of the group.
            given: What this rank's step was given.

        Returns:
            The same; the first rank's where ranks were given different samples.
        """
        group = runtime.group.process_group
        samples, states = runtime.meet("step", self._fingerprint(given), _random_fingerprint()).unbind(1)
        if (states != states[0]).any():
            self._share_random_state(group)
            if not self._has_drifted:
                # From now on elements are looked at on accelerators too, those of this step's samples first.
                self._has_drifted = True
                samples = runtime.meet("step", self._fingerprint(given), 0).unbind(1)[0]
        if (samples != samples[0]).any():
            if not self._has_shared:
                self._has_shared = True
                if group.rank() == 0:
                    warn_of_different_batches(f"a {self.kind} group")
            given = of_first_rank(given, group=group, device=self.context.device)
        return given

    def _fingerprint(self, given: Any) -> int:
        """A number that differs between different batches, of a sample of their elements.

        On an accelerator, where looking at elements would wait for it, of shapes alone, until random numbers that
        samples may have been drawn with have differed.
        """
        result = 0
        leaves, _ = flatten(given)
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                result = zlib.crc32(str(tuple(leaf.shape)).encode(), result)
                looked_at = leaf.device.type == "cpu" or self._has_drifted
                if looked_at and leaf.layout == torch.strided and leaf.numel():
                    flat = leaf.detach().reshape(-1)
                    sample = flat[:: max(1, flat.numel() // 256)].contiguous().cpu()
                    result = zlib.crc32(sample.view(torch.uint8).numpy().tobytes(), result)
            elif isinstance(leaf, (int, float, str)):
                result = zlib.crc32(repr(leaf).encode(), result)
        return result

    # --- what leaves a step ------------------------------------------------------------------------------------

    def _wrap_reports(self, module: pl.LightningModule) -> None:
        """Values that steps log, and what metrics take, are plain tensors; metrics combine over the data axis."""
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
    """Of torch, of the device, of numpy and of Python."""
    state = random_state(device_in_use())
    result = zlib.crc32(pickle.dumps((state.numpy, state.python)))
    result = zlib.crc32(state.host.numpy().tobytes(), result)
    return result if state.own is None else zlib.crc32(state.own.numpy().tobytes(), result)
