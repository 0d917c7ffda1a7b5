from collections import OrderedDict, deque

import pytest

from lightning_pardist.engines.common.containers import refill


@pytest.mark.parametrize("kind", [list, deque, set, dict])
def test_contents_are_written_back(kind):
    container, kept = (kind([(1, 1), (2, 2)]) for _ in range(2))
    container.popitem() if kind is dict else container.pop()
    refill(container, kept)
    assert container == kept


class Frozen(OrderedDict):
    def update(self, *args, **kwargs):
        if self:
            raise TypeError("cannot be updated")
        super().update(*args, **kwargs)

    def clear(self):
        raise TypeError("cannot be cleared")


def test_a_dict_that_refuses_changes_is_not_written_to():
    frozen = Frozen([("size", 8)])
    refill(frozen, dict(frozen))
    assert list(frozen) == ["size"]
