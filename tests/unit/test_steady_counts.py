"""Backward before the counts of the ranks' losses are known: which steps wait, and which factors gradients get."""

from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F

from lightning_pardist.engines.common import loss_balance
from lightning_pardist.engines.common.loss_balance import begin_exchange, counts_of
from lightning_pardist.engines.common.loss_terms import find_terms
from lightning_pardist.trainer.steady_counts import SteadyCounts


class Group:
    """A group of two ranks whose all-reduce is completed by :meth:`send`."""

    def __init__(self):
        self.messages = []

    def size(self):
        return 2

    def wait(self):
        pass

    def send(self):
        total = sum(self.messages)
        for message in self.messages:
            message.copy_(total)
        self.messages.clear()


@dataclass
class Job:
    """Ranks that take steps together."""

    ranks: list[SteadyCounts] = field(default_factory=lambda: [SteadyCounts(), SteadyCounts()])
    group: Group = field(default_factory=Group)

    def step(self, *losses, allowed=True):
        """Take a step in which each rank has a loss of this many samples. Return for each rank whether it waits before
        backward, its factor on its loss, and that on its reduced gradients."""
        begun = []
        for steady, (loss, samples) in zip(self.ranks, losses, strict=True):
            terms = find_terms(loss, samples=samples)
            counts = counts_of(terms, samples)
            changed = steady.begin(counts, self.group, allowed=allowed)
            exchange = begin_exchange(
                terms, samples=samples, changed=changed, overlaps=True, group=self.group, device=torch.device("cpu")
            )
            begun.append((exchange, changed or steady.known is None))
        self.group.send()
        found = []
        for steady, (exchange, waits) in zip(self.ranks, begun, strict=True):
            common = steady.common_factor(exchange)
            found.append((waits, exchange.result().factors[0].item() / common if waits else 1.0, common))
            steady.end(exchange)
        assert (self.ranks[0].known is None) == (self.ranks[1].known is None)
        assert found[0][2] == found[1][2]
        return found


@pytest.fixture
def job(monkeypatch):
    def all_reduce(message, group, async_op):
        group.messages.append(message)
        return group

    monkeypatch.setattr(loss_balance.dist, "all_reduce", all_reduce)
    return Job()


def _labels(counted, samples=4):
    """Return a mean over this many labels that are not ignored."""
    out = torch.randn(samples, 3, requires_grad=True)
    return F.cross_entropy(out, torch.tensor([0] * counted + [-100] * (samples - counted))), samples


def _squares(samples=4):
    return torch.randn(samples, 3, requires_grad=True).square().mean(), samples


def _waits(found):
    return [waits for waits, *_ in found]


def _effective(found):
    return [factor * common for _, factor, common in found]


def test_backward_does_not_wait_after_two_steps_with_the_same_counts(job):
    steps = [job.step(_labels(3), _labels(3)) for _ in range(4)]
    assert [_waits(found) for found in steps] == [[True, True]] * 2 + [[False, False]] * 2
    assert [_effective(found) for found in steps] == [[1.0, 1.0]] * 4


@pytest.mark.parametrize(("counts", "factors"), [((3, 1), (1.5, 0.5)), ((1, 2), (2 / 3, 4 / 3)), ((3, 0), (2.0, 0.0))])
def test_counts_that_change_give_the_factors_of_one_process(job, counts, factors):
    for _ in range(3):
        job.step(_labels(3), _labels(3))
    found = job.step(*map(_labels, counts))
    assert _waits(found) == [count != 3 for count in counts]
    assert _effective(found) == pytest.approx(factors)
    assert _waits(job.step(_labels(3), _labels(3))) == [True, True]


def test_ranks_without_counted_labels_always_wait(job):
    steps = [job.step(_labels(0), _labels(0)) for _ in range(4)]
    assert [_waits(found) for found in steps] == [[True, True]] * 4
    assert _effective(job.step(_labels(0), _labels(2))) == [0.0, 2.0]


def test_ranks_with_different_losses_always_wait(job):
    for _ in range(4):
        assert _waits(job.step(_labels(3), _squares())) == [True, True]
    assert _effective(job.step(_labels(3), _labels(1))) == [1.5, 0.5]


def test_uneven_counts_that_stay_the_same_always_wait(job):
    steps = [job.step(_labels(3), _labels(1)) for _ in range(4)]
    assert [_waits(found) for found in steps] == [[True, True]] * 4
    assert all(_effective(found) == [1.5, 0.5] for found in steps)


def test_steps_that_must_wait_reset_what_is_known(job):
    for _ in range(3):
        job.step(_labels(3), _labels(3))
    found = job.step(_labels(3), _labels(1), allowed=False)
    assert _waits(found) == [True, True]
    assert [common for *_, common in found] == [1.0, 1.0]
    assert _effective(found) == [1.5, 0.5]
