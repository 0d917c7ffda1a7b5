"""Point-to-point messages between stages, with shape headers where shapes are new, and bounded waits.

Shapes may differ between micro-batches: an uneven split, a short last batch, padding to the longest sample. A message
of values therefore starts with one integer. Zero means that shapes, and outputs that are not tensors, are as recorded
for the micro-batch's signature in an earlier step, for which the receiver has already posted its buffers. Otherwise it
is the length of a header with the outputs of all calls so far, which the next stage's stubs need as well. On CPU a
small first value of known shape follows the integer in the same message.
"""

from __future__ import annotations

import pickle
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from lightning_pardist.collectives import Message, irecv, isend, wire_device, world_group
from lightning_pardist.engines.pipeline.errors import PipelineTimeoutError
from lightning_pardist.engines.pipeline.records import ConstLeaf, Leaf, Output, TensorLeaf, Value

_TAGS_PER_MESSAGE = 4096
#: Largest first value, in bytes, that is copied behind the leading integer: copying it is faster than a second message.
_MOST_ATTACHED = 2**16
#: Bytes of the leading integer in front of a value, a multiple of the size of every dtype's elements.
_LEAD = 16
#: Types of outputs that are compared by their text.
_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
#: Types of outputs that hardly ever differ between batches of the same shapes.
_STEADY = (bool, int, type(None), torch.dtype, torch.device, torch.Size)


@dataclass
class PendingValues:
    """A message of values that is being received.

    Attributes:
        key: Stage boundary and signature.
        peer: Rank of the sender, in the pipeline.
        tag: First tag of the message.
        length: The leading integer.
        posted: Receive buffers, posted immediately if the signature is known.
        outputs: Descriptions of the calls that the values come from.
        works: Pending receives.
    """

    key: Hashable
    peer: int
    tag: int
    length: torch.Tensor
    posted: list[torch.Tensor] | None
    outputs: list[Output] | None = None
    works: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class _Layout:
    """What a header describes: the outputs of all calls so far, and the values of the message."""

    outputs: list[Output]
    leaves: tuple[TensorLeaf, ...]

    @cached_property
    def facts(self) -> list[Any]:
        """What messages without a header must have in common."""
        described = [fact for output in self.outputs for fact in (output.spec, *map(_fact, output.leaves))]
        return [*map(_fact, self.leaves), *described]

    @property
    def varies(self) -> bool:
        """Whether outputs that are not tensors may depend on the values of the batch."""
        leaves = (leaf for output in self.outputs for leaf in output.leaves)
        return any(isinstance(leaf, ConstLeaf) and not isinstance(leaf.value, _STEADY) for leaf in leaves)


class _LayoutCache:
    """Cache of layouts by signature, collected during a step and used from the next step on.

    Args:
        is_final: Whether a known layout cannot change, so that one which may is not remembered.
    """

    def __init__(self, *, is_final: bool) -> None:
        self._is_final = is_final
        self._known: dict[Hashable, _Layout] = {}
        self._learned: dict[Hashable, list[_Layout]] = {}
        self._changing: set[Hashable] = set()

    def get(self, key: Hashable) -> _Layout | None:
        return self._known.get(key)

    def learn(self, key: Hashable, layout: _Layout) -> None:
        self._learned.setdefault(key, []).append(layout)

    def commit(self) -> None:
        for key, seen in self._learned.items():
            changes = key in self._known or any(other.facts != seen[0].facts for other in seen)
            if changes or (self._is_final and seen[0].varies):
                # Outputs differ for the same signature: send a header with every message from now on.
                self._changing.add(key)
                self._known.pop(key, None)
            elif key not in self._changing:
                self._known[key] = seen[0]
        self._learned.clear()


