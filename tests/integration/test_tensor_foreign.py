"""Third-party models under a Trainer: losses and final weights equal one process's."""

import warnings

import lightning.pytorch as pl
import pytest
import torch

from tests.distributed.test_tensor_foreign import IMAGES, TOKENS, Foreign
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import quiet_trainer


class FromForeign(pl.LightningModule):
    def __init__(self, name):
        super().__init__()
        self.foreign = Foreign(name)
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = self.foreign.loss(batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def _train(name, strategy, devices):
    warnings.filterwarnings("ignore")
    module = FromForeign(name)
    # In fp64 where batch norm over a few pixels amplifies rounding; kernels for experts support only fp32.
    precision = "64-true" if name in IMAGES else "32-true"
    trainer = quiet_trainer(strategy=strategy, devices=devices, use_distributed_sampler=False, precision=precision)
    batches = [module.foreign.batch(seed) for seed in range(3)]
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    return module.losses, snapshot(module)


# vgg11_bn is left out: 133 million parameters, three times 3 GB with momentum in fp64.
@pytest.mark.slow
@pytest.mark.parametrize("name", [*TOKENS, *(name for name in IMAGES if name != "vgg11_bn")])
def test_foreign_models_train_like_one_process(name):
    losses, weights = _train(name, "auto", 1)
    for found, found_weights in run_ranks(2, _train, name, "pardist_tp", 2):
        assert found == pytest.approx(losses, rel=1e-5)
        assert_close(found_weights, weights)
