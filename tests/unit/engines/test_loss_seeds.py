"""Micro-batches' losses weighed in one process, in the orders of schedules."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_pardist.engines.common.loss_balance import scale_gradients
from lightning_pardist.engines.common.loss_terms import find_terms
from lightning_pardist.engines.pipeline.loss_seeds import LossMakeup, LossSeeds
from lightning_pardist.engines.pipeline.microbatch import MicroBatch

SAMPLES, LENGTH, CLASSES = 8, 6, 5
NET = nn.Linear(4, CLASSES)
SCALE = nn.Parameter(torch.tensor(0.3))
generator = torch.Generator().manual_seed(1)
INPUTS = torch.randn(SAMPLES, LENGTH, 4, generator=generator)
LABELS = torch.randint(0, CLASSES, (SAMPLES, LENGTH), generator=generator)
LABELS[torch.arange(LENGTH) >= torch.randint(1, LENGTH, (SAMPLES, 1), generator=generator)] = -100
LABELS[5] = -100


def tokens(x, y):
    return F.cross_entropy(NET(x).flatten(0, 1), y.flatten())


def smoothed(x, y):
    return F.cross_entropy(NET(x).flatten(0, 1), y.flatten(), label_smoothing=0.1)


def samples(x, y):
    return NET(x).mean(1).pow(2).mean()


def two_means_over_samples(x, y):
    return samples(x, y) + 0.2 * NET(x).abs().mean()


def regularized(x, y):
    return tokens(x, y) + 0.1 * NET.weight.pow(2).sum()


def learned_weight(x, y):
    log_variance = NET.bias.sum()
    return torch.exp(-log_variance) * samples(x, y) + log_variance


def learned_weight_is_a_leaf(x, y):
    return torch.exp(-SCALE) * samples(x, y) + SCALE


def inv(x, y):
    return SCALE * (samples(x, y) + 0.2 * NET(x).abs().mean())


def wsum(x, y):
    return torch.exp(-SCALE) * (tokens(x, y) + 0.01 * NET.weight.pow(2).sum()) + SCALE


def normalized(x, y):
    return (samples(x, y) + NET(x).abs().sum(-1).mean()) / SCALE


def one_plus(x, y):
    return SCALE * (1 + smoothed(x, y))


def nested(x, y):
    return SCALE * (NET.bias.exp().sum() * (1 + tokens(x, y)) + NET.weight.pow(2).sum())


def stacked(x, y):
    return (torch.stack([samples(x, y), NET(x).abs().mean()]) * torch.stack([SCALE, SCALE.exp()])).sum()


def used_twice(x, y):
    mean = tokens(x, y)
    return mean + 0.5 * mean + mean


def added(x, y):
    return NET(x).pow(2).sum() + 0.1 * NET.weight.pow(2).sum()


def several(x, y):
    return tokens(x, y) + samples(x, y) + 0.01 * added(x, y)


ONE_COUNT = [tokens, smoothed, samples, two_means_over_samples, regularized, added]
ONE_COUNT += [learned_weight, learned_weight_is_a_leaf, used_twice]
ONE_COUNT += [inv, wsum, normalized, one_plus, nested, stacked]


def _gradient():
    own = torch.zeros(()) if SCALE.grad is None else SCALE.grad
    return torch.cat([*(param.grad.flatten() for param in NET.parameters()), own.flatten()])


def _run(seeds, loss, sizes, forwards_first=False, scale=1.0):
    NET.zero_grad()
    SCALE.grad = None
    parts = [MicroBatch(part, len(part[0])) for part in zip(INPUTS.split(sizes), LABELS.split(sizes), strict=True)]
    seeds.begin(parts, scale=scale)
    losses = []
    for index, part in enumerate(parts):
        losses.append(loss(*part.value))
        seeds.add(index, losses[index])
        if not forwards_first:
            _backward(seeds, index, losses[index])
    for index in range(len(parts) if forwards_first else 0):
        _backward(seeds, index, losses[index])
    weighing = seeds.finish()
    return _gradient() * weighing.correction, weighing.value([each.detach() for each in losses]), weighing


def _backward(seeds, index, loss):
    seeds.before_backward(index)
    seed, _ = seeds.seed(index, loss)
    loss.backward(seed)


def _whole(loss, scale=1.0):
    NET.zero_grad()
    SCALE.grad = None
    value = loss(INPUTS, LABELS)
    (value * scale).backward()
    return _gradient(), value.detach()


def _seeds(setting="auto"):
    return LossSeeds(setting, lambda: None, torch.device("cpu"))


@pytest.mark.parametrize("sizes", [[1] * 8, [3, 3, 2], [8]], ids=str)
@pytest.mark.parametrize("forwards_first", [False, True])
@pytest.mark.parametrize("loss", ONE_COUNT)
def test_one_count_needs_no_order(loss, forwards_first, sizes):
    seeds, (wanted, value) = _seeds(), _whole(loss, 0.5)
    for _ in range(2):
        found, own, weighing = _run(seeds, loss, sizes, forwards_first, 0.5)
        torch.testing.assert_close(found, wanted)
        if loss not in (regularized, added, wsum):
            torch.testing.assert_close(own, value)
        assert not weighing.several_counts


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y: SCALE * (tokens(x, y) + samples(x, y)),
        lambda x, y: SCALE * (1 + NET(x).pow(2).sum()),
        lambda x, y: SCALE * (NET.bias.sum() + NET(x).pow(2).sum()),
        lambda x, y: SCALE * (tokens(x, y) + NET(x).pow(2).sum()),
    ],
)
def test_a_trained_factor_of_what_has_no_common_one_is_named(loss):
    assert "trained" in LossMakeup.of(loss(INPUTS, LABELS), None, SAMPLES, "auto").coupled


@pytest.mark.parametrize("loss", ONE_COUNT)
def test_trained_factors_of_one_count_are_right(loss):
    assert not LossMakeup.of(loss(INPUTS, LABELS), None, SAMPLES, "auto").coupled


def test_counts_that_differ_by_rounding_are_one_count():
    weights = torch.rand(len(INPUTS), generator=torch.Generator().manual_seed(1))

    def coupled(off_by):
        values = NET(INPUTS).pow(2).mean((1, 2))
        one = (values * weights).sum() / weights.sum()
        other = (values.abs() * weights).sum() / (weights.sum() * (1 + off_by))
        return LossMakeup.of(SCALE * (one + other), None, SAMPLES, "auto").coupled

    assert not coupled(1e-6)
    assert coupled(1e-2)


def test_a_product_of_results_of_the_batch_is_scaled_as_a_whole():
    def loss():
        return (NET(INPUTS).pow(2).mean() + 1) * (NET(INPUTS).abs().mean() + SCALE)

    NET.zero_grad()
    SCALE.grad = None
    loss().backward()
    wanted = 2 * _gradient()
    NET.zero_grad()
    SCALE.grad = None
    terms = find_terms(whole := loss(), samples=SAMPLES)
    scale_gradients(terms, torch.full((len(terms),), 2.0))
    whole.backward()
    torch.testing.assert_close(_gradient(), wanted)


def test_hooks_are_for_one_backward():
    base = tokens(INPUTS, LABELS) + NET(INPUTS).abs().mean()
    found = []
    for _ in range(2):
        NET.zero_grad()
        terms = find_terms(loss := SCALE * base, samples=SAMPLES)
        scaling = scale_gradients(terms, torch.full((len(terms),), 2.0))
        loss.backward(retain_graph=True)
        scaling.remove()
        found.append(_gradient()[:-1])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("sizes", [[1] * 8, [3, 3, 2]], ids=str)
def test_several_counts_need_all_forwards_first(sizes):
    wanted, _ = _whole(several)
    found, _, weighing = _run(_seeds(), several, sizes, True)
    torch.testing.assert_close(found, wanted)
    assert weighing.several_counts
    assert _run(_seeds(), several, sizes)[2].several_counts
    assert LossMakeup.of(several(INPUTS, LABELS), None, SAMPLES, "auto").several_counts


@pytest.mark.parametrize("setting", ["samples", "ranks", "sum", lambda batch: float(batch[0][:, 0].shape[0])])
def test_settings_weigh_the_whole_loss(setting):
    sizes = [3, 3, 2]
    NET.zero_grad()
    SCALE.grad = None
    weights = {"ranks": [1 / 3] * 3, "sum": [1.0] * 3}.get(setting, [size / SAMPLES for size in sizes])
    for weight, x, y in zip(weights, INPUTS.split(sizes), LABELS.split(sizes), strict=True):
        (weight * tokens(x, y)).backward()
    wanted = _gradient()
    found, _, _ = _run(_seeds(setting), tokens, sizes)
    torch.testing.assert_close(found, wanted)


def test_where_nothing_counts_at_all_gradients_are_zero():
    LABELS_BEFORE = LABELS.clone()
    try:
        LABELS.fill_(-100)
        for forwards_first in (False, True):
            found, _, _ = _run(_seeds(), tokens, [4, 4], forwards_first)
            assert not found.any()
    finally:
        LABELS.copy_(LABELS_BEFORE)
