"""Parameter-server training with dedicated servers in which a rank fails.

``python lose.py FOLDER DEVICES FAULT RANK [MAX_STALENESS [SERVERS]]``, with ``LOSE_STEPS``, ``LOSE_EPOCHS``,
``LOSE_FROM`` (a checkpoint), and more in the environment. With ``LOSE_SHARE`` other workers take over a lost worker's
data, and ``samplesRANK.jsonl`` in the folder lists the samples of each step that a worker has started.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import lightning_pardist  # isort: skip
import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH, STEPS, EPOCHS = 4, int(os.environ.get("LOSE_STEPS", "20")), int(os.environ.get("LOSE_EPOCHS", "2"))
FAULT_STEP = int(os.environ.get("LOSE_AT", "7"))
SHARE, SHUFFLE = "LOSE_SHARE" in os.environ, "LOSE_SHUFFLE" in os.environ
SAVES = ["every step"] if "LOSE_SAVE" in os.environ else []
#: Further faults of other ranks: ``RANK:STEP``, comma-separated.
MORE = [tuple(map(int, each.split(":"))) for each in os.environ.get("LOSE_MORE", "").split(",") if each]


class Module(pl.LightningModule):
    """Classifier with batch norm, whose steps sleep and which can trigger a fault."""

    def __init__(self, fault: str = "none", fault_rank: int = -1) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        self.fault, self.fault_rank = fault, fault_rank
        self.double()
        self.times: list[float] = []

    def on_fit_start(self):
        if self.fault == "early" and self.global_rank == self.fault_rank:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "server" and self.global_rank == self.fault_rank:
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            signal.setitimer(signal.ITIMER_REAL, 0.5)

    def on_train_start(self):
        if self.fault.startswith("in ") and self.global_rank == self.fault_rank:
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            signal.setitimer(signal.ITIMER_REAL, float(self.fault.removeprefix("in ")))

    def training_step(self, batch, batch_idx):
        self.times.append(time.monotonic())
        if SHARE:
            self.note_samples(batch[0], batch_idx)
        time.sleep(0.02)
        if (self.global_rank, batch_idx) in MORE and self.current_epoch == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if (self.global_rank, self.current_epoch, batch_idx) == (self.fault_rank, 0, FAULT_STEP):
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if self.fault == "hang":
                time.sleep(600)
            if self.fault == "term":
                os.kill(os.getpid(), signal.SIGTERM)
            if self.fault == "raise":
                raise ValueError("the user's own mistake")
        loss = self.loss(*batch)
        self.log("loss", loss)
        return loss

    def note_samples(self, x, batch_idx):
        step = {"epoch": self.current_epoch, "batch": batch_idx, "turn": self.global_step}
        step["counts"] = self.trainer.strategy.context.batch_counts()
        step["samples"] = [self.trainer.datamodule.numbers[float(value)] for value in x[:, 0]]
        with (Path(self.trainer.default_root_dir) / f"samples{self.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(step) + "\n")

    def loss(self, x, y):
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(*batch))

    def test_step(self, batch, batch_idx):
        self.log("test_val", self.loss(*batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def dataset(size):
    draw = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.randn(size, 8, generator=draw, dtype=torch.float64), torch.randint(0, 3, (size,), generator=draw)
    )


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        kwargs = self.trainer.distributed_sampler_kwargs
        size = int(os.environ.get("LOSE_SIZE", str(BATCH * STEPS * kwargs["num_replicas"])))
        data = dataset(size)
        self.numbers = {float(value): number for number, value in enumerate(data.tensors[0][:, 0])}
        workers = int(os.environ.get("LOSE_LOADERS", "0"))
        if SHUFFLE:
            # The Trainer replaces this by its own sampler.
            return DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
        if self.trainer.lightning_module.fault == "uneven":
            data = torch.utils.data.Subset(data, range(BATCH * (STEPS - kwargs["rank"])))
            return DataLoader(data, batch_size=BATCH)
        return DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, shuffle=False, **kwargs))

    def val_dataloader(self):
        return DataLoader(dataset(16), batch_size=4)

    def test_dataloader(self):
        return self.val_dataloader()


def make_trainer():
    folder, devices, fault, _, staleness = (*sys.argv[1:6], "2")[:5]
    servers = int(sys.argv[6]) if len(sys.argv) > 6 else 1
    strategy = lightning_pardist.ParameterServerStrategy(
        max_staleness=None if staleness == "None" else int(staleness),
        dedicated_servers=servers,
        lost_workers="share" if SHARE else "end" if fault == "end" else "report",
        update_log=f"{folder}/updates",
        timeout_s=6.0 if fault == "hang" else 60.0,
        heartbeat_timeout_s=5.0 if fault == "stop" else 60.0,
    )
    return pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=int(devices),
        max_epochs=EPOCHS,
        default_root_dir=folder,
        use_distributed_sampler=fault != "uneven",
        accumulate_grad_batches=int(os.environ.get("LOSE_ACCUMULATE", "1")),
        logger=False,
        callbacks=[
            *(pl.callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1) for _ in SAVES),
            pl.callbacks.ModelCheckpoint(
                folder, monitor="loss" if fault == "monitor" else "val", save_top_k=-1, save_last=True
            ),
        ],
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def main() -> None:
    folder, _, fault, rank = sys.argv[1:5]
    trainer = make_trainer()
    # Different initial values per rank: the first worker's must be used everywhere.
    torch.manual_seed(int(os.environ.get("LOCAL_RANK", "0")))
    module = Module(fault, int(rank))
    if trainer.global_rank == 0:
        torch.save(module.state_dict(), f"{folder}/begin.pt")
    trainer.fit(module, datamodule=Data(), ckpt_path=os.environ.get("LOSE_FROM"))
    found = {"rank": trainer.global_rank, "val": float(trainer.callback_metrics["val"]), "step": trainer.global_step}
    (tested,) = trainer.test(module, datamodule=Data())
    # This worker's steps per second in the first epoch before and after the fault, and the duration of its longest
    # step.
    if len(times := torch.tensor(module.times, dtype=torch.float64)) > 2 * FAULT_STEP:
        gaps = times.diff()
        before, behind = gaps[1 : FAULT_STEP - 2], gaps[FAULT_STEP + 2 : STEPS - 1]
        found |= {"before": 1 / float(before.mean()), "behind": 1 / float(behind.mean()), "longest": float(gaps.max())}
    found["sum"] = float(sum(param.double().sum() for param in module.state_dict().values()))
    if trainer.global_rank == 0:
        torch.save(module.state_dict(), f"{folder}/end.pt")
    if os.environ.get("LOSE_AGAIN"):
        trainer = make_trainer()
        trainer.fit(module, datamodule=Data())
        found |= {"again": trainer.global_step, "sum": float(sum(p.double().sum() for p in module.parameters()))}
        if os.environ["LOSE_AGAIN"] == "ddp":
            pl.Trainer(accelerator="cpu", strategy="pardist_ddp", devices=int(sys.argv[2]), logger=False).validate(
                module, datamodule=Data()
            )
    sys.stdout.write(f"done {json.dumps(found | tested)}\n")


if __name__ == "__main__":
    main()
