"""A Trainer can be pickled and copied after a run, as Lightning's own tests do."""

import io
import pickle

import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.models import points
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import BATCH, Data, quiet_trainer
from tests.integration.test_applications import Net


def _pickled(strategy, devices):
    trainer = quiet_trainer(strategy=strategy, devices=devices, use_distributed_sampler=False)
    module = Net()
    # Before the run and after it: a Trainer can be reused.
    pickle.dumps(trainer)
    trainer.fit(module, datamodule=Data(points(2 * BATCH)))
    file = io.BytesIO()
    torch.save(trainer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.global_step == trainer.global_step
    assert type(loaded.strategy) is type(trainer.strategy)
    torch.save(trainer.model, io.BytesIO())
    trainer.validate(module, DataLoader(points(BATCH)), verbose=False)
    return {name: value.clone() for name, value in loaded.lightning_module.state_dict().items()}


@pytest.mark.parametrize("strategy", ["pardist_ddp", "pardist_zero2", "pardist_zero3", "pardist_tp", "pardist_pp"])
def test_a_trainer_that_has_run_can_be_saved(strategy):
    for state in run_ranks(2, _pickled, strategy, 2):
        assert state["net.0.weight"].shape == (8, 6)
