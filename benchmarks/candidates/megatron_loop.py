"""GPT split by hand over tensor-parallel ranks as in Megatron-LM, on plain collectives: peer of ``pardist_tp``."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.candidates.protocol import Candidate, PassesBeforeSteps, held_by
from benchmarks.settings import Settings
from benchmarks.workloads import GPTLoss, make_loader, make_net, make_optimizer
from lightning_pardist.engines.tensor import apply_layout, attach, plan_layout
from lightning_pardist.mesh import ParallelDims


class _Copy(torch.autograd.Function):
    """Megatron's *f*: identity forward, all-reduce backward (arXiv 1909.08053, figure 3)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        grad = grads[0].contiguous()
        dist.all_reduce(grad)
        return grad


class _Reduce(torch.autograd.Function):
    """Megatron's *g*: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Mean cross entropy of vocabulary-parallel logits ``[tokens, vocab_size / ranks]``, which are never gathered."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, start: int) -> Tensor:
        largest = logits.max(dim=1).values
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        shifted = logits - largest[:, None]
        mine = (targets >= start) & (targets < start + logits.size(1))
        index = torch.where(mine, targets - start, 0)
        exponentials = shifted.exp()
        sums = torch.stack([exponentials.sum(1), shifted.gather(1, index[:, None])[:, 0] * mine])
        dist.all_reduce(sums)
        ctx.save_for_backward(exponentials.div_(sums[0][:, None]), index, mine)
        return (sums[0].log() - sums[1]).mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        softmax, index, mine = ctx.saved_tensors
        grad = softmax.clone()
        grad[torch.arange(len(index)), index] -= mine.to(grad.dtype)
        return grad.mul_(grads[0] / len(index)), None, None


def _rows(weight: Tensor, rank: int, size: int, segments: int = 1) -> nn.Parameter:
    parts = weight.detach().unflatten(0, (segments, size, -1))[:, rank]
    return nn.Parameter(parts.flatten(0, 1).clone())


def _columns(weight: Tensor, rank: int, size: int) -> nn.Parameter:
    return nn.Parameter(weight.detach().chunk(size, 1)[rank].clone())


class _Block(nn.Module):
    def __init__(self, block: Any, rank: int, size: int) -> None:
        super().__init__()
        attention, mlp = block.attention, block.mlp
        self.heads = attention.heads // size
        self.norm1, self.norm2 = block.norm1, block.norm2
        self.qkv = _rows(attention.qkv.weight, rank, size, 3)
        self.qkv_bias = _rows(attention.qkv.bias, rank, size, 3)
        self.out, self.out_bias = _columns(attention.out.weight, rank, size), attention.out.bias
        self.up, self.up_bias = _rows(mlp[0].weight, rank, size), _rows(mlp[0].bias, rank, size)
        self.down, self.down_bias = _columns(mlp[2].weight, rank, size), mlp[2].bias

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = F.linear(_Copy.apply(self.norm1(x)), self.qkv, self.qkv_bias)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in qkv.chunk(3, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, -1)
        x = x + (_Reduce.apply(F.linear(y, self.out)) + self.out_bias)
        hidden = F.gelu(F.linear(_Copy.apply(self.norm2(x)), self.up, self.up_bias))
        return x + (_Reduce.apply(F.linear(hidden, self.down)) + self.down_bias)


class MegatronGPT(nn.Module):
    """Shard of a :class:`~benchmarks.workloads.GPTLoss` on one tensor-parallel rank."""

    def __init__(self, net: GPTLoss, rank: int, size: int) -> None:
        super().__init__()
        self.embed = _rows(net.embed.weight, rank, size)
        self.start = rank * len(self.embed)
        self.positions, self.norm = net.positions, net.norm
        self.blocks = nn.ModuleList(_Block(block, rank, size) for block in net.blocks)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        mine = (tokens >= self.start) & (tokens < self.start + len(self.embed))
        rows = F.embedding(torch.where(mine, tokens - self.start, 0), self.embed) * mine[..., None]
        x = _Reduce.apply(rows) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(_Copy.apply(self.norm(x)), self.embed).flatten(0, 1)
        return _VocabParallelCrossEntropy.apply(logits, targets.flatten(), self.start)


@dataclass(frozen=True)
class MegatronLoop:
    """Hand-written loop over the GPT split for tensor parallelism."""

    name: str = "megatron"
    title: str = "GPT split by hand as in Megatron-LM, loop by hand"
    single: bool = False

    def run(self, settings: Settings, gate: PassesBeforeSteps) -> None:
        """See :class:`Candidate`."""
        if settings.model != "gpt":
            raise ValueError(f"model={settings.model!r} is not written for Megatron's split here. Use gpt.")
        dist.init_process_group("gloo", timeout=timedelta(minutes=10))
        net = MegatronGPT(make_net(settings), dist.get_rank(), dist.get_world_size())  # type: ignore[arg-type]
        optimizer = make_optimizer(net, settings)
        # All ranks of a tensor-parallel group train on the same samples.
        for batch in make_loader(settings, rank=0, world_size=1):
            gate.before_step(lambda: held_by(net, [optimizer], replicas=1))
            optimizer.zero_grad()
            net(*batch).backward()
            optimizer.step()


@dataclass(frozen=True)
class TensorEngineLoop:
    """Hand-written loop around the engine of ``pardist_tp``: the cost of the strategy without Lightning."""

    name: str = "pardist_tensor"
    title: str = "tensor engine, loop by hand"
    single: bool = False

    def run(self, settings: Settings, gate: PassesBeforeSteps) -> None:
        """See :class:`Candidate`."""
        dist.init_process_group("gloo", timeout=timedelta(minutes=10))
        size = dist.get_world_size()
        net = make_net(settings)
        loader = make_loader(settings, rank=0, world_size=1)
        sample = next(iter(loader))
        mesh, _ = ParallelDims(tensor_parallel=size).build("cpu")
        runtime = apply_layout(net, plan_layout(net, lambda: net(*sample), tp_size=size), mesh["tensor_parallel"])
        optimizer = make_optimizer(net, settings)
        attach(optimizer)
        for batch in loader:
            gate.before_step(lambda: held_by(net, [optimizer], replicas=1))
            optimizer.zero_grad()
            with runtime.step():
                net(*batch).backward()
            optimizer.step()


_ALL: dict[str, Candidate] = {candidate.name: candidate for candidate in (MegatronLoop(), TensorEngineLoop())}


def names() -> list[str]:
    """Return the names of this family."""
    return list(_ALL)


def find(name: str) -> Candidate | None:
    """Return the candidate of this name, or None if it belongs to another family."""
    return _ALL.get(name)
