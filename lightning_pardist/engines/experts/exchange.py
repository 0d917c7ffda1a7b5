"""Communication within an expert group: rows of tokens, or the weights of experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pardist.collectives import as_bytes
from lightning_pardist.engines.fsdp.collective_sequencer import GATHER, CollectiveSequencer
from lightning_pardist.engines.tensor.regions import PlainFunction

#: Dtypes that a message can encode; 0 encodes none.
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_BITS = 3


@dataclass(frozen=True)
class Form:
    """Dtypes of dispatched rows, and the autocast state in which they are computed.

    Attributes:
        dtypes: Dtype of each tensor of rows.
        autocast: Autocast dtype; None if autocast is off.
    """

    dtypes: tuple[torch.dtype, ...]
    autocast: torch.dtype | None

    @classmethod
    def here(cls, *rows: Tensor) -> Form:
        """Return the form of some rows under the current autocast state."""
        kind = rows[0].device.type
        on = torch.is_autocast_enabled(kind)
        return cls(tuple(each.dtype for each in rows), torch.get_autocast_dtype(kind) if on else None)

    @property
    def code(self) -> int:
        """Encoding as an integer larger than 0."""
        numbers = [0 if dtype is None else 1 + _DTYPES.index(dtype) for dtype in (self.autocast, *self.dtypes)]
        return sum(number << _BITS * place for place, number in enumerate(numbers))

    @classmethod
    def of_code(cls, code: int) -> Form:
        """Decode :attr:`code`."""
        autocast, *dtypes = (code >> place & (1 << _BITS) - 1 for place in range(0, code.bit_length(), _BITS))
        return cls(tuple(_DTYPES[number - 1] for number in dtypes), _DTYPES[autocast - 1] if autocast else None)

    def entered(self, kind: str) -> AbstractContextManager[Any]:
        """Return a context with this form's autocast state on a device type, regardless of the state outside."""
        if self.autocast is None:
            return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
        return torch.autocast(kind, self.autocast)


