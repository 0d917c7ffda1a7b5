"""Losses of ranks with different samples, weighted to make averaged gradients equal one process's."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lightning_pardist.engines.common.loss_balance import exchange, scale_gradients
from lightning_pardist.engines.common.loss_terms import find_terms
from tests.helpers.parity import assert_close
from tests.helpers.ranks import run_ranks

SAMPLES = 8


def all_terms(values, x, kept):
    return F.mse_loss(values, x) + (values[kept].pow(2).sum() / max(int(kept.sum()), 1))


def terms_where_something_counts(values, x, kept):
    """Compute two loss terms; ranks whose samples are not kept lack the second one."""
    if not kept.any():
        return F.mse_loss(values, x) + values.sum() * 0
    return F.mse_loss(values, x) + F.smooth_l1_loss(values[kept], x[kept])


def zero_where_nothing_counts(values, x, kept):
    return values[kept].pow(2).mean() if kept.any() else values.sum() * 0


def sums_divided_by_a_reciprocal(values, x, kept):
    return values[kept].abs().sum() * (1 / max(int(kept.sum()), 1))


def a_mean_for_each_class(values, x, kept):
    kept = torch.cat([kept[:, :2], torch.ones_like(kept[:, :3])], 1)
    return (
        ((values - x).pow(2) * kept[..., None]).sum((0, 2)).div(kept.sum(0).clamp(min=1)).mul(values.new_ones(5)).sum()
    )


def a_mean_for_each_class_that_is_no_number(values, x, kept):
    means = torch.where(kept, values.sum(2), 0.0).sum(0) / kept.sum(0)
    return means.nan_to_num()[1:].pow(1).sum() + values.mean()


def a_weighed_mean_for_each_class(values, x, kept):
    weights = kept * torch.arange(1.0, 6.0, dtype=x.dtype) * 0.3
    return ((values.abs().mean(2) * weights).sum(0) / weights.sum(0).clamp(min=1e-9)).mean()


def items_of_each_sample(values, x, kept):
    lengths = [1 + int(each) for each in kept.sum(1)]
    rows = list(zip(values, x, lengths, strict=True))
    items = sum((value[:length] - target[:length]).abs().sum() for value, target, length in rows) / sum(lengths)
    return items + sum((value[:length] - 1).pow(2).mean() for value, _, length in rows) / len(rows)


def other_on_some_ranks(values, x, kept):
    return F.mse_loss(values, x) if kept.any() else values.abs().mean()


def _gradients(loss):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(SAMPLES, 5, 4, generator=generator, dtype=torch.double)
    kept = torch.rand(SAMPLES, 5, generator=generator) > 0.4
    # Nothing counts on rank 0.
    kept[: SAMPLES // dist.get_world_size()] = False
    torch.manual_seed(0)
    net = nn.Linear(4, 4).double()
    loss(net(x), x, kept).backward()
    wanted = {name: param.grad.clone() for name, param in net.named_parameters()}
    net.zero_grad()
    x, kept = (each.chunk(dist.get_world_size())[dist.get_rank()] for each in (x, kept))
    own = loss(net(x), x, kept)
    terms = find_terms(own, samples=len(x))
    found = exchange(terms, samples=float(len(x)), group=dist.group.WORLD, device=torch.device("cpu"))
    scale_gradients(terms, found.factors)
    own.backward()
    for param in net.parameters():
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()
    return {name: param.grad for name, param in net.named_parameters()}, wanted, bool(found.agreed)


LOSSES = [all_terms, terms_where_something_counts, zero_where_nothing_counts, sums_divided_by_a_reciprocal]
LOSSES += [a_mean_for_each_class, a_mean_for_each_class_that_is_no_number, a_weighed_mean_for_each_class]
LOSSES += [items_of_each_sample]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("loss", LOSSES)
def test_ranks_that_hold_nothing_count_nothing(loss, world_size):
    for found, wanted, agreed in run_ranks(world_size, _gradients, loss):
        assert agreed
        assert_close(found, wanted, rtol=1e-12)


def test_losses_of_other_terms_are_told():
    assert not any(agreed for *_, agreed in run_ranks(2, _gradients, other_on_some_ranks))
