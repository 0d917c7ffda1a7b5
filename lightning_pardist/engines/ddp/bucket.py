"""Flat gradient buckets, each reduced by one collective."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from lightning_pardist.engines.common.devices import numbers_on
from lightning_pardist.local_tensors import local_shard, wrap_like

_MB = 2**20


class Bucket:
    """Gradients of parameters of one dtype and device, as views of one flat buffer.

    The buffer ends with one flag element per parameter that indicates whether this rank has a gradient for it. The
    flags are reduced together with the gradients; a reduced flag of zero means that no rank has a gradient. Such a
    parameter keeps ``grad=None``, as on a single process, so that weight decay and momentum do not change it.

    For parameters that are sharded over tensor ranks, the bucket holds the gradients of this rank's shards.

    Attributes:
        params: The parameters, in the order in which backward is expected to reach them.
        buffer: Flat, shape ``[numel + len(params)]``, dtype of the parameters.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.params = list(params)
        parts = [local_shard(param) for param in self.params]
        self.numel = sum(part.numel() for part in parts)
        first = parts[0]
        self.buffer = torch.zeros(self.numel + len(self.params), dtype=first.dtype, device=first.device)
        self.flags = self.buffer[self.numel :]
        self._views: list[Tensor] = []
        offset = 0
        for part in parts:
            # Strided like a dense parameter (channels-last weights), as autograd would create the gradient.
            piece = self.buffer[offset : offset + part.numel()]
            self._views.append(view_like(piece, part))
            offset += part.numel()
        self.ready = [False] * len(self.params)
        self.pending = len(self.params)

    @property
    def views(self) -> list[Tensor]:
        """The gradients' views of the buffer, each in its parameter's local shape."""
        return self._views

    @property
    def gradients(self) -> Tensor:
        """The buffer without its flags, shape ``[numel]``."""
        return self.buffer[: self.numel]

    @property
    def requires_grad(self) -> bool:
        """Whether any of the parameters requires a gradient at this moment."""
        return any(param.requires_grad for param in self.params)

    def is_in_place(self, index: int) -> bool:
        """Return whether parameter ``index``'s gradient is in the bucket, not a tensor that was assigned to it."""
        grad = self.params[index].grad
        return grad is not None and local_shard(grad) is self.views[index]

    def adopt(self, index: int, scale: float) -> None:
        """Copy parameter ``index``'s gradient, times ``scale``, into the buffer, and set ``grad`` to its view.

        The view has no graph, also if the gradient has one (``create_graph=True``).
        """
        param, view = self.params[index], self.views[index]
        if param.grad is None:
            raise RuntimeError("adopt() needs a gradient")
        grad = local_shard(param.grad)
        if grad is view:
            if scale != 1.0:
                view.mul_(scale)
            return
        if grad.requires_grad:
            grad = grad.detach()
        if grad.is_sparse:
            grad = grad.to_dense()
        if scale == 1.0:
            view.copy_(grad)
        else:
            torch.mul(grad, scale, out=view)
        param.grad = wrap_like(view, param)

    def mark_ready(self, index: int) -> None:
        """Record that parameter ``index``'s gradient for this step is in the buffer."""
        if not self.ready[index]:
            self.ready[index] = True
            self.pending -= 1

    def fill(self, scale: float) -> None:
        """Complete the buffer: copy the remaining gradients, zero the missing ones, and set the flags."""
        if self.pending:
            for index, done in enumerate(self.ready):
                if done:
                    continue
                if self.params[index].grad is None:
                    self.views[index].zero_()
                else:
                    self.adopt(index, scale)
                    self.mark_ready(index)
        if self.pending:
            self.flags.copy_(numbers_on(self.flags.device, [float(done) for done in self.ready]))
        else:
            self.flags.fill_(1.0)

    def release(self) -> None:
        """Set ``grad`` of parameters without a local gradient from the reduced buffer, and reset for the next step."""
        if self.pending:
            # The flags are read, which synchronizes, only on a rank with missing gradients.
            for index, (done, flag) in enumerate(zip(self.ready, self.flags.tolist(), strict=True)):
                if not done:
                    param = self.params[index]
                    param.grad = wrap_like(self.views[index], param) if flag else None
        self.reset()

    def held_bytes(self) -> int:
        """Return the bytes of the bucket's buffer."""
        return self.buffer.numel() * self.buffer.element_size()

    def reset(self) -> None:
        """Mark all gradients as not in the buffer."""
        self.ready = [False] * len(self.params)
        self.pending = len(self.params)


def partition(
    params: Iterable[nn.Parameter], *, bucket_size_mb: float, first_bucket_size_mb: float
) -> list[list[nn.Parameter]]:
    """Group parameters, in the given order, into runs of one dtype and device of about ``bucket_size_mb`` each.

    Args:
        params: Parameters in the order in which backward is expected to reach them.
        bucket_size_mb: Size in MiB at which a run is closed.
        first_bucket_size_mb: The same for the first run of every dtype and device; smaller, so that the first
            collective starts early in backward.
    """
    runs: list[list[nn.Parameter]] = []
    open_runs: dict[tuple[torch.dtype, torch.device], tuple[list[nn.Parameter], int, float]] = {}
    for param in params:
        part = local_shard(param)
        key = (part.dtype, part.device)
        run, size, limit = open_runs.get(key) or ([], 0, first_bucket_size_mb * _MB)
        if not run:
            runs.append(run)
        run.append(param)
        size += part.numel() * part.element_size()
        if size >= limit:
            run, size, limit = [], 0, bucket_size_mb * _MB
        open_runs[key] = (run, size, limit)
    return runs


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def view_like(piece: Tensor, param: Tensor) -> Tensor:
    """Return a view of the flat ``piece`` in ``param``'s shape, in channels-last format if ``param`` is."""
    memory_format = _CHANNELS_LAST.get(param.dim())
    if memory_format is not None and param.is_contiguous(memory_format=memory_format):
        return piece.as_strided(param.size(), param.stride())
    return piece.view(param.size())


def flat_like(values: Tensor, param: Tensor) -> Tensor:
    """Flatten ``values``, of ``param``'s shape, in the element order of :func:`view_like`."""
    memory_format = _CHANNELS_LAST.get(param.dim())
    if memory_format is None or not param.is_contiguous(memory_format=memory_format):
        memory_format = torch.contiguous_format
    return values.contiguous(memory_format=memory_format).as_strided((values.numel(),), (1,))
