"""``pardist_zero3``, ``pardist_fsdp`` and ``pardist_hsdp`` beyond the matrix."""

import abc
import contextlib
import copy
import functools

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelPruning
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchmetrics.classification import MulticlassAccuracy

from lightning_pardist import FSDPStrategy, PeerFailedError, ZeroStrategy
from lightning_pardist.axes.fsdp import FSDPAxis
from lightning_pardist.registry import TABLE
from tests.helpers.models import BatchNormNet, Classifier, Gan, ParamGroups, Text
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import BATCH, Data, quiet_trainer, train

sharded = functools.partial(FSDPStrategy, min_unit_size_mb=0)
BATCHES = 3


def fit(make, strategy, devices, max_epochs, ckpt_path=None, **trainer_kwargs):
    """Train, and return the module and its trainer."""
    torch.manual_seed(11)
    module = make()
    options = {"use_distributed_sampler": False, "max_epochs": max_epochs, **trainer_kwargs}
    trainer = quiet_trainer(strategy=strategy, devices=devices, **options)
    trainer.fit(module, datamodule=Data(module.dataset(BATCH * BATCHES)), ckpt_path=ckpt_path)
    return module, trainer


def same_checkpoints(first, second):
    one, two = (torch.load(path, weights_only=False) for path in (first, second))
    assert type(one["state_dict"]) is type(two["state_dict"])
    assert_close(one["state_dict"], two["state_dict"])
    assert one["lr_schedulers"] == two["lr_schedulers"]
    for mine, theirs in zip(one["optimizer_states"], two["optimizer_states"], strict=True):
        assert [g["params"] for g in mine["param_groups"]] == [g["params"] for g in theirs["param_groups"]]
        assert [g["lr"] for g in mine["param_groups"]] == pytest.approx([g["lr"] for g in theirs["param_groups"]])
        assert mine["state"].keys() == theirs["state"].keys()
        for number, values in mine["state"].items():
            assert_close(values, theirs["state"][number])


# --- checkpoints ----------------------------------------------------------------------------------------------------


def _save_midway(make, folder, devices):
    _, trainer = fit(make, sharded(), devices, 1)
    trainer.save_checkpoint(f"{folder}/sharded.ckpt")


def _resume(make, folder, devices, path, strategy=sharded):
    callback = pl.callbacks.ModelCheckpoint(dirpath=folder, filename="last", save_weights_only=False)
    _, _trainer = fit(
        make, strategy(), devices, 2, ckpt_path=path, enable_checkpointing=True, callbacks=[callback], logger=False
    )
    return callback.best_model_path


