"""CUDA-only behaviour: fp16 with a scaler, copies to the host alongside computation, compiled steps."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pardist import FSDPStrategy, ZeroStrategy
from tests.helpers.models import Base
from tests.helpers.optimizers import MuonAndAdam, NormOfAll
from tests.helpers.runs import quiet_trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

zero3 = functools.partial(FSDPStrategy, min_unit_size_mb=0)


class Wide(Base):
    """Module with enough parameters for several buckets and units."""

    def __init__(self, compiled=False):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4)))
        if compiled:
            for block in self.blocks:
                block.compile()
        self.head = nn.Linear(256, 10)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.head(self.blocks(x)), y)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-3)


def _fit(strategy, precision="32-true", compiled=False, made=Wide, ckpt_path=None, **kwargs):
    torch.manual_seed(11)
    module = made(compiled)
    trainer = quiet_trainer(
        accelerator="gpu",
        devices=1,
        strategy=strategy() if callable(strategy) else strategy,
        precision=precision,
        gradient_clip_val=1.0,
        use_distributed_sampler=False,  # it would shuffle
        **kwargs,
    )
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(96, 256, generator=generator), torch.randint(0, 10, (96,), generator=generator))
    trainer.fit(module, DataLoader(data, batch_size=16), ckpt_path=ckpt_path)
    return torch.stack(module.losses).cpu(), trainer


@pytest.mark.parametrize("strategy", ["pardist_ddp", "pardist_zero1", "pardist_zero2", zero3])
@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
def test_losses_of_one_device(strategy, precision):
    want, _ = _fit("auto", precision)
    got, trainer = _fit(strategy, precision)
    torch.testing.assert_close(got, want, rtol=1e-5 if precision == "32-true" else 1e-2, atol=1e-5)
    if precision == "16-mixed":
        assert trainer.precision_plugin.scaler.get_scale() > 0


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("kind", [ZeroStrategy, zero3])
def test_offload(kind, precision, tmp_path):
    want, _ = _fit("auto", precision)
    for offload in ("cpu", str(tmp_path)):
        for accumulate in (1, 2):
            if accumulate == 2:
                want, _ = _fit("auto", precision, accumulate_grad_batches=2)
            got, trainer = _fit(
                functools.partial(kind, offload=offload, offload_window_mb=0.25),
                precision,
                accumulate_grad_batches=accumulate,
            )
            torch.testing.assert_close(got, want, rtol=1e-5 if precision == "32-true" else 1e-2, atol=1e-5)
            (optimizer,) = trainer.optimizers
            states = [value for entry in optimizer.state.values() for value in entry.values()]
            assert states
            assert all(value.device.type == "cpu" for value in states)
        want, _ = _fit("auto", precision)


class Orthogonal(Wide):
    def configure_optimizers(self):
        return MuonAndAdam(list(self.parameters()), lr=1e-3)


class Joined(Wide):
    def configure_optimizers(self):
        return NormOfAll(self.parameters(), lr=1e-3)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("kind", [ZeroStrategy, zero3])
def test_offload_of_whole_tensors(kind, precision, tmp_path):
    for made, folders in ((Orthogonal, ("cpu", str(tmp_path))), (Joined, ("cpu",))):
        want, _ = _fit("auto", precision, made=made)
        path = tmp_path / "saved.ckpt"
        for offload in folders:
            for resume in (None, path):
                strategy = functools.partial(kind, offload=offload, offload_window_mb=0.25)
                got, trainer = _fit(strategy, precision, made=made, ckpt_path=resume, max_epochs=2 if resume else 1)
                if resume is None:
                    torch.testing.assert_close(got, want, rtol=1e-5 if precision == "32-true" else 1e-2, atol=1e-5)
                    trainer.save_checkpoint(path)
                assert got.isfinite().all()
                (optimizer,) = trainer.optimizers
                states = [value for entry in optimizer.state.values() for value in entry.values()]
                assert states
                assert all(value.device.type == "cpu" for value in states if value.dim())


@pytest.mark.parametrize("strategy", ["pardist_ddp", "pardist_zero2", zero3])
def test_compiled_blocks(strategy):
    want, _ = _fit("auto", compiled=True)
    got, _ = _fit(strategy, compiled=True)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
