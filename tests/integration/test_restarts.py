"""A fit that is stopped by a signal, and its resumption, in one process."""

import os
import runpy
import signal
from collections import Counter

import lightning.pytorch as pl
import pytest
import torch

from lightning_pardist import DDPStrategy, SLURMEnvironment
from lightning_pardist.runtime import job_counts
from lightning_pardist.trainer import auto_resume
from tests.helpers.parity import snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import quiet_trainer
from tests.helpers.scripts import ROOT

pytestmark = pytest.mark.alone

SCRIPT = runpy.run_path(str(ROOT / "tests" / "scripts" / "cluster_train.py"))


class SignalAt(pl.Callback):
    def __init__(self, number, step):
        self.number, self.step = number, step

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == self.step:
            os.kill(os.getpid(), self.number)


class SeesSignal(pl.Callback):
    def __init__(self):
        self.seen = None

    def on_exception(self, trainer, module, exception):
        self.seen = trainer.received_sigterm


def _fit(folder, monkeypatch, *, callbacks=(), resume="always", environment=None, **kwargs):
    # Emulate separate processes.
    monkeypatch.setattr(job_counts, "_counts", Counter())
    torch.manual_seed(3)
    module = SCRIPT["Module"](0, 0)
    trainer = quiet_trainer(
        strategy=DDPStrategy(resume=resume, cluster_environment=environment),
        devices=1,
        max_epochs=2,
        default_root_dir=folder,
        callbacks=list(callbacks),
        use_distributed_sampler=False,
        **kwargs,
    )
    trainer.fit(module, SCRIPT["Data"](96))
    return trainer, snapshot(module)


def _equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.push("3-1", "2-2")
@pytest.mark.parametrize(("step", "accumulate"), [(3, 1), (7, 1), (8, 1), (2, 2)])
def test_sigterm_stops_at_a_boundary_and_the_next_start_goes_on(tmp_path, monkeypatch, step, accumulate):
    given = {"accumulate_grad_batches": accumulate}
    _, wanted = _fit(tmp_path / "whole", monkeypatch, **given)
    folder = tmp_path / "stopped"
    before, sees = signal.getsignal(signal.SIGTERM), SeesSignal()
    with pytest.raises(SystemExit) as stopped:
        _fit(folder, monkeypatch, callbacks=[SignalAt(signal.SIGTERM, step), sees], **given)
    assert stopped.value.code == 143
    assert sees.seen
    assert signal.getsignal(signal.SIGTERM) is before
    (checkpoint,) = folder.rglob("stopped.ckpt")
    assert torch.load(checkpoint, weights_only=False)["global_step"] == step + 1
    trainer, weights = _fit(folder, monkeypatch, **given)
    assert trainer.global_step == 16 // accumulate
    assert _equal(weights, wanted)
    assert not list(folder.rglob("*.ckpt")), "what the stop left is of no use any more"


def test_damaged_checkpoint_is_passed_over(tmp_path, monkeypatch):
    saves = pl.callbacks.ModelCheckpoint(dirpath=tmp_path / "kept", every_n_train_steps=4, save_top_k=-1)
    _, wanted = _fit(tmp_path, monkeypatch, callbacks=[saves], enable_checkpointing=True)
    newest = max((tmp_path / "kept").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    newest.write_bytes(newest.read_bytes()[:-100])
    trainer, weights = _fit(tmp_path, monkeypatch)
    assert _equal(weights, wanted)
    assert trainer.global_step == 16


@pytest.mark.parametrize("root", ["/proc/nobody", "{}/file/root"])
def test_a_default_root_dir_that_cannot_be_written(root, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    root = root.format(tmp_path)
    saves = pl.callbacks.ModelCheckpoint(dirpath=tmp_path / "kept", every_n_train_steps=4, save_top_k=-1)
    warned = []
    monkeypatch.setattr(auto_resume, "rank_zero_warn", warned.append)
    trainer, _ = _fit(root, monkeypatch, callbacks=[saves], enable_checkpointing=True)
    assert trainer.global_step == 16
    assert len(list((tmp_path / "kept").iterdir())) == 4
    assert len(warned) == 1
    assert "Set default_root_dir to a folder that can be written" in warned[0]


def _stops_in(folder):
    trainer = quiet_trainer(
        strategy=DDPStrategy(), devices=2, default_root_dir=folder, callbacks=[SignalAt(signal.SIGTERM, 3)]
    )
    with pytest.raises((OSError, RuntimeError), match=r"/proc/nobody"):
        trainer.fit(SCRIPT["Module"](0, 0), SCRIPT["Data"](96))


def test_a_stop_that_cannot_save_fails_on_every_rank():
    run_ranks(2, _stops_in, "/proc/nobody")


def test_never_starts_anew(tmp_path, monkeypatch):
    with pytest.raises(SystemExit):
        _fit(tmp_path, monkeypatch, callbacks=[SignalAt(signal.SIGTERM, 3)])
    steps = []

    class Count(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            steps.append(trainer.global_step)

    _fit(tmp_path, monkeypatch, resume="never", callbacks=[Count()])
    assert steps[0] == 1


def test_unknown_mode():
    with pytest.raises(ValueError, match="Use auto, always or never"):
        DDPStrategy(resume="sometimes")


def test_slurm_signal_requeues_and_ends_with_a_status_of_its_own(tmp_path, monkeypatch):
    step = {"JOB_ID": "77", "STEP_ID": "0", "STEP_NUM_TASKS": "1", "STEP_NODELIST": "n1", "STEP_TASKS_PER_NODE": "1"}
    for name, value in (step | {"PROCID": "0", "LOCALID": "0", "NODEID": "0"}).items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    requeued = []
    monkeypatch.setattr(SLURMEnvironment, "requeue", lambda self: requeued.append(self.job_key) or "")
    environment = SLURMEnvironment(requeue_signal=signal.SIGUSR2)
    before = signal.getsignal(signal.SIGUSR2)
    given = {"resume": "auto", "environment": environment}
    with pytest.raises(SystemExit) as stopped:
        _fit(tmp_path, monkeypatch, callbacks=[SignalAt(signal.SIGUSR2, 5)], **given)
    assert stopped.value.code == 75
    assert requeued == ["slurm-77"]
    assert signal.getsignal(signal.SIGUSR2) is before
    # The next start of the same job resumes; another job's first start does not.
    _, wanted = _fit(tmp_path / "whole", monkeypatch)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    trainer, weights = _fit(tmp_path, monkeypatch, **given)
    assert trainer.global_step == 16
    assert _equal(weights, wanted)
