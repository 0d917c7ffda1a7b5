"""Weighting of micro-batches' losses in one process, in the orders of the schedules."""

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
    assert "trainable" in LossMakeup.of(loss(INPUTS, LABELS), None, SAMPLES, "auto").coupled


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


# --- losses as people write them, whatever parts hold -----------------------------------------------------------------

VALUES = nn.Linear(4, 4)
WIDE = torch.randn(SAMPLES, 4, 4, generator=generator)
KEPT = torch.rand(SAMPLES, 4, generator=generator) > 0.4
KEPT[:4] = False
CLASS = torch.randint(0, 4, (SAMPLES, 4), generator=generator)


def reciprocal(x, kept, y):
    return VALUES(x)[kept].pow(2).sum() * (1 / max(int(kept.sum()), 1))


def reciprocal_tensor(x, kept, y):
    return VALUES(x)[kept].pow(2).sum() * (1 / kept.sum().double().clamp(min=1))


def divided_before_the_sum(x, kept, y):
    return (VALUES(x).pow(2) * kept[..., None] / kept.sum().clamp(min=1)).sum()


def mean_by_mean(x, kept, y):
    return (VALUES(x).pow(2).mean(-1) * kept).mean() / kept.double().mean().clamp(min=1e-15)


def zero_if_empty(x, kept, y):
    return VALUES(x)[kept].pow(2).mean() if kept.any() else VALUES(x).sum() * 0


def mean_of_joined(x, kept, y):
    joined = torch.cat([VALUES(each)[mask] for each, mask in zip(x, kept, strict=True)])
    return joined.pow(2).mean() if len(joined) else joined.sum()


def second_is_zero_if_empty(x, kept, y):
    if not kept.any():
        return F.mse_loss(VALUES(x), x) + VALUES(x).sum() * 0
    return F.mse_loss(VALUES(x), x) + F.cross_entropy(VALUES(x).transpose(1, 2), y.masked_fill(~kept, -100))


def where_kept(x, kept, y):
    return torch.where(kept[..., None], VALUES(x), 0.0).pow(2).sum() / (kept.sum() * 4).clamp(min=1)


def where_not_empty(x, kept, y):
    count = kept.sum() * 4
    total = (VALUES(x).pow(2) * kept[..., None]).sum()
    return torch.where(count == 0, torch.zeros(()), total / torch.where(count == 0, torch.ones_like(count), count))


def filled(x, kept, y):
    return VALUES(x).masked_fill(~kept[..., None], 0).pow(2).sum() / (kept.sum() * 4).clamp(min=1)


def summed_twice(x, kept, y):
    return (VALUES(x).pow(2) * kept[..., None]).sum(-1).sum(-1).sum() / kept.sum().clamp(min=1)


def weighed_sum(x, kept, y):
    weight = kept[..., None].double()
    loss = F.binary_cross_entropy_with_logits(VALUES(x), (x > 0).double(), weight=weight, reduction="sum")
    return loss / (kept.sum() * 4).clamp(min=1)


def dot_product(x, kept, y):
    weight = x[:, 0, 0].abs()
    return torch.dot((VALUES(x) - x).pow(2).mean((1, 2)), weight) / weight.sum()


def matrix_and_vector(x, kept, y):
    return (VALUES(x).pow(2).mean(1).t() @ x[:, 0, 0].abs()).sum() / len(x)


def einsum_over_the_batch(x, kept, y):
    return torch.einsum("btc,btc->t", VALUES(x), x).sum() / len(x)


def einsum_to_a_number(x, kept, y):
    weight = x[:, 0].abs()
    return torch.einsum("bi,bi->", (VALUES(x) - x).pow(2).mean(1), weight) / weight.sum()


def sum_of_flattened(x, kept, y):
    return VALUES(x).reshape(len(x), -1).pow(2).sum(0).mean()


def parameter_first(x, kept, y):
    return (VALUES.weight @ VALUES(x).mean(1).t()).pow(2).sum(0).mean()


def each_class_by_all(x, kept, y):
    found = VALUES(x)
    return sum(found[y == each].pow(2).sum() for each in range(4)) / y.numel()


def each_sample_by_all(x, kept, y):
    terms = [(VALUES(each)[mask] - each[mask]).pow(2).sum() for each, mask in zip(x, kept, strict=True)]
    return sum(terms) / max(int(kept.sum()), 1)


