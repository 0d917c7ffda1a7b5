"""Checksums by which ranks compare their batches."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_pardist.axes.first_batch import batch_checksum


def _sparse(value: float) -> torch.Tensor:
    return torch.eye(3).mul(value).to_sparse()


class Labelled(torch.Tensor):
    """Tensor whose columns have names, so that its shape cannot change (PINA)."""

    def reshape(self, *shape: int) -> torch.Tensor:
        raise ValueError("The number of labels does not match the shape.")


BATCHES: dict[str, Callable[[float], Any]] = {
    "tensor": lambda value: (torch.full((3, 2), value), torch.zeros(3)),
    "shape": lambda value: torch.zeros(int(value), 2),
    "array": lambda value: {"x": np.full((3, 2), value)},
    "array of objects": lambda value: np.array([str(value), None], dtype=object),
    "texts": lambda value: {"text": ["a", str(value)], "x": torch.zeros(2)},
    "numbers": lambda value: ([1, value], torch.zeros(2)),
    "sparse": lambda value: [_sparse(value), torch.zeros(2)],
    "sparse rows": lambda value: [_sparse(value).to_sparse_csr()],
    "nested": lambda value: torch.nested.nested_tensor([torch.ones(2), torch.full((3,), value)]),
    "jagged": lambda value: torch.nested.nested_tensor([torch.ones(2), torch.ones(3) * value], layout=torch.jagged),
    "subclass": lambda value: {"points": torch.full((3, 2), value).as_subclass(Labelled)},
    "set": lambda value: {str(value), "b", "c"},
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_different_batches_have_different_checksums(batch: Callable[[float], Any]) -> None:
    assert batch_checksum(batch(1.0)) == batch_checksum(batch(1.0))
    assert batch_checksum(batch(1.0)) != batch_checksum(batch(2.0))


def test_what_cannot_be_pickled_is_compared_by_its_type() -> None:
    assert batch_checksum([lambda: 1]) == batch_checksum([lambda: 2]) != batch_checksum([nn.Identity()])