@pytest.mark.push("Text")
@pytest.mark.parametrize("make", [ParamGroups, Text])
def test_a_checkpoint_is_the_plain_one_and_resumes_on_any_number_of_ranks(tmp_path, make):
    _, trainer = fit(make, "auto", 1, 1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    # Resumed as well: a schedule may depend on the number of epochs.
    _, trainer = fit(make, "auto", 1, 2, ckpt_path=tmp_path / "one.ckpt")
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    run_ranks(2, _save_midway, make, tmp_path, 2)
    same_checkpoints(tmp_path / "sharded.ckpt", tmp_path / "one.ckpt")
    for ranks, path in ((2, "one"), (4, "sharded")):
        ended = run_ranks(ranks, _resume, make, tmp_path / str(ranks), ranks, tmp_path / f"{path}.ckpt")
        same_checkpoints(ended[0], tmp_path / "end.ckpt")
    _, trainer = fit(make, "auto", 1, 2, ckpt_path=tmp_path / "sharded.ckpt")
    trainer.save_checkpoint(tmp_path / "resumed.ckpt")
    same_checkpoints(tmp_path / "resumed.ckpt", tmp_path / "end.ckpt")


class OnMeta(Classifier):
    """Module built on ``meta``, like one that fits no rank."""

    def __init__(self):
        super().__init__()
        del self.net, self.head

    def configure_model(self):
        # Seeded here: a launcher may have reset the seed meanwhile (PL_GLOBAL_SEED).
        torch.manual_seed(11)
        with torch.device("meta") if dist.is_initialized() else contextlib.nullcontext():
            built = Classifier()
        self.net, self.head = built.net, built.head


def _on_meta(folder):
    module, _trainer = fit(OnMeta, sharded(), 2, 1)
    again, _ = fit(OnMeta, sharded(), 2, 2, ckpt_path=f"{folder}/one.ckpt")
    return snapshot(module), snapshot(again)


def test_a_module_without_values_is_created_shard_by_shard(tmp_path):
    one, trainer = fit(OnMeta, "auto", 1, 1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    two, _ = fit(OnMeta, "auto", 1, 2)
    for first, second in run_ranks(2, _on_meta, tmp_path):
        assert_close(first, snapshot(one))
        assert_close(second, snapshot(two))


def _empty():
    trainer = quiet_trainer(strategy=sharded(), devices=2, use_distributed_sampler=False)
    with trainer.init_module(empty_init=True):
        module = Classifier()
    assert all(param.is_meta for param in module.parameters())
    data = Data(module.dataset(BATCH * BATCHES))
    torch.manual_seed(11)
    trainer.fit(module, datamodule=data)
    return snapshot(module)


def test_an_empty_module_gets_the_values_of_one_process():
    one, _ = fit(Classifier, "auto", 1, 1)
    for got in run_ranks(2, _empty):
        assert_close(got, snapshot(one))


# --- after a run ----------------------------------------------------------------------------------------------------


def _afterwards():
    module, trainer = fit(Classifier, sharded(), 2, 1)
    assert type(module) is Classifier
    assert type(module.head) is torch.nn.Linear
    assert not any(isinstance(parameter, DTensor) for parameter in module.parameters())
    if dist.get_rank() == 0:
        # Rank zero alone: the copy is a plain module, without this package's hooks.
        twin = copy.deepcopy(module)
        twin(torch.randn(2, 1, 8, 8)).sum().backward()
        assert all(parameter.grad is not None for parameter in twin.parameters())
        assert not any(child._forward_hooks or child._forward_pre_hooks for child in twin.modules())
    whole = snapshot(module)
    held, trainer = fit(Classifier, sharded(unshard_after_fit_max_mb=0), 2, 1)
    assert all(isinstance(parameter, DTensor) for parameter in held.parameters())
    state = trainer.strategy.lightning_module_state_dict()
    if dist.get_rank() == 0:
        assert_close(state, whole)
    # All ranks together can still call the module, and run it again.
    images = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert_close({"out": held(images)}, {"out": module(images)})
    for model in (module, held):
        other = (
            trainer if model is held else quiet_trainer(strategy=sharded(), devices=2, use_distributed_sampler=False)
        )
        other.fit_loop.max_epochs = 2 if model is held else 1
        other.fit(model, datamodule=Data(model.dataset(BATCH * BATCHES)))
    state = trainer.strategy.lightning_module_state_dict()
    if dist.get_rank() == 0:
        assert_close(state, snapshot(module))


def test_the_module_is_ordinary_afterwards_or_stays_sharded():
    run_ranks(2, _afterwards)


class Averages(pl.Callback):
    """Average of the module's weights, copied from it when training starts."""

    def on_train_start(self, trainer, pl_module):
        self.average = copy.deepcopy(pl_module)
        assert not self.average._trainer

    def on_train_batch_end(self, trainer, pl_module, *unused):
        with torch.no_grad():
            for mean, param in zip(self.average.parameters(), pl_module.parameters(), strict=True):
                mean.lerp_(param, 0.5)


def _averaged(strategy, devices):
    average = Averages()
    module = Classifier()
    trainer = quiet_trainer(
        strategy=strategy, devices=devices, max_epochs=1, callbacks=[average], use_distributed_sampler=False
    )
    torch.manual_seed(11)
    trainer.fit(module, datamodule=Data(module.dataset(BATCH * BATCHES)))
    return snapshot(average.average)


def test_a_copy_made_when_training_starts():
    (alone,) = run_ranks(1, _averaged, "auto", 1)
    for found in run_ranks(2, _averaged, "pardist_zero3", 2):
        assert_close(found, alone)


class Fails(Classifier):
    """Raises once, in its second batch."""

    failed = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1 and not self.failed:
            self.failed = True
            raise KeyError("the user's")
        return loss


def _after_a_failure():
    torch.manual_seed(11)
    module = Fails()
    trainer = quiet_trainer(strategy=sharded(), devices=2)
    data = DataLoader(module.dataset(BATCH), batch_size=2)
    with pytest.raises((KeyError, PeerFailedError), match="the user's"):
        trainer.fit(module, data)
    assert isinstance(module.head.weight, DTensor)
    trainer.fit(module, data)
    assert type(module) is Fails


def test_a_failed_run_ends_without_a_collective_and_the_module_can_be_run_again():
    run_ranks(2, _after_a_failure)


def test_a_failed_run_of_one_rank_leaves_an_ordinary_module():
    module = Fails()
    trainer = quiet_trainer(strategy=sharded(), devices=1)
    with pytest.raises(KeyError, match="the user's"):
        trainer.fit(module, DataLoader(module.dataset(BATCH), batch_size=2))
    # The process group is gone, and shards over it could not be accessed.
    assert not dist.is_initialized()
    assert type(module.head.weight.detach().clone()) is torch.Tensor


# --- evaluation -----------------------------------------------------------------------------------------------------


class Samples(Classifier):
    """Runs the module on rank zero alone at the end of each validation epoch."""

    def on_validation_epoch_end(self):
        if self.global_rank == 0:
            self.sampled = self(torch.ones(1, 1, 8, 8))

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y), on_step=True, on_epoch=True, batch_size=len(x))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])


