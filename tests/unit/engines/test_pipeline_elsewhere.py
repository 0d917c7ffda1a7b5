"""Placeholders for parameters of other stages: harmless uses pass, uses that would give wrong results raise."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pardist.engines.pipeline import CannotPipelineError
from lightning_pardist.engines.pipeline.remote_parameter import RemoteParameter


def _pair() -> tuple[Tensor, Tensor]:
    there = RemoteParameter(torch.empty(3, 4, device="meta"), what="'layer.weight', which rank 1 holds")
    return nn.Parameter(torch.ones(3, 4)), there


def _set_item(here: Tensor, there: Tensor) -> None:
    here.data[0] = there.data[0]


def _in_place(here: Tensor, there: Tensor) -> None:
    here += there


WRONG: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "average": lambda here, there: here.mul_(0.9).add_(there, alpha=0.1),
    "lerp": lambda here, there: here.lerp_(there, 0.1),
    "copy": lambda here, there: here.copy_(there),
    "foreach": lambda here, there: torch._foreach_add_([here], [there]),
    "out": lambda here, there: torch.add(there, 1, out=here.data),
    "set_item": _set_item,
    "in_place": _in_place,
    "sum": lambda here, there: here.data * 0.9 + there.data * 0.1,
    "item": lambda here, there: there.square().sum().item(),
    "float": lambda here, there: float(there.norm()),
    "host": lambda here, there: there.cpu(),
    "equal": lambda here, there: torch.equal(there.data, there.data),
    "equal_to_one_here": lambda here, there: torch.equal(here, there),
    "close": lambda here, there: torch.allclose(there, there),
    "any": lambda here, there: bool(there.isnan().any()),
    "nonzero": lambda here, there: there.nonzero(),
    "unique": lambda here, there: there.unique(),
    "mask": lambda here, there: there[there > 0],
}


@pytest.mark.parametrize("name", WRONG)
def test_values_are_not_to_be_had(name: str) -> None:
    here, there = _pair()
    with torch.no_grad(), pytest.raises(CannotPipelineError, match=r"'layer.weight', which rank 1 holds.*pardist_ddp"):
        WRONG[name](here, there)


def test_what_comes_to_nothing_here_is_done_where_the_parameter_is() -> None:
    here, there = _pair()
    with torch.no_grad():
        there.mul_(0.9).add_(here, alpha=0.1)
        there.copy_(here)
        nn.init.zeros_(there)
    assert there.is_meta
    assert there.norm().is_meta
    assert isinstance(there, nn.Parameter)
    assert (there.shape, there.numel(), there.is_leaf, there.requires_grad) == ((3, 4), 12, True, True)
    assert "RemoteParameter" in repr(there)


def test_state_dicts_with_stand_ins_are_copied() -> None:
    copied = copy.deepcopy(nn.ParameterList(_pair()).state_dict())
    assert torch.equal(copied["0"], torch.ones(3, 4))
    with pytest.raises(CannotPipelineError, match=r"'layer\.weight'"):
        copied["1"].sum().item()


def test_saved_state_dicts_with_stand_ins_are_warned_about() -> None:
    here, there = _pair()
    with pytest.warns(UserWarning, match=r"lacks the values of 'layer\.weight', which rank 1 holds"):
        pickled = pickle.dumps({"weight": there.detach(), "bias": here.detach()})
    assert pickle.loads(pickled)["weight"].is_meta


def test_modules_with_stand_ins_are_copied_moved_and_optimized() -> None:
    here, there = _pair()
    module = nn.ParameterList([here, there])
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), copy.deepcopy(module).double()):
        assert isinstance(other[1], nn.Parameter)
        assert other[1].is_meta
        with pytest.raises(CannotPipelineError):
            other[1].sum().item()
    optimizer = torch.optim.AdamW(module.parameters())
    here.grad = torch.ones_like(here)
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    assert list(optimizer.state) == [here]
