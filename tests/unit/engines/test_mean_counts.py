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


def _incremented(number):
    number += 1
    return number


UNKNOWN = {
    "sum": lambda: F.cross_entropy(SCORES, LABELS, reduction="sum"),
    "scaled": lambda: SCORES.sum() / torch.tensor(3.0),
    "averages": lambda: SCORES.mean(0).mean(),
    "functions of a mean": lambda: F.cross_entropy(SCORES, LABELS).exp(),
    "products": lambda: F.cross_entropy(SCORES, LABELS) * F.cross_entropy(SCORES, LABELS),
    "smoothed": lambda: (SCORES.sum() + 1.0) / (COUNTS.sum() + 1.0),
    "changed divisor": lambda: SCORES.sum() / _incremented(COUNTS.sum()),
    "divided by zero": lambda: F.cross_entropy(SCORES, LABELS) / 0,
    "divided": lambda: 1 / F.cross_entropy(SCORES, LABELS),
}


def _cross_entropy():
    return F.cross_entropy(SCORES, LABELS)


def _weighted():
    return F.cross_entropy(SCORES, LABELS, weight=WEIGHTS)


def _accumulated(total):
    total += _cross_entropy()
    total += 0.5 * _weighted()
    return total


def _written(first, second):
    terms = torch.zeros(3)
    terms[0] = second
    terms[0] = first
    terms[1] += second
    terms[-1] = 1.0
    return terms


def _in_place():
    loss = _cross_entropy()
    loss.mul_(2).add_(_weighted())
    loss /= 2
    return loss


def _overlap():
    both = 2 * (SCORES.sigmoid()[:, 0] * COUNTS).sum()
    return 1 - both / (SCORES.sigmoid()[:, 0].sum() + COUNTS.sum() + 1e-8)


#: What a sum of means adds: (factor, mean) with the mean's count; None for what is no mean.
SUMS = {
    "weighted": (lambda: _cross_entropy() + 0.1 * _weighted(), [(1, _cross_entropy, 4), (0.1, _weighted, 10)]),
    "difference": (lambda: _cross_entropy() - _weighted() / 4, [(1, _cross_entropy, 4), (-0.25, _weighted, 10)]),
    "negated": (lambda: -_weighted(), [(-1, _weighted, 10)]),
    "rest": (
        lambda: SCORES.square().mean() + _cross_entropy(),
        [(1, lambda: SCORES.square().mean(), 24), (1, _cross_entropy, 4)],
    ),
    "list": (
        lambda: sum([_cross_entropy(), _weighted()]),
        [(1, _cross_entropy, 4), (1, _weighted, 10)],
    ),
    "written": (
        lambda: _written(_cross_entropy(), _weighted()).mean(),
        [(1 / 3, _cross_entropy, 4), (1 / 3, lambda: 0.0, None), (1 / 3, _weighted, 10), (1 / 3, lambda: 1.0, None)],
    ),
    "element": (lambda: _written(_cross_entropy(), _weighted())[-2] * 2, [(0, _weighted, None), (2, _weighted, 10)]),
    "stack": (
        lambda: torch.stack([_cross_entropy(), _weighted()]).mean(),
        [(0.5, _cross_entropy, 4), (0.5, _weighted, 10)],
    ),
    "tensor as factor": (lambda: torch.tensor(3.0) * _weighted(), [(3, _weighted, 10)]),
    "into a number": (
        lambda: _accumulated(0.0),
        [(1, _cross_entropy, 4), (0.5, _weighted, 10)],
    ),
    "into a tensor": (
        lambda: _accumulated(torch.ones(())),
        [(1, lambda: 1.0, None), (1, _cross_entropy, 4), (0.5, _weighted, 10)],
    ),
    "in place": (_in_place, [(1, _cross_entropy, 4), (0.5, _weighted, 10)]),
}


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_parts_of_sums(name, mode):
    compute, want = SUMS[name]
    counts = MeanCounts(sums=True)
    with mode(), counts.recording():
        value = compute()
    for each in (value, value.detach(), value.item()):
        found = counts.parts_of(each)
        assert [part.items for part in found] == [count for *_, count in want]
        for part, (factor, mean, _) in zip(found, want, strict=True):
            torch.testing.assert_close(torch.as_tensor(part.value), torch.as_tensor(factor * mean()))


def test_numbers_beside_a_mean_over_nothing():
    counts = MeanCounts(sums=True)
    with torch.no_grad(), counts.recording():
        nothing = F.cross_entropy(SCORES[:1], LABELS[2:3])
        value = (nothing + 0.5 * _weighted()).item()
    assert [part.items for part in counts.parts_of(value)] == [0, 10]
    assert counts.parts_of(0.5) is None


