"""Broadcast of module buffers (running statistics, code books) from the first rank before they are read."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pardist.collectives import as_bytes
from lightning_pardist.compat.modules import NormBase
from lightning_pardist.compat.tensors import version_of
from lightning_pardist.engines.common.agreed_buffers import AgreedBuffer, agree_on_buffers
from lightning_pardist.local_tensors import dense_parts, distinct_elements, is_dense, local_shard

_CHUNK_BYTES = 64 * 2**20
#: How a step changes a buffer.
_WRITTEN, _REPLACED = 1.0, 2.0


class BufferSync:
    """Synchronises a module's buffers with the first rank.

    torch DDP broadcasts every buffer before every training forward. Two kinds need fewer broadcasts. Running statistics
    of normalisation layers are not read in training, so they are sent before evaluation and before a checkpoint.
    Constants (causal masks, position ids) are sent once, at the start. The remaining buffers, which a step changes and
    a later step may read, are sent before every training step. The set of changing buffers is observed during the first
    step and synchronised across ranks; :meth:`observe` repeats this. Sparse buffers are constants. A buffer that has
    another shape on each rank, such as a mask that a forward keeps for its batch, is not sent.

    Args:
        module: The module whose buffers are synchronised.
        group: The data axis' process group.

    Attributes:
        differing: Names of buffers that differed between ranks after the observed step, before they were sent.
        left_alone: Names of buffers that are not sent, because their shapes or dtypes differed between ranks.
    """

    def __init__(self, module: nn.Module, *, group: dist.ProcessGroup) -> None:
        self.group = group
        statistics = {
            id(buffer) for layer in module.modules() if isinstance(layer, NormBase) for buffer in layer.buffers(False)
        }
        self.module = module
        self._statistics = statistics
        self.differing: list[str] = []
        self.left_alone: set[str] = set()
        self._live: list[str] = []
        #: Device of flags about live buffers, if the observed step has replaced one, whose shape may thus change.
        self._flagged_on: torch.device | None = None
        self._states: dict[str, Any] | None = None
        self._sparse = set(describe_sparse_buffers(module))
        self._sparse_seen: list[tuple[str, tuple[int, int], bool]] = []
        if self.group.size() > 1:
            self._states = self._current_states()

    def observe(self) -> None:
        """Observe the next step to find the buffers that change. Must be called on every rank at the same step."""
        if self.group.size() > 1:
            self._states = self._current_states()

    def before_training_step(self) -> None:
        """Broadcast the buffers that change during training. Collective over the group if there are any."""
        if self._live:
            named = dict(self.module.named_buffers(remove_duplicate=False))
            if self._flagged_on is not None:
                self._leave_alone_reshaped(named, self._flagged_on)
            broadcast_tensors([named[name] for name in self._live if name in named], group=self.group)

    def _leave_alone_reshaped(self, named: dict[str, Tensor], device: torch.device) -> None:
        """Stop sending live buffers whose shapes or dtypes differ between ranks. Collective over the group."""
        codes = torch.tensor([_shape_code(named.get(name)) for name in self._live], dtype=torch.int64, device=device)
        both = torch.stack([codes, -codes])
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self.group)
        differ = (both[0] != -both[1]).tolist()
        self.left_alone.update(name for name, flag in zip(self._live, differ, strict=True) if flag)
        self._live = [name for name in self._live if name not in self.left_alone]

    def after_training_step(self) -> None:
        """Synchronise the set of changing buffers, if the step was observed. Collective over the group then.

        Raises:
            ValueError: If a sparse buffer has changed.
        """
        self._refuse_changed_sparse()
        if self._states is None:
            return
        before, self._states = self._states, None
        now = self._current_states()
        everything = agree_on_buffers(self.module, group=self.group, left_alone=self.left_alone)
        self._send(each for each in everything if not each.is_everywhere)
        agreed = [each for each in everything if id(each.tensor) not in self._statistics]
        if not agreed:
            return
        names = [each.name for each in agreed]
        device = local_shard(agreed[0].tensor).device
        changed = torch.tensor([_change(before.get(name), now.get(name)) for name in names], device=device)
        dist.all_reduce(changed, op=dist.ReduceOp.MAX, group=self.group)
        changes = changed.tolist()
        live = [each for each, change in zip(agreed, changes, strict=True) if change]
        self._live = [each.name for each in live if each.name not in self.left_alone]
        self._flagged_on = device if _REPLACED in changes else None
        self.differing = self._find_differing([each for each in live if each.is_everywhere])

    def _find_differing(self, buffers: list[AgreedBuffer]) -> list[str]:
        """Return the names of buffers whose values differ between ranks. Collective over the group if there are any."""
        numbers = [local_shard(each.tensor).detach() for each in buffers]
        if not numbers:
            return []
        sums = torch.stack([_fingerprint(part) for part in numbers])
        both = torch.stack([sums, -sums]).nan_to_num()
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self.group)
        differ = (both[0] != -both[1]).any(1).tolist()
        return [each.name for each, flag in zip(buffers, differ, strict=True) if flag]

    def synchronize(self) -> None:
        """Broadcast all buffers, before evaluation and before a checkpoint. Collective over the group."""
        if self.group.size() > 1:
            self._send(agree_on_buffers(self.module, group=self.group, left_alone=self.left_alone))

    def _current_states(self) -> dict[str, Any]:
        """Return identity, version and checksums of each buffer: writes through ``.data`` leave the version alone."""
        versions = {name: seen for name, seen, dense in self._seen() if dense and seen[0] not in self._statistics}
        named = dict(self.module.named_buffers(remove_duplicate=False))
        parts = {name: local_shard(named[name]).detach() for name in versions if not named[name].is_meta}
        values = [_fingerprint(part).nan_to_num().tolist() for part in parts.values()]
        return {name: (seen, *dict(zip(parts, values, strict=True)).get(name, ())) for name, seen in versions.items()}

    def _seen(self) -> Iterator[tuple[str, tuple[int, int], bool]]:
        """Yield names of buffers, their identities and versions, and whether they are dense."""
        for name, buffer in self.module.named_buffers(remove_duplicate=False):
            yield name, (id(buffer), version_of(local_shard(buffer))), is_dense(buffer)

    def _refuse_changed_sparse(self) -> None:
        if self.group.size() == 1 or not self._sparse:
            return
        # Trials restore buffers by copies, so that versions change and values do not.
        seen = [each for each in self._seen() if not each[2]]
        if seen == self._sparse_seen:
            return
        self._sparse_seen = seen
        if changed := [each for each in describe_sparse_buffers(self.module) if each not in self._sparse]:
            raise ValueError(
                f"The sparse buffer {changed[0].split()[0]!r} has changed in training, and only dense buffers are sent"
                " to other ranks. Register its indices and values as buffers, and make the sparse tensor from them in"
                " forward; or set broadcast_buffers=False if every rank changes it alike."
            )

    def _send(self, agreed: Iterable[AgreedBuffer]) -> None:
        by_source: dict[int, list[Tensor]] = {}
        for each in agreed:
            if each.name not in self.left_alone:
                by_source.setdefault(each.source, []).append(each.tensor)
        for source, tensors in sorted(by_source.items()):
            broadcast_tensors(tensors, group=self.group, group_src=source)


def describe_sparse_buffers(module: nn.Module) -> list[str]:
    """Return name, shape, dtype, layout and checksum of each sparse buffer. Not collective."""
    return [
        f"{name} {tuple(buffer.shape)} {buffer.dtype} {buffer.layout} with the checksum {_checksum(buffer)}"
        for name, buffer in module.named_buffers()
        if not is_dense(buffer) and not buffer.is_meta
    ]


def _checksum(tensor: Tensor) -> str:
    digest = hashlib.sha256()
    for part in dense_parts(tensor):
        digest.update(as_bytes(part.cpu().contiguous()).numpy().data)
    return digest.hexdigest()[:8]


def _change(before: Any, now: Any) -> float:
    """Return whether a buffer's state has changed, and whether it is another tensor."""
    if before is None or now is None or before[0][0] != now[0][0]:
        return _REPLACED
    return _WRITTEN if before != now else 0.0


