import pytest

from lightning_pardist.cli import main
from lightning_pardist.registry import TABLE


def test_strategies_lists_every_name(capsys):
    assert main(["strategies"]) == 0
    output = capsys.readouterr().out
    assert all(entry.name in output for entry in TABLE)


@pytest.mark.parametrize(
    ("arguments", "message"), [(["nonsense"], "unknown command 'nonsense'"), (["strategies", "x"], "no arg")]
)
def test_wrong_commands(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


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