def test_a_tensor_that_changes_after_its_elements_were_written_is_unknown():
    counts = MeanCounts(sums=True)
    with torch.no_grad(), counts.recording():
        terms = _written(_cross_entropy(), _weighted())
        terms[0].mul_(2)
        value = terms.sum()
        terms[0] = 0.0
        known = terms[0] + 0.0
    assert counts.parts_of(value) is None
    assert counts.parts_of(known) is None


def test_ratio_of_sums():
    counts = MeanCounts(sums=True)
    with torch.no_grad(), counts.recording():
        loss = _overlap()
    ratio, one = counts.parts_of(loss)
    assert (one.value, one.items) == (1.0, None)
    torch.testing.assert_close(ratio.items, SCORES.sigmoid()[:, 0].sum() + COUNTS.sum())
    torch.testing.assert_close(one.value + ratio.value, loss)


def test_calls_are_noted_once_in_a_torch_function_mode():
    class Passing(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            again = getattr(torch.Tensor, func.__name__) if func.__name__ in ("__iadd__", "__rmul__") else func
            return again(*args, **(kwargs or {}))

    counts = MeanCounts(sums=True)
    with torch.no_grad(), counts.recording(), Passing():
        value = _accumulated(torch.ones(()))
    assert [part.items for part in counts.parts_of(value)] == [None, 4, 10]


def test_sizes_of_what_is_averaged():
    counts = MeanCounts(sums=True)
    with torch.no_grad(), counts.recording():
        value = SCORES.square()[COUNTS].mean() + 0.5 * F.l1_loss(SCORES, SCORES + 1, reduction="sum") / COUNTS.sum()
    size, ratio = counts.parts_of(value)
    assert (size.items, size.is_size) == (16, True)
    assert (ratio.items, ratio.is_size) == (4, False)


def test_transforms_are_not_noted():
    counts = MeanCounts(sums=True)
    with torch.no_grad(), counts.recording():
        losses = torch.func.vmap(lambda scores, label: F.cross_entropy(scores, label) * 2)(SCORES, LABELS.clamp(min=0))
        loss = losses.sum()
    assert counts.parts_of(loss) is None


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_counts_of_means(name, mode):
    compute, count = MEANS[name]
    counts = MeanCounts(sums=True)
    with mode(), counts.recording():
        mean = compute()
    for value in (mean, mean.detach(), mean.item()):
        assert counts.count_of(value) == count
    counts.forget()
    assert counts.count_of(mean) is None


def test_numbers_added_to_means_and_sums_added_to_zero():
    counts = MeanCounts(sums=True)
    right, total = COUNTS.float() > 0.5, torch.zeros(())
    with torch.no_grad(), counts.recording():
        accuracy = right[COUNTS].float().mean()
        error, percent = 1 - accuracy, 100 * accuracy
        ratio = (total + SCORES[COUNTS].sum()) / (torch.tensor(0) + COUNTS.sum())
        of_unknown = accuracy + total.add(1)
        of_computed = accuracy + SCORES.mean().item()
    known = counts.count_of(accuracy)
    assert known is not None
    assert counts.count_of(error) == counts.count_of(percent) == known
    assert counts.count_of(ratio) == COUNTS.sum()
    assert counts.count_of(of_unknown) is counts.count_of(of_computed) is None


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_no_mean_over_items_is_not_known(name):
    counts = MeanCounts(sums=True)
    with torch.no_grad(), counts.recording():
        value = UNKNOWN[name]()
    assert counts.count_of(value) is None


@pytest.mark.parametrize("name", ["clamped", "fractions"])
def test_counts_inside_of_a_fit(name):
    compute, count = MEANS[name]
    counts = MeanCounts(sums=True)
    with noted_floors(), torch.no_grad(), counts.recording():
        mean = compute()
    assert counts.count_of(mean) == count


def test_the_graph_of_a_step_is_not_kept():
    counts, scores = MeanCounts(sums=True), SCORES.clone().requires_grad_()
    with counts.recording():
        loss = F.cross_entropy(scores, LABELS)

    def hook(*_):
        """Live as long as the graph."""

    loss.grad_fn.register_hook(hook)
    graph = weakref.ref(hook)
    assert counts.count_of(loss.detach()) == 4
    del hook, loss
    assert graph() is None


def test_torch_is_left_as_it_was_and_other_threads_are_not_recorded():
    before = {name: getattr(F, name) for name in ("cross_entropy", "mse_loss")} | {"mean": torch.mean}
    reversed_difference = torch.Tensor.__rsub__
    counts, found = MeanCounts(sums=True), []
    with counts.recording():
        thread = threading.Thread(target=lambda: found.append(F.cross_entropy(SCORES, LABELS)))
        thread.start()
        thread.join()
    assert counts.count_of(found[0]) is None
    assert before == {name: getattr(F, name) for name in ("cross_entropy", "mse_loss")} | {"mean": torch.mean}
    assert not {"mean", "sum", "__truediv__", "div", "add_", "__radd__"} & vars(torch.Tensor).keys()
    assert torch.Tensor.__rsub__ is reversed_difference