def _shape_code(buffer: Tensor | None) -> int:
    """Return a hash of shape and dtype that is the same in every process, below 2^56; 0 for no buffer."""
    if buffer is None:
        return 0
    local = local_shard(buffer)
    return int.from_bytes(hashlib.sha256(repr((tuple(local.shape), local.dtype)).encode()).digest()[:7], "big")


def _fingerprint(values: Tensor) -> Tensor:
    """Return two checksums, shape ``[2]``, that almost never match for different or permuted values."""
    flat = (torch.view_as_real(values) if values.is_complex() else values).double().reshape(-1)
    return torch.stack(
        [flat.sum(), flat @ torch.linspace(1.0, 2.0, flat.numel(), dtype=flat.dtype, device=flat.device)]
    )


def broadcast_module(module: nn.Module, *, group: dist.ProcessGroup) -> None:
    """Overwrite parameters and buffers with those of the first rank of ``group``. Collective over ``group``.

    Args:
        module: The module, built identically on every rank; tensors on ``meta`` are skipped.
        group: The participating ranks.
    """
    tensors = itertools.chain(module.parameters(), module.buffers())
    broadcast_tensors((tensor.detach() for tensor in tensors if not tensor.is_meta), group=group)


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor], *, group: dist.ProcessGroup, group_src: int = 0) -> None:
    """Overwrite ``tensors`` with those of one rank, in large flat messages. Collective over ``group``.

    Args:
        tensors: Tensors of the same number, shapes and dtypes on every rank; for DTensors, the local parts. Sparse
            ones are skipped: strategies verify that they are equal.
        group: The participating ranks.
        group_src: The rank in ``group`` whose values are broadcast.
    """
    tensors = (tensor for tensor in tensors if is_dense(tensor))
    _exchange_flattened(tensors, lambda flat: dist.broadcast(as_bytes(flat), group_src=group_src, group=group))


