"""Gradient reducer against one process, with different data on every rank."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_pardist.axes.refusals import refuse_sparse_buffers
from lightning_pardist.engines.common.meta_init import sync_from_first_rank
from lightning_pardist.engines.ddp import (
    AllReduce,
    BufferSync,
    GradientReducer,
    HookedAllReduce,
    PowerSGD,
    compression_hook,
)
from lightning_pardist.engines.ddp.buffers import broadcast_module
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks


class Awkward(nn.Module):
    """Unused, rank-dependent, tied, frozen, scalar, zero-sized, half-precision and channels-last parameters."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.conv = nn.Conv2d(1, 3, 3).to(memory_format=torch.channels_last)
        self.left = nn.Linear(6, 6)
        self.right = nn.Linear(6, 6)
        self.never = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.wide = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens, step):
        x = self.frozen(self.embed(tokens)) * self.scale
        # The first sample and the step select one of two branches: ranks and steps use different parameters.
        way = self.left if (int(tokens[0]) + step) % 2 else self.right
        x = way(way(x)) + self.empty.sum() + self.wide.mean().float()
        image = x.view(-1, 1, 6, 1).expand(-1, 1, 6, 6)
        x = x + self.conv(image).mean((1, 2, 3))[:, None]
        return F.cross_entropy(self.head(x), (tokens + 1) % 11)


def _reducer(module, **kwargs):
    return GradientReducer(module, transport=AllReduce(dist.group.WORLD), **kwargs)


def _batch(step, rank):
    return torch.randint(0, 11, (4,), generator=torch.Generator().manual_seed(100 * step + rank))


def _optimizer(module, name):
    params = [p for p in module.parameters() if p.requires_grad]
    if name == "sgd":
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)
    return torch.optim.AdamW(params, lr=0.01, eps=1e-3)


def _train_ranks(optimizer_name, accumulate, bucket_size_mb):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    module = Awkward()
    reducer = GradientReducer(
        module,
        transport=AllReduce(dist.group.WORLD),
        bucket_size_mb=bucket_size_mb,
        first_bucket_size_mb=bucket_size_mb,
    )
    optimizer = _optimizer(module, optimizer_name)
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        for micro in range(accumulate):
            loss = module(_batch(step * accumulate + micro, rank), step) / accumulate
            if micro < accumulate - 1:
                with reducer.no_sync(), reducer.backward(loss):
                    loss.backward()
            else:
                with reducer.backward(loss):
                    loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        reducer.step_done()
    stacked = torch.stack(losses)
    dist.all_reduce(stacked)
    assert module.never.weight.grad is None
    reducer.detach()
    return snapshot(module), stacked / world


def _train_one(world, optimizer_name, accumulate):
    torch.manual_seed(3)
    module = Awkward()
    optimizer = _optimizer(module, optimizer_name)
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        for micro in range(accumulate):
            loss = sum(module(_batch(step * accumulate + micro, rank), step) for rank in range(world)) / world
            (loss / accumulate).backward()
            losses.append(loss.detach() / accumulate)
        optimizer.step()
    return snapshot(module), torch.stack(losses)


def _check(world, optimizer_name, accumulate, bucket_size_mb):
    weights, losses = _train_one(world, optimizer_name, accumulate)
    for got_weights, got_losses in run_ranks(world, _train_ranks, optimizer_name, accumulate, bucket_size_mb):
        assert_close(got_weights, weights)
        assert_close({"losses": got_losses}, {"losses": losses})


def test_awkward_module_equals_one_process():
    for optimizer_name in ("sgd", "adamw"):
        for accumulate in (1, 3):
            _check(2, optimizer_name, accumulate, 25.0)


def test_tiny_buckets_and_four_ranks():
    _check(4, "sgd", 2, 0.0001)


