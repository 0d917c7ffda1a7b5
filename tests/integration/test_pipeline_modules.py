"""Modules of many kinds under ``pardist_pp``: losses, weights and hooks, against one process."""

import copy
import warnings
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_pardist import PipelineStrategy
from recipes.gpt.model import GPT
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.pipeline_zoo import ZOO
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import quiet_trainer

STEPS = 3


class Wrapped(pl.LightningModule):
    """Model of the zoo that computes its loss and creates its batches."""

    def __init__(self, name):
        super().__init__()
        self.net = ZOO[name]()
        self.losses = []

    def batches(self, sizes):
        torch.manual_seed(100)
        return [self.net.batch(size) for size in sizes]

    def training_step(self, batch, batch_idx):
        result = self.net.training_step(batch)
        loss = result["loss"] if isinstance(result, dict) else result
        self.log("loss", loss, on_step=True, batch_size=1)
        return loss

    def validation_step(self, batch, batch_idx):
        result = self.net.training_step(batch)
        self.log("val", result["loss"] if isinstance(result, dict) else result, batch_size=1)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].detach().clone())
        torch.testing.assert_close(self.losses[-1], self.trainer.callback_metrics["loss"])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2, eps=1e-3)


def _loader(batches):
    return DataLoader(copy.deepcopy(batches), batch_size=None)


def _zoo(names, strategy="pardist_pp", devices=2, sizes=(8, 8, 5), **kwargs):
    found = {}
    for name in names:
        torch.manual_seed(11)
        module = Wrapped(name)
        batches = module.batches(sizes)
        trainer = quiet_trainer(strategy=strategy, devices=devices, num_sanity_val_steps=0, **kwargs)
        trainer.fit(module, _loader(batches), _loader(batches[:2]))
        found[name] = {
            "loss": torch.stack(module.losses),
            "val": trainer.callback_metrics["val"],
            **snapshot(module),
        }
    return found


# Batch norm, the experts' balance loss and noise from other samples depend on the whole batch, which only a schedule
# without micro-batches has.
COUPLED = ("resnet", "experts", "unet")


def test_zoo():
    names = [name for name in ZOO if name not in COUPLED]
    want = _zoo(names, "auto", 1)
    for got in run_ranks(2, _zoo, names):
        for name in names:
            assert_close(got[name], want[name])


def test_models_that_look_at_whole_batches():
    want = _zoo(COUPLED, "auto", 1)
    for got in run_ranks(2, _zoo, COUPLED, "pardist_mp"):
        for name in COUPLED:
            assert_close(got[name], want[name])


def _writes(strategy="pardist_pp", devices=2):
    torch.manual_seed(11)
    module = GPT(dim=16, layers=2, heads=2, context=8, dropout=0.0, eps=1e-3, warmup_steps=2, sample_tokens=5)
    written = []
    write = module.write
    module.write = lambda *args: written.append(write(*args)) or written[-1]
    tokens = torch.randint(0, 256, (16, 9), generator=torch.Generator().manual_seed(7))
    data = [(row[:-1], row[1:]) for row in tokens]
    trainer = quiet_trainer(strategy=strategy, devices=devices, max_epochs=2)
    trainer.fit(module, DataLoader(data, batch_size=8), DataLoader(data, batch_size=8))
    copied = copy.deepcopy(module)
    del copied.write
    return {
        "written": written,
        "after": module.write("a", 3),
        "values": {name: value.clone() for name, value in trainer.callback_metrics.items()},
        "weights": snapshot(module),
        "copied": snapshot(copied),
    }


def test_gpt_recipe_writes_a_sample():
    want = _writes("auto", 1)
    for got in run_ranks(2, _writes):
        assert got["written"] == want["written"]
        assert got["after"] == want["after"]
        for part in ("values", "weights", "copied"):
            assert_close(got[part], want[part])


def _transformers(strategy="pardist_pp", devices=2):
    import transformers

    class Finetuned(pl.LightningModule):
        def __init__(self):
            super().__init__()
            sizes = {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 16, "vocab_size": 32}
            dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
            self.model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropouts))
            self.save_hyperparameters()

        def forward(self, **batch):
            return self.model(**batch)

        def training_step(self, batch):
            output = self(**batch)
            self.log("loss", output.loss)
            return output

        def validation_step(self, batch):
            output = self(**batch)
            written = self.model.generate(batch["input_ids"][:, :3], max_new_tokens=4, do_sample=True, pad_token_id=0)
            self.log_dict({"val_loss": output.loss, "largest": output.logits.max(), "written": written.float().mean()})

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)

    torch.manual_seed(11)
    module = Finetuned()
    generator = torch.Generator().manual_seed(7)
    samples = []
    for length in (8, 3, 7, 5, 8, 2, 6, 4) * 2:
        tokens = torch.randint(0, 32, (8,), generator=generator)
        mask = (torch.arange(8) < length).long()
        samples.append({"input_ids": tokens, "attention_mask": mask, "labels": tokens.where(mask > 0, -100)})
    strategy = strategy() if callable(strategy) else strategy
    trainer = quiet_trainer(strategy=strategy, devices=devices, max_epochs=2)
    trainer.fit(module, DataLoader(samples, batch_size=8), DataLoader(samples, batch_size=6))
    return {"values": {k: v.clone() for k, v in trainer.callback_metrics.items()}, "weights": snapshot(module)}


