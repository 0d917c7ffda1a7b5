"""Detection of layers that mix the samples of a batch, without false positives and side effects."""

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_pardist.trainer.sample_mixing import SampleMixing

SAMPLES = 4


class Chosen(nn.Module):
    """Shifts positions by the argmax of a mean over samples."""

    def forward(self, x):
        best = x.mean(0).argmax(-1)
        return x.roll(int(best.sum()), dims=-1)


class Capacity(nn.Module):
    """Expert with a capacity: the first rows that prefer it get it, whichever sample they belong to."""

    def __init__(self, capacity=SAMPLES):
        super().__init__()
        self.capacity = capacity
        self.router, self.expert = nn.Linear(6, 2), nn.Linear(6, 6)

    def forward(self, x):
        rows = x.reshape(-1, 6)
        wanted = F.one_hot(self.router(rows).argmax(-1), 2)
        fits = (wanted.cumsum(0) * wanted).sum(-1) <= self.capacity
        return (self.expert(rows) * fits[:, None]).view_as(x)


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), inner, nn.Linear(6, 6)])

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return {"out": x, "loss": x.pow(2).mean()}


class Sampled(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.scale = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        noise = torch.randn_like(x) + random.random() + torch.from_numpy(np.random.rand(*x.shape)).to(x)
        return F.dropout(self.mean(x) + self.scale(x).exp() * noise, 0.3, self.training)


class Recurrent(nn.Module):
    """Its last states have layers first, as many as there are samples."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 6, num_layers=SAMPLES, batch_first=True)

    def forward(self, x):
        return self.lstm(x)


class Normalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.own = nn.BatchNorm1d(6), nn.BatchNorm1d(6, track_running_stats=False)

    def forward(self, x):
        x = self.own(self.norm(x.transpose(1, 2)))
        return F.batch_norm(x, None, None, training=True).transpose(1, 2)


class TimeFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 8)

    def forward(self, x):
        return self.layer(x.transpose(0, 1))


def _found(model, step=None, shape=(SAMPLES, 5, 6), times=1):
    x = torch.randn(*shape)
    root = nn.ModuleDict({"model": model})
    mixing = SampleMixing(root, times)
    with mixing.noting(x, shape[0]):
        x.argmax()  # a step without selection operators is not examined
        (step or (lambda root, x: root["model"](x)))(root, x)
    return mixing.find()


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(3)


@pytest.mark.parametrize(("inner", "samples"), [(Chosen, 2), (Chosen, 3), (Chosen, SAMPLES), (Capacity, SAMPLES)])
def test_the_innermost_layer_that_mixes_samples_is_named(inner, samples):
    assert _found(Wrapped(inner()), shape=(samples, 5, 6)) == "model.layers.1"


def test_a_capacity_that_only_the_batch_of_all_ranks_exceeds_is_found():
    for times, found in ((1, None), (2, "model.layers.1")):
        assert _found(Wrapped(Capacity(5 * SAMPLES)), times=times) == found


def test_layers_that_take_no_larger_batch_are_tried_with_the_batch():
    class Fixed(Wrapped):
        def forward(self, x):
            return super().forward(x + torch.zeros(SAMPLES, 1, 1))

    assert _found(Fixed(Chosen()), times=2) == "model.layers.1"


def test_layers_that_a_step_calls_one_by_one_are_looked_at():
    def step(root, x):
        return root["model"].layers[1](root["model"].layers[0](x))

    assert _found(Wrapped(Chosen()), step) == "model.layers.1"


@pytest.mark.parametrize(
    "model", [Sampled, Recurrent, Normalized, TimeFirst, lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))]
)
@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "in a model"])
def test_no_alarm_where_samples_are_by_themselves(model, wrapped):
    model = model()
    for shape in ((SAMPLES, 5, 6), (SAMPLES, SAMPLES, 6), (3, 7, 6)):
        for times in (1, 2):
            assert _found(nn.Sequential(nn.Linear(6, 6), model) if wrapped else model, shape=shape, times=times) is None


def test_images_that_are_as_large_as_the_batch_give_no_alarm():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    assert _found(model, shape=(8, 3, 8, 8)) is None
    assert _found(model, lambda root, x: root["model"](x * 2), shape=(8, 3, 8, 8)) is None


def test_nothing_is_left_of_the_search():
    class Counting(Wrapped):
        def __init__(self):
            super().__init__(Chosen())
            self.calls = []
            self.register_buffer("seen", torch.zeros(()))
            self.norm = nn.BatchNorm1d(5)

        def forward(self, x):
            self.calls.append(len(x))
            self.seen += 1
            self.layers[0].weight.data.mul_(0.5)
            torch.rand(1)
            return super().forward(self.norm(x))

    model, heard = Counting(), []
    model.layers[0].register_forward_hook(lambda module, given, output: heard.append(1))
    root = nn.ModuleDict({"model": model})
    x, mixing = torch.randn(SAMPLES, 5, 6), SampleMixing(root)
    with mixing.noting(x, SAMPLES):
        root["model"](x)
    before = {name: value.clone() for name, value in root.state_dict().items()}
    drawn, hooks = torch.get_rng_state(), sum(len(each._forward_hooks) for each in root.modules())
    assert mixing.find() == "model.layers.1"
    assert all(torch.equal(value, before[name]) for name, value in root.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert (model.calls, heard) == ([SAMPLES], [1])
    assert hooks == sum(len(each._forward_hooks) for each in root.modules()) == 1
    assert all(each.training for each in root.modules())


def test_a_copy_of_the_module_in_a_step_is_none_of_the_search():
    def step(root, x):
        hidden = root["model"].layers[0](x)
        root["model"].layers[1](hidden)
        root.teacher = copy.deepcopy(root["model"])
        root.teacher.layers[0](x)

    model = Wrapped(Chosen())
    assert _found(model, step) == "model.layers.1"
    assert model.layers[0](torch.randn(2, 6)).shape == (2, 6)


def test_calls_in_inference_mode_are_taken_as_they_are():
    def step(root, x):
        with torch.inference_mode():
            root["model"].layers[1](root["model"].layers[0](x))

    assert _found(Wrapped(Chosen()), step) == "model.layers.1"


def test_synchronized_batch_norms_take_their_statistics():
    class Own(nn.BatchNorm1d):
        def forward(self, x):
            if self.training:
                return (x - x.mean((0, 2), keepdim=True)) / x.std((0, 2), keepdim=True)
            return super().forward(x)

    def step(root, x):
        root["model"](root["model"](x))

    assert _found(nn.Sequential(Own(5)), step) is None


def test_what_cannot_be_tried_is_left_alone():
    assert _found(Wrapped(Chosen()), shape=(1, 5, 6)) is None
    written = _found(Wrapped(Chosen()), lambda root, x: (root["model"](x), x.mul_(2)))
    assert written is None
    failing = Wrapped(Chosen())
    assert _found(failing, lambda root, x: (root["model"](x), failing.layers.pop(0))) in (None, "model.layers.0")
