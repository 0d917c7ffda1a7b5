"""Backward while the counts of losses are exchanged: the numbers are those of one process when counts change."""

from contextlib import ExitStack
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pardist import DDPStrategy, FSDPStrategy, HybridStrategy, ZeroStrategy
from lightning_pardist.trainer.loss_weights import LossWeights
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import quiet_trainer

STRATEGIES = {
    "ddp": DDPStrategy,
    "zero1": lambda: ZeroStrategy(zero_stage=1),
    "zero2": lambda: ZeroStrategy(zero_stage=2),
    "zero3": FSDPStrategy,
    "zero2_int8": lambda: ZeroStrategy(zero_stage=2, reduce="int8"),
    "tp": lambda: HybridStrategy(tensor_parallel_size=2),
}
#: Samples of each rank in each step. From the third step on backward does not wait; counts change in the fourth, for
#: both ranks in the eighth, and in the last.
SIZES = ((4, 4), (4, 4), (4, 4), (4, 2), (4, 4), (4, 4), (4, 4), (3, 1), (4, 4), (4, 4), (4, 4), (2, 4))
CHANGES = [3, 7, 11]


class Module(pl.LightningModule):
    """With ``keeps_gradients`` the gradients of all steps add up; ``skips`` is a rank without loss in the fourth step,
    ``adds`` one whose loss has another term there. ``hooks`` changes gradients: hooks on gradients, hooks after their
    accumulation, or an overridden ``backward``. ``reads`` is a rank that reads the logged loss before backward, and the
    loss may not be logged at all."""

    def __init__(self, keeps_gradients=False, skips=None, adds=None, hooks=None, reads=None, logs=True):
        super().__init__()
        # Under tensor parallelism backward adds up gradients between the layers.
        layers = [layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.Tanh())]
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *layers, nn.Linear(8, 3))
        self.keeps_gradients, self.skips, self.adds, self.steps = keeps_gradients, skips, adds, []
        self.reads, self.logs, self.read = reads, logs, []
        for param in self.parameters():
            if hooks == "gradient":
                param.register_hook(lambda grad: grad + 0.1)
            if hooks == "accumulation":
                param.register_post_accumulate_grad_hook(_add)

    def training_step(self, batch, batch_idx):
        x, labels = batch
        logits = self.net(x)
        if batch_idx == CHANGES[0] and self.skips == self.global_rank:
            return None
        loss = F.cross_entropy(logits, labels)
        if batch_idx == CHANGES[0] and self.adds == self.global_rank:
            loss = loss + logits.square().mean()
        if self.logs:
            self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, *args):
        if self.logs:
            self.steps.append(self.trainer.callback_metrics["loss_step"].clone())

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if not self.keeps_gradients:
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class ModuleWithBackward(Module):
    def backward(self, loss):
        loss.backward()
        for param in self.parameters():
            _add(param)


def _add(param):
    param.grad.add_(0.1)


class Reader(pl.Callback):
    """Reads the logged loss before backward."""

    def on_before_backward(self, trainer, module, loss):
        module.read.append(trainer.callback_metrics["loss_step"].item())


def _loader(rank):
    generator = torch.Generator().manual_seed(5)
    total = sum(map(sum, SIZES))
    data = TensorDataset(torch.randn(total, 6, generator=generator), torch.randint(0, 3, (total,), generator=generator))
    batches, begin = [], 0
    for sizes in SIZES:
        whole = list(range(begin, begin + sum(sizes)))
        batches.append(whole if rank is None else whole[sum(sizes[:rank]) :][: sizes[rank]])
        begin += len(whole)
    return DataLoader(data, batch_sampler=batches)


