"""Checkpoints saved from every common place, of a model whose weights are on several ranks, against one process."""

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import TensorDataset

from tests.helpers.checkpoints import STRATEGIES
from tests.helpers.parity import assert_close
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import BATCH, Data, _flat_state, quiet_trainer

VOCABULARY, WIDTH, LENGTH, STEPS = 512, 16, 6, 4
PLACES = ("step", "validation", "epoch", "train_end", "exception", "after", "evaluated")


class Tied(pl.LightningModule):
    """Embedding tied to the head, and a block that is called first and last."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for block in (*self.blocks, self.blocks[0]):
            hidden = hidden + torch.tanh(block(hidden))
        return self.head(self.norm(hidden))

    def training_step(self, batch, batch_idx):
        (tokens,) = batch
        return F.cross_entropy(self(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01, eps=1e-3)


class SaveAnywhere(pl.Callback):
    """Saves from all hooks in which users save; the last batch raises."""

    def __init__(self, folder: str, fails: bool) -> None:
        self.folder = folder
        self.fails = fails

    def _save(self, trainer: pl.Trainer, place: str) -> None:
        trainer.save_checkpoint(f"{self.folder}/{place}.ckpt")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if batch_idx == 1:
            self._save(trainer, "step")
        if self.fails and batch_idx == STEPS - 1:
            raise ArithmeticError("enough")

    def on_validation_end(self, trainer, pl_module) -> None:
        self._save(trainer, "validation")

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        self._save(trainer, "epoch")

    def on_train_end(self, trainer, pl_module) -> None:
        self._save(trainer, "train_end")

    def on_exception(self, trainer, pl_module, exception) -> None:
        self._save(trainer, "exception")


class FailsIn(Tied):
    """All ranks raise in a hook of the third step, while the step communicates."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook = hook

    def _fail(self, hook: str) -> None:
        if hook == self.hook and self.trainer.global_step == 2:
            raise ArithmeticError("enough")

    def training_step(self, batch, batch_idx):
        self._fail("before the forward")
        loss = super().training_step(batch, batch_idx)
        self._fail("after the forward")
        return loss

    def on_after_backward(self) -> None:
        self._fail("after the backward")

    def on_before_optimizer_step(self, optimizer) -> None:
        self._fail("before the update")


class _Data(Data):
    def val_dataloader(self):
        return self.train_dataloader()


def _fit(name: str, world: int, folder: str, form: str = "full") -> None:
    tokens = torch.randint(0, VOCABULARY, (BATCH * STEPS, LENGTH), generator=torch.Generator().manual_seed(1))
    for fails in (False, True):
        torch.manual_seed(11)
        module = Tied()
        trainer = quiet_trainer(
            strategy=STRATEGIES[name](checkpoint=form) if name != "single" else STRATEGIES[name](),
            devices=world,
            use_distributed_sampler=False,
            callbacks=[
                SaveAnywhere(folder, fails),
                ModelCheckpoint(f"{folder}/top", "{step}", every_n_train_steps=2, save_top_k=-1),
            ],
            enable_checkpointing=True,
            num_sanity_val_steps=0,
            limit_val_batches=1,
            gradient_clip_val=0.5,
            accumulate_grad_batches=2,
        )
        if fails:
            with pytest.raises(ArithmeticError, match="enough"):
                trainer.fit(module, datamodule=_Data(TensorDataset(tokens)))
        else:
            trainer.fit(module, datamodule=_Data(TensorDataset(tokens)))
            trainer.save_checkpoint(f"{folder}/after.ckpt")
            # The module is split again for this, and the optimizers remain those of the fit.
            trainer.validate(module, datamodule=_Data(TensorDataset(tokens)), verbose=False)
            trainer.callbacks.clear()
            trainer.save_checkpoint(f"{folder}/evaluated.ckpt")


def _saved(folder: str) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for place in (*PLACES, "top/step=2"):
        checkpoint = torch.load(f"{folder}/{place}.ckpt", weights_only=True)
        found[place] = checkpoint["state_dict"] | _flat_state(checkpoint["optimizer_states"])
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("one"))
    _fit("single", 1, folder)
    return _saved(folder)


def _check(name, world, folder, expected):
    run_ranks(world, _fit, name, world, folder)
    for place, found in _saved(folder).items():
        assert_close(found, expected[place])


_OTHERS = ("zero1", "zero2", "fsdp", "pp_interleaved")


@pytest.mark.push("zero3", "pp", "tp")
@pytest.mark.parametrize(
    "name",
    ["ddp", "zero3", "tp", "pp", "mp", *(pytest.param(name, marks=pytest.mark.slow) for name in _OTHERS)],
)
def test_saved_anywhere_is_what_one_process_saves(name, tmp_path, expected):
    _check(name, 2, str(tmp_path), expected)


@pytest.mark.parametrize(
    "name",
    ["3d", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tp_zero1", "tp_zero3", "pp_zero1", "pp_zero3"))],
)
def test_saved_anywhere_under_two_axes(name, tmp_path, expected):
    _check(name, 4, str(tmp_path), expected)


def _fail_in(name: str, world: int, hook: str, folder: str) -> None:
    tokens = torch.randint(0, VOCABULARY, (BATCH * STEPS, LENGTH), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(11)
    trainer = quiet_trainer(
        strategy=STRATEGIES[name](),
        devices=world,
        use_distributed_sampler=False,
        callbacks=[
            ModelCheckpoint(folder, "raised", save_on_exception=True, every_n_train_steps=100, save_top_k=-1),
        ],
        enable_checkpointing=True,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )
    with pytest.raises(ArithmeticError, match="enough"):
        trainer.fit(FailsIn(hook), datamodule=_Data(TensorDataset(tokens)))


@pytest.mark.push("zero3-*", "mp-*")
@pytest.mark.parametrize("hook", ["before the forward", "after the forward", "after the backward", "before the update"])
@pytest.mark.parametrize("name", ["ddp", "zero2", "zero3", "tp", "mp"])
def test_saved_after_the_same_failure_of_all_ranks_in_a_step(name, hook, tmp_path):
    _fail_in("single", 1, hook, str(tmp_path / "one"))
    run_ranks(2, _fail_in, name, 2, hook, str(tmp_path / "two"))
    one, two = (torch.load(tmp_path / path / "raised.ckpt", weights_only=True) for path in ("one", "two"))
    assert_close(*(found["state_dict"] | _flat_state(found["optimizer_states"]) for found in (two, one)))
