"""Parameter ownership under model parallelism without stages."""

import pytest
import torch
from torch import nn

from lightning_pardist.engines.pipeline import CannotPipelineError, record_step
from lightning_pardist.engines.pipeline.owner_plan import plan_owners


class Loop(nn.Module):
    """Blocks in a loop, a head tied to the embedding, a module that is never called, a free parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.never = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(4))

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for _ in range(2):
            for block in self.blocks:
                hidden = block(hidden).relu() * self.scale
        return self.head(hidden).sum() + nn.functional.linear(hidden, self.blocks[1].weight).mean()


def _record(module: Loop):
    return record_step(module, module.step, torch.tensor([[1, 2], [3, 4]]))


def test_every_parameter_has_one_holder_and_tied_units_stay_together() -> None:
    plan = plan_owners([_record(Loop())], 2)
    assert plan.by_owner
    assert plan.unit_stages["embed"] == plan.unit_stages["head"] == (0,)
    assert all(len(ranks) == 1 for ranks in plan.parameter_stages.values())
    assert plan.parameter_stages["scale"] == (0,)
    assert set(plan.unit_stages.values()) == {(0,), (1,)}
    assert plan.trace.free_parameters == {"scale", "blocks.1.weight"}
    assert sorted(call.unit for call in plan.trace.calls) == sorted(plan.trace.unit_names)


def test_split_by_name() -> None:
    plan = plan_owners([_record(Loop())], 2, split=["blocks.2"])
    assert plan.modules_of(1)[0] == "blocks.2"
    with pytest.raises(ValueError, match="share parameters"):
        plan_owners([_record(Loop())], 2, split=["head"])


def test_too_many_ranks() -> None:
    with pytest.raises(CannotPipelineError, match="9 ranks were asked for"):
        plan_owners([_record(Loop())], 9)