_ZERO3 = partial(PipelineStrategy, data_parallel="zero3", data_settings={"min_unit_size_mb": 0})


@pytest.mark.push("pp")
@pytest.mark.parametrize("strategy", ["pardist_pp", _ZERO3], ids=["pp", "pp_zero3"])
def test_language_model_of_transformers_with_padding(strategy):
    pytest.importorskip("transformers")
    want = _transformers("auto", 1)
    for got in run_ranks(2, _transformers, strategy):
        for part in ("values", "weights"):
            assert_close(got[part], want[part])


class Remembers(nn.Module):
    """Appends to a cache argument, as attention does in generation."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x, cache=None):
        if cache is None:
            return self.layer(x).tanh()
        cache["seen"].append(x)
        cache["calls"] += 1
        return self.layer(sum(cache["seen"]) / cache["calls"]).tanh()


class Writes(pl.LightningModule):
    """Validation runs through the stages repeatedly, in a loop that depends on values."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Remembers() for _ in range(3))
        self.head = nn.Linear(6, 1)

    def forward(self, x, caches=(None, None, None)):
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, cache)
        return self.head(x)

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        assert self.device == next(self.parameters()).device == batch[0].device
        caches = [{"seen": [], "calls": 0} for _ in self.blocks]
        x, steps = batch[0], 0
        while steps < 2 or (x.sum() > -100 and steps < 4):
            x, steps = x + self(x, caches), steps + 1
        self.log_dict({"out": x.mean(), "steps": float(steps), "kept": sum(c["seen"][-1].mean() for c in caches)})

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _writing(strategy="pardist_pp", devices=2):
    torch.manual_seed(11)
    module = Writes()
    data = [(x, x.sum(0, keepdim=True)) for x in torch.randn(16, 6, generator=torch.Generator().manual_seed(7))]
    trainer = quiet_trainer(strategy=strategy, devices=devices, max_epochs=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(data, batch_size=8), DataLoader(data, batch_size=6))
    metrics = {key: value.clone() for key, value in trainer.callback_metrics.items()}
    return {**snapshot(module), **metrics}, [str(each.message) for each in caught]


def test_validation_that_does_not_follow_the_stages():
    want, _ = _writing("auto", 1)
    found = run_ranks(2, _writing)
    for got, _ in found:
        assert_close(got, want)
    assert any("validation_step does not run in the stages of the training step" in each for each in found[0][1])


class Sums(pl.LightningModule):
    """Loss that is a sum over samples."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.layers(batch[0]), batch[1], reduction="sum")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Contrasts(Sums):
    """Loss that compares the samples of a batch."""

    def training_step(self, batch, batch_idx):
        x = self.layers(batch[0]) + batch[0]
        return F.cross_entropy(x @ batch[0].T, torch.arange(len(x)))


def _loss(kind, strategy="pardist_pp", devices=2, **given):
    torch.manual_seed(11)
    module = kind()
    generator = torch.Generator().manual_seed(7)
    data = [(x, x.sum(0, keepdim=True)) for x in torch.randn(20, 6, generator=generator)]
    trainer = quiet_trainer(strategy=PipelineStrategy(**given) if given else strategy, devices=devices)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(data, batch_size=8))
    return snapshot(module), [str(each.message) for each in caught]


def _loss_of_parts(kind):
    return _loss(kind, num_microbatches=2)


def test_sums_add_up():
    want, _ = _loss(Sums, "auto", 1)
    for got, said in run_ranks(2, _loss, Sums):
        assert_close(got, want)
        assert not any("loss_weight" in each for each in said)


def test_batches_whose_samples_are_compared_are_not_cut():
    want, _ = _loss(Contrasts, "auto", 1)
    ranks = run_ranks(2, _loss, Contrasts)
    for got, _ in ranks:
        assert_close(got, want)
    assert any("the loss compares the samples of a batch" in each for each in ranks[0][1])


def test_batches_whose_samples_are_compared_are_cut_where_that_is_asked_for():
    (_, said), _ = run_ranks(2, _loss_of_parts, Contrasts)
    assert any("neither the mean nor the sum" in each for each in said)
