"""Data engine of sharded modules: gradients, norm and optimizer state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pardist.checkpoint.tensors import Slots, full_slots, in_place, shared_entries, shared_state
from lightning_pardist.compat.tensors import accumulation_hooks_of, gradient_hooks_of
from lightning_pardist.engines.common.devices import device_of_mesh
from lightning_pardist.engines.common.full_tensor_updates import updates_of
from lightning_pardist.engines.common.gradient_math import Counts
from lightning_pardist.engines.common.update_scope import (
    Scope,
    ScopeSetting,
    needs_full_tensors,
)
from lightning_pardist.engines.data_engine import Assigned, MicrobatchContext
from lightning_pardist.engines.fsdp.full_state import is_rank, own_values, whole_values
from lightning_pardist.engines.fsdp.fully_sharded import Accumulate, FullySharded
from lightning_pardist.engines.fsdp.sharded_norm import local_gradients, sharded_grad_norm
from lightning_pardist.engines.offload import HostedState, HostStep, Offload, StateFile
from lightning_pardist.local_tensors import local_shard, tensor_shard_shape


class ShardedDataEngine:
    """The :class:`~lightning_pardist.engines.data_engine.DataEngine` of a module sharded by :func:`~.shard.shard`.

    Gradients are reduced by the module's own hooks. Optimizers step on shards, and their state is read and written
    in the single-process numbering of parameters, even after the module itself was unsharded.

    Args:
        sharded: The module's handle.
        optimizers: Created from the module's parameters after it was sharded.
        accumulate: How gradients of all but the last micro-batch are kept.
        offload: Where optimizer state is kept and steps run. On a device, the module must be sharded with torch's
            ``CPUOffloadPolicy``.
        update_group: Creates the group of ranks that update whole tensors together, given the update's scope: those
            that hold parameters, tensor ranks that split them included, or all stages. Collective over the world.
        update_scope: What an element's update depends on; found by a trial if ``"auto"``.
        group: Ranks over which gradients are averaged; required with ``narrower``.
        narrower: Parameters that the module's handle ignores, whose gradients another engine averages, each with the
            ranks that hold it.

    Raises:
        ValueError: If an optimizer cannot be tried, or it updates all tensors together and state is kept in files.
        RuntimeError: If there is not enough room for offloaded state.
    """

    def __init__(
        self,
        sharded: FullySharded,
        optimizers: Sequence[Optimizer],
        *,
        accumulate: Accumulate,
        offload: Offload | None = None,
        update_group: Callable[[Scope], dist.ProcessGroup] | None = None,
        update_scope: ScopeSetting = "auto",
        group: dist.ProcessGroup | None = None,
        narrower: Mapping[nn.Parameter, dist.ProcessGroup] | None = None,
    ) -> None:
        self.sharded = sharded
        self._group, self._narrower = group, dict(narrower or {})
        self.accumulate = accumulate
        self._is_reduced = False
        self._accumulating = False
        self._hosts: dict[Optimizer, HostStep] = {}
        store = None if offload is None or offload.folder is None else StateFile(offload.folder)
        for optimizer in optimizers:
            hosted = None
            if offload is not None and needs_full_tensors(optimizer, form="dims", setting=update_scope):
                hosted = HostedState.of(offload, device_of_mesh(sharded.mesh), store)
            elif offload is not None:
                window_bytes = None if store is None else int(offload.window_mb * 2**20)
                self._hosts[optimizer] = HostStep(optimizer, store=store, window_bytes=window_bytes)
            sharded.attach(
                optimizer, host=self._hosts.get(optimizer), hosted=hosted, group=update_group, scope=update_scope
            )

    @property
    def is_reduced(self) -> bool:
        """Whether a backward has run since :meth:`step_done` was called last."""
        return self._is_reduced

    @property
    def has_gradients(self) -> bool:
        """Whether any parameter has a gradient."""
        return any(param.grad is not None for param in self._in_shards(self.sharded.module.parameters()))

    @property
    def scales_reduced_gradients(self) -> bool:
        """Whether a factor on all gradients may be applied after the reduction: not if that compresses them."""
        return self.sharded.compression.reduce is None

    @property
    def has_gradient_hooks(self) -> bool:
        """Whether any parameter has a hook of the user's on its gradient, which runs on the unsharded gradient."""
        shards = self._in_shards(self.sharded.module.parameters())
        return any(
            getattr(shard, "gradient_hooks", None) or gradient_hooks_of(shard) or accumulation_hooks_of(shard)
            for shard in shards
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager in which gradients accumulate. Collective if they stay sharded."""
        before, self._accumulating = self._accumulating, True
        try:
            with self.sharded.accumulate(self.accumulate):
                yield
        finally:
            self._accumulating = before
        self._is_reduced = False

    @contextmanager
    def backward(self, loss: Tensor, *, overlap: bool = True) -> Iterator[None]:
        """Context manager around the call that runs backward from ``loss``. Collective."""
        if not self._accumulating:
            self.sharded.losses.note_loss()
        with self.sharded.in_backward():
            yield
        self._is_reduced = True

    def reduce(self) -> None:
        """Take the place of a backward that this rank does not run. Collective.

        Raises:
            RuntimeError: If other ranks have a loss, and ranks may not use different units.
        """
        self.sharded.join()
        self._is_reduced = True

    def average_assigned(self, params: Iterable[nn.Parameter], weight: float) -> Assigned:
        """Return "none": a gradient that a step assigns does not fit a shard, which torch refuses."""
        return "none"

    def step_done(self) -> None:
        """Record that the optimizer has stepped."""
        self._is_reduced = False

    def defer_reduction(self) -> AbstractContextManager[MicrobatchContext]:
        """Return the context of interleaved micro-batches, which keeps gradients as ``accumulate`` selects."""
        return self.sharded.microbatches(self.accumulate)

    def grad_power(
        self, params: Iterable[nn.Parameter], norm_type: float = 2.0, counts: Counts | None = None
    ) -> Tensor:
        """Return the sum of powers of some parameters' gradients over all shards. Collective."""
        held = [param for param in self._in_shards(params) if counts is None or counts(param)]
        largest = math.isinf(norm_type)
        norm = sharded_grad_norm([param for param in held if param not in self._narrower], norm_type)
        total = norm if largest else norm.pow(norm_type)
        for group in dict.fromkeys(self._narrower.values()):
            norm = sharded_grad_norm([param for param in held if self._narrower.get(param) is group], norm_type)
            # Every rank of the narrower group computes the same norm.
            own = (norm if largest else norm.pow(norm_type) / group.size()).to(total)
            dist.all_reduce(own, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=self._group)
            total = torch.maximum(total, own) if largest else total + own
        return total

    def local_grads(self, params: Iterable[nn.Parameter]) -> list[Tensor]:
        """Return this rank's shards of some parameters' gradients. Not collective."""
        return local_gradients(self._in_shards(params))

    def _in_shards(self, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Replace parameters that are gathered, in manual optimization, by their shards, which hold the gradients."""
        shards = self.sharded.shards()
        return [shards.get(id(param), param) for param in params]

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self.sharded.zero_grad()
        for param in self._narrower:
            param.grad = None

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the single-process state dict, gathered to the first rank one tensor at a time. Collective.

        Returns:
            The whole state in host memory on the first rank; parameter groups without state on the others.
        """
        if (updates := updates_of(optimizer)) is not None:
            return updates.state_dict()
        writer = self.sharded.writer
        here = is_rank(writer)
        host = self._hosts.get(optimizer)
        state: dict[Any, Any] = {}
        groups: list[dict[str, Any]] = []
        number = 0
        for group in optimizer.param_groups:
            first = number
            for parameter in group["params"]:
                own = optimizer.state.get(parameter, {})
                values = dict(whole_values(f"parameter {number}", parameter, own, writer))
                if host is not None:
                    host.evict(parameter)
                if here and values:
                    state[number] = values
                number += 1
            groups.append({**_settings(group), "params": list(range(first, number))})
        return {"state": state | (shared_state(optimizer) if here else {}), "param_groups": groups}

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load this rank's part of a single-process state dict. Not collective.

        Raises:
            ValueError: If the parameter groups differ in number or size.
        """
        if (updates := updates_of(optimizer)) is not None:
            updates.load_state_dict(state)
            return
        saved = [len(group["params"]) for group in state["param_groups"]]
        wanted = [len(group["params"]) for group in optimizer.param_groups]
        if saved != wanted:
            raise ValueError(
                f"The checkpoint's {type(optimizer).__name__} has parameter groups of {saved} parameters, this one of"
                f" {wanted}. Build the optimizer as it was when the checkpoint was saved."
            )
        optimizer.state.clear()
        optimizer.state.update(shared_entries(state))
        for group, settings in zip(optimizer.param_groups, state["param_groups"], strict=True):
            group.update(_settings(settings))
            for parameter, index in zip(group["params"], settings["params"], strict=True):
                if values := state["state"].get(index):
                    fitted = {key: _in_dtype_of(parameter, value) for key, value in values.items()}
                    own = own_values(parameter, fitted, local=True)
                    optimizer.state[parameter] = in_place(own, local_shard(parameter).device, group)
                    if host := self._hosts.get(optimizer):
                        host.settle(parameter)

    def slots(self, optimizer: Optimizer) -> Slots:
        """Return the parameters themselves as slots, or the slots of whole state that this rank keeps."""
        updates = updates_of(optimizer)
        return full_slots(optimizer) if updates is None else updates.slots()

    def settle(self, optimizer: Optimizer) -> None:
        """Move state to the host if steps run there. Not collective."""
        if host := self._hosts.get(optimizer):
            for parameter in [key for key in optimizer.state if isinstance(key, Tensor)]:
                host.settle(parameter)

    def held_bytes(self) -> int:
        """Return 0: the engine holds nothing beyond what the parameters hold between steps."""
        return 0

    def detach(self) -> None:
        """Do nothing: the hooks belong to the sharded module."""


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _in_dtype_of(parameter: Tensor, value: Any) -> Any:
    """Cast state shaped like its parameter to the parameter's dtype, as torch's own loading does."""
    if (
        isinstance(value, torch.Tensor)
        and value.dim()
        and value.shape == tensor_shard_shape(parameter)
        and value.is_floating_point()
    ):
        return value.to(parameter.dtype)
    return value
