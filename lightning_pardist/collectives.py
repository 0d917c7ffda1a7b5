"""Collectives with Lightning's semantics, each over an explicit group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pardist.compat.fake_group import backend_on
from lightning_pardist.compat.process_groups import device_types

T = TypeVar("T")

#: torch's collectives of flat tensors; torch 2.13 deprecates the old names.
all_gather_flat: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "product": dist.ReduceOp.PRODUCT}


def world_group() -> dist.ProcessGroup:
    """Return the process group of all ranks, for functions that take an explicit group.

    Raises:
        ValueError: Before :func:`init_process_group`.
    """
    world = dist.group.WORLD
    if world is None:
        raise ValueError("There is no process group yet: torch.distributed was not initialized.")
    return world


def reduce(tensor: Tensor, *, group: dist.ProcessGroup, op: dist.ReduceOp | str | None = "mean") -> Tensor:
    """Combine a tensor over ``group``; every rank receives the result. Collective over ``group``.

    Args:
        tensor: Same shape on every rank; not modified.
        group: Participating ranks.
        op: ``"mean"``/``"avg"``, ``"sum"``, ``"max"``, ``"min"``, ``"product"`` in any case, or a ``ReduceOp``;
            None means sum, as in Lightning.

    Returns:
        A new tensor of the same shape and dtype (a mean of integers is rounded towards zero).

    Raises:
        ValueError: If ``op`` is an unknown name.
    """
    result = tensor.clone()
    if isinstance(op, str):
        name = op.lower()
        if name in ("mean", "avg"):
            dist.all_reduce(result, op=dist.ReduceOp.SUM, group=group)
            mean = result / group.size()
            return mean if mean.dtype == tensor.dtype else mean.to(tensor.dtype)
        if name not in _OPS:
            raise ValueError(f"reduce_op={op!r} is unknown. Use mean, {', '.join(_OPS)} or a torch ReduceOp.")
        dist.all_reduce(result, op=_OPS[name], group=group)
    else:
        dist.all_reduce(result, op=dist.ReduceOp.SUM if op is None else op, group=group)
    return result


def all_gather(tensor: Tensor, *, group: dist.ProcessGroup, sync_grads: bool = False) -> Tensor:
    """Stack every rank's tensor. Collective over ``group``.

    Args:
        tensor: Same shape ``[...]`` on every rank.
        group: Participating ranks.
        sync_grads: Whether gradients flow back to the source ranks.

    Returns:
        Shape ``[group size, ...]``.
    """
    with nullcontext() if sync_grads else torch.no_grad():
        gathered: Tensor = _AllGather.apply(tensor, group)
        return gathered


class _AllGather(torch.autograd.Function):
    """Differentiable all-gather. On gloo, torch's own one uses global ranks in place of group ranks in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(parts, tensor, group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Exchange.apply(grad, ctx.group).sum(0), None


class _Exchange(torch.autograd.Function):
    """Differentiable all-to-all: sends row ``i`` to rank ``i`` of the group, and receives row ``i`` from it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(rows, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, rows.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Exchange.apply(grad, ctx.group), None


def as_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as flat bytes, for collectives without arithmetic on any dtype.

    gloo does not support float8 and 16-bit integers, and does not gather complex numbers.
    """
    return tensor.detach().view(-1).view(torch.uint8)


#: Messages that an error kept from being waited for, with their buffers.
_abandoned: list[tuple[Any, Tensor]] = []


class Message:
    """A pending send or receive. What is received for a tensor on another device is copied to it on wait.

    gloo stops reading from a peer that answers to a send or receive whose handle is gone: all later collectives with
    this peer would wait forever. A message that is dropped before it was waited for, because a step failed on this
    rank, is therefore kept with its buffer until the process groups are destroyed.
    """

    def __init__(self, work: Any, buffer: Tensor, target: Tensor | None = None) -> None:
        self._work, self._buffer, self._target = work, buffer, target

    def is_completed(self) -> bool:
        """Return whether the message is known to have been transferred."""
        return self._work is None or bool(self._work.is_completed())

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the transfer; same signature as torch's ``Work.wait``. Later calls do nothing."""
        work, self._work = self._work, None
        if work is None:
            return True
        work.wait() if timeout is None else work.wait(timeout)
        if self._target is not None:
            # Through `.data`, like a direct receive: autograd does not count the write.
            self._target.data.copy_(self._buffer)
        return True

    def __del__(self) -> None:
        if not self.is_completed():
            _abandoned.append((self._work, self._buffer))


def forget_abandoned() -> None:
    """Drop messages that were never waited for. To be called once their process groups are destroyed."""
    _abandoned.clear()


def wire_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Return the device from which point-to-point messages of tensors on ``device`` are sent.

    gloo supports collectives of GPU tensors, which it copies itself, but sends point-to-point messages from host memory
    only: it would dereference the device's address.
    """
    if device.type == "cpu":
        return device
    return torch.device("cpu") if backend_on(group, device) == dist.Backend.GLOO else device


def collective_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Return the device for a collective of tensors on ``device``: an NCCL-only group supports no host tensors."""
    if device.type == "cpu" and torch.device("cpu") not in device_types(group):
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None:
            return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return device


