"""Placement of parameters on pipeline ranks: freeing, reduction of tied gradients, and loading of state dicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_pardist.collectives import as_bytes, irecv, isend, world_group
from lightning_pardist.compat.modules import own_parameters
from lightning_pardist.engines.common.agreed_buffers import agree_on_buffers
from lightning_pardist.engines.common.devices import numbers_on
from lightning_pardist.engines.common.parameter_traits import copy_traits
from lightning_pardist.engines.pipeline.remote_parameter import RemoteParameter
from lightning_pardist.engines.pipeline.stage_plan import PipelinePlan
from lightning_pardist.local_tensors import local_shard, wrap_like


class Placement:
    """The parameters of one module over the ranks of one pipeline.

    Args:
        module: The root module.
        plan: The plan.
        stage_ranks: Rank of each stage.
        rank: This rank, in the pipeline.
        group: The pipeline's process group; None for the default group.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: PipelinePlan,
        stage_ranks: Sequence[int],
        rank: int,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.module = module
        self.plan = plan
        self.rank = rank
        self.group = group
        self.stage_ranks = tuple(stage_ranks)
        self.holders = {
            name: tuple(sorted({stage_ranks[stage] for stage in stages}))
            for name, stages in plan.parameter_stages.items()
        }
        self._first_name = {name: first for first, info in plan.trace.parameters.items() for name in info.names}
        self._units = sorted(plan.unit_stages, key=len, reverse=True)
        self._buffer_names = {name for name, _ in module.named_buffers(remove_duplicate=False)}
        self._fixed_parameters: dict[str, nn.Parameter] | None = None

    def fix_parameters(self) -> None:
        """Use the module's current parameters in all later calls until :meth:`restore`. Not collective.

        A data axis that shards parameters replaces them in the module during a step.
        """
        self._fixed_parameters = dict(self.module.named_parameters())

    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters()) if self._fixed_parameters is None else self._fixed_parameters

    def owner_of(self, name: str) -> int:
        """Return the owner of a parameter or buffer: the lowest rank that holds it.

        Args:
            name: Any name of it, as in the module's own ``state_dict``.

        Returns:
            A rank of the pipeline. Buffers outside of units exist on every rank and are owned by rank 0. A buffer that
            was registered after planning is owned by every rank that has it: this rank is returned.
        """
        first = self._first_name.get(name)
        if first is not None:
            return self.holders[first][0]
        return self.rank if self._is_new_parameter(name) else self.unit_owner_of(name)

    def unit_owner_of(self, name: str) -> int:
        """Return the owner of the unit that contains a parameter or buffer, given its name; 0 outside of units."""
        unit = self._unit_of(name)
        return 0 if unit is None else self.unit_owner(unit)

    def unit_owner(self, name: str) -> int:
        """Return the owner of a unit: the lowest rank that runs it."""
        return min(self.stage_ranks[stage] for stage in self.plan.unit_stages[name])

    def is_local(self, name: str) -> bool:
        """Return whether this rank holds a parameter."""
        return self.rank in self.holders[self._first_name[name]]

    def stage_parameters(self, stage_index: int) -> list[nn.Parameter]:
        """Return the parameters that a stage holds."""
        own = self._parameters()
        return [own[name] for name, stages in self.plan.parameter_stages.items() if stage_index in stages]

    def owned(self) -> list[nn.Parameter]:
        """Return the parameters that this rank owns; every parameter has exactly one owner."""
        own = self._parameters()
        return [own[name] for name, holders in self.holders.items() if holders[0] == self.rank]

    def free(self, replaced: dict[nn.Parameter, nn.Parameter] | None = None) -> int:
        """Replace parameters of other ranks' stages by placeholders on the meta device, keeping ties. Not collective.

        Optimizers skip placeholders, which have no gradients. Optimizers made before this call still hold the old
        parameters, see :func:`replace_in`.

        Args:
            replaced: Filled with each freed parameter and its placeholder.

        Returns:
            Bytes freed.
        """
        empty: dict[int, nn.Parameter] = {}
        freed = 0
        replaced = {} if replaced is None else replaced
        for name, parameter in list(self.module.named_parameters(remove_duplicate=False)):
            if self.is_local(name):
                continue
            if id(parameter) not in empty:
                freed += 0 if parameter.is_meta else parameter.numel() * parameter.element_size()
                meta = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
                empty[id(parameter)] = replaced[parameter] = RemoteParameter(
                    meta,
                    parameter.requires_grad,
                    what=f"{name!r}, which rank {self.owner_of(name)} of the pipeline holds",
                )
                # Keep attributes and gradient hooks: optimizers select parameters by attributes, equally on all ranks.
                copy_traits(empty[id(parameter)], parameter)
            owner, _, last = name.rpartition(".")
            own_parameters(self.module.get_submodule(owner))[last] = empty[id(parameter)]
        return freed

    @torch.no_grad()
    def restore(self) -> dict[nn.Parameter, nn.Parameter]:
        """Restore all parameters on every rank, the inverse of :meth:`free`. Collective over the pipeline.

        Buffers of units, which their stages may have changed, are broadcast as well.

        Returns:
            Each placeholder and the parameter that replaces it.
        """
        self._fixed_parameters = None
        replaced: dict[nn.Parameter, nn.Parameter] = {}
        own = dict(self.module.named_parameters())
        for name, holders in self.holders.items():
            if len(holders) == dist.get_world_size(self.group):
                continue
            parameter = own[name]
            if parameter.is_meta:
                whole = torch.empty_strided(
                    parameter.shape, parameter.stride(), dtype=parameter.dtype, device=_device_of(self.module)
                )
                replaced[parameter] = nn.Parameter(whole, parameter.requires_grad)
                copy_traits(replaced[parameter], parameter)
            self.broadcast(replaced.get(parameter, parameter), holders[0])
        for name, parameter in list(self.module.named_parameters(remove_duplicate=False)):
            if parameter in replaced:
                owner, _, last = name.rpartition(".")
                own_parameters(self.module.get_submodule(owner))[last] = replaced[parameter]
        for each in agree_on_buffers(self.module, group=self.group, source_of=self.unit_owner_of):
            # Buffers of free code are equal on all ranks: only those missing on some are broadcast.
            if self._unit_of(each.name) is not None or not each.is_everywhere:
                self.broadcast(each.tensor, each.source)
        return replaced

    def broadcast(self, tensor: torch.Tensor, owner: int, group: dist.ProcessGroup | None = None) -> None:
        """Overwrite a tensor with the owner's. Collective over the pipeline.

        Args:
            tensor: A tensor of the same shape and dtype on every rank.
            owner: Source rank in the pipeline.
            group: Another process group of the same ranks, if the pipeline's own must not be used.
        """
        if tensor.numel() == 0:
            return
        data = tensor.detach()
        packed = data if data.is_contiguous() else data.contiguous()
        dist.broadcast(as_bytes(packed), src=self._global(owner), group=group or self.group)
        if packed is not data:
            data.copy_(packed)

    def tied(self) -> list[tuple[str, nn.Parameter, tuple[int, ...]]]:
        """Return trainable parameters held by this rank and by others, as (name, parameter, ranks)."""
        own = self._parameters()
        found = [(name, own[name], ranks) for name, ranks in self.holders.items() if len(ranks) > 1]
        return [item for item in found if self.rank in item[2] and item[1].requires_grad]

    def reduce_tied(self) -> None:
        """Sum the gradients of parameters that several ranks hold. Collective over the ranks that hold them.

        Afterwards the gradients are equal on all holders, so that the parameters stay equal after optimizer steps.
        """
        buckets: dict[tuple[tuple[int, ...], torch.dtype], list[nn.Parameter]] = {}
        for _, parameter, ranks in self.tied():
            buckets.setdefault((ranks, parameter.dtype), []).append(parameter)
        for (ranks, _), parameters in sorted(buckets.items(), key=str):
            self._reduce_bucket(parameters, ranks)

    def _reduce_bucket(self, parameters: list[nn.Parameter], ranks: tuple[int, ...]) -> None:
        # Parameters split over tensor ranks: each rank sums its local part with those of the same tensor index.
        parts = [local_shard(p).detach() for p in parameters]
        grads = [None if p.grad is None else local_shard(p.grad) for p in parameters]
        present = numbers_on(parts[0].device, [float(grad is not None) for grad in grads])
        pieces = [
            torch.zeros_like(part).view(-1) if grad is None else grad.reshape(-1)
            for part, grad in zip(parts, grads, strict=True)
        ]
        flat = torch.cat([*pieces, present.to(parts[0].dtype)])
        flat = self._sum_over(flat, ranks)
        *sums, counts = flat.split([part.numel() for part in parts] + [len(parts)])
        for parameter, part, total, count in zip(parameters, parts, sums, counts.tolist(), strict=True):
            parameter.grad = wrap_like(total.view_as(part).clone(), parameter) if count else None

    def _sum_over(self, flat: torch.Tensor, ranks: tuple[int, ...]) -> torch.Tensor:
        """Return the sum over some of the ranks, bitwise equal on all of them.

        Uses point-to-point messages: a process group for each set of holders would have to be created by all ranks of
        the job in the same order, and every pipeline of a data-parallel job has its own sets.
        """
        if len(ranks) == dist.get_world_size(self.group):
            dist.all_reduce(flat, group=self.group)
            return flat
        group = self.group or world_group()
        first, *others = ranks
        if self.rank != first:
            isend(flat, first, group=group).wait()
            irecv(flat, first, group=group).wait()
            return flat
        for rank in others:
            share = torch.empty_like(flat)
            irecv(share, rank, group=group).wait()
            flat += share
        for message in [isend(flat, rank, group=group) for rank in others]:
            message.wait()
        return flat

    def take_gradients(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Take all gradients out of ``.grad``, which becomes None. Not collective.

        Returns:
            Parameters and their gradients, for :meth:`add_gradients`.
        """
        taken = []
        for parameter in self._parameters().values():
            if parameter.grad is not None:
                taken.append((parameter, parameter.grad))
                parameter.grad = None
        return taken

    @staticmethod
    def add_gradients(taken: list[tuple[nn.Parameter, torch.Tensor]]) -> None:
        """Add gradients from :meth:`take_gradients` to the current ones. Not collective.

        Args:
            taken: The result of :meth:`take_gradients`.
        """
        for parameter, gradient in taken:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients. Not collective."""
        if factor != 1.0:
            for parameter in self._parameters().values():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Load this rank's part of a full state dict with the module's own names. Not collective.

        Args:
            state: The module's full state dict, may be memory-mapped.
            strict: Whether names must match.

        Raises:
            RuntimeError: If ``strict`` and names are missing or unexpected, or a shape differs.
        """
        own = self.module.state_dict(keep_vars=True)
        here = {
            name: value
            for name, value in state.items()
            if not (isinstance(own.get(name), torch.Tensor) and own[name].is_meta)
        }
        result = self.module.load_state_dict(here, strict=False)
        elsewhere = {name for name, value in own.items() if isinstance(value, torch.Tensor) and value.is_meta}
        missing = sorted((set(result.missing_keys) - elsewhere) | (elsewhere - set(state)))
        if strict and (missing or result.unexpected_keys):
            raise RuntimeError(f"The state dict misses {missing} and has unexpected {sorted(result.unexpected_keys)}.")

    def _is_new_parameter(self, name: str) -> bool:
        return name not in self._buffer_names and name in dict(self.module.named_buffers(remove_duplicate=False))

    def _unit_of(self, name: str) -> str | None:
        return next((unit for unit in self._units if name.startswith(f"{unit}.")), None)

    def _global(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


def replace_in(optimizers: Iterable[torch.optim.Optimizer], replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Replace parameters in optimizers, and drop the optimizer state of the old ones. Not collective.

    Args:
        optimizers: The optimizers.
        replaced: From :meth:`Placement.free` or :meth:`Placement.restore`.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            # In place: LBFGS keeps a reference to the list.
            group["params"][:] = [replaced.get(parameter, parameter) for parameter in group["params"]]
        for parameter in replaced:
            optimizer.state.pop(parameter, None)


def _device_of(module: nn.Module) -> torch.device:
    devices = [tensor.device for tensor in (*module.parameters(), *module.buffers()) if not tensor.is_meta]
    return devices[0] if devices else torch.device("cpu")