class Peers:
    """The process group over which the experts of one model are distributed.

    Args:
        group: The process group; None for a single rank without communication.
        longest: Maximum number of integers that :meth:`exchange_counts` sends to one rank, the same on all ranks.

    Attributes:
        size: Number of ranks.
        rank: Rank in the group.
        sequencer: Synchronises the order of layers if ranks may run different ones; None if they cannot.
        first_index: Index of the first layer in the sequencer's numbering.
        sent_bytes: Bytes that this rank has sent to others since the start.
    """

    def __init__(self, group: dist.ProcessGroup | None, longest: int = 0) -> None:
        self.group, self.longest = group, longest
        self.size = 1 if group is None else group.size()
        self.rank = 0 if group is None else group.rank()
        self.sequencer: CollectiveSequencer | None = None
        self.first_index = 0
        self.sent_bytes = 0

    @contextmanager
    def sequenced(self, layer: int) -> Iterator[None]:
        """Context manager around a layer's communication in forward. Collective over an active sequencer's group."""
        if self.sequencer is not None:
            self.sequencer.before(GATHER, self.first_index + layer)
        yield
        if self.sequencer is not None:
            self.sequencer.after()

    def exchange_counts(self, layer: int, numbers: Tensor, form: Form | None = None) -> tuple[Tensor, Form | None]:
        """Exchange integers with every rank, and check that layers and forms match. Collective over the group.

        Args:
            layer: Index of the layer.
            numbers: int64 in host memory, shape ``[size, n]``: row ``i`` is sent to rank ``i``.
            form: Form of this rank's rows; None if it has none and adopts that of the others.

        Returns:
            Shape ``[size, n]``: row ``i`` was received from rank ``i``; and the form of all ranks' rows, None if none
            has any.

        Raises:
            RuntimeError: On all ranks, if one runs another layer, or has rows of another form.
        """
        if self.group is None:
            return numbers, form
        # All messages have one length: otherwise a rank at another layer would be detected too late.
        padded = torch.zeros((self.size, 2 + self.longest), dtype=torch.int64)
        padded[:, 0], padded[:, 1] = layer, 0 if form is None else form.code
        padded[:, 2 : 2 + numbers.shape[1]] = numbers
        told = torch.empty_like(padded)
        dist.all_to_all_single(told, padded, group=self.group)
        if (told[:, 0] != layer).any():
            raise RuntimeError(
                f"Ranks of one expert group ran different layers of experts at the same time ({told[:, 0].tolist()}):"
                " in training every rank has to call the same ones in the same order, whatever its samples are."
            )
        forms = [Form.of_code(code) for code in sorted(set(told[:, 1].tolist()) - {0})]
        if len(forms) > 1:
            raise RuntimeError(
                "Ranks of one expert group called the same layer of experts with rows of different dtypes, or under"
                f" different autocast settings ({', '.join(map(str, forms))}). Make them the same, or set"
                " expert_dispatch='weights'."
            )
        return told[:, 2 : 2 + numbers.shape[1]], forms[0] if forms else None

    def all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send rows to every rank and receive theirs, without gradients. Collective over the group.

        Args:
            rows: Shape ``[sum(send), ...]``, ordered by destination rank.
            send: Number of rows for each rank.
            receive: Number of rows from each rank.

        Returns:
            Shape ``[sum(receive), ...]``, ordered by source rank.
        """
        if self.group is None:
            return rows
        rows = rows.contiguous()
        received = rows.new_empty((sum(receive), *rows.shape[1:]))
        width = rows[:1].numel() * rows.element_size() if len(rows) else received[:1].numel() * rows.element_size()
        self.sent_bytes += width * (sum(send) - send[self.rank])
        dist.all_to_all_single(
            as_bytes(received),
            as_bytes(rows),
            [count * width for count in receive],
            [count * width for count in send],
            group=self.group,
        )
        return received

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Concatenate every rank's tensor along its first dim, without gradients. Collective over the group."""
        if self.group is None:
            return tensor
        tensor = tensor.detach().contiguous()
        parts = tensor.new_empty((self.size, *tensor.shape))
        self.sent_bytes += tensor.numel() * tensor.element_size() * (self.size - 1)
        dist.all_gather([as_bytes(part) for part in parts], as_bytes(tensor), group=self.group)
        return parts.flatten(0, 1)


def all_to_all_with_grad(rows: Tensor, send: Sequence[int], receive: Sequence[int], peers: Peers) -> Tensor:
    """Like :meth:`Peers.all_to_all`, with gradients, which are sent back. Collective in forward and in backward."""
    result: Tensor = _AllToAll.run(rows, list(send), list(receive), peers)
    return result


class _AllToAll(PlainFunction):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], peers: Peers) -> Tensor:
        ctx.send, ctx.receive, ctx.peers = send, receive, peers
        _save_for_recompute(ctx, rows)
        received = peers.all_to_all(rows.detach(), send, receive)
        return received.clone() if received.data_ptr() == rows.data_ptr() else received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _recompute(ctx)
        return ctx.peers.all_to_all(grad, ctx.receive, ctx.send), None, None, None


def with_graph_inputs(tensor: Tensor, *others: Tensor) -> Tensor:
    """Return ``tensor`` with ``others`` as additional inputs in the autograd graph, which get zero gradients.

    So backward runs through ``others`` on every rank, whether or not the tensor was computed from them.
    """
    result: Tensor = _WithGraphInputs.run(tensor, *others)
    return result


class _WithGraphInputs(PlainFunction):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *others: Tensor) -> Tensor:
        ctx.like = [(other.shape, other.dtype, other.device) for other in others]
        _save_for_recompute(ctx, tensor)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _recompute(ctx)
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)
        return grad, *zeros


def _save_for_recompute(ctx: Any, like: Tensor) -> None:
    """Save a tensor for backward, only for :func:`_recompute`.

    A checkpointed block recomputes its forward when the first of its saved tensors is unpacked, and only as far as the
    last one. Both depend on a rank's own tokens, and the forward has collectives. So each exchange saves a tensor, and
    unpacks it before its backward communicates: all ranks then recompute all exchanges in the same order.
    """
    ctx.save_for_backward(like.new_empty(0))


