"""States on CUDA: checkpoints moved to the CPU and back, the device's random state, memory by the formulas."""

import functools
import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pardist import DDPStrategy, FSDPStrategy, ZeroStrategy
from tests.helpers.checkpoints import run
from tests.helpers.gpu import SharedGPU
from tests.helpers.models import Base
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import BATCH, Data, quiet_trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def _run_on(device, name, world, settings):
    os.environ["PARDIST_TEST_DEVICE"] = device  # the rank pool restores it
    found = run(name, world, "classifier", **settings)
    return {
        "losses": {"loss": found["losses"].cpu()},
        "weights": {name: value.cpu() for name, value in found["weights"].items()},
        "loaded": {name: value.cpu() for name, value in found["loaded_optimizer"].items()},
        "optimizer": {name: value.cpu() for name, value in found["optimizer"].items()},
    }


@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.parametrize(
    ("name", "world"),
    [("ddp", 2), ("zero1", 2), ("zero2", 2), ("zero3", 2), ("fsdp", 2), ("tp", 2), ("pp", 2), ("pp_zero3", 4)],
)
@pytest.mark.parametrize("there_and_back", [("gpu", "cpu"), ("cpu", "gpu"), ("gpu", "gpu")])
def test_a_checkpoint_of_one_device_resumes_on_another(name, world, form, there_and_back, tmp_path):
    saving, resuming = there_and_back
    path = str(tmp_path / "half.ckpt")
    (first, *_) = run_ranks(world, _run_on, saving, name, world, {"epochs": 1, "save": path, "checkpoint": form})
    (second, *_) = run_ranks(world, _run_on, resuming, name, world, {"epochs": 2, "resume": path})
    (whole, *_) = run_ranks(1, _run_on, "cpu", "one", 1, {"epochs": 2})
    assert_close(second["loaded"], first["optimizer"], rtol=0.0)
    assert_close(second["weights"], whole["weights"])


class Dropped(Base):
    """Draws random numbers on the device in every step."""

    def __init__(self):
        super().__init__("adamw")
        self.net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.note(F.mse_loss(self.net(x + torch.randn_like(x)), y))


def _with_dropout(strategy, path):
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(4 * BATCH, 6, generator=generator), torch.randn(4 * BATCH, 1, generator=generator))

    def fit(**kwargs):
        torch.manual_seed(11)
        module = Dropped()
        trainer = quiet_trainer(
            accelerator=SharedGPU(), strategy=strategy(), devices=2, use_distributed_sampler=False, max_epochs=2
        )
        trainer.limit_train_batches = 4
        if "save" in kwargs:
            trainer.fit_loop.max_epochs = 1
        torch.manual_seed(5)
        trainer.fit(module, datamodule=Data(data), ckpt_path=kwargs.get("resume"))
        if "save" in kwargs:
            trainer.save_checkpoint(kwargs["save"])
        return {name: value.cpu() for name, value in snapshot(module).items()}, torch.stack(module.losses).cpu()

    whole = fit()
    fit(save=path)
    return whole, fit(resume=path)


@pytest.mark.parametrize("strategy", [DDPStrategy, ZeroStrategy, functools.partial(FSDPStrategy, min_unit_size_mb=0)])
def test_random_numbers_go_on_after_a_resume(strategy, tmp_path):
    results = run_ranks(2, _with_dropout, strategy, str(tmp_path / "half.ckpt"))
    losses = [whole[1] for whole, _ in results]
    assert not torch.equal(losses[0], losses[1])
    for whole, resumed in results:
        assert_close(resumed[0], whole[0], rtol=0.0)


class Large(Base):
    """16.8 million parameters in equal layers: a bucket is a small part."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16)))
        self.allocated = []

    def configure_model(self):
        if not self.allocated:
            self.allocated.append(torch.cuda.memory_allocated())

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.allocated.append(torch.cuda.memory_allocated())


def clear_workspaces():
    """Free cuBLAS workspaces, which take 32 MiB per thread with matrix products."""
    torch._C._cuda_clearCublasWorkspaces()


def _memory(strategy, devices):
    module = Large()
    held = []
    clear_workspaces()
    before = torch.cuda.memory_allocated()
    trainer = quiet_trainer(accelerator=SharedGPU(), strategy=strategy(), devices=devices)

    def note(optimizer):
        torch.cuda.synchronize()
        clear_workspaces()
        # The allocator only processes blocks freed by other streams at the next allocation.
        torch.empty(1, device="cuda")
        held.append((torch.cuda.memory_allocated() - before, trainer.strategy.held().total))

    module.on_before_optimizer_step = note
    torch.cuda.reset_peak_memory_stats()
    trainer.fit(module, DataLoader(TensorDataset(torch.ones(devices * 8 * 4, 1024)), batch_size=8))
    return held, torch.cuda.max_memory_allocated() - before


#: Bytes per parameter on a rank of N, AdamW in fp32: ZeRO paper (arXiv 1910.02054, section 3), before the update.
FORMULAS = {
    "ddp": (DDPStrategy, lambda ranks: 16.0),
    "zero1": (functools.partial(ZeroStrategy, zero_stage=1), lambda ranks: 8 + 8 / ranks),
    "zero2": (functools.partial(ZeroStrategy, zero_stage=2), lambda ranks: 4 + 12 / ranks),
    "zero3": (functools.partial(FSDPStrategy, min_unit_size_mb=0), lambda ranks: 16 / ranks),
}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", FORMULAS)
def test_memory_before_the_update(name, ranks):
    strategy, per_parameter = FORMULAS[name]
    parameters = 16 * 1024 * 1024
    for steps, peak in run_ranks(ranks, _memory, strategy, ranks):
        allocated, held = steps[-1]
        print(
            f"{name}-{ranks}: {allocated / parameters:.2f} bytes a parameter, held {held / parameters:.2f}, peak"
            f" {peak / parameters:.2f}, formula {per_parameter(ranks):.2f}"
        )
        # A gathered layer or a bucket may be alive: one sixteenth each.
        assert allocated <= parameters * (per_parameter(ranks) + 4 * 3 / 16)
