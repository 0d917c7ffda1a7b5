"""Strategy names, instances, class paths, refusals, and the cost of importing."""

import os
import re
import subprocess
import sys

import lightning.pytorch as pl
import pytest
from lightning.pytorch.accelerators import MPSAccelerator
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import StrategyRegistry

import lightning_pardist
from lightning_pardist import registry
from lightning_pardist.axes.ddp import DDPAxis
from tests.helpers.models import Classifier
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import quiet_trainer


@pytest.mark.parametrize("entry", registry.TABLE, ids=lambda entry: entry.name)
def test_every_name_makes_its_strategy(entry):
    assert entry.name in StrategyRegistry
    trainer = quiet_trainer(strategy=entry.name, devices=2)
    assert type(trainer.strategy) is entry.strategy
    # Replicas of DataParallel are threads of one process.
    processes = 1 if entry.name == "pardist_dp" else 2
    assert trainer.world_size == processes
    assert processes == 1 or trainer._accelerator_connector.is_distributed


@pytest.mark.parametrize("entry", registry.TABLE, ids=lambda entry: entry.name)
def test_one_device_of_apple_is_refused(entry, monkeypatch):
    monkeypatch.setattr(MPSAccelerator, "is_available", staticmethod(lambda: True))
    monkeypatch.setattr(MPSAccelerator, "parse_devices", staticmethod(lambda devices: [0]))
    with pytest.raises(ValueError, match="not supported on the MPS accelerator"):
        pl.Trainer(accelerator="mps", strategy=entry.name, logger=False)


def test_registering_again_is_harmless():
    before = dict(StrategyRegistry)
    finders = list(sys.meta_path)
    registry.register()
    registry.register()
    assert StrategyRegistry.keys() == before.keys()
    assert len(sys.meta_path) == len(finders)


@pytest.mark.parametrize("name", ["pardist_ddp", "PARDIST_DDP"])
def test_names_in_any_case(name):
    assert isinstance(quiet_trainer(strategy=name, devices=2).strategy, lightning_pardist.DDPStrategy)


