"""Comparison of the batches of ranks that work on one batch, and broadcast of the first rank's."""

from __future__ import annotations

import hashlib
import pickle
import re
import warnings
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pardist.engines.pipeline.nested import flatten, map_leaves, named_children, tensors_in
from lightning_pardist.local_tensors import dense_parts

#: Number of elements of a tensor or array that are read, at most twice as many.
_ELEMENTS = 1024


def batch_checksum(batch: Any, *, reads_accelerators: bool = True) -> int:
    """Return a checksum of a batch. Not collective.

    It covers the shapes, dtypes and a sample of the elements of tensors and arrays, and all other values that can be
    pickled.

    Args:
        batch: Any structure.
        reads_accelerators: Whether to read tensors on accelerators, which synchronizes with the device.

    Returns:
        A number of 56 bits, equal for equal batches.
    """
    digest = hashlib.blake2b(digest_size=7)
    for leaf in flatten(batch)[0]:
        if isinstance(leaf, Tensor):
            leaf = _plain(leaf)
            digest.update(repr(((), leaf.dtype) if leaf.is_nested else (tuple(leaf.shape), leaf.dtype)).encode())
            if reads_accelerators or leaf.device.type == "cpu":
                for part in leaf.detach().unbind() if leaf.is_nested else dense_parts(leaf.detach()):
                    digest.update(repr(tuple(part.shape)).encode())
                    sample = part.reshape(-1)[:: max(1, part.numel() // _ELEMENTS)].contiguous().cpu()
                    digest.update(sample.view(torch.uint8).numpy().tobytes() if sample.numel() else b"")
        elif isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
            digest.update(repr((leaf.shape, leaf.dtype)).encode())
            digest.update(leaf.reshape(-1)[:: max(1, leaf.size // _ELEMENTS)].tobytes())
        else:
            digest.update(_content(leaf))
    return int.from_bytes(digest.digest(), "big")


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor without the methods of its subclass, unless that implements operators (``DTensor``)."""
    if type(tensor) is Tensor or type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return tensor
    return Tensor.as_subclass(tensor, Tensor)


def _content(value: Any) -> bytes:
    if isinstance(value, (set, frozenset)):
        # Their order depends on the process.
        return repr(sorted(map(repr, value))).encode()
    try:
        return pickle.dumps(value)
    except Exception:
        return type(value).__name__.encode()


def warn_of_different_batches(who: str) -> None:
    """Warn that ranks that must work on one batch were given different batches.

    Args:
        who: Name of these ranks, for the message.
    """
    warnings.warn(
        f"The ranks of {who} got different batches. From now on the first rank's batches are sent to the others,"
        " which costs time, and the others' own batches are not used. This is harmless for random augmentation and"
        " loaders that shuffle by themselves, but a part of the data is lost if samples are split by global_rank or"
        " the variable RANK. Split them by trainer.distributed_sampler_kwargs (rank, num_replicas).",
        stacklevel=3,
    )


def broadcast_batch(value: Any, *, group: dist.ProcessGroup, device: torch.device) -> Any:
    """Broadcast the first rank's value, with its tensors moved to this rank's device. Collective over ``group``.

    Args:
        value: One or more batches: any picklable structure that holds tensors.
        group: Ranks that work on the same batch.
        device: Device of the returned tensors, except those that are on the CPU on the first rank.

    Raises:
        TypeError: On all ranks of ``group``, if the first rank's value cannot be pickled.
    """
    box: list[Any] = [None, [], None]
    if group.rank() == 0:
        on_host = [leaf.device.type == "cpu" for leaf in tensors_in(value)]
        value = map_leaves(lambda leaf: leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf, value)
        try:
            box = [pickle.dumps(value), on_host, None]
        except Exception:
            box[2] = _unpicklable_reason(value)
    dist.broadcast_object_list(box, group_src=0, group=group)
    sent, on_host, unsent = box
    if unsent is not None:
        raise TypeError(
            "Ranks that work on the same batch got different batches, and the first rank's cannot be sent to the"
            f" others: {unsent}. Leave it out of the batch, or give these ranks the same samples: use the same seed"
            " for shuffling and augmentation, and split samples by the strategy's distributed_sampler_kwargs."
        )
    stays = iter(on_host)
    found = pickle.loads(sent)
    return map_leaves(lambda leaf: leaf if not isinstance(leaf, Tensor) or next(stays) else leaf.to(device), found)


def _unpicklable_reason(value: Any, path: str = "") -> str | None:
    """Return the innermost part of a batch that cannot be pickled, and why; None if all of it can."""
    try:
        pickle.dumps(value)
    except Exception as error:
        parts = ((f"{path}.{name}".removeprefix("."), child) for name, child in named_children(value) or ())
        inside = (_unpicklable_reason(child, name) for name, child in parts)
        # Without the leading indices, which locate the batch among the arguments.
        where = f"{re.sub('^([0-9]+[.])+', '', path) or 'it'} ({type(value).__name__})"
        return next((found for found in inside if found), f"{where}: {error}")
    return None
