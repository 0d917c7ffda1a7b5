"""Settings and names of other packages' strategies raise errors that name their replacements."""

import inspect
import os
import subprocess
import sys

import lightning.pytorch as pl
import pytest
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy

import lightning_pardist
from lightning_pardist.cli import main
from lightning_pardist.foreign_settings import ADVICE
from lightning_pardist.registry import TABLE
from tests.helpers.scripts import ENVIRONMENT, ROOT

#: Arguments that the Trainer passes to Lightning's strategies, or that this package's have as well.
SHARED = {
    *("self", "kwargs", "accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"),
    *("process_group_backend", "start_method", "activation_checkpointing", "tensor_parallel_size"),
}


@pytest.mark.parametrize("theirs", [DDPStrategy, FSDPStrategy, DeepSpeedStrategy, ModelParallelStrategy])
def test_every_setting_of_lightnings_strategies_has_an_advice(theirs):
    assert not set(inspect.signature(theirs.__init__).parameters) - SHARED - ADVICE.keys()


@pytest.mark.parametrize("entry", TABLE, ids=lambda entry: entry.name)
@pytest.mark.parametrize("setting", ["find_unused_parameters", "sharding_strategy", "stage", "cpu_offload"])
def test_python(entry, setting):
    with pytest.raises(ValueError, match=rf"^{entry.strategy.__name__} has no setting '{setting}'\. \w.*\.$"):
        entry.make(**entry.preset, **{setting: True})


def test_no_advice_for_settings_of_our_own():
    for entry in TABLE:
        for base in entry.strategy.__mro__[:-1]:
            if issubclass(base, lightning_pardist.PardistStrategy):
                assert not inspect.signature(base.__init__).parameters.keys() & ADVICE.keys()


def test_a_mistyped_setting():
    with pytest.raises(TypeError, match=r"DDPStrategy has no setting 'bucket_size'\. Did you mean 'bucket_size_mb'\?"):
        lightning_pardist.DDPStrategy(bucket_size=3)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lightning_pardist.ZeroStrategy", "is the path of a class"),
        ("pardist_zer3", "Did you mean 'pardist_zero3'?"),
        ("pardist_ddp_find_unused_parameters_true", "Did you mean 'pardist_ddp'?.*need no setting"),
        ("pardist", "This package has pardist_ddp, "),
    ],
)
def test_a_mistyped_name(name, said):
    with pytest.raises(ValueError, match=said):
        pl.Trainer(accelerator="cpu", strategy=name, logger=False)


def test_lightnings_names_are_its_own_business():
    with pytest.raises(ValueError, match="You selected an invalid strategy name"):
        pl.Trainer(accelerator="cpu", strategy="dpp", logger=False)


OPTIONS = [
    (
        ["--trainer.strategy=lightning_pardist.DDPStrategy", "--trainer.strategy.find_unused_parameters=true"],
        "no setting 'find_unused_parameters'. Leave it out",
    ),
    (["--trainer.strategy=pardist_ddp", "--trainer.strategy.static_graph=true"], "no setting 'static_graph'."),
    (
        ["--trainer.strategy=pardist_zero2", "--trainer.strategy.bucket_size_mb=5"],
        "use --trainer.strategy lightning_pardist.ZeroStrategy --trainer.strategy.bucket_size_mb in place of",
    ),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("options", "said"), OPTIONS)
def test_our_command_line(options, said, capsys):
    boring = "fit --model lightning.pytorch.demos.boring_classes.BoringModel --trainer.accelerator cpu"
    assert main([*boring.split(), *options]) == 2
    shown = capsys.readouterr().err.strip().splitlines()
    assert shown[-1].startswith("pardist: ")
    assert said in shown[-1]


def test_lightnings_command_line():
    options, said = OPTIONS[0]
    code = (
        "import lightning_pardist\n"
        "from lightning.pytorch.cli import LightningCLI\n"
        "from lightning.pytorch.demos.boring_classes import BoringModel\n"
        "LightningCLI(BoringModel)\n"
    )
    command = [sys.executable, "-c", code, "fit", "--trainer.accelerator=cpu", *options]
    environment = os.environ | ENVIRONMENT
    finished = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT
    )
    assert finished.returncode == 2
    assert said in finished.stderr.strip().splitlines()[-1], finished.stderr


def test_a_setting_of_an_axis_beside_the_dict_that_takes_it_and_a_mistyped_one_inside():
    make = lightning_pardist.HybridStrategy
    with pytest.raises(ValueError, match=r"Set pipeline_settings=\{'num_microbatches': \.\.\.\}\."):
        make(pipeline_parallel_size=2, num_microbatches=4)
    with pytest.raises(ValueError, match=r"^pipeline_settings: microbatches is unknown. Use .*num_microbatches"):
        make(pipeline_parallel_size=2, pipeline_settings={"microbatches": 4})
    with pytest.raises(ValueError, match=r"^tensor_settings: tensor_parallel_size is unknown. Use plan"):
        make(tensor_settings={"tensor_parallel_size": 2})
