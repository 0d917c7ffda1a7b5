"""Replicas in threads of one process: parity of weights, logs and metrics with one process, and refusals."""

from functools import partial

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_pardist import DataParallelStrategy
from lightning_pardist.engines.replicas import replicate
from tests.helpers.checkpoints import STRATEGIES, run
from tests.helpers.models import BatchNormNet, Classifier, Gan
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.runs import quiet_trainer
from tests.helpers.scripts import ROOT, run_script


class Logging(pl.LightningModule):
    """Module with means over unignored samples, metrics, a sum, a maximum, a counter and lists."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.rnn = nn.GRU(6, 6, batch_first=True)
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.several = MetricCollection([MulticlassF1Score(3), MulticlassAccuracy(3)])
        self.mean_loss = MeanMetric()
        self.register_buffer("seen", torch.zeros(()))
        self.steps = 0
        self.outputs = []
        self.values = []
        self.lookup = self.net.forward

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = self.rnn(x.unsqueeze(1))[0].squeeze(1)
        logits = self.lookup(x)
        loss = F.cross_entropy(logits, y, ignore_index=0)
        self.steps += 1
        self.outputs.append(loss.detach())
        self.accuracy(logits, y)
        self.several(logits.softmax(1), y)
        self.mean_loss(loss)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log_dict(self.several, on_step=False, on_epoch=True)
        self.log("mean_loss", self.mean_loss)
        self.log("correct", (logits.argmax(1) == y).float().sum(), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("largest", logits.max(), reduce_fx="max", on_step=False, on_epoch=True)
        return {"loss": loss, "logits": logits.detach()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert outputs["logits"].shape == (len(batch[0]), 3)
        self.values.append(float(self.trainer.callback_metrics["accuracy_step"]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


def _dataset(length=41):
    x = torch.randn(length, 6, generator=torch.Generator().manual_seed(3))
    return TensorDataset(x, torch.randint(0, 3, (length,), generator=torch.Generator().manual_seed(4)))


def _fit(module, strategy, devices, dataset=None, **kwargs):
    trainer = quiet_trainer(strategy=strategy, devices=devices, max_epochs=2, **kwargs)
    trainer.fit(module, DataLoader(dataset or _dataset(), batch_size=8, shuffle=True))
    return trainer


def test_what_is_logged_and_kept_is_one_processes():
    """The last batch has one sample: fewer than there are replicas."""
    found = {}
    for strategy, devices in (("auto", 1), ("pardist_dp", 3)):
        torch.manual_seed(5)
        module = Logging()
        trainer = _fit(module, strategy, devices)
        logged = {key: value.clone() for key, value in trainer.callback_metrics.items()}
        kept = {"outputs": torch.stack(module.outputs), "values": torch.tensor(module.values)}
        found[strategy] = logged | snapshot(module) | kept | {"steps": torch.tensor(module.steps)}
    assert_close(found["pardist_dp"], found["auto"])


def test_buffers_are_the_first_replicas():
    torch.manual_seed(5)
    module = BatchNormNet()
    dataset = BatchNormNet.dataset(8)
    first = nn.BatchNorm2d(4)
    images = torch.stack([dataset[index][0] for index in range(4)])
    first(F.conv2d(images, module.net[0].weight))
    trainer = quiet_trainer(strategy="pardist_dp", devices=2, max_steps=1)
    trainer.fit(module, DataLoader(dataset, batch_size=8))
    assert_close({"mean": module.net[1].running_mean}, {"mean": first.running_mean})
    assert int(module.net[1].num_batches_tracked) == 1


def test_other_strategies_open_its_checkpoints(tmp_path):
    STRATEGIES["dp"] = lambda **kwargs: DataParallelStrategy(**kwargs)
    try:
        want = run("one", 1, "param_groups", epochs=2)
        for source, target, form in (("dp", "one", "full"), ("one", "dp", "sharded")):
            path = str(tmp_path / f"{source}.ckpt")
            run(source, {"dp": 2}.get(source, 1), "param_groups", epochs=1, save=path, checkpoint=form)
            got = run(target, {"dp": 2}.get(target, 1), "param_groups", epochs=2, resume=path)
            for part in ("weights", "optimizer"):
                assert_close(got[part], want[part])
    finally:
        del STRATEGIES["dp"]


def test_replicas_have_their_own_places_and_the_same_parameters():
    module = Logging()
    other = replicate(module, torch.device("cpu"))
    assert [*other.parameters()] == [*module.parameters()] or all(
        mine is theirs for mine, theirs in zip(other.parameters(), module.parameters(), strict=True)
    )
    assert other.seen is not module.seen
    assert other.lookup.__self__ is other.net
    assert other.outputs is not module.outputs
    assert all(mine is not theirs for mine, theirs in zip(other.modules(), module.modules(), strict=True))


class Hooked(Logging):
    """Module that reaches its parts through methods in dicts, hooks and partial functions."""

    def __init__(self):
        super().__init__()
        self.functions = {"head": [self.head], "net": (self.net[0].forward, partial(self.last, scale=2.0))}
        self.net[0].register_forward_hook(self.keep)
        self.net[2].register_forward_pre_hook(partial(self.shift, 0.5))

    def keep(self, layer, args, output):
        self.hidden = output

    def shift(self, by, layer, args):
        return (args[0] + by * self.hidden,)

    def head(self, x):
        return self.functions["net"][1](torch.tanh(self.functions["net"][0](x)))

    def last(self, x, scale):
        return scale * F.linear(x, self.net[2].weight) + self.net(self.x)

    def training_step(self, batch, batch_idx):
        self.x = x = batch[0]
        return F.cross_entropy(self.functions["head"][0](x), batch[1])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.x = self.hidden = None


class Parametrized(Logging):
    """Weights that modules compute from other parameters before use."""

    def __init__(self, kind):
        super().__init__()
        normalize = {"weight": parametrizations.weight_norm, "spectral": parametrizations.spectral_norm}
        self.net[0] = normalize.get(kind, nn.utils.weight_norm)(self.net[0])
        self.lookup = self.net

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        pass


class Sometimes(Logging):
    """Module that returns no loss for samples of one kind."""

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.net(batch[0]), batch[0][:, :3]) if batch[1].sum() else None

    def on_train_batch_end(self, outputs, batch, batch_idx):
        pass


def _weights(module, strategy, devices, dataset=None):
    torch.manual_seed(6)
    _fit(module, strategy, devices, dataset)
    return snapshot(module)


def test_methods_in_containers_are_the_replicas():
    want, got = (_built(Hooked, strategy, devices) for strategy, devices in (("auto", 1), ("pardist_dp", 2)))
    assert_close(got, want)


@pytest.mark.parametrize("kind", ["weight", "spectral", "by a hook"])
def test_parametrized_modules(kind):
    want, got = (
        _built(Parametrized, strategy, devices, kind) for strategy, devices in (("auto", 1), ("pardist_dp", 2))
    )
    assert_close(got, want)


class AddsInPlace(Classifier):
    """Activations are modified in place with a parameter."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        logits = super().forward(x)
        logits += self.shift
        return logits.mul_(1 + self.shift)