def _evaluate(strategy, devices):
    torch.manual_seed(11)
    module = Samples()
    train_data, data = module.dataset(24), module.dataset(23)
    trainer = quiet_trainer(strategy=strategy, devices=devices)
    # A single batch: the order of its samples does not matter.
    trainer.fit(module, DataLoader(train_data, batch_size=24 // devices), DataLoader(data, batch_size=1))
    values = dict(trainer.callback_metrics)
    predicted = torch.cat(trainer.predict(module, DataLoader(data, batch_size=4)))
    rank = trainer.global_rank
    if devices == 2:
        # One rank with one batch and one with many, in a loader without a distributed sampler.
        own = Subset(data, range(1) if rank == 0 else range(1, 23))
        uneven = quiet_trainer(strategy=sharded(), devices=2, use_distributed_sampler=False)
        (alone,) = uneven.validate(module, DataLoader(own, batch_size=1), verbose=False)
    else:
        (alone,) = trainer.validate(module, DataLoader(data, batch_size=1), verbose=False)
    return float(values["val_loss_epoch"]), alone["val_loss_epoch"], predicted


def test_evaluation_with_different_numbers_of_batches():
    fitted, alone, predicted = _evaluate("auto", 1)
    for rank, got in enumerate(run_ranks(2, _evaluate, sharded(), 2)):
        assert got[0] == pytest.approx(fitted, rel=1e-5)
        assert got[1] == pytest.approx(alone, rel=1e-5)
        share = predicted[rank::2]
        assert_close({"p": got[2][: len(share)]}, {"p": share})


class Measures(Samples):
    """Metric object that synchronises its state in ``compute``."""

    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.accuracy(self(x), y)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)


def _few(strategy, devices):
    torch.manual_seed(11)
    module = Measures()
    data = module.dataset(7)
    trainer = quiet_trainer(strategy=strategy(), devices=devices, use_distributed_sampler=False)
    own = data if devices == 1 else Subset(data, range(1) if trainer.global_rank == 0 else range(1, 7))
    (values,) = trainer.validate(module, DataLoader(own, batch_size=1), verbose=False)
    trainer = quiet_trainer(strategy=strategy(), devices=devices)
    assert module.accuracy.dist_sync_fn is None
    predicted = trainer.predict(module, DataLoader(Subset(data, range(1)), batch_size=1))
    assert module.accuracy.dist_sync_fn is None
    return values["accuracy"], predicted


@pytest.mark.parametrize("sync_metrics", [True, False])
def test_fewer_samples_than_ranks_and_metrics_of_their_own(sync_metrics):
    accuracy, (want,) = _few(lambda: "auto", 1)
    results = run_ranks(2, _few, functools.partial(sharded, sync_metrics=sync_metrics), 2, timeout_s=90)
    for rank, (got, predicted) in enumerate(results):
        assert got == pytest.approx(accuracy)
        if rank:
            assert not predicted
        else:
            assert_close({"p": predicted[0]}, {"p": want})


# --- what ranks and steps may do ------------------------------------------------------------------------------------


class DanglingGan(Gan):
    """Clears gradients only after its steps: correct results depend on toggling."""

    def training_step(self, batch, batch_idx):
        noise, real = batch
        opt_g, opt_d = self.optimizers()
        with self.toggled_optimizer(opt_g):
            loss_g = F.softplus(-self.discriminator(self.generator(noise))).mean()
            self.manual_backward(loss_g)
            opt_g.step()
            opt_g.zero_grad()
        with self.toggled_optimizer(opt_d):
            fake = self.generator(noise)
            loss_d = F.softplus(self.discriminator(fake)).mean() + F.softplus(-self.discriminator(real)).mean()
            self.manual_backward(loss_d)
            opt_d.step()
            opt_d.zero_grad()
        return self.note((loss_g + loss_d).detach())


class Thaws(Classifier):
    """The lower part is only trained from the second epoch on."""

    def on_train_epoch_start(self):
        self.net.requires_grad_(self.current_epoch > 0)


class Sized(abc.ABC, torch.nn.Module):
    """Base whose class comes after one without attributes."""

    @property
    @abc.abstractmethod
    def size(self): ...


class SizedLinear(Sized, torch.nn.Linear):
    size = 10


class OfAbstractClasses(Sized, Classifier):
    """Module with a layer, both of whose classes Python does not let ``fully_shard`` change to its own."""

    size = 10

    def __init__(self):
        super().__init__()
        self.head = SizedLinear(16, 10)

    def on_fit_end(self):
        assert type(copy.deepcopy(self.head)) is SizedLinear


STEPS = {"gan": DanglingGan, "freezing": Thaws, "abstract": OfAbstractClasses}


def _steps(name, devices, strategies):
    made = [fit(STEPS[name], strategy, devices, 3)[0] for strategy in strategies]
    assert {type(module) for module in made} == {STEPS[name]}
    return [snapshot(module) for module in made]


@pytest.mark.push("freezing")
@pytest.mark.parametrize("name", STEPS)
def test_same_weights_as_one_process(name):
    (expected,) = _steps(name, 1, ["auto"])
    # All parameters in the root unit, and in separate units.
    strategies = [FSDPStrategy(), sharded(), sharded(allow_divergent_forward=True)]
    for rank_weights in run_ranks(2, _steps, name, 2, strategies):
        for weights in rank_weights:
            assert_close(weights, expected)


# --- precision ------------------------------------------------------------------------------------------------------


def _as_ddp(precision):
    names = ("mnist", "gpt", "awkward") if precision == "bf16-mixed" else ("mnist",)
    kwargs = {"precision": precision}
    return {name: [train(strategy, 2, name, {}, kwargs) for strategy in (sharded(), "pardist_ddp")] for name in names}


@pytest.mark.push("bf16-mixed")
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_bit_for_bit_as_ddp(precision):
    for got, want in run_ranks(2, _as_ddp, precision)[0].values():
        for part in ("losses", "weights", "optimizer"):
            assert_close(got[part], want[part], rtol=0.0)


def _half(precision, dtype):
    # Small units belong to the root, which stays gathered through a step.
    fit(Classifier, FSDPStrategy(), 2, 1, precision=precision)
    module, _trainer = fit(Classifier, sharded(), 2, 1, precision=precision)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    torch.manual_seed(11)
    by_hand = Classifier()
    by_hand.log = lambda *args, **kwargs: None
    fully_shard(by_hand, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32))
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1, momentum=0.9)
    data = by_hand.dataset(BATCH * BATCHES)
    for x, y in DataLoader(data, batch_size=BATCH // 2, sampler=DistributedSampler(data, shuffle=False)):
        optimizer.zero_grad()
        F.cross_entropy(by_hand(x), y).backward()
        optimizer.step()
    whole = {name: value.full_tensor() for name, value in by_hand.state_dict().items()}
    assert_close(snapshot(module), whole, rtol=0.0)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-true", torch.bfloat16), ("16-true", torch.float16)])
def test_half_precision_keeps_fp32_shards(precision, dtype):
    run_ranks(2, _half, precision, dtype)


def _averaged_and_kept():
    module = Classifier()
    trainer = quiet_trainer(
        strategy=FSDPStrategy(min_unit_size_mb=0, unshard_after_fit_max_mb=0),
        devices=2,
        callbacks=[EMAWeightAveraging()],
    )
    loader = DataLoader(module.dataset(8), batch_size=2)
    trainer.fit(module, loader)
    trainer.validate(module, loader, verbose=False)


def test_averages_of_a_module_that_stays_sharded():
    run_ranks(2, _averaged_and_kept)


class Queries(pl.LightningModule):
    """Module whose forward reads an embedding's weight directly and passes it to layers."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(4, 8)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))

    def loss(self, batch):
        x, y = batch
        asked = self.table.weight[None].expand(len(x), -1, -1)
        return F.cross_entropy(self.layers(asked + x[:, None]).mean(1), y)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)


class Evaluated(Data):
    """Validates on the training data."""

    def val_dataloader(self):
        return self.train_dataloader()


def _queried(strategy, devices):
    torch.manual_seed(2)
    module, draw = Queries(), torch.Generator().manual_seed(3)
    x, y = torch.randn(2 * BATCH, 8, generator=draw), torch.randint(0, 3, (2 * BATCH,), generator=draw)
    data = Evaluated(torch.utils.data.TensorDataset(x, y))
    trainer = quiet_trainer(strategy=strategy, devices=devices, use_distributed_sampler=False)
    before = trainer.validate(module, datamodule=data, verbose=False)
    trainer.fit(module, datamodule=data)
    return before[0]["val"], trainer.callback_metrics["val"].item(), snapshot(module)


def test_a_weight_that_evaluation_reads_by_itself():
    *values, weights = _queried("auto", 1)
    for *found, of_rank in run_ranks(2, _queried, sharded(), 2):
        assert found == pytest.approx(values, rel=1e-5)
        assert_close(of_rank, weights)


class SparseTables(pl.LightningModule):
    """Embeddings with sparse gradients, and an optimizer that supports them."""

    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(50, 8, sparse=True)
        self.bag = torch.nn.EmbeddingBag(50, 8, sparse=True)
        self.last = torch.nn.Linear(8, 3)

    def training_step(self, batch, batch_idx):
        words, y = batch
        return F.cross_entropy(self.last(self.words(words).mean(1) + self.bag(words)), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.5, momentum=0.9)

    @staticmethod
    def dataset(size):
        draw = torch.Generator().manual_seed(3)
        words, y = torch.randint(0, 50, (size, 5), generator=draw), torch.randint(0, 3, (size,), generator=draw)
        return torch.utils.data.TensorDataset(words, y)


def _sparse(strategy, devices):
    module, _ = fit(SparseTables, strategy, devices, 2, accumulate_grad_batches=2)
    return snapshot(module)


@pytest.mark.parametrize("accumulate", ["sharded", "unsharded"])
def test_sparse_gradients_are_made_dense(accumulate):
    want = _sparse("auto", 1)
    for of_rank in run_ranks(2, _sparse, sharded(accumulate=accumulate), 2):
        assert_close(of_rank, want)


# --- refusals -------------------------------------------------------------------------------------------------------


class Drawn(torch.optim.SGD):
    """Optimizer that adds noise to its steps."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(torch.randn_like(param), alpha=1e-3)


class Noisy(Classifier):
    def configure_optimizers(self):
        return Drawn(self.parameters(), lr=0.1)


REFUSALS = {
    "optimizer": (Noisy, {}, "Cannot determine whether Drawn .* draws random numbers"),
    "pruning": (Classifier, {"callbacks": [ModelPruning("l1_unstructured")]}, "ModelPruning compares the elements"),
}


def _refused(name):
    make, kwargs, message = REFUSALS[name]
    with pytest.raises((ValueError, RuntimeError), match=message):
        fit(make, sharded(), 2, 1, **kwargs)


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_work_is_refused_by_name(name):
    run_ranks(2, _refused, name)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"accumulate": "twice"}, "accumulate='twice' is unknown. Use sharded or unsharded."),
        ({"data_shard_size": "rack"}, "data_shard_size='rack' is unknown. Use auto, node or a number of ranks."),
        ({"detect_direct_param_use": "last"}, "detect_direct_param_use='last' is unknown. Use first, always or never."),
        ({"tile_linear_above_mb": 0}, "tile_linear_above_mb=0 is not positive. None runs every layer whole."),
        ({"min_unit_size_mb": -1}, "min_unit_size_mb=-1 is negative. Use 0 for units of any size."),
        ({"reshard_after_forward": "no"}, "reshard_after_forward='no' is unknown. Use auto, True or False."),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        FSDPStrategy(**settings)


