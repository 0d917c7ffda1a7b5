"""Buffers that a module registers in its first forward, also on single ranks only."""

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers.checkpoints import STRATEGIES
from tests.helpers.models import points
from tests.helpers.parity import assert_close
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import quiet_trainer


class Indexed(nn.Module):
    """Creates an index in its first call, as litgpt's LoRA layers do, and a persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        if not hasattr(self, "index"):
            self.register_buffer("index", torch.arange(5, -1, -1), persistent=False)
            self.register_buffer("scale", torch.full((3,), 0.5))
        return self.linear(x.index_select(1, self.index)) * self.scale[0]


class Late(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Indexed(), Indexed(), nn.Tanh(), nn.Linear(6, 1))

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SecondRank(Late):
    """The last rank's samples lead to another branch, which registers a buffer."""

    def training_step(self, batch, batch_idx):
        if batch_idx and self.global_rank == self.trainer.world_size - 1 and not hasattr(self, "seen"):
            self.register_buffer("seen", torch.full((4,), 3.0))
        return super().training_step(batch, batch_idx)


class SaveInTheMiddle(pl.Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if batch_idx == 1:
            trainer.save_checkpoint(self.path)


def _fit(make, name, world, path):
    torch.manual_seed(3)
    module = make()
    trainer = quiet_trainer(
        strategy=STRATEGIES[name]() if world > 1 else "auto",
        devices=world,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        callbacks=[SaveInTheMiddle(path)],
    )
    trainer.fit(module, DataLoader(points(16), batch_size=4), DataLoader(points(4), batch_size=4))
    return {name: value.clone() for name, value in (*module.named_parameters(), *module.named_buffers())}


@pytest.mark.push("SecondRank-zero3", "Late-mp")
@pytest.mark.parametrize(
    ("make", "name"),
    [(Late, "pp"), (Late, "mp"), (SecondRank, "pp"), (SecondRank, "ddp"), (SecondRank, "zero2"), (SecondRank, "zero3")],
)
def test_every_rank_has_them_in_the_end(make, name, tmp_path):
    wanted = _fit(make, "one", 1, tmp_path / "one.ckpt")
    for found in run_ranks(2, _fit, make, name, 2, tmp_path / "two.ckpt"):
        assert_close(found, wanted)
    ours, theirs = (torch.load(tmp_path / f"{n}.ckpt", weights_only=True)["state_dict"] for n in ("two", "one"))
    if make is Late:
        assert_close(ours, theirs)
