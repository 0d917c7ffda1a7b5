"""Hooks that call a part of the module outside of steps, compute with its parameters, or read numbers from them."""

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lightning_pardist
from tests.helpers.parity import assert_close
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import quiet_trainer


class Residual(nn.Module):
    """Blocks large enough to be units of their own, between small layers."""

    def __init__(self, before, after, width=192):
        super().__init__()
        self.first = nn.Linear(before, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(2))
        self.last = nn.Linear(width, after)
        self.gain = nn.Parameter(torch.ones(after))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x) * self.gain


class Autoencoder(pl.LightningModule):
    """Writes down what its hooks compute: a decoder, layers of it, a direct use of a parameter, the whole module."""

    def __init__(self, alone=False, reads=True):
        super().__init__()
        self.encoder, self.decoder = Residual(8, 4), Residual(4, 8)
        self.shift = nn.Parameter(torch.zeros(4))
        self.alone, self.reads = alone, reads
        self.found = []

    def forward(self, x):
        return self.decoder(self.encoder(x) + self.shift)

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self(batch[0]), batch[0])

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.training_step(batch, batch_idx))

    def note(self, value):
        self.found.append(float(value.detach().sum()))

    @torch.no_grad()
    def sample(self):
        return self.decoder(torch.ones(3, 4) * self.shift + 1)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.note(self.encoder(batch[0].new_ones(2, 8)))
        if self.reads:
            self.note(self.encoder.first.weight @ torch.ones(8))
            self.read(list(self.parameters()))

    def on_after_backward(self):
        if self.reads:
            self.read([p.grad for p in self.parameters()])

    def on_before_optimizer_step(self, optimizer):
        if self.reads:
            weight = self.encoder.first.weight
            weight.grad.mul_(torch.linspace(0, 1, weight.numel()).view(weight.shape))

    def read(self, tensors):
        """Write down Python numbers of tensors of which ranks hold parts, and what is computed from them."""
        weight, norms = tensors[2], torch.stack([each.norm() for each in tensors])
        self.found += [float(weight.norm()), weight.abs().max().item(), float(weight.mean())]
        self.found += [float(norms.sum()), float(norms.mean()), float(norms.norm()), float(norms.max())]
        self.found += [float(weight.detach().cpu().numpy().sum()), *weight[0, :2].tolist()]
        self.found += [float(weight.min() < weight.mean()), float(norms.sum() ** 2)]

    def on_validation_epoch_end(self):
        if self.alone and self.global_rank:
            return
        self.note(self.decoder.blocks[1](torch.ones(2, 192)))
        self.note(self.decoder.blocks[0][0](torch.ones(2, 192)))
        self.note(self(torch.ones(2, 8)))

    def on_train_epoch_end(self):
        self.note(self.sample())
        self.note(self.encoder.first(torch.ones(1, 8)))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Watch(pl.Callback):
    """Calls a part of the module, and changes a parameter by what it computes from it."""

    def on_train_start(self, trainer, pl_module):
        pl_module.note(pl_module.decoder(torch.ones(1, 4)))

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        with torch.no_grad():
            pl_module.shift.add_(0.01 * torch.arange(4.0))

    def on_fit_end(self, trainer, pl_module):
        pl_module.note(pl_module.decoder(torch.ones(1, 4)))


def _fit(strategy="auto", devices=1, alone=False, reads=True, **settings):
    torch.manual_seed(0)
    module = Autoencoder(alone, reads)
    data = TensorDataset(torch.randn(16, 8, generator=torch.Generator().manual_seed(1)))
    if settings:
        strategy = lightning_pardist.HybridStrategy(**settings)
    trainer = quiet_trainer(
        strategy=strategy, devices=devices, max_epochs=2, callbacks=[Watch()], use_distributed_sampler=False
    )
    share = {"num_replicas": 1, "rank": 0} if strategy == "auto" else trainer.strategy.distributed_sampler_kwargs
    loader = DataLoader(data, 8 // share["num_replicas"], sampler=DistributedSampler(data, shuffle=False, **share))
    trainer.fit(module, loader, loader)
    return {"found": torch.tensor(module.found)}


@pytest.mark.parametrize("strategy", ["pardist_zero3", "pardist_fsdp", "pardist_tp", "pardist_pp"])
def test_hooks_compute_what_one_process_does(strategy):
    # Stages refuse to read the weights of other stages.
    reads = strategy != "pardist_pp"
    want = _fit(reads=reads)
    for got in run_ranks(2, _fit, strategy, 2, False, reads):
        assert_close(got, want)


def _fit_beside_shards(inside):
    return _fit("hybrid", 4, False, inside == "tensor_parallel_size", data_parallel="zero3", **{inside: 2})


@pytest.mark.slow
@pytest.mark.parametrize("inside", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_hooks_beside_shards(inside):
    want = _fit(reads=inside == "tensor_parallel_size")
    for got in run_ranks(4, _fit_beside_shards, inside):
        assert_close(got, want)


def test_one_rank_alone_after_validation():
    want = _fit()["found"].tolist()
    first, second = run_ranks(2, _fit, "pardist_zero3", 2, True)
    assert_close(first, {"found": torch.tensor(want)})
    assert len(second["found"]) < len(want)
