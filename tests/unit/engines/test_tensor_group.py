"""A tensor group's cached copies: eviction depends on the number of other tensors, not on their memory addresses."""

import torch

from lightning_pardist.engines.tensor.regions import _REMEMBERED, TensorGroup
from tests.helpers.ranks import cpu_mesh, run_ranks


def _lives(keep):
    """Return the number of other tensors after which a cached copy is evicted; they are kept alive or freed."""
    group = TensorGroup(cpu_mesh((1,), ("tensor_parallel",)))
    shared = torch.ones(2, requires_grad=True)
    kept = []

    def enter_another():
        # A view that is not kept is freed at once, and a later one may reuse its address.
        other = (2 * shared).view(2)
        group.copy(other)
        if keep:
            kept.append(other)

    for _ in range(4 * _REMEMBERED):
        enter_another()
    first, lives = group.copy(shared), 0
    while group.copy(shared) is first and lives < 100:
        enter_another()
        lives += 1
    return lives


def test_a_tensor_is_remembered_for_as_many_others_wherever_these_lie():
    for keep in (True, False):
        assert run_ranks(1, _lives, keep) == [_REMEMBERED]