class StageP2P:
    """Point-to-point messages of one rank. Sends do not block; receives block for at most ``timeout_s``.

    Args:
        group: The pipeline's process group; None for the default group.
        device: Device of the tensors.
        timeout_s: Longest wait for one message, in seconds.
        trust_signatures: Whether a known signature determines the shapes, so that messages have no leading integer.
            Needed for backends without tags (NCCL); changing shapes are then an error.
        attach_lengths: Whether the leading integer and a small first value of known shape are one message, on CPU.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        timeout_s: float,
        trust_signatures: bool = False,
        attach_lengths: bool = True,
    ) -> None:
        self.group = group or world_group()
        self.device = device
        #: Device of messages: leading integers and headers, and tensors while they are sent.
        self._wire = wire_device(self.group, device)
        self.timeout = timedelta(seconds=timeout_s)
        self.trust = trust_signatures
        self._attaches = attach_lengths and not trust_signatures and device.type == "cpu"
        self._sent = _LayoutCache(is_final=trust_signatures)
        self._received = _LayoutCache(is_final=trust_signatures)
        self._pending: list[Message] = []

    def global_rank(self, rank: int) -> int:
        """Return the global rank of a rank of the pipeline."""
        return dist.get_global_rank(self.group, rank)

    def send_values(
        self, key: Hashable, peer: int, tag: int, tensors: Sequence[torch.Tensor], outputs: list[Output]
    ) -> None:
        """Send a stage's values to the next stage.

        Args:
            key: Stage boundary and signature.
            peer: Rank of the next stage, in the pipeline.
            tag: Number of this message, unique within the step.
            tensors: The values, in the plan's order.
            outputs: Descriptions of all calls so far.

        Raises:
            RuntimeError: If signatures are trusted and outputs have changed for a known signature.
        """
        tag *= _TAGS_PER_MESSAGE
        layout = _Layout(outputs, tuple(TensorLeaf.of(tensor) for tensor in tensors))
        known = self._sent.get(key)
        if known is not None and known.facts == layout.facts:
            packed = [_packed(tensor, leaf) for tensor, leaf in zip(tensors, known.leaves, strict=True)]
            self._send_known(known, packed, 0, peer, tag)
            return
        if known is not None and self.trust:
            raise RuntimeError(
                f"The outputs of a stage's layers (shapes {[leaf.shape for leaf in layout.leaves]}) differ in shape, or"
                " in values that are not tensors, from those of an earlier batch of the same shapes"
                f" ({[leaf.shape for leaf in known.leaves]}). Pad batches so that shapes do not depend on values, and"
                " return values that depend on the batch as tensors."
            )
        self._sent.learn(key, layout)
        header = torch.frombuffer(bytearray(pickle.dumps((layout.outputs, layout.leaves))), dtype=torch.uint8)
        if known is None:
            self._send(torch.tensor([header.numel()]), peer, tag)
        else:
            # The receiver has posted buffers of the old shapes: complete these receives with dummy tensors.
            dummies = [_buffer(leaf, self.device)[0] for leaf in known.leaves]
            self._send_known(known, dummies, header.numel(), peer, tag)
        behind = tag + 1 + len(tensors)
        self._send(header, peer, behind)
        for index, (tensor, leaf) in enumerate(zip(tensors, layout.leaves, strict=True)):
            self._send(_packed(tensor, leaf), peer, behind + 1 + index)

    def _is_attached(self, known: _Layout) -> bool:
        """Return whether the leading integer and the first value of a known layout are one message."""
        first = known.leaves[0].num_bytes if known.leaves else 0
        return self._attaches and 0 < first <= _MOST_ATTACHED

    def _send_known(self, known: _Layout, packed: Sequence[torch.Tensor], lead: int, peer: int, tag: int) -> None:
        """Send the leading integer and tensors of a layout for which the receiver has posted buffers."""
        attached = self._is_attached(known)
        if attached:
            whole, length, first = _leading(known.leaves[0])
            length.fill_(lead)
            first.copy_(packed[0])
            self._send(whole, peer, tag)
        elif not self.trust:
            self._send(torch.tensor([lead]), peer, tag)
        for index, tensor in list(enumerate(packed))[attached:]:
            self._send(tensor, peer, tag + 1 + index)

    def post_values(self, key: Hashable, peer: int, tag: int, num_values: int) -> PendingValues:
        """Post the receives for :meth:`send_values`; blocks only if signatures are trusted and this one is new.

        Args:
            key: Stage boundary and signature.
            peer: Rank of the previous stage, in the pipeline.
            tag: Number of the message.
            num_values: Number of values.
        """
        tag *= _TAGS_PER_MESSAGE
        pending = PendingValues(key, peer, tag, torch.zeros(1, dtype=torch.int64), None)
        known = self._received.get(key)
        attached = known is not None and self._is_attached(known)
        if not attached and (known is None or not self.trust):
            pending.length = pending.length.to(self._wire)
            pending.works.append(self._recv(pending.length, peer, tag))
        if known is not None:
            pending.outputs, pending.posted = known.outputs, []
            if attached:
                whole, pending.length, first = _leading(known.leaves[0])
                pending.posted.append(first.permute(_inverse(known.leaves[0])))
                pending.works.append(self._recv(whole, peer, tag))
            for index, leaf in list(enumerate(known.leaves))[attached:]:
                packed, tensor = _buffer(leaf, self.device)
                pending.posted.append(tensor)
                if packed.numel():
                    pending.works.append(self._recv(packed, peer, tag + 1 + index))
        elif self.trust:
            self._receive_new(pending, num_values)
        return pending

    def finish_values(self, pending: PendingValues, num_values: int) -> tuple[list[torch.Tensor], list[Output]]:
        """Wait for a message posted by :meth:`post_values`.

        Args:
            pending: The message.
            num_values: Number of values.

        Returns:
            The values, and the descriptions of the calls they come from.

        Raises:
            PipelineTimeoutError: If the message times out.
        """
        self.wait(pending.works, pending.peer)
        pending.works = []
        if not self.trust and int(pending.length):
            self._receive_new(pending, num_values)
        if pending.posted is None or pending.outputs is None:
            raise RuntimeError("A message of values came without its header.")
        return pending.posted, pending.outputs

    def _receive_new(self, pending: PendingValues, num_values: int) -> None:
        self.wait(pending.works, pending.peer)
        pending.works = []
        behind = pending.tag + 1 + num_values
        header = torch.empty(int(pending.length), dtype=torch.uint8, device=self._wire)
        self.wait([self._recv(header, pending.peer, behind)], pending.peer)
        outputs, leaves = pickle.loads(header.cpu().numpy().tobytes())
        self._received.learn(pending.key, _Layout(outputs, leaves))
        pending.outputs, pending.posted, works = outputs, [], []
        for index, leaf in enumerate(leaves):
            packed, tensor = _buffer(leaf, self.device)
            pending.posted.append(tensor)
            if packed.numel():
                works.append(self._recv(packed, pending.peer, behind + 1 + index))
        self.wait(works, pending.peer)

    def send_gradients(self, peer: int, tag: int, gradients: Sequence[torch.Tensor]) -> None:
        """Send gradients of received values back to the previous stage.

        Args:
            peer: Rank of the previous stage, in the pipeline.
            tag: Number of the message.
            gradients: One gradient per value that requires grad, of the value's shape.
        """
        for index, gradient in enumerate(gradients):
            self._send(gradient.detach().contiguous(), peer, tag * _TAGS_PER_MESSAGE + index)

    def post_gradients(
        self, peer: int, tag: int, values: Sequence[tuple[Value, torch.Tensor]]
    ) -> tuple[dict[Value, torch.Tensor], list[Any]]:
        """Post the receives for the gradients of sent values.

        Args:
            peer: Rank of the next stage, in the pipeline.
            tag: Number of the message.
            values: The sent values that require grad.

        Returns:
            Buffers by value, to be read after :meth:`wait`, and the works to wait for.
        """
        buffers: dict[Value, torch.Tensor] = {}
        works = []
        for index, (value, tensor) in enumerate(values):
            buffers[value] = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            if buffers[value].numel():
                works.append(self._recv(buffers[value], peer, tag * _TAGS_PER_MESSAGE + index))
        return buffers, works

    def wait(self, works: Sequence[Any], peer: int) -> None:
        """Wait for receives; on an accelerator only its stream waits, with the process group's timeout.

        Raises:
            PipelineTimeoutError: If a receive times out, or the connection to the peer is lost.
        """
        for work in works:
            try:
                self._wait(work)
            except RuntimeError as error:
                raise PipelineTimeoutError(
                    f"Rank {dist.get_rank()} waited for a message of rank {self.global_rank(peer)} for"
                    f" {self.timeout.total_seconds():.0f} s: {error}"
                ) from error

    def flush(self) -> None:
        """End a step: commit the shapes of new signatures, and wait for all pending sends.

        Raises:
            PipelineTimeoutError: If a send times out.
        """
        self._sent.commit()
        self._received.commit()
        pending, self._pending = self._pending, []
        for message in pending:
            try:
                self._wait(message)
            except RuntimeError as error:
                raise PipelineTimeoutError(
                    f"A message of rank {dist.get_rank()} was not taken within {self.timeout.total_seconds():.0f} s:"
                    f" {error}"
                ) from error

    def _wait(self, work: Any) -> None:
        # With a timeout, NCCL's wait() blocks the host until the message has arrived.
        work.wait(self.timeout) if self._wire.type == "cpu" else work.wait()

    def _send(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        if tensor.numel() == 0:
            return
        self._pending = [other for other in self._pending if not other.is_completed()]
        self._pending.append(isend(tensor.to(self._wire), peer, group=self.group, tag=tag))

    def _recv(self, tensor: torch.Tensor, peer: int, tag: int) -> Message:
        return irecv(tensor, peer, group=self.group, tag=tag)


def _fact(leaf: Leaf) -> Any:
    """Return what is compared of an output."""
    if isinstance(leaf, TensorLeaf):
        return leaf.shape, leaf.dtype, leaf.requires_grad, leaf.split
    if not isinstance(leaf, ConstLeaf):
        return leaf
    # By its text, since NaN is not equal to itself, and True is equal to 1.
    return (type(leaf.value), repr(leaf.value)) if isinstance(leaf.value, _ATOMS) else pickle.dumps(leaf.value)


def _order(leaf: TensorLeaf) -> list[int]:
    """Return the dims from outermost to innermost in memory, to preserve the memory format of a transposed tensor."""
    return sorted(range(len(leaf.shape)), key=lambda dim: (-leaf.stride[dim], dim))


def _packed(tensor: torch.Tensor, leaf: TensorLeaf) -> torch.Tensor:
    return tensor.detach().permute(_order(leaf)).contiguous()


def _buffer(leaf: TensorLeaf, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a contiguous buffer, and the view of it with the leaf's shape and order of strides."""
    packed = torch.empty(_packed_shape(leaf), dtype=leaf.dtype, device=device)
    return packed, packed.permute(_inverse(leaf))


def _leading(leaf: TensorLeaf) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a buffer on the CPU, and its views for the leading integer and for a packed value."""
    whole = torch.empty(_LEAD + leaf.num_bytes, dtype=torch.uint8, device="cpu")
    return whole, whole[:8].view(torch.int64), whole[_LEAD:].view(leaf.dtype).view(_packed_shape(leaf))


def _packed_shape(leaf: TensorLeaf) -> list[int]:
    return [leaf.shape[dim] for dim in _order(leaf)]


def _inverse(leaf: TensorLeaf) -> list[int]:
    """Return the dims of a packed tensor in the order of the leaf's."""
    order = _order(leaf)
    return sorted(range(len(order)), key=lambda position: order[position])