def _recompute(ctx: Any) -> None:
    """Recompute the forward of a checkpointed block now, if it has not been recomputed yet."""
    _ = ctx.saved_tensors


def anchor(like: Tensor) -> Tensor:
    """Return an empty tensor that requires grad: joined to dispatched rows, it makes their backward run as well."""
    return torch.zeros(0, device=like.device, requires_grad=torch.is_grad_enabled())


def all_gather_weights(
    runs: Sequence[Sequence[Tensor]], peers: Peers, *, stacked: bool
) -> tuple[list[list[Tensor]], Tensor]:
    """All-gather the weights of all experts from those of each rank's. Collective in forward and in backward.

    In backward every rank gets the sum of all ranks' gradients of its own weights, or None where no rank has any.

    Args:
        runs: For each weight of an expert, this rank's experts' tensors in order; one tensor if ``stacked``.
        peers: The group; each rank has the same number of experts, of the same shapes.
        stacked: Whether a tensor holds the weights of several experts, along its first dim.

    Returns:
        The same for the experts of all ranks, and a tensor to join to results computed from them.
    """
    lengths = [len(run) for run in runs]
    flat = [tensor for run in runs for tensor in run]
    *whole, mark = _Gathered.run(peers, lengths, stacked, anchor(flat[0]), *flat)
    counts = [1 if stacked else length * peers.size for length in lengths]
    return [list(run) for run in _runs(whole, counts)], mark


class _Gathered(PlainFunction):
    @staticmethod
    def forward(
        ctx: Any, peers: Peers, lengths: list[int], stacked: bool, start: Tensor, *locals_: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.peers, ctx.lengths, ctx.stacked = peers, lengths, stacked
        _save_for_recompute(ctx, start)
        ctx.like = [tensor.new_empty(0) for tensor in locals_]
        ctx.shapes = [tensor.shape for tensor in locals_]
        ctx.set_materialize_grads(False)
        whole: list[Tensor] = []
        for run in _runs(locals_, lengths):
            packed = peers.all_gather(run[0] if stacked else torch.stack(list(run)))
            whole.extend([packed] if stacked else packed.unbind())
        return *(tensor.clone() if peers.group is None else tensor for tensor in whole), start.new_zeros(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        _recompute(ctx)
        peers: Peers = ctx.peers
        counts = [1 if ctx.stacked else length * peers.size for length in ctx.lengths]
        of_whole = grads[:-1]
        present = torch.tensor([grad is not None for grad in of_whole], dtype=torch.int32)
        if peers.group is not None:
            dist.all_reduce(present, op=dist.ReduceOp.MAX, group=peers.group)
        result: list[Tensor | None] = []
        position = 0
        for run, used in zip(_runs(of_whole, counts), _runs(present.tolist(), counts), strict=True):
            length = 1 if ctx.stacked else len(run) // peers.size
            shape, like = ctx.shapes[position], ctx.like[position]
            position += length
            if not any(used):
                result.extend([None] * length)
                continue
            whole_shape = (shape[0] * peers.size, *shape[1:]) if ctx.stacked else shape
            filled = [like.new_zeros(whole_shape) if grad is None else grad for grad in run]
            packed = filled[0] if ctx.stacked else torch.stack(filled)
            own = len(packed) // peers.size
            received = peers.all_to_all(packed, [own] * peers.size, [own] * peers.size)
            summed = received.unflatten(0, (peers.size, own)).sum(0)
            first = 0 if ctx.stacked else peers.rank * own
            parts = [summed] if ctx.stacked else summed.unbind()
            result.extend(part if used[first + index] else None for index, part in enumerate(parts))
        return None, None, None, None, *result


def _runs(items: Sequence[Any], lengths: Sequence[int]) -> list[Sequence[Any]]:
    found, position = [], 0
    for length in lengths:
        found.append(items[position : position + length])
        position += length
    return found
