"""Local SGD: islands that average every few steps, against one process that trains them in turn."""

import copy

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_pardist import LocalSGDStrategy
from lightning_pardist.axes.local_sgd import LocalSGDAxis
from lightning_pardist.checkpoint.convert import to_file, to_folder
from lightning_pardist.checkpoint.folder import FolderReader
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import BATCH, Data, quiet_trainer

STEPS = 7
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-3),
}
#: Parallelism inside each island, and its number of ranks per island.
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


def _strategy(inside, ranks, sync_every, **further):
    settings, size = INSIDE[inside]
    return LocalSGDStrategy(outer_parallel_size=ranks // size, sync_every=sync_every, **settings, **further)


def _fit(inside, ranks, optimizer, sync_every, further=None, options=None, ckpt_path=None, save_to=None):
    module = _build(optimizer)
    strategy = _strategy(inside, ranks, sync_every, **(further or {}))
    trainer = quiet_trainer(strategy=strategy, devices=ranks, use_distributed_sampler=False, **(options or {}))
    trainer.fit(module, datamodule=Data(_dataset()), ckpt_path=ckpt_path)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    return snapshot(module)


def _simulate(islands, optimizer, sync_every, outer=None, start=0, meetings=()):
    """Simulate in one process: every island's part of each batch in turn, and a mean every ``sync_every`` steps.

    ``outer`` gives learning rate and momentum of DiLoCo's outer step; gradients are averaged before step ``start``.
    """
    models = [_build(optimizer)]
    anchor = [param.detach().clone().requires_grad_() for param in models[0].parameters()]
    outer_step = torch.optim.SGD(anchor, lr=outer[0], momentum=outer[1], nesterov=True) if outer else None
    models += [copy.deepcopy(models[0]) for _ in range(islands - 1)]
    optimizers = [OPTIMIZERS[optimizer](model.parameters()) for model in models]
    x, y = _dataset().tensors
    for step in range(STEPS):
        batch = torch.arange(step * BATCH, (step + 1) * BATCH)
        for island, (model, step_of) in enumerate(zip(models, optimizers, strict=True)):
            mine = batch[island::islands]
            step_of.zero_grad()
            F.mse_loss(model.head(model.layers(x[mine])), y[mine]).backward()
        if step < start:
            _average([[param.grad for param in model.parameters()] for model in models])
        for step_of in optimizers:
            step_of.step()
        if step < start:
            for old, new in zip(anchor, models[0].parameters(), strict=True):
                old.data.copy_(new.data)
        elif (step + 1 - start) % sync_every == 0 or step + 1 == STEPS or step + 1 in meetings:
            _average([list(model.parameters()) for model in models])
            if outer_step is not None:
                for old, new in zip(anchor, models[0].parameters(), strict=True):
                    old.grad = old.detach() - new.detach()
                outer_step.step()
                for model in models:
                    for old, new in zip(anchor, model.parameters(), strict=True):
                        new.data.copy_(old.data)
    return snapshot(models[0])


@torch.no_grad()
def _average(models):
    """Replace the tensors of several models, one list each, by their means."""
    for values in zip(*models, strict=True):
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


DILOCO = {"outer_lr": 0.7, "outer_momentum": 0.9}


@pytest.mark.parametrize(
    ("inside", "ranks", "optimizer", "start"),
    [
        ("ddp", 2, "sgd", 3),
        ("tp", 4, "adamw", 2),
        pytest.param("ddp", 2, "adamw", 0, marks=pytest.mark.slow),
        pytest.param("pp", 4, "adamw", 0, marks=pytest.mark.slow),
    ],
)
def test_diloco(inside, ranks, optimizer, start):
    want = _simulate(ranks // INSIDE[inside][1], optimizer, 2, outer=(0.7, 0.9), start=start)
    for got in run_ranks(ranks, _fit, inside, ranks, optimizer, 2, {**DILOCO, "start_local_step": start}):
        assert_close(got, want)


@pytest.mark.push("zero2-4", "ddp-2")
@pytest.mark.parametrize(("inside", "ranks"), [("ddp", 2), ("zero2", 4), ("zero3", 4)])
def test_post_local_sgd_begins_as_ddp(inside, ranks):
    """Until ``start_local_step``, gradients are averaged and clipped as on one process."""
    want = run_ranks(2, _ddp, "adamw")[0]
    for got in run_ranks(ranks, _fit, inside, ranks, "adamw", 2, {"start_local_step": STEPS}, CLIP):
        assert_close(got, want)


class Counting(Regressor):
    """Mean over unignored samples, whose number differs between islands."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.head(self.layers(x)), (y[:, 0] > 0.8).long(), ignore_index=0)


def _counting(strategy, devices):
    torch.manual_seed(3)
    module = Counting("adamw")
    strategy = LocalSGDStrategy(start_local_step=STEPS) if strategy is None else strategy
    quiet_trainer(strategy=strategy, devices=devices, use_distributed_sampler=False).fit(
        module, datamodule=Data(_dataset())
    )
    return snapshot(module)


def test_losses_are_weighed_over_islands_that_average_gradients():
    want = _counting("auto", 1)
    for got in run_ranks(2, _counting, None, 2):
        assert_close(got, want)


def test_post_local_sgd():
    want = _simulate(2, "adamw", 2, start=3)
    for got in run_ranks(2, _fit, "ddp", 2, "adamw", 2, {"start_local_step": 3}):
        assert_close(got, want)


CLIP = {"gradient_clip_val": 0.1}


def _ddp(optimizer):
    module = _build(optimizer)
    quiet_trainer(strategy="pardist_ddp", devices=2, use_distributed_sampler=False, **CLIP).fit(
        module, datamodule=Data(_dataset())
    )
    return snapshot(module)


def _resumed(inside, ranks, form, folder):
    """Save after three steps, continue in the same run; and resume from the checkpoint."""
    further = {**DILOCO, "checkpoint": form}
    path = f"{folder}/last.ckpt"
    _fit(inside, ranks, "adamw", 2, further, {"max_steps": 3}, save_to=path)
    return _fit(inside, ranks, "adamw", 2, further, ckpt_path=path), path


@pytest.mark.push("ddp-2-*")
@pytest.mark.parametrize(
    ("inside", "ranks", "form"),
    [
        ("ddp", 2, "full"),
        ("ddp", 2, "sharded"),
        ("pp", 4, "full"),
        pytest.param("zero3", 4, "sharded", marks=pytest.mark.slow),
        pytest.param("zero2", 4, "full", marks=pytest.mark.slow),
    ],
)
def test_resume_is_exact(inside, ranks, form, tmp_path):
    """Every island's own optimizer state and the outer momentum are restored."""
    further = {**DILOCO, "checkpoint": form}
    want = run_ranks(ranks, _interrupted, inside, ranks, further)
    got = run_ranks(ranks, _resumed, inside, ranks, form, str(tmp_path))
    for (mine, _), whole in zip(got, want, strict=True):
        assert_close(mine, whole)


def _interrupted(inside, ranks, further):
    """Run the same training uninterrupted, with a synchronisation where the other run saves."""
    module = _build("adamw")

    class Meet(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 2:
                trainer.strategy.axis(LocalSGDAxis).synchronize()

    strategy = _strategy(inside, ranks, 2, **further)
    trainer = quiet_trainer(strategy=strategy, devices=ranks, use_distributed_sampler=False, callbacks=[Meet()])
    trainer.fit(module, datamodule=Data(_dataset()))
    return snapshot(module)


def _other_layouts(folder):
    _fit("ddp", 2, "adamw", 2, DILOCO, {"max_steps": 3}, save_to=f"{folder}/two.ckpt")
    saved = torch.load(f"{folder}/two.ckpt", weights_only=True)
    assert sorted(saved["lightning_pardist"]["islands"]) == [1]
    one = quiet_trainer(strategy="pardist_ddp", devices=2, max_steps=3)
    module = _build("adamw")
    one.fit(module, datamodule=Data(_dataset()), ckpt_path=f"{folder}/two.ckpt")
    weights = snapshot(module)
    assert_close(weights, saved["state_dict"])
    one.save_checkpoint(f"{folder}/ddp.ckpt")
    _fit("ddp", 2, "adamw", 2, DILOCO, ckpt_path=f"{folder}/ddp.ckpt")


def test_other_strategies_open_it_and_it_opens_theirs(tmp_path):
    run_ranks(2, _other_layouts, str(tmp_path))


def test_conversion_keeps_the_islands(tmp_path):
    folder, file, again = (tmp_path / name for name in ("last.ckpt", "file.ckpt", "again"))
    run_ranks(2, _resumed, "ddp", 2, "sharded", str(tmp_path))
    to_file(folder, file)
    to_folder(file, again)
    about = torch.load(file, weights_only=True)["lightning_pardist"]
    momentum = about["tensors"]["diverged.outer.momentum.head.weight"]
    assert momentum.abs().sum() > 0
    read = FolderReader(again)
    assert torch.equal(read.read("diverged.outer.momentum.head.weight"), momentum)
    assert sorted(key for key in read.manifest.tensors if key.startswith("diverged.")) == sorted(about["tensors"])


def _evaluates_apart():
    """Each island validates its own weights, and continues from them."""
    module = _build("sgd")
    strategy = LocalSGDStrategy(sync_every=100, sync_before_validation=False)
    seen = []

    class Watch(pl.Callback):
        def on_validation_start(self, trainer, pl_module):
            seen.append(pl_module.head.weight.detach().clone())

    trainer = quiet_trainer(
        strategy=strategy, devices=2, callbacks=[Watch()], val_check_interval=3, num_sanity_val_steps=0
    )
    trainer.fit(module, DataLoader(_dataset(), batch_size=6), DataLoader(_dataset(), batch_size=6))
    return seen


def test_evaluation_apart():
    first, second = run_ranks(2, _evaluates_apart)
    assert first
    assert not torch.equal(first[0], second[0])


def _by_epoch():
    module = _build("sgd")
    trainer = quiet_trainer(strategy=LocalSGDStrategy(sync_every="epoch"), devices=2, max_epochs=2)
    seen = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            seen.append(pl_module.head.weight.detach().clone())

    trainer.callbacks.append(Watch())
    trainer.fit(module, DataLoader(_dataset(), batch_size=6))
    return seen


def test_once_an_epoch():
    first, second = run_ranks(2, _by_epoch)
    same = [torch.equal(one, other) for one, other in zip(first, second, strict=True)]
    steps = len(same) // 2
    assert same == ([False] * (steps - 1) + [True]) * 2


def _islands_of_data(inside, optimizer, sync_every):
    """Batch ranks of an island are neighbours: its share differs from the simulation's stride."""
    module = _build(optimizer)
    trainer = quiet_trainer(strategy=_strategy(inside, 4, sync_every), devices=4, use_distributed_sampler=False)
    trainer.fit(module, datamodule=Data(_dataset()))
    groups = trainer.strategy.context
    return snapshot(module), groups.batch_group.size(), groups.gradient_group.size()


@pytest.mark.parametrize("inside", ["zero2", "zero3"])
def test_islands_shard_inside(inside):
    """Ranks 0 and 1 are one island, 2 and 3 the other: each combines the strided shares of its two ranks."""
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
            _average([list(model.parameters()) for model in models])
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
    with pytest.raises(ValueError, match="EMAWeightAveraging averages the weights of each island"):
        quiet_trainer(strategy="pardist_local_sgd", devices=2, callbacks=[pl.callbacks.EMAWeightAveraging()]).fit(
            _build("sgd"), DataLoader(_dataset(), batch_size=6)
        )


def test_what_is_refused():
    run_ranks(2, _refused)
    with pytest.raises(ValueError, match="sync_every=0"):
        LocalSGDStrategy(sync_every=0)
    with pytest.raises(ValueError, match="auto, node or a number of islands"):
        LocalSGDStrategy(outer_parallel_size="rack")
    with pytest.raises(ValueError, match="epoch or a number of optimizer steps"):
        LocalSGDStrategy(sync_every="day")
    with pytest.raises(ValueError, match="outer_momentum=1"):
        LocalSGDStrategy(outer_momentum=1.0)
    with pytest.raises(ValueError, match="outer_lr=0"):
        LocalSGDStrategy(outer_lr=0.0)


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
