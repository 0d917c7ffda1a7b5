"""A bucket whose parameters and gradients are flat, and cut into one even slice a rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pardist.engines.data_parallel.bucket import Bucket, view_like
from lightning_pardist.engines.exchange import gather_slices
from lightning_pardist.engines.local_tensors import own_part, set_own_part
from lightning_pardist.engines.memory import storage_bytes
from lightning_pardist.engines.zero.host import HostSlice, follow, low_precision


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that lies in this rank's slice.

    Attributes:
        param: The parameter, whole.
        start: First element of the part, in the parameter's flat order in the bucket.
        stop: Behind the last element.
        offset: Where the part begins in the slice.
        shard: What the optimizer updates, flat, shape ``[stop - start]``.
    """

    param: nn.Parameter
    start: int
    stop: int
    offset: int
    shard: nn.Parameter


class ShardedBucket(Bucket):
    """Parameters as views of one flat buffer, of which this rank's optimizer updates one slice.

    The slices are even to the element, whatever the shapes: no rank holds more than ``1/N`` of the optimizer's state,
    plus padding of less than ``N`` elements a bucket. Of parameters that are split over tensor ranks the bucket holds
    this rank's parts. Parameters in half precision are updated in fp32 masters, which
    exist for the slice only.

    Args:
        params: Parameters of one dtype and device; their ``data`` becomes views of the flat buffer.
        rank: This rank's index in the data axis.
        world_size: Size of the data axis.
        keep_full: Whether the whole gradient buffer is kept between steps (ZeRO-1), or only the slice (ZeRO-2).
        make_host: Makes what keeps the slice's masters and gradients on the host, if the optimizer steps there.

    Attributes:
        shard_numel: Elements of a slice, padding included.
        pieces: What lies in this rank's slice.
        has_gradients: Whether any rank had a gradient since they were dropped.
        master: What the optimizer updates, shape ``[shard_numel]``: the slice itself, or its fp32 copy.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        *,
        rank: int,
        world_size: int,
        keep_full: bool,
        make_host: Callable[[Tensor], HostSlice] | None = None,
    ) -> None:
        self.params = list(params)
        self.numels = [own_part(param).numel() for param in self.params]
        self.numel = sum(self.numels)
        self.shard_numel = -(-self.numel // world_size)
        self.world_size = world_size
        self.keep_full = keep_full
        first = own_part(self.params[0])
        self._dtype, self.device = first.dtype, first.device
        self._own = slice(rank * self.shard_numel, (rank + 1) * self.shard_numel)
        self.flat_params = torch.zeros(self.shard_numel * world_size, dtype=self._dtype, device=self.device)
        self._homes: list[Tensor] = []
        self._adopt_parameters()
        own = self.flat_params[self._own]
        self.host = None if make_host is None else make_host(own)
        self.master: Tensor = own.float() if low_precision(self._dtype) else own
        if self.host is not None:
            self.master = self.host.master
        self.master_dtype = self.master.dtype
        self.pieces = self._cut()
        self.flags = torch.zeros(len(self.params), device=self.device)
        self._full: Tensor | None = None
        self._views: list[Tensor] = []
        self._shard: Tensor | None = None
        self._published = False
        self._unstepped: set[int] = set()
        self.has_gradients = False
        self._shard_in_full = False
        self.reset()

    # --- parameters ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def gather(self, group: dist.ProcessGroup) -> dist.Work:
        """Send this rank's updated slice and receive the others'. Collective over ``group``; returns at once."""
        own = self.flat_params[self._own]
        if self.host is not None:
            self._publish(self.host)
            self.host.wait_published()
            self._await_step()
        elif low_precision(self._dtype):
            own.copy_(self.master)
        return gather_slices(self.flat_params, group=group)

    @torch.no_grad()
    def take_changes(self) -> None:
        """Note what the user did to parameters since the last step: new memory (``p.data = ...``), new values.

        Values that are updated in place are in the buffer already; only masters, which have more digits, do not follow
        by themselves. Not collective.
        """
        for param, home in zip(self.params, self._homes, strict=True):
            part = own_part(param)
            if part.numel() and part.data_ptr() != home.data_ptr():
                home.copy_(part)
                set_own_part(param, home)
        if self.host is not None:
            self.host.take_changes()
        elif low_precision(self._dtype):
            follow(self.master, self.flat_params[self._own])

    @torch.no_grad()
    def note_stepped(self, shards: Collection[nn.Parameter]) -> None:
        """Some shards are updated: once all are, their copy back to the device begins, while others are updated."""
        self._unstepped -= {id(shard) for shard in shards}
        if self.host is not None and not self._unstepped:
            self._publish(self.host)

    def _publish(self, host: HostSlice) -> None:
        if not self._published:
            host.publish()
        self._published = True

    def _await_step(self) -> None:
        self._published = False
        self._unstepped = {id(piece.shard) for piece in self.pieces if piece.shard.grad is not None}

    @torch.no_grad()
    def release_memory(self) -> None:
        """Let the flat buffers go: parameters and slices get memory of their own, and gradients are forgotten."""
        for param in self.params:
            set_own_part(param, own_part(param).detach().clone())
            param.grad = None
        for piece in self.pieces:
            if self.host is None or not self.host.is_apart:
                piece.shard.data = piece.shard.data.clone()
            piece.shard.grad = None
        self.host = None
        self.flat_params = self.master = self.flat_params.new_empty(0)
        self._homes = []
        self._full, self._views, self._shard = None, [], None

    def slice_of(self, param: nn.Parameter, flat: Tensor) -> Tensor:
        """The values of ``param`` in ``flat``, shape ``[padded numel]``, in the shape of the rank's part of it."""
        offset = 0
        for candidate, numel in zip(self.params, self.numels, strict=True):
            if candidate is param:
                return view_like(flat[offset : offset + numel], own_part(param))
            offset += numel
        raise KeyError("the parameter is not in this bucket")

    @torch.no_grad()
    def _adopt_parameters(self) -> None:
        offset = 0
        for param, numel in zip(self.params, self.numels, strict=True):
            part = own_part(param)
            view = view_like(self.flat_params[offset : offset + numel], part)
            view.copy_(part)
            set_own_part(param, view)
            self._homes.append(view)
            offset += numel

    def _cut(self) -> list[Piece]:
        pieces, offset = [], 0
        for param, numel in zip(self.params, self.numels, strict=True):
            if numel == 0:
                # Without elements, but its optimizer counts steps; the first rank keeps the count.
                if self._own.start == 0:
                    pieces.append(Piece(param, 0, 0, 0, nn.Parameter(self.master[:0])))
                continue
            begin, end = max(offset, self._own.start), min(offset + numel, self._own.stop)
            if begin < end:
                at = begin - self._own.start
                shard = nn.Parameter(self.master[at : at + end - begin])
                pieces.append(Piece(param, begin - offset, end - offset, at, shard))
            offset += numel
        return pieces

    # --- gradients ----------------------------------------------------------------------------------------------

    @property
    def views(self) -> list[Tensor]:
        """The parameters' gradients in the full buffer, which is made when the first of them comes."""
        if self._shard is not None and self._shard_in_full:
            # Reduced, and not used by a step yet: what is coming must not overwrite it.
            self._shard_in_full = False
            if any(piece.shard.grad is not None for piece in self.pieces):
                self._shard = self._shard.clone()
                for piece in self.pieces:
                    if piece.shard.grad is not None:
                        piece.shard.grad = self._shard[piece.offset : piece.offset + piece.stop - piece.start]
        if self._full is None:
            # fill() sees to views that no gradient comes for; nobody sees to what is behind them.
            self._full = torch.empty_like(self.flat_params)
            self._full[self.numel :].zero_()
            offset = 0
            for param, numel in zip(self.params, self.numels, strict=True):
                self._views.append(view_like(self._full[offset : offset + numel], own_part(param)))
                offset += numel
        return self._views

    @property
    def full_gradients(self) -> Tensor:
        """All gradients of this rank, flat and padded, shape ``[world_size * shard_numel]``."""
        if self._full is None:
            return torch.zeros_like(self.flat_params)
        return self._full

    @property
    def sum_into(self) -> Tensor | None:
        """Where this rank's slice may be added up in place, because it stays there; nowhere if None."""
        stays = self.keep_full and self._full is not None and self.master.dtype == self._dtype
        return self._full[self._own] if stays and self._full is not None else None

    def take(self, reduced: Tensor) -> None:
        """Receive the mean of this rank's slice, shape ``[shard_numel]``, and let the full gradients go."""
        fresh = self._shard is None or all(piece.shard.grad is None for piece in self.pieces)
        if self.host is not None and self.host.is_away:
            received = self.host.receive(reduced)
            if self._shard is None or fresh:
                self._shard = received
            else:
                self.host.wait_received()
                self._shard.add_(received)
        elif self._shard is not None and not fresh:
            self._shard.add_(reduced)
        elif self.keep_full and self._full is not None and self.master.dtype == self._dtype:
            self._shard = self._full[self._own]
            if reduced.data_ptr() != self._shard.data_ptr():
                self._shard.copy_(reduced)
            self._shard_in_full = True
        else:
            self._shard = reduced.to(self.master.dtype)
        for param in self.params:
            param.grad = None
        if not self.keep_full or self.master.dtype != self._dtype:
            # What half precision gradients were reduced to is fp32, and lies elsewhere.
            self._full, self._views = None, []

    def release(self) -> None:
        """Hand the slice's gradients to the shards; a parameter that no rank used keeps what it had."""
        if self._shard is None:
            raise RuntimeError("release() comes after take()")
        if self.host is not None:
            self.host.wait_received()
        used = [True] * len(self.params) if not self.pending else [flag > 0 for flag in self.flags.tolist()]
        by_param = dict(zip(self.params, used, strict=True))
        for piece in self.pieces:
            if by_param[piece.param]:
                numel = piece.stop - piece.start
                piece.shard.grad = self._shard[piece.offset : piece.offset + numel]
        self.has_gradients = self.has_gradients or any(used)
        self._await_step()
        self.reset()

    def held_bytes(self) -> int:
        """Bytes of gradients on this rank at this moment."""
        return storage_bytes(tensor for tensor in (self._full, self._shard) if tensor is not None)

    def drop_gradients(self) -> None:
        """Forget all gradients, as ``zero_grad`` does."""
        self.has_gradients = False
        for piece in self.pieces:
            piece.shard.grad = None
