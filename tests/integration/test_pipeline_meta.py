"""Modules built on ``meta``: each rank of a pipeline materializes only its stages, with one process's values."""

import contextlib

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_pardist import PipelineStrategy
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import RankFailed, run_ranks
from tests.helpers.runs import quiet_trainer


class Shift(nn.Module):
    """User-defined layer."""

    def __init__(self, dim):
        super().__init__()
        self.by = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.by)

    def forward(self, x):
        return x + self.by


class Net(pl.LightningModule):
    """Tied embedding and head, and optionally a block without a method to initialize it."""

    def __init__(self, bare=False):
        super().__init__()
        self.embed = nn.Embedding(12, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh()) for _ in range(5))
        self.head = nn.Linear(16, 12, bias=False)
        self.head.weight = self.embed.weight
        if bare:
            self.blocks[3].scale = nn.Parameter(torch.ones(1))
        self.shift = Shift(16)

    def forward(self, tokens):
        x = self.shift(self.embed(tokens))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=0)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2, eps=1e-3)


class Late(Net):
    """Builds its layers in ``configure_model``, on ``meta`` if there are several ranks."""

    def __init__(self):
        pl.LightningModule.__init__(self)
        self.embed = None

    def configure_model(self):
        if self.embed is not None:
            return
        with torch.device("meta") if dist.is_initialized() else contextlib.nullcontext():
            built = Net()
        self.embed, self.blocks, self.head, self.shift = built.embed, built.blocks, built.head, built.shift


def _loader():
    tokens = torch.randint(0, 12, (20, 7), generator=torch.Generator().manual_seed(7))
    return DataLoader([(row[:-1], row[1:]) for row in tokens], batch_size=8)


class Held(pl.Callback):
    """Records which parameters have values on this rank during training."""

    def on_train_start(self, trainer, pl_module):
        self.names = {name for name, parameter in pl_module.named_parameters() if not parameter.is_meta}


def _fit(strategy="auto", devices=1, epochs=1, module=None, **kwargs):
    torch.manual_seed(11)
    module = module or Late()
    held = Held()
    strategy = PipelineStrategy(**strategy) if isinstance(strategy, dict) else strategy
    trainer = quiet_trainer(strategy=strategy, devices=devices, max_epochs=epochs, callbacks=[held])
    trainer.fit(module, _loader(), _loader(), **kwargs)
    return module, trainer, held.names


def _on_meta(folder, settings):
    module, trainer, held = _fit(settings, 2)
    trainer.save_checkpoint(folder / "meta.ckpt")
    again, _, _ = _fit(settings, 2, 2, ckpt_path=folder / "one.ckpt")
    return snapshot(module), snapshot(again), held


@pytest.mark.push("settings1")
@pytest.mark.parametrize("settings", [{}, {"schedule": "zbv", "chunks_per_rank": 2}])
def test_each_rank_creates_its_stages(tmp_path, settings):
    one, trainer, _ = _fit()
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    two, _, _ = _fit(epochs=2)
    results = run_ranks(2, _on_meta, tmp_path, settings)
    for first, second, _ in results:
        assert_close(first, snapshot(one))
        assert_close(second, snapshot(two))
    names = {name for name, _ in one.named_parameters()}
    held = [held for _, _, held in results]
    assert set.union(*held) == names
    # The tied layers are on both ranks, except for "zbv", where the first rank has both.
    assert set.intersection(*held) <= {"embed.weight"}
    loaded = torch.load(tmp_path / "meta.ckpt", weights_only=True)["state_dict"]
    assert_close(loaded, snapshot(one))


def _with_init():
    strategy = PipelineStrategy(init=lambda module: [p.data.fill_(0.1) for p in module.parameters(recurse=False)])
    trainer = quiet_trainer(strategy=strategy, devices=2, limit_train_batches=0)
    with trainer.init_module(empty_init=True):
        module = Net(bare=True)
    assert all(parameter.is_meta for parameter in module.parameters())
    trainer.validate(module, _loader())
    return snapshot(module)


def test_init_module_and_own_initialization():
    for state in run_ranks(2, _with_init):
        assert all(torch.all(value == 0.1) for value in state.values())


def _bare():
    with torch.device("meta"):
        module = Net(bare=True)
    _fit("pardist_pp", 2, module=module)


def test_values_that_nobody_knows_are_refused_by_name():
    with pytest.raises(RankFailed, match=r"blocks\.3\.scale were built on the meta device"):
        run_ranks(2, _bare)
