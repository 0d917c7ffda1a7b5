"""Dedicated server ranks: their fit returns when the workers have trained, with the same weights."""

import os
import signal
import threading
import time

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_pardist import ParameterServerStrategy
from lightning_pardist.engines.servers.update_log import read_logs
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import BATCH, Data, quiet_trainer
from tests.helpers.scripts import ROOT, run_script
from tests.integration.test_parameter_server import STEPS, Words, _at_first_lr, _dataset, _replayed

WORKERS, SERVERS = 2, 1
CLIP = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}


class Scored(Words):
    """Words with logging, test and predict, which also records its rank."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train", loss, on_step=False, on_epoch=True)
        return loss

    def test_step(self, batch, batch_idx):
        self.log("test", self.loss(*batch))

    def predict_step(self, batch, batch_idx):
        return self.layers(self.table(batch[0]).mean(1))

    def on_fit_start(self):
        self.seen = self.trainer.world_size, self.trainer.is_global_zero, self.trainer.estimated_stepping_batches


class Talks(pl.Callback):
    """Callback with collectives in its hooks."""

    def setup(self, trainer, pl_module, stage):
        trainer.strategy.barrier()
        torch.distributed.barrier()

    def on_fit_start(self, trainer, pl_module):
        pl_module.all_gather(torch.ones(()))

    def on_train_epoch_end(self, trainer, pl_module):
        torch.distributed.barrier()

    def on_fit_end(self, trainer, pl_module):
        torch.distributed.barrier()


def _trainer(settings, options):
    strategy = settings
    if not isinstance(settings, str):
        strategy = ParameterServerStrategy(**{"dedicated_servers": SERVERS, **settings})
    return quiet_trainer(strategy=strategy, devices=WORKERS + SERVERS, use_distributed_sampler=False, **options)


def _fit(settings, options, module=None, ckpt_path=None, save_to=None):
    torch.manual_seed(3)
    module = Scored(**(module or {}))
    if torch.distributed.get_rank() >= WORKERS:
        # The initial values of a dedicated server do not matter.
        torch.nn.init.ones_(module.table.weight)
    trainer = _trainer(settings, options)
    trainer.fit(module, datamodule=Data(_dataset()), ckpt_path=ckpt_path)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    return snapshot(module), trainer.global_step, float(trainer.callback_metrics["train"]), module.seen


ASYNCHRONOUS = [
    ({"optimizer": "adamw", "slow": 0}, {"max_staleness": 2}, {}),
    ({"optimizer": "momentum", "slow": 1}, {"max_staleness": None}, CLIP),
    ({"optimizer": "sgd", "sparse": True}, {"max_staleness": 1}, {}),
]


def _asynchronous(folder):
    return [
        _fit({**settings, "update_log": f"{folder}/{index}"}, {**options, "callbacks": [Talks()]}, module)
        for index, (module, settings, options) in enumerate(ASYNCHRONOUS)
    ]


def test_asynchronous_updates_are_made_by_ranks_that_only_serve(tmp_path):
    results = run_ranks(WORKERS + SERVERS, _asynchronous, str(tmp_path))
    for index, (module, _, options) in enumerate(ASYNCHRONOUS):
        want = _replayed(WORKERS, module, options, tmp_path / str(index))
        (log,) = read_logs(tmp_path / str(index))
        assert (log.server, log.workers) == (WORKERS, [0, 1])
        steps = STEPS // options.get("accumulate_grad_batches", 1)
        assert sum(entry.did == "update" for entry in log.entries) == WORKERS * steps
        for rank, of_rank in enumerate(results):
            weights, step, logged, seen = of_rank[index]
            assert_close(weights, want, rtol=1e-6)
            assert (step, logged) == (steps, results[0][index][2])
            assert seen == (WORKERS, rank == 0, steps)


def _one_process(module, options, steps=STEPS):
    """Run the same training in one process."""
    torch.manual_seed(3)
    module = Scored(**module)
    optimizer = _at_first_lr(module)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    words, labels = _dataset().tensors
    parts = options.get("accumulate_grad_batches", 1)
    for step in range(steps // parts):
        optimizer.zero_grad()
        for part in range(step * parts, (step + 1) * parts):
            batch = slice(part * BATCH, (part + 1) * BATCH)
            (module.loss(words[batch], labels[batch]) / parts).backward()
        if "gradient_clip_val" in options:
            torch.nn.utils.clip_grad_norm_(module.parameters(), options["gradient_clip_val"])
        optimizer.step()
        schedule.step()
    return snapshot(module)


def _synchronous(form, folder):
    """Train, save half way, resume from there unchanged and by DDP on all ranks, and go back."""
    half = {"max_steps": STEPS // 2}
    found = {
        "clip": _fit({}, CLIP)[0],
        "half": _fit({"checkpoint": form}, half, save_to=f"{folder}/half.ckpt")[0],
        "resumed": _fit({"checkpoint": form}, {}, ckpt_path=f"{folder}/half.ckpt")[0],
        "ddp": _fit("pardist_ddp", {}, ckpt_path=f"{folder}/half.ckpt")[0],
    }
    _fit("pardist_ddp", half, save_to=f"{folder}/ddp.ckpt")
    found["back"] = _fit({}, {}, ckpt_path=f"{folder}/ddp.ckpt")[0]
    return found


@pytest.mark.parametrize("form", ["full", pytest.param("sharded", marks=pytest.mark.slow)])
def test_synchronous_numbers_are_those_of_one_process_also_when_resumed(form, tmp_path):
    results = run_ranks(WORKERS + SERVERS, _synchronous, form, str(tmp_path))
    whole = _one_process({}, {})
    want = {"clip": _one_process({}, CLIP), "half": _one_process({}, {}, STEPS // 2)}
    want |= dict.fromkeys(("resumed", "ddp", "back"), whole)
    for of_rank in results:
        for name, weights in of_rank.items():
            assert_close(weights, want[name], rtol=1e-5)


def _afterwards(folder):
    torch.manual_seed(3)
    module = Scored(slow=1)
    kept = pl.callbacks.ModelCheckpoint(folder, monitor="val", save_last=True)
    options = {"callbacks": [Talks(), kept], "enable_checkpointing": True, "val_check_interval": 2, "max_epochs": 2}
    validation = DataLoader(_dataset(8), batch_size=2)
    trainer = _trainer({"max_staleness": 2}, options)
    trainer.fit(module, DataLoader(_dataset(), batch_size=4), validation)
    ends = trainer.current_epoch, trainer.global_step, float(trainer.callback_metrics["val"])
    (tested,) = trainer.test(module, validation)
    (best,) = trainer.test(module, validation, ckpt_path="best")
    predicted = trainer.predict(module, validation)
    if trainer.global_rank < WORKERS:
        # Dedicated servers predict nothing and save nothing.
        time.sleep(0.3)
    trainer.save_checkpoint(f"{folder}/afterwards.ckpt")
    loaded = Scored.load_from_checkpoint(f"{folder}/afterwards.ckpt", slow=0)
    assert_close(snapshot(loaded), snapshot(module), rtol=0.0)
    return ends, tested, best, kept.best_model_path, None if predicted is None else len(predicted)


def test_a_script_goes_on_alike_on_all_ranks(tmp_path):
    first, second, server = run_ranks(WORKERS + SERVERS, _afterwards, str(tmp_path))
    assert first[:4] == second[:4] == server[:4]
    assert first[0][:2] == (2, 36)
    assert (first[4], second[4], server[4]) == (4, 4, None)


def _unbatched():
    weights = []
    for options in ({"limit_train_batches": 0}, {"max_steps": 1}):
        torch.manual_seed(3 + torch.distributed.get_rank())
        module = Words()
        trainer = _trainer({"max_staleness": 1}, options)
        trainer.fit(module, DataLoader(_dataset(), batch_size=4))
        weights.append(snapshot(module))
    return weights


def test_servers_end_with_a_fit_without_batches():
    results = run_ranks(WORKERS + SERVERS, _unbatched)
    for without, after in results:
        assert_close(without, results[0][0], rtol=0.0)
        assert_close(after, results[0][1], rtol=0.0)


def _stopped(folder, settings):
    class Asked(pl.Callback):
        def on_fit_start(self, trainer, pl_module):
            if trainer.global_rank == WORKERS:
                threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()

    torch.manual_seed(3)
    options = {"max_epochs": 1000, "callbacks": [Asked()], "default_root_dir": folder}
    trainer = _trainer({"resume": "always", **settings}, options)
    try:
        trainer.fit(Words(slow=1), datamodule=Data(_dataset()))
    except SystemExit as stopped:
        return stopped.code
    return None


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"max_staleness": 2}])
def test_a_signal_to_a_server_stops_all_with_a_checkpoint(settings, tmp_path):
    assert run_ranks(WORKERS + SERVERS, _stopped, str(tmp_path), settings) == [143] * 3
    assert list(tmp_path.rglob("stopped.ckpt"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "rank", "last"),
    [
        ("kill server", "2", "was killed by SIGKILL"),
        ("kill", "1", "was killed by SIGKILL"),
        ("raise", "1", "the user's own mistake"),
    ],
)
def test_the_end_of_a_rank_ends_the_job(fault, rank, last):
    finished = run_script(str(ROOT / "tests" / "scripts" / "train.py"), "dedicated", "3", fault, rank)
    assert finished.code == 1
    assert last in finished.output.strip().splitlines()[-1], finished.output
    assert not finished.left


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "strategy", "ends"),
    [
        ((), "dedicated", ["0", "1", "2"]),
        (("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"), "dedicated", ["0", "1", "2"]),
        # Forked ranks end with fit, and the calling process continues.
        ((), "dedicated by fork", ["0"]),
    ],
)
def test_launchers_start_servers_as_they_start_workers(program, strategy, ends):
    finished = run_script(*program, str(ROOT / "tests" / "scripts" / "train.py"), strategy, "3")
    done = sorted(line for line in finished.output.splitlines() if line.startswith("done"))
    assert finished.code == 0, finished.output
    assert [line.split()[1] for line in done] == ends
    assert len({line.split()[2] for line in done}) == 1
    assert not finished.left


@pytest.mark.slow
def test_ranks_by_fork_evaluate_behind_a_fit():
    finished = run_script(str(ROOT / "tests" / "scripts" / "train.py"), "dedicated by fork", "3", "evaluated", "0")
    assert finished.code == 0, finished.output
    said = [line.split()[0] for line in finished.output.splitlines() if line.startswith(("val ", "done "))]
    assert said == ["val", "done"], finished.output


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dedicated_servers": -1}, "dedicated_servers=-1 is not a number of ranks"),
        ({"dedicated_servers": 1, "num_servers": 1, "max_staleness": 1}, "Set one of them"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ParameterServerStrategy(**settings)


def test_a_worker_is_left():
    with pytest.raises(ValueError, match="dedicated_servers=2 leaves no worker among 2 ranks"):
        quiet_trainer(strategy=ParameterServerStrategy(dedicated_servers=2), devices=2)
