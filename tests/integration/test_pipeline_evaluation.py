"""Validation, test and predict under a pipeline use whole batches: steps have one process's results."""

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_pardist.engines.pipeline import CannotPipelineError
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import quiet_trainer


class Regression(pl.LightningModule):
    """Logs values that are nonlinear in the batch, records what it has seen, and prints."""

    def __init__(self):
        super().__init__()
        inner = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
        self.net = nn.Sequential(nn.Linear(8, 8), *inner, nn.Linear(8, 1))
        self.r2 = torchmetrics.R2Score()
        self.mean = torchmetrics.MeanMetric()
        self.outputs, self.printed = [], []
        self.count = 0

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.net(batch[0])[:, 0], batch[1])

    def evaluate(self, batch):
        y = self.net(batch[0])[:, 0]
        mse = F.mse_loss(y, batch[1])
        self.log("rmse", mse.sqrt())
        self.log("perplexity", mse.exp(), on_step=True)
        self.log("spread", (y - y.mean()).square().sum() / (len(y) - 1))
        self.log("best", y.topk(2).values[1], reduce_fx="max")
        self.r2.update(y, batch[1])
        self.log("r2", self.r2)
        self.mean(mse.sqrt())
        self.outputs.append(mse.sqrt())
        return {"y": y, "ranks": y.argsort(), "rmse": mse.sqrt()}

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        return self.evaluate(batch)

    def test_step(self, batch, batch_idx):
        self.count += 1
        self.log("count", float(self.count * self.outputs[-1] if self.outputs else 0.0))
        return self.evaluate(batch)

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])[:, 0].argsort()

    def end(self):
        self.log("kept", torch.stack(self.outputs).prod())
        self.log("mean_rmse", self.mean.compute())
        self.mean.reset()
        self.outputs.clear()

    def on_validation_epoch_end(self):
        self.end()

    def on_test_epoch_end(self):
        self.end()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Stream(IterableDataset):
    """Stream without length that counts the items read."""

    def __init__(self, dataset):
        self.dataset = dataset
        self.read = 0

    def __iter__(self):
        for item in self.dataset:
            self.read += 1
            yield item


class Hooks(Callback):
    """Records each batch's outputs, and changes parameters that the next step reads."""

    def __init__(self):
        self.seen = []

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        pl_module.net[0].bias.data.add_(0.01)

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.seen.append(outputs["rmse"].clone())


def _data(length):
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(length, 8, generator=generator), torch.randn(length, generator=generator))


def _logged(parts):
    return {f"{index} {key}": torch.as_tensor(v) for index, part in enumerate(parts) for key, v in part.items()}


def _evaluate(strategy="auto", devices=1):
    torch.manual_seed(3)
    module = Regression()
    found = {}
    # Loaders whose last batch has two samples, and whose batches have one sample per micro-batch.
    loaders = [DataLoader(_data(26), batch_size=8), DataLoader(_data(20), batch_size=4)]
    trainer = quiet_trainer(strategy=strategy, devices=devices)
    found["val"] = _logged(trainer.validate(module, loaders, verbose=False))
    found["stream"] = _logged(trainer.validate(module, DataLoader(Stream(_data(26)), batch_size=8), verbose=False))
    stream = Stream(_data(64))
    trainer = quiet_trainer(strategy=strategy, devices=devices, limit_val_batches=3)
    found["limited"] = _logged(trainer.validate(module, DataLoader(stream, batch_size=4), verbose=False))
    found["read"] = {"samples": torch.tensor(stream.read)}
    trainer = quiet_trainer(strategy=strategy, devices=devices)
    found["test"] = _logged(trainer.test(module, loaders[0], verbose=False))
    found["predict"] = {str(i): y for i, y in enumerate(trainer.predict(module, loaders[0]))}
    hooks = Hooks()
    trainer = quiet_trainer(strategy=strategy, devices=devices, callbacks=[hooks])
    trainer.fit(module, DataLoader(_data(16), batch_size=8), loaders[0])
    found["fit"] = {**{key: value.clone() for key, value in trainer.callback_metrics.items()}, **snapshot(module)}
    found["hooks"] = {str(index): value for index, value in enumerate(hooks.seen)}
    return found


def test_evaluation_is_that_of_one_process():
    want = _evaluate()
    for ranks in (2,):
        for strategy in ("pardist_pp", "pardist_mp"):
            for got in run_ranks(ranks, _evaluate, strategy, ranks):
                for what, values in want.items():
                    if what in ("fit", "hooks"):
                        continue
                    assert_close(got[what], values), what


class Padded(pl.LightningModule):
    """Encoders with padding masks, which torch evaluates as nested tensors; all positions are read."""

    def __init__(self, final_norm=False):
        super().__init__()
        self.embed = nn.Embedding(20, 8, padding_idx=0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(8) if final_norm else None)
        self.head = nn.Linear(8, 4)

    def loss(self, batch):
        hidden = self.encoder(self.embed(batch[0]), src_key_padding_mask=batch[0] == 0)
        return F.cross_entropy(self.head(hidden.mean(1)), batch[1])

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), on_step=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _padded_tokens(at_the_end):
    draw = torch.Generator().manual_seed(2)
    tokens = torch.randint(1, 20, (16, 7), generator=draw)
    lengths = torch.randint(2, 8, (16, 1), generator=draw)
    tokens[torch.arange(7) >= lengths] = 0
    return TensorDataset(tokens if at_the_end else tokens.flip(1), tokens.sum(1) % 4)


