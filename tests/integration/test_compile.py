"""``compile="blocks"`` and ``"step"`` under strategies give the same results as runs without them."""

import functools

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pardist import (
    DDPStrategy,
    FSDPStrategy,
    HybridStrategy,
    LocalSGDStrategy,
    PipelineStrategy,
    TensorParallelStrategy,
    ZeroStrategy,
)
from tests.helpers.models import Base
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import BATCH, Data, quiet_trainer

STEPS = 3
STRATEGIES = {
    "ddp": DDPStrategy,
    "zero1": functools.partial(ZeroStrategy, zero_stage=1),
    "zero2": functools.partial(ZeroStrategy, gather="bf16"),
    "zero3": functools.partial(FSDPStrategy, min_unit_size_mb=0),
    "zero3 inside": functools.partial(FSDPStrategy, units=["Linear"]),
    "islands": functools.partial(LocalSGDStrategy, sync_every=2),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(6), nn.Linear(6, 16), nn.Linear(16, 6)

    def forward(self, x):
        return x + self.narrow(self.wide(self.norm(x)).relu())


class Blocks(Base):
    """Blocks with logging in the middle of the step."""

    def __init__(self, **kwargs):
        super().__init__("adamw", **kwargs)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        self.log("magnitude", out.abs().mean(), on_epoch=True)
        return F.mse_loss(out, y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.mse_loss(self(x), y))


class Compiled(Callback):
    """Callback that records the strategy's description of compiled code at the end of training."""

    text = ""

    def on_train_end(self, trainer, pl_module):
        self.text = trainer.strategy.describe()


def _data(count):
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(count, 6, generator=generator), torch.randn(count, 1, generator=generator))


def _fit(strategy, folder, **settings):
    torch.manual_seed(11)
    torch.compiler.reset()
    module = Blocks()
    saved = ModelCheckpoint(folder, filename="last")
    trainer = quiet_trainer(
        strategy=strategy(**settings),
        devices=torch.distributed.get_world_size(),
        use_distributed_sampler=False,
        callbacks=[saved, compiled := Compiled()],
        enable_checkpointing=True,
    )
    trainer.fit(module, datamodule=Data(_data(BATCH * STEPS)))
    state = torch.load(folder / "last.ckpt", weights_only=False)["state_dict"]
    logged = {name: value.clone() for name, value in trainer.callback_metrics.items()}
    trainer.validate(module, DataLoader(_data(8), batch_size=2), verbose=False)
    logged |= {name: value.clone() for name, value in trainer.callback_metrics.items()}
    assert (" graphs in " in compiled.text) == ("compile" in settings), compiled.text
    assert {type(block) for block in module.blocks} == {Block}
    assert "training_step" not in module.__dict__
    return snapshot(module), state, logged


def _each(kinds, folder, settings, others):
    found = {}
    for kind in kinds:
        found[kind] = [
            _fit(STRATEGIES[kind], folder / kind.replace(" ", "_") / str(index), **(others | each))
            for index, each in enumerate(({}, settings))
        ]
    return found


def _same(results):
    for result in results:
        for plain, compiled in result.values():
            for one, other in zip(plain, compiled, strict=True):
                assert_close(other, one)


BLOCKS = {"compile": "blocks", "compile_backend": "aot_eager"}
STEP = {"compile": "step", "compile_backend": "aot_eager"}


@pytest.mark.slow
def test_compiled_blocks_give_the_same_numbers(tmp_path):
    kinds = ("ddp", "zero2", "zero3", "zero3 inside")
    _same(run_ranks(2, _each, kinds, tmp_path, BLOCKS, {}))


@pytest.mark.slow
def test_compiled_blocks_with_checkpointed_activations_give_the_same_numbers(tmp_path):
    kinds = ("ddp", "zero1", "zero3", "zero3 inside", "islands")
    _same(run_ranks(2, _each, kinds, tmp_path, BLOCKS, {"activation_checkpointing": "auto"}))


def test_a_compiled_step_gives_the_same_numbers(tmp_path):
    _same(run_ranks(2, _each, ("ddp", "zero3"), tmp_path, STEP, {"loss_weight": "samples"}))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"compile": "blocks"}, {"compile": "step", "loss_weight": "samples"}])
def test_the_default_backend_gives_the_same_numbers(settings, tmp_path):
    kinds = ("ddp", "zero2", "zero3")
    _same(run_ranks(2, _each, kinds, tmp_path, settings, {}, timeout_s=400))


def _refused(make, by_hand):
    module = Blocks()
    module.automatic_optimization = not by_hand
    if by_hand is None:
        module = torch.compile(Blocks(), backend="eager")
    try:
        quiet_trainer(strategy=make(), devices=torch.distributed.get_world_size(), max_steps=1).fit(
            module, DataLoader(_data(4), batch_size=2)
        )
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("make", "by_hand", "message"),
    [
        (functools.partial(TensorParallelStrategy, compile="blocks"), False, "computes on split tensors"),
        (functools.partial(HybridStrategy, context_parallel_size=2, compile="blocks"), False, "split tensors"),
        (functools.partial(PipelineStrategy, compile="blocks"), False, "runs a step in pieces"),
        (functools.partial(DDPStrategy, compile="step"), False, "loss_weight='auto' reads the counts"),
        (functools.partial(DDPStrategy, compile="step", loss_weight="sum"), True, "optimizes by hand"),
        (functools.partial(DDPStrategy, compile="blocks"), None, "was compiled as a whole"),
    ],
    ids=["tensor", "context", "pipeline", "weights", "by hand", "twice"],
)
def test_what_cannot_be_compiled_is_refused(make, by_hand, message):
    assert all(message in text for text in run_ranks(2, _refused, make, by_hand))


def test_settings_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match=r"compile='all' is unknown. Use auto, blocks, step or None."):
        DDPStrategy(compile="all")
