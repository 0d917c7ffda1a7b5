"""Comparison of a multi-rank run with the same run on one process."""

from __future__ import annotations

import torch
from torch import Tensor

RTOL = 1e-5


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = RTOL) -> None:
    """Check that every tensor is within ``rtol`` of its counterpart's largest magnitude (at least 1e-3)."""
    assert actual.keys() == expected.keys()
    worst = []
    for name, want in expected.items():
        got = actual[name]
        assert got.shape == want.shape, name
        if want.numel() == 0:
            continue
        if want.is_complex():
            got, want = torch.view_as_real(got), torch.view_as_real(want)
        scale = max(want.abs().max().item(), 1e-3)
        error = (got.double() - want.double()).abs().max().item() / scale
        if not error <= rtol:
            worst.append(f"{name}: {error:.2e}")
    assert not worst, "relative errors past " + f"{rtol:.0e}: " + ", ".join(worst)


def snapshot(module: torch.nn.Module) -> dict[str, Tensor]:
    """Return detached copies of parameters and buffers."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}
