"""Activation checkpointing of blocks is bit-identical to runs without it, including dropout and batch norm."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from lightning_pardist import DDPStrategy, FSDPStrategy, PipelineStrategy, ZeroStrategy
from lightning_pardist.engines.common import activation_checkpointing
from tests.helpers.models import Base
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import BATCH, Data, quiet_trainer, train

STRATEGIES = {
    "ddp": DDPStrategy,
    "zero1": functools.partial(ZeroStrategy, zero_stage=1),
    "zero2": ZeroStrategy,
    # Units are either the linear layers inside the blocks, or the blocks.
    "fsdp-inner": functools.partial(FSDPStrategy, units=["Linear"]),
    "fsdp": functools.partial(FSDPStrategy, min_unit_size_mb=0),
}


class Block(nn.Module):
    calls = 0

    def __init__(self):
        super().__init__()
        self.wide, self.norm, self.narrow = nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 6)

    def forward(self, x, *, rate):
        Block.calls += 1
        return {"out": x + F.dropout(self.narrow(self.norm(self.wide(x)).relu()), rate, self.training)}


class Residual(Base):
    def __init__(self):
        super().__init__("adamw")
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        for block in self.blocks:
            x = block(x, rate=0.3)["out"]
        return self.note(F.mse_loss(self.head(x), y))


def _train(strategy, devices, setting):
    torch.manual_seed(11)
    module = Residual()
    trainer = quiet_trainer(
        strategy=strategy(activation_checkpointing=setting, check_samples=False),
        devices=devices,
        use_distributed_sampler=False,
    )
    Block.calls = 0
    generator = torch.Generator().manual_seed(2)
    data = TensorDataset(torch.randn(BATCH * 3, 6, generator=generator), torch.randn(BATCH * 3, 1, generator=generator))
    torch.manual_seed(100 + trainer.global_rank)
    trainer.fit(module, datamodule=Data(data))
    assert {type(block) for block in module.blocks} == {Block}
    return snapshot(module), Block.calls


def _all(strategy, devices):
    return [_train(strategy, devices, setting) for setting in (None, "auto", ["Block"])]


@pytest.mark.push("fsdp", "zero1")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bit_for_bit_as_without(strategy):
    for (plain, calls), *others in run_ranks(2, _all, STRATEGIES[strategy], 2):
        assert calls == 3 * 3
        for weights, more_calls in others:
            assert more_calls == 2 * calls
            assert_close(weights, plain, rtol=0.0)


def _backward_in_halves():
    make = functools.partial(PipelineStrategy, schedule="interleaved_zb")
    return [
        train(functools.partial(make, activation_checkpointing=setting), 2, "gpt", {}, {}) for setting in (None, "auto")
    ]


def test_a_backward_in_halves_runs_blocks_twice():
    for plain, checkpointed in run_ranks(2, _backward_in_halves):
        for part in ("losses", "weights"):
            assert_close(checkpointed[part], plain[part], rtol=0.0)


def test_memory_is_that_of_the_inputs():
    module = nn.Sequential(*(nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 8)) for _ in range(4)))
    held = []
    for setting in (None, "auto"):
        undo = activation_checkpointing.checkpoint_blocks(module, setting) if setting else None
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):  # noqa: B023
            loss = module(torch.randn(32, 8, requires_grad=True)).sum()
        held.append(sum(saved))
        loss.backward()
        # A deep copy uses checkpointing too, with its own parameters.
        twin = copy.deepcopy(module)
        twin(torch.ones(2, 8)).sum().backward()
        assert type(twin[0]).__name__ == "Sequential"
        if undo:
            undo()
    assert held[1] < held[0] / 20
    assert type(module[0]) is nn.Sequential


def test_what_cannot_work_is_refused_by_name():
    module = Residual()
    with pytest.raises(ValueError, match=r"names Attention, but the module.s classes are .*Block"):
        activation_checkpointing.checkpoint_blocks(module, ["Attention"])
    with pytest.raises(ValueError, match="found no repeated blocks in Linear"):
        activation_checkpointing.checkpoint_blocks(nn.Linear(2, 2), "auto")
    with pytest.raises(ValueError, match="chooses blocks, which cannot be called"):
        activation_checkpointing.checkpoint_blocks(module, ["ModuleList"])
    with pytest.raises(ValueError, match="activation_checkpointing=True is not valid"):
        DDPStrategy(activation_checkpointing=True)
    module.blocks[1].forward = lambda x: x
    with pytest.raises(ValueError, match=r"selects blocks\.1, whose forward was replaced"):
        activation_checkpointing.checkpoint_blocks(module, "auto")
