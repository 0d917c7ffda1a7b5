"""DeepSpeed configuration files: entries are converted, listed as ignored, or refused."""

import json
import warnings

import pytest
from lightning.pytorch.plugins import HalfPrecision, MixedPrecision
from torch.utils.data import DataLoader

from lightning_pardist import DDPStrategy, FSDPStrategy, ZeroStrategy
from lightning_pardist.axes.ddp import DDPAxis
from lightning_pardist.axes.fsdp import FSDPAxis
from lightning_pardist.axes.zero import ZeroAxis
from lightning_pardist.cli import main
from tests.helpers.models import Classifier
from tests.helpers.runs import quiet_trainer

# Example from Hugging Face's documentation.
HUGGING_FACE = {
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "loss_scale_window": 500,
        "initial_scale_power": 10,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}


def test_what_has_no_counterpart_is_listed_once():
    with pytest.warns(UserWarning, match="DeepSpeed config") as caught:
        strategy = ZeroStrategy.from_deepspeed_config(HUGGING_FACE)
    assert type(strategy) is FSDPStrategy
    (message,) = {str(warning.message) for warning in caught if "DeepSpeed" in str(warning.message)}
    listed = message.partition("ignored: ")[2].rstrip(".").split(", ")
    assert listed == [
        "optimizer",
        "steps_per_print",
        "zero_optimization.sub_group_size",
        "fp16.hysteresis",
        "fp16.min_loss_scale",
    ]
    assert strategy.axis(FSDPAxis).offload.offload == "cpu"
    plugin = strategy.precision_plugin
    assert isinstance(plugin, MixedPrecision)
    assert plugin.precision == "16-mixed"
    assert plugin.scaler.get_scale() == 1024
    assert plugin.scaler.get_growth_interval() == 500


@pytest.mark.parametrize(
    ("config", "kind", "check"),
    [
        ({}, DDPStrategy, lambda s: s.axis(DDPAxis).bucket_size_mb == 25.0),
        (
            {"zero_optimization": {"stage": 0, "reduce_bucket_size": 2**20}},
            DDPStrategy,
            lambda s: s.axis(DDPAxis).bucket_size_mb == 4,
        ),
        (
            {"zero_optimization": {"stage": 1, "overlap_comm": False}, "bf16": {"enabled": True}},
            ZeroStrategy,
            lambda s: (
                (s.axis(ZeroAxis).zero_stage, s.axis(ZeroAxis).overlap, type(s.precision_plugin))
                == (1, False, HalfPrecision)
            ),
        ),
        (
            {"zero_optimization": {"stage": 2, "reduce_bucket_size": 2e6, "round_robin_gradients": False}},
            ZeroStrategy,
            lambda s: (s.axis(ZeroAxis).zero_stage, round(s.axis(ZeroAxis).bucket_size_mb, 2)) == (2, 7.63),
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp/state"}}},
            ZeroStrategy,
            lambda s: s.axis(ZeroAxis).offload.offload == "/tmp/state",
        ),
        (
            {
                "zero_optimization": {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True},
                "fp16": {"enabled": True},
            },
            FSDPStrategy,
            lambda s: (
                vars(s.axis(FSDPAxis).compression) == {"gather": "int8", "reduce": "int8", "error_feedback": False}
            ),
        ),
        ({"bf16": {"enabled": True}}, DDPStrategy, lambda s: s.precision_plugin.precision == "bf16-mixed"),
    ],
)
def test_what_is_carried_over(config, kind, check):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strategy = ZeroStrategy.from_deepspeed_config(config)
    assert type(strategy) is kind
    assert check(strategy)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zero_optimization": {"stage": 4}}, r"zero_optimization\.stage=4 is unknown"),
        ({"zero_optimization": 3}, "zero_optimization=3 is not an object"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both true"),
        ({"fp16": {"enabled": "yes"}}, "neither true nor false"),
        ({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}, "not a multiple"),
        ({"gradient_accumulation_steps": 1.5}, "not a whole number"),
        ({"gradient_clipping": -1}, "not a number of 0 or more"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}, "needs nvme_path"),
        ("missing.json", "cannot be read: No such file"),
    ],
)
def test_what_is_out_of_range(config, message):
    with pytest.raises(ValueError, match=message):
        ZeroStrategy.from_deepspeed_config(config)


