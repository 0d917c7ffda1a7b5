"""Pipelines with steps whose micro-batches agree with the batch in the trial, and not in training."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanAbsoluteError

from lightning_pardist.engines.pipeline import CannotPipelineError
from tests.helpers.models import Base
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import quiet_trainer

EXPERTS, BATCH, STEPS = 4, 8, 4


def detached_ratio(outputs, scores, y):
    first, second = F.mse_loss(outputs, y), F.l1_loss(outputs, y)
    return first + second * (first / second).detach()


def ratio_of_numbers(outputs, scores, y):
    first, second = F.mse_loss(outputs, y), F.l1_loss(outputs, y)
    return first + second * (first.item() / second.item())


def variation_of_loads(outputs, scores, y):
    loads = scores.softmax(1).sum(0)
    return F.mse_loss(outputs, y) + 0.1 * loads.var() / (loads.mean() ** 2 + 1e-10)


def load_balancing(outputs, scores, y):
    """Loss of Mixtral, whose routers choose the same experts for all samples at first."""
    probabilities = scores.softmax(1)
    chosen = F.one_hot(probabilities.topk(2)[1], EXPERTS).double().mean(0)
    return F.mse_loss(outputs, y) + 0.1 * EXPERTS * (chosen * probabilities.mean(0)[None]).sum()


def lovasz(outputs, scores, y):
    """Sorts the errors of all pixels of a batch: at first 2e-5 off the mean over its samples."""
    pixels = (outputs @ torch.randn(2, 3 * 1024, generator=torch.Generator().manual_seed(0)).double()).reshape(-1, 3)
    labels = torch.randint(0, 3, (len(outputs) * 1024,), generator=torch.Generator().manual_seed(0))
    losses = []
    for kind in range(3):
        target = (labels == kind).double()
        errors, order = torch.sort((target - (pixels / 100).softmax(1)[:, kind]).abs(), descending=True)
        target = target[order]
        scale = 1 - (target.sum() - target.cumsum(0)) / (target.sum() + (1 - target).cumsum(0))
        scale[1:] = scale[1:] - scale[:-1].clone()
        losses.append(torch.dot(errors, scale))
    return sum(losses) / len(losses)


def selected(outputs, y):
    """Chosen elements of each sample, 1 or 2 of them."""
    pairs = [(one, two, 1 + int(two[0] > 0)) for one, two in zip(outputs, y, strict=True)]
    return [one[:number] for one, _, number in pairs], [two[:number] for _, two, number in pairs]


def selections(outputs, scores, y):
    found, wanted = map(torch.cat, selected(outputs, y))
    return F.mse_loss(found, wanted) + F.l1_loss(found, wanted)


def by_number_of_boxes(outputs, scores, y):
    """Loss of SSD: sums of the samples, divided by what all of them have."""
    pairs = list(zip(*selected(outputs, y), strict=True))
    boxes = torch.stack([F.smooth_l1_loss(one, two, reduction="sum") for one, two in pairs])
    return (boxes.sum() + scores.square()[:, 0].sum()) / max(1, sum(len(one) for one, _ in pairs))


def of_each_image(outputs, scores, y):
    """Loss of RetinaNet: each sample's sum is divided by its own number."""
    losses = [
        (F.l1_loss(one, two, reduction="sum") + score.square().sum()) / max(1, len(one))
        for one, two, score in zip(*selected(outputs, y), scores, strict=True)
    ]
    return sum(losses) / len(losses)


class Module(Base):
    def __init__(self, loss):
        super().__init__()
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))
        self.head, self.router = nn.Linear(6, 2), nn.Linear(6, EXPERTS)
        self.error = MeanAbsoluteError()
        self.loss = loss

    def training_step(self, batch, batch_idx):
        hidden = self.body(batch[0])
        outputs = self.head(hidden)
        if self.loss is not additive or len(batch[0]) > 1:
            # As in Lightning UQ Box.
            self.error(outputs, batch[1])
        return self.loss(outputs, self.router(hidden), batch[1])

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(STEPS * BATCH, 6, generator=generator, dtype=torch.float64)
        y = torch.randn(STEPS * BATCH, 2, generator=generator, dtype=torch.float64)
        return DataLoader(TensorDataset(x, y * torch.linspace(0.2, 3, STEPS * BATCH)[:, None]), batch_size=BATCH)