def _reentrant(world_size, use_backward_twice):
    torch.manual_seed(0)
    layer, shared = nn.Linear(4, 4), nn.Linear(4, 4)
    module = nn.ModuleList([layer, shared])
    reducer = _reducer(module, first_bucket_size_mb=0.00001, bucket_size_mb=0.00001)
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(dist.get_rank()), requires_grad=True)
    hidden = checkpoint(shared, layer(x), use_reentrant=True)
    loss = checkpoint(shared, hidden, use_reentrant=True).pow(2).mean()
    with reducer.backward(loss):
        loss.backward()
    grads = {name: p.grad.clone() for name, p in module.named_parameters()}
    reducer.detach()
    expected = {name: torch.zeros_like(g) for name, g in grads.items()}
    for rank in range(world_size):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(rank))
        loss = shared(shared(layer(x))).pow(2).mean() / world_size
        for name, grad in zip(expected, torch.autograd.grad(loss, list(module.parameters())), strict=True):
            expected[name] += grad
    return grads, expected


def test_reentrant_checkpoint_of_a_shared_layer():
    for grads, expected in run_ranks(2, _reentrant, 2, False):
        assert_close(grads, expected)


def _unannounced_and_missing():
    """backward() outside the context is still reduced; a rank without a backward receives the others' mean."""
    torch.manual_seed(0)
    module = nn.Linear(3, 1)
    reducer = _reducer(module)
    rank = dist.get_rank()
    module(torch.full((1, 3), float(rank + 1))).sum().backward()
    announced = module.weight.grad.clone()
    module.zero_grad()
    if rank == 0:
        loss = module(torch.full((1, 3), 4.0)).sum()
        with reducer.backward(loss):
            loss.backward()
    else:
        reducer.reduce()
    missing = module.weight.grad.clone()
    reducer.detach()
    return announced, missing


def test_unannounced_backward_and_rank_without_backward():
    for announced, missing in run_ranks(2, _unannounced_and_missing):
        assert torch.equal(announced, torch.full((1, 3), 1.5))
        assert torch.equal(missing, torch.full((1, 3), 2.0))


def _with_a_graph(overlap):
    """Accumulate two backward passes that keep their graph."""
    torch.manual_seed(0)
    module, rank = nn.Linear(3, 1, bias=False), dist.get_rank()
    reducer, want = _reducer(module), torch.zeros(1, 3)
    for step in range(2):
        xs = [torch.full((1, 3), float(step + each + 1)) for each in range(2)]
        want += sum(2 * module(x).detach() * x for x in xs) / 2
        loss = module(xs[rank]).pow(2).sum()
        with reducer.backward(loss, overlap=overlap):
            loss.backward(create_graph=True)
    reducer.detach()
    return module.weight.grad, want


def test_backward_that_keeps_its_graph():
    for overlap in (True, False):
        for gradient, want in run_ranks(2, _with_a_graph, overlap):
            assert not gradient.requires_grad
            assert torch.allclose(gradient, want)


def _odd_buffers():
    rank, group = float(dist.get_rank()), dist.group.WORLD
    found = []
    for send in (broadcast_module, lambda module, group: sync_from_first_rank(list(module.buffers()), [group])):
        module = nn.Module()
        module.register_buffer("mask", torch.full((2, 1), 1 + rank).expand(2, 5))
        module.register_buffer("scale", torch.tensor(2 + rank).expand(3))
        send(module, group=group)
        found.append((module.mask.tolist(), module.scale.tolist()))
    return found


def test_expanded_buffers_are_sent():
    for found in run_ranks(2, _odd_buffers):
        assert found == [([[1.0] * 5] * 2, [2.0] * 3)] * 2


def test_sparse_buffers_are_refused_by_name():
    module = nn.Module()
    module.register_buffer("adjacency", torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match=r"The buffer 'adjacency' is sparse .* DDPStrategy"):
        refuse_sparse_buffers(module, "DDPStrategy")


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("out of memory")


def _failed_unannounced():
    """A failed backward outside of the context, whose error user code caught, before one that succeeds."""
    module, rank = nn.Linear(3, 1), dist.get_rank()
    reducer = _reducer(module)
    x = torch.ones(1, 3, requires_grad=True)
    try:
        module(_Fails.apply(x)).sum().backward()
    except RuntimeError as caught:
        kept = caught
    assert str(kept) == "out of memory"
    module.zero_grad()
    module(torch.full((1, 3), float(rank + 1))).sum().backward()
    reducer.detach()
    return module.weight.grad


