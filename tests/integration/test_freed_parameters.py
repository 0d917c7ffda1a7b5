"""Parameters that a strategy has replaced by shards are freed: no rank keeps full copies."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pardist import FSDPStrategy, HybridStrategy
from tests.helpers.models import Base
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import quiet_trainer

WIDTH = 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Deep(Base):
    """Holds only weak references to its initial parameters."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.made_of = [weakref.ref(param) for param in self.parameters()]
        self.found = []

    def training_step(self, batch, batch_idx):
        return self.blocks(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_before_optimizer_step(self, optimizer):
        made_of = [param for ref in self.made_of if (param := ref()) is not None]
        own = {id(param) for param in self.parameters()}
        replaced = sum(param.untyped_storage().nbytes() for param in made_of if id(param) not in own)
        self.found.append(replaced)


STRATEGIES = {
    "zero3": (2, lambda: FSDPStrategy(min_unit_size_mb=0)),
    "zero3_offload": (2, lambda: "pardist_zero3_offload"),
    "hsdp": (2, lambda: "pardist_hsdp"),
    "tp": (2, lambda: "pardist_tp"),
    "pp": (2, lambda: "pardist_pp"),
    "3d": (4, lambda: HybridStrategy(tensor_parallel_size=2, pipeline_parallel_size=2)),
}


def _replaced_bytes(name, ranks):
    module = Deep()
    # Check without the garbage collector, which runs at arbitrary times.
    gc.collect()
    gc.disable()
    try:
        trainer = quiet_trainer(strategy=STRATEGIES[name][1](), devices=ranks, max_steps=2)
        trainer.fit(module, DataLoader(TensorDataset(torch.ones(16, WIDTH)), batch_size=4))
    finally:
        gc.enable()
    return module.found


@pytest.mark.push("zero3", "tp", "pp")
@pytest.mark.parametrize("name", STRATEGIES)
def test_replaced_parameters_are_freed(name):
    ranks = STRATEGIES[name][0]
    for found in run_ranks(ranks, _replaced_bytes, name, ranks):
        assert found == [0, 0]
