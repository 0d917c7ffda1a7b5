"""Optimizer state and step on the host: identical results, less memory, no leftover files."""

import ctypes
import gc
import os
import sys
from typing import NamedTuple

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_pardist import ZeroStrategy
from lightning_pardist.engines.common.gradient_norm import clip_grad_norm
from lightning_pardist.engines.fsdp import ShardedDataEngine, find_fsdp_units, shard
from lightning_pardist.engines.offload import HostedState, HostStep, Offload, StateFile, require_folder
from lightning_pardist.engines.zero import ZeroEngine
from tests.helpers.optimizers import Lamb, MuonAndAdam, NormOfAll, Own, Shampoo
from tests.helpers.ranks import cpu_mesh, run_fresh_ranks, run_ranks

# Offload uses Adam's fused kernel; others are compared with their results without offload.
OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=0.01, amsgrad=True, foreach=True),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
    "plain": lambda groups: torch.optim.SGD(groups, lr=0.01),
}
#: Optimizers that need whole tensors: state of factors, of norms, of two kinds; and of all tensors together.
WHOLE = {
    "shampoo": lambda groups: Shampoo(_all(groups)),
    "lamb": lambda groups: Lamb(_all(groups)),
    "muon_and_adam": lambda groups: MuonAndAdam(_all(groups)),
    "norm_of_all": lambda groups: NormOfAll(_all(groups)),
}
# Windows of 4 kB: every parameter except the biases takes several.
WINDOW_MB = 2**-8


def _module(dtype=torch.float32):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(96, 128), nn.ReLU(), nn.Linear(128, 97), nn.Linear(97, 1, bias=False))
    return net.to(dtype)


def _groups(module):
    wide = [param for param in module.parameters() if param.dim() > 1]
    return [{"params": wide, "weight_decay": 0.1}, {"params": [p for p in module.parameters() if p.dim() == 1]}]


def _all(groups):
    return [param for group in groups for param in group["params"]]


def _engine(stage, module, make, offload):
    if stage < 3:
        optimizer = make(_groups(module))
        return optimizer, ZeroEngine(
            module, [optimizer], group=dist.group.WORLD, zero_stage=stage, bucket_size_mb=0.03, offload=offload
        )
    mesh = cpu_mesh((dist.get_world_size(),))
    handle = shard(module, mesh, units=find_fsdp_units(module, min_unit_bytes=1))
    optimizer = make(_groups(module))
    return optimizer, ShardedDataEngine(handle, [optimizer], accumulate="sharded", offload=offload)


def _steps(engine, module, optimizer, steps):
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        batch = torch.randn(5, 96, generator=generator).to(next(module.parameters()).dtype)
        optimizer.zero_grad()
        engine.zero_grad()
        if hasattr(engine, "sharded"):
            loss = engine.sharded.run(lambda: module(batch).pow(2).mean())  # noqa: B023
        else:
            loss = module(batch).pow(2).mean()
        with engine.backward(loss):
            loss.backward()
        clip_grad_norm(engine, [param for group in optimizer.param_groups for param in group["params"]], 0.5)
        optimizer.step()
        engine.step_done()
        losses.append(loss.item())
    return losses


def _same(stage, name, folder, dtype):
    found = []
    for offload in (None, Offload(), *([] if name == "norm_of_all" else [Offload(str(folder), WINDOW_MB)])):
        module = _module(dtype)
        optimizer, engine = _engine(stage, module, (OPTIMIZERS | WHOLE)[name], offload)
        losses = _steps(engine, module, optimizer, range(3))
        state = engine.optimizer_state(optimizer)
        found.append((losses, _flat(state)))
        # A checkpoint loads into the same engine, and into a new one.
        engine.load_optimizer_state(optimizer, _shared(state))
        losses += _steps(engine, module, optimizer, range(3, 5))
        found[-1] += (_flat(engine.optimizer_state(optimizer)),)
        engine.detach()
        if stage < 3:
            assert "step" not in optimizer.__dict__
    return found


def _shared(state):
    shared = [state]
    dist.broadcast_object_list(shared, 0)
    return shared[0]


def _flat(state):
    return {
        f"{number}.{key}": torch.as_tensor(value).clone()
        for number, entry in state["state"].items()
        for key, value in entry.items()
    }