def test_stage_three_has_a_class_of_its_own():
    with pytest.raises(ValueError, match="FSDPStrategy is stage 3"):
        ZeroStrategy(zero_stage=3)


def test_replicas_across_nodes():
    (entry,) = [entry for entry in TABLE if entry.name == "pardist_hsdp"]
    strategy = entry.strategy(**entry.preset, parallel_devices=[torch.device("cpu")] * 4)
    dims = strategy.resolve_dims(12)
    assert (dims.data_replicate, dims.data_shard) == (3, 4)
    with pytest.raises(ValueError, match="data_shard_size=5 does not divide world_size=12"):
        FSDPStrategy(data_shard_size=5).resolve_dims(12)


# --- accumulation and batch norm on shards ---------------------------------------------------------------------------


def _accumulated(strategies):
    kwargs = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05}
    return [train(strategy, 4, "gpt", {}, kwargs) for strategy in strategies]


def test_accumulation_sends_once_where_asked_to():
    want = train("auto", 1, "gpt", {}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05})
    strategies = [sharded(accumulate="unsharded", data_shard_size=size) for size in ("auto", 2)]
    for got in run_ranks(4, _accumulated, strategies)[0]:
        for part in ("losses", "weights", "optimizer"):
            assert_close(got[part], want[part])


