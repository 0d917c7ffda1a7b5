"""Random numbers in steps: equal on ranks with the same samples, different on ranks with different samples."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pardist import HybridStrategy
from tests.helpers.models import Base
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import quiet_trainer

WIDTH = 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Noisy(Base):
    """Dropout of whole tensors inside blocks, and noise drawn by the step itself."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.drawn = []

    def training_step(self, batch, batch_idx):
        noise = torch.rand(WIDTH)
        self.drawn.append(noise)
        return self.blocks(batch[0] + noise * (1 + self.shift)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _train(strategy, devices):
    torch.manual_seed(3)
    module = Noisy()
    data = TensorDataset(torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1)))
    trainer = quiet_trainer(strategy=strategy, devices=devices, max_steps=4, use_distributed_sampler=False)
    trainer.fit(module, DataLoader(data, batch_size=8))
    return module.drawn[-1], snapshot(module)


def test_ranks_that_share_layers_of_a_stage_draw_the_same():
    strategy = HybridStrategy(
        tensor_parallel_size=2, pipeline_parallel_size=2, pipeline_settings={"num_microbatches": 2}
    )
    results = run_ranks(4, _train, strategy, 4)
    for drawn, weights in results[1:]:
        torch.testing.assert_close(drawn, results[0][0], rtol=0, atol=0)
        # Replicated parameters are updated by each rank.
        assert_close(weights, results[0][1], rtol=1e-6)


def test_pipelines_with_other_samples_draw_others():
    strategy = HybridStrategy(pipeline_parallel_size=2, pipeline_settings={"num_microbatches": 2})
    results = run_ranks(4, _train, strategy, 4)
    drawn = {tuple(noise.tolist()) for noise, _ in results}
    assert len(drawn) == 2
    for _, weights in results[1:]:
        assert_close(weights, results[0][1], rtol=1e-6)


class Scaling(nn.Module):
    """Layer that scales by a random number, and back."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        by = np.random.uniform(0.5, 2) * random.uniform(0.5, 2)
        return self.linear(x * by) / by


class ScalesBack(Base):
    """One stage multiplies by a drawn number and a later one divides by it; some generators are the module's own."""

    def __init__(self, unstaged):
        super().__init__()
        self.numpys, self.pythons = np.random.default_rng(1), random.Random(1)
        self.torchs = torch.Generator().manual_seed(1)
        self.unstaged = unstaged
        self.blocks = nn.ModuleList(Scaling() for _ in range(4))

    def training_step(self, batch, batch_idx):
        x = batch[0]
        scale = np.random.uniform(0.5, 2) * self.numpys.uniform(0.5, 2) * self.pythons.uniform(0.5, 2)
        scale = scale * (torch.rand((), generator=self.torchs).item() + 0.5)
        x = x * scale
        for block in self.blocks:
            by = random.uniform(0.5, 2) * torch.rand(()).item() + 0.5
            x, scale = block(x) * by, scale * by
            if self.unstaged and x.sum() > 1e6:
                break
        np.random.rand(3), random.random(), self.numpys.random(), self.pythons.random()
        return (x / scale - batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _scale_back(strategy, devices, unstaged):
    torch.manual_seed(3)
    module = ScalesBack(unstaged)
    data = TensorDataset(torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1)))
    trainer = quiet_trainer(strategy=strategy, devices=devices, max_steps=4, use_distributed_sampler=False)
    trainer.fit(module, DataLoader(data, batch_size=8))
    return snapshot(module), np.random.rand(), random.random(), module.numpys.random()


@pytest.mark.parametrize(
    ("settings", "unstaged"),
    [
        ({"num_microbatches": 4}, False),
        ({"num_microbatches": 4, "schedule": "interleaved", "chunks_per_rank": 2}, False),
        ({"schedule": "mp"}, False),
        ({"schedule": "mp"}, True),
    ],
    ids=["micro-batches", "chunks", "mp", "no fixed stages"],
)
def test_stages_draw_the_same_with_numpy_and_python(settings, unstaged):
    strategy = HybridStrategy(pipeline_parallel_size=2, pipeline_settings=settings)
    expected, *_ = _scale_back("auto", 1, unstaged)
    results = run_ranks(2, _scale_back, strategy, 2, unstaged)
    for weights, *drawn in results:
        assert_close(weights, expected)
        # Draws outside of steps, such as the order of samples, continue identically.
        assert drawn == list(results[0][1:])
