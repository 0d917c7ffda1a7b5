"""Conversion of optimizer state between slices and the single-process form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pardist.checkpoint.tensors import shared_entries, shared_state
from lightning_pardist.collectives import as_bytes
from lightning_pardist.engines.ddp.bucket import flat_like
from lightning_pardist.engines.zero.sharded_bucket import Piece, ShardedBucket
from lightning_pardist.local_tensors import local_shard, wrap_like

Pieces = Mapping[nn.Parameter, Sequence[Piece]]


@torch.no_grad()
def gather_optimizer_state(
    optimizer: Optimizer,
    originals: Sequence[Sequence[nn.Parameter]],
    pieces: Pieces,
    buckets: Sequence[ShardedBucket],
    *,
    group: dist.ProcessGroup,
) -> dict[str, Any]:
    """Assemble the single-process state dict. Collective over ``group``.

    Args:
        optimizer: Optimizer whose state is keyed by slices.
        originals: The user's parameters, group by group.
        pieces: Each parameter's parts in this rank's slice.
        buckets: All buckets, the same on every rank.
        group: The data axis' process group.

    Returns:
        The whole state in host memory on the first rank; parameter groups without state on the others. State of
        parameters that are split over tensor ranks is split too, as DTensors.
    """
    number = {param: index for index, param in enumerate(param for params in originals for param in params)}
    keep = group.rank() == 0
    state: dict[int, dict[str, Any]] = {index: {} for index in number.values()}
    # The entries of a parameter's state are known only on ranks that hold a part of it.
    entries: dict[int, dict[str, Any]] = {}
    for param, index in number.items():
        for piece in pieces.get(param, ()):
            entries[index] = {
                key: None if _is_elementwise(value, piece.shard) else _on_host(value)
                for key, value in optimizer.state.get(piece.shard, {}).items()
            }
    everywhere: list[dict[int, dict[str, Any]]] = [{} for _ in range(group.size())]
    dist.all_gather_object(everywhere, entries, group=group)
    known: dict[int, dict[str, Any]] = {}
    for part in everywhere:
        for index, found in part.items():
            known.setdefault(index, {}).update(found)
    for bucket in buckets:
        members = [param for param in bucket.params if param in number]
        keys = sorted(
            {key for param in members for key, value in known.get(number[param], {}).items() if value is None}
        )
        for key in keys:
            flat = _gather_key(optimizer, bucket, key, group)
            if flat is None:
                continue
            for param in members:
                if key in known.get(number[param], {}):
                    state[number[param]][key] = wrap_like(bucket.slice_of(param, flat).clone(), param)
    if keep:
        for index, found in known.items():
            state[index].update({key: value for key, value in found.items() if value is not None})
    for param, index in number.items():
        if keep and param not in pieces and param in optimizer.state:
            state[index] = dict(optimizer.state[param])
    groups = []
    for settings, params in zip(optimizer.param_groups, originals, strict=True):
        plain = {key: value for key, value in settings.items() if key != "params"}
        groups.append({**plain, "params": [number[param] for param in params]})
    found_state: dict[Any, Any] = {index: entry for index, entry in state.items() if entry}
    return {"state": {**found_state, **(shared_state(optimizer) if keep else {})}, "param_groups": groups}


def slice_optimizer_state(
    optimizer: Optimizer, originals: Sequence[Sequence[nn.Parameter]], pieces: Pieces, state: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the part of a single-process state dict that belongs to this rank's slices. Not collective.

    Args:
        optimizer: Optimizer whose parameter groups hold slices.
        originals: The user's parameters, group by group.
        pieces: Each parameter's parts in this rank's slice.
        state: Result of ``optimizer.state_dict()`` in a single process, or this tensor rank's part of it.

    Returns:
        A state dict for ``optimizer``.

    Raises:
        ValueError: If the parameter groups differ in number or size.
    """
    saved = [len(group["params"]) for group in state["param_groups"]]
    wanted = [len(params) for params in originals]
    if saved != wanted:
        raise ValueError(
            f"The checkpoint's {type(optimizer).__name__} has parameter groups of {saved} parameters, this one of"
            f" {wanted}. Build the optimizer as it was when the checkpoint was saved."
        )
    new_state: dict[Any, Any] = shared_entries(state)
    new_groups: list[dict[str, Any]] = []
    position = 0
    for settings, params in zip(state["param_groups"], originals, strict=True):
        members = []
        for param, saved_index in zip(params, settings["params"], strict=True):
            entry = state["state"].get(saved_index, {})
            parts = pieces.get(param)
            for piece in [None] if parts is None else parts:
                if entry:
                    new_state[position] = {key: _part_of(value, param, piece) for key, value in entry.items()}
                members.append(position)
                position += 1
        new_groups.append({**settings, "params": members})
    return {"state": new_state, "param_groups": new_groups}


def slice_entry(entry: dict[str, Any], param: nn.Parameter, piece: Piece) -> dict[str, Any]:
    """Cut one parameter's state to this rank's slice in place, if the constructor created it whole (as Adagrad's does).

    Args:
        entry: State by key.
        param: Parameter that the state belongs to.
        piece: The parameter's part in this rank's slice.
    """
    shape, shard = local_shard(param).shape, piece.shard
    for key, value in entry.items():
        whole = local_shard(value) if isinstance(value, Tensor) else None
        # State of a vector that is entirely in the slice is cut already, unless it is a DTensor over tensor ranks.
        if whole is not None and whole.shape == shape and (shape != shard.shape or whole is not value):
            dtype = shard.dtype if whole.is_floating_point() else whole.dtype
            entry[key] = _part_of(whole, param, piece).to(shard.device, dtype)
    return entry


def _gather_key(optimizer: Optimizer, bucket: ShardedBucket, key: str, group: dist.ProcessGroup) -> Tensor | None:
    """Gather one state entry of a bucket to the group's first rank; the others allocate only what they send."""
    values = [optimizer.state.get(piece.shard, {}).get(key) for piece in bucket.pieces]
    # Offloaded state, and state after training, is on the host. A rank without state must gather with the others.
    own = torch.zeros(bucket.shard_numel, dtype=bucket.master_dtype, device=bucket.device)
    for piece, value in zip(bucket.pieces, values, strict=True):
        if value is not None:
            own[piece.offset : piece.offset + value.numel()] = value
    if group.rank():
        dist.gather(as_bytes(own), group_dst=0, group=group)
        return None
    flat = own.new_empty(bucket.shard_numel * bucket.world_size)
    dist.gather(as_bytes(own), list(as_bytes(flat).chunk(bucket.world_size)), group_dst=0, group=group)
    return flat.cpu()


def _is_elementwise(value: Any, shard: Tensor) -> bool:
    # A scalar `step` of a slice with one element has no dims, the slice has one.
    return isinstance(value, Tensor) and value.shape == shard.shape


def _on_host(value: Any) -> Any:
    """Move a tensor to the host, as this rank's device index may be another device on the receiving rank."""
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _part_of(value: Any, param: nn.Parameter, piece: Piece | None) -> Any:
    if piece is None or not isinstance(value, Tensor) or value.shape != local_shard(param).shape:
        return value
    return flat_like(value, local_shard(param))[piece.start : piece.stop].clone()
