"""Detection of gradient-free values that a step computes from all samples and uses in its loss."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_pardist.engines.common.batch_dim import BatchDims
from lightning_pardist.trainer.batch_figures import BatchFigures

SAMPLES, LENGTH, CLASSES = 6, 5, 3
torch.manual_seed(0)
NET, EMBEDDING = nn.Linear(4, CLASSES), nn.Embedding(7, 4)
BATCH = {
    "x": torch.randn(SAMPLES, 4),
    "y": torch.tensor([2, 0, 1, 1, 0, 2]),
    "weight": torch.rand(SAMPLES),
    "ids": torch.randint(0, 7, (SAMPLES, LENGTH)),
    "mask": torch.rand(SAMPLES, LENGTH) > 0.4,
    "lengths": torch.randint(1, LENGTH + 1, (SAMPLES,)),
    "group": torch.tensor([0, 0, 1, 1, 1, 2]),
}


def _losses(batch):
    return F.cross_entropy(NET(batch["x"]), batch["y"], reduction="none")


def _tokens(batch):
    return NET(EMBEDDING(batch["ids"])).square().mean(2)


def normalized_weights(batch):
    return torch.dot(batch["weight"] / batch["weight"].sum(), _losses(batch))


def weights_by_frequency(batch):
    counts = torch.bincount(batch["y"], minlength=CLASSES).float()
    return F.cross_entropy(NET(batch["x"]), batch["y"], weight=counts.sum() / (CLASSES * counts.clamp(min=1)))


def weights_of_positives(batch):
    targets = F.one_hot(batch["y"], CLASSES).float()
    positives = targets.sum(0)
    ratio = (len(targets) - positives) / positives.clamp(min=1)
    return F.binary_cross_entropy_with_logits(NET(batch["x"]), targets, pos_weight=ratio)


def normalized_advantages(batch):
    advantages = batch["weight"] - NET(batch["x"])[:, 0].detach()
    return (_losses(batch) * (advantages - advantages.mean()) / (advantages.std() + 1e-8)).mean()


def normalized_advantages_of_a_baseline(batch):
    advantages = (batch["weight"] - NET(batch["x"])[:, 0]).detach()
    return (_losses(batch) * (advantages - advantages.mean())).mean()


def hardest_by_a_quantile(batch):
    losses = _losses(batch)
    with torch.no_grad():
        bound = (2 * losses).quantile(0.5)
    return (losses * (losses > bound / 2)).mean()


def centred_inputs(batch):
    return NET(batch["x"] - batch["x"].mean(0, keepdim=True)).square().mean()


def largest_target(batch):
    return (_losses(batch) / batch["weight"].max()).mean()


def more_than_the_mean(batch):
    return _losses(batch)[batch["weight"] > batch["weight"].mean()].sum()


def share_of_a_mask(batch):
    return _tokens(batch).mean() * batch["mask"].float().mean()


def losses_balanced_by_their_size(batch):
    first, second = _losses(batch).mean(), _tokens(batch).mean()
    return first + second * (first.detach() / second.detach())


def softmax_over_samples(batch):
    return (_losses(batch) * batch["weight"].softmax(0)).sum()


def shifted_by_the_largest(batch):
    """Shift before exponentials, which are divided by their sum."""
    losses = _losses(batch)
    shares = (losses - losses.detach().max()).exp()
    return (shares / torch.zeros(3).index_add(0, batch["group"], shares)[batch["group"]]).square().mean()


def chosen_by_themselves(batch):
    logits = NET(batch["x"])
    confident, labels = logits.detach().softmax(1).max(1)
    return (F.cross_entropy(logits, labels, reduction="none") * (confident > 0.4)).mean()


def plain(batch):
    return _losses(batch).mean()


def masked(batch):
    return (_tokens(batch) * batch["mask"]).sum() / batch["mask"].sum().float().clamp(min=1.0)


def masked_by_a_reciprocal(batch):
    return (_tokens(batch) * batch["mask"]).sum() * (1.0 / (batch["mask"].sum() + 1e-8))


def weighed(batch):
    return (_losses(batch) * batch["weight"]).sum() / batch["weight"].sum()


def for_each_class(batch):
    targets = F.one_hot(batch["y"], CLASSES)
    return ((_losses(batch)[:, None] * targets).sum(0) / targets.sum(0)).sum()


def of_samples(batch):
    mask = batch["mask"]
    x = (batch["x"] - batch["x"].mean(1, keepdim=True)) / batch["x"].std(dim=-1, keepdim=True)
    return NET(x).square().mean() + ((_tokens(batch) * mask).sum(1) / mask.sum(-1).clamp(min=1)).mean()


def cut_to_the_longest(batch):
    longest = batch["lengths"].max()
    mask = torch.arange(longest) < batch["lengths"][:, None]
    tokens = _tokens(batch)[:, :longest]
    return (tokens * mask).sum() / mask.sum()


def groups_of_rows(batch):
    """Pool nodes by graph."""
    pooled = torch.zeros(3, CLASSES).index_add(0, batch["group"], NET(batch["x"]))
    return (pooled / torch.bincount(batch["group"], minlength=3)[:, None]).square().mean()


def accuracy_beside(batch):
    logits = NET(batch["x"])
    accuracy = (logits.argmax(1) == batch["y"]).float().mean()
    return F.cross_entropy(logits, batch["y"]) if accuracy >= 0 else accuracy


def packed(batch):
    lengths = batch["lengths"]
    rows = nn.utils.rnn.pack_padded_sequence(EMBEDDING(batch["ids"]), lengths, batch_first=True, enforce_sorted=False)
    return NET(rows.data).square().mean()


def within_a_capacity_of_all_tokens(batch):
    """Routing to experts with room for a number of tokens: those of other samples count."""
    tokens = NET(EMBEDDING(batch["ids"]).view(-1, 4))
    chosen = F.one_hot(tokens.argmax(1), CLASSES)
    places = chosen.cumsum(0) - 1 + chosen.sum(0, keepdim=True)
    return (tokens.softmax(1) * (chosen * torch.lt(places, 4))).sum(1).mean()


def over_experts_that_have_tokens(batch):
    tokens = NET(EMBEDDING(batch["ids"]).view(-1, 4))
    chosen = F.one_hot(tokens.argmax(1), CLASSES)
    output = torch.zeros_like(tokens)
    for expert in torch.greater(chosen.sum(0), 0).nonzero():
        rows = torch.where(chosen.T[expert].squeeze(0))[0]
        output = output.index_add(0, rows, tokens[None, rows].view(-1, CLASSES))
    return output.square().mean()


def mean_over_a_mean(batch):
    mask = batch["mask"].float()
    return (_tokens(batch) * mask).mean() / mask.mean()


def of_two_sums(batch):
    """Division of sums, which the autograd graph shows and this detection leaves out."""
    probabilities, targets = NET(batch["x"]).softmax(1), F.one_hot(batch["y"], CLASSES)
    return 1 - ((probabilities * targets).sum(0) / (probabilities.sum(0) + targets.sum(0))).mean()


def less_than_the_sum(batch):
    return F.softplus(NET(batch["x"])[:, 0] - batch["weight"].sum()).mean()


def _found(step):
    with BatchFigures(BATCH, SAMPLES) as figures:
        loss = step(BATCH)
    assert loss.requires_grad
    return figures.found


COUPLED = [
    normalized_weights,
    weights_by_frequency,
    weights_of_positives,
    normalized_advantages,
    normalized_advantages_of_a_baseline,
    hardest_by_a_quantile,
    centred_inputs,
    largest_target,
    more_than_the_mean,
    share_of_a_mask,
    losses_balanced_by_their_size,
    softmax_over_samples,
    less_than_the_sum,
    within_a_capacity_of_all_tokens,
]
PLAIN = [
    shifted_by_the_largest,
    chosen_by_themselves,
    plain,
    masked,
    masked_by_a_reciprocal,
    weighed,
    for_each_class,
    of_samples,
    cut_to_the_longest,
    groups_of_rows,
    accuracy_beside,
    packed,
    over_experts_that_have_tokens,
    mean_over_a_mean,
    of_two_sums,
]


@pytest.mark.parametrize("step", COUPLED)
def test_what_is_made_of_all_samples(step):
    assert _found(step)


@pytest.mark.parametrize("step", PLAIN)
def test_counts_lengths_and_samples_by_themselves_are_no_figures(step):
    assert _found(step) is None


def test_a_read_of_an_attribute_does_not_search_the_graph(monkeypatch):
    searches = []

    class Counted(BatchDims):
        def of(self, node):
            searches.append(node)
            return super().of(node)

    monkeypatch.setattr("lightning_pardist.trainer.batch_figures.BatchDims", Counted)
    with BatchFigures(BATCH, SAMPLES):
        output = NET(BATCH["x"])
        assert output.shape[0] == output.size(0) == SAMPLES
        assert output.device == BATCH["x"].device
        assert output.dtype == torch.float32
    assert not searches
