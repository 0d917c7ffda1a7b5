"""``pardist_cp`` under a Trainer: parity, checkpoints, evaluation and refusals."""

from __future__ import annotations

import functools

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_pardist import ContextParallelStrategy, HybridStrategy
from lightning_pardist.axes.context import ContextAxis
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import RankFailed, run_ranks
from tests.helpers.runs import quiet_trainer

TOKENS, WIDTH, LENGTH = 32, 16, 15


class Reader(pl.LightningModule):
    """Decoder on documents of uneven length, written for one process."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)
        self.dropout = nn.Dropout(dropout)
        self.losses, self.drawn, self.seen = [], [], []

    def forward(self, ids):
        batch, length = ids.shape
        x = self.embed(ids) + self.places(torch.arange(length, device=ids.device))
        q, k, v = (part.view(batch, length, 2, -1).transpose(1, 2) for part in self.mix(self.norm(x)).split(WIDTH, 2))
        mask = (
            torch.ones(length, length, dtype=torch.bool).tril() & (ids != 0)[:, None, None] | torch.eye(length).bool()
        )
        mixed = F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).reshape(batch, length, WIDTH)
        return self.head(self.dropout(x + self.out(mixed)))

    def loss(self, batch):
        (ids,) = batch
        return F.cross_entropy(self(ids)[:, :-1].reshape(-1, TOKENS), ids[:, 1:].reshape(-1), ignore_index=0)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.drawn.append(torch.rand(()).item())
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        logits = self(batch[0])
        assert logits.shape == (*batch[0].shape, TOKENS)
        self.log("accuracy", (logits.argmax(-1) == batch[0]).float().mean())
        self.log("val_loss", self.loss(batch))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


def _data():
    ids = torch.randint(1, TOKENS, (24, LENGTH), generator=torch.Generator().manual_seed(7))
    for row, kept in enumerate(torch.randint(4, LENGTH, (24,), generator=torch.Generator().manual_seed(8)).tolist()):
        ids[row, kept:] = 0
    return TensorDataset(ids)


class Data(pl.LightningDataModule):
    def _loader(self, **shares):
        if not shares:
            return DataLoader(_data(), batch_size=4)
        sampler = DistributedSampler(_data(), shuffle=False, **shares)
        return DataLoader(_data(), batch_size=4 // shares["num_replicas"], sampler=sampler)

    def train_dataloader(self):
        return self._loader(**getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {})

    def val_dataloader(self):
        return self._loader()

    predict_dataloader = val_dataloader


def _fit(strategy="auto", devices=1, dropout=0.0, ckpt_path=None, save=None, **kwargs):
    module = Reader(dropout)
    strategy = strategy() if callable(strategy) else strategy
    trainer = quiet_trainer(strategy=strategy, devices=devices, use_distributed_sampler=False, **kwargs)
    trainer.fit(module, datamodule=Data(), ckpt_path=ckpt_path)
    if save is not None:
        trainer.save_checkpoint(save)
    metrics = {key: value.clone() for key, value in trainer.callback_metrics.items() if key != "loss_step"}
    return module.losses, metrics, snapshot(module), all(type(p) is nn.Parameter for p in module.parameters())


def _strategy(data_parallel="ddp", size="auto", **kwargs):
    settings = {"min_unit_size_mb": 0} if data_parallel == "zero3" else {}
    return ContextParallelStrategy(
        context_parallel_size=size, data_parallel=data_parallel, data_settings=settings, **kwargs
    )


@functools.cache
def _expected():
    return _fit()


def _compare(found, expected):
    for _, metrics, weights, plain in found:
        assert_close(weights, expected[2])
        assert_close(metrics, expected[1])
        assert plain
    # Ranks with different samples have different losses: only what they log together equals one process's.
    if len(found) == 2:
        assert found[0][0] == pytest.approx(expected[0], rel=1e-5)


@pytest.mark.push("zero3")
@pytest.mark.parametrize("data_parallel", ["ddp", "zero2", "zero3"])
def test_two_ranks_train_like_one_process(data_parallel):
    _compare(run_ranks(2, _fit, functools.partial(_strategy, data_parallel), 2), _expected())


@pytest.mark.parametrize(
    ("data_parallel", "size"),
    [("ddp", 2), *(pytest.param(*cell, marks=pytest.mark.slow) for cell in (("ddp", 4), ("zero1", 2), ("zero3", 2)))],
)
def test_four_ranks_with_different_samples_train_like_one_process(data_parallel, size):
    _compare(run_ranks(4, _fit, functools.partial(_strategy, data_parallel, size), 4), _expected())


class Sparse(Reader):
    """Hand-written mean over few tokens, of which some ranks have a single one."""

    def loss(self, batch):
        (ids,) = batch
        per_token = F.cross_entropy(self(ids)[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
        counted = ids[:, 1:] == 1 + torch.arange(len(ids)).unsqueeze(1) // 2
        return (per_token * counted).sum() / counted.sum().clamp(min=1)


def _fit_sparse(strategy="auto", devices=1):
    module = Sparse()
    trainer = quiet_trainer(strategy=strategy, devices=devices, use_distributed_sampler=False)
    trainer.fit(module, datamodule=Data())
    return snapshot(module)


def _fit_sparse_over_context():
    return _fit_sparse(_strategy(size=2), 4)


@pytest.mark.slow
def test_means_over_a_single_token_are_those_of_one_process():
    expected = run_ranks(2, _fit_sparse, "pardist_ddp", 2)[0]
    for weights in run_ranks(4, _fit_sparse_over_context):
        assert_close(weights, expected)


@pytest.mark.slow
def test_shards_and_replicas_around_context():
    strategy = functools.partial(
        HybridStrategy, context_parallel_size=2, data_parallel="zero3", data_shard_size=1,
        data_settings={"min_unit_size_mb": 0},
    )  # fmt: skip
    _compare(run_ranks(4, _fit, strategy, 4), _expected())


def test_checkpoints_go_both_ways(tmp_path):
    one, many = tmp_path / "one.ckpt", tmp_path / "many.ckpt"
    _fit(save=one)
    expected = _fit(ckpt_path=one, max_epochs=2, save=tmp_path / "expected.ckpt")
    found = run_ranks(2, _resume, one, many)
    _compare(found, expected)
    ours, theirs = (torch.load(path, weights_only=False) for path in (many, tmp_path / "expected.ckpt"))
    assert_close(ours["state_dict"], theirs["state_dict"])
    for index, entry in theirs["optimizer_states"][0]["state"].items():
        assert_close(ours["optimizer_states"][0]["state"][index], entry)


def _resume(path, save):
    return _fit("pardist_cp", 2, ckpt_path=path, max_epochs=2, save=save)


@pytest.mark.parametrize("setting", [{"gradient_clip_val": 0.05}, {"accumulate_grad_batches": 3}])
def test_clipped_and_accumulated(setting):
    _compare(run_ranks(2, _fit_with, setting), _fit(**setting))


def _fit_with(setting):
    return _fit("pardist_cp", 2, **setting)


def _checkpointed():
    return _fit(functools.partial(ContextParallelStrategy, activation_checkpointing=["Linear"]), 2)


def test_activation_checkpointing():
    _compare(run_ranks(2, _checkpointed), _expected())


def _drop():
    module = Reader(0.5)
    trainer = quiet_trainer(strategy="pardist_cp", devices=2, use_distributed_sampler=False, limit_train_batches=3)
    trainer.fit(module, datamodule=Data())
    return module.losses, module.drawn, snapshot(module)


def test_dropout_keeps_ranks_together():
    first, second = run_ranks(2, _drop)
    assert first[:2] == second[:2]
    assert_close(first[2], second[2], rtol=1e-7)


def _predict():
    module = Reader()
    trainer = quiet_trainer(strategy="pardist_cp", devices=2, use_distributed_sampler=False)
    predicted = trainer.predict(module, datamodule=Data())
    return torch.cat(predicted), module(_data()[:4][0])


def test_predictions_are_whole_and_the_module_stays_plain():
    module = Reader()
    with torch.no_grad():
        expected = module(_data()[:][0])
    for predicted, called in run_ranks(2, _predict):
        assert torch.allclose(predicted, expected, atol=1e-5)
        assert torch.allclose(called, expected[:4], atol=1e-5)


class Images(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 2)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _refused():
    loader = DataLoader(TensorDataset(torch.randn(8, 8)), batch_size=4)
    quiet_trainer(strategy="pardist_cp", devices=2, use_distributed_sampler=False).fit(Images(), loader)


def test_a_module_without_a_sequence_is_refused_before_it_trains():
    with pytest.raises(RankFailed, match=r"found no sequence in Images\.training_step"):
        run_ranks(2, _refused)


class ByHand(Reader):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def _fit_by_hand(strategy="auto", devices=1):
    module = ByHand()
    quiet_trainer(strategy=strategy, devices=devices, use_distributed_sampler=False).fit(module, datamodule=Data())
    return snapshot(module)


def test_steps_that_run_backward_by_themselves_have_a_sequence():
    expected = _fit_by_hand()
    for weights in run_ranks(2, _fit_by_hand, "pardist_cp", 2):
        assert_close(weights, expected)


def _refused_with_sequence_parallel():
    strategy = HybridStrategy(
        context_parallel_size=2, tensor_parallel_size=2, tensor_settings={"sequence_parallel": True}
    )
    quiet_trainer(strategy=strategy, devices=4, use_distributed_sampler=False).fit(Reader(), datamodule=Data())


def test_two_ways_to_split_the_sequence_are_refused():
    with pytest.raises(RankFailed, match="sequence_parallel=True and context_parallel_size=2 both split the sequence"):
        run_ranks(4, _refused_with_sequence_parallel)
    with pytest.raises(ValueError, match="context_parallel_size=0 is not positive"):
        ContextAxis(context_parallel_size=0)


def test_what_was_split_is_said():
    described = run_ranks(2, _described)[0]
    assert "dim 1 of the 2 of embedding's input, 15 long" in described
    assert "all_to_all" in described


class _Describe(pl.Callback):
    text = ""

    def on_train_batch_end(self, trainer, *_):
        self.text = trainer.strategy.describe()


def _described():
    callback = _Describe()
    trainer = quiet_trainer(
        strategy="pardist_cp", devices=2, use_distributed_sampler=False, limit_train_batches=1, callbacks=[callback]
    )
    trainer.fit(Reader(), datamodule=Data())
    return callback.text
