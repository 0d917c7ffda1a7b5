"""Weight averaging callbacks under a pipeline: each rank averages its stages, and the whole average is available."""

import copy
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from torch import nn
from torch.utils.data import DataLoader

from lightning_pardist import PipelineStrategy
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import RankFailed, run_ranks
from tests.helpers.runs import quiet_trainer


class OwnAverage(pl.Callback):
    """Weight averaging as users write it."""

    def on_fit_start(self, trainer, pl_module):
        self.module = copy.deepcopy(pl_module)

    @torch.no_grad()
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for mine, current in zip(self.module.parameters(), pl_module.parameters(), strict=True):
            mine.mul_(0.8).add_(current, alpha=0.2)

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["current_model_state"] = self.module.state_dict()


KINDS = {
    "mean": (WeightAveraging, {}),
    "ema": (EMAWeightAveraging, {"decay": 0.8, "use_buffers": False}),
    "own": (OwnAverage, {}),
}


class Net(pl.LightningModule):
    """Tied embedding and head: one average is held by two ranks."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4))
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2, eps=1e-3)


#: fully_shard's modules cannot be deep-copied.
STRATEGIES = {
    "pp": (PipelineStrategy, 2, tuple(KINDS)),
    "pp_zero3": (partial(PipelineStrategy, pipeline_parallel_size=2, data_parallel="zero3"), 4, ("mean", "ema")),
}


def _fit(folder, strategy=None, devices=1, epochs=2, ckpt_path=None, kinds=tuple(KINDS)):
    found = {}
    tokens = torch.randint(0, 12, (20, 7), generator=torch.Generator().manual_seed(7))
    for name in kinds:
        torch.manual_seed(11)
        kind, settings = KINDS[name]
        module, average = Net(), kind(**settings)
        trainer = quiet_trainer(
            strategy=strategy() if strategy else "auto",
            devices=devices,
            max_epochs=epochs,
            callbacks=[average],
            use_distributed_sampler=False,
        )
        loader = DataLoader(tokens, batch_size=8)
        trainer.fit(module, loader, loader, ckpt_path=ckpt_path and folder / f"{ckpt_path}-{name}.ckpt")
        path = folder / f"{devices}-{epochs}-{name}.ckpt"
        trainer.save_checkpoint(path)
        saved = torch.load(path, weights_only=True)
        found[name] = {
            "weights": snapshot(module),
            "average": {} if name == "own" else snapshot(average._average_model.module),
            "values": {key: value.clone() for key, value in trainer.callback_metrics.items()},
            "saved": saved["state_dict"],
            "current": saved["current_model_state"],
        }
    return found


def _continued(folder, row):
    strategy, devices, kinds = STRATEGIES[row]
    first = _fit(folder, strategy, devices, kinds=kinds)
    return first, *(_fit(folder, strategy, devices, 4, saved, kinds) for saved in (f"{devices}-2", "1-2"))


@pytest.mark.slow
@pytest.mark.parametrize("row", ["pp", "pp_zero3"])
def test_averages_are_those_of_one_process(row, tmp_path):
    one, on = _fit(tmp_path), _fit(tmp_path, epochs=4, ckpt_path="1-2")
    _, devices, kinds = STRATEGIES[row]
    for got in run_ranks(devices, _continued, tmp_path, row):
        for mine, whole in zip(got, (one, on, on), strict=True):
            for name in kinds:
                for part, want in whole[name].items():
                    assert_close(mine[name][part], want)


def _stochastic(devices, strategy=None):
    """Return the weights after they were replaced by the average, and those of the callback's copy."""
    torch.manual_seed(11)
    module, average = Net(), StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)
    trainer = quiet_trainer(
        strategy=strategy() if strategy else "auto",
        devices=devices,
        max_epochs=3,
        callbacks=[average],
        use_distributed_sampler=False,
    )
    tokens = torch.randint(0, 12, (20, 7), generator=torch.Generator().manual_seed(7))
    trainer.fit(module, DataLoader(tokens, batch_size=8))
    return snapshot(module), snapshot(average._average_model), {p.device for p in average._average_model.parameters()}


@pytest.mark.parametrize("row", ["pp", pytest.param("pp_zero3", marks=pytest.mark.slow)])
def test_stochastic_averages_are_those_of_one_process(row):
    strategy, devices, _ = STRATEGIES[row]
    wanted = _stochastic(1)
    for got in run_ranks(devices, _stochastic, devices, strategy):
        assert_close(got[0], wanted[0])
        assert_close(got[1], wanted[1])
        assert got[2] == wanted[2]


class Normed(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)


def _refused(kind, settings):
    strategy = PipelineStrategy(**settings)
    trainer = quiet_trainer(strategy=strategy, devices=2, callbacks=[kind])
    trainer.fit(Normed(), DataLoader(torch.zeros(8, 7, dtype=torch.long), batch_size=8))


@pytest.mark.parametrize(
    ("callback", "settings", "pattern"),
    [
        (StochasticWeightAveraging(1e-2), {}, "StochasticWeightAveraging recomputes batch norm statistics"),
        (WeightAveraging(), {"checkpoint": "sharded"}, "puts two models into a checkpoint"),
    ],
)
def test_what_cannot_be_averaged_is_refused(callback, settings, pattern):
    with pytest.raises(RankFailed, match=pattern):
        run_ranks(2, _refused, callback, settings)


class Averaged(Net):
    """Keeps an average in the module itself, which only validation calls."""

    def __init__(self):
        super().__init__()
        self.average = copy.deepcopy(Net()).requires_grad_(False)
        self.average.load_state_dict(Net.state_dict(self), strict=False)

    @torch.no_grad()
    def on_before_zero_grad(self, optimizer):
        for name, mine in self.average.named_parameters():
            mine.lerp_(self.get_parameter(name), 0.2)

    def validation_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.average(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.log("val_loss", loss)


def _keep_average(strategy, devices):
    torch.manual_seed(3)
    module = Averaged()
    tokens = torch.randint(0, 12, (32, 7), generator=torch.Generator().manual_seed(5))
    trainer = quiet_trainer(strategy=strategy, devices=devices, max_epochs=2)
    trainer.fit(module, DataLoader(tokens, batch_size=8), DataLoader(tokens, batch_size=8))
    return snapshot(module), {name: value.clone() for name, value in trainer.callback_metrics.items()}


def test_an_average_that_the_module_keeps_in_a_hook_lies_where_its_layers_do():
    """Layers that no training step calls are placed with the layers they are copies of, tied ones too."""
    ((weights, logged),) = run_ranks(1, _keep_average, "auto", 1)
    for found, values in run_ranks(2, _keep_average, PipelineStrategy(pipeline_parallel_size=2), 2):
        assert_close(found, weights)
        assert_close(values, logged)
