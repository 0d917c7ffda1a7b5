"""Every callback shipped with Lightning, under every strategy, against one process."""

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn.utils import prune

from tests.helpers.checkpoints import STRATEGIES
from tests.helpers.models import points
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import BATCH, Data, global_losses, quiet_trainer

EPOCHS, STEPS = 3, 2


class Tuned(pl.LightningModule):
    """Backbone and head; layers of the backbone are initialized with equal values."""

    def __init__(self):
        super().__init__()
        self.lr = 0.05
        self.backbone = nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.Tanh(), nn.Linear(9, 9), nn.LayerNorm(9))
        self.head = nn.Sequential(nn.Linear(9, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1))
        self.losses = []

    def forward(self, x):
        return self.head(torch.tanh(self.backbone(x)))

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].detach().clone())

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.mse_loss(self(batch[0]), batch[1]))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(filter(lambda p: p.requires_grad, self.parameters()), lr=self.lr, momentum=0.9)


class LayerByLayer(callbacks.BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone[3:], optimizer, lr=0.02)
        if epoch == 2:
            # The head is in the optimizer already, and so is half of the backbone.
            self.unfreeze_and_add_param_group([pl_module.backbone, pl_module.head], optimizer)


class BackBetweenPhases(LayerByLayer):
    """Restores an earlier checkpoint in the middle of the run, without its loops, as finetuning-scheduler does."""

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 0:
            self.groups = [len(group["params"]) for group in trainer.optimizers[0].param_groups]
            self.path = f"{trainer.default_root_dir}/{trainer.strategy.__class__.__name__}-best.ckpt"
            trainer.save_checkpoint(self.path)

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 2:
            optimizer, connector = trainer.optimizers[0], trainer._checkpoint_connector
            groups = optimizer.param_groups[: len(self.groups)]
            optimizer.param_groups = [{**group, "params": list(group["params"])} for group in groups]
            connector.resume_start(self.path)
            connector.restore_datamodule()
            connector.restore_model()
            connector.restore_optimizers_and_schedulers()
            connector.resume_end()
        super().on_train_epoch_start(trainer, pl_module)


class _Data(Data):
    def val_dataloader(self):
        return self.train_dataloader()


MAKE = {
    "finetuning": LayerByLayer,
    "phases": BackBetweenPhases,
    "backbone": lambda: callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=True),
    "accumulation": lambda: callbacks.GradientAccumulationScheduler({0: 1, 1: 2}),
    "averages": callbacks.WeightAveraging,
    "moving averages": lambda: callbacks.EMAWeightAveraging(decay=0.8),
    "stochastic averages": lambda: callbacks.StochasticWeightAveraging(1e-2, swa_epoch_start=1, annealing_epochs=1),
    "learning rate": lambda: callbacks.LearningRateFinder(num_training_steps=6, update_attr=True),
    "early stopping": lambda: callbacks.EarlyStopping("val_loss", min_delta=10.0, patience=2),
    "spikes": lambda: callbacks.SpikeDetection(),
    "lambda": lambda: callbacks.LambdaCallback(on_before_zero_grad=lambda trainer, module, optimizer: None),
    "timer": lambda: callbacks.Timer(duration={"hours": 1}),
    "monitors": lambda: [
        callbacks.LearningRateMonitor(),
        callbacks.DeviceStatsMonitor(cpu_stats=False),
        callbacks.ModelSummary(max_depth=-1),
        callbacks.RichModelSummary(),
        callbacks.TQDMProgressBar(),
    ],
}


def _strategy(name, world):
    return STRATEGIES[name]() if world > 1 else "auto"


def _run(names, name, world, folder):
    found = {}
    for which in names:
        torch.manual_seed(3)
        module, made = Tuned(), MAKE[which]()
        resumed = which in ("finetuning", "backbone")
        keep = callbacks.ModelCheckpoint(f"{folder}/{name}", f"{which}-{{epoch}}", save_top_k=-1)
        kwargs = {
            "devices": world,
            "use_distributed_sampler": False,
            "enable_model_summary": which == "monitors",
            "enable_progress_bar": which == "monitors",
            "enable_checkpointing": resumed,
            "logger": CSVLogger(f"{folder}/{name}-{which}") if which == "monitors" else False,
            "log_every_n_steps": 1,
            "num_sanity_val_steps": 0,
            "default_root_dir": folder,
        }
        trainer = quiet_trainer(
            strategy=_strategy(name, world),
            max_epochs=EPOCHS,
            callbacks=[*(made if isinstance(made, list) else [made]), *([keep] if resumed else [])],
            **kwargs,
        )
        trainer.fit(module, datamodule=_Data(points(BATCH * STEPS)))
        found[which] = {"losses": global_losses(module.losses, world)} | snapshot(module)
        if resumed:
            torch.manual_seed(3)
            module = Tuned()
            trainer = quiet_trainer(
                strategy=_strategy(name, world), max_epochs=EPOCHS, callbacks=[MAKE[which]()], **kwargs
            )
            trainer.fit(
                module, datamodule=_Data(points(BATCH * STEPS)), ckpt_path=f"{folder}/{name}/{which}-epoch=1.ckpt"
            )
            found[f"{which}, resumed"] = snapshot(module)
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return _run(MAKE, "one", 1, tmp_path_factory.mktemp("one"))


def _check(name, world, folder, expected):
    for found in run_ranks(world, _run, list(MAKE), name, world, folder, timeout_s=240):
        for which, values in found.items():
            assert_close(values, expected[which])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["zero3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("pp", "ddp", "zero1", "zero2", "tp", "mp"))],
)
def test_callback_does_as_on_one_process(name, tmp_path, expected):
    _check(name, 2, tmp_path, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["3d", "pp_zero1", "pp_zero3", "tp_zero3"])
def test_callback_does_as_on_one_process_under_two_axes(name, tmp_path, expected):
    _check(name, 4, tmp_path, expected)


class Prunes(pl.Callback):
    """Prunes a layer in the middle of a run, as in user code."""

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            prune.l1_unstructured(pl_module.head[0], "weight", amount=0.3)


def _prune(name, world):
    torch.manual_seed(3)
    module = Tuned()
    trainer = quiet_trainer(
        strategy=_strategy(name, world),
        devices=world,
        max_epochs=2,
        callbacks=[Prunes()],
        use_distributed_sampler=False,
    )
    trainer.fit(module, datamodule=_Data(points(BATCH * STEPS)))
    return snapshot(module)


def _refuses_to_prune(names, world):
    for name in names:
        with pytest.raises(RuntimeError, match=r"registered again as head.0.weight_orig .* use pardist_ddp"):
            _prune(name, world)


def test_pruning_by_hand_is_as_on_one_process_or_refused():
    expected = _prune("one", 1)
    for found in run_ranks(2, _prune, "zero2", 2):
        assert_close(found, expected)
    for name in ("zero3", "tp", "pp"):
        run_ranks(2, _refuses_to_prune, [name], 2)
