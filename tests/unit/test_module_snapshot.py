"""A trial run of a step leaves no changes in the user's classes."""

import collections

import torch
from torch import nn

from lightning_pardist.trainer.module_snapshot import ModuleSnapshot


class Counts(nn.Module):
    """Counts its calls in class attributes, which instances share."""

    calls = 0
    called = collections.defaultdict(int)
    history: list = []
    seen = torch.zeros(2)

    def forward(self, x):
        type(self).calls += 1
        Counts.history = [*Counts.history, "new"]
        self.called["forward"] += 1
        self.seen.add_(1)
        return x


class Inherits(Counts):
    pass


def test_what_classes_keep_is_put_back():
    module = nn.Sequential(Inherits(), nn.Linear(2, 2))
    history, attributes = Counts.history, dict(vars(Inherits))
    snapshot = ModuleSnapshot(module)
    module(torch.ones(1, 2))
    assert Inherits.calls == 1
    snapshot.restore()
    assert (Counts.calls, Inherits.calls, dict(Counts.called)) == (0, 0, {})
    assert Counts.history is history
    assert history == []
    assert torch.equal(Counts.seen, torch.zeros(2))
    assert dict(vars(Inherits)) == attributes
