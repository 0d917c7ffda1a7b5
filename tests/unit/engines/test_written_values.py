"""Detection of writes to a parameter, and of whether ranks wrote the same."""

import gc

import torch
from torch import nn

from lightning_pardist.compat import parameter_data
from lightning_pardist.compat.parameter_data import count_data_accesses, data_accesses_of
from lightning_pardist.engines.common.fingerprint import FINGERPRINT_SIZE, fingerprint


def test_equal_values_have_equal_fingerprints_and_others_have_others():
    values = torch.randn(5, 7)
    assert fingerprint(values).shape == (FINGERPRINT_SIZE,)
    assert torch.equal(fingerprint(values), fingerprint(values.clone()))
    assert not torch.equal(fingerprint(values), fingerprint(values + 1e-6))
    moved = values[torch.tensor([1, 0, 2, 3, 4])]
    assert not torch.equal(fingerprint(values), fingerprint(moved))
    assert torch.equal(fingerprint(torch.zeros(0)), torch.zeros(FINGERPRINT_SIZE, dtype=torch.float64))


def test_a_fingerprint_reads_as_much_as_it_is_told_to():
    values = torch.zeros(100)
    before = fingerprint(values, at_most=10)
    values[::10] = 1.0
    assert fingerprint(values, at_most=10)[0] == 10.0 != before[0]


def test_data_of_watched_parameters_is_counted_and_what_it_was():
    watched, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    seen = count_data_accesses(watched)
    other.data.add_(1.0)
    assert data_accesses_of(watched) == seen
    watched.data.add_(1.0)
    assert data_accesses_of(watched) == seen + 1
    watched.data = torch.zeros(3)
    assert data_accesses_of(watched) == seen + 2
    assert watched.tolist() == [0.0] * 3
    assert watched.requires_grad
    assert not watched.data.requires_grad
    assert watched.data.data_ptr() == watched.data_ptr()
    assert type(watched) is nn.Parameter


def test_nothing_is_kept_of_a_parameter_that_is_gone():
    # Parameters of earlier tests.
    gc.collect()
    parameter = nn.Parameter(torch.ones(3))
    count_data_accesses(parameter)
    before = len(parameter_data._looks)
    del parameter
    gc.collect()
    assert len(parameter_data._looks) == before - 1


def test_parameters_are_torchs_again_when_none_is_watched():
    gc.collect()
    parameter = nn.Parameter(torch.ones(3))
    count_data_accesses(parameter)
    assert "data" in nn.Parameter.__dict__
    others = len(parameter_data._looks) - 1
    del parameter
    gc.collect()
    assert ("data" in nn.Parameter.__dict__) == bool(others)
    still = nn.Parameter(torch.ones(3))
    still.data = torch.zeros(3)
    assert still.tolist() == [0.0] * 3


def test_compiled_code_may_ask_for_the_data_of_a_parameter():
    layer = nn.Linear(3, 3)
    count_data_accesses(layer.weight)

    def doubled(x):
        return x @ layer.weight.data * 2

    compiled = torch.compile(doubled, backend="eager", fullgraph=True)
    x = torch.randn(2, 3)
    assert torch.equal(compiled(x), doubled(x))
