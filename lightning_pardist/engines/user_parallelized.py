"""Data engine for modules that parallelize themselves: averages the gradients that they leave unsynchronised.

Modules written for Lightning's ``ModelParallelStrategy`` call ``parallelize_module`` and ``fully_shard`` themselves.
The result is read off their parameters: a ``DTensor`` contains its mesh and placements, and a ``fully_shard`` unit the
parameters whose gradients it averages in backward.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_pardist.checkpoint.coordination import GroupCoordinator, SingleCoordinator
from lightning_pardist.checkpoint.gather import assemble_optimizer
from lightning_pardist.checkpoint.tensors import (
    Slots,
    copy_from_full,
    full_slots,
    require_same_groups,
    shards_like,
)
from lightning_pardist.collectives import table_device
from lightning_pardist.compat.fsdp2 import states_in
from lightning_pardist.compat.tensors import gradient_hooks_of
from lightning_pardist.engines.common.gradient_math import Counts
from lightning_pardist.engines.data_engine import Assigned
from lightning_pardist.engines.ddp.buffers import broadcast_tensors
from lightning_pardist.local_tensors import local_shard

#: Target size in bytes of the flat buffers in which gradients are averaged.
_CHUNK_BYTES = 25 * 2**20


def is_split(module: nn.Module) -> bool:
    """Return whether any parameter of a module is a ``DTensor``."""
    return any(isinstance(param, DTensor) for param in module.parameters())


def sharded_by_units(module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that ``fully_shard`` units all-gather and whose gradients they reduce."""
    return {param.sharded for unit in states_in(module) for group in unit.groups for param in group.parameters}


def check_units(module: nn.Module, *, data_size: int) -> None:
    """Check that every ``fully_shard`` unit averages over the whole data axis. Not collective.

    Raises:
        ValueError: If one does not; the message contains the unit, its number of ranks and that of the data axis.
    """
    names = {child: name for name, child in module.named_modules()}
    for unit in states_in(module):
        for group in unit.groups:
            if group.ranks != data_size:
                raise ValueError(
                    f"{names.get(unit.module, 'A module')!r} is sharded by fully_shard over {group.ranks} rank(s), but"
                    f" {data_size} rank(s) see different samples. Use fully_shard(...,"
                    ' mesh=self.device_mesh["data_parallel"]).'
                )


@contextmanager
def gathered(module: nn.Module) -> Generator[None, None, None]:
    """Keep every ``fully_shard`` unit unsharded inside, so that a single rank can run the module.

    Entering and leaving are collective over the units' meshes.
    """
    units = list(states_in(module))
    restore = [group.keep_unsharded_after_forward() for unit in units for group in unit.groups]
    try:
        for unit in units:
            unit.module.unshard()
        yield
    finally:
        for restore_one in restore:
            restore_one()
        for unit in units:
            unit.module.reshard()


@torch.no_grad()
def make_alike(module: nn.Module, *, world: dist.ProcessGroup, data_group: dist.ProcessGroup) -> None:
    """Broadcast replicated parameters and buffers from the first rank. Collective over the world.

    Parameters of ``fully_shard`` units keep their values. Other ``DTensor``s are broadcast over the data group, and
    over their own mesh as well if they are replicated on it: shards keep the values of the ranks that created them.
    """
    units = sharded_by_units(module)
    tensors = [*module.parameters(), *module.buffers()]
    broadcast_tensors([tensor.detach() for tensor in tensors if not isinstance(tensor, DTensor)], group=world)
    rest: list[Tensor] = []
    for tensor in tensors:
        if not isinstance(tensor, DTensor) or tensor in units:
            continue
        rest.append(tensor.detach())
        if all(placement.is_replicate() for placement in tensor.placements):
            for axis in range(tensor.device_mesh.ndim):
                broadcast_tensors([tensor.detach()], group=tensor.device_mesh.get_group(axis))
    broadcast_tensors(rest, group=data_group)


