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

#: torch's collectives of flat tensors; since 2.13 the names before are deprecated.
all_gather_flat: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "product": dist.ReduceOp.PRODUCT}


def world_group() -> dist.ProcessGroup:
    """The process group of all ranks, for functions that want a group by name.

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
        tensor: Same shape on every rank; it is left as it is.
        group: Who takes part.
        op: ``"mean"``/``"avg"``, ``"sum"``, ``"max"``, ``"min"``, ``"product"`` in any case, or a ``ReduceOp``;
            None means sum, as in Lightning.

    Returns:
        A new tensor of the same shape and dtype (a mean of integers is rounded towards zero).

    Raises:
        ValueError: If ``op`` is a name that is not known.
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
        group: Who takes part.
        sync_grads: Whether gradients flow back to the ranks that the parts came from.

    Returns:
        Shape ``[group size, ...]``.
    """
    with nullcontext() if sync_grads else torch.no_grad():
        gathered: Tensor = _AllGather.apply(tensor, group)
        return gathered


class _AllGather(torch.autograd.Function):
    """torch's own takes ranks of the world for ranks of the group in backward, on gloo."""

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
    """Row ``i`` goes to rank ``i`` of the group, and row ``i`` of the result comes from there."""

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
    """The memory of a contiguous tensor, flat: what collectives without arithmetic send, whatever the dtype.

    gloo knows no float8 and no integers of 16 bits, and gathers no complex numbers.
    """
    return tensor.detach().view(-1).view(torch.uint8)


class _Arrival:
    """A receive into host memory, and from there to the device that has asked for it."""

    def __init__(self, work: Any, message: Tensor, target: Tensor) -> None:
        self._work, self._message, self._target = work, message, target

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the message, and copy it; as torch's own."""
        self._work.wait() if timeout is None else self._work.wait(timeout)
        # As a message lands in memory: autograd counts no write.
        self._target.data.copy_(self._message)
        return True


def wire_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Where single messages of tensors on ``device`` are sent from.

    gloo has collectives of a GPU's tensors, which it copies itself, but takes single messages from host memory alone:
    it would read the device's address.
    """
    return torch.device("cpu") if backend_on(group, device) == dist.Backend.GLOO else device


def collective_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Where a collective of tensors on ``device`` takes place: NCCL alone takes none from host memory."""
    if device.type == "cpu" and torch.device("cpu") not in device_types(group):
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None:
            return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return device


def table_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Where ranks exchange a few numbers that the host knows and wants to know of others.

    The host, where the group can: on a device it would wait for all that the device has to do.
    """
    return torch.device("cpu") if torch.device("cpu") in device_types(group) else device


def isend(tensor: Tensor, peer: int, *, group: dist.ProcessGroup, tag: int = 0) -> tuple[Any, Tensor]:
    """Begin to send a tensor on any device, as :func:`torch.distributed.isend`.

    Args:
        tensor: Contiguous.
        peer: Rank in ``group``.
        group: Whose connections are used.
        tag: Tells messages apart, where the backend has tags.

    Returns:
        What to wait for, and what is to be kept until then.
    """
    message = tensor.to(wire_device(group, tensor.device))
    return dist.isend(message, group=group, group_dst=peer, tag=tag), message


def irecv(tensor: Tensor, peer: int, *, group: dist.ProcessGroup, tag: int = 0) -> Any:
    """Begin to receive into a tensor on any device, as :func:`torch.distributed.irecv`; arguments as of :func:`isend`.

    Returns:
        What to wait for before ``tensor`` is read.
    """
    wire = wire_device(group, tensor.device)
    message = tensor if wire == tensor.device else torch.empty_like(tensor, device=wire)
    work = dist.irecv(message, group=group, group_src=peer, tag=tag)
    return work if message is tensor else _Arrival(work, message, tensor)


def gather_among(tensor: Tensor, *, group: dist.ProcessGroup, ranks: Sequence[int]) -> Tensor:
    """Stack the tensors of some ranks of ``group``. Only ``ranks`` call it: needs no group of their own.

    Args:
        tensor: Same shape ``[...]`` on each of ``ranks``.
        group: Whose connections are used.
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
            works.append(isend(message, rank, group=group)[0])
            works.append(irecv(part, rank, group=group))
    for work in works:
        work.wait()
    return torch.stack(parts)


def reduce_among(
    tensor: Tensor, *, group: dist.ProcessGroup, ranks: Sequence[int], op: dist.ReduceOp | str | None = "mean"
) -> Tensor:
    """:func:`reduce` over some ranks of ``group``. Only ``ranks`` call it.

    Args:
        tensor: Same shape on each of ``ranks``.
        group: Whose connections are used.
        ranks: Ranks in ``group`` that take part, this one among them.
        op: As :func:`reduce` takes it.

    Raises:
        ValueError: If ``op`` is not known.
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
        device: This rank's, on which NCCL meets the others.
        group: Who takes part.
    """
    if group is not None and group is not world_group():
        dist.barrier(group)
    elif device.index is not None and backend_on(world_group(), device) == dist.Backend.NCCL:
        dist.barrier(device_ids=[device.index])
    else:
        dist.barrier()


def broadcast_object(obj: T, src: int, *, group: dist.ProcessGroup | None = None) -> T:
    """The picklable object of rank ``src`` of ``group``, by default of the world. Collective over it."""
    objects = [obj]
    dist.broadcast_object_list(objects, group_src=src, group=group)
    return objects[0]
