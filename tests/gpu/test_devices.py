"""Streams, pinned memory, messages and random numbers on a device, engine by engine: what the CPU cannot test."""

import contextlib
import functools
import warnings
from collections import Counter

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_pardist import DDPStrategy, FSDPStrategy, ZeroStrategy
from lightning_pardist.collectives import all_gather, gather_among, irecv, isend
from lightning_pardist.engines.common import devices
from lightning_pardist.engines.common.slice_exchange import gather_slices
from lightning_pardist.engines.offload import HostCopies, Offload
from lightning_pardist.engines.zero import ZeroEngine
from lightning_pardist.local_tensors import gather_over_data, local_shard
from lightning_pardist.runtime.process_group import default_backend, destroy_single_rank_group, init_process_group
from tests.helpers.gpu import SharedGPU
from tests.helpers.models import Base
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import quiet_trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

#: Device cycles: about 50 ms, longer than any copy here.
_LONG = 100_000_000


# --- copies to the host and back --------------------------------------------------------------------------------


def test_a_copy_to_the_host_waits_for_what_is_computed_and_outlives_its_source():
    device = torch.device("cuda", 0)
    copies, size = HostCopies(device), 1 << 22
    target = copies.buffer(size, torch.float32)
    target.fill_(-1)
    assert target.is_pinned()
    source = torch.zeros(size, device=device)
    torch.cuda._sleep(_LONG)
    source.fill_(3)
    event = copies.start(source, target)
    assert target[-1] == -1, "the copy was made before the device had the values"
    del source
    # Would reuse the memory of the source, had the copy stream not been recorded on it.
    others = [torch.full((size,), 7.0, device=device) for _ in range(4)]
    event.synchronize()
    assert bool((target == 3).all())
    assert all(bool((other == 7).all()) for other in others)


def test_a_copy_to_the_device_comes_after_its_readers():
    device = torch.device("cuda", 0)
    copies, size = HostCopies(device), 1 << 22
    master = copies.buffer(size, torch.float32).fill_(5)
    own = torch.full((size,), 2.0, device=device)
    torch.cuda._sleep(_LONG)
    read = own * 1
    event = copies.start(master, own)
    event.wait()
    after = own * 1
    assert bool((read == 2).all())
    assert bool((after == 5).all())


def test_pinned_memory_is_not_taken_again_while_it_is_copied():
    device = torch.device("cuda", 0)
    copies, size = HostCopies(device), 1 << 20
    own = torch.empty(size, device=device)
    torch.cuda._sleep(_LONG)
    for number in range(8):
        master = copies.buffer(size, torch.float32).fill_(number)
        event = copies.start(master, own)
        del master
    event.wait()
    assert bool((own == 7).all())


# --- an engine whose optimizer steps on the host ------------------------------------------------------------------


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 128), nn.GELU(), nn.Linear(128, 97), nn.GELU(), nn.Linear(97, 1)).cuda()