def _fit(config, batch_size=2, **trainer_kwargs):
    module = Classifier()
    trainer = quiet_trainer(strategy=ZeroStrategy.from_deepspeed_config(config), devices=1, **trainer_kwargs)
    trainer.fit(module, DataLoader(module.dataset(12), batch_size=batch_size))
    return trainer


def test_the_trainer_is_told():
    trainer = _fit({"gradient_clipping": 0.5, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2}})
    assert (trainer.gradient_clip_val, trainer.accumulate_grad_batches, trainer.global_step) == (0.5, 2, 3)
    # Accumulation follows from the batch sizes.
    trainer = _fit({"train_batch_size": 6, "train_micro_batch_size_per_gpu": 2})
    assert (trainer.accumulate_grad_batches, trainer.global_step) == (3, 2)


@pytest.mark.parametrize(
    ("config", "kwargs", "message"),
    [
        (
            {"gradient_clipping": 0.5},
            {"gradient_clip_val": 1.0},
            r"\(gradient_clip_val=1.0 by norm\) contradicts",
        ),
        (
            {"gradient_accumulation_steps": 2},
            {"accumulate_grad_batches": 3},
            "contradicts the DeepSpeed config",
        ),
        ({"bf16": {"enabled": True}}, {"precision": "16-true"}, r"Trainer\(precision=16-true\) contradicts"),
        ({"train_micro_batch_size_per_gpu": 4}, {}, "batch_size=2, but 4 samples a rank were asked for"),
        ({"train_batch_size": 8}, {}, r"2 samples x 1 ranks x 1 accumulated batches = 2, but 8 were asked for"),
        (
            {"train_batch_size": 9, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 3},
            {},
            "batch_size=3",
        ),
    ],
)
def test_what_contradicts_the_trainer(config, kwargs, message):
    with pytest.raises(ValueError, match=message):
        _fit(config, **kwargs)


@pytest.mark.filterwarnings("ignore")
def test_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ours.py").write_text(
        "from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel\n"
        "from lightning_pardist.axes.zero import ZeroAxis\n"
        "class Ours(BoringModel):\n"
        "    def on_fit_end(self):\n"
        "        t, s = self.trainer, self.trainer.strategy\n"
        "        a = s.axis(ZeroAxis)\n"
        "        text = f'{type(s).__name__} {a.zero_stage} {a.bucket_size_mb} {t.accumulate_grad_batches}'\n"
        "        open('done', 'w').write(f'{text} {t.gradient_clip_val} {t.precision}')\n"
        "class Data(BoringDataModule):\n"
        "    pass\n"
    )
    config = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 2**20}, "bf16": {"enabled": True}}
    config |= {"gradient_clipping": 0.5, "gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 1}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    arguments = (
        "fit --model ours.Ours --data ours.Data --deepspeed-config ds.json"
        " --trainer.devices 1 --trainer.accelerator cpu"
        " --trainer.limit_train_batches 2 --trainer.limit_val_batches 0 --trainer.max_epochs 1 --trainer.logger false"
        " --trainer.enable_progress_bar false --trainer.enable_checkpointing false"
    )
    assert main(arguments.split(" ")) == 0
    assert (tmp_path / "done").read_text() == "ZeroStrategy 1 2.0 2 0.5 bf16-true"
    assert main([*arguments.split(" "), "--trainer.precision=32-true"]) == 2
    assert "--trainer.precision is set on the command line and by --deepspeed-config" in capsys.readouterr().err
    assert main(["fit", "--deepspeed-config=nowhere.json"]) == 2
    assert "cannot be read" in capsys.readouterr().err