def _check(ranks, stage, name, folder, dtype=torch.float32):
    for rank, (plain, *offloaded) in enumerate(run_ranks(ranks, _same, stage, name, folder, dtype)):
        for other in offloaded:
            assert other[0] == plain[0]
            for mine, theirs in zip(other[1:], plain[1:], strict=True):
                # For an update of all tensors together, every rank of ZeRO-1 and 2 has the complete state.
                assert bool(mine) is (rank == 0 and name != "plain") or name == "norm_of_all"
                assert mine.keys() == theirs.keys()
                assert not [key for key, value in mine.items() if not torch.equal(value, theirs[key])]
    assert os.listdir(folder) == []


@pytest.mark.push("2", "1")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bit_for_bit_as_without(tmp_path, stage):
    for name in OPTIMIZERS:
        _check(2, stage, name, tmp_path)


@pytest.mark.push("1")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_whole_tensors_bit_for_bit_as_without(tmp_path, stage):
    for name in WHOLE:
        _check(2, stage, name, tmp_path)


def test_masters_in_files(tmp_path):
    for name in ("adamw", "muon_and_adam"):
        _check(2, 2, name, tmp_path, torch.bfloat16)


def test_a_rank_alone(tmp_path):
    for name in ("adamw", "muon_and_adam"):
        _check(1, 2, name, tmp_path)


def _refused(stage, folder):
    said = []
    for make in (WHOLE["norm_of_all"], lambda groups: CountsCalls(_all(groups))):
        module = _module()
        with pytest.raises(ValueError, match="Use offload='cpu'") as error:
            _engine(stage, module, make, Offload(str(folder), WINDOW_MB))
        said.append(str(error.value))
    return said


class CountsCalls(Own):
    """Divides by the gradient's norm and by the number of calls."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.calls = 0

    def update(self):
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] / self.calls * p.grad / p.grad.norm())


@pytest.mark.parametrize("stage", [2, 3])
def test_files_for_what_needs_all_at_once_are_refused(tmp_path, stage):
    for joint, counting in run_ranks(2, _refused, stage, tmp_path):
        assert "NormOfAll cannot keep its state in files: it updates all tensors together" in joint
        assert "CountsCalls cannot step on a few parameters at a time" in counting
    assert os.listdir(tmp_path) == []


def test_state_of_any_form_is_kept(tmp_path):
    store = StateFile(tmp_path)
    hosted = HostedState(torch.device("cpu"), store=store, window_bytes=1)
    big, small = torch.randn(100, 200), torch.randn(3)
    entry = {"factors": [big, {"root": big + 1}], "again": big, "small": small, "count": torch.tensor(2.0), "n": 3}
    kept = hosted.keep("a", entry)
    factor, root = kept["factors"][0], kept["factors"][1]["root"]
    assert store.holds(factor)
    assert store.holds(root)
    assert kept["again"] is factor
    assert kept["small"] is small
    assert HostedState.num_bytes(kept) == 3 * big.numel() * 4 + 12
    # Reordered, recreated and kept values: memory in use must not be overwritten.
    changed = {"factors": [root, {"root": factor[1:]}], "again": big + 2, "n": 4}
    kept = hosted.keep("a", hosted.fetch(changed))
    assert torch.equal(kept["factors"][0], big + 1)
    assert torch.equal(kept["factors"][1]["root"], big[1:])
    assert torch.equal(kept["again"], big + 2)
    homes = len(hosted._homes["a"])
    # Memory that is no longer used must be reused.
    for step in range(3):
        kept = hosted.keep("a", {"only": torch.full((100, 200), float(step))})
    assert torch.equal(kept["only"], torch.full((100, 200), 2.0))
    assert len(hosted._homes["a"]) == homes


class Counted(torch.optim.Optimizer):
    """Divides the learning rate by a step count that it keeps in its state for all parameters together."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1.0})

    @torch.no_grad()
    def step(self, closure=None):
        self.state["count"] = count = self.state.get("count", torch.zeros(())).add_(1)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(group["lr"] * param.grad / count)


@pytest.mark.parametrize("window_bytes", [None, 1])
def test_state_of_all_parameters_together(window_bytes):
    params = [nn.Parameter(torch.zeros(3000)), nn.Parameter(torch.zeros(3))]
    optimizer = Counted(params)
    host_step = HostStep(optimizer, window_bytes=window_bytes)
    for _ in range(3):
        for param in params:
            param.grad = torch.ones_like(param)
        host_step.run()
    assert optimizer.state["count"] == 3
    for param in params:
        assert torch.allclose(param.detach(), torch.tensor(-(1 + 1 / 2 + 1 / 3)))