def _evaluate_padded(strategy, devices):
    found = {}
    for final_norm, at_the_end in ((False, True), (True, True), (False, False)):
        torch.manual_seed(4)
        module, loader = Padded(final_norm), DataLoader(_padded_tokens(at_the_end), batch_size=8)
        trainer = quiet_trainer(strategy=strategy, devices=devices)
        trainer.fit(module, loader, loader)
        metrics = {key: value.clone() for key, value in trainer.callback_metrics.items()}
        found[f"norm {final_norm}, end {at_the_end}"] = metrics | snapshot(module)
    return found, torch.backends.mha.get_fastpath_enabled()


@pytest.mark.push("pardist_tp", "pardist_mp")
@pytest.mark.parametrize("strategy", ["pardist_pp", "pardist_mp", "pardist_tp"])
def test_encoders_with_padding_masks(strategy):
    expected, _ = run_ranks(1, _evaluate_padded, "auto", 1)[0]
    for found, fast_path in run_ranks(2, _evaluate_padded, strategy, 2):
        assert fast_path
        for name, values in expected.items():
            assert_close(found[name], values)


class LoneEncoderLayer(Padded):
    """Encoder layer outside of any ``nn.TransformerEncoder``, followed by other layers."""

    def __init__(self):
        super().__init__()
        del self.encoder
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.deeper = nn.ModuleList(
            nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)
        )

    def loss(self, batch):
        hidden = memory = self.layer(self.embed(batch[0]), src_key_padding_mask=batch[0] == 0)
        for deeper in self.deeper:
            hidden = deeper(hidden, memory)
        return F.cross_entropy(self.head(hidden.mean(1)), batch[1])


def _evaluate_lone(strategy, devices):
    torch.manual_seed(4)
    module, loader = LoneEncoderLayer(), DataLoader(_padded_tokens(True), batch_size=8)
    trainer = quiet_trainer(strategy=strategy, devices=devices)
    trainer.fit(module, loader, loader)
    return {key: value.clone() for key, value in trainer.callback_metrics.items()} | snapshot(module)


@pytest.mark.parametrize("strategy", ["pardist_pp", "pardist_mp"])
def test_a_lone_encoder_layer(strategy):
    expected = run_ranks(1, _evaluate_lone, "auto", 1)[0]
    for found in run_ranks(2, _evaluate_lone, strategy, 2):
        assert_close(found, expected)


class NowAndThen(Regression):
    """Calls the model once more in its first run (like FLOP counters), or with the first batch (like image logging)."""

    def __init__(self, when, training=False):
        super().__init__()
        self.when, self.training_too, self.size = when, training, None

    def more(self, batch, batch_idx):
        if self.when == "first run" and self.size is None:
            self.size = float(self.net(batch[0][:1]).abs().sum())
        if self.when == "first batch" and batch_idx == 0:
            self.log("shown", self.net[:3](batch[0][:2]).sum())

    def training_step(self, batch, batch_idx):
        if self.training_too:
            self.more(batch, batch_idx)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.more(batch, batch_idx)
        return super().validation_step(batch, batch_idx)

    def test_step(self, batch, batch_idx):
        self.more(batch, batch_idx)
        return super().validation_step(batch, batch_idx)

    def on_test_epoch_end(self):
        self.log("size", self.size or 0.0)
        super().on_test_epoch_end()


def _now_and_then(strategy, devices, when):
    torch.manual_seed(3)
    module, loader = NowAndThen(when), DataLoader(_data(24), batch_size=8)
    trainer = quiet_trainer(strategy=strategy, devices=devices)
    trainer.fit(module, loader, loader)
    fit = {key: value.clone() for key, value in trainer.callback_metrics.items()}
    test = quiet_trainer(strategy=strategy, devices=devices).test(module, loader, verbose=False)
    return fit | snapshot(module), {key: torch.as_tensor(value) for key, value in test[0].items()}


@pytest.mark.parametrize("when", ["first run", "first batch"])
@pytest.mark.parametrize("strategy", ["pardist_pp", "pardist_mp"])
def test_steps_that_do_more_now_and_then(strategy, when):
    fit, test = _now_and_then("auto", 1, when)
    for found in run_ranks(2, _now_and_then, strategy, 2, when):
        assert_close(found[0], fit)
        assert_close(found[1], test)


def _trains_now_and_then(when):
    trainer = quiet_trainer(strategy="pardist_pp", devices=2)
    with pytest.raises(CannotPipelineError, match="training_step does not call the same layers in every step"):
        trainer.fit(NowAndThen(when, training=True), DataLoader(_data(24), batch_size=8))


@pytest.mark.parametrize("when", ["first run", "first batch"])
def test_training_steps_that_do_more_now_and_then_are_refused_before_the_first(when):
    run_ranks(2, _trains_now_and_then, when)
