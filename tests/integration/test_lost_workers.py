"""Workers that continue after one is lost, with dedicated servers."""

from datetime import timedelta

import lightning.pytorch as pl
import pytest
import torch

from lightning_pardist import ParameterServerStrategy
from lightning_pardist.axes.ddp import DDPAxis
from lightning_pardist.axes.parameter_server import ParameterServerAxis
from lightning_pardist.engines.servers.update_log import read_logs
from lightning_pardist.runtime.environments.torchrun import TorchrunEnvironment
from lightning_pardist.strategies.strategy import PardistStrategy
from tests.helpers.lost import WORKERS, check_replay, done, lose, told
from tests.helpers.parity import assert_close
from tests.helpers.runs import quiet_trainer
from tests.scripts.lose import BATCH, EPOCHS, STEPS, Module, dataset


@pytest.mark.parametrize(
    ("fault", "why", "workers", "servers"),
    [
        ("kill", "was killed by SIGKILL", 2, 1),
        pytest.param("kill", "was killed by SIGKILL", 3, 2, marks=pytest.mark.slow),
        pytest.param("stop", "Nothing was heard of rank 1", 3, 1, marks=pytest.mark.slow),
        pytest.param("hang", "waited 6 s for it in vain", 3, 1, marks=pytest.mark.slow),
    ],
)
def test_the_others_go_on_without_a_worker_that_is_gone(fault, why, workers, servers, tmp_path):
    finished = lose(tmp_path, fault, 1, workers=workers, servers=servers)
    assert finished.code == 0, finished.output
    assert not finished.left
    (line,) = told(finished)
    assert f"[rank {workers}] Worker 1 has gone after 7 updates" in line
    assert why in line
    assert f"{STEPS - 7} of {STEPS} batches in epoch 0, and all of later epochs" in line
    found = done(finished)
    assert sorted(found) == [0, *range(2, workers + servers)]
    # Parameters and running statistics: all ranks evaluate equally, dedicated servers included.
    assert len({(each["val"], each["test_val"], each["sum"]) for each in found.values()}) == 1
    assert {found[rank]["step"] for rank in found if rank < workers} == {EPOCHS * STEPS}
    for log in read_logs(tmp_path / "updates"):
        assert [entry.worker for entry in log.entries if entry.did == "lost"] == [1]
    check_replay(tmp_path, workers=workers)


@pytest.mark.slow
def test_a_checkpoint_behind_a_loss_opens_elsewhere_and_goes_on_with_all_workers(tmp_path):
    finished = lose(tmp_path, "kill", 2, staleness=None)
    assert finished.code == 0, finished.output
    last, weights = tmp_path / "last.ckpt", torch.load(tmp_path / "end.pt")
    module = Module()
    trainer = quiet_trainer(strategy="pardist_ddp", devices=1, max_epochs=EPOCHS, default_root_dir=tmp_path)
    loader = torch.utils.data.DataLoader(dataset(BATCH * STEPS), batch_size=BATCH)
    trainer.fit(module, loader, ckpt_path=str(last))
    assert trainer.global_step == EPOCHS * STEPS
    assert_close(dict(module.named_parameters()), {n: weights[n] for n, _ in module.named_parameters()}, rtol=0.0)
    state = trainer.optimizers[0].state
    assert all(bool(state[param]["momentum_buffer"].any()) for param in module.parameters())
    (tmp_path / "again").mkdir()
    resumed = lose(tmp_path / "again", "none", -1, LOSE_FROM=str(last), LOSE_EPOCHS=str(EPOCHS + 1))
    assert resumed.code == 0, resumed.output
    assert not told(resumed)
    assert {each["step"] for rank, each in done(resumed).items() if rank < WORKERS} == {(EPOCHS + 1) * STEPS}
    check_replay(tmp_path / "again", begin=last)


