"""Islands that average every few steps, against one process that trains them one after the other."""

import copy

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_pardist import LocalSGDStrategy
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import BATCH, Data, quiet_trainer

STEPS = 7
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-3),
}
#: What each island does, and how many ranks it has for that.
INSIDE = {
    "ddp": ({}, 1),
    "zero2": ({"data_parallel": "zero2"}, 2),
    "zero3": ({"data_parallel": "zero3", "data_settings": {"min_unit_size_mb": 0}}, 2),
    "tp": ({"tensor_parallel_size": 2}, 2),
    "pp": ({"pipeline_parallel_size": 2}, 2),
}


class Regressor(pl.LightningModule):
    def __init__(self, optimizer="sgd"):
        super().__init__()
        self.optimizer = optimizer
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(8, 2)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self.head(self.layers(x)), y)

    def validation_step(self, batch, batch_idx):
        self.log("val", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return OPTIMIZERS[self.optimizer](self.parameters())


def _dataset():
    draw = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(BATCH * STEPS, 8, generator=draw), torch.randn(BATCH * STEPS, 2, generator=draw))


def _build(optimizer):
    torch.manual_seed(3)
    return Regressor(optimizer)


def _strategy(inside, ranks, sync_every):
    settings, size = INSIDE[inside]
    return LocalSGDStrategy(outer_parallel_size=ranks // size, sync_every=sync_every, **settings)


def _fit(inside, ranks, optimizer, sync_every):
    module = _build(optimizer)
    trainer = quiet_trainer(strategy=_strategy(inside, ranks, sync_every), devices=ranks, use_distributed_sampler=False)
    trainer.fit(module, datamodule=Data(_dataset()))
    return snapshot(module)


def _simulate(islands, optimizer, sync_every):
    """One process: every island's share of each batch in turn, a mean of the parameters every ``sync_every`` steps."""
    models = [_build(optimizer)]
    models += [copy.deepcopy(models[0]) for _ in range(islands - 1)]
    optimizers = [OPTIMIZERS[optimizer](model.parameters()) for model in models]
    x, y = _dataset().tensors
    for step in range(STEPS):
        batch = torch.arange(step * BATCH, (step + 1) * BATCH)
        for island, (model, step_of) in enumerate(zip(models, optimizers, strict=True)):
            mine = batch[island::islands]
            step_of.zero_grad()
            F.mse_loss(model.head(model.layers(x[mine])), y[mine]).backward()
            step_of.step()
        if (step + 1) % sync_every == 0 or step + 1 == STEPS:
            _average(models)
    return snapshot(models[0])


@torch.no_grad()
def _average(models):
    for values in zip(*(model.parameters() for model in models), strict=True):
        mean = torch.stack([value.detach() for value in values]).mean(0)
        for value in values:
            value.copy_(mean)


@pytest.mark.parametrize(
    ("inside", "ranks", "optimizer", "sync_every"),
    [
        ("ddp", 2, "sgd", 3),
        ("ddp", 4, "adamw", 2),
        ("tp", 4, "adamw", 3),
        ("pp", 4, "sgd", 3),
        pytest.param("pp", 4, "adamw", 2, marks=pytest.mark.slow),
    ],
)
def test_as_islands_one_after_the_other(inside, ranks, optimizer, sync_every):
    want = _simulate(ranks // INSIDE[inside][1], optimizer, sync_every)
    for got in run_ranks(ranks, _fit, inside, ranks, optimizer, sync_every):
        assert_close(got, want)


def _islands_of_data(inside, optimizer, sync_every):
    """Batch ranks of an island are neighbours, so that its share differs from the simulation's stride."""
    module = _build(optimizer)
    trainer = quiet_trainer(strategy=_strategy(inside, 4, sync_every), devices=4, use_distributed_sampler=False)
    trainer.fit(module, datamodule=Data(_dataset()))
    groups = trainer.strategy.context
    return snapshot(module), groups.batch_group.size(), groups.gradient_group.size()


@pytest.mark.parametrize("inside", ["zero2", "zero3"])
def test_islands_shard_inside(inside):
    """Rank 0 and 1 are an island, 2 and 3 the other: the same as four samples at a stride, two by two."""
    models = [_build("adamw")]
    models.append(copy.deepcopy(models[0]))
    optimizers = [OPTIMIZERS["adamw"](model.parameters()) for model in models]
    x, y = _dataset().tensors
    for step in range(STEPS):
        batch = torch.arange(step * BATCH, (step + 1) * BATCH)
        for island, (model, step_of) in enumerate(zip(models, optimizers, strict=True)):
            mine = torch.cat([batch[rank::4] for rank in (2 * island, 2 * island + 1)])
            step_of.zero_grad()
            F.mse_loss(model.head(model.layers(x[mine])), y[mine]).backward()
            step_of.step()
        if (step + 1) % 3 == 0 or step + 1 == STEPS:
            _average(models)
    want = snapshot(models[0])
    for got, batch_ranks, gradient_ranks in run_ranks(4, _islands_of_data, inside, "adamw", 3):
        assert (batch_ranks, gradient_ranks) == (4, 2)
        assert_close(got, want)


def _save_in_the_middle(path):
    module = _build("sgd")
    checkpoint = pl.callbacks.ModelCheckpoint(dirpath=path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    seen = []

    class Watch(pl.Callback):
        def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
            seen.append([param.detach().clone() for param in pl_module.parameters()])

    trainer = quiet_trainer(
        strategy=LocalSGDStrategy(sync_every=100),
        devices=2,
        callbacks=[checkpoint, Watch()],
        enable_checkpointing=True,
        val_check_interval=3,
        num_sanity_val_steps=0,
    )
    loader = DataLoader(_dataset(), batch_size=6)
    trainer.fit(module, loader, loader)
    return seen


def test_validation_and_checkpoints_see_the_mean(tmp_path):
    first, second = run_ranks(2, _save_in_the_middle, str(tmp_path))
    for mine, other in zip(first, second, strict=True):
        for one, two in zip(mine, other, strict=True):
            assert torch.equal(one, two)
    saved = torch.load(tmp_path / "step=2.ckpt", weights_only=False)
    plain = _build("sgd")
    plain.load_state_dict(saved["state_dict"])
    assert not any(torch.equal(a, b) for a, b in zip(plain.parameters(), _build("sgd").parameters(), strict=True))


def _refused():
    with pytest.raises(ValueError, match="EMAWeightAveraging averages the weights of every island"):
        quiet_trainer(strategy="pardist_local_sgd", devices=2, callbacks=[pl.callbacks.EMAWeightAveraging()]).fit(
            _build("sgd"), DataLoader(_dataset(), batch_size=6)
        )


def test_what_is_refused():
    run_ranks(2, _refused)
    with pytest.raises(ValueError, match="sync_every=0"):
        LocalSGDStrategy(sync_every=0)
    with pytest.raises(ValueError, match="auto, node or a number of islands"):
        LocalSGDStrategy(outer_parallel_size="rack")


def test_islands_are_nodes_where_there_are_several():
    def degrees(num_nodes, ranks_per_node, **settings):
        strategy = LocalSGDStrategy(**settings)
        strategy.num_nodes, strategy.parallel_devices = num_nodes, [torch.device("cpu")] * ranks_per_node
        return strategy.resolve_dims(num_nodes * ranks_per_node).layout

    assert degrees(1, 4) == {"outer_parallel": 4}
    assert degrees(2, 4) == {"outer_parallel": 2, "data_replicate": 4}
    assert degrees(1, 4, tensor_parallel_size=2) == {"outer_parallel": 2, "tensor_parallel": 2}
    sizes = {"outer_parallel_size": 2, "data_parallel": "zero3"}
    assert degrees(1, 4, **sizes) == {"outer_parallel": 2, "data_shard": 2}