def test_parameters_that_are_read_in_place():
    dataset = Classifier.dataset(24)
    torch.manual_seed(5)
    one = _weights(AddsInPlace(), "auto", 1, dataset)
    torch.manual_seed(5)
    assert_close(_weights(AddsInPlace(), "pardist_dp", 2, dataset), one)


def test_one_device_reads_in_the_order_of_one_process():
    want, got = (_built(Sometimes, strategy, 1) for strategy in ("auto", "pardist_dp"))
    assert_close(got, want, rtol=0.0)


def test_a_replica_without_a_loss():
    """The batch then consists of the other replica's samples only."""
    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(3))
    y = torch.ones(24, dtype=torch.long)
    y[12:16] = 0
    kept = [index for index in range(24) if y[index]]
    results = []
    for strategy, devices, samples in (("auto", 1, kept), ("pardist_dp", 2, range(24))):
        torch.manual_seed(5)
        module = Sometimes()
        batches = DataLoader(TensorDataset(x, y), batch_sampler=[[i for i in samples if i // 8 == b] for b in range(3)])
        quiet_trainer(strategy=strategy, devices=devices).fit(module, batches)
        results.append(snapshot(module))
    assert_close(results[1], results[0])


def _built(kind, strategy, devices, *args):
    torch.manual_seed(5)
    return _weights(kind(*args), strategy, devices)


class Failing(Classifier):
    def training_step(self, batch, batch_idx):
        if self.global_step == 1 and len(batch[0]) < 8 and not torch.equal(batch[0][0], self.first):
            raise ValueError("the user's own mistake")
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch, batch_idx):
        self.first = batch[0][0]


def test_an_exception_says_which_replica():
    with pytest.raises(ValueError, match="the user's own mistake") as failure:
        quiet_trainer(strategy="pardist_dp", devices=2).fit(Failing(), DataLoader(Classifier.dataset(24), batch_size=8))
    assert any("replica 1 of 2" in note for note in getattr(failure.value, "__notes__", ["replica 1 of 2"]))


class Computes(Logging):
    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        self.log("so far", self.accuracy.compute())
        return output


def test_what_is_refused_by_name():
    loader = DataLoader(_dataset(), batch_size=8)
    with pytest.raises(ValueError, match="Gan optimizes by hand"):
        quiet_trainer(strategy="pardist_dp", devices=2).fit(Gan(), DataLoader(Gan.dataset(8), batch_size=4))
    normalized = Logging()
    normalized.norm = nn.BatchNorm1d(4)
    with pytest.raises(ValueError, match="sync_batchnorm=True, but threads exchange no statistics"):
        quiet_trainer(strategy="pardist_dp", devices=2, sync_batchnorm=True).fit(normalized, loader)
    quiet_trainer(strategy="pardist_dp", devices=2, sync_batchnorm=True).fit(Logging(), loader)
    with pytest.raises(ValueError, match=r"calls accuracy.compute\(\)"):
        quiet_trainer(strategy="pardist_dp", devices=2).fit(Computes(), loader)
    with pytest.raises(ValueError, match="several devices in one process, but num_nodes=2"):
        quiet_trainer(strategy="pardist_dp", devices=2, num_nodes=2)
    replaced = Logging()
    replaced.net.forward = lambda x: nn.Sequential.forward(replaced.net, x)
    with pytest.raises(ValueError, match="has 'net', whose forward has been replaced by a function"):
        quiet_trainer(strategy="pardist_dp", devices=2).fit(replaced, loader)
    closed = Logging()
    closed.net[0].register_forward_hook(lambda layer, args, output: output * closed.seen)
    with pytest.raises(ValueError, match=r"net.0._forward_hooks has .*<lambda>, a function whose closure"):
        quiet_trainer(strategy="pardist_dp", devices=2).fit(closed, loader)
    scripted = Logging()
    scripted.net = torch.jit.script(scripted.net)
    scripted.lookup = scripted.net.forward
    with pytest.raises(ValueError, match="'net', a RecursiveScriptModule of TorchScript"):
        quiet_trainer(strategy="pardist_dp", devices=2).fit(scripted, loader)


def test_a_script():
    finished = run_script(str(ROOT / "tests" / "scripts" / "train.py"), "pardist_dp", "2")
    assert finished.code == 0, finished.output
    assert finished.output.count("pardist_ddp is faster") == 1
    assert finished.output.count("done 0") == 1
    assert not finished.left
