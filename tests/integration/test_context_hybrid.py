"""Context parallelism with tensor parallelism and in pipeline stages: parity, traffic, evaluation and checkpoints."""

from __future__ import annotations

import functools

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_pardist import HybridStrategy
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import RankFailed, run_ranks
from tests.helpers.runs import quiet_trainer

TOKENS, WIDTH, LENGTH = 32, 16, 15


class Block(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.heads = heads
        self.norm, self.last_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.grow, self.shrink = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, mask):
        batch, length, _ = x.shape
        parts = self.mix(self.norm(x)).split(WIDTH, 2)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).reshape(batch, length, WIDTH)
        x = x + self.out(mixed)
        return x + self.shrink(F.gelu(self.grow(self.last_norm(x))))


class Decoder(pl.LightningModule):
    """Decoder on documents of uneven length, written for one process."""

    def __init__(self, heads=2, tied=False):
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(heads) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        length = ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
        mask = causal & (ids != 0)[:, None, None] | torch.eye(length, dtype=torch.bool, device=ids.device)
        x = self.embed(ids) + self.places(torch.arange(length, device=ids.device))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))

    def loss(self, batch):
        (ids,) = batch
        return F.cross_entropy(self(ids)[:, :-1].reshape(-1, TOKENS), ids[:, 1:].reshape(-1), ignore_index=0)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
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
    def train_dataloader(self):
        shares = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None)
        if not shares:
            return DataLoader(_data(), batch_size=8)
        sampler = DistributedSampler(_data(), shuffle=False, **shares)
        return DataLoader(_data(), batch_size=8 // shares["num_replicas"], sampler=sampler)

    def val_dataloader(self):
        return DataLoader(_data(), batch_size=8)

    predict_dataloader = val_dataloader


def _fit(strategy="auto", devices=1, ckpt_path=None, save=None, module=None, **kwargs):
    module = Decoder(**(module or {}))
    strategy = strategy() if callable(strategy) else strategy
    trainer = quiet_trainer(
        strategy=strategy, devices=devices, use_distributed_sampler=False, precision="64-true", **kwargs
    )
    trainer.fit(module, datamodule=Data(), ckpt_path=ckpt_path)
    if save is not None:
        trainer.save_checkpoint(save)
    metrics = {key: value.clone() for key, value in trainer.callback_metrics.items() if key != "loss_step"}
    return snapshot(module), metrics


def _strategy(data_parallel="ddp", schedule="1f1b", context=2, stages=2, **settings):
    pipeline = {"schedule": schedule, "num_microbatches": 2}
    if schedule in ("interleaved", "zbv"):
        pipeline["chunks_per_rank"] = 2
    if data_parallel == "zero3":
        settings["data_settings"] = {"min_unit_size_mb": 0}
    return HybridStrategy(
        context_parallel_size=context,
        pipeline_parallel_size=stages,
        data_parallel=data_parallel,
        pipeline_settings=pipeline,
        **settings,
    )


def _assert_trains_like_one_process(strategy, ranks=4, **kwargs):
    weights, metrics = _fit(**kwargs)
    for found in run_ranks(ranks, functools.partial(_fit, strategy, ranks, **kwargs)):
        assert_close(found[0], weights, rtol=1e-9)
        assert_close(found[1], metrics, rtol=1e-6)


_SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("tensor", "stages", "data_parallel", "module"),
    [
        (2, 1, "ddp", {"tied": True}),
        pytest.param(2, 1, "zero3", {"heads": 4}, marks=_SLOW),
        pytest.param(2, 1, "zero2", {"heads": 1}, marks=_SLOW),
        pytest.param(2, 2, "ddp", {"heads": 4}, marks=_SLOW),
    ],
)
def test_tensor_ranks_that_split_sequences_train_like_one_process(tensor, stages, data_parallel, module):
    strategy = functools.partial(_strategy, data_parallel, stages=stages, tensor_parallel_size=tensor)
    _assert_trains_like_one_process(strategy, ranks=2 * tensor * stages, module=module)


@pytest.mark.parametrize(
    ("data_parallel", "schedule", "module"),
    [
        ("ddp", "1f1b", {"tied": True}),
        pytest.param("ddp", "gpipe", {"heads": 1}, marks=_SLOW),
        pytest.param("zero3", "1f1b", {}, marks=_SLOW),
        pytest.param("zero2", "interleaved", {}, marks=_SLOW),
        pytest.param("ddp", "zbv", {}, marks=_SLOW),
    ],
)
def test_stages_that_split_sequences_train_like_one_process(data_parallel, schedule, module):
    _assert_trains_like_one_process(functools.partial(_strategy, data_parallel, schedule), module=module)


@_SLOW
@pytest.mark.parametrize("setting", [{"gradient_clip_val": 0.05}, {"accumulate_grad_batches": 3}])
def test_clipped_and_accumulated(setting):
    _assert_trains_like_one_process(_strategy, **setting)


@_SLOW
def test_checkpointed_blocks():
    _assert_trains_like_one_process(functools.partial(_strategy, activation_checkpointing=["Block"]))


@_SLOW
def test_data_ranks_beside_stages_and_context():
    _assert_trains_like_one_process(functools.partial(_strategy, "zero1"), ranks=8)


