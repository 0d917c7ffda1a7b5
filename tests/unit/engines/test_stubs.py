"""Stubs of a pipeline: an operator's result is like that of torch's fake tensors, when it is first run and later."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lightning_pardist.compat.fake_tensors import DataDependentOutputException, FakeTensorMode
from lightning_pardist.engines.pipeline.stubs import StubMode, StubTensor

CPU = torch.device("cpu")
OPERATORS = {
    "relu": lambda x, y: F.relu(x),
    "promoted": lambda x, y: x.long() / 3,
    "by_int": lambda x, y: x.long() * 2,
    "by_float": lambda x, y: x.long() * 2.0,
    "with_real": lambda x, y: y + x,
    "list": lambda x, y: torch.cat([x, y, x], 1),
    "named": lambda x, y: x.sum(dim=1, keepdim=True, dtype=torch.float64),
    "view": lambda x, y: x.view(3, 8),
    "transposed": lambda x, y: x.t(),
    "row": lambda x, y: x[2],
    "rows": lambda x, y: x[torch.tensor([1, 2])],
    "mask": lambda x, y: x[y > 0],
    "pair": lambda x, y: x.max(dim=1)[0],
    "dropout": lambda x, y: F.dropout(x, 0.5),
    "attention": lambda x, y: F.softmax(x @ y.t(), -1),
    "detached": lambda x, y: x.detach() * y,
    "in_place": lambda x, y: (x * 1).mul_(y).add_(1),
    "made": lambda x, y: torch.arange(x.shape[0]) + torch.ones_like(x[:, 0]),
}


_SETTING = {"rows": 3}


@torch.library.custom_op("pardist_tests::rows_by_setting", mutates_args=())
def _rows_by_setting(x: torch.Tensor) -> torch.Tensor:
    return x[: _SETTING["rows"]].clone()


@_rows_by_setting.register_fake
def _(x):
    return x.new_empty(_SETTING["rows"], *x.shape[1:])


def facts(tensor):
    """Return what of a tensor is known without values."""
    kept = tensor.requires_grad, tensor.is_leaf, type(tensor.grad_fn).__name__, tensor._version
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device, *kept


def stub_of(mode, *shape, grad=True):
    made = torch.empty(shape)
    return mode.stub(made.shape, made.stride(), made.dtype, CPU).requires_grad_(grad)


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("name", list(OPERATORS))
def test_results_are_like_fake_tensors_each_time(name, grad):
    mode, real, run = StubMode(), torch.randn(4, 6), OPERATORS[name]
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        reference = torch.empty(4, 6).requires_grad_(grad)
    stub = stub_of(mode, 4, 6, grad=grad)
    if name == "mask":
        wanted = facts(run(torch.empty(4, 6).requires_grad_(grad), real))
    else:
        with fake:
            wanted = facts(run(reference, real))
    for _ in range(3):
        found = run(stub, real)
        assert isinstance(found, StubTensor)
        assert facts(found) == wanted


def test_known_results_are_used():
    mode = StubMode()
    stub = stub_of(mode, 4, 6)
    F.relu(stub)
    known = len(mode.results)
    assert known
    F.relu(stub)
    assert len(mode.results) == known


def test_results_depend_on_shapes_dtypes_and_the_default_dtype():
    mode = StubMode()
    assert [F.relu(stub_of(mode, *shape)).shape for shape in ((4, 6), (2, 6), (4, 6))] == [(4, 6), (2, 6), (4, 6)]
    whole = stub_of(mode, 4, grad=False).long()
    assert [(whole / 2).dtype, (whole * 2).dtype, (whole * 2.0).dtype] == [torch.float32, torch.int64, torch.float32]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert (whole / 2).dtype == torch.float64
    finally:
        torch.set_default_dtype(before)


def test_shape_of_a_selection_follows_each_mask():
    mode = StubMode()
    stub = stub_of(mode, 4, 6)
    for count in (3, 1, 4):
        mask = torch.arange(4) < count
        assert stub[mask].shape == (count, 6)
        assert torch.masked_select(stub, mask[:, None]).shape == (6 * count,)


def test_results_of_other_libraries_operators_are_not_kept(monkeypatch):
    stub = stub_of(StubMode(), 4, 6)
    for size in (3, 2, 4):
        monkeypatch.setitem(_SETTING, "rows", size)
        assert _rows_by_setting(stub).shape == (size, 6)


def test_changing_factors_are_one_signature():
    mode = StubMode()
    stub = stub_of(mode, 4, 6)
    for factor in (0.5, 0.25, float("nan")):
        assert (stub * factor).shape == (4, 6)
    known = len(mode.results)
    assert (stub * 0.125).shape == (4, 6)
    assert len(mode.results) == known


def test_sizes_by_factors_follow_them():
    image = stub_of(StubMode(), 1, 2, 4, 4)
    sizes = [F.interpolate(image, scale_factor=factor).shape[-1] for factor in (2.0, 3.0, 2.0, 0.5)]
    assert sizes == [8, 12, 8, 2]


def test_forward_mode_derivatives_of_views():
    mode = StubMode()
    for _ in range(3):
        stub = stub_of(mode, 4, 6, grad=False)
        value, change = torch.func.jvp(lambda x: (x.t()[1:3] * 2).sin().sum(), (stub,), (stub * 3,))
        assert value.shape == change.shape == ()


def test_views_share_the_memory_of_their_base_each_time():
    mode = StubMode()
    for _ in range(3):
        stub = stub_of(mode, 4, 6, grad=False)
        rows = stub.t()[2:].t()
        assert rows.untyped_storage()._cdata == stub.untyped_storage()._cdata
        rows.add_(1)
        assert stub._version == 1


def test_values_cannot_be_read_at_any_time():
    stub = stub_of(StubMode(), 4, 6)
    for _ in range(3):
        with pytest.raises(DataDependentOutputException):
            bool(stub.sum() > 0)


def test_stubs_work_in_inference_mode_after_training():
    mode = StubMode()
    stub = stub_of(mode, 4, 6)
    assert F.relu(stub).requires_grad
    with torch.inference_mode():
        assert F.relu(stub_of(mode, 4, 6, grad=False)).is_inference()
    assert F.relu(stub).requires_grad
