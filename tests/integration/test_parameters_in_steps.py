"""Steps that read, set and copy parameters other than by optimizers, where ranks hold shards."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lightning_pardist import FSDPStrategy, HybridStrategy
from tests.helpers.models import Base, points
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import BATCH, STEPS, Data, global_losses, quiet_trainer

#: Root unit only, which stays gathered through each step, and units that are gathered for their calls.
STRATEGIES = {
    "root": FSDPStrategy,
    "units": functools.partial(FSDPStrategy, min_unit_size_mb=0),
}


def _fit(strategy, module_class):
    torch.manual_seed(11)
    module = module_class()
    made = STRATEGIES[strategy]() if strategy in STRATEGIES else strategy
    devices = dist.get_world_size() if dist.is_initialized() else 1
    trainer = quiet_trainer(strategy=made, devices=devices, use_distributed_sampler=False)
    trainer.fit(module, datamodule=Data(points(BATCH * STEPS)))
    found = {"losses": {"loss": global_losses(module.losses, devices)}, "weights": snapshot(module)}
    return {**found, "saved": module.saved} if getattr(module, "saved", None) else found


def _fit_both(module_class):
    return [_fit(strategy, module_class) for strategy in STRATEGIES]


def _same_as_one_process(module_class):
    expected = _fit("auto", module_class)
    first, second = run_ranks(2, _fit_both, module_class)
    assert all(found.keys() == expected.keys() for found in first)
    for found in (*first, *second):
        for part in found:
            assert_close(found[part], expected[part])


class TargetNetwork(Base):
    """Target network set to the online one's values in every step but the first (DQN), and once to old values."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.target = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1)).requires_grad_(False)
        self.online = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1))
        self.old = {name: torch.full_like(value, 0.1) for name, value in self.target.state_dict().items()}
        self.saved = {}

    def training_step(self, batch, batch_idx):
        x, y = batch
        with torch.no_grad():
            wanted = y + 0.9 * self.target(x)
        loss = F.mse_loss(self.online(x), wanted)
        if batch_idx == 2:
            self.target.load_state_dict(self.old)
            state = self.trainer.strategy.lightning_module_state_dict()
            # Ranks other than the first have only names.
            self.saved = {name: value.clone() for name, value in state.items() if value is not None}
        elif batch_idx:
            self.target.load_state_dict(self.online.state_dict())
        return self.note(loss)

    def on_before_zero_grad(self, optimizer):
        self.target[1].load_state_dict({name: 0.5 * self.old[f"1.{name}"] for name in ("weight", "bias")})

    def configure_optimizers(self):
        return self.make_optimizer(self.online.parameters())


def test_a_network_that_steps_set_to_another_ones_values():
    _same_as_one_process(TargetNetwork)


class Gated(nn.Module):
    """Casts a layer in forward to the dtype it already has, a no-op, as routers do."""

    def __init__(self):
        super().__init__()
        self.wide, self.back, self.gate = nn.Linear(6, 64), nn.Linear(64, 6), nn.Linear(6, 1)

    def forward(self, x):
        self.gate = self.gate.to(x.dtype)
        return x + self.gate(x).sigmoid() * self.back(self.wide(x).relu())


class Cast(Base):
    """Chain of layers that are cast in forward."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.layers = nn.Sequential(*(Gated() for _ in range(4)), nn.Linear(6, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self.layers(x), y)


def _weights(strategy="auto", devices=1):
    torch.manual_seed(11)
    module = Cast()
    made = strategy() if callable(strategy) else strategy
    trainer = quiet_trainer(strategy=made, devices=devices, use_distributed_sampler=False, accumulate_grad_batches=2)
    trainer.fit(module, datamodule=Data(points(BATCH * STEPS)))
    return snapshot(module)


@pytest.mark.slow
def test_a_layer_that_is_cast_to_its_own_dtype():
    """Several micro-batches pass the first stage before the first one's backward reaches it."""
    expected = _weights()
    tensor_in_stages = functools.partial(
        HybridStrategy, pipeline_parallel_size=2, tensor_parallel_size=2, pipeline_settings={"num_microbatches": 4}
    )
    for strategy, devices in ((tensor_in_stages, 4), ("pardist_tp", 2), ("pardist_pp", 2), ("pardist_zero3", 2)):
        for found in run_ranks(devices, _weights, strategy, devices):
            assert_close(found, expected)