def _named_units():
    module, _trainer = fit(Text, FSDPStrategy(units=["Block"]), 2, 1)
    _norms, _ = fit(BatchNormNet, FSDPStrategy(units=["BatchNorm2d"]), 2, 1)
    return snapshot(module)


def test_units_by_class_name():
    expected, _ = fit(Text, "auto", 1, 1)
    for weights in run_ranks(2, _named_units):
        assert_close(weights, snapshot(expected))


class _Description(pl.Callback):
    """Records how the strategy describes itself during training."""

    text = ""

    def on_train_start(self, trainer, pl_module):
        self.text = trainer.strategy.describe()


@pytest.mark.parametrize("offload", [None, "cpu"])
def test_one_rank_is_told_that_sharding_saves_nothing(offload):
    description = _Description()
    fit(Classifier, sharded(offload=offload), 1, 1, callbacks=[description])
    assert ("One rank holds every shard" in description.text) == (offload is None)


# --- layers in tiles -------------------------------------------------------------------------------------------------


def _tiled_fit(folder):
    plain = train(sharded(), 2, "gpt", {}, {})
    tiled = train(sharded(tile_linear_above_mb=0.001), 2, "gpt", {}, {})
    for part in ("losses", "weights", "optimizer"):
        assert_close(tiled[part], plain[part])
    strategy = functools.partial(sharded, tile_linear_above_mb=0.0001)
    module, trainer = fit(OnMeta, strategy(), 2, 1)
    assert "tiles of" in trainer.strategy.describe() or trainer.strategy.axis(FSDPAxis)._sharded is None
    _, trainer = fit(Classifier, strategy(), 2, 1)
    trainer.save_checkpoint(f"{folder}/tiled.ckpt")
    _, trainer = fit(Classifier, strategy(), 2, 2, ckpt_path=f"{folder}/one.ckpt")
    trainer.save_checkpoint(f"{folder}/end_tiled.ckpt")
    return snapshot(module)


