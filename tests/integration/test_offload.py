"""Offload under the Trainer: parity, resume, and recovery from failed runs."""

import functools
import os

import lightning.pytorch as pl
import pytest
import torch

from lightning_pardist import FSDPStrategy, ZeroStrategy
from lightning_pardist.engines.offload import StateFile
from tests.helpers.models import Classifier, ParamGroups
from tests.helpers.optimizers import Trained
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import BATCH, Data, quiet_trainer, train

WINDOW_MB = 2**-8


def _strategies(folder):
    return [
        "pardist_zero2_offload",
        functools.partial(ZeroStrategy, zero_stage=1, offload=folder, offload_window_mb=WINDOW_MB),
        functools.partial(FSDPStrategy, min_unit_size_mb=0, offload=str(folder), offload_window_mb=WINDOW_MB),
    ]


def _train(strategy, devices, name):
    module_kwargs = {} if name == "param_groups" else {"optimizer": "adamw"}
    return train(strategy, devices, name, module_kwargs, {} if name == "gan" else {"gradient_clip_val": 0.05})


def _columns(folder, names):
    return [_train(strategy, 2, name) for strategy in _strategies(folder) for name in names]


@pytest.mark.slow
def test_same_numbers_as_one_process(tmp_path):
    names = ("gpt", "param_groups", "gan", "awkward")
    wanted = [_train("auto", 1, name) for name in names]
    for rank, results in enumerate(run_ranks(2, _columns, tmp_path, names)):
        for index, got in enumerate(results):
            want = wanted[index % len(names)]
            for part in ("losses", "weights", "metrics", *(("optimizer",) if rank == 0 else ())):
                assert_close(got[part], want[part])
    assert os.listdir(tmp_path) == []


def _fit(strategy, devices, epochs, **kwargs):
    torch.manual_seed(11)
    module = ParamGroups()
    ckpt_path = kwargs.pop("ckpt_path", None)
    trainer = quiet_trainer(
        strategy=strategy() if callable(strategy) else strategy,
        devices=devices,
        use_distributed_sampler=False,
        max_epochs=epochs,
        **kwargs,
    )
    trainer.fit(module, datamodule=Data(module.dataset(BATCH * 3)), ckpt_path=ckpt_path)
    return module, trainer


def _resumed(folder, path):
    found = []
    for index, strategy in enumerate(_strategies(folder)):
        module, trainer = _fit(strategy, 2, 2, ckpt_path=path)
        # Also saved after a run, when the module is unsharded again.
        trainer.save_checkpoint(f"{folder}/{index}.ckpt")
        found.append(snapshot(module))
    return found


def test_checkpoints_are_the_plain_ones(tmp_path):
    _, trainer = _fit("auto", 1, 1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    module, trainer = _fit("auto", 1, 2, ckpt_path=tmp_path / "one.ckpt")
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    wanted = torch.load(tmp_path / "two.ckpt", weights_only=False)["optimizer_states"][0]
    for weights in run_ranks(2, _resumed, tmp_path, tmp_path / "one.ckpt")[0]:
        assert_close(weights, snapshot(module))
    for index in range(len(_strategies(tmp_path))):
        saved = torch.load(tmp_path / f"{index}.ckpt", weights_only=False)["optimizer_states"][0]
        assert [group["fused"] for group in saved["param_groups"]] == [None, None]
        for number, values in wanted["state"].items():
            assert_close(saved["state"][number], values)


def _whole_tensors(folder, wanted):
    """Return by strategy the weights after two epochs, in one run and with a checkpoint in between."""
    found = []
    for form, strategy in zip(("full", "sharded"), _strategies(folder / "state")[1:], strict=True):
        path, weights = str(folder / f"{form}.ckpt"), []
        for epochs, resume in ((2, None), (1, None), (2, path)):
            torch.manual_seed(11)
            module = Trained("Muon and Adam (user's)", schedule=True)
            trainer = quiet_trainer(
                strategy=strategy(checkpoint=form),
                devices=2,
                use_distributed_sampler=False,
                max_epochs=epochs,
                gradient_clip_val=0.5,
                accumulate_grad_batches=2,
            )
            trainer.fit(module, datamodule=Data(module.dataset(BATCH * 4)), ckpt_path=resume)
            if epochs == 1:
                trainer.save_checkpoint(path)
            weights.append(snapshot(module))
        assert_close(weights[0], wanted)
        found.append((weights[0], weights[2]))
    return found


def test_optimizers_of_whole_tensors_go_on_bit_for_bit(tmp_path):
    torch.manual_seed(11)
    module = Trained("Muon and Adam (user's)", schedule=True)
    trainer = quiet_trainer(max_epochs=2, gradient_clip_val=0.5, accumulate_grad_batches=2, devices=1)
    trainer.fit(module, datamodule=Data(module.dataset(BATCH * 4)))
    for of_rank in run_ranks(2, _whole_tensors, tmp_path, snapshot(module)):
        for whole, resumed in of_rank:
            assert not [name for name, value in whole.items() if not torch.equal(resumed[name], value)]
    assert os.listdir(tmp_path / "state") == []


def _out_of_space(folder):
    """The disk is full when training resumes: the previous run's checkpoint must survive."""
    callback = pl.callbacks.ModelCheckpoint(dirpath=folder / "saved", save_last=True)
    kwargs = {"enable_checkpointing": True, "callbacks": [callback]}
    _fit(FSDPStrategy(offload=folder / "state"), 2, 1, **kwargs)
    reserve, StateFile.reserve = StateFile.reserve, lambda self, nbytes: reserve(self, nbytes + 2**60)
    try:
        with pytest.raises(RuntimeError, match=r"has no room for this rank's optimizer state|rank"):
            _fit(FSDPStrategy(offload=folder / "state"), 2, 2, ckpt_path=callback.last_model_path, **kwargs)
    finally:
        StateFile.reserve = reserve
    assert os.listdir(folder / "state") == []
    return snapshot(_fit("pardist_zero3_offload", 2, 2, ckpt_path=callback.last_model_path)[0])


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path):
    module, _ = _fit("auto", 1, 2)
    for weights in run_ranks(2, _out_of_space, tmp_path):
        assert_close(weights, snapshot(module))


def test_settings(tmp_path):
    for value, window, message in (
        ("", 1.0, "offload='' is unknown"),
        ("cpu", 0, "offload_window_mb=0 is not positive"),
    ):
        for strategy in (ZeroStrategy, FSDPStrategy):
            with pytest.raises(ValueError, match=message):
                strategy(offload=value, offload_window_mb=window)
    (tmp_path / "file").touch()
    trainer = quiet_trainer(strategy=ZeroStrategy(offload=tmp_path / "file"), devices=1)
    with pytest.raises(ValueError, match="cannot be written to"):
        trainer.fit(Classifier(), torch.utils.data.DataLoader(Classifier.dataset(4)))
    _fit("pardist_zero3_nvme", 1, 1, default_root_dir=tmp_path / "new")
    assert os.listdir(tmp_path / "new") == []
