"""Common user patterns with checkpoints, under strategies that split the module, and afterwards without any."""

import os
from unittest.mock import Mock, patch

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanAbsoluteError

from lightning_pardist import (
    DDPStrategy,
    FSDPStrategy,
    PipelineStrategy,
    TensorParallelStrategy,
    ZeroStrategy,
    load_from_checkpoint,
)
from lightning_pardist.runtime.watchdog import PeerFailedError
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import quiet_trainer

STRATEGIES = {
    "zero2": ZeroStrategy,
    "zero3": lambda **kwargs: FSDPStrategy(min_unit_size_mb=0, **kwargs),
    "tp": TensorParallelStrategy,
    "pp": PipelineStrategy,
}
STEPS = 6


class Habits(pl.LightningModule):
    """Module with hyperparameters, custom state in checkpoints, and a frozen part that is excluded from them."""

    def __init__(self, width: int = 8, frozen: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.head = nn.Linear(width, 1)
        if frozen:
            self.extra = nn.Linear(4, 1).requires_grad_(False)
        self.seen = None
        self.saves = 0

    def forward(self, x):
        out = self.head(self.net(x))
        return out + self.extra(x) if self.hparams.frozen else out

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.mse_loss(self(batch[0]), batch[1]))

    def on_save_checkpoint(self, checkpoint):
        self.saves += 1
        checkpoint["notes"] = {"saves": self.saves, "names": list(checkpoint["state_dict"])}
        for name in [name for name in checkpoint["state_dict"] if name.startswith("extra.")]:
            del checkpoint["state_dict"][name]

    def on_load_checkpoint(self, checkpoint):
        self.seen = checkpoint["notes"] | {"keys": set(checkpoint)}

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Counter(pl.Callback):
    """Callback with state."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, *unused) -> None:
        self.batches += 1

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state) -> None:
        self.batches = state["batches"]


def _loader(strategy="one"):
    """Return a loader whose global batch is 8 samples."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(8 * STEPS, 4, generator=generator)
    return DataLoader(
        TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4 if strategy.startswith("zero") else 8
    )


def _fit(strategy, world, callbacks, *, module=None, resume=None, epochs=1, form="full"):
    torch.manual_seed(3)
    module = module or Habits()
    counter = Counter()
    trainer = quiet_trainer(
        strategy=STRATEGIES[strategy](checkpoint=form),
        devices=world,
        callbacks=[counter, *callbacks],
        enable_checkpointing=bool(callbacks),
        val_check_interval=2,
        num_sanity_val_steps=0,
        max_epochs=epochs,
    )
    trainer.fit(module, _loader(strategy), _loader(strategy), ckpt_path=resume)
    return trainer, module, counter


def _through_a_trainer(strategy, folder):
    world = dist.get_world_size()
    best = ModelCheckpoint(f"{folder}/best", monitor="val_loss", save_top_k=2, save_last=True, filename="{step}")
    light = ModelCheckpoint(f"{folder}/light", every_n_train_steps=2, save_weights_only=True, filename="{step}")
    trainer, module, counter = _fit(strategy, world, [best, light])
    dist.barrier()
    assert sorted(os.listdir(f"{folder}/best")) == ["last.ckpt", "step=4.ckpt", "step=6.ckpt"]
    assert os.listdir(f"{folder}/light") == ["step=6.ckpt"]
    assert counter.batches == STEPS
    expected = best.best_model_score.item()
    for which in ("best", "last", best.best_model_path):
        found = trainer.validate(module, _loader(strategy), ckpt_path=which, verbose=False)[0]["val_loss"]
        assert found == pytest.approx(expected, rel=1e-5)
    again = ModelCheckpoint(f"{folder}/best", monitor="val_loss", save_top_k=2, save_last=True, filename="{step}")
    trainer, module, counter = _fit(strategy, world, [again], resume="last", epochs=2)
    assert (trainer.global_step, counter.batches, trainer.current_epoch) == (2 * STEPS, 2 * STEPS, 2)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.02 / 4
    assert module.seen["names"] == [name for name, _ in Habits().named_parameters()]
    assert "lightning_pardist" not in module.seen["keys"]
    # After an evaluation, for which the module was split again.
    trainer.validate(module, _loader(strategy), verbose=False)
    trainer.save_checkpoint(f"{folder}/after.ckpt")
    (saved,) = torch.load(f"{folder}/after.ckpt", weights_only=True)["optimizer_states"]
    moments = {number: state["exp_avg"].shape for number, state in saved["state"].items()}
    assert moments == {number: param.shape for number, param in enumerate(Habits().parameters())}
    # Weights only: a new run starts from them.
    module = Habits()
    module.on_load_checkpoint = lambda checkpoint: None
    trainer = quiet_trainer(strategy=STRATEGIES[strategy](), devices=world)
    found = trainer.validate(module, _loader(strategy), ckpt_path=f"{folder}/light/step=6.ckpt", verbose=False)
    assert found[0]["val_loss"] == pytest.approx(expected, rel=1e-5)
    return expected, again.best_model_path


@pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=() if name == "pp" else pytest.mark.slow) for name in STRATEGIES]
)
def test_through_a_trainer_and_afterwards_without(strategy, tmp_path):
    expected, best = run_ranks(2, _through_a_trainer, strategy, str(tmp_path))[0]
    inputs, targets = _loader().dataset.tensors
    module = Habits.load_from_checkpoint(tmp_path / "light" / "step=6.ckpt", width=8)
    assert F.mse_loss(module(inputs), targets).item() == pytest.approx(expected, rel=1e-5)
    content = torch.load(best, weights_only=True)
    assert content["notes"]["saves"] > 1
    assert content["callbacks"]["Counter"]["batches"] > STEPS


def _not_strict(strategy, folder, form):
    world = dist.get_world_size()
    path = f"{folder}/a.ckpt"
    trainer, _, _ = _fit(strategy, world, [], module=Habits(frozen=True), form=form)
    trainer.save_checkpoint(path)
    module = Habits(frozen=True)
    with torch.no_grad():
        module.extra.weight.fill_(7.0)
    trainer = quiet_trainer(strategy=STRATEGIES[strategy](), devices=world, max_epochs=2)
    with pytest.raises(Exception, match=r"extra\.(weight|bias)"):
        trainer.fit(Habits(frozen=True), _loader(strategy), ckpt_path=path)
    module.strict_loading = False
    trainer = quiet_trainer(strategy=STRATEGIES[strategy](), devices=world, max_epochs=2)
    trainer.fit(module, _loader(strategy), ckpt_path=path)
    assert trainer.global_step == 2 * STEPS
    state = trainer.strategy.lightning_module_state_dict()
    if trainer.is_global_zero:
        assert (state["extra.weight"] == 7.0).all()


@pytest.mark.push("pp-sharded", "tp-full")
@pytest.mark.parametrize(
    ("strategy", "form"), [("zero2", "sharded"), ("zero3", "full"), ("tp", "full"), ("pp", "sharded")]
)
def test_without_all_names(strategy, form, tmp_path):
    run_ranks(2, _not_strict, strategy, str(tmp_path), form)
    module = load_from_checkpoint(Habits, tmp_path / "a.ckpt", strict=False)
    assert module.hparams.frozen


def _url(strategy, folder):
    # Passed as ModelCheckpoint's dirpath, Lightning would treat the URL as a name in the working folder.
    path = f"file://{folder}/a.ckpt"
    trainer, _, _ = _fit(strategy, dist.get_world_size(), [])
    trainer.save_checkpoint(path)
    trainer, _, _ = _fit(strategy, dist.get_world_size(), [], resume=path, epochs=2)
    assert trainer.global_step == 2 * STEPS
    # A path that not even root can write to.
    with pytest.raises((OSError, RuntimeError), match=r"/proc"):
        trainer.save_checkpoint("/proc/nobody/a.ckpt")
    trainer.save_checkpoint(f"{folder}/b.ckpt")


@pytest.mark.parametrize("strategy", ["zero3", "pp"])
def test_urls_and_places_that_cannot_be_written(strategy, tmp_path):
    run_ranks(2, _url, strategy, str(tmp_path))


class SelfSharded(Habits):
    def configure_optimizers(self):
        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.Adam, lr=0.02)


def _self_sharded(folder):
    path = f"{folder}/a.ckpt"
    states = []
    for epochs in (1, 2):
        module = SelfSharded()
        trainer = quiet_trainer(strategy=DDPStrategy(), devices=2, max_epochs=epochs, use_distributed_sampler=False)
        trainer.fit(module, _loader("zero"), ckpt_path=path if epochs == 2 else None)
        trainer.save_checkpoint(path)
        dist.barrier()
        states.append(torch.load(path, weights_only=True)["optimizer_states"][0]["state"])
        dist.barrier()
    for number, first in states[0].items():
        assert states[1][number]["step"] == 2 * first["step"] == 2 * len(_loader("zero"))
    with pytest.raises((ValueError, PeerFailedError), match=r'ZeroRedundancyOptimizer shards .* checkpoint="sharded"'):
        quiet_trainer(strategy=DDPStrategy(checkpoint="sharded"), devices=2).fit(SelfSharded(), _loader("zero"))


