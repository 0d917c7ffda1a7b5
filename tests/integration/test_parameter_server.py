"""Asynchronous parameter servers: any run can be replayed in one process from its log of updates."""

import os
import signal
import threading
import time

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_pardist import ParameterServerStrategy
from lightning_pardist.engines.servers import replay
from lightning_pardist.engines.servers.update_log import read_logs
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import BATCH, Data, quiet_trainer
from tests.helpers.scripts import ROOT, run_script

STEPS = 6


class Words(pl.LightningModule):
    """Embedding of which batches use few rows, with sparse gradients or not, and layers after it."""

    def __init__(self, optimizer="adamw", sparse=False, slow=None):
        super().__init__()
        self.optimizer, self.slow = optimizer, slow
        self.table = nn.Embedding(64, 8, sparse=sparse)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        self.staleness = []

    def training_step(self, batch, batch_idx):
        if self.trainer.global_rank == self.slow:
            time.sleep(0.02)
        words, labels = batch
        return self.loss(words, labels)

    def loss(self, words, labels):
        return F.cross_entropy(self.layers(self.table(words).mean(1)), labels)

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(*batch))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.staleness.append(self.trainer.callback_metrics.get("staleness"))

    def configure_optimizers(self):
        params = list(self.parameters())
        if self.optimizer == "adamw":
            optimizer = torch.optim.AdamW(params, lr=0.02, eps=1e-3)
        elif self.optimizer == "momentum":
            optimizer = torch.optim.SGD([{"params": params[:2]}, {"params": params[2:], "lr": 0.02}], 0.1, momentum=0.9)
        else:
            optimizer = torch.optim.SGD(params, lr=0.3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def _dataset(size=BATCH * STEPS):
    draw = torch.Generator().manual_seed(5)
    words = torch.randint(0, 64, (size, 3), generator=draw)
    return TensorDataset(words, torch.randint(0, 3, (size,), generator=draw))


def _build(**kwargs):
    torch.manual_seed(3)
    return Words(**kwargs)


def _fit(ranks, module, settings, options=None, ckpt_path=None, save_to=None):
    module = _build(**module)
    strategy = ParameterServerStrategy(**settings)
    trainer = quiet_trainer(strategy=strategy, devices=ranks, use_distributed_sampler=False, **(options or {}))
    trainer.fit(module, datamodule=Data(_dataset()), ckpt_path=ckpt_path)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    return snapshot(module), module.staleness


def _several(ranks, cases, folder):
    return [
        _fit(ranks, module, {**settings, "update_log": f"{folder}/{index}"}, {**options, "precision": "64-true"})
        for index, (module, settings, options) in enumerate(cases)
    ]


def _at_first_lr(module):
    """Return the module's optimizer at its initial learning rate, before the schedule."""
    optimizer = module.configure_optimizers()[0][0]
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"]
    return optimizer


def _replayed(ranks, module, options, folder):
    """Replay the same training in one process."""
    module = _build(**module).double()
    optimizer = _at_first_lr(module)
    words, labels = _dataset().tensors
    each, parts = BATCH // ranks, options.get("accumulate_grad_batches", 1)

    def gradients(worker, turn, index):
        for part in range((turn - 1) * parts, turn * parts):
            mine = torch.arange(worker, BATCH * STEPS, ranks)[part * each : (part + 1) * each]
            (module.loss(words[mine], labels[mine]) / parts).backward()
        if "gradient_clip_val" in options:
            torch.nn.utils.clip_grad_norm_(module.parameters(), options["gradient_clip_val"])

    replay(folder, [optimizer], gradients)
    return snapshot(module)


CLIP = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}
COMPILED = {"compile": "step", "compile_backend": "aot_eager"}
CASES = [
    ({"optimizer": "adamw", "slow": 0}, {"max_staleness": 2}, {}),
    ({"optimizer": "adamw", "slow": 1}, {"max_staleness": None}, CLIP),
    ({"optimizer": "momentum"}, {"max_staleness": 1, "num_servers": 1}, {}),
    ({"optimizer": "sgd", "sparse": True, "slow": 0}, {"max_staleness": 1}, {}),
    ({"optimizer": "adamw"}, {"max_staleness": 2, "loss_weight": "ranks", **COMPILED}, {}),
]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_order_of_updates_gives_the_same_weights(ranks, tmp_path):
    results = run_ranks(ranks, _several, ranks, CASES, str(tmp_path))
    for index, (module, settings, options) in enumerate(CASES):
        want = _replayed(ranks, module, options, tmp_path / str(index))
        for of_rank in results:
            assert_close(of_rank[index][0], want, rtol=1e-12)
        logs = read_logs(tmp_path / str(index))
        assert len(logs) == settings.get("num_servers", ranks)
        steps = STEPS // options.get("accumulate_grad_batches", 1)
        bound = settings["max_staleness"]
        for log in logs:
            updates = [entry for entry in log.entries if entry.did == "update"]
            assert len(updates) == ranks * steps
            if bound is not None:
                assert max(entry.ahead for entry in updates) <= bound
                assert max(entry.staleness for entry in updates) <= 2 * bound * (ranks - 1)
        seen = [float(value) for of_rank in results for value in of_rank[index][1] if value is not None]
        assert seen
        assert max(seen) <= steps * (ranks - 1)


