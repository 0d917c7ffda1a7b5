"""Stage boundaries: balanced, manual, refused; and the values that cross them."""

from __future__ import annotations

import itertools
import pickle
import random

import pytest
import torch
from torch import nn

from lightning_pardist.engines.pipeline import CannotPipelineError, plan_stages, record_step
from lightning_pardist.engines.pipeline.balance import balance
from lightning_pardist.engines.pipeline.records import Value
from tests.helpers.pipeline_zoo import make


def best_by_trying(costs: list[float], parts: int, allowed: list[bool]) -> float | None:
    found = []
    for cuts in itertools.combinations([i for i in range(1, len(costs)) if allowed[i]], parts - 1):
        bounds = [0, *cuts, len(costs)]
        found.append(max(sum(costs[a:b]) for a, b in itertools.pairwise(bounds)))
    return min(found, default=None)


def test_partition_is_optimal() -> None:
    chance = random.Random(0)
    for _ in range(60):
        count = chance.randint(1, 9)
        costs = [float(chance.randint(0, 9)) for _ in range(count)]
        allowed = [chance.random() < 0.8 for _ in range(count)]
        parts = chance.randint(1, 4)
        bounds = balance(costs, parts, cut_costs=[1.0] * count, allowed=allowed)
        best = best_by_trying(costs, parts, allowed)
        if best is None:
            assert bounds is None
            continue
        assert bounds is not None
        assert len(bounds) == parts + 1
        assert max(sum(costs[a:b]) for a, b in itertools.pairwise(bounds)) <= best * 1.01 + 1e-9


def test_cheaper_cut_is_taken_among_equals() -> None:
    bounds = balance([4.0, 0.0, 0.0, 4.0], 2, cut_costs=[0, 9, 1, 9], allowed=[True] * 4)
    assert bounds == (0, 2, 4)


def test_balanced_by_cost_and_not_by_count() -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 64), nn.Linear(64, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    recorded = record_step(model, lambda x: model(x).mean(), torch.randn(8, 4))
    made = plan_stages(recorded, 3)
    assert made.bounds == (0, 1, 2, 5)
    assert made.costs[1].share > 0.8
    assert made.costs[1].flops == 2 * 8 * 64 * 64


def test_unet_skips_are_passed_along_once() -> None:
    model, batch = make("unet", 4)
    recorded = record_step(model, model.training_step, batch)
    names = [call.unit for call in recorded.calls]
    made = plan_stages(recorded, len(names))
    first = Value(names.index("down.0"), 0)
    for stage, name in enumerate(names[:-1]):
        expected = stage < names.index("up.1")
        assert (first in made.sent[stage]) == expected, name
    assert all(len(set(sent)) == len(sent) for sent in made.sent)


def test_by_hand_and_table() -> None:
    model, batch = make("gpt", 4)
    recorded = record_step(model, model.training_step, batch)
    made = plan_stages(recorded, 3, split=["blocks.1", "norm"])
    assert made.bounds == (0, 2, 5, 7)
    table = made.describe().splitlines()
    assert table[0].split() == ["stage", "modules", "parameters", "MFLOPs", "sent", "bytes", "cost"]
    assert "wte, blocks.0" in table[2]
    assert "blocks.1-3" in table[3]
    assert f"{4 * 6 * 16 * 4:,}" in table[2]
    assert table[4].split()[-2] == "-"
    assert sum(cost.share for cost in made.costs) == pytest.approx(1.0)
    assert pickle.loads(pickle.dumps(made)).sent == made.sent


def test_wrong_settings() -> None:
    model, batch = make("gpt", 4)
    recorded = record_step(model, model.training_step, batch)
    with pytest.raises(ValueError, match="names 1 cuts, but 3 stages need 2"):
        plan_stages(recorded, 3, split=["blocks.1"])
    with pytest.raises(ValueError, match=r"'nowhere' does not begin a stage .* wte, blocks.0"):
        plan_stages(recorded, 2, split=["nowhere"])
    with pytest.raises(ValueError, match=r"'blocks.1' does not begin a stage after 'blocks.2'"):
        plan_stages(recorded, 3, split=["blocks.2", "blocks.1"])
    with pytest.raises(ValueError, match="not positive"):
        plan_stages(recorded, 0)


def test_what_cannot_be_cut_is_refused_by_name() -> None:
    giant = nn.Sequential(nn.Linear(4, 4))
    recorded = record_step(giant, lambda x: giant(x).mean(), torch.randn(2, 4))
    with pytest.raises(CannotPipelineError, match=r"only 1 unit\(s\): '0'. It is one layer") as caught:
        plan_stages(recorded, 2)
    assert caught.value.alternatives == ("pardist_ddp", "pardist_zero3", "pardist_tp")
    free = record_step(giant, lambda x: x.mean(), torch.randn(2, 4))
    with pytest.raises(CannotPipelineError, match="calls no module"):
        plan_stages(free, 2)
    model, batch = make("gpt", 4)
    with pytest.raises(CannotPipelineError, match="8 stages were asked for, but the step calls only 7"):
        plan_stages(record_step(model, model.training_step, batch), 8)


def test_another_step_follows_the_placement() -> None:
    model, batch = make("gpt", 4)
    made = plan_stages(record_step(model, model.training_step, batch), 3)

    def backbone(batch: object) -> torch.Tensor:
        x = model.wte(batch[0])  # type: ignore[index]
        return model.blocks[3](model.blocks[0](x)[0])[0]

    adapted = made.adapt(record_step(model, backbone, batch, grad=False))
    assert [len(adapted.calls_of(stage)) for stage in range(3)] == [2, 0, 1]

    def backwards(batch: object) -> torch.Tensor:
        return model.blocks[0](model.blocks[3](model.wte(batch[0]))[0])[0]  # type: ignore[index]

    with pytest.raises(CannotPipelineError, match="more than once"):
        made.adapt(record_step(model, backwards, batch, grad=False))

    def reads_elsewhere(batch: object) -> torch.Tensor:
        x = model.blocks[3](model.wte(batch[0]))[0]  # type: ignore[index]
        return x @ model.positions.T

    other = record_step(model, reads_elsewhere, batch, grad=False)
    with pytest.raises(CannotPipelineError, match=r"reads parameter 'positions' in stage 2"):
        made.adapt(other)
    held = plan_stages(made.trace, 3, also=[other])
    assert held.parameter_stages["positions"] == (0, 2)
    held.adapt(other)