def test_instance_and_nodes():
    strategy = lightning_pardist.DDPStrategy(bucket_size_mb=1)
    trainer = quiet_trainer(strategy=strategy, devices=2, num_nodes=4)
    assert trainer.strategy is strategy
    assert trainer.num_nodes == 4
    assert trainer.world_size == 8
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 8, "rank": 0}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"bucket_size_mb": 0}, "bucket_size_mb=0 is not positive"),
        ({"gradient_compression": "zip"}, "gradient_compression='zip' is unknown"),
        ({"timeout_s": -1}, "timeout_s=-1 is not positive"),
        ({"heartbeat_timeout_s": 1}, "heartbeat_timeout_s=1 is too short"),
        ({"start_method": "thread"}, "start_method='thread' is not available"),
        ({"process_group_backend": "carrier_pigeon"}, "process_group_backend='carrier_pigeon'"),
    ],
)
def test_bad_settings_are_refused_in_a_sentence(kwargs, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        lightning_pardist.DDPStrategy(**kwargs)


def test_unknown_options_are_refused():
    with pytest.raises(TypeError, match="bucket_size"):
        lightning_pardist.DDPStrategy(bucket_size=3)


def _cli(args):
    return LightningCLI(Classifier, run=False, args=args, save_config_callback=None, seed_everything_default=False)


@pytest.mark.parametrize(
    "args",
    [
        ["--trainer.strategy=lightning_pardist.DDPStrategy", "--trainer.strategy.bucket_size_mb=1"],
        ["--trainer.strategy=lightning_pardist.DDPStrategy", "--trainer.strategy.bucket_size_mb=1",
         "--trainer.strategy.timeout_s=60", "--trainer.strategy.start_method=spawn"],
        ["--trainer.strategy={class_path: lightning_pardist.DDPStrategy, init_args: {bucket_size_mb: 1}}"],
    ],
    ids=["path", "base_arguments", "yaml"],
)  # fmt: skip
def test_class_path_on_the_command_line(args):
    cli = _cli([*args, "--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.logger=false"])
    assert isinstance(cli.trainer.strategy, lightning_pardist.DDPStrategy)
    assert cli.trainer.strategy.axis(DDPAxis).bucket_size_mb == 1
    assert cli.trainer.world_size == 2


def test_powersgd_on_the_command_line():
    cli = _cli(
        ["--trainer.strategy=lightning_pardist.DDPStrategy", "--trainer.accelerator=cpu", "--trainer.devices=2",
         "--trainer.strategy.gradient_compression=lightning_pardist.PowerSGD",
         "--trainer.strategy.gradient_compression.rank=3"]
    )  # fmt: skip
    assert cli.trainer.strategy.axis(DDPAxis).gradient_compression == lightning_pardist.PowerSGD(rank=3)


def _wrong_size():
    try:
        quiet_trainer(strategy="pardist_ddp", devices=3).fit(Classifier(), [])
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def test_world_size_that_does_not_fit_is_refused():
    assert all("exists already" in text for text in run_ranks(2, _wrong_size))


FAKE = """
class Registry(dict):
    def register(self, name, strategy, description="", override=False, **params):
        self[name] = strategy
StrategyRegistry = Registry()
"""


@pytest.mark.parametrize("first", ["pytorch_lightning.strategies", "lightning_pardist"])
def test_trainer_of_the_other_package_says_so(tmp_path, first, monkeypatch):
    """Uses a stand-in: the package itself need not be installed."""
    package = tmp_path / "pytorch_lightning"
    (package / "strategies").mkdir(parents=True)
    (package / "__init__.py").write_text("from pytorch_lightning import strategies\n")
    (package / "strategies" / "__init__.py").write_text(FAKE)
    monkeypatch.syspath_prepend(tmp_path)
    saved = list(sys.meta_path)
    for name in ("pytorch_lightning", "pytorch_lightning.strategies"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    try:
        if first == "lightning_pardist":
            registry.register()
            import pytorch_lightning.strategies as other
        else:
            import pytorch_lightning.strategies as other

            other.StrategyRegistry.clear()
            registry.register()
        assert set(other.StrategyRegistry) == {entry.name for entry in registry.TABLE}
        with pytest.raises(
            ValueError, match=r"separate pytorch_lightning package. Use `import lightning.pytorch as pl`"
        ):
            other.StrategyRegistry["pardist_ddp"]()
    finally:
        sys.meta_path[:] = saved
        for name in [name for name in sys.modules if name.startswith("pytorch_lightning")]:
            del sys.modules[name]


ALIASED = """
import lightning_pardist
lightning_pardist.alias_pytorch_lightning()
import pytorch_lightning.callbacks.early_stopping
import pytorch_lightning as pl
from lightning_fabric.utilities.types import _PATH
from pytorch_lightning.core import LightningModule
import lightning.pytorch, multiprocessing
assert pl is lightning.pytorch and LightningModule is lightning.pytorch.LightningModule
assert pl.__spec__.name == "lightning.pytorch" and pl.callbacks.__spec__.name == "lightning.pytorch.callbacks"
try:
    import pytorch_lightning.missing
except ModuleNotFoundError as error:
    assert "lightning.pytorch.missing" in str(error)
print(type(pl.Trainer(strategy="pardist_zero2", accelerator="cpu", devices=2, logger=False).strategy).__name__)
"""


@pytest.mark.slow
def test_programs_for_the_other_package_run_under_an_alias():
    made = _python(ALIASED)
    assert made.returncode == 0, made.stderr
    assert made.stdout.split()[-1] == "ZeroStrategy"


@pytest.mark.parametrize("asked", ["variable", "function"])
def test_alias_is_refused_once_the_other_package_is_there(asked):
    there = "import sys, types; sys.modules['lightning_fabric'] = types.ModuleType('lightning_fabric')\n"
    call = "" if asked == "variable" else "lightning_pardist.alias_pytorch_lightning()"
    asks = {"PARDIST_ALIAS_PYTORCH_LIGHTNING": "1"} if asked == "variable" else {}
    made = _python(f"{there}import lightning_pardist\n{call}", **asks)
    assert made.returncode == 1
    assert "lightning_fabric is imported already" in made.stderr.splitlines()[-1]


def _python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | variables
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment, check=False
    )


def test_import_costs_little():
    """Own import time of this package's modules, from bytecode as in an installed package."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-X", "importtime", "-c", "import lightning_pardist"]
    times = []
    for _ in range(4):
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=True)
        rows = [line.split("|") for line in result.stderr.splitlines() if line.startswith("import time:")][1:]
        own = [int(row[0].split(":")[1]) for row in rows if row[2].strip().split(".")[0] == "lightning_pardist"]
        assert len(own) > 3
        times.append(sum(own) / 1000)
        if times[-1] < 50:
            break
    assert min(times) < 50, f"{times} ms"


def test_import_after_trainer_exists():
    before = pl.Trainer
    registry.register()
    assert before is pl.Trainer