def test_an_optimizer_that_shards_its_own_state(tmp_path):
    run_ranks(2, _self_sharded, str(tmp_path))


@pytest.mark.parametrize("resume", ["always", "never"])
def test_a_save_checkpoint_of_the_users_own_stays(tmp_path, resume):
    strategy = DDPStrategy(resume=resume)
    trainer = quiet_trainer(strategy=strategy, devices=1, default_root_dir=tmp_path, limit_train_batches=1)
    # ModelCheckpoint calls this when it is asked for a name before the run.
    assert strategy.reduce_boolean_decision(True)
    assert not strategy.reduce_boolean_decision(False)
    own = trainer.save_checkpoint = Mock()
    trainer.fit(BoringModel())
    assert trainer.save_checkpoint is own


def test_a_run_saved_where_validation_is_due_counts_on_as_without_a_break(tmp_path):
    def fit(folder, **kwargs):
        saved = ModelCheckpoint(dirpath=folder, every_n_train_steps=2, save_top_k=-1)
        limits = {"limit_train_batches": 4, "limit_val_batches": 1, "val_check_interval": 2, "max_epochs": 2}
        trainer = quiet_trainer(
            strategy="pardist_ddp", devices=1, callbacks=[saved], enable_checkpointing=True, **limits
        )
        trainer.fit(BoringModel(), **kwargs)
        return [
            torch.load(folder / name, weights_only=False)["loops"]["fit_loop"]
            for name in ("epoch=0-step=4.ckpt", "epoch=1-step=6.ckpt")
        ]

    whole = fit(tmp_path / "whole")
    for found, expected in zip(
        fit(tmp_path / "rest", ckpt_path=tmp_path / "whole/epoch=0-step=2.ckpt"), whole, strict=True
    ):
        assert found["epoch_loop.state_dict"] == expected["epoch_loop.state_dict"]
        assert found["epoch_loop.batch_progress"] == expected["epoch_loop.batch_progress"]
        assert found["epoch_loop.val_loop.batch_progress"] == expected["epoch_loop.val_loop.batch_progress"]


def _without_optimizer_states(strategy, file):
    with patch("lightning_pardist.trainer.state_dicts.rank_zero_warn") as warn:
        trainer, _, _ = _fit(strategy, dist.get_world_size(), [], resume=file, epochs=2)
    assert "The checkpoint holds no optimizer state" in warn.call_args.args[0]
    assert trainer.global_step == 2 * STEPS
    assert {int(state["step"]) for state in trainer.optimizers[0].state.values()} == {STEPS}


def test_a_checkpoint_stripped_of_optimizer_states(tmp_path):
    trainer, _, _ = _fit("pp", 1, [])
    trainer.save_checkpoint(tmp_path / "whole.ckpt")
    state = torch.load(tmp_path / "whole.ckpt", weights_only=False)
    torch.save(state | {"optimizer_states": [], "lr_schedulers": []}, tmp_path / "stripped.ckpt")
    for strategy in ("zero2", "zero3", "pp"):
        run_ranks(2, _without_optimizer_states, strategy, str(tmp_path / "stripped.ckpt"))


class OwnIO(TorchCheckpointIO):
    """Plugin that writes with ``torch.save``, as darts has one."""


class WithMetric(Habits):
    """Saves a live metric, as darts does."""

    def __init__(self):
        super().__init__()
        self.error = MeanAbsoluteError()

    def training_step(self, batch, batch_idx):
        out = self(batch[0])
        self.error.update(out, batch[1])
        return F.mse_loss(out, batch[1])

    def on_save_checkpoint(self, checkpoint):
        checkpoint["error"] = self.error


def _saves_metric(strategy, path):
    module = WithMetric()
    trainer = quiet_trainer(strategy=STRATEGIES[strategy](), devices=2, plugins=[OwnIO()])
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(8, 4), torch.randn(8, 1)), batch_size=4))
    trainer.save_checkpoint(path)
    return float(module.error.compute())


@pytest.mark.parametrize("strategy", ["zero3", "tp", "pp"])
def test_metrics_are_saved_by_the_users_checkpoint_io(strategy, tmp_path):
    errors = run_ranks(2, _saves_metric, strategy, tmp_path / "last.ckpt")
    assert errors[0] == pytest.approx(errors[1])
    assert isinstance(torch.load(tmp_path / "last.ckpt", weights_only=False)["error"], MeanAbsoluteError)
