"""Flat slices and DTensors as boxes of a global tensor."""

import itertools

import pytest
import torch

from lightning_pardist.checkpoint.chunks import flat_boxes, overlap, shards_of, shards_of_slice, within


def _fill(whole, shards):
    for part in shards.parts:
        where = tuple(slice(a, a + n) for a, n in zip(part.offsets, part.sizes, strict=True))
        assert not whole[where].any(), "boxes overlap"
        whole[where] = part.values
    return whole


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (2, 1, 3, 2)])
def test_flat_slices_are_few_boxes_and_together_the_whole(shape):
    numel = torch.Size(shape).numel()
    values = torch.arange(1.0, numel + 1)
    for start, stop in itertools.combinations(range(numel + 1), 2):
        boxes = list(flat_boxes(shape, start, stop))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
        found = _fill(torch.zeros(shape), shards_of_slice(torch.empty(shape), start, stop, values[start:stop]))
        expected = torch.zeros(numel)
        expected[start:stop] = values[start:stop]
        assert torch.equal(found.flatten(), expected)


def test_a_slice_of_a_parameter_whose_channels_come_last():
    param = torch.randn(3, 4, 2, 5).contiguous(memory_format=torch.channels_last) + 10
    flat = param.permute(0, 2, 3, 1).flatten()
    whole = torch.zeros(3, 4, 2, 5)
    for start, stop in ((0, 17), (17, 18), (18, 120)):
        _fill(whole, shards_of_slice(param, start, stop, flat[start:stop]))
    assert torch.equal(whole, param)


def test_overlap_in_global_offsets():
    assert overlap((0, 2), (4, 4), (2, 0), (4, 3)) == ((2, 2), (2, 1))
    assert overlap((0,), (2,), (2,), (2,)) is None
    assert overlap((), (), (), ()) == ((), ())
    part = shards_of(torch.arange(6).view(2, 3)).parts[0]
    assert within(part, (1, 1), (1, 2)).tolist() == [[4, 5]]