def each_sample_or_zero(x, kept, y):
    terms = [
        VALUES(a)[mask].pow(2).mean() if mask.any() else VALUES(a).sum() * 0 for a, mask in zip(x, kept, strict=True)
    ]
    return torch.stack(terms).mean()


def each_step_by_all(x, kept, y):
    steps = [((VALUES(x[:, t]) - x[:, t]).pow(2).mean(-1) * kept[:, t]).sum() for t in range(4)]
    return sum(steps) / kept.sum().clamp(min=1)


def halves(x, kept, y):
    one = VALUES(x)[kept].pow(2).sum() / max(int(kept.sum()), 1)
    return 0.5 * (one + VALUES(x)[~kept].abs().sum() / max(int((~kept).sum()), 1))


def by_a_count_of_one_element(x, kept, y):
    count = torch.clamp(torch.as_tensor([int(kept.sum())], dtype=torch.float64), min=1)
    return (VALUES(x)[kept].abs().sum() / count).squeeze()


def written_and_scaled(x, kept, y):
    terms = torch.zeros(2, dtype=torch.float64)
    terms[0] = VALUES(x)[kept].abs().sum() / kept.sum().clamp(min=1)
    terms[1] = F.mse_loss(VALUES(x), x)
    terms[0] *= 3.0
    terms[1] *= 0.5
    return terms.sum()


def each_label_by_a_number(x, kept, y):
    labels = y.masked_fill(~kept, -100)
    each = F.cross_entropy(VALUES(x).transpose(1, 2), labels, reduction="none")
    return each.sum() / max((labels != -100).sum().item(), 1)


def each_flat_label_by_a_number(x, kept, y):
    labels = y.masked_fill(~kept, -100).flatten()
    each = F.cross_entropy(VALUES(x).flatten(0, 1), labels, reduction="none").view(len(x), -1)
    return each.sum(1).sum() / max(int((labels != -100).sum()), 1)


AS_WRITTEN = [reciprocal, reciprocal_tensor, divided_before_the_sum, mean_by_mean, zero_if_empty, mean_of_joined]
AS_WRITTEN += [second_is_zero_if_empty, where_kept, filled, summed_twice, weighed_sum, dot_product, matrix_and_vector]
AS_WRITTEN += [
    einsum_over_the_batch,
    einsum_to_a_number,
    sum_of_flattened,
    parameter_first,
    each_class_by_all,
    each_sample_by_all,
]
AS_WRITTEN += [each_sample_or_zero, each_step_by_all, halves]
AS_WRITTEN += [where_not_empty, by_a_count_of_one_element, written_and_scaled]
AS_WRITTEN += [each_label_by_a_number, each_flat_label_by_a_number]


@pytest.mark.parametrize("sizes", [[1] * 8, [2] * 4, [3, 3, 2], [4, 4]], ids=str)
@pytest.mark.parametrize("loss", AS_WRITTEN)
def test_losses_as_people_write_them(loss, sizes):
    VALUES.double().zero_grad()
    whole = (WIDE.double(), KEPT, CLASS)
    loss(*whole).backward()
    wanted = [param.grad.clone() for param in VALUES.parameters()]
    VALUES.zero_grad()
    seeds = _seeds()
    parts = [MicroBatch(part, len(part[0])) for part in zip(*(each.split(sizes) for each in whole), strict=True)]
    seeds.begin(parts)
    losses = [loss(*part.value) for part in parts]
    for index, own in enumerate(losses):
        seeds.add(index, own)
    for index, own in enumerate(losses):
        _backward(seeds, index, own)
    weighing = seeds.finish()
    assert weighing.alike
    found = [param.grad * weighing.correction for param in VALUES.parameters()]
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def test_losses_of_unlike_terms_are_told():
    parts = [MicroBatch(None, 2), MicroBatch(None, 2)]
    seeds = _seeds()
    seeds.begin(parts)
    losses = [F.mse_loss(VALUES(WIDE.double()), WIDE.double()), VALUES(WIDE.double()).abs().mean()]
    for index, own in enumerate(losses):
        seeds.add(index, own)
    for index, own in enumerate(losses):
        _backward(seeds, index, own)
    assert not seeds.finish().alike
