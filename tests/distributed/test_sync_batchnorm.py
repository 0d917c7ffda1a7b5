"""Batch normalization over ranks against torch's over all samples in one process."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from lightning_pardist.engines.common.sync_batchnorm import batch_norm
from tests.helpers.parity import assert_close
from tests.helpers.ranks import run_ranks

#: Samples of each rank.
SHARES = (5, 3)
AFFINE = ("weight", "bias")


def _tensors(names):
    """Return all ranks' samples, and the parameters with these names; the others are None."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(SHARES), 3, 2, dtype=torch.float64, generator=generator)
    values = {name: torch.randn(3, dtype=torch.float64, generator=generator).requires_grad_() for name in AFFINE}
    return x, {name: values[name] if name in names else None for name in AFFINE}


def _gradients(output, x, params, penalty):
    """Return gradients of a loss, or of a penalty on its gradient with respect to the input."""
    loss = (output**3).sum()
    if penalty:
        (of_input,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = of_input.pow(2).sum() + (of_input**3).sum()
    wanted = {"x": x} | {name: param for name, param in params.items() if param is not None}
    found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(wanted, found, strict=True))


def _over_ranks(names, penalty):
    x, params = _tensors(names)
    x = x.split(SHARES)[dist.get_rank()].clone().requires_grad_()
    output = batch_norm(x, None, None, params["weight"], params["bias"], 0.0, 1e-5, group=dist.group.WORLD)
    found = _gradients(output, x, params, penalty)
    for name in found.keys() - {"x"}:
        dist.all_reduce(found[name])
    return found


def _check(names, penalty):
    x, params = _tensors(names)
    x.requires_grad_()
    wanted = _gradients(F.batch_norm(x, None, None, *params.values(), True), x, params, penalty)
    parts = wanted.pop("x").split(SHARES)
    for found, part in zip(run_ranks(2, _over_ranks, names, penalty), parts, strict=True):
        assert_close(found, {"x": part, **wanted}, rtol=1e-9)


def test_gradients_with_and_without_parameters():
    for names in (AFFINE, ("weight",), ("bias",), ()):
        _check(names, penalty=False)


def test_penalties_on_gradients():
    for names in (AFFINE, ()):
        _check(names, penalty=True)


def _beside_a_filler():
    """Normalize this rank's samples beside those of the first rank, which do not count and have no loss."""
    is_filler = dist.get_rank() == 0
    x, params = _tensors(AFFINE)
    x = (100 + 10 * x if is_filler else x).requires_grad_()
    mean, var = torch.zeros(3).double(), torch.ones(3).double()
    output = batch_norm(x, mean, var, *params.values(), 0.1, 1e-5, group=dist.group.WORLD, counts=not is_filler)
    return _gradients(output * (not is_filler), x, params, penalty=True)["x"], mean, var


def test_samples_that_do_not_count():
    x, params = _tensors(AFFINE)
    x.requires_grad_()
    mean, var = torch.zeros(3).double(), torch.ones(3).double()
    output = F.batch_norm(x, mean, var, *params.values(), True)
    wanted = _gradients(output, x, params, penalty=True)["x"]
    filler, real = run_ranks(2, _beside_a_filler)
    assert not filler[0].any()
    assert_close({"x": real[0]}, {"x": wanted}, rtol=1e-9)
    for found in (filler, real):
        assert_close({"mean": found[1], "var": found[2]}, {"mean": mean, "var": var})
