"""Detection of steps that compare samples of a batch with each other."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_pardist.trainer.sample_pairs import SamplePairs

SAMPLES, WIDTH = 6, 4
torch.manual_seed(0)
NET, FROZEN, WIDE = nn.Linear(5, WIDTH), nn.Linear(5, WIDTH).requires_grad_(False), nn.Linear(WIDTH, SAMPLES)
BATCH = {"x": torch.randn(SAMPLES, 5), "y": torch.tensor([2, 0, 1, 1, 0, 2])}


class _OutOfSight(torch.autograd.Function):
    """Custom function that torch shows to no dispatch mode."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


def products(batch):
    z = NET(batch["x"])
    return z @ z.T


def products_with_a_frozen_tower(batch):
    with torch.no_grad():
        frozen = F.normalize(FROZEN(batch["x"]), dim=1)
    return NET(batch["x"]) @ frozen.T


def products_by_einsum(batch):
    return torch.einsum("id,jd->ij", NET(batch["x"]), NET(-batch["x"]))


def late_interaction(batch):
    z = NET(batch["x"]).view(SAMPLES, 2, 2)
    return torch.einsum("iqd,jkd->ijqk", z, z).amax(-1).sum(-1)


def differences(batch):
    scores = NET(batch["x"])[:, 0]
    return F.softplus(scores[None] - scores[:, None])


def differences_from_labels(batch):
    return NET(batch["x"])[:, 0, None] - batch["y"]


def distances(batch):
    z = NET(batch["x"])
    return F.pairwise_distance(z[:, None], z[None])


def distances_in_a_row(batch):
    return F.pdist(NET(batch["x"]))


def similarities(batch):
    z = NET(batch["x"])
    return F.cosine_similarity(z.unsqueeze(0), z.unsqueeze(1), dim=-1)


def behind_functions_out_of_sight(batch):
    z = _OutOfSight.apply(NET(batch["x"]))
    return z @ _OutOfSight.apply(z.T)


def plain(batch):
    return F.cross_entropy(NET(batch["x"]), batch["y"])


def as_wide_as_the_batch(batch):
    return F.linear(WIDE(NET(batch["x"])), torch.eye(SAMPLES)) + WIDE.bias[:, None]


def one_class_for_each(batch):
    prototypes = F.normalize(WIDE.weight, dim=1)
    return NET(batch["x"]) @ prototypes.T


def a_column_for_each(batch):
    return torch.stack([NET(batch["x"])[:, 0] * factor for factor in range(SAMPLES)], dim=1)


def within_samples(batch):
    tokens = NET(batch["x"].unsqueeze(1) * torch.ones(SAMPLES, 1)).softmax(-1)
    return tokens @ tokens.transpose(1, 2)


def predicted_weights(batch):
    z = NET(batch["x"])
    return torch.bmm(z[:, :, None], batch["x"][:, None]).mean(2)


def labels_alone(batch):
    alike = batch["y"][:, None] == batch["y"]
    return NET(batch["x"]).mean() * alike.any()


PAIRS = [
    products,
    products_with_a_frozen_tower,
    products_by_einsum,
    late_interaction,
    differences,
    differences_from_labels,
    distances,
    distances_in_a_row,
    similarities,
    behind_functions_out_of_sight,
]
PLAIN = [
    plain,
    as_wide_as_the_batch,
    one_class_for_each,
    a_column_for_each,
    within_samples,
    predicted_weights,
    labels_alone,
]


def _found(step):
    with SamplePairs(BATCH, SAMPLES) as pairs:
        loss = step(BATCH).mean()
    assert loss.requires_grad
    return pairs.found


@pytest.mark.parametrize("step", PAIRS)
def test_samples_that_are_compared(step):
    assert "of samples with each other" in _found(step)


@pytest.mark.parametrize("step", PLAIN)
def test_samples_by_themselves_are_no_pairs(step):
    assert _found(step) is None
