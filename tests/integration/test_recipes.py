"""Recipes on several ranks, with the command in their README."""

import pytest

from lightning_pardist import load_from_checkpoint
from lightning_pardist.checkpoint.convert import contents
from lightning_pardist.cli import main
from recipes.gpt.model import GPT
from tests.helpers.ranks import run_ranks
from tests.helpers.scripts import ROOT


def _three_axes(directory):
    recipe = ROOT / "recipes" / "gpt"
    options = {
        "model.dim": 16,
        "model.heads": 2,
        "model.context": 8,
        "model.sample_tokens": 0,
        "data.context": 8,
        "data.batch_size": 8,
        "data.source": "offline",
        "trainer.max_steps": 2,
        "trainer.val_check_interval": 1,
        "trainer.limit_val_batches": 1,
        "trainer.accelerator": "cpu",
        "trainer.logger": "false",
        "trainer.enable_progress_bar": "false",
        "trainer.default_root_dir": directory,
        "trainer.callbacks": "lightning.pytorch.callbacks.ModelCheckpoint",
    }
    given = [f"--{name}={value}" for name, value in options.items()]
    return main(["fit", "-c", str(recipe / "config.yaml"), "-c", str(recipe / "3d.yaml"), *given])


@pytest.mark.slow
def test_three_axes_with_sharded_checkpoints(tmp_path):
    assert run_ranks(4, _three_axes, tmp_path) == [0] * 4
    (path,) = (tmp_path / "checkpoints").glob("*.ckpt")
    found = contents(path)
    assert (found.form, found.about["global_step"], found.about["world_size"]) == ("sharded", 2, 4)
    assert "2 pipeline_parallel x 2 tensor_parallel" in found.about["degrees"]
    assert len(list(path.glob("*.distcp"))) > 1
    module = load_from_checkpoint(GPT, path)
    assert module.head.weight is module.embed.weight
