from collections import OrderedDict, deque

import pytest

from lightning_pardist.engines.common.containers import refill


@pytest.mark.parametrize("make", [list, deque, set, lambda items: dict.fromkeys(items)], ids=str)
def test_contents_are_written_back(make):
    container, kept = make([1, 2]), make([1, 2])
    container.pop() if not isinstance(container, dict) else container.pop(1)
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
