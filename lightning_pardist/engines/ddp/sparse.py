"""Average sparse gradients (``nn.Embedding(sparse=True)``), which do not fit into a flat bucket."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pardist.collectives import table_device


def sparse_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the weights of layers built with ``sparse=True``, each once, in the order of registration."""
    layers = [m for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse]
    return list({param: None for layer in layers for param in layer.parameters(recurse=False)})


def reduce_sparse(params: Sequence[nn.Parameter], *, group: dist.ProcessGroup) -> None:
    """Average the sparse gradients of ``params``. Collective over ``group``.

    All-gathers each rank's rows; a parameter without a gradient on any rank keeps ``grad=None``.
    """
    for param in params:
        if not param.requires_grad:
            continue
        reduced = _all_gather_rows(param, group)
        param.grad = reduced


def _all_gather_rows(param: nn.Parameter, group: dist.ProcessGroup) -> Tensor | None:
    grad = param.grad
    if grad is not None and not grad.is_sparse:
        grad = grad.to_sparse(1)
    if grad is None:
        rows = torch.empty(0, dtype=torch.int64, device=param.device)
        values = param.new_empty((0, *param.shape[1:]))
    else:
        grad = grad.coalesce()
        rows, values = grad.indices()[0], grad.values()
    world_size = group.size()
    # -1 means no gradient on this rank, 0 a gradient without rows.
    count = torch.tensor([-1 if grad is None else rows.numel()], device=table_device(group, param.device))
    counts = [torch.empty_like(count) for _ in range(world_size)]
    dist.all_gather(counts, count, group=group)
    sizes = [int(size) for size in counts]
    if max(sizes) < 0:
        return None
    longest = max(sizes)
    padded_rows = rows.new_zeros(longest)
    padded_rows[: rows.numel()] = rows
    padded_values = values.new_zeros((longest, *values.shape[1:]))
    padded_values[: rows.numel()] = values / world_size
    all_rows = [torch.empty_like(padded_rows) for _ in range(world_size)]
    all_values = [torch.empty_like(padded_values) for _ in range(world_size)]
    if longest:
        dist.all_gather(all_rows, padded_rows, group=group)
        dist.all_gather(all_values, padded_values, group=group)
    lengths = [max(size, 0) for size in sizes]
    return torch.sparse_coo_tensor(
        torch.cat([r[:n] for r, n in zip(all_rows, lengths, strict=True)]).unsqueeze(0),
        torch.cat([v[:n] for v, n in zip(all_values, lengths, strict=True)]),
        param.shape,
    ).coalesce()