@pytest.mark.slow
@pytest.mark.parametrize("then", ["servers", "ddp"])
def test_further_runs_do_without_who_is_gone_or_are_refused(then, tmp_path):
    finished = lose(tmp_path, "kill", 1, LOSE_AGAIN=then)
    if then == "ddp":
        assert finished.code == 1
        assert "Rank 1 was lost in an earlier run of this script, and this run needs all ranks" in finished.output
        assert not finished.left
        return
    assert finished.code == 0, finished.output
    assert [" 7 updates" in line or " 0 updates" in line for line in told(finished)] == [True, True]
    found = done(finished)
    assert sorted(found) == [0, 2, 3]
    assert found[0]["again"] == found[2]["again"] == EPOCHS * STEPS
    assert len({each["sum"] for each in found.values()}) == 1


@pytest.mark.slow
def test_without_a_loss_nothing_is_different(tmp_path):
    found = {}
    # With one worker, whose update order is deterministic, and with several.
    for fault in ("none", "end"):
        (tmp_path / fault).mkdir()
        finished = lose(tmp_path / fault, fault, -1, workers=1)
        assert finished.code == 0, finished.output
        found[fault] = torch.load(tmp_path / fault / "end.pt"), done(finished)[0]["val"]
    assert_close(found["none"][0], found["end"][0], rtol=0.0)
    assert found["none"][1] == found["end"][1]
    (tmp_path / "more").mkdir()
    finished = lose(tmp_path / "more", "none", -1)
    assert finished.code == 0, finished.output
    assert not told(finished)
    assert sorted(done(finished)) == [0, 1, 2, 3]
    check_replay(tmp_path / "more")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "rank", "code", "last"),
    [
        ("server", 3, 1, "Rank 3"),
        ("raise", 1, 1, "the user's own mistake"),
        ("early", 1, 1, "was killed by SIGKILL"),
        ("monitor", -1, 1, "Monitor a value that validation logs"),
        ("uneven", -1, 1, "Workers have 20, 19, 18 batches in an epoch"),
        ("kill", 0, -9, ""),
    ],
)
def test_other_ends_end_the_job(fault, rank, code, last, tmp_path):
    finished = lose(tmp_path, fault, rank)
    assert finished.code == code, finished.output
    assert last in "\n".join(finished.output.strip().splitlines()[-3:]), finished.output
    assert not finished.left
    assert not done(finished)


@pytest.mark.slow
def test_a_signal_stops_all_workers_with_one_checkpoint(tmp_path):
    finished = lose(tmp_path, "term", 1)
    assert finished.code == 143, finished.output
    assert not finished.left
    assert not told(finished)
    assert finished.output.count("Stopped by a signal after step") == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lost_workers": "shared"}, "lost_workers='shared'"),
        ({"lost_workers": "share"}, "lost_workers='share' with max_staleness=0"),
        ({"dedicated_servers": 1}, "with max_staleness=0 and dedicated_servers=1"),
        ({"max_staleness": 2}, "with max_staleness=2 and dedicated_servers=0"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ParameterServerStrategy(**{"lost_workers": "report", **settings})


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (pl.callbacks.Timer(duration="00:01:00:00"), "Timer with a duration"),
        (pl.callbacks.ModelCheckpoint(train_time_interval=timedelta(minutes=5)), "ModelCheckpoint with a train_time"),
    ],
)
def test_callbacks_that_decide_by_the_time_are_refused(callback, message, tmp_path):
    axis = ParameterServerAxis(max_staleness=2, dedicated_servers=1, lost_workers="report")
    PardistStrategy(axes=[DDPAxis(), axis])
    trainer = quiet_trainer(callbacks=[callback], enable_checkpointing=True, default_root_dir=tmp_path)
    trainer.strategy.connect(pl.LightningModule())
    with pytest.raises(ValueError, match=f"{message}.*acts by wall-clock time"):
        axis.check(trainer)


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({"start_method": "spawn"}, {}, "start_method='spawn'"),
        ({}, {"num_nodes": 2}, "num_nodes=2"),
        ({"cluster_environment": TorchrunEnvironment()}, {}, "a launcher"),
    ],
)
def test_ranks_that_the_script_does_not_start_are_refused(settings, options, message, monkeypatch):
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3, "GROUP_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    strategy = ParameterServerStrategy(lost_workers="report", max_staleness=2, dedicated_servers=1, **settings)
    with pytest.raises(ValueError, match=f"{message}.*Start the script itself on one host"):
        pl.Trainer(accelerator="cpu", devices=3, strategy=strategy, **options)