def test_gradients_are_averaged_after_a_backward_that_failed():
    for gradient in run_ranks(2, _failed_unannounced):
        assert torch.equal(gradient, torch.full((1, 3), 1.5))


def _unfreeze_and_lanes():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    module[0].requires_grad_(False)
    bucket_groups = dict.fromkeys(module[0].parameters(), 0) | dict.fromkeys(module[1].parameters(), 1)
    reducer = _reducer(module, bucket_groups=bucket_groups)
    first = len(reducer.buckets)
    module[0].requires_grad_(True)
    loss = module(torch.full((1, 3), float(dist.get_rank() + 1))).sum()
    with reducer.backward(loss):
        loss.backward()
    dist_equal = [p.grad.clone() for p in module.parameters()]
    reducer.detach()
    return first, len(reducer.buckets), dist_equal


def test_unfrozen_parameters_are_reduced():
    (first, _, left), (_, _, right) = run_ranks(2, _unfreeze_and_lanes)
    assert first == 1
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
    assert all(grad.abs().sum() > 0 for grad in left)


def _compressed(compression):
    rank = dist.get_rank()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    hooked = HookedAllReduce(dist.group.WORLD, *compression_hook(compression, group=dist.group.WORLD))
    reducer = GradientReducer(module, transport=hooked)
    plain = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    plain.load_state_dict(module.state_dict())
    errors = []
    for step in range(6):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))
        module.zero_grad()
        plain.zero_grad()
        loss = module(x).pow(2).mean()
        with reducer.backward(loss):
            loss.backward()
        plain(x).pow(2).mean().backward()
        for p in plain.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        exact = torch.cat([p.grad.flatten() for p in plain.parameters()])
        got = torch.cat([p.grad.flatten() for p in module.parameters()])
        errors.append(((got - exact).norm() / exact.norm()).item())
    reducer.detach()
    return errors, got


def test_compression_runs_on_cpu_and_agrees_over_ranks():
    for compression, bound in (("bf16", 0.01), ("fp16", 0.001), (PowerSGD(rank=2, start_step=3), 1.0)):
        (errors, left), (_, right) = run_ranks(2, _compressed, compression)
        assert torch.equal(left, right), compression
        assert 0 < max(errors) < bound, (compression, errors)


def _buffers():
    class Codebook(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("moving", torch.zeros(2))
            self.register_buffer("behind_data", torch.zeros(2))
            self.register_buffer("constant", torch.ones(2))
            self.norm = nn.BatchNorm1d(2)

    module, rank = Codebook(), dist.get_rank()
    sync = BufferSync(module, group=dist.group.WORLD)
    for _ in range(2):
        sync.before_training_step()
        module.moving += rank + 1
        module.behind_data.data.add_(rank + 1)
        module.norm.running_mean += rank + 1
        sync.after_training_step()
    before = module.norm.running_mean[0].item()
    sync.before_training_step()
    live, moving = list(sync._live), module.moving + module.behind_data
    sync.synchronize()
    return live, moving, before, module.norm.running_mean[0].item(), sync.differing


def test_buffers_only_what_changes_and_is_read_travels_each_step():
    left, right = run_ranks(2, _buffers)
    assert left[0] == right[0] == ["moving", "behind_data"]
    assert torch.equal(left[1], right[1])
    assert right[2] == 4.0
    assert left[3] == right[3] == 2.0
    assert left[4] == right[4] == ["moving", "behind_data"]


def _sparse():
    module = nn.Embedding(10, 3, sparse=True)
    nn.init.ones_(module.weight)
    reducer = _reducer(module)
    rows = [1, 2] if dist.get_rank() == 0 else [2, 5, 5]
    loss = module(torch.tensor(rows)).sum()
    with reducer.backward(loss):
        loss.backward()
    assert module.weight.grad.is_sparse
    return module.weight.grad.to_dense()[:, 0]


def test_sparse_gradients():
    want = torch.zeros(10)
    want[[1, 2, 5]] = torch.tensor([0.5, 1.0, 1.0])
    for got in run_ranks(2, _sparse):
        assert torch.equal(got, want)
