"""Which rank holds which experts: parameters taken apart, put together again, and loaded."""

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
from lightning_pardist.engines.common.elementwise import marks_of
from lightning_pardist.engines.experts.finding import ExpertLayer
from lightning_pardist.engines.pipeline.remote_parameter import RemoteParameter
from lightning_pardist.engines.tensor.parallelize import whole_tensor


class HeldExperts:
    """The experts of a module over the ranks of a group, in equal runs.

    Stacked parameters become ``DTensor``s of their global shape, of which each rank has its run of experts. Of lists,
    the experts of other ranks get parameters without values, on ``meta``.

    Args:
        module: The root module, whole, with the same values on every rank.
        layers: Its layers of experts; their numbers divide by that of ranks.
        mesh: One-dimensional mesh of the ranks.

    Attributes:
        parameters: Of experts on this rank.
        replaced: For each parameter that was whole, what stands in its place.
    """

    def __init__(self, module: nn.Module, layers: Sequence[ExpertLayer], mesh: DeviceMesh) -> None:
        self.module, self.mesh = module, mesh
        self.size, self.rank = mesh.size(), mesh.get_local_rank()
        self.parameters: set[nn.Parameter] = set()
        #: For each parameter of an expert in a list, by any of its names, the rank that holds it.
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
            local = whole.detach().chunk(self.size)[self.rank].clone().contiguous()
            split = DTensor.from_local(local, self.mesh, [Shard(0)], run_check=False)
            table[name] = parameter = nn.Parameter(split, requires_grad=whole.requires_grad)
            parameter.__dict__.update(marks_of(whole))
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
                        self.parameters.add(parameter)
                    else:
                        self._put(full, _stand_in(parameter, f"{full!r}, which rank {owner} of the experts' holds"))

    def _put(self, name: str, parameter: nn.Parameter) -> None:
        owner, _, last = name.rpartition(".")
        own_parameters(self.module.get_submodule(owner))[last] = parameter

    def local(self, layer: ExpertLayer) -> dict[str, Tensor]:
        """Stacked parameters of this rank's experts, with gradients."""
        table = own_parameters(self.module.get_submodule(layer.runner))
        values: dict[str, Any] = {name: table[name] for name in layer.stacked}
        return {name: value.to_local() for name, value in values.items()}

    # --- state --------------------------------------------------------------------------------------------------

    def part_of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """What this rank's module takes of a state dict of one process. Not collective."""
        own = self.module.state_dict(keep_vars=True)
        found: dict[str, Any] = {}
        for name, value in state.items():
            mine = own.get(name)
            if isinstance(mine, RemoteParameter):
                # Loading a stand-in into itself does nothing, and its name is not missed.
                found[name] = mine
            elif isinstance(mine, DTensor) and isinstance(value, Tensor) and not isinstance(value, DTensor):
                found[name] = self.part(value, mine)
            else:
                found[name] = value
        return found

    def part(self, whole: Tensor, like: DTensor) -> DTensor:
        """A whole tensor as this rank holds it of a stacked parameter.

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
        """Make the module whole again on every rank. Collective over the ranks.

        Returns:
            Each parameter that was in parts or elsewhere, and the whole one in its place.
        """
        replaced: dict[nn.Parameter, nn.Parameter] = {}
        for name, parameter in list(self.module.named_parameters(remove_duplicate=False)):
            if isinstance(parameter, DTensor) and parameter.device_mesh == self.mesh:
                whole = nn.Parameter(whole_tensor(parameter).clone(), parameter.requires_grad)
            elif name in self.owner:
                whole = self._broadcast(name, parameter)
            else:
                continue
            whole.__dict__.update({mark: value for mark, value in marks_of(parameter).items() if mark != "what"})
            if whole is not parameter:
                replaced[parameter] = whole
                self._put(name, whole)
        return replaced

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


def _stand_in(parameter: nn.Parameter, what: str) -> RemoteParameter:
    meta = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
    made = RemoteParameter(meta, parameter.requires_grad, what=what)
    made.__dict__.update(marks_of(parameter))
    return made