def average_tensors(tensors: Iterable[Tensor], *, group: dist.ProcessGroup) -> None:
    """Overwrite ``tensors`` with their mean over ``group``, in large flat messages. Collective over ``group``.

    Sends ``2 Psi (n-1)/n`` elements per rank for ``Psi`` elements on ``n`` ranks.

    Args:
        tensors: Tensors of floating or complex dtype, of the same number, shapes and dtypes on every rank; for
            DTensors, the local parts.
        group: The participating ranks.
    """

    def average(flat: Tensor) -> None:
        dist.all_reduce(torch.view_as_real(flat) if flat.is_complex() else flat, group=group)
        flat.div_(group.size())

    _exchange_flattened(tensors, average)


def tensors_without_optimizer(module: nn.Module, optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return the tensors to average under local training that no optimizer holds, of floating or complex dtype.

    These are buffers, and parameters written by steps or hooks (momentum teachers).

    Args:
        module: The module that is trained on each rank.
        optimizers: All optimizers of the module.
    """
    held = {param for one in optimizers for group in one.param_groups for param in group["params"]}
    tensors = itertools.chain((param for param in module.parameters() if param not in held), module.buffers())
    return [each for each in tensors if not each.is_meta and (each.is_floating_point() or each.is_complex())]


def _exchange_flattened(tensors: Iterable[Tensor], exchange: Callable[[Tensor], object]) -> None:
    """Concatenate tensors of one dtype and device, apply the in-place ``exchange`` to the copy, and copy back."""
    chunk: list[Tensor] = []
    size = 0
    key: tuple[torch.dtype, torch.device] | None = None

    def send() -> None:
        if not chunk:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in chunk])
        exchange(flat)
        for tensor, piece in zip(chunk, flat.split([tensor.numel() for tensor in chunk]), strict=True):
            tensor.copy_(piece.view(tensor.shape))
        chunk.clear()

    for tensor in (distinct_elements(local_shard(each)) for each in tensors):
        if tensor.numel() == 0:
            continue
        if key != (tensor.dtype, tensor.device) or size > _CHUNK_BYTES:
            send()
            key, size = (tensor.dtype, tensor.device), 0
        chunk.append(tensor)
        size += tensor.numel() * tensor.element_size()
    send()