@pytest.fixture
def alone():
    """Set up one rank on NCCL."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    init_process_group(None, rank=0, world_size=1, meeting=None, device=device, timeout=None)
    assert dist.get_backend() == default_backend(device) == "cpu:gloo,cuda:nccl"
    yield
    destroy_single_rank_group()


def _train(offload, stage=2, change=None, make=None, scaler=None, steps=5, slow=False):
    net = _net()
    optimizer = (make or (lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4)))(net.parameters())
    engine = ZeroEngine(
        net, [optimizer], group=dist.group.WORLD, zero_stage=stage, bucket_size_mb=0.03, offload=offload
    )
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 96, generator=generator).cuda()
        optimizer.zero_grad()
        loss = net(x).square().mean()
        if slow:
            torch.cuda._sleep(_LONG // 4)
        with engine.backward(loss):
            loss.backward()
        optimizer.step()
        engine.step_done()
        losses.append(loss.detach())
        if change is not None:
            change(net, step)
    torch.cuda.synchronize()
    result = torch.stack(losses).cpu(), {name: param.detach().cpu().clone() for name, param in net.named_parameters()}
    engine.detach()
    return result


def _compare(change=None, **kwargs):
    want = _train(None, change=change, **kwargs)
    for stage in (1, 2):
        for slow in (False, True):
            got = _train(Offload(), stage=stage, change=change, slow=slow, **kwargs)
            torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-6)
            assert_close(got[1], want[1])


def test_offload_on_a_slow_device(alone):
    _compare()


@torch.no_grad()
def _clip_weights(net, step):
    for param in net.parameters():
        param.clamp_(-0.05, 0.05)


def test_masters_on_the_host_follow_weights_that_are_changed_on_the_device(alone):
    _compare(_clip_weights)


def test_the_scale_is_on_the_host_before_a_fused_step_there(alone):
    found = []
    for offload in (None, Offload()):
        net = _net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-4, fused=True)
        engine = ZeroEngine(net, [optimizer], group=dist.group.WORLD, zero_stage=1, offload=offload)
        losses = []
        for step in range(4):
            x = torch.randn(8, 96, generator=torch.Generator().manual_seed(step)).cuda()
            optimizer.zero_grad()
            loss = net(x).square().mean()
            with engine.backward(loss):
                (loss * 1024).backward()
            torch.cuda._sleep(_LONG // 4)
            # As torch.amp.GradScaler.step() sets them; the third step is skipped.
            optimizer.grad_scale = torch.full((), 1024.0, device="cuda")
            optimizer.found_inf = torch.full((), float(step == 2), device="cuda")
            optimizer.step()
            engine.step_done()
            losses.append(loss.detach())
        found.append(torch.stack(losses).cpu())
        engine.detach()
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


class Fused(Base):
    """Optimizer whose kernel reads its step count on the device, and a scalar parameter."""

    def __init__(self, fused=True):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
        self.fused = fused
        self.scale = nn.Parameter(torch.tensor(1.5))

    def training_step(self, batch, batch_idx):
        return (self.scale * self.net(batch[0])).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3, fused=self.fused)


def _fused(strategy, epochs, resume=None, fused=True):
    torch.manual_seed(11)
    module = Fused(fused)
    trainer = quiet_trainer(
        accelerator="gpu", devices=1, strategy=strategy, max_epochs=epochs, use_distributed_sampler=False
    )
    data = TensorDataset(torch.randn(32, 64, generator=torch.Generator().manual_seed(1)))
    trainer.fit(module, DataLoader(data, batch_size=8), ckpt_path=resume)
    return trainer, {name: value.cpu() for name, value in snapshot(module).items()}


zero3 = functools.partial(FSDPStrategy, min_unit_size_mb=0)


@pytest.mark.parametrize("fused", [True, None])
@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.parametrize("kind", [DDPStrategy, ZeroStrategy, zero3, functools.partial(zero3, offload="cpu")])
def test_an_optimizer_resumes_on_the_device(kind, form, fused, tmp_path):
    _, whole = _fused("auto", 2, fused=fused)
    trainer, _ = _fused(kind(checkpoint=form), 1, fused=fused)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    _, resumed = _fused(kind(checkpoint=form), 2, tmp_path / "half.ckpt", fused=fused)
    assert_close(resumed, whole)


def _tiled():
    torch.manual_seed(0)
    strategy = FSDPStrategy(min_unit_size_mb=0, tile_linear_above_mb=0.01, offload="cpu")
    trainer = quiet_trainer(accelerator=SharedGPU(), devices=2, strategy=strategy)
    module = Fused()
    found = []
    module.on_train_batch_end = lambda *unused: found.append(
        {local_shard(p).device.type for name, p in module.named_parameters() if name != "scale"}
    )
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(32, 64)), batch_size=8))
    return found


def test_layers_in_tiles_rest_on_the_host():
    for found in run_ranks(2, _tiled):
        assert found
        assert all(kinds == {"cpu"} for kinds in found)


# --- messages ---------------------------------------------------------------------------------------------------


def _messages():
    group, rank = dist.group.WORLD, dist.get_rank()
    mine = torch.full((1000,), float(rank), device="cuda")
    torch.cuda._sleep(_LONG)
    mine += 1
    received = torch.zeros_like(mine)
    sent = isend(mine, 1 - rank, group=group, tag=3)
    irecv(received, 1 - rank, group=group, tag=3).wait()
    sent.wait()
    assert bool((received == 2 - rank).all())
    assert gather_among(mine, group=group, ranks=[0, 1])[:, 0].tolist() == [1.0, 2.0]
    assert all_gather(mine, group=group)[:, 0].tolist() == [1.0, 2.0]
    whole = torch.full((2000,), -1.0, device="cuda")
    whole.chunk(2)[rank].copy_(mine)
    gather_slices(whole, group=group).wait()
    assert whole.tolist() == [1.0] * 1000 + [2.0] * 1000
    received = torch.empty(4, device="cuda")
    dist.all_to_all_single(received, torch.tensor([rank, rank, 10.0, 10.0], device="cuda"), group=group)
    assert received.tolist() == ([0.0, 0.0, 1.0, 1.0] if rank == 0 else [10.0] * 4)
    reduced = torch.empty(2, device="cuda")
    dist.reduce_scatter_tensor(reduced, torch.arange(4.0, device="cuda"), group=group)
    assert reduced.tolist() == [4.0 * rank, 4.0 * rank + 2]


def test_messages_of_tensors_on_a_device_over_gloo():
    run_ranks(2, _messages)


def _whole():
    mesh = init_device_mesh("cuda", (2, 1), mesh_dim_names=("data_shard", "other"))
    values = torch.arange(15.0, device="cuda").view(5, 3)
    sharded = distribute_tensor(values, mesh, [Shard(0), Replicate()], src_data_rank=None)
    assert torch.equal(gather_over_data(sharded), values)


def test_a_sharded_tensor_is_put_together_over_gloo():
    run_ranks(2, _whole)


# --- random numbers -----------------------------------------------------------------------------------------------


def test_random_numbers_of_the_device():
    torch.cuda.init()
    device = devices.device_in_use()
    assert device == torch.device("cuda", 0)
    before = devices.random_state(device)
    with devices.preserve_random_state(device):
        devices.seed_generators(5, device)
        first = torch.rand(3, device=device)
        assert not devices.is_same_state(before, devices.random_state(device))
    assert devices.is_same_state(before, devices.random_state(device))
    devices.seed_generators(5, device)
    assert torch.equal(torch.rand(3, device=device), first)
    devices.set_random_state(before, device)
    devices.synchronize(device)


def test_numbers_of_the_host_reach_a_device_that_is_busy():
    torch.cuda.init()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(_LONG)
        numbers = [devices.numbers_on(torch.device("cuda", 0), [float(i)] * 3) for i in range(20)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.stack(numbers)[:, 2].tolist() == [float(i) for i in range(20)]


# --- what waits for the device --------------------------------------------------------------------------------------


def _waits(make, steps=6):
    """Return the places where a step of an engine synchronises with the device, after the first few."""
    net = _net()
    optimizer, around = make(net)
    batches = [torch.randn(8, 96, device="cuda") for _ in range(steps)]
    torch.cuda.synchronize()
    found = []
    for step, x in enumerate(batches):
        torch.cuda.set_sync_debug_mode("warn" if step == steps - 1 else "default")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.zero_grad()
            loss = F.mse_loss(net(x), x[:, :1])
            with around(loss):
                loss.backward()
            optimizer.step()
        torch.cuda.set_sync_debug_mode("default")
        found = [f"{each.filename}:{each.lineno}" for each in caught if "synchroniz" in str(each.message)]
    return found


def _plain(net):
    return torch.optim.AdamW(net.parameters()), lambda loss: contextlib.nullcontext()


def _zero(zero_stage, net):
    optimizer = torch.optim.AdamW(net.parameters())
    return optimizer, ZeroEngine(net, [optimizer], group=dist.group.WORLD, zero_stage=zero_stage).backward


def test_engines_wait_for_the_device_as_seldom_as_a_plain_loop(alone):
    plain = _waits(_plain)
    assert _waits(functools.partial(_zero, 1)) == plain
    assert _waits(functools.partial(_zero, 2)) == plain


class Wide(Base):
    """Several buckets and units, without host-device synchronisation in a step."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(3)))
        self.head = nn.Linear(256, 10)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.head(self.blocks(x)), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-3)