class UserParallelizedEngine:
    """The :class:`~.data_engine.DataEngine` of a module that has split its own parameters.

    torch averages the gradients of ``fully_shard`` units during backward. This engine averages all others over the data
    axis after backward, with the placements of their parameters.

    Args:
        module: The module after its ``configure_model``.
        optimizers: torch optimizers over its parameters, which support ``DTensor``s.
        group: Process group of the data axis.
        world: Process group of all ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        group: dist.ProcessGroup,
        world: dist.ProcessGroup,
    ) -> None:
        self.module = module
        self.optimizers = list(optimizers)
        self.group = group
        self.world = world
        self._units = list(states_in(module))
        self._sharded = sharded_by_units(module)
        self._names: dict[Tensor, str] = {param: name for name, param in module.named_parameters()}
        # A single rank needs no group: a checkpoint may be saved after the run, when process groups are destroyed.
        self._exchange = GroupCoordinator(world) if world.size() > 1 else SingleCoordinator()
        self._waits = False
        self._reduced = False

    # --- gradients ----------------------------------------------------------------------------------------------

    @property
    def is_reduced(self) -> bool:
        """Whether gradients have been averaged since the last optimizer step."""
        return self._reduced

    @property
    def has_gradients(self) -> bool:
        """Whether any parameter has a gradient; after averaging, the same on every rank of the data axis."""
        return any(param.grad is not None for param in self.module.parameters())

    @property
    def scales_reduced_gradients(self) -> bool:
        """Whether a factor on all gradients may be applied after the reduction, which the module does itself."""
        return False

    @property
    def has_gradient_hooks(self) -> bool:
        """Whether any parameter has a hook on its gradient, of the user's or of the module's own parallelism."""
        return any(gradient_hooks_of(param) for param in self.module.parameters())

    @contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Accumulate gradients inside the context without synchronising them."""
        self._set_waits(True)
        try:
            yield
        finally:
            self._set_waits(False)

    def _set_waits(self, waits: bool) -> None:
        self._waits = waits
        for unit in self._units:
            unit.module.set_requires_gradient_sync(not waits, recurse=False)

    @contextmanager
    def backward(self, loss: Tensor, *, overlap: bool = True) -> Generator[None, None, None]:
        """Average gradients when the backward inside has ended, unless under :meth:`no_sync`.

        Collective over the data axis.
        """
        yield
        if not self._waits:
            self.reduce()

    @torch.no_grad()
    def reduce(self) -> None:
        """Average the gradients that no ``fully_shard`` unit averages. Collective over the data axis.

        A gradient that is missing on some ranks only counts as zero there.
        """
        self._reduced = True
        params = [param for param in self.module.parameters() if param.requires_grad]
        for param in params:
            grad = param.grad
            if isinstance(param, DTensor) and isinstance(grad, DTensor) and grad.placements != param.placements:
                # Partial, or with other placements than the parameter, as the backward operator left it.
                param.grad = grad.redistribute(placements=param.placements)
        rest = [param for param in params if param not in self._sharded]
        if self.group.size() == 1 or not rest:
            return
        wire = table_device(self.group, _device(rest))
        present = torch.tensor([param.grad is not None for param in rest], dtype=torch.int32, device=wire)
        dist.all_reduce(present, op=dist.ReduceOp.MAX, group=self.group)
        with_gradient = [param for param, found in zip(rest, present.tolist(), strict=True) if found]
        for param in with_gradient:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        self._average([local_shard(param.grad) for param in with_gradient if param.grad is not None])

    def _average(self, grads: Iterable[Tensor]) -> None:
        for chunk in _chunks(grads):
            flat = torch.cat([grad.reshape(-1) for grad in chunk])
            dist.all_reduce(flat, group=self.group)
            flat /= self.group.size()
            for grad, piece in zip(chunk, flat.split([grad.numel() for grad in chunk]), strict=True):
                grad.copy_(piece.view(grad.shape))

    def average_assigned(self, params: Iterable[nn.Parameter], weight: float) -> Assigned:
        """Return "none": what a step assigns to parameters that the module has sharded is left alone."""
        return "none"

    def step_done(self) -> None:
        """Mark the end of the optimizer step: gradients count as not averaged from now on."""
        self._reduced = False

    def defer_reduction(self) -> AbstractContextManager[None]:
        """Return a null context: this engine reduces in :meth:`reduce` only, and has no backward hooks to defer."""
        return nullcontext()

    @torch.no_grad()
    def grad_power(
        self, params: Iterable[nn.Parameter], norm_type: float = 2.0, counts: Counts | None = None
    ) -> Tensor:
        """Return the sum of powers, or the largest magnitude, of the gradients of all ranks. Collective over the world.

        Every rank contributes its local part divided by the number of ranks that hold the same part.
        """
        params = list(params)
        # From the parameters, not the gradients: some gradients may be missing on some ranks.
        wide = any(param.dtype in (torch.float64, torch.complex128) for param in params)
        dtype = torch.float64 if wide else torch.float32
        total = torch.zeros((), dtype=dtype, device=_device(params))
        for param in params:
            if param.grad is None or (counts is not None and not counts(param)):
                continue
            local = local_shard(param.grad)
            # The inf-norm of an empty tensor is undefined.
            if not local.numel():
                continue
            if local.dtype.itemsize < 4:
                local = local.float()
            norm = torch.linalg.vector_norm(local, norm_type).to(dtype)
            if math.isinf(norm_type):
                total = torch.maximum(total, norm)
            else:
                total += norm.pow(norm_type) / (self.world.size() // _distinct(param))
        op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
        dist.all_reduce(total, op=op, group=self.world)
        return total

    def local_grads(self, params: Iterable[nn.Parameter]) -> list[Tensor]:
        """Return this rank's local parts of the gradients. Not collective."""
        return [local_shard(param.grad) for param in params if param.grad is not None]

    def zero_grad(self) -> None:
        """Do nothing: no gradients are kept outside the parameters."""

    # --- state --------------------------------------------------------------------------------------------------

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the unsharded state dict on the first rank, only its groups elsewhere. Collective over the world."""
        index = self.optimizers.index(optimizer)
        return assemble_optimizer(index, optimizer, self.slots(optimizer), self._names, self._exchange)

    @torch.no_grad()
    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load this rank's part of an unsharded state dict. Not collective.

        Raises:
            ValueError: If the parameter groups differ in number or size.
        """
        groups = state["param_groups"]
        require_same_groups(optimizer, groups, [len(group["params"]) for group in optimizer.param_groups])
        optimizer.state.clear()
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            group.update({key: value for key, value in settings.items() if key != "params"})
            for param, number in zip(group["params"], settings["params"], strict=True):
                if values := state["state"].get(number):
                    optimizer.state[param] = {key: _laid_out(value, param) for key, value in values.items()}

    def slots(self, optimizer: Optimizer) -> Slots:
        """Return the parameters themselves, per parameter group."""
        return full_slots(optimizer)

    @torch.no_grad()
    def settle(self, optimizer: Optimizer) -> None:
        """Wrap loaded local state tensors as ``DTensor``s like their parameters. Not collective."""
        for param, values in optimizer.state.items():
            for key, value in values.items():
                values[key] = _wrapped(value, param)

    def held_bytes(self) -> int:
        """Return 0: nothing is held besides the parameters and their gradients."""
        return 0

    def detach(self) -> None:
        """Do nothing: the module has not been changed."""


def _distinct(param: Tensor) -> int:
    """Return the number of distinct shards of a parameter."""
    if not isinstance(param, DTensor):
        return 1
    sizes = zip(param.placements, param.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if not placement.is_replicate())


def _laid_out(value: Any, param: nn.Parameter) -> Any:
    """Return this rank's part of an unsharded state value, with the layout that the optimizer would create."""
    if not isinstance(value, Tensor):
        return value
    if not isinstance(param, DTensor) or not value.dim() or value.shape != param.shape:
        return value.clone()
    local = local_shard(param)
    part = torch.empty_like(local, dtype=local.dtype if value.is_floating_point() else value.dtype, requires_grad=False)
    copy_from_full(value, shards_like(param, part))
    return _wrapped(part, param)


def _wrapped(value: Any, param: Tensor) -> Any:
    if not isinstance(param, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if not value.dim() or value.shape != local_shard(param).shape:
        return value
    return DTensor.from_local(
        value, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def _chunks(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    chunk: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if chunk and (size > _CHUNK_BYTES or (tensor.dtype, tensor.device) != (chunk[0].dtype, chunk[0].device)):
            yield chunk
            chunk, size = [], 0
        chunk.append(tensor)
        size += tensor.numel() * tensor.element_size()
    if chunk:
        yield chunk


def _device(params: Sequence[nn.Parameter]) -> torch.device:
    return local_shard(params[0]).device if params else torch.device("cpu")
