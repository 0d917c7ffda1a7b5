"""ZeRO-3 inside the stages of a pipeline: memory of the ranks, and cases beyond the matrix."""

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_pardist import PipelineStrategy
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import quiet_trainer

WIDTH = 8


class Words(Dataset):
    def __init__(self, length=24):
        self.tokens = torch.randint(0, WIDTH, (length, 5), generator=torch.Generator().manual_seed(2))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return self.tokens[index]


class Shares(torch.utils.data.Sampler):
    """Different batch sizes on the data-parallel ranks: five samples on the first one and three on the second."""

    def __init__(self, rank, replicas):
        self.sizes = (5, 3) if replicas == 2 else (8,)
        self.rank = rank

    def __iter__(self):
        for first in range(0, 24, 8):
            start = first + sum(self.sizes[: self.rank])
            yield list(range(start, start + self.sizes[self.rank]))

    def __len__(self):
        return 3


class Block(nn.Module):
    """Returns an argument unchanged, as models do with masks."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden, carried):
        return hidden + self.outer(F.gelu(self.inner(hidden))) * carried.mean((1, 2), keepdim=True), carried


class Tied(pl.LightningModule):
    """Language model whose last stage reads the first one's embedding; a learned input passes through all stages."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.carry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        carried = self.carry(hidden)
        for block in self.blocks:
            hidden, carried = block(hidden, carried)
        return F.linear(self.norm(hidden), self.embedding.weight)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch).transpose(1, 2), batch.roll(-1, 1), reduction="none").mean(1).mean()

    def validation_step(self, batch, batch_idx):
        self.log("loss", F.cross_entropy(self(batch).transpose(1, 2), batch.roll(-1, 1)))

    def on_train_batch_start(self, batch, batch_idx):
        held = getattr(self.trainer.strategy, "held", None)
        self.held = held().parameters if held else 0

    def on_train_epoch_end(self):
        self.sample = self(torch.arange(5)[None])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _train(strategy, devices, trainer_settings=(), uneven=False):
    torch.manual_seed(5)
    trainer = quiet_trainer(strategy=strategy, devices=devices, use_distributed_sampler=False, **dict(trainer_settings))
    kwargs = trainer.strategy.distributed_sampler_kwargs if devices > 1 else {"num_replicas": 1, "rank": 0}
    module = Tied()
    if uneven:
        loader = {"batch_sampler": Shares(kwargs["rank"], kwargs["num_replicas"])}
    else:
        sampler = torch.utils.data.DistributedSampler(Words(), shuffle=False, **kwargs)
        loader = {"batch_size": 8 // kwargs["num_replicas"], "sampler": sampler}
    trainer.fit(module, DataLoader(Words(), **loader))
    # The module is a plain one again, and can be split once more.
    trainer.validate(module, DataLoader(Words(), batch_size=5), verbose=False)
    return {
        "weights": snapshot(module),
        "sample": module.sample.detach(),
        "held": module.held,
        "logged": trainer.callback_metrics,
    }


def _sharded(settings, schedule, **rest):
    return PipelineStrategy(
        pipeline_parallel_size=2,
        num_microbatches=4,
        schedule=schedule,
        data_parallel="zero3",
        data_settings={"min_unit_size_mb": 0, **settings},
        **rest,
    )


def _on_ranks(settings, schedule, rest, kwargs):
    return _train(_sharded(settings, schedule, **rest), 4, **kwargs)


@pytest.mark.push("uneven")
@pytest.mark.parametrize(
    ("settings", "schedule", "rest", "kwargs"),
    [
        ({}, "1f1b", {}, {}),
        ({}, "gpipe", {}, {"uneven": True}),
        pytest.param(
            {},
            "interleaved",
            {"chunks_per_rank": 2},
            {"trainer_settings": {"gradient_clip_val": 0.1}},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"reshard_after_forward": False},
            "gpipe",
            {},
            {"trainer_settings": {"accumulate_grad_batches": 3}},
            marks=pytest.mark.slow,
        ),
        pytest.param({"accumulate": "unsharded"}, "gpipe", {}, {"uneven": True}, marks=pytest.mark.slow),
    ],
    ids=["1f1b", "uneven", "interleaved", "kept", "unsharded-uneven"],
)
def test_as_on_one_process(settings, schedule, rest, kwargs):
    expected = _train("auto", 1, **kwargs)
    results = run_ranks(4, _on_ranks, settings, schedule, rest, kwargs)
    once = 4 * sum(weight.numel() for weight in expected["weights"].values())
    # Both stages hold the embedding.
    assert sum(got["held"] for got in results) <= once + 4 * WIDTH**2
    for got in results:
        assert_close(got["weights"], expected["weights"])
        assert_close({"sample": got["sample"]}, {"sample": expected["sample"]})
        assert_close(got["logged"], expected["logged"])