class Waits(pl.Callback):
    """Callback that records where a run synchronises with the device, in its last steps."""

    def __init__(self, first):
        self.first, self.steps = first, 0
        self.found = []
        self._caught = None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.steps += 1
        if self.steps == self.first:
            self._caught = warnings.catch_warnings(record=True)
            self.found = self._caught.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")

    def on_train_end(self, trainer, pl_module):
        torch.cuda.set_sync_debug_mode("default")
        self._caught.__exit__(None, None, None)
        self.found = Counter(
            f"{each.filename.rsplit('site-packages/')[-1]}:{each.lineno}"
            for each in self.found
            if "synchroniz" in str(each.message)
        )


def _waits_of(strategy, precision, **kwargs):
    torch.manual_seed(11)
    waits = Waits(first=6)
    trainer = quiet_trainer(
        accelerator="gpu", devices=1, strategy=strategy, precision=precision, callbacks=[waits], **kwargs
    )
    data = TensorDataset(torch.randn(160, 256), torch.randint(0, 10, (160,)))
    trainer.fit(Wide(), DataLoader(data, batch_size=16))
    return waits.found


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "pp", "tp"])
def test_steady_steps_wait_for_the_device_as_seldom_as_without_strategy(strategy, clip, precision):
    plain = _waits_of("auto", precision, gradient_clip_val=clip)
    ours = _waits_of(f"pardist_{strategy}", precision, gradient_clip_val=clip)
    more = ours - plain
    # The loss of a pipeline's step is assembled on the host when the step ends: once for each of five.
    allowed = sum(plain.values()) + (5 if strategy == "pp" else 0)
    assert sum(ours.values()) <= allowed, "\n".join(f"{count} x {line}" for line, count in more.items())