def _train(loss, strategy, devices, kind=Module):
    torch.manual_seed(5)
    module = kind(loss)
    quiet_trainer(strategy=strategy, devices=devices, precision="64-true").fit(module)
    return snapshot(module), float(module.error.compute())


def of_one_dim(outputs, scores, y):
    """Contrastive loss of shape [1], as those that begin with ``new_zeros(1)`` (SwaV)."""
    return outputs.new_zeros(1) + F.cross_entropy(outputs @ y.T, torch.arange(len(y)))


@pytest.mark.parametrize("loss", [detached_ratio, ratio_of_numbers, variation_of_loads, load_balancing, of_one_dim])
def test_trains_like_one_process(loss):
    want, error = _train(loss, "auto", 1)
    for weights, found in run_ranks(2, _train, loss, "pardist_pp", 2):
        assert_close(weights, want, 1e-9)
        assert found == pytest.approx(error)


class Detector(Module):
    """Returns predictions instead of a loss in evaluation mode."""

    def training_step(self, batch, batch_idx):
        hidden = self.body(batch[0])
        losses = {"loss": self.loss(self.head(hidden), self.router(hidden), batch[1])} if self.training else [hidden]
        self.error(hidden[:, :2].contiguous(), batch[1])
        loss = sum(losses.values())
        self.log("loss", loss)
        return loss


@pytest.mark.parametrize("loss", [lovasz, selections, by_number_of_boxes, of_each_image])
@pytest.mark.parametrize("kind", [Module, Detector])
def test_samples_in_micro_batches_of_their_own(loss, kind):
    want, error = _train(loss, "auto", 1, kind)
    for weights, found in run_ranks(2, _train, loss, "pardist_pp", 2, kind):
        assert_close(weights, want, 1e-9)
        assert found == pytest.approx(error)


def additive(outputs, scores, y):
    return F.mse_loss(outputs, y)


def test_metrics_that_are_left_out_for_single_samples():
    want, error = _train(additive, "auto", 1)
    for weights, found in run_ranks(2, _train, additive, "pardist_pp", 2):
        assert_close(weights, want, 1e-9)
        assert found == pytest.approx(error)


class Forces(Module):
    """Potential: its loss contains the gradient of an energy with respect to an input that all layers read."""

    def training_step(self, batch, batch_idx):
        x = batch[0].detach().requires_grad_()
        hidden = x
        for layer in self.body:
            hidden = layer(hidden) + x
        energy = self.head(hidden)
        forces = torch.autograd.grad(energy.sum(), x, create_graph=True)[0]
        return F.mse_loss(energy, batch[1]) + 0.01 * forces.square().mean()


def _refused():
    with pytest.raises(CannotPipelineError, match="The stages give a loss of"):
        quiet_trainer(strategy="pardist_pp", devices=2, precision="64-true").fit(Forces(additive))


def test_gradients_through_several_stages_are_refused_though_they_weigh_little():
    run_ranks(2, _refused)


class Logging(Module):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        self.log("spread", self.body(batch[0]).std())
        return loss


def with_mask(outputs, scores, y):
    """Two means, each with a count of its own."""
    chosen = (y[:, 0] > 0).double()
    return F.mse_loss(outputs, y) + (scores.square().mean(1) * chosen).sum() / chosen.sum().clamp(min=1)


def _warnings_of_logged():
    trainer = quiet_trainer(strategy="pardist_pp", devices=2, precision="64-true")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Logging(with_mask))
    return [str(each.message) for each in caught if "not combine" in str(each.message)]


def test_a_logged_loss_of_several_counts_is_not_warned_about():
    (told,), _ = run_ranks(2, _warnings_of_logged)
    assert "'spread'" in told
    assert "'loss'" not in told
