"""Training script with an optional fault on one rank: ``python train.py STRATEGY DEVICES [FAULT RANK]``."""

import os
import signal
import sys
import threading
import time

import lightning_pardist  # isort: skip
import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(pl.LightningModule):
    def __init__(self, fault: str, fault_rank: int) -> None:
        super().__init__()
        self.net = nn.Linear(8, 3)
        self.before = nn.Linear(8, 8) if fault == "layer" else nn.Identity()
        self.fault, self.fault_rank = fault, fault_rank

    def on_fit_start(self):
        if self.fault == "kill server" and self.global_rank == self.fault_rank:
            threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def training_step(self, batch, batch_idx):
        if batch_idx == 3 and self.fault == "kill server":
            time.sleep(600)
        if batch_idx == 3 and self.global_rank == self.fault_rank:
            if self.fault == "raise":
                raise ValueError("the user's own mistake")
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if self.fault == "hang":
                time.sleep(600)
            if self.fault == "sleep":
                print("sleeping", flush=True)
                time.sleep(600)
            if self.fault == "desync":
                torch.distributed.barrier()
            if self.fault == "late all":
                time.sleep(2)
        if batch_idx == 3 and self.fault == "stuck":
            torch.distributed.recv(torch.zeros(1), src=1 - self.global_rank)
        if batch_idx == 3 and self.fault in ("all", "late all"):
            raise ValueError("a mistake on every rank")
        inputs = self.before(batch[0])
        if batch_idx == 3 and self.fault == "layer" and self.global_rank == self.fault_rank:
            inputs = self.before(inputs)
        outputs = self.net(inputs)
        if batch_idx == 3 and self.fault == "hang in backward" and self.global_rank == self.fault_rank:
            outputs.register_hook(lambda grad: time.sleep(600))
        return F.cross_entropy(outputs, batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    strategy, devices, fault, fault_rank = (*sys.argv[1:], "none", "0")[:4]
    if fault == "import" and os.environ.get("LOCAL_RANK") == fault_rank:
        raise ImportError("no such module on this rank")
    if fault == "sleep before" and os.environ.get("LOCAL_RANK") == fault_rank:
        print("sleeping", flush=True)
        time.sleep(600)
    timeout_s = 8.0 if fault.startswith("hang") else 60.0
    heartbeat_timeout_s = 5.0 if fault in ("desync", "stop", "stuck", "layer") else 60.0
    if strategy == "pardist_ddp":
        strategy = lightning_pardist.DDPStrategy(timeout_s=timeout_s, heartbeat_timeout_s=heartbeat_timeout_s)
    if strategy == "units":
        strategy = lightning_pardist.FSDPStrategy(min_unit_size_mb=0, heartbeat_timeout_s=heartbeat_timeout_s)
    if strategy == "streams":
        strategy = lightning_pardist.LocalSGDStrategy(
            sync_every=2, outer_compression="int4", fragments=2, fragment_sync_delay=1, timeout_s=timeout_s
        )
    if strategy in ("dedicated", "dedicated by fork"):
        strategy = lightning_pardist.ParameterServerStrategy(
            max_staleness=2,
            dedicated_servers=1,
            timeout_s=timeout_s,
            heartbeat_timeout_s=heartbeat_timeout_s,
            start_method="fork" if strategy.endswith("fork") else None,
        )
    pl.seed_everything(0)
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=int(devices),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module(fault, int(fault_rank))
    trainer.fit(module, DataLoader(data, batch_size=4))
    if fault == "evaluated":
        ((found,),) = [list(results.values()) for results in trainer.validate(module, DataLoader(data), verbose=False)]
        sys.stdout.write(f"val {found:.6f}\n")
    if fault == "late" and trainer.global_rank == int(fault_rank):
        sys.exit(3)
    # A single write, to avoid interleaving with other ranks' output.
    sys.stdout.write(f"done {trainer.global_rank} {module.net.weight.sum().item():.6f}\n")


if __name__ == "__main__":
    main()