class TwoParts(Words):
    """Two optimizers that step in turn in manual optimization."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(*batch))
            optimizer.step()

    def configure_optimizers(self):
        return torch.optim.Adam(self.layers.parameters(), 0.02, eps=1e-3), torch.optim.SGD(self.table.parameters(), 0.5)


def _by_hand(folder):
    torch.manual_seed(3)
    module = TwoParts()
    strategy = ParameterServerStrategy(max_staleness=1, update_log=folder)
    quiet_trainer(strategy=strategy, devices=2, use_distributed_sampler=False).fit(module, datamodule=Data(_dataset()))
    return snapshot(module)


def test_several_optimizers_by_hand(tmp_path):
    results = run_ranks(2, _by_hand, str(tmp_path))
    torch.manual_seed(3)
    module = TwoParts()
    words, labels = _dataset().tensors

    def gradients(worker, turn, index):
        assert index == (turn - 1) % 2
        step = (turn - 1) // 2
        mine = torch.arange(worker, BATCH * STEPS, 2)[step * BATCH // 2 : (step + 1) * BATCH // 2]
        module.loss(words[mine], labels[mine]).backward()

    replay(tmp_path, module.configure_optimizers(), gradients)
    for got in results:
        assert_close(got, snapshot(module), rtol=1e-6)


class Skips(Words):
    def training_step(self, batch, batch_idx):
        if (self.trainer.global_rank, batch_idx) == (0, 2):
            return None
        self.log("seen", batch[0].float().mean(), on_step=False, on_epoch=True, batch_size=len(batch[0]))
        return self.loss(*batch)


def _uneven(folder):
    """Train with two batches fewer on rank 1, while rank 0 skips one of its own."""
    torch.manual_seed(3)
    module = Skips()
    strategy = ParameterServerStrategy(max_staleness=1, update_log=folder)
    trainer = quiet_trainer(strategy=strategy, devices=2, use_distributed_sampler=False)
    size = STEPS - 2 * torch.distributed.get_rank()
    trainer.fit(module, DataLoader(_dataset(BATCH * size), batch_size=BATCH))
    return snapshot(module), float(trainer.callback_metrics["seen"])


def test_steps_without_gradients_are_turns_all_the_same(tmp_path):
    results = run_ranks(2, _uneven, str(tmp_path))
    module = _build()

    def gradients(worker, turn, index):
        module.loss(*_dataset(BATCH * (STEPS - 2 * worker))[(turn - 1) * BATCH : turn * BATCH]).backward()

    replay(tmp_path, [_at_first_lr(module)], gradients)
    batches = [_dataset(BATCH * size)[at * BATCH : (at + 1) * BATCH][0] for size in (6, 4) for at in range(size)]
    seen = torch.stack([each.float().mean() for index, each in enumerate(batches) if index != 2]).mean()
    for got, logged in results:
        assert_close(got, snapshot(module), rtol=1e-6)
        # A placeholder for a batch that a worker has no longer is not logged.
        assert logged == pytest.approx(float(seen), rel=1e-6)
    for log in read_logs(tmp_path):
        ticks = [(entry.worker, entry.turn) for entry in log.entries if entry.did == "tick"]
        assert sorted(ticks) == [(0, 3), (1, 5), (1, 6)]


class Watch(pl.Callback):
    """Callback that records the weights at every validation."""

    def __init__(self):
        self.seen = []

    def on_validation_start(self, trainer, pl_module):
        self.seen.append(snapshot(pl_module))


def _resumed(form, folder):
    """Save after three steps, resume, and load the checkpoint under DDP."""
    path = f"{folder}/last.ckpt"
    settings = {"max_staleness": 1, "checkpoint": form, "update_log": f"{folder}/first"}
    first, _ = _fit(2, {"slow": 1}, settings, {"max_steps": 3}, save_to=path)
    second, _ = _fit(2, {"slow": 0}, {**settings, "update_log": f"{folder}/second"}, ckpt_path=path)
    module, watch = _build(slow=0), Watch()
    strategy = ParameterServerStrategy(max_staleness=1)
    trainer = quiet_trainer(strategy=strategy, devices=2, max_epochs=2, val_check_interval=2, callbacks=[watch])
    trainer.fit(module, DataLoader(_dataset(), batch_size=6), DataLoader(_dataset(12), batch_size=6))
    other = _build()
    ddp = quiet_trainer(strategy="pardist_ddp", devices=2, max_steps=3)
    ddp.fit(other, datamodule=Data(_dataset()), ckpt_path=path)
    ddp.save_checkpoint(f"{folder}/ddp.ckpt")
    third, _ = _fit(2, {}, {"max_staleness": 1}, {"max_steps": 3}, ckpt_path=f"{folder}/ddp.ckpt")
    return first, second, watch.seen, snapshot(other), third


@pytest.mark.parametrize("form", ["full", pytest.param("sharded", marks=pytest.mark.slow)])
def test_resume_goes_on_exactly_and_other_strategies_open_it(form, tmp_path):
    results = run_ranks(2, _resumed, form, str(tmp_path))
    module = _build()
    optimizer = _at_first_lr(module)
    words, labels = _dataset().tensors
    for begin, folder in ((0, "first"), (3, "second")):

        def gradients(worker, turn, index, begin=begin):
            step = turn - 1 + begin
            mine = torch.arange(worker, BATCH * STEPS, 2)[step * BATCH // 2 : (step + 1) * BATCH // 2]
            module.loss(words[mine], labels[mine]).backward()

        replay(tmp_path / folder, [optimizer], gradients)
        for got in results:
            assert_close(got[0 if folder == "first" else 1], snapshot(module), rtol=1e-6)
        if folder == "first":
            saved = torch.load(tmp_path / "ddp.ckpt", weights_only=True)["optimizer_states"][0]["state"]
            assert sorted(saved) == list(range(5))
            for number, state in optimizer.state_dict()["state"].items():
                assert_close({"of": saved[number]["exp_avg"]}, {"of": state["exp_avg"]}, rtol=1e-6)
    for (first, _, seen, ddp, third), (_, _, others, _, _) in zip(results, reversed(results), strict=True):
        assert len(seen) > 4
        for mine, theirs in zip(seen, others, strict=True):
            assert_close(mine, theirs, rtol=0.0)
        assert_close(ddp, first, rtol=0.0)
        assert_close(third, first, rtol=0.0)


class Clamps(Words):
    def on_train_batch_start(self, batch, batch_idx):
        with torch.no_grad():
            self.table.weight.clamp_(-1, 1)


class AddsLater(Words):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.trainer.optimizers[0].add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


class FailsOnAServer(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        if self.param_groups[0]["lr"] < 0.2 and any(len(group["params"]) for group in self.param_groups):
            raise ArithmeticError("no more of this")
        return super().step(closure)


class Failing(Words):
    def configure_optimizers(self):
        optimizer = FailsOnAServer(self.parameters(), lr=0.3)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


class Joint(Words):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class Renormalized(Words):
    def __init__(self):
        super().__init__()
        self.table.max_norm = 1.0


class Normalized(Words):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)


REFUSED = {
    "clamp": (Clamps, {}, {}, "was written to outside of its step"),
    "add": (AddsLater, {}, {}, "given further parameters during training"),
    "fails": (Failing, {}, {}, "no more of this"),
    "joint": (Joint, {}, {}, "updates all tensors together"),
    "renormalized": (Renormalized, {}, {}, "max_norm"),
    "servers": (Words, {"num_servers": 3}, {}, "num_servers=3 is more than there are ranks (2)"),
    "batch_norm": (Normalized, {}, {"sync_batchnorm": True}, "sync_batchnorm=True needs all workers"),
    "average": (Words, {}, {"callbacks": [pl.callbacks.EMAWeightAveraging()]}, "Remove the callback"),
}


def _refused():
    found = {}
    for name, (kind, settings, options, _) in REFUSED.items():
        torch.manual_seed(3)
        strategy = ParameterServerStrategy(**{"max_staleness": 2, **settings})
        trainer = quiet_trainer(strategy=strategy, devices=2, use_distributed_sampler=False, **options)
        try:
            trainer.fit(kind(), datamodule=Data(_dataset()))
        except Exception as error:
            found[name] = str(error)
    weights, _ = _fit(2, {}, {"max_staleness": 1})
    return found, weights, [thread.name for thread in threading.enumerate() if "parameter-server" in thread.name]


def test_what_cannot_be_right_is_refused_and_leaves_nothing_behind():
    first, second = run_ranks(2, _refused)
    for found, weights, threads in (first, second):
        for name, (_, _, _, message) in REFUSED.items():
            assert message in found.get(name, ""), name
        assert_close(weights, first[1], rtol=0.0)
        assert not threads


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_staleness": -1}, "max_staleness=-1 is not positive"),
        ({"max_staleness": 1, "num_servers": 0}, "num_servers=0 is not positive"),
        ({"num_servers": 1}, "num_servers=1 is for asynchronous servers"),
        ({"update_log": "here"}, "update_log='here' is for asynchronous servers"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ParameterServerStrategy(**settings)


@pytest.mark.parametrize(
    ("fault", "rank", "last"),
    [
        ("kill", "1", "was killed by SIGKILL"),
        pytest.param("raise", "0", "the user's own mistake", marks=pytest.mark.slow),
        pytest.param("raise", "1", "the user's own mistake", marks=pytest.mark.slow),
    ],
)
def test_the_end_of_a_rank_ends_the_job(fault, rank, last):
    finished = run_script(str(ROOT / "tests" / "scripts" / "train.py"), "pardist_ps_async", "2", fault, rank)
    assert finished.code == 1
    assert last in finished.output.strip().splitlines()[-1], finished.output
    assert not finished.left


def _stopped(folder, bound):
    class Asked(pl.Callback):
        def on_train_batch_start(self, trainer, *_):
            if trainer.global_rank == 1 and trainer.global_step == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    torch.manual_seed(3)
    module = Words(slow=1)
    strategy = ParameterServerStrategy(max_staleness=bound, resume="always")
    data = Data(_dataset(BATCH * 50))
    trainer = quiet_trainer(
        strategy=strategy, devices=2, max_epochs=10, callbacks=[Asked()], default_root_dir=folder,
        use_distributed_sampler=False,
    )  # fmt: skip
    try:
        trainer.fit(module, datamodule=data)
    except SystemExit as stopped:
        return stopped.code, trainer.global_step
    return None, trainer.global_step


@pytest.mark.slow
@pytest.mark.parametrize("bound", [2, None])
def test_on_a_signal_all_stop_after_the_same_step(bound, tmp_path):
    (code, step), (other_code, other_step) = run_ranks(2, _stopped, str(tmp_path), bound)
    assert code == other_code == 143
    assert step == other_step < 500
    assert list(tmp_path.rglob("stopped.ckpt"))
