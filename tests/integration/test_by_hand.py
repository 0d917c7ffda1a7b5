"""Modules that parallelise themselves, written for Lightning's ``ModelParallelStrategy``, run unchanged."""

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import TensorDataset

from lightning_pardist import DDPStrategy, FSDPStrategy, HybridStrategy, PipelineStrategy, TensorParallelStrategy
from tests.helpers.checkpoints import Record, whole_states
from tests.helpers.parity import assert_close
from tests.helpers.ranks import RankFailed, run_ranks
from tests.helpers.runs import BATCH, Data, global_losses, quiet_trainer

STEPS, WIDTH = 6, 8
STRATEGIES = {
    "ddp": DDPStrategy,
    "fsdp": FSDPStrategy,
    "tp": TensorParallelStrategy,
    "tp_zero2": lambda **kwargs: TensorParallelStrategy(tensor_parallel_size=2, data_parallel="zero2", **kwargs),
    "hybrid": lambda **kwargs: HybridStrategy(tensor_parallel_size=2, data_parallel="zero3", **kwargs),
    "3d": lambda **kwargs: HybridStrategy(tensor_parallel_size="machine", pipeline_parallel_size="machine", **kwargs),
    "pp": PipelineStrategy,
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class ByHand(pl.LightningModule):
    """Module as in Lightning's documentation; ``how`` selects its own parallelism, none on one process."""

    def __init__(self, how: str = "", seed: int = 11, meta: bool = False) -> None:
        super().__init__()
        self.how, self.meta = how, meta
        torch.manual_seed(seed)
        with torch.device("meta" if meta else "cpu"):
            self.embed = nn.Linear(5, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.head = nn.Linear(WIDTH, 3)
        self.unused = nn.Linear(2, 2)

    def configure_model(self):
        if isinstance(self.blocks[0].up.weight, DTensor):
            return
        for block in self.blocks:
            if "tensor" in self.how:
                plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(block, self.device_mesh["tensor_parallel"], plan)
            if "shard" in self.how:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", F.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-3)


def _dataset(length):
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(length, 5, generator=generator), torch.arange(length) % 3)


def _fit(strategy, devices, how, *, epochs=2, save=None, resume=None, seed=11, form="full", **trainer_kwargs):
    module = ByHand(how, seed=seed)
    record = Record()
    trainer = quiet_trainer(
        strategy=STRATEGIES[strategy](checkpoint=form),
        devices=devices,
        use_distributed_sampler=False,
        callbacks=[record],
        max_epochs=epochs,
        **trainer_kwargs,
    )
    data = Data(_dataset(BATCH * STEPS))
    trainer.fit(module, datamodule=data, ckpt_path=resume)
    if save:
        trainer.save_checkpoint(save)
    split = sum(isinstance(param, DTensor) for param in module.parameters())
    losses = global_losses(record.losses, devices)
    with whole_states(trainer.strategy):
        weights = {name: value.clone() for name, value in trainer.strategy.lightning_module_state_dict().items()}
    return {
        "split": split,
        "losses": {"loss": losses},
        "weights": weights if trainer.is_global_zero else {},
        "optimizer": record.optimizer_state,
        "loaded": record.loaded_optimizer,
        "metrics": dict(trainer.callback_metrics),
    }


def _compare(got, want, *parts):
    for part in parts:
        assert_close(got[part], want[part])


HOWS = [
    ("tp", 2, "tensor", 8),
    ("fsdp", 2, "shard", 12),
    ("ddp", 2, "shard", 12),
    ("3d", 2, "tensor", 8),
    ("3d", 2, "tensor, shard", 12),
    ("hybrid", 4, "tensor, shard", 12),
    ("tp_zero2", 4, "tensor", 8),
]
QUICK = (HOWS[1], HOWS[5])


@pytest.mark.push("fsdp-*")
@pytest.mark.parametrize(
    ("strategy", "world", "how", "split"),
    [pytest.param(*how, marks=() if how in QUICK else pytest.mark.slow) for how in HOWS],
)
def test_same_numbers_as_one_process(strategy, world, how, split):
    for settings in ({}, {"gradient_clip_val": 0.05}, {"accumulate_grad_batches": 3}):
        want = run_ranks(1, _fit_with, "ddp", 1, "", settings)[0]
        got = run_ranks(world, _fit_with, strategy, world, how, settings)[0]
        assert got["split"] == split
        _compare(got, want, "losses", "weights", "optimizer")
        assert_close({"loss": got["metrics"]["loss_epoch"]}, {"loss": want["metrics"]["loss_epoch"]})


def _fit_with(strategy, devices, how, settings):
    return _fit(strategy, devices, how, **settings)


LAYOUTS = [("ddp", 1, ""), ("tp", 2, "tensor"), ("fsdp", 2, "shard"), ("hybrid", 4, "tensor, shard"), ("fsdp", 2, "")]
WAYS = [(0, 3, "full"), (3, 1, "full"), (1, 2, "sharded"), (2, 0, "full"), (3, 4, "sharded"), (4, 1, "full")]


@pytest.mark.push("1-2-sharded")
@pytest.mark.parametrize(
    ("source", "target", "form"),
    [pytest.param(*way, marks=() if index in (1, 2) else pytest.mark.slow) for index, way in enumerate(WAYS)],
)
def test_checkpoints_open_anywhere(source, target, form, tmp_path):
    path = str(tmp_path / "half.ckpt")
    saving, loading = LAYOUTS[source], LAYOUTS[target]
    half = run_ranks(saving[1], _fit_with, *saving, {"epochs": 1, "save": path, "form": form})[0]
    whole = run_ranks(1, _fit_with, "ddp", 1, "", {})[0]
    resumed = run_ranks(loading[1], _fit_with, *loading, {"resume": path, "seed": 5})[0]
    assert resumed["loaded"].keys() == half["optimizer"].keys()
    for key, value in half["optimizer"].items():
        assert torch.equal(resumed["loaded"][key], value), key
    _compare(resumed, whole, "weights", "optimizer")
    if form == "full":
        plain = ByHand()
        plain.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
        _compare({"weights": dict(plain.state_dict())}, half, "weights")


def _validated(how, path):
    module = ByHand(how, seed=5, meta=True)
    trainer = quiet_trainer(strategy=STRATEGIES["tp"](), devices=2)
    data = Data(_dataset(BATCH * STEPS))
    return trainer.validate(module, torch.utils.data.DataLoader(data.dataset, batch_size=6), ckpt_path=path)[0]["val"]


def test_built_on_meta_and_validated_from_a_checkpoint(tmp_path):
    path = str(tmp_path / "half.ckpt")
    run_ranks(1, _fit_with, "ddp", 1, "", {"epochs": 1, "save": path})
    values = run_ranks(2, _validated, "tensor", path)
    module = ByHand.load_from_checkpoint(path)
    inputs, targets = _dataset(BATCH * STEPS).tensors
    assert values == pytest.approx([F.cross_entropy(module(inputs), targets).item()] * 2, rel=1e-5)


def _uneven():
    """Validate five samples on two ranks: one of them has one batch fewer."""
    module = ByHand("shard")
    trainer = quiet_trainer(strategy=STRATEGIES["ddp"](), devices=2)
    loader = torch.utils.data.DataLoader(_dataset(5), batch_size=1)
    value = trainer.validate(module, loader, verbose=False)[0]["val"]
    predicted = trainer.predict(module, loader)
    return value, len(predicted), module.blocks[0].up.weight.to_local().shape != module.blocks[0].up.weight.shape


def test_a_rank_may_have_fewer_batches_to_evaluate():
    module = ByHand()
    inputs, targets = _dataset(5).tensors
    want = F.cross_entropy(module(inputs), targets).item()
    found = run_ranks(2, _uneven)
    assert [value for value, *_ in found] == pytest.approx([want] * 2, rel=1e-5)
    assert [(number, sharded) for _, number, sharded in found] == [(3, True), (2, True)]


def _alike(how):
    """Ranks that built different values get rank zero's, except for shards."""
    module = ByHand(how, seed=dist.get_rank())
    trainer = quiet_trainer(strategy=STRATEGIES["tp"](), devices=2, max_steps=1)
    trainer.fit(module, datamodule=Data(_dataset(BATCH * STEPS)))
    return module.embed.weight.detach().clone()


def test_what_is_replicated_is_made_alike():
    first, second = run_ranks(2, _alike, "tensor")
    assert torch.equal(first, second)


def _refused(strategy, how):
    _fit(strategy, 2, how, epochs=1)


def test_a_pipeline_of_a_split_module_is_refused():
    with pytest.raises(RankFailed, match="ByHand splits its parameters in configure_model"):
        run_ranks(2, _refused, "pp", "tensor")