def _fit(strategy, devices, overlaps, module, trainer_kwargs):
    torch.manual_seed(3)
    factors, waits = [], []
    before, after = LossWeights.before_backward, LossWeights.after_backward

    def noted_before(weights, **kwargs):
        before(weights, **kwargs)
        waits.append(weights._step is None)

    def noted(weights):
        factors.append(after(weights))
        return factors[-1]

    kind = ModuleWithBackward if module.get("hooks") == "backward" else Module
    module = kind(**module)
    single = strategy == "single"
    trainer = quiet_trainer(
        strategy="auto" if single else STRATEGIES[strategy](),
        devices=devices,
        use_distributed_sampler=False,
        **trainer_kwargs,
    )
    if module.reads == trainer.global_rank:
        trainer.callbacks.append(Reader())
    loader = _loader(None if single else trainer.strategy.distributed_sampler_kwargs["rank"])
    with ExitStack() as patches:
        patches.enter_context(patch.object(LossWeights, "before_backward", noted_before))
        patches.enter_context(patch.object(LossWeights, "after_backward", noted))
        if not overlaps:
            patches.enter_context(patch.object(LossWeights, "_may_overlap", lambda weights: False))
        trainer.fit(module, loader)
    return {
        "weights": snapshot(module),
        "logged": {name: value.clone() for name, value in trainer.callback_metrics.items()},
        "steps": {"steps": torch.stack(module.steps)} if module.steps else {},
        "read": module.read,
        "overlapped": [step for step, waited in enumerate(waits) if not waited],
        "changes": [step for step, factor in enumerate(factors) if factor != 1.0],
    }


@pytest.mark.push("ddp", "zero1", "zero2", "zero3")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_counts_that_change_after_some_steps(strategy):
    kwargs = {"gradient_clip_val": 0.3}
    (wanted,) = run_ranks(1, _fit, "single", 1, True, {}, kwargs)
    world = 4 if strategy == "tp" else 2
    for rank, found in enumerate(run_ranks(world, _fit, strategy, world, True, {}, kwargs)):
        assert found["changes"] == ([] if strategy in ("zero2_int8", "tp") else CHANGES)
        if strategy != "zero2_int8":
            # Only a rank whose own counts have changed waits before backward.
            assert found["overlapped"] == ([] if strategy == "tp" else [[2, 3, 6, 10], [2, 6, 10, 11]][rank])
        for part in ("weights", "logged", "steps"):
            # Gradients of eight bits are not exact.
            if strategy != "zero2_int8":
                assert_close(found[part], wanted[part])


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize(
    ("module", "kwargs", "changes"),
    [
        ({"keeps_gradients": True}, {}, []),
        ({}, {"accumulate_grad_batches": 2}, []),
        ({"skips": 1}, {}, CHANGES[1:]),
        ({"adds": 1}, {}, CHANGES[1:]),
        ({"logs": False}, {}, CHANGES[1:]),
        ({"hooks": "gradient"}, {}, []),
        ({"hooks": "accumulation", "logs": False}, {}, []),
        ({"hooks": "backward", "logs": False}, {}, []),
        ({"reads": 0}, {}, []),
    ],
    ids=[
        *("kept gradients", "accumulation", "no loss", "another term", "nothing logged", "gradient hooks"),
        *("hooks after accumulation", "backward", "read early"),
    ],
)
def test_the_same_as_without_overlap(strategy, module, kwargs, changes):
    if strategy == "zero3" and "skips" in module:
        pytest.skip("all ranks of zero3 must have a loss")
    overlapped = run_ranks(2, _fit, strategy, 2, True, module, kwargs)
    waiting = run_ranks(2, _fit, strategy, 2, False, module, kwargs)
    for found, wanted in zip(overlapped, waiting, strict=True):
        assert [step for step in found["changes"] if step != CHANGES[0]] == [
            step for step in changes if step != CHANGES[0]
        ]
        assert not wanted["changes"]
        assert found["read"] == wanted["read"]
        for part in ("weights", "logged", "steps"):
            assert_close(found[part], wanted[part])


def test_tensor_ranks_of_which_one_reads_early():
    found = run_ranks(4, _fit, "tp", 4, True, {"reads": 0}, {})
    for part in ("weights", "logged", "steps"):
        assert_close(found[1][part], found[0][part])
        assert_close(found[2][part], found[0][part])


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "tp"])
def test_hooks_after_accumulation_change_gradients(strategy):
    (wanted,) = run_ranks(1, _fit, "single", 1, True, {"hooks": "accumulation"}, {})
    world = 4 if strategy == "tp" else 2
    for found in run_ranks(world, _fit, strategy, world, True, {"hooks": "accumulation"}, {}):
        assert_close(found["weights"], wanted["weights"])
