"""Detection of steps that combine samples with a reordering of their batch."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_pardist.trainer.sample_orders import SampleOrders

SAMPLES, FEATURES, CLASSES = 6, 4, 3
torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(FEATURES, SAMPLES), nn.Tanh(), nn.Linear(SAMPLES, CLASSES))
RNN = nn.GRU(FEATURES, CLASSES, batch_first=True)
X, Y = torch.randn(SAMPLES, FEATURES), torch.tensor([2, 0, 1, 1, 0, 2])
TURNED = torch.tensor([3, 5, 0, 1, 2, 4])


def flipped(x, y):
    return F.cross_entropy(NET(0.3 * x + 0.7 * x.flip(0)), y)


def flipped_by_numpy_index(x, y):
    return F.cross_entropy(NET(torch.lerp(x, x[np.random.permutation(SAMPLES - 1).tolist() + [SAMPLES - 1]], 0.3)), y)


def rolled(x, y):
    return F.cross_entropy(NET(x.mul(0.3).add(torch.roll(x, 1, dims=0), alpha=0.7)), y)


def cut_and_pasted(x, y):
    x = x.clone()
    x[:, 1:3] = x[TURNED, 1:3]
    return F.cross_entropy(NET(x), y)


def chosen_by_a_mask(x, y):
    ids = (x * 10).long()
    ids = torch.where(ids > 3, ids, ids.index_select(0, TURNED))
    return NET(ids.float()).square().mean()


def only_labels(x, y):
    return F.cross_entropy(NET(x), y[..., TURNED])


def labels_by_roll_of_a_vector(x, y):
    return F.cross_entropy(NET(x), y.roll(1))


def hidden(x, y):
    h = NET[0](x).tanh()
    return F.cross_entropy(NET[2](0.5 * (h + h[TURNED])), y)


def negatives(x, y):
    h = NET(x)
    return F.relu(1 - (h * h).sum(1) + (h * h.roll(1, 0)).sum(1)).mean()


def time_first(x, y):
    steps = x[:, None].repeat(1, 2, 1).transpose(0, 1)
    return NET(steps + steps.flip(1)).square().mean()


def pairs_by_index(x, y):
    i, j = torch.triu_indices(SAMPLES, SAMPLES, 1)
    h = NET(x)
    return F.softplus((h[i] - h[j]).sum(1)).mean()


def pairs_by_combinations(x, y):
    index = torch.combinations(torch.arange(SAMPLES))
    h = NET(x)
    return F.cosine_similarity(h.index_select(0, index[:, 0]), h.index_select(0, index[:, 1])).mean()


def triplets_by_labels(x, y):
    same = (y[:, None] == y[None]) & ~torch.eye(SAMPLES, dtype=torch.bool)
    anchors, positives = torch.where(same)
    h = NET(x)
    return F.pairwise_distance(h[anchors], h[positives]).mean()


def others_of_a_choice(x, y):
    some = torch.randperm(SAMPLES)[:3]
    h = NET(x)
    return (h[some] @ h.T).square().mean()


def plain(x, y):
    return F.cross_entropy(NET(x), y)


def put_in_another_order(x, y):
    order = torch.randperm(SAMPLES)
    return F.cross_entropy(NET(x[order]), y[order])


def put_back_in_order(x, y):
    order = x[:, 0].argsort(descending=True)
    output, _ = RNN(x[order][:, None])
    return F.cross_entropy(output[order.argsort(), -1], y)


def read_backwards(x, y):
    return (NET(x + x.flip(1)).flip(-1) + NET(x.roll(1, 1))).square().mean()


def picked_for_each(x, y):
    logits = NET(x)
    return -logits.log_softmax(1)[torch.arange(SAMPLES), y].mean() + NET[2].weight.mean(0)[y].sum()


def looked_up(x, y):
    table = torch.randn(CLASSES, FEATURES)
    return F.cross_entropy(NET(x + table[y]), y)


def shown_beside(x, y):
    hits = (NET(x).argmax(1) == y.flip(0)).float().mean()
    return F.cross_entropy(NET(x), y) + 0 * hits


def some_of_the_samples(x, y):
    some = torch.randperm(SAMPLES)[:3]
    return F.cross_entropy(NET(x[some]), y[some])


def some_of_the_residuals(x, y):
    some = torch.randperm(SAMPLES)[:3]
    h = NET[0](x)
    h = torch.index_add(h, 0, some, h[some].tanh())
    h = h.clone()
    h[some] = h[some].sigmoid()
    return F.cross_entropy(NET[2](h), y)


def edges_of_the_data(x, y):
    source, target = y.repeat(2), (y + 1).repeat(2)
    h = NET(x)
    return (h[source] - h[target]).square().mean()


def routed(x, y):
    h, chosen = NET[0](x), x[:, :2].argmax(1)
    output = torch.zeros_like(h)
    for expert in range(2):
        rows = torch.where(chosen == expert)[0]
        output[rows] = h[rows] * (expert + 1)
    return F.cross_entropy(NET[2](output + h), y)


def both_orders_side_by_side(x, y):
    return F.cross_entropy(NET(torch.cat([x, x.flip(0)])), torch.cat([y, y.flip(0)]))


MIXED = [
    flipped,
    flipped_by_numpy_index,
    rolled,
    cut_and_pasted,
    chosen_by_a_mask,
    only_labels,
    labels_by_roll_of_a_vector,
    hidden,
    negatives,
    time_first,
    pairs_by_index,
    pairs_by_combinations,
    triplets_by_labels,
    others_of_a_choice,
]
PLAIN = [
    plain,
    put_in_another_order,
    put_back_in_order,
    read_backwards,
    picked_for_each,
    looked_up,
    shown_beside,
    some_of_the_samples,
    some_of_the_residuals,
    edges_of_the_data,
    routed,
    both_orders_side_by_side,
]


def _found(step):
    np.random.seed(1)
    with SampleOrders((X, Y), SAMPLES) as orders:
        assert step(X, Y).requires_grad
    return orders.found


@pytest.mark.parametrize("step", MIXED)
def test_samples_in_two_orders_are_found(step):
    assert "of tensors whose samples are in different orders, one by " in _found(step)


@pytest.mark.parametrize("step", PLAIN)
def test_batches_in_another_order_and_samples_by_themselves_are_not(step):
    assert _found(step) is None
