"""What the means of a step divide by, without a graph."""

import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_pardist.engines.common.floored_counts import noted_floors
from lightning_pardist.engines.common.mean_counts import MeanCounts

SCORES = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, -100, 3, -100, 2])
WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0])
COUNTS = LABELS >= 0
IMAGES = torch.randn(2, 4, 3, 3, generator=torch.Generator().manual_seed(1))

MEANS = {
    "labels": (lambda: F.cross_entropy(SCORES, LABELS), 4),
    "module": (lambda: nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1)(SCORES, LABELS), 10),
    "no labels": (lambda: F.nll_loss(SCORES[:0], LABELS[:0]), 0),
    "pixels": (lambda: F.cross_entropy(IMAGES, torch.zeros(2, 3, 3).long(), ignore_index=0), 0),
    "probabilities": (lambda: F.cross_entropy(IMAGES, IMAGES.softmax(1)), 18),
    "one sample": (lambda: F.cross_entropy(SCORES[0], LABELS[0]), 1),
    "elements": (lambda: F.mse_loss(SCORES[COUNTS], SCORES[COUNTS] + 1), 16),
    "mask": (lambda: (SCORES[:, 0] * COUNTS).sum() / COUNTS.sum(), 4),
    "clamped": (lambda: SCORES[:0].sum() / COUNTS[:0].sum().float().clamp_(min=1), 0),
    "functions": (lambda: torch.div(torch.sum(SCORES), torch.count_nonzero(COUNTS)), 4),
    "fractions": (lambda: (SCORES.argmax(-1) == LABELS)[COUNTS].double().mean(), 4),
}
UNKNOWN = {
    "sum": lambda: F.cross_entropy(SCORES, LABELS, reduction="sum"),
    "scaled": lambda: SCORES.sum() / torch.tensor(3.0),
    "averages": lambda: SCORES.mean(0).mean(),
    "functions of a mean": lambda: F.cross_entropy(SCORES, LABELS).exp(),
}


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_counts_of_means(name, mode):
    compute, count = MEANS[name]
    counts = MeanCounts()
    with mode(), counts.recording():
        mean = compute()
    for value in (mean, mean.detach(), mean.item()):
        assert counts.of(value) == count
    counts.forget()
    assert counts.of(mean) is None


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_no_mean_over_items_is_not_known(name):
    counts = MeanCounts()
    with torch.no_grad(), counts.recording():
        value = UNKNOWN[name]()
    assert counts.of(value) is None


@pytest.mark.parametrize("name", ["clamped", "fractions"])
def test_counts_inside_of_a_fit(name):
    compute, count = MEANS[name]
    counts = MeanCounts()
    with noted_floors(), torch.no_grad(), counts.recording():
        mean = compute()
    assert counts.of(mean) == count


def test_the_graph_of_a_step_is_not_kept():
    counts, scores = MeanCounts(), SCORES.clone().requires_grad_()
    with counts.recording():
        loss = F.cross_entropy(scores, LABELS)

    def hook(*_):
        """Live as long as the graph."""

    loss.grad_fn.register_hook(hook)
    graph = weakref.ref(hook)
    assert counts.of(loss.detach()) == 4
    del hook, loss
    assert graph() is None


def test_torch_is_left_as_it_was_and_other_threads_are_not_recorded():
    before = {name: getattr(F, name) for name in ("cross_entropy", "mse_loss")} | {"mean": torch.mean}
    counts, found = MeanCounts(), []
    with counts.recording():
        thread = threading.Thread(target=lambda: found.append(F.cross_entropy(SCORES, LABELS)))
        thread.start()
        thread.join()
    assert counts.of(found[0]) is None
    assert before == {name: getattr(F, name) for name in ("cross_entropy", "mse_loss")} | {"mean": torch.mean}
    assert not {"mean", "sum", "__truediv__", "div"} & vars(torch.Tensor).keys()
