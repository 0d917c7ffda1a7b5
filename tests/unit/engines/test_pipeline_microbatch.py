"""Splitting batches of any class into micro-batches, and merging results."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lightning_pardist.engines.pipeline import BatchCut, MicroBatch, UnevenBatchError, merge_results, split_batch
from lightning_pardist.engines.pipeline.cut import parts_of
from lightning_pardist.engines.pipeline.microbatch import fresh_copy
from lightning_pardist.engines.pipeline.nested import flatten, rebuild


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    names: list[str]
    scale: float = 2.0


@dataclass(slots=True)
class Slotted:
    x: Tensor
    size: int = 2


@dataclass(slots=True, frozen=True)
class FrozenSlotted:
    __x: Tensor

    @property
    def x(self) -> Tensor:
        return self.__x


class Plain:
    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.extra = {"y": x + 1, "none": None}


class Encoding(UserDict):  # type: ignore[type-arg]
    """Return type of tokenizers."""


class Shaped(UserDict):  # type: ignore[type-arg]
    """TensorDict-like: one size for all entries, refusal of other sizes, and its own indexing."""

    def __init__(self, items: dict[str, Tensor], length: int) -> None:
        self.shape = torch.Size([length])
        super().__init__(items)

    def __setitem__(self, key: str, value: Tensor) -> None:
        if len(value) != self.shape[0]:
            raise RuntimeError("batch dimension mismatch")
        self.data[key] = value

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self.data[key]
        cut = {name: value[key] for name, value in self.data.items()}
        return Shaped(cut, len(next(iter(cut.values()))))


@dataclass
class Measured:
    x: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.x.shape


@dataclass
class Labelled(Measured):
    """Batch class whose indexing returns its main tensor."""

    labels: Tensor

    def __getitem__(self, index: Any) -> Tensor:
        return self.x[index]


class Sized(NamedTuple):
    x: Tensor
    shape: tuple[int, int]


def test_containers_that_have_a_shape_and_do_not_index_themselves_are_cut_by_what_they_hold() -> None:
    x = torch.arange(10).view(5, 2)
    batch = (Measured(x), Labelled(x, x[:, 0]), Sized(x, (5, 2)), x)
    measured, labelled, sized, _ = split_batch(batch, 2)[1].value
    assert torch.equal(measured.x, x[3:])
    assert torch.equal(labelled.labels, x[3:, 0])
    assert torch.equal(labelled.x, x[3:])
    assert torch.equal(sized.x, x[3:])


def test_a_container_with_a_shape_is_cut_by_its_own_indexing() -> None:
    x = torch.arange(10).view(5, 2)
    parts = [part.value for part in split_batch({"state": Shaped({"x": x, "y": x + 1}, 5), "z": x}, 2)]
    assert [tuple(part["state"].shape) for part in parts] == [(3,), (2,)]
    assert torch.equal(torch.cat([part["state"]["y"] for part in parts]), x + 1)


def test_sizes_differ_by_at_most_one() -> None:
    x = torch.arange(7)
    parts = split_batch((x, x.float()), 3)
    assert [part.size for part in parts] == [3, 2, 2]
    assert torch.equal(torch.cat([part.value[0] for part in parts]), x)
    assert [part.size for part in split_batch(x[:2], 3)] == [1, 1]
    assert len(split_batch(x[:1], 3)) == 1
    assert len(split_batch({"flag": True}, 3)) == 1


def test_any_class() -> None:
    x = torch.arange(8).view(4, 2)
    for batch, get in (
        (Pair(x, x), lambda b: b.x),
        (Frozen(x, ["a", "b", "c", "d"]), lambda b: b.x),
        (Plain(x), lambda b: b.extra["y"] - 1),
        (Slotted(x), lambda b: b.x),
        (FrozenSlotted(x), lambda b: b.x),
        ({"graphs": Slotted(x)}, lambda b: b["graphs"].x),
        (Encoding(x=x), lambda b: b["x"]),
        (OrderedDict(a=[x, {"b": x}]), lambda b: b["a"][1]["b"]),
    ):
        parts = split_batch(batch, 2)
        assert all(type(part.value) is type(batch) for part in parts)
        assert torch.equal(torch.cat([get(part.value) for part in parts]), x)
        assert torch.equal(get(batch), x)
    frozen = split_batch(Frozen(x, ["a", "b", "c", "d"]), 2)[1].value
    assert frozen.names == ["c", "d"]
    assert frozen.scale == 2.0


def test_what_is_no_sample_goes_everywhere() -> None:
    batch = {"x": torch.zeros(6, 2), "y": torch.zeros(6), "weights": torch.ones(3), "step": torch.tensor(1), "k": 5}
    batch["mask"] = torch.ones(1, 4)
    with pytest.raises(UnevenBatchError, match="'x', 'y' have 6, 'weights' has 3"):
        split_batch(batch, 3)
    for cut in (BatchCut({"weights": None}), BatchCut(whole=frozenset({"weights"}))):
        assert len(cut.split(batch, 3)) == 3
        assert {each.name: each.dim for each in cut.describe(batch)}["weights"] is None
    for part in split_batch(batch, 3, batch_dim={"weights": None}):
        assert part.value["x"].shape == (2, 2)
        assert part.value["weights"].shape == (3,)
        assert part.value["step"].ndim == 0
        assert part.value["k"] == 5


def test_batches_of_detectors() -> None:
    for counts in ((1, 2, 3, 1), (2, 2, 2, 2), (4, 4, 4, 4)):
        targets = [{"boxes": torch.zeros(n, 4) + i, "labels": torch.zeros(n)} for i, n in enumerate(counts)]
        images = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 3, 8, 8)
        for batch in (
            (images, targets),
            {"images": images, "targets": tuple(targets)},
            (tuple(images), tuple(targets)),
            list(zip(images, targets, strict=True)),
            [{"image": image, **target} for image, target in zip(images, targets, strict=True)],
        ):
            assert BatchCut().size_of(batch) == 4
            for index, part in enumerate(split_batch(batch, 4)):
                found = [tensor for tensor in flatten(part.value)[0] if tensor.ndim > 1]
                assert [tensor.mean().item() for tensor in found] == [index, index], (counts, type(batch))


def test_batches_of_several_loaders() -> None:
    batch = [{"x": torch.zeros(8, 2), "y": torch.zeros(8)}, {"x": torch.zeros(8, 2), "y": torch.zeros(8)}]
    assert BatchCut().size_of(batch) == 8
    assert [len(part["x"]) for part in split_batch(batch, 2)[0].value] == [4, 4]


@pytest.mark.parametrize("lengths", [(2, 3, 8, 4, 3, 8), (5, 7, 5, 5, 6, 3), (2, 3, 4)])
def test_a_lone_list_of_sequences_holds_a_sample_each(lengths: tuple[int, ...]) -> None:
    batch = [torch.randn(length, 4) for length in lengths]
    assert BatchCut().samples_of(batch) == len(lengths)
    assert [len(part.value) for part in split_batch(batch, 2)] == [len(lengths) - len(lengths) // 2, len(lengths) // 2]


def test_a_list_of_tensors_that_mostly_agree_is_no_list_of_samples() -> None:
    assert BatchCut().samples_of([torch.randn(5, 4), torch.randn(5, 4), torch.randn(3, 4)]) is None
    assert BatchCut().samples_of([torch.randn(5, 4), torch.randn(5), torch.randn(3, 4), torch.randn(3, 2)]) is None


def test_lists_of_samples_and_other_batch_dims() -> None:
    images = [torch.zeros(3, size, size) for size in (4, 5, 6, 7)]
    parts = split_batch({"images": images, "ids": ["a", "b", "c", "d"]}, 2)
    assert [len(part.value["images"]) for part in parts] == [4, 4] or [len(p.value["images"]) for p in parts] == [2, 2]
    time_first = split_batch((torch.zeros(9, 4, 2), torch.zeros(4)), 2, batch_dim=1)
    assert [part.value[0].shape for part in time_first] == [(9, 2, 2), (9, 2, 2)]
    by_name = split_batch({"a": (torch.zeros(9, 4), torch.zeros(7, 4)), "b": torch.zeros(4)}, 2, batch_dim={"a": 1})
    assert [part.value["a"][1].shape for part in by_name] == [(7, 2), (7, 2)]
    assert BatchCut().size_of((torch.zeros(9, 4), torch.zeros(9))) == 9


def test_ragged_batches_are_refused() -> None:
    graph = (torch.zeros(105, 8), torch.zeros(105), torch.zeros(16))
    with pytest.raises(UnevenBatchError, match=r"'0', '1' have 105, '2' has 16.*split_batch"):
        split_batch(graph, 4)
    assert len(split_batch(graph, 1)) == 1
    packed = nn.utils.rnn.pack_sequence([torch.zeros(4, 2), torch.zeros(3, 2)])
    with pytest.raises(UnevenBatchError):
        split_batch((packed, torch.zeros(2)), 2)
    with pytest.raises(ValueError, match=r"cannot be cut.*split_batch"):
        split_batch(torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged), 2)
    with pytest.raises(ValueError, match="tensors in a set"):
        split_batch({"x": torch.zeros(4), "more": {torch.zeros(4)}}, 2)


def test_functions_that_cut() -> None:
    def halves(batch: Any, most: int) -> list[Any]:
        return [MicroBatch((batch[0][:3], batch[1][:1]), 1), (batch[0][3:4], batch[1][1:])]

    parts = parts_of(halves, (torch.zeros(9), torch.zeros(2)), 4, BatchCut())
    assert [part.size for part in parts] == [1, 1]
    with pytest.raises(ValueError, match="returned 2 micro-batches where 1 to 1"):
        parts_of(halves, (torch.zeros(9), torch.zeros(2)), 1, BatchCut())
    with pytest.raises(ValueError, match="cannot be counted"):
        parts_of(lambda batch, most: [batch], (torch.zeros(9), torch.zeros(2)), 1, BatchCut())


def test_results_are_merged() -> None:
    results: list[Any] = [
        {"loss": torch.tensor(1.0), "rows": torch.zeros(3, 2), "count": 2, "name": "a", "none": None},
        {"loss": torch.tensor(4.0), "rows": torch.ones(1, 2), "count": 2, "name": "a", "none": None},
    ]
    merged = merge_results(results, [0.75, 0.25], [3, 1])
    assert float(merged["loss"]) == 1.75
    assert merged["rows"].shape == (4, 2)
    assert merged["count"] == 2
    assert merged["none"] is None


def test_copies_are_independent() -> None:
    batch = {"x": torch.zeros(2), "inner": [Plain(torch.zeros(2))]}
    copied = fresh_copy(batch)
    copied.pop("x").add_(1)
    copied["inner"][0].x.add_(1)
    assert float(batch["x"].sum() + batch["inner"][0].x.sum()) == 0  # type: ignore[attr-defined, index, union-attr]


def test_structures_survive() -> None:
    normal = torch.distributions.Normal(torch.zeros(2), torch.ones(2))
    value = (Pair(torch.zeros(1), torch.ones(1)), {"n": normal, "k": [None, 3]}, Frozen(torch.ones(2), ["x"]))
    leaves, spec = flatten(value)
    again = rebuild(spec, leaves)
    assert type(again[0]) is Pair
    assert torch.equal(again[1]["n"].mean, normal.mean)
    assert again[1]["k"] == [None, 3]
    assert again[2].names == ["x"]


def test_a_write_to_one_part_is_none_to_others():
    tokens = torch.arange(8).view(4, 2)
    first, second = (part.value for part in split_batch(tokens, 2))
    table = nn.Embedding(8, 3)
    found = table(first).sum()
    # Like models that put padding in place of ignored labels.
    second.masked_fill_(second == 5, 0)
    found.backward()
    assert tokens[2, 1] == 0


class Irreps(tuple):  # type: ignore[type-arg]
    """Sequence that refuses ``len()``, as that of e3nn."""

    def __len__(self) -> int:
        raise NotImplementedError


def test_sequences_without_a_length() -> None:
    leaves, spec = flatten({"x": torch.ones(2), "irreps": Irreps((1, 2))})
    assert leaves[1:] == [1, 2]
    assert list(iter(rebuild(spec, leaves)["irreps"])) == [1, 2]
