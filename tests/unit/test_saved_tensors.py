"""Saved tensors of autograd nodes are read without running saved-tensor hooks, on every torch version."""

import torch
from torch.utils.checkpoint import checkpoint

from lightning_pardist.compat.autograd_graph import kept, saved

DATA = torch.arange(12.0).reshape(3, 4)


def weight():
    return torch.ones(3, 4, requires_grad=True)


def test_a_tensor_that_lies_there_is_given():
    product = (weight() * DATA).grad_fn
    for read in (kept, saved):
        assert read(product, "other").data_ptr() == DATA.data_ptr()
        assert read(product, "no_such_argument") is None


def test_a_result_that_was_saved_is_given():
    result = weight().exp()
    assert torch.equal(kept(result.grad_fn, "result"), result)


def test_no_hook_is_asked_for_what_it_packed():
    asked = []

    def unpack(packed):
        asked.append(packed)
        return packed

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        product = (weight() * DATA).grad_fn
    assert kept(product, "other") is None
    assert not asked
    # The access that is avoided would have run the hook.
    assert saved(product, "other") is not None
    assert asked


def test_no_checkpointed_layer_runs_again():
    runs = []

    def layer(x):
        runs.append(x)
        return (x * DATA).exp()

    node = checkpoint(layer, weight(), use_reentrant=False).grad_fn
    assert kept(node, "result") is None
    assert len(runs) == 1


def test_what_backward_has_freed_is_none():
    loss = (weight() * DATA).sum()
    product = loss.grad_fn.next_functions[0][0]
    loss.backward()
    assert kept(product, "other") is None
    assert saved(product, "other") is None


def test_a_torch_that_does_not_tell_of_hooks_may_have_some():
    class Node:
        _raw_saved_other, _saved_other = object(), DATA

    assert kept(Node(), "other") is None