def table_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Return the device for exchanges of a few numbers that are computed and used on the host.

    The host if the group supports it: on a device the exchange would wait for all queued kernels.
    """
    return torch.device("cpu") if torch.device("cpu") in device_types(group) else device


def isend(tensor: Tensor, peer: int, *, group: dist.ProcessGroup, tag: int = 0) -> Message:
    """Begin to send a tensor on any device, as :func:`torch.distributed.isend`.

    Args:
        tensor: Contiguous.
        peer: Rank in ``group``.
        group: Process group whose connections are used.
        tag: Distinguishes messages, if the backend has tags.

    Returns:
        The message to wait for before ``tensor`` is written.
    """
    # A lazy conjugate or negative has the memory of the other value.
    buffer = tensor.to(wire_device(group, tensor.device)).resolve_conj().resolve_neg()
    # Through the group: torch's function looks its arguments up for several times as long as it sends.
    return Message(group.send([real_view(buffer)], peer, tag), buffer)


def irecv(tensor: Tensor, peer: int, *, group: dist.ProcessGroup, tag: int = 0) -> Message:
    """Begin to receive into a tensor on any device, as :func:`torch.distributed.irecv`; arguments as of :func:`isend`.

    Returns:
        The message to wait for before ``tensor`` is read.
    """
    wire = wire_device(group, tensor.device)
    buffer = tensor if wire == tensor.device else torch.empty_like(tensor, device=wire)
    work = group.recv([real_view(buffer)], peer, tag)
    return Message(work, buffer, target=None if buffer is tensor else tensor)


def real_view(tensor: Tensor) -> Tensor:
    """Return a complex tensor as a real one with a further dim of size 2, sharing memory; others unchanged."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def gather_among(tensor: Tensor, *, group: dist.ProcessGroup, ranks: Sequence[int]) -> Tensor:
    """Stack the tensors of some ranks of ``group``, without a subgroup. Called by ``ranks`` only.

    Args:
        tensor: Same shape ``[...]`` on each of ``ranks``.
        group: Process group whose connections are used.
        ranks: Ranks in ``group`` that take part, this one among them.

    Returns:
        Shape ``[len(ranks), ...]``.
    """
    tensor = tensor.detach().contiguous()
    parts = [tensor if rank == group.rank() else torch.empty_like(tensor) for rank in ranks]
    message = tensor.to(wire_device(group, tensor.device))
    works = []
    for rank, part in zip(ranks, parts, strict=True):
        if rank != group.rank():
            works.append(isend(message, rank, group=group))
            works.append(irecv(part, rank, group=group))
    for work in works:
        work.wait()
    return torch.stack(parts)


def reduce_among(
    tensor: Tensor, *, group: dist.ProcessGroup, ranks: Sequence[int], op: dist.ReduceOp | str | None = "mean"
) -> Tensor:
    """Reduce a tensor over some ranks of ``group``, as :func:`reduce` does. Called by ``ranks`` only.

    Args:
        tensor: Same shape on each of ``ranks``.
        group: Process group whose connections are used.
        ranks: Ranks in ``group`` that take part, this one among them.
        op: As for :func:`reduce`.

    Raises:
        ValueError: If ``op`` is unknown.
    """
    parts = gather_among(tensor, group=group, ranks=ranks)
    names = {known: key for key, known in _OPS.items()} | {None: "sum", dist.ReduceOp.AVG: "mean"}
    name = op.lower() if isinstance(op, str) else names.get(op, repr(op))  # type: ignore[arg-type]
    if name == "sum":
        result = parts.sum(0)
    elif name in ("mean", "avg"):
        result = parts.sum(0) / len(ranks)
    elif name == "product":
        result = parts.prod(0)
    elif name in ("max", "min"):
        result = parts.amax(0) if name == "max" else parts.amin(0)
    else:
        raise ValueError(f"reduce_op={op!r} is unknown. Use mean, {', '.join(_OPS)} or a torch ReduceOp.")
    return result.to(tensor.dtype)


def barrier(device: torch.device, *, group: dist.ProcessGroup | None = None) -> None:
    """Wait for every rank of ``group``, by default of the world.

    Args:
        device: This rank's device, used by NCCL.
        group: Participating ranks.
    """
    if group is not None and group is not world_group():
        dist.barrier(group)
    elif device.index is not None and backend_on(world_group(), device) == dist.Backend.NCCL:
        dist.barrier(device_ids=[device.index])
    else:
        dist.barrier()


def broadcast_object(obj: T, src: int, *, group: dist.ProcessGroup | None = None) -> T:
    """Broadcast a picklable object from rank ``src`` of ``group``, by default the world. Collective over it."""
    objects = [obj]
    dist.broadcast_object_list(objects, group_src=src, group=group)
    return objects[0]