def test_layers_in_tiles_change_nothing_that_a_user_sees(tmp_path):
    one, trainer = fit(OnMeta, "auto", 1, 1)
    _, trainer = fit(Classifier, "auto", 1, 1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    _, trainer = fit(Classifier, "auto", 1, 2, ckpt_path=tmp_path / "one.ckpt")
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    for weights in run_ranks(2, _tiled_fit, tmp_path):
        assert_close(weights, snapshot(one))
    same_checkpoints(tmp_path / "tiled.ckpt", tmp_path / "one.ckpt")
    same_checkpoints(tmp_path / "end_tiled.ckpt", tmp_path / "end.ckpt")


# --- failures -------------------------------------------------------------------------------------------------------


class _Fails(Classifier):
    where = "training_step"

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.where == "training_step" and batch_idx == 1:
            raise KeyError("the user's own")
        return loss

    def on_before_optimizer_step(self, optimizer):
        if self.where == "on_before_optimizer_step":
            raise KeyError("the user's own")


def _user_error(where, strategy):
    module = _Fails()
    module.where = where
    trainer = quiet_trainer(strategy=strategy, devices=2, use_distributed_sampler=False, max_epochs=1)
    try:
        trainer.fit(module, datamodule=Data(module.dataset(BATCH * BATCHES)))
    except Exception as error:
        return repr(error), [type(p).__name__ for p in module.parameters() if not isinstance(p, DTensor)]
    return "", []


@pytest.mark.parametrize("where", ["training_step", "on_before_optimizer_step"])
def test_an_error_of_the_users_is_what_is_raised(where):
    for found, whole in run_ranks(2, _user_error, where, sharded()):
        assert found == repr(KeyError("the user's own"))
        assert not whole
