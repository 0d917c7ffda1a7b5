"""Checkpoints written by a Trainer: top k, last, every n steps, removal, asynchronous saves, and failures."""

import os
import time

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.utils.data import DataLoader

from lightning_pardist import (
    DamagedCheckpointError,
    DDPStrategy,
    FSDPStrategy,
    PardistCheckpointIO,
    PeerFailedError,
    ZeroStrategy,
)
from lightning_pardist.checkpoint.folder import FolderReader
from lightning_pardist.checkpoint.full_file import load_file, verify_file
from lightning_pardist.checkpoint.manifest import MANIFEST, verify_files
from tests.helpers.models import MODULES, Classifier
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import quiet_trainer

STRATEGIES = {"ddp": DDPStrategy, "zero2": ZeroStrategy, "fsdp": FSDPStrategy}
FORMS = [("full", False), ("full", True), ("sharded", False), ("sharded", True)]


class Scored(Classifier):
    """Classifier that logs a score for ModelCheckpoint to monitor: first better, then worse."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("score", float([3, 1, 2, 5, 4, 0][self.global_step % 6]), on_step=True)
        return loss


def _fit(strategy, world, *callbacks, steps=6, resume=None, plugins=None, **settings):
    module = Scored()
    loader = DataLoader(module.dataset(8 * 6), batch_size=8 // world)
    trainer = quiet_trainer(
        strategy=STRATEGIES[strategy](**settings),
        devices=world,
        callbacks=list(callbacks),
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        plugins=plugins,
        max_epochs=-1,
        max_steps=steps,
    )
    trainer.fit(module, loader, ckpt_path=resume)
    return trainer, module


def _intact(path):
    if os.path.isdir(path):
        reader = FolderReader(path)
        verify_files(path, reader.manifest)
        return reader.trainer_state()
    verify_file(path)
    return load_file(path)


def _with_model_checkpoint(strategy, form, async_save, folder):
    world = dist.get_world_size()
    top = ModelCheckpoint(f"{folder}/top", monitor="score", save_top_k=2, every_n_train_steps=1, filename="{step}")
    last = ModelCheckpoint(f"{folder}/last", save_last=True, every_n_train_steps=2, filename="{step}")
    trainer, _ = _fit(strategy, world, top, last, checkpoint=form, async_save=async_save)
    dist.barrier()
    assert sorted(os.listdir(f"{folder}/top")) == ["step=2.ckpt", "step=6.ckpt"]
    assert sorted(os.listdir(f"{folder}/last")) == ["last.ckpt", "step=6.ckpt"]
    assert os.path.isdir(f"{folder}/last/last.ckpt") == (form == "sharded")
    for name in ("top/step=2", "top/step=6", "last/last"):
        assert _intact(f"{folder}/{name}.ckpt")["global_step"] == (2 if name.endswith("2") else 6)
    assert top.best_model_path.endswith("step=6.ckpt")
    again = ModelCheckpoint(f"{folder}/last", save_last=True, every_n_train_steps=2, filename="{step}")
    trainer, _ = _fit(strategy, world, again, steps=8, resume="last", checkpoint=form, async_save=async_save)
    assert trainer.global_step == 8
    dist.barrier()
    assert _intact(f"{folder}/last/last.ckpt")["global_step"] == 8
    module = Scored()
    trainer = quiet_trainer(strategy=STRATEGIES[strategy](), devices=world)
    trainer.validate(module, DataLoader(module.dataset(8), batch_size=4), ckpt_path=top.best_model_path)


@pytest.mark.push("fsdp-sharded-True", "fsdp-full-True")
@pytest.mark.parametrize(("form", "async_save"), FORMS)
@pytest.mark.parametrize("strategy", [pytest.param("zero2", marks=pytest.mark.slow), "fsdp"])
def test_model_checkpoint(strategy, form, async_save, tmp_path):
    run_ranks(2, _with_model_checkpoint, strategy, form, async_save, str(tmp_path))


class Slow(PardistCheckpointIO):
    """Slow checkpoint writer."""

    seconds = 0.3

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        time.sleep(self.seconds)
        super().save_checkpoint(checkpoint, path, storage_options)


def _not_stalled(folder):
    trainer, _ = _fit(
        "ddp", 2, ModelCheckpoint(folder, every_n_train_steps=6, filename="{step}"), plugins=[Slow()], async_save=True
    )
    return trainer.strategy.checkpoints.reports


@pytest.mark.alone
def test_training_does_not_wait_for_a_background_save(tmp_path):
    for reports in run_ranks(2, _not_stalled, str(tmp_path)):
        assert reports[0].write_s >= 0.3
        assert reports[0].stall_s < 0.15


class Broken(PardistCheckpointIO):
    """Writer whose disk is full from the second checkpoint on."""

    saved = 0

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.saved += 1
        if self.saved > 1:
            raise OSError(28, "No space left on device")
        super().save_checkpoint(checkpoint, path, storage_options)


def _full_disk(async_save, folder):
    callback = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=1, filename="{step}")
    with pytest.raises((OSError, RuntimeError), match="No space left"):
        _fit("ddp", 2, callback, plugins=[Broken()], async_save=async_save)
    dist.barrier()
    assert os.listdir(folder) == ["step=1.ckpt"]
    assert _intact(f"{folder}/step=1.ckpt")["global_step"] == 1


@pytest.mark.parametrize("async_save", [False, True])
def test_a_failing_save_reaches_every_rank_and_the_one_before_stays(async_save, tmp_path):
    run_ranks(2, _full_disk, async_save, str(tmp_path))


class Raises(pl.Callback):
    def on_train_batch_end(self, trainer, *unused) -> None:
        if trainer.global_step == 3:
            raise KeyError("the user's own mistake")


def _after_an_exception(folder):
    callback = ModelCheckpoint(folder, every_n_train_steps=2, filename="{step}")
    with pytest.raises((KeyError, PeerFailedError), match="own mistake"):
        _fit("zero2", 2, callback, Raises(), checkpoint="sharded", async_save=True)
    dist.barrier()
    assert _intact(f"{folder}/step=2.ckpt")["global_step"] == 2


def test_a_save_in_the_background_is_completed_after_an_exception(tmp_path):
    run_ranks(2, _after_an_exception, str(tmp_path))


def _damaged(path):
    module = Scored()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    trainer = quiet_trainer(strategy=ZeroStrategy(), devices=2, max_steps=8)
    with pytest.raises((DamagedCheckpointError, PeerFailedError), match=r"damaged: (__1_0\.distcp|manifest\.json)"):
        trainer.fit(module, DataLoader(module.dataset(48), batch_size=4), ckpt_path=path)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def _save_folder(path):
    _fit("zero2", 2, checkpoint="sharded")[0].save_checkpoint(path)


def test_a_damaged_folder_is_refused_on_every_rank(tmp_path):
    path = tmp_path / "a.ckpt"
    run_ranks(2, _save_folder, str(path))
    shard = path / "__1_0.distcp"
    content = shard.read_bytes()
    shard.write_bytes(content[:100] + bytes([content[100] ^ 4]) + content[101:])
    run_ranks(2, _damaged, str(path))
    shard.write_bytes(content)
    manifest = (path / MANIFEST).read_bytes()
    (path / MANIFEST).write_bytes(manifest.replace(b"float32", b"float64", 1))
    run_ranks(2, _damaged, str(path))


def _from_lightnings_ddp(path):
    module = Scored()
    loader = DataLoader(module.dataset(48), batch_size=4)
    theirs = quiet_trainer(strategy="ddp", devices=2, max_epochs=1)
    theirs.fit(module, loader)
    theirs.save_checkpoint(path)
    expected = {name: value.clone() for name, value in module.state_dict().items()}
    for name, strategy in STRATEGIES.items():
        fresh = Scored()
        ours = quiet_trainer(strategy=strategy(), devices=2, max_epochs=1)
        ours.fit(fresh, loader, ckpt_path=path)
        assert ours.global_step == theirs.global_step
        for key, value in fresh.state_dict().items():
            assert torch.equal(value, expected[key]), (name, key)


def test_checkpoints_of_lightnings_ddp(tmp_path):
    run_ranks(2, _from_lightnings_ddp, str(tmp_path / "a.ckpt"))


@pytest.mark.parametrize(
    ("settings", "plugins", "callback", "reason"),
    [
        ({"checkpoint": "sharded"}, [AsyncCheckpointIO()], {}, 'checkpoint="sharded" writes its own folder'),
        ({"async_save": True}, [AsyncCheckpointIO()], {}, "both save in the background"),
        ({"async_save": True}, None, {"save_last": "link"}, "save_last=True"),
    ],
)
def test_combinations_that_cannot_be_right(settings, plugins, callback, reason, tmp_path):
    with pytest.raises(ValueError, match=reason):
        _fit("ddp", 1, ModelCheckpoint(tmp_path, **callback), plugins=plugins, **settings)


def test_an_unknown_form():
    with pytest.raises(ValueError, match="checkpoint='folder' is unknown"):
        DDPStrategy(checkpoint="folder")


def test_a_remote_folder():
    module = MODULES["classifier"]()
    loader = DataLoader(module.dataset(8), batch_size=4)
    trainer = quiet_trainer(strategy=DDPStrategy(checkpoint="sharded"), devices=1, max_epochs=1)
    trainer.fit(module, loader)
    trainer.save_checkpoint("memory://somewhere/a.ckpt")
    fresh = MODULES["classifier"]()
    trainer = quiet_trainer(strategy=ZeroStrategy(), devices=1, max_epochs=1)
    trainer.fit(fresh, loader, ckpt_path="memory://somewhere/a.ckpt")
    for key, value in module.state_dict().items():
        assert torch.equal(value, fresh.state_dict()[key])


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
def test_a_save_after_a_run_of_one_rank(strategy, tmp_path):
    trainer, module = _fit(strategy, 1, steps=2)
    assert not dist.is_initialized()
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    saved = torch.load(tmp_path / "after.ckpt", weights_only=True)
    torch.testing.assert_close(saved["state_dict"], module.state_dict())
    (state,) = saved["optimizer_states"]
    momentum = [state["state"][index]["momentum_buffer"].shape for index in state["param_groups"][0]["params"]]
    assert momentum == [param.shape for param in module.parameters()]