class Factors(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Quantised(torch.Tensor):
    """Tensor subclass with its own storage, like torchao's 8-bit state."""


def test_state_in_named_tuples_and_subclasses(tmp_path):
    store, cpu = StateFile(tmp_path), torch.device("cpu")
    big = torch.randn(100, 200)
    kept = HostedState(cpu, store=store, window_bytes=1).keep("a", {"factors": Factors(big, big + 1)})["factors"]
    assert isinstance(kept, Factors)
    assert store.holds(kept.right)
    assert torch.equal(kept.right, big + 1)
    quantised = big.as_subclass(Quantised)
    with pytest.raises(TypeError, match="plain tensors, and the optimizer's state has a Quantised"):
        HostedState(cpu, store=store, window_bytes=1).keep("b", {"codes": quantised})
    assert isinstance(HostedState(cpu).keep("b", {"codes": quantised})["codes"], Quantised)


def _resident(stage, offload):
    """Return the resident bytes of a model's states between steps, including mapped pages."""
    # Excludes what the first step of a process allocates for good: torch's lazy imports, connections.
    _two_steps(stage, 1, offload)
    before = _resident_bytes()
    engine, *others = _two_steps(stage, 24, offload)
    held = _resident_bytes() - before
    engine.detach()
    # ZeRO-3's engine keeps neither module nor optimizer alive.
    del others
    return held


def _two_steps(stage, layers, offload):
    module = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(layers)))
    optimizer, engine = _engine(stage, module, lambda groups: torch.optim.AdamW(groups, lr=0.01), offload)
    for _ in range(2):
        loss = (engine.sharded.run if stage == 3 else _call)(lambda: module(torch.ones(2, 1024)).pow(2).mean())
        with engine.backward(loss):
            loss.backward()
        optimizer.step()
        engine.step_done()
    return engine, optimizer, module


def _call(function):
    return function()


def _resident_bytes():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc to hand freed memory back")
@pytest.mark.slow
def test_resident_memory_of_adamw(tmp_path):
    # With ZeRO-2 on several ranks, whole parameters and buckets in flight dominate. In fresh processes: memory freed
    # earlier may or may not be resident.
    for stage, ranks in ((3, 2), (2, 1)):
        without = max(run_fresh_ranks(ranks, _resident, stage, None))
        held = max(run_fresh_ranks(ranks, _resident, stage, Offload(str(tmp_path), 4.0)))
        assert held <= 0.6 * without, f"{held / 1e6:.0f} MB of {without / 1e6:.0f} MB"


def test_a_full_disk_is_one_error(tmp_path):
    store = StateFile(tmp_path)
    with pytest.raises(RuntimeError, match="has no room for this rank's optimizer state"):
        store.reserve(2**60)
    big = [nn.Parameter(torch.empty(2**50, device="meta"))]
    with pytest.raises(RuntimeError, match="Free some, or name another folder"):
        HostStep(torch.optim.AdamW(big), store=store, window_bytes=2**20)
    tensor = store.zeros(100_000, torch.float32)
    assert torch.equal(tensor, torch.zeros(100_000))
    assert store.holds(tensor[5:])
    assert not store.holds(torch.zeros(100_000))
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot be written to: Not a directory"):
        require_folder(tmp_path / "file" / "below")
    assert require_folder(tmp_path / "new" / "folder").is_dir()
    for value, window, message in (
        ("", 1.0, "offload='' is unknown"),
        ("cpu", 0, "offload_window_mb=0 is not positive"),
    ):
        with pytest.raises(ValueError, match=message):
            ZeroStrategy(offload=value, offload_window_mb=window)


class Counts(torch.optim.Optimizer):
    """Divides its step by the number of calls."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * group["lr"] / self.calls)


def test_an_optimizer_that_counts_its_calls_is_refused(tmp_path):
    optimizer = Counts([nn.Parameter(torch.ones(3))])
    HostStep(optimizer)
    with pytest.raises(ValueError, match="Counts cannot step on a few parameters at a time"):
        HostStep(optimizer, store=StateFile(tmp_path), window_bytes=1)


def test_hooks_and_schedulers_see_one_step(tmp_path):
    params = [nn.Parameter(torch.ones(3000)) for _ in range(3)]
    optimizer = torch.optim.Adam(params)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    calls = []
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: calls.append(("pre", len(opt.state))))
    optimizer.register_step_post_hook(lambda opt, args, kwargs: calls.append(("post", len(opt.state))))
    for param in params:
        param.grad = torch.ones(3000)
    HostStep(optimizer, store=StateFile(tmp_path), window_bytes=1).run()
    scheduler.step()
    assert calls == [("pre", 0), ("post", 3)]
    assert optimizer.param_groups[0]["lr"] == 0.0005
    assert [group["fused"] for group in optimizer.param_groups] == [None]
