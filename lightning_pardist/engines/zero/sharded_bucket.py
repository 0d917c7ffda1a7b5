"""Flat bucket of parameters and gradients, divided into one even slice per rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lightning_pardist.engines.common.block_quantization import Compression
from lightning_pardist.engines.common.elementwise import user_attributes, with_user_attributes
from lightning_pardist.engines.common.memory import storage_bytes
from lightning_pardist.engines.common.quantized_exchange import (
    all_gather_quantized,
    is_quantizable,
    quantized_roundtrip,
)
from lightning_pardist.engines.common.slice_exchange import gather_slices
from lightning_pardist.engines.ddp.bucket import Bucket, flat_like, view_like
from lightning_pardist.engines.zero.host_slice import HostSlice, follow, low_precision
from lightning_pardist.engines.zero.lazy_gradient import LazyGradient
from lightning_pardist.local_tensors import local_shard, set_local_shard, wrap_like

#: Alignment of parameters and slices in the flat buffer, in bytes: vectorized kernels need it, and grouped matrix
#: products refuse operands without it.
_ALIGNMENT = 16


@dataclass(frozen=True)
class Piece:
    """The part of one parameter in this rank's slice.

    Attributes:
        param: The whole parameter.
        start: First element of the part, in the parameter's flat order in the bucket.
        stop: End of the part, exclusive.
        offset: Offset of the part in the slice.
        shard: Flat parameter that the optimizer updates, shape ``[stop - start]``.
    """

    param: nn.Parameter
    start: int
    stop: int
    offset: int
    shard: nn.Parameter


class ShardedBucket(Bucket):
    """Parameters as views of one flat buffer, of which this rank's optimizer updates one slice.

    Slices are even, whatever the shapes: no rank holds more than ``1/N`` of the optimizer's state, plus padding.
    Parameters and slices begin at multiples of 16 bytes, so that the padding is less than that for each of them. For
    parameters that are split over tensor ranks, the bucket holds this rank's parts. Parameters in half precision are
    updated in fp32 masters, which exist for the slice only.

    If gathers of parameters are compressed, the updated slice is separate from the buffer: all ranks, the owner
    included, compute with the decoded values, while updates continue from the exact ones. The exact values are gathered
    into the buffer for evaluation and checkpoints (:meth:`gather_exact`).

    Args:
        params: Parameters of one dtype and device; their ``data`` becomes views of the flat buffer.
        group: The data axis' process group.
        keep_full: Whether the whole gradient buffer is kept between steps (ZeRO-1), or only the slice (ZeRO-2).
        make_host: Creates the host memory for the slice's masters and gradients, if the optimizer steps there.
        compression: Compression of parameter gathers; none if None.
        number: Unique among all present and past buckets of the engine.

    Attributes:
        shard_numel: Elements of a slice, padding included.
        pieces: Parts of parameters in this rank's slice.
        master: What the optimizer updates, shape ``[shard_numel]``: the slice itself, or its fp32 copy.
        shows_dequantized: Whether parameters have the decoded values rather than the exact ones.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        *,
        group: dist.ProcessGroup,
        keep_full: bool,
        make_host: Callable[[Tensor], HostSlice] | None = None,
        compression: Compression | None = None,
        number: int = 0,
    ) -> None:
        self.number = number
        self.params = list(params)
        self.numels = [local_shard(param).numel() for param in self.params]
        first = local_shard(self.params[0])
        self._dtype, self.device = first.dtype, first.device
        #: Elements from the beginning of each parameter in the buffer to the next one's.
        self._extents = [_aligned(numel, self._dtype) for numel in self.numels]
        self.numel = sum(self._extents)
        self.group = group
        self.world_size = world_size = group.size()
        self.shard_numel = _aligned(-(-self.numel // world_size), self._dtype)
        self.keep_full = keep_full
        self._own = slice(group.rank() * self.shard_numel, (group.rank() + 1) * self.shard_numel)
        self.flat_params = torch.zeros(self.shard_numel * world_size, dtype=self._dtype, device=self.device)
        self._parameter_views: list[Tensor] = []
        self._adopt_parameters()
        self._compression = compression if is_quantizable(self.flat_params) else None
        self.shows_dequantized = False
        self._exact = self.flat_params[self._own]
        if self._compression is not None:
            self._exact = self._exact.clone()
        self.host = None if make_host is None else make_host(self._exact)
        self.master: Tensor = self._exact.float() if low_precision(self._dtype) else self._exact
        if self.host is not None:
            self.master = self.host.master
        self.master_dtype = self.master.dtype
        self.pieces = self._cut()
        self._piece_of = {piece.param: piece for piece in self.pieces}
        self.flags = torch.zeros(len(self.params), device=self.device)
        self._full: Tensor | None = None
        self._views: list[Tensor] = []
        self._shard: Tensor | None = None
        self._published = False
        self._unstepped: set[int] = set()
        self._held = [False] * len(self.params)
        self._lazy: list[LazyGradient | None] = [None] * len(self.params)
        self._shown = [False] * len(self.params)
        #: Indices of parameters whose ``.grad`` is this rank's own, to be reduced with a later backward.
        self._unsent: set[int] = set()
        self._shard_in_full = False
        self.reset()

    # --- parameters ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def gather(self) -> dist.Work:
        """Start to all-gather the updated slices. Collective over the group; returns at once."""
        if self.host is not None:
            self._publish(self.host)
            self.host.wait_published()
            self._await_step()
        elif low_precision(self._dtype):
            self._exact.copy_(self.master)
        if self._compression is None:
            return gather_slices(self.flat_params, group=self.group)
        self.shows_dequantized = True
        return all_gather_quantized(self.flat_params, self._exact, group=self.group, kind=self._compression)

    @property
    def has_masters(self) -> bool:
        """Whether updates have higher precision than the parameters on the ranks."""
        return self._compression is not None or self.master_dtype != self._dtype

    @torch.no_grad()
    def show_dequantized(self) -> None:
        """Set parameters to the decoded values of a gather, which every rank can compute. Not collective."""
        if self._compression is None or self.shows_dequantized:
            return
        self.take_changes()
        rows = self.flat_params.view(self.world_size, -1)
        rows.copy_(quantized_roundtrip(rows, self._compression))
        self.shows_dequantized = True

    @torch.no_grad()
    def gather_exact(self) -> dist.Work:
        """Gather exact values into the parameters, after :meth:`take_changes`. Collective; returns at once."""
        self.flat_params[self._own].copy_(self._exact)
        self.shows_dequantized = False
        return gather_slices(self.flat_params, group=self.group)

    @torch.no_grad()
    def is_changed(self) -> bool:
        """Return whether user code replaced parameters' memory or changed this rank's slice since the last step."""
        homes = zip(self.params, self._parameter_views, strict=True)
        if any(home.numel() and local_shard(param).data_ptr() != home.data_ptr() for param, home in homes):
            return True
        return not bool(_alike(self.flat_params[self._own], self._visible()).all())

    def _visible(self) -> Tensor:
        """Return this rank's slice as the parameters show it unless user code changes them."""
        if self._compression is None or not self.shows_dequantized:
            return self._exact
        return quantized_roundtrip(self._exact.view(1, -1), self._compression)[0]

    @torch.no_grad()
    def take_changes(self) -> None:
        """Take over user changes of parameters since the last step: new memory (``p.data = ...``) or new values.

        In-place changes are in the buffer already; only masters, with their higher precision, have to be updated. Not
        collective.
        """
        for param, home in zip(self.params, self._parameter_views, strict=True):
            part = local_shard(param)
            if part.numel() and part.data_ptr() != home.data_ptr():
                home.copy_(part)
                set_local_shard(param, home)
        if self._compression is not None:
            own = self.flat_params[self._own]
            torch.where(_alike(own, self._visible()), self._exact, own, out=self._exact)
        if self.host is not None:
            self.host.take_changes()
        elif low_precision(self._dtype):
            follow(self.master, self._exact)

    @torch.no_grad()
    def note_stepped(self, shards: Collection[nn.Parameter]) -> None:
        """Record updated shards; once all are, start to copy them to the device while others are updated."""
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
        """Release the flat buffers: parameters and slices get memory of their own, and gradients are dropped."""
        for index in range(len(self.params)):
            self.drop(index)
        for param in self.params:
            set_local_shard(param, local_shard(param).detach().clone())
            param.grad = None
        for piece in self.pieces:
            if self.host is None or not self.host.has_separate_masters:
                piece.shard.data = piece.shard.data.clone()
            piece.shard.grad = None
        self.host = None
        self.flat_params = self.master = self._exact = self.flat_params.new_empty(0)
        self._parameter_views = []
        self._full, self._views, self._shard = None, [], None

    def slice_of(self, param: nn.Parameter, flat: Tensor) -> Tensor:
        """Return the values of ``param`` in ``flat``, shape ``[padded numel]``, shaped like this rank's part of it."""
        for candidate, offset, numel in self._places():
            if candidate is param:
                return view_like(flat[offset : offset + numel], local_shard(param))
        raise KeyError("the parameter is not in this bucket")

    def elements_by_rank(self, param: nn.Parameter) -> dict[int, int]:
        """Return the number of a parameter's elements in each rank's slice, for ranks that have any."""
        start, numel = next((offset, numel) for candidate, offset, numel in self._places() if candidate is param)
        stop, found = start + numel, {}
        while start < stop:
            rank = start // self.shard_numel
            end = min(stop, (rank + 1) * self.shard_numel)
            found[rank], start = end - start, end
        return found

    @torch.no_grad()
    def _adopt_parameters(self) -> None:
        for param, offset, numel in self._places():
            part = local_shard(param)
            view = view_like(self.flat_params[offset : offset + numel], part)
            view.copy_(part)
            set_local_shard(param, view)
            self._parameter_views.append(view)

    def _places(self) -> Iterator[tuple[nn.Parameter, int, int]]:
        """Yield each parameter with its offset and number of elements in the buffer."""
        offset = 0
        for param, numel, extent in zip(self.params, self.numels, self._extents, strict=True):
            yield param, offset, numel
            offset += extent

    def _cut(self) -> list[Piece]:
        pieces = []
        for param, offset, numel in self._places():
            if numel == 0:
                # An empty parameter still has a step count in its optimizer; the first rank keeps it.
                if self._own.start == 0:
                    shard = with_user_attributes(nn.Parameter(self.master[:0]), user_attributes(param))
                    pieces.append(Piece(param, 0, 0, 0, shard))
                continue
            begin, end = max(offset, self._own.start), min(offset + numel, self._own.stop)
            if begin < end:
                at = begin - self._own.start
                shard = with_user_attributes(nn.Parameter(self.master[at : at + end - begin]), user_attributes(param))
                pieces.append(Piece(param, begin - offset, end - offset, at, shard))
        return pieces

    # --- gradients ----------------------------------------------------------------------------------------------

    @property
    def views(self) -> list[Tensor]:
        """Views of the parameters' gradients in the full buffer, which is allocated on first use."""
        if self._shard is not None and self._shard_in_full:
            # Reduced, but not used by a step yet: incoming gradients must not overwrite it.
            self._shard_in_full = False
            if any(piece.shard.grad is not None for piece in self.pieces):
                self._shard = self._shard.clone()
                for piece in self.pieces:
                    if piece.shard.grad is not None:
                        piece.shard.grad = self._region(piece, self._shard)
        if self._full is None:
            # fill() handles views without a gradient; the padding after them is zeroed here.
            self._full = torch.empty_like(self.flat_params)
            for (_, offset, numel), extent in zip(self._places(), self._extents, strict=True):
                if extent > numel:
                    self._full[offset + numel : offset + extent].zero_()
            self._full[self.numel :].zero_()
            self._views = self._views_of(self._full)
        return self._views

    def _views_of(self, flat: Tensor) -> list[Tensor]:
        parts = [local_shard(param) for param in self.params]
        pieces = flat[: self.numel].split(self._extents)
        sized = zip(pieces, self.numels, parts, strict=True)
        return [view_like(piece[:numel], part) for piece, numel, part in sized]

    @property
    def full_gradients(self) -> Tensor:
        """This rank's gradients, flat and padded, shape ``[world_size * shard_numel]``."""
        if self._full is None:
            return torch.zeros_like(self.flat_params)
        return self._full

    @property
    def sum_into(self) -> Tensor | None:
        """Memory in which this rank's slice may be summed in place, because it stays there; otherwise None."""
        stays = self.keep_full and self._full is not None and self.master.dtype == self._dtype
        return self._full[self._own] if stays and self._full is not None else None

    def take(self, reduced: Tensor) -> None:
        """Receive the mean of this rank's slice, shape ``[shard_numel]``, and free full gradients that are not kept."""
        fresh = self._is_fresh
        if self._shard is not None and not fresh:
            for piece in self.pieces:
                if piece.shard.grad is None:
                    self._region(piece, self._shard).zero_()
        if self.host is not None and self.host.is_from_device:
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
        self._unsent.clear()
        if not self.keep_full or self.master.dtype != self._dtype:
            # Gradients in half precision were reduced to fp32, in other memory.
            self._full, self._views = None, []

    def release(self) -> None:
        """Set the shards' gradients from the slice; a parameter that no rank used keeps its previous one."""
        if self._shard is None:
            raise RuntimeError("release() comes after take()")
        if self.host is not None:
            self.host.wait_received()
        used = [True] * len(self.params) if not self.pending else [flag > 0 for flag in self.flags.tolist()]
        by_param = dict(zip(self.params, used, strict=True))
        for piece in self.pieces:
            if by_param[piece.param]:
                piece.shard.grad = self._region(piece, self._shard)
        self._held = [held or now for held, now in zip(self._held, used, strict=True)]
        self._await_step()
        self.reset()
        self.show()

    def held_bytes(self) -> int:
        """Return the bytes of gradients that this rank holds now."""
        wholes = (lazy.whole for lazy in self._lazy if lazy is not None)
        return storage_bytes(tensor for tensor in (self._full, self._shard, *wholes) if tensor is not None)

    @property
    def has_gradients(self) -> bool:
        """Whether there is a reduced gradient, on this rank or another."""
        return any(self._held)

    def drop(self, index: int) -> None:
        """Drop the reduced gradient of parameter ``index``. Not collective."""
        param, lazy = self.params[index], self._lazy[index]
        if lazy is not None:
            if self.is_in_place(index):
                param.grad = None
            lazy.source = self._lazy[index] = None
        self._held[index] = self._shown[index] = False
        self._unsent.discard(index)
        if (piece := self._piece_of.get(param)) is not None:
            piece.shard.grad = None
            self._unstepped.discard(id(piece.shard))

    def drop_zeroed(self, params: Collection[nn.Parameter] | None = None) -> None:
        """Drop reduced gradients of some parameters, or all, whose ``.grad`` was set to None by ``zero_grad``."""
        for index, param in enumerate(self.params):
            if param.grad is None and (params is None or param in params):
                self.drop(index)

    @property
    def _is_fresh(self) -> bool:
        return self._shard is None or all(piece.shard.grad is None for piece in self.pieces)

    def _region(self, piece: Piece, shard: Tensor) -> Tensor:
        return shard[piece.offset : piece.offset + piece.stop - piece.start]

    # --- whole gradients, as users see them ---------------------------------------------------------------------

    def show(self) -> None:
        """Put reduced gradients into ``.grad``, unless it holds this rank's own gradient. Not collective."""
        for index, (param, held) in enumerate(zip(self.params, self._held, strict=True)):
            if param.grad is not None:
                if not self._shown[index]:
                    self._unsent.add(index)
            elif held:
                self._show(index)

    def settle(self) -> None:
        """Take over user changes of gradients: changed in place, replaced, assigned or dropped. Not collective."""
        for index, param in enumerate(self.params):
            grad = param.grad
            if self._shown[index]:
                if self.is_in_place(index):
                    self._write_back_gathered(index)
                elif grad is None:
                    self.drop(index)
                else:
                    self._replace_gradient(index, local_shard(grad))
            elif grad is None:
                self._unsent.discard(index)
            elif index not in self._unsent:
                self._replace_gradient(index, local_shard(grad))

    def hide(self) -> None:
        """Take over user changes, and leave ``.grad`` to autograd until :meth:`show`. Not collective."""
        self.settle()
        for index, param in enumerate(self.params):
            if self._shown[index]:
                param.grad, self._shown[index] = None, False
        self.forget_gathered()

    def forget_gathered(self) -> None:
        """Forget gathered gradients before the slices change; the next read gathers them again. Not collective."""
        for lazy in self._lazy:
            if lazy is not None:
                lazy.whole = None

    @torch.inference_mode(False)
    @torch.no_grad()
    def read_gradients(self) -> None:
        """Gather the bucket's gradients, keeping those that were gathered already. Collective over the group."""
        flat = torch.zeros_like(self.flat_params)
        for piece in self.pieces:
            if piece.shard.grad is not None:
                self._region(piece, flat[self._own]).copy_(piece.shard.grad)
        gather_slices(flat, group=self.group).wait()
        for lazy, view in zip(self._lazy, self._views_of(flat), strict=True):
            if lazy is not None and lazy.whole is None:
                lazy.whole = view

    def zero(self, slot: int) -> None:
        """Zero the reduced gradient of the parameter with this index. Not collective."""
        piece = self._piece_of.get(self.params[slot])
        if piece is not None and piece.shard.grad is not None:
            piece.shard.grad.zero_()

    @override
    def adopt(self, index: int, scale: float) -> None:
        self._move_untracked_gradient(index)
        self._unsent.add(index)
        super().adopt(index, scale)

    @override
    def fill(self, scale: float) -> None:
        for index in range(len(self.params)):
            self._move_untracked_gradient(index)
        super().fill(scale)

    def _show(self, index: int) -> None:
        param, lazy = self.params[index], self._lazy[index]
        if lazy is None:
            lazy = self._lazy[index] = LazyGradient(local_shard(param), self, index)
        param.grad, self._shown[index] = wrap_like(lazy, param), True

    @override
    def is_in_place(self, index: int) -> bool:
        grad = self.params[index].grad
        return grad is not None and local_shard(grad) is self._lazy[index]

    def _replace_gradient(self, index: int, values: Tensor) -> None:
        """Replace a gradient by values that the user assigned; the previous tensor keeps its values."""
        self.drop(index)
        self._write(index, values)
        self._show(index)
        if (lazy := self._lazy[index]) is not None:
            lazy.whole = values

    def _write_back_gathered(self, index: int) -> None:
        lazy = self._lazy[index]
        if lazy is not None and lazy.whole is not None:
            self._write(index, lazy.whole)

    def _move_untracked_gradient(self, index: int) -> None:
        """Leave in ``.grad`` what a backward outside of the engine's added on this rank to a reduced gradient."""
        lazy = self._lazy[index]
        if lazy is None or not self._shown[index]:
            return
        param = self.params[index]
        if lazy.is_replaced:
            self._write_back_gathered(index)
        elif self.is_in_place(index):
            self._write_back_gathered(index)
            param.grad = None if lazy.added is None else wrap_like(lazy.added, param)
        else:
            # Assigned by the user, the same on all ranks, then added to: the mean over ranks is right for the sum.
            self.drop(index)
        self._shown[index] = False
        lazy.whole, lazy.added, lazy.is_replaced = None, None, False

    @torch.no_grad()
    def _write(self, index: int, values: Tensor) -> None:
        param, self._held[index] = self.params[index], True
        piece = self._piece_of.get(param)
        if piece is None:
            return
        values = values.to_dense() if values.is_sparse else values
        own = flat_like(values, local_shard(param))[piece.start : piece.stop]
        grad = piece.shard.grad
        if grad is None:
            if self._shard is None or self._is_fresh:
                # The previous slice may be a part of the full buffer, where gradients accumulate by now.
                self._shard = torch.zeros(self.shard_numel, dtype=self.master_dtype, device=self.master.device)
                self._shard_in_full = False
            piece.shard.grad = self._region(piece, self._shard)
            piece.shard.grad.copy_(own)
            self._unstepped.add(id(piece.shard))
        elif low_precision(self._dtype):
            follow(grad, own.to(grad.device))
        else:
            grad.copy_(own)


def _aligned(numel: int, dtype: torch.dtype) -> int:
    """Return a number of elements rounded up to a multiple of the alignment."""
    elements = max(_ALIGNMENT // dtype.itemsize, 1)
    return -(-numel // elements) * elements


def _alike(values: Tensor, others: Tensor) -> Tensor:
    """Return where two tensors are equal or both NaN: a block with a non-finite value decodes to NaN."""
    return (values == others) | (values.isnan() & others.isnan())