class Trimmed(Decoder):
    """Removes padding common to all samples of a micro-batch: of 14 or 13 tokens the first rank has seven."""

    def loss(self, batch):
        (ids,) = batch
        return super().loss((ids[:, : int((ids != 0).sum(1).max())],))

    def validation_step(self, batch, batch_idx):
        pass


class Step(nn.Module):
    """Layer that passes its second argument on, like blocks that keep a sum in another precision."""

    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, first):
        return self.mix(self.norm(x)), first.to(x.dtype)


class Carried(Decoder):
    """Every step gets an input from the first, and code between the steps reduces it over the sequence."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Step() for _ in range(4))

    def forward(self, ids):
        x = first = self.embed(ids)
        for block in self.blocks:
            x, first = block(x + (x + first).mean(1, keepdim=True), first)
        return self.head(self.norm(x + first))


def _batches(kind):
    ids = torch.randint(1, TOKENS, (24, LENGTH), generator=torch.Generator().manual_seed(7))
    if kind is Trimmed:
        for start in range(0, 24, 4):
            ids[start : start + 4, 14 - start // 4 % 3 // 2 :] = 0
    return DataLoader(TensorDataset(ids), batch_size=8)


def _fit_kind(kind, strategy="auto", devices=1):
    module = kind()
    strategy = strategy() if callable(strategy) else strategy
    trainer = quiet_trainer(strategy=strategy, devices=devices, use_distributed_sampler=False, precision="64-true")
    trainer.fit(module, _batches(kind))
    return snapshot(module)


@pytest.mark.push("1-Carried")
@pytest.mark.parametrize("kind", [Trimmed, Carried])
@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=_SLOW)])
def test_what_travels_is_as_the_step_has_it(kind, tensor):
    expected = _fit_kind(kind)
    ranks = 4 * tensor
    for weights in run_ranks(ranks, _fit_kind, kind, functools.partial(_strategy, tensor_parallel_size=tensor), ranks):
        assert_close(weights, expected, rtol=1e-9)


def _islands(context):
    strategy = functools.partial(_strategy, context=context, stages=1, outer_parallel_size=2, sync_every=2)
    return _fit(strategy, 2 * context)[0]


@_SLOW
def test_islands_that_split_sequences_are_as_islands_of_one_rank():
    expected = run_ranks(2, _islands, 1)[0]
    for weights in run_ranks(4, _islands, 2):
        assert_close(weights, expected, rtol=1e-9)


class _Describe(pl.Callback):
    text = ""

    def on_train_batch_end(self, trainer, *_):
        self.text = trainer.strategy.describe()


def _sent():
    """Return the strategy's description, and the shapes of what this rank has received from other stages."""
    from lightning_pardist.engines.pipeline.stage_p2p import StageP2P

    shapes, finish = [], StageP2P.finish_values

    def finish_values(self, *args):
        tensors, outputs = finish(self, *args)
        shapes.extend(tuple(tensor.shape) for tensor in tensors)
        return tensors, outputs

    callback = _Describe()
    trainer = quiet_trainer(
        strategy=_strategy(), devices=4, use_distributed_sampler=False, limit_train_batches=1, callbacks=[callback],
        limit_val_batches=0,
    )  # fmt: skip
    StageP2P.finish_values = finish_values
    try:
        trainer.fit(Decoder(), datamodule=Data())
    finally:
        StageP2P.finish_values = finish
    return callback.text, shapes


def test_stages_send_parts_of_sequences():
    found = run_ranks(4, _sent)
    assert "Stage rank 1: Sequences over 2 context ranks: dim 1 of 3 of the previous stage's output" in found[0][0]
    assert [shapes for _, shapes in found] == [[], [], [(4, 8, WIDTH)] * 2, [(4, 7, WIDTH)] * 2]


def _predict():
    trainer = quiet_trainer(strategy=_strategy(), devices=4, use_distributed_sampler=False)
    return torch.cat(trainer.predict(Decoder(), datamodule=Data()))


@_SLOW
def test_predictions_are_whole():
    with torch.no_grad():
        expected = Decoder()(_data()[:][0])
    for predicted in run_ranks(4, _predict):
        assert torch.allclose(predicted, expected, atol=1e-5)


@_SLOW
def test_checkpoints_go_both_ways(tmp_path):
    one, many = tmp_path / "one.ckpt", tmp_path / "many.ckpt"
    _fit(save=one)
    expected = _fit(ckpt_path=one, max_epochs=2, save=tmp_path / "expected.ckpt")
    for found in run_ranks(4, functools.partial(_fit, _strategy, 4, ckpt_path=one, max_epochs=2, save=many)):
        assert_close(found[0], expected[0], rtol=1e-9)
    ours, theirs = (torch.load(path, weights_only=False) for path in (many, tmp_path / "expected.ckpt"))
    for index, entry in theirs["optimizer_states"][0]["state"].items():
        assert_close(ours["optimizer_states"][0]["state"][index], entry, rtol=1e-9)


class Flat(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _refused():
    loader = DataLoader(TensorDataset(torch.randn(8, 8)), batch_size=4)
    quiet_trainer(strategy=_strategy(), devices=4, use_distributed_sampler=False).fit(Flat(), loader)


@_SLOW
def test_a_module_without_a_sequence_is_refused_on_all_stages():
    with pytest.raises(RankFailed, match=r"found no sequence in Flat\.training_step"):
        run_ranks(4, _refused)
