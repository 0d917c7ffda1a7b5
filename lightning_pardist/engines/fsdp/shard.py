"""``shard``: apply torch's ``fully_shard`` to any module, unit by unit, for ZeRO-3, FSDP and HSDP."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from lightning_pardist.compat import fsdp2
from lightning_pardist.compat.contract import require
from lightning_pardist.compat.tensors import accumulation_hooks_of, gradient_hooks_of, set_accumulation_hooks
from lightning_pardist.engines.common.devices import device_of_mesh
from lightning_pardist.engines.common.elementwise import user_attributes, with_user_attributes
from lightning_pardist.engines.common.meta_init import (
    InitFunction,
    materialize,
    restore_random_state,
    share_random_state,
    sync_from_first_rank,
)
from lightning_pardist.engines.common.settable_parameter import ShardParameter, make_settable
from lightning_pardist.engines.fsdp.backward import ShardedUnit
from lightning_pardist.engines.fsdp.comm import UnitCompression
from lightning_pardist.engines.fsdp.fsdp_units import (
    Unit,
    describe_units,
    find_fsdp_units,
    parameter_owners,
    shardable,
)
from lightning_pardist.engines.fsdp.fully_sharded import FullySharded
from lightning_pardist.engines.fsdp.tiling import find_tiled, shard_rows, weights
from lightning_pardist.local_tensors import local_shard

Reshard = bool | int | Literal["auto"]


def shard(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    units: Sequence[Unit] | None = None,
    reshard_after_forward: Reshard = "auto",
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored: Collection[nn.Parameter] = (),
    init: InitFunction | None = None,
    sync_values: bool = True,
    allow_divergent_forward: bool = False,
    detect_direct_param_use: Literal["first", "always", "never"] = "first",
    check: bool = True,
    tile_above_bytes: float | None = None,
    boundaries: Sequence[Sequence[nn.Module]] | None = None,
    compression: UnitCompression | None = None,
) -> FullySharded:
    """Shard a module's parameters in place. Collective over the mesh; call once, before optimizers are created.

    Every rank holds one shard of each unit. Right before a unit's module runs, its shards are gathered; after forward
    the unsharded parameters are freed, and gathered again in backward, after which gradients are reduce-scattered. Per
    step a rank sends 3 Psi (N-1)/N (ZeRO, arXiv 1910.02054, stage 3) and holds 1/N of parameters, gradients and
    optimizer state. Parameters become ``DTensor``s under their own names; scalars and empty parameters stay plain
    tensors.

    Args:
        module: Any module, on the host, on the mesh's device or on ``meta``; its class becomes the base of a new one.
            Ignored parameters may stay on ``meta``.
        mesh: 1D (sharded), or 2D (replicated over the first axis, sharded over the second: HSDP).
        units: From :func:`find_fsdp_units`; found with its defaults if None.
        reshard_after_forward: ``True`` frees units after forward; ``False`` keeps them until backward, which sends
            2 Psi (N-1)/N, or through the step if there are ``boundaries``; ``"auto"`` is ``True`` but for gathers that
            save nothing: the last unit is kept, as backward needs it at once, and embeddings are not gathered in
            backward, which does not read them; an integer reshards to that many ranks, as in ``fully_shard``. The
            root's own parameters are kept through a step.
        mp_policy: dtype of gathered parameters and of reductions; the shards keep their own dtype.
        offload_policy: Where the shards are kept.
        ignored: Parameters that this engine leaves alone entirely.
        init: For modules on ``meta``: initializes the parameters that one module owns directly.
        sync_values: Whether to start from the first rank's parameters and buffers.
        allow_divergent_forward: Whether ranks may use different units in a step; costs a small exchange per collective.
        detect_direct_param_use: When to look for parameters used outside their module's call: in the ``"first"`` run
            of each step function, ``"always"`` or ``"never"``.
        check: Whether to compare ranks' collectives and used parameters after every backward, in one small reduction.
        tile_above_bytes: Linear layers with larger weights run in tiles of up to this many bytes, each gathered
            separately, see :mod:`~.tiling`. Their weights are in no unit.
        boundaries: Modules that a pipeline runs one by one, by their ``forward``, with interleaved micro-batches
            (:meth:`FullySharded.microbatches`): one sequence per stage, in the order of their calls. Pass the units
            that :func:`find_fsdp_units` finds inside of them, and parameters of other stages as ``ignored``.
        compression: Compression of the units' collectives (ZeRO++, arXiv 2306.10209); none if None. Shards stay exact.

    Returns:
        Handle to run the module, accumulate and clip gradients, and save.

    Raises:
        ValueError: If the mesh has more than two axes, the module was sharded before, or values on ``meta`` are
            unknown.
        RuntimeError: If this version of torch has moved private names of ``fully_shard``, which the message lists.
    """
    require(fsdp2.NAMES)
    if mesh.ndim > 2:
        raise ValueError(f"The mesh has {mesh.ndim} axes. Pass the data axes only: one, or (replicate, shard).")
    if fsdp2.is_sharded(module):
        raise ValueError("The module contains parts that are sharded already. Shard it once, as it was written.")
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
    tiled = {} if tile_above_bytes is None else find_tiled(module, tile_above_bytes, ignored=ignored)
    in_tiles = set(weights(tiled.values()))
    if units is None:
        units = find_fsdp_units(module, ignored={*ignored, *in_tiles})
    chosen = {unit.module: unit.reason for unit in units if unit.module is not module}
    whole = _whole_parameters(module, chosen, {*ignored, *in_tiles})
    plan = describe_units(module, chosen, {*ignored, *whole, *in_tiles})
    settings = _Settings(module, mesh, chosen, {*ignored, *whole}, reshard_after_forward, mp_policy, offload_policy)
    settings.tiled = {layer: f"{name}.weight" for name, layer in tiled.items()}
    settings.planned = {unit.module for unit in plan}
    hooks = {name: gradient_hooks_of(parameter) for name, parameter in module.named_parameters()}
    accumulated = {name: accumulation_hooks_of(parameter) for name, parameter in module.named_parameters()}
    marks = {name: user_attributes(parameter) for name, parameter in module.named_parameters()}
    whole_names = [name for name, parameter in module.named_parameters() if any(parameter is w for w in whole)]
    elsewhere = {id(parameter) for parameter in ignored}
    tensors = [tensor for tensor in (*module.parameters(), *module.buffers()) if id(tensor) not in elsewhere]
    if any(tensor.is_meta for tensor in tensors) and boundaries is None:
        own_state = share_random_state(groups)
        settings.ignored_names = set(whole_names) | {
            name for name, p in module.named_parameters() if any(p is other for other in ignored)
        }
        materialize(module, settings.apply, is_unit=settings.is_unit, init=init)
        restore_random_state(own_state)
    else:
        if sync_values:
            sync_from_first_rank([tensor for tensor in tensors if not tensor.is_meta], groups)
        for layer in tiled.values():
            settings.tile(layer)
        for unit in plan:
            settings.apply(unit.module)
    if boundaries is not None:
        # With these marks other libraries (transformers' generate) synchronise all ranks, while other stages wait.
        fsdp2.remove_marks(module)
    device = device_of_mesh(mesh)
    parameters = dict(module.named_parameters())
    for name in whole_names:
        if parameters[name].device != device:
            parameters[name].data = parameters[name].data.to(device)
    for name, parameter in parameters.items():
        if parameter not in ignored:
            make_settable(parameter)
            with_user_attributes(parameter, marks[name])
            if isinstance(parameter, ShardParameter):
                parameter.gradient_hooks = hooks[name]
                if accumulated[name]:
                    set_accumulation_hooks(parameter, accumulated[name])
    by_forward = set(itertools.chain(*(boundaries or ())))
    runtime_units = [
        ShardedUnit(unit, index, unit.module is module, by_forward=unit.module in by_forward)
        for index, unit in enumerate(plan)
    ]
    if boundaries is not None and reshard_after_forward is False:
        # Other micro-batches run between a micro-batch's forward and backward, and would gather the unit again.
        for kept in runtime_units[:-1]:
            kept.set_resident(True)
    else:
        for stage in boundaries or ():
            _prefetch_in_order(stage, {unit.unit.module: unit for unit in runtime_units[:-1]})
    return FullySharded(
        module,
        mesh,
        runtime_units,
        {name: parameters[name] for name in whole_names},
        allow_divergent_forward=allow_divergent_forward,
        detect_direct_param_use=detect_direct_param_use,
        check=check,
        save_gathers=reshard_after_forward == "auto",
        tiled=tiled,
        tile_bytes=tile_above_bytes or 0.0,
        mp_policy=mp_policy,
        interleaved=boundaries is not None,
        compression=UnitCompression() if compression is None else compression,
        ignored=ignored,
    )


def _prefetch_in_order(stage: Sequence[nn.Module], units: Mapping[nn.Module, ShardedUnit]) -> None:
    """Prefetch each unit of a stage while the one before it computes."""
    order = [units[inner] for boundary in stage for inner in boundary.modules() if inner in units]
    for unit, following in itertools.pairwise(order):
        unit.module.set_modules_to_forward_prefetch([following.module])


class _Settings:
    """Settings with which ``fully_shard`` is applied to every unit."""

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        chosen: dict[nn.Module, str],
        ignored: set[nn.Parameter],
        reshard: Reshard,
        mp_policy: MixedPrecisionPolicy | None,
        offload_policy: OffloadPolicy | None,
    ) -> None:
        self.module = module
        self.mesh = mesh
        self.units = {*chosen, module}
        self.ignored = ignored
        self.ignored_names: set[str] = set()
        #: Layers that run in tiles -> names of their weights; below, the modules of units that own parameters.
        self.tiled: dict[nn.Linear, str] = {}
        self.planned: set[nn.Module] = set()
        self.stays_on_host = isinstance(offload_policy, CPUOffloadPolicy)
        self.reshard = reshard
        self.options: dict[str, Any] = {"mesh": mesh}
        if mp_policy is not None:
            self.options["mp_policy"] = mp_policy
        if offload_policy is not None:
            self.options["offload_policy"] = offload_policy

    def is_unit(self, module: nn.Module) -> bool:
        return module in self.units or module in self.tiled

    def tile(self, layer: nn.Linear) -> None:
        """Shard the weight of a layer that runs in tiles."""
        device = torch.device("cpu") if self.stays_on_host else device_of_mesh(self.mesh)
        self.ignored.add(shard_rows(layer, self.mesh, device))

    def apply(self, unit: nn.Module) -> None:
        """Shard the parameters that this unit owns. Inner units come before outer ones."""
        if isinstance(unit, nn.Linear) and unit in self.tiled and not isinstance(unit.weight, DTensor):
            self.tile(unit)
        if unit not in self.planned:
            return
        owners = parameter_owners(self.module, self.units)
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        foreign = {
            parameter
            for parameter in unit.parameters()
            if owners[parameter] is not unit or parameter in self.ignored or names[parameter] in self.ignored_names
        }
        mine = [parameter for parameter in unit.parameters() if parameter not in foreign]
        for parameter in mine:
            if not isinstance(parameter, DTensor) and not parameter.is_contiguous():
                parameter.data = parameter.data.contiguous()
        reshard = True if self.reshard == "auto" else self.reshard
        with fsdp2.fitted_class(unit):
            fully_shard(
                unit,
                **self.options,
                reshard_after_forward=False if unit is self.module else reshard,
                shard_placement_fn=functools.partial(_placement, self.mesh.size(self.mesh.ndim - 1)),
                ignored_params=foreign or None,
            )
        fsdp2.make_copyable(unit)


def _whole_parameters(
    module: nn.Module, chosen: dict[nn.Module, str], ignored: Collection[nn.Parameter]
) -> list[nn.Parameter]:
    """Return parameters that stay whole on every rank: scalars, empty ones, and a unit's rarer dtypes."""
    owners = parameter_owners(module, {*chosen, module})
    sizes: dict[nn.Module, dict[torch.dtype, int]] = {}
    for parameter, owner in owners.items():
        if parameter not in ignored and shardable(parameter):
            tally = sizes.setdefault(owner, {})
            tally[parameter.dtype] = tally.get(parameter.dtype, 0) + parameter.numel() * parameter.element_size()
    main = {owner: max(tally, key=lambda dtype: tally[dtype]) for owner, tally in sizes.items()}
    return [
        parameter
        for parameter, owner in owners.items()
        if parameter not in ignored and (not shardable(parameter) or parameter.dtype != main[owner])
    ]


def _placement(shards: int, parameter: torch.Tensor) -> Shard | None:
    """Return a sharding by the first evenly divisible dim but rows, if padding rows would waste more than 1%."""
    parameter = local_shard(parameter)
    rows = parameter.size(0)
    padded = -(-rows // shards) * shards
    if padded <= 1.01 * rows or parameter.numel() < 1024:
        return None
    return next((Shard(dim) for dim in range(1, parameter.dim()) if parameter.size(dim) % shards == 0), None)
