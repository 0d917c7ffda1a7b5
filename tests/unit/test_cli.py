import resource
import subprocess
import sys

import pytest

from lightning_pardist import __version__
from lightning_pardist.cli import main
from lightning_pardist.registry import TABLE


def test_strategies_lists_every_name(capsys):
    assert main(["strategies"]) == 0
    output = capsys.readouterr().out
    assert all(entry.name in output for entry in TABLE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "unknown command 'nonsense'. Use one of fit, validate,"),
        (["inspekt", "a.ckpt"], "unknown command 'inspekt'. Did you mean 'inspect'?"),
        (["strategies", "x"], "no arg"),
        (["fit", "-c", "nowhere.yaml"], "File does not exist"),
        (["fit", "--model", "no_such_module.Model"], "No module named 'no_such_module'"),
        (["fit", "--nonsense", "3"], "unrecognized arguments: --nonsense"),
        (["fit", "--trainer.max_epochs", "many"], "Expected a <class 'int'>"),
        (["fit", "--deepspeed-config", "nowhere.json"], "cannot be read"),
    ],
)
def test_wrong_commands(arguments, message, capsys):
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--trainer.strategy lightning_pardist.DDPStrategy --trainer.strategy.bucket_size_mb=-1", "=-1.0 is not posit"),
        ("--trainer.devices many", "should be an int"),
        ("--trainer.strategy pardist_tp --trainer.devices 2 --trainer.num_nodes 0", "num_nodes"),
    ],
)
def test_settings_that_the_trainer_refuses(options, message, capsys):
    boring = "fit --model lightning.pytorch.demos.boring_classes.BoringModel --trainer.accelerator cpu"
    assert main([*boring.split(), *options.split()]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("pardist: ")
    assert message in said


@pytest.mark.filterwarnings("ignore")
def test_an_error_of_the_users_class_comes_as_it_is(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken.py").write_text(
        "from lightning.pytorch.demos.boring_classes import BoringModel\n"
        "class Broken(BoringModel):\n"
        "    def __init__(self):\n"
        "        raise ValueError('of the user')\n"
    )
    with pytest.raises(ValueError, match="of the user"):
        main(["fit", "--model", "broken.Broken", "--trainer.accelerator", "cpu"])


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["strategies"], ["doctor", "--help"], ["nonsense"]])
def test_answers_at_once(arguments):
    """Without importing torch or Lightning, which takes seconds."""
    code = "import sys; from lightning_pardist.cli import main\ntry: main(sys.argv[1:])\nfinally: print(*sys.modules)"
    command = [sys.executable, "-c", code, *arguments]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    modules = finished.stdout.splitlines()[-1].split()
    assert "lightning_pardist.cli" in modules
    assert not {"torch", "lightning", "numpy", "jsonargparse"} & set(modules)
    # CPU time, as other programs may use the machine as well.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


def test_version(capsys):
    assert main(["--version"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"lightning_pardist {__version__}, python 3.")
    assert ", torch 2." in said
    assert ", lightning 2." in said


@pytest.mark.filterwarnings("ignore")
def test_help_of_fit_names_the_strategies(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "usage: pardist fit" in said or "usage: pardist [options] fit" in said
    assert all(entry.name in said for entry in TABLE)


def test_help(capsys):
    assert main([]) == 0
    assert "pardist strategies" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
def test_fit_from_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import torch, lightning.pytorch as pl\n"
        "from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel\n"
        "class Mine(BoringModel):\n"
        "    def __init__(self, width: int = 3):\n"
        "        super().__init__()\n"
        "        self.width = width\n"
        "    def on_fit_end(self):\n"
        "        open('done', 'w').write(f'{self.width} {type(self.trainer.strategy).__name__}')\n"
        "class Data(BoringDataModule):\n"
        "    pass\n"
    )
    arguments = (
        "fit --model mine.Mine --model.width 5 --data mine.Data --trainer.strategy=lightning_pardist.DDPStrategy"
        " --trainer.strategy.bucket_size_mb=1 --trainer.devices 1 --trainer.accelerator cpu"
        " --trainer.fast_dev_run true --trainer.enable_progress_bar false"
    )
    assert main(arguments.split(" ")) == 0
    assert (tmp_path / "done").read_text() == "5 DDPStrategy"


def test_steps_to_profile_on_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "profiled.py").write_text(
        "from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel\n"
        "class Profiled(BoringModel):\n"
        "    def on_train_end(self):\n"
        "        (profile,) = [each for each in self.trainer.callbacks if type(each).__name__ == 'StepProfile']\n"
        "        open('done', 'w').write(f'{profile.steps} {len(profile.seconds)}')\n"
        "class Data(BoringDataModule):\n"
        "    pass\n"
    )
    arguments = (
        "fit --model profiled.Profiled --data profiled.Data --trainer.devices 1 --trainer.accelerator cpu"
        " --trainer.strategy pardist_ddp --trainer.limit_train_batches 6 --trainer.limit_val_batches 0"
        " --trainer.max_epochs 1 --trainer.logger false --trainer.enable_progress_bar false"
        " --trainer.enable_checkpointing false"
    )
    assert main([*arguments.split(" "), "--profile-steps", "3"]) == 0
    assert (tmp_path / "done").read_text() == "3 3"
    assert main([*arguments.split(" "), "--profile-steps", "three"]) == 2
    assert "--profile-steps" in capsys.readouterr().err
