"""Distribution of experts over ranks: sharding, restoring and loading of their parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lightning_pardist.collectives import as_bytes
from lightning_pardist.compat.modules import own_parameters
from lightning_pardist.engines.common.parameter_traits import copy_traits
from lightning_pardist.engines.experts.finding import ExpertLayer
from lightning_pardist.engines.experts.layer_weights import LayerWeights, places_of
from lightning_pardist.engines.experts.sharding import STACKED_DIM, ExpertSharding, ShardedWeights
from lightning_pardist.engines.pipeline.remote_parameter import RemoteParameter
from lightning_pardist.engines.tensor.parallelize import to_full_tensor
from lightning_pardist.local_tensors import (
    gather_over_data,
    is_over,
    local_shard,
    sharded_axes,
    tensor_axis,
    tensor_shard_shape,
)
from lightning_pardist.mesh import EXPERT_AXIS


class HeldExperts:
    """The experts of a module, distributed over the ranks of a group in equal contiguous runs.

    Stacked parameters become ``DTensor``s of their global shape, of which each rank holds its run of experts. In lists,
    experts of other ranks get placeholder parameters without values, on ``meta``.

    Args:
        module: The root module, not distributed, with equal values on every rank.
        layers: Its layers of experts; the number of ranks divides the number of experts.
        mesh: One-dimensional mesh of the ranks.
        sharding: Sharding over the ranks that hold the same experts; replicated if None.

    Attributes:
        parameters: Parameters of experts on this rank.
        owner: For each parameter of an expert in a list, by any of its names, the rank that holds it.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[ExpertLayer],
        mesh: DeviceMesh,
        sharding: ExpertSharding | None = None,
    ) -> None:
        self.module, self.mesh, self.sharding = module, mesh, sharding
        self.size, self.rank = mesh.size(), mesh.get_local_rank()
        self.parameters: set[nn.Parameter] = set()
        #: Placeholders for experts of other ranks, by any of their names.
        self._elsewhere: dict[str, RemoteParameter] = {}
        self.owner: dict[str, int] = {}
        for layer in layers:
            if layer.stacked:
                self._take_stacked(layer)
            else:
                self._take_lists(layer)

    def _take_stacked(self, layer: ExpertLayer) -> None:
        table = own_parameters(self.module.get_submodule(layer.runner))
        for name in layer.stacked:
            whole = table[name]
            if whole is None:
                continue
            local = whole.detach().chunk(self.size)[self.rank]
            if self.sharding is None:
                split: Tensor = DTensor.from_local(local.clone().contiguous(), self.mesh, [Shard(0)], run_check=False)
            else:
                split = self.sharding.stacked(whole, local)
            table[name] = parameter = copy_traits(nn.Parameter(split, requires_grad=whole.requires_grad), whole)
            self.parameters.add(parameter)

    def _take_lists(self, layer: ExpertLayer) -> None:
        each = layer.count // self.size
        for prefix in layer.lists:
            for index, expert in enumerate(self.module.get_submodule(prefix).children()):
                owner = index // each
                for name, parameter in list(expert.named_parameters()):
                    full = f"{prefix}.{index}.{name}"
                    self.owner[full] = owner
                    if owner == self.rank:
                        self.parameters.add(self._shard(full, parameter))
                    else:
                        what = f"{full!r}, which rank {owner} of the expert group holds"
                        self._elsewhere[full] = _remote_placeholder(parameter, what)
                        self._put(full, self._elsewhere[full])

    def _put(self, name: str, parameter: nn.Parameter) -> None:
        owner, _, last = name.rpartition(".")
        own_parameters(self.module.get_submodule(owner))[last] = parameter

    def _shard(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        """Return a parameter of a local expert, sharded if experts are sharded over the ranks that share them."""
        split = parameter if self.sharding is None else self.sharding.listed(parameter)
        if split is parameter:
            return parameter
        made = copy_traits(nn.Parameter(split, requires_grad=parameter.requires_grad), parameter)
        self._put(name, made)
        return made

    def weights(self, layer: ExpertLayer) -> LayerWeights:
        """Return the parameters of this rank's experts of a layer: stacked ones by name, listed ones by expert."""
        each = layer.count // self.size
        own = layer.experts(self.module)[self.rank * each : (self.rank + 1) * each]
        places = [place for parts in own for place in places_of(parts)]
        if layer.stacked:
            runner = self.module.get_submodule(layer.runner)
            places = [(runner, name) for name in layer.stacked]
        if self.sharding is None:
            return LayerWeights(places)
        shapes = [tensor_shard_shape(own_parameters(owner)[name]) for owner, name in places]  # type: ignore[arg-type]
        return ShardedWeights(places, self.sharding, shapes, first_dim=STACKED_DIM if layer.stacked else 0)

    def is_expert_parameter(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter belongs to an expert, on this rank or another; equal on all ranks."""
        return parameter in self.parameters or any(parameter is each for each in self._elsewhere.values())

    def forget_missing(self) -> None:
        """Drop parameters that are no longer in the module, of layers on other pipeline ranks. Not collective."""
        self.parameters &= set(self.module.parameters())

    # --- state --------------------------------------------------------------------------------------------------

    def part_of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a single process's state dict. Not collective."""
        own = self.module.state_dict(keep_vars=True)
        found: dict[str, Any] = {}
        for name, value in state.items():
            mine = own.get(name)
            if isinstance(mine, RemoteParameter):
                # Loading a placeholder into itself is a no-op, and its key is not reported as missing.
                found[name] = mine
            elif isinstance(mine, DTensor) and self.is_split(mine) and _is_plain(value):
                found[name] = self.part(value, mine)
            else:
                found[name] = value
        return found

    @staticmethod
    def is_split(parameter: Tensor) -> bool:
        """Return whether a parameter is sharded over the ranks that hold different experts."""
        return is_over(parameter, EXPERT_AXIS)

    def part(self, whole: Tensor, like: DTensor) -> DTensor:
        """Return a full tensor sharded like a stacked parameter.

        Raises:
            ValueError: If the shapes differ.
        """
        if whole.shape != like.shape:
            raise ValueError(f"A tensor of shape {tuple(whole.shape)} was loaded where {tuple(like.shape)} is needed.")
        local = whole.chunk(self.size)[self.rank].to(like.device, copy=True).contiguous()
        return DTensor.from_local(local, self.mesh, [Shard(0)], run_check=False)

    # --- the end ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def restore(self) -> dict[nn.Parameter, nn.Parameter]:
        """Make the module full again on every rank. Collective over the ranks, and over those that share experts.

        Returns:
            Each parameter that was sharded or on another rank -> the full one that replaces it.
        """
        replaced: dict[nn.Parameter, nn.Parameter] = {}
        for name, parameter in list(self.module.named_parameters(remove_duplicate=False)):
            if parameter.is_meta and self._elsewhere.get(name) is not parameter:
                # A parameter of a layer that the pipeline has moved to other ranks.
                continue
            if name in self.owner:
                whole = self._broadcast(name, self._over_shards(parameter))
            elif isinstance(parameter, DTensor) and parameter in self.parameters:
                whole = nn.Parameter(to_full_tensor(self._over_shards(parameter)).clone(), parameter.requires_grad)
            else:
                continue
            if whole is not parameter:
                replaced[parameter] = copy_traits(whole, parameter)
                self._put(name, whole)
        return replaced

    @staticmethod
    def _over_shards(parameter: nn.Parameter) -> nn.Parameter:
        """Return this rank's part of an expert parameter, gathered over the ranks that share it in shards."""
        if not isinstance(parameter, DTensor):
            return parameter
        if sharded_axes(parameter):
            return nn.Parameter(gather_over_data(parameter), parameter.requires_grad)
        return (
            parameter if tensor_axis(parameter) is not None else nn.Parameter(local_shard(parameter).detach().clone())
        )

    def _broadcast(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        group = self.mesh.get_group()
        if parameter.is_meta:
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=self._device)
            parameter = nn.Parameter(empty, parameter.requires_grad)
        packed = parameter.detach().contiguous()
        dist.broadcast(as_bytes(packed), dist.get_global_rank(group, self.owner[name]), group=group)
        if packed.data_ptr() != parameter.data_ptr():
            parameter.copy_(packed)
        return parameter

    @property
    def _device(self) -> torch.device:
        return next(parameter.device for parameter in self.module.parameters() if not parameter.is_meta)


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor)


def _remote_placeholder(parameter: nn.Parameter, what: str) -> RemoteParameter:
    meta = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
    made = RemoteParameter(meta, parameter.requires_grad, what=what)
    return copy_traits(made, parameter)
