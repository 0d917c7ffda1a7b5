"""Full state dicts of sharded modules, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from lightning_pardist.checkpoint.tensors import common_names
from lightning_pardist.collectives import as_bytes
from lightning_pardist.compat.dtensor import StridedShard
from lightning_pardist.local_tensors import (
    gather_over_data,
    local_shard,
    padded_shard,
    shard_like,
    sharded_axes,
    tensor_axis,
    tensor_shard_shape,
    wrap_like,
    wrap_tensor_shard,
)


def gather_to(value: DTensor, writer: int) -> torch.Tensor | None:
    """Gather one sharded tensor to the writer's host memory. Collective over its data axes.

    Args:
        value: Sharded over one data axis, replicated over the others; it may be split over tensor ranks as well.
        writer: Global rank that receives the tensor.

    Returns:
        The whole tensor in host memory on the writer; None on other ranks. For a tensor that is split over tensor
        ranks, the writer's part, as a DTensor over those ranks.
    """
    if not dist.is_initialized():
        # After a run of one rank, whose process group is destroyed and whose shards are whole.
        return value.to_local().detach().to("cpu", copy=True)
    sharded = sharded_axes(value)
    if not sharded and tensor_axis(value) is not None:
        return wrap_tensor_shard(local_shard(value).detach().to("cpu", copy=True), value) if is_rank(writer) else None
    if len(sharded) != 1 or not isinstance(value.placements[sharded[0]], Shard | StridedShard):
        whole = gather_over_data(value)
        return whole.to("cpu", copy=True) if is_rank(writer) else None
    placement = value.placements[sharded[0]]
    group = value.device_mesh.get_group(sharded[0])
    ranks = dist.get_process_group_ranks(group)
    if writer not in ranks:
        return None
    size, dim = group.size(), placement.dim  # type: ignore[attr-defined]
    local = padded_shard(value, dim, size)
    here = is_rank(writer)
    pieces = [torch.empty_like(local) for _ in range(size)] if here else None
    received = None if pieces is None else [as_bytes(piece) for piece in pieces]
    dist.gather(as_bytes(local), received, dst=writer, group=group)
    if pieces is None:
        return None
    return wrap_tensor_shard(torch.cat(pieces, dim=dim).narrow(dim, 0, tensor_shard_shape(value)[dim]).cpu(), value)


def is_rank(rank: int) -> bool:
    """Return whether this process has that global rank; true after a run of one rank, whose process group is gone."""
    return not dist.is_initialized() or dist.get_rank() == rank


def full_state(
    module: nn.Module, writer: int = 0, shards: Mapping[int, torch.Tensor] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield whole parameters and persistent buffers one at a time. Collective; every rank must exhaust the iterator.

    Args:
        module: A sharded module.
        writer: Global rank that receives the tensors.
        shards: ``id`` of each gathered parameter (inside a step) -> the shard that it was gathered from, which may have
            higher precision.

    Yields:
        Name, and the whole tensor in the writer's host memory; ``None`` as the tensor on other ranks. Names of one tied
        parameter follow each other and share the tensor.
    """
    state = _with_shards(module, shards)
    names: dict[int, list[str]] = {}
    for name, value in state.items():
        names.setdefault(id(value), []).append(name)
    here = is_rank(writer)
    for tied in names.values():
        value = state[tied[0]]
        if isinstance(value, DTensor):
            whole: Any = gather_to(value, writer)
        elif isinstance(value, torch.Tensor):
            whole = value.detach().to("cpu", copy=True) if here else None
        else:
            whole = value if here else None
        for name in tied:
            yield name, whole


def _with_shards(module: nn.Module, shards: Mapping[int, torch.Tensor] | None) -> dict[str, Any]:
    state = module.state_dict(keep_vars=True)
    return {name: (shards or {}).get(id(value), value) for name, value in state.items()}


def load_full_state(
    module: nn.Module,
    state: Mapping[str, Any],
    *,
    strict: bool = True,
    shards: Mapping[int, torch.Tensor] | None = None,
) -> None:
    """Fill the shards from whole tensors. Not collective: every rank reads its own part of the same file.

    Args:
        module: A sharded module.
        state: Name -> whole tensor, memory-mapped if large.
        strict: Whether missing or unexpected names are errors.
        shards: As for :func:`full_state`; gathered parameters have to be gathered again afterwards.

    Raises:
        RuntimeError: If a shape differs, or under ``strict`` the names; nothing has been changed then.
    """
    own = _with_shards(module, shards)
    common = common_names(module, own, state, strict=strict)
    for name in common:
        if isinstance(own[name], torch.Tensor) and own[name].shape != state[name].shape:
            raise RuntimeError(
                f"{name} has shape {tuple(own[name].shape)} in the module and {tuple(state[name].shape)} in the state."
            )
    extra = {name: state[name] for name in common if not isinstance(own[name], torch.Tensor)}
    with torch.no_grad():
        for name in common:
            value = own[name]
            if isinstance(value, DTensor):
                value.to_local().copy_(shard_like(state[name], value))
            elif isinstance(value, torch.Tensor):
                value.copy_(state[name])
    if extra:
        module.load_state_dict(extra, strict=False)


def whole_values(
    label: str, parameter: torch.Tensor, values: Mapping[str, Any], writer: int = 0
) -> Iterator[tuple[str, Any]]:
    """Yield one parameter's optimizer state, whole. Collective over its mesh; every rank must exhaust the iterator.

    Args:
        label: Name of the parameter in errors.
        parameter: Parameter that the state belongs to.
        values: State name -> this rank's value.
        writer: Global rank that receives the tensors.

    Yields:
        State name, and the whole value on the writer; ``None`` as the value on other ranks.

    Raises:
        ValueError: If a state tensor is neither a scalar nor shaped like its parameter.
    """
    here = is_rank(writer)
    for key, value in values.items():
        value = _as_dtensor(label, key, value, parameter)
        if isinstance(value, DTensor):
            yield key, gather_to(value, writer)
        elif isinstance(value, torch.Tensor):
            yield key, value.detach().to("cpu", copy=True) if here else None
        else:
            yield key, value if here else None


def own_values(parameter: torch.Tensor, values: Mapping[str, Any], *, local: bool) -> dict[str, Any]:
    """Return this rank's part of one parameter's optimizer state. Not collective.

    Args:
        parameter: Parameter that the state belongs to.
        values: State name -> whole value.
        local: Whether to return plain local tensors instead of ``DTensor``s.
    """
    own: dict[str, Any] = {}
    for key, value in values.items():
        if not isinstance(value, torch.Tensor):
            own[key] = value
        elif isinstance(parameter, DTensor) and value.shape == tensor_shard_shape(parameter):
            part = shard_like(value, parameter).to(parameter.to_local().device, copy=True).contiguous()
            own[key] = part if local else wrap_like(part, parameter)
        else:
            own[key] = value.to(parameter.device if value.dim() else value.device, copy=True)
    return own


def _as_dtensor(name: str, key: str, value: Any, parameter: torch.Tensor) -> Any:
    """Wrap state that was created on the local shard as a DTensor with the parameter's mesh and placements."""
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or not isinstance(parameter, DTensor):
        return value
    if value.dim() == 0:
        return value
    if value.shape != parameter.to_local().shape:
        raise ValueError(
            f"State {key!r} of {name} has shape {tuple(value.shape)}, which is neither a scalar's nor its parameter's."
            " Shards need an optimizer that updates each element by itself."
        )
    return wrap_like(value, parameter)
