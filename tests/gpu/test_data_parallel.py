"""Replicas on several CUDA devices: parameters are copied in every step, and gradients are summed back."""

import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.models import Digits
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.runs import quiet_trainer

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def _fit(strategy, devices):
    torch.manual_seed(11)
    module = Digits()
    trainer = quiet_trainer(accelerator="gpu", devices=devices, strategy=strategy)
    trainer.fit(module, DataLoader(Digits.dataset(48), batch_size=12))
    return {name: value.cpu() for name, value in snapshot(module).items()}


def test_weights_of_one_device():
    assert_close(_fit("pardist_dp", 2), _fit("pardist_ddp", 1))
