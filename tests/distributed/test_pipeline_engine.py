"""Pipeline engine besides training: evaluation, state dicts, tied weights, random numbers, shapes, failures."""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pardist.engines.pipeline import (
    PipelineEngine,
    PipelineOptions,
    PipelineTimeoutError,
    dry_run,
    pipeline_engine,
    plan_stages,
    record_step,
    split_batch,
    stage_p2p,
)
from lightning_pardist.engines.pipeline.stage_p2p import StageP2P
from tests.helpers.pipeline_parity import whole_state
from tests.helpers.pipeline_zoo import make
from tests.helpers.ranks import RankFailed, run_ranks


def start(
    model: Any, sample: Any, chunks: int = 1, group: Any = None, split: Any = None, **options: Any
) -> PipelineEngine:
    recorded = record_step(model, model.training_step, sample)
    made = plan_stages(recorded, dist.get_world_size(group) * chunks, split=split)
    dry_run(model, model.training_step, sample, made)
    settings: dict[str, Any] = {"num_microbatches": 4, "timeout_s": 20.0, "chunks_per_rank": chunks, **options}
    return PipelineEngine(model, made, group=group, options=PipelineOptions(**settings))


def _evaluation() -> None:
    model, batch = make("resnet", 6)
    alone = copy.deepcopy(model).eval()
    engine = start(model, batch, share="all", record_times=True)
    engine.free()
    model.eval()
    other = make("resnet", 6)[0].batch(3)
    rng = torch.get_rng_state()
    result = engine.eval_steps(model.training_step, [batch, other])
    assert torch.equal(rng, torch.get_rng_state())
    with torch.no_grad():
        expected = [alone.training_step(each) for each in (batch, other)]
    for mine, whole in zip(result.results, expected, strict=True):
        torch.testing.assert_close(mine["loss"], whole["loss"])
        torch.testing.assert_close(mine["hits"], whole["hits"])
    assert all(parameter.grad is None for parameter in model.parameters())
    assert result.timeline is not None
    assert {event.rank for event in result.timeline.events} == {0, 1}
    assert 0.0 <= result.timeline.idle_share < 1.0

    def predict(batch: Any) -> Tensor:
        return model(batch["image"])

    whole = make("resnet", 6)[0].eval()
    adapted = engine.plan.adapt(record_step(whole, lambda b: whole(b["image"]), batch, grad=False))
    (predicted,) = engine.eval_steps(predict, [batch], plan=adapted).results
    torch.testing.assert_close(predicted, alone(batch["image"]))


def test_evaluation_runs_through_the_pipeline() -> None:
    run_ranks(2, _evaluation)


def _state() -> dict[str, Any]:
    model, batch = make("gpt", 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine = start(model, batch, 2, schedule="interleaved")
    placement = engine.placement
    freed = engine.free()
    held = [name for name, p in model.named_parameters() if not p.is_meta]
    assert model.head.weight is model.wte.weight
    assert all(placement.is_local(name) for name in held)
    gathered = whole_state(placement)
    assert list(gathered) == list(before)
    assert all(torch.equal(gathered[name], before[name]) for name in gathered)
    other = {name: value + 1 for name, value in before.items()}
    placement.load_state_dict(other)
    gathered = whole_state(placement)
    assert all(torch.equal(gathered[name], other[name]) for name in gathered)
    with pytest.raises(RuntimeError, match=r"misses \['norm.bias'\] and has unexpected \['extra'\]"):
        placement.load_state_dict({**{k: v for k, v in other.items() if k != "norm.bias"}, "extra": torch.zeros(1)})
    owners = {name: placement.owner_of(name) for name in before}
    local = sorted(name for name, owner in owners.items() if owner == dist.get_rank())
    return {"held": held, "owners": owners, "freed": freed, "local": local}


def test_state_by_plain_names() -> None:
    first, second = run_ranks(2, _state)
    assert first["owners"] == second["owners"]
    assert set(first["held"]) & set(second["held"]) == {"wte.weight"}
    assert first["freed"] > 0 < second["freed"]
    names = sorted([*first["local"], *second["local"]])
    assert names == sorted(first["owners"])


def _two_pipelines() -> tuple[float, float]:
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model, _ = make("gpt", 8)
    torch.manual_seed(rank % 2)
    batch = model.batch(8)
    engine = start(model, batch, group=groups[rank % 2])
    alone = copy.deepcopy(model)
    engine.free()
    result = engine.train_step(model.training_step, batch)
    loss = alone.training_step(batch)
    loss.backward()
    torch.testing.assert_close(result.loss, loss.detach())
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, alone.get_parameter(name).grad, rtol=1e-5, atol=1e-7)
    dist.barrier()
    for group in groups:
        if rank in dist.get_process_group_ranks(group):
            dist.destroy_process_group(group)
    return float(result.loss), len(result.sizes)  # type: ignore[arg-type]


def test_two_pipelines_beside_each_other() -> None:
    results = run_ranks(4, _two_pipelines)
    assert results[0] == results[2] != results[1] == results[3]


class Mask(nn.Module):
    """Unit that returns where its input was dropped, for a comparison."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return (x == 0).float() + 0.0 * self.weight


class SameMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), Mask()
        self.middle = nn.ModuleList([Mask(), nn.Linear(8, 8), nn.Linear(8, 8)])

    def training_step(self, x: Tensor) -> Tensor:
        dropped = F.dropout(self.first(x), 0.5)
        early = self.middle[0](dropped)
        y = self.middle[2](self.middle[1](dropped))
        late = self.last(dropped)
        return (early - late).abs().sum() + 0.0 * y.sum()


def _dropout() -> tuple[float, float]:
    torch.manual_seed(3 + dist.get_rank())
    model = SameMask()
    engine = start(model, torch.randn(4, 8), split=["middle.2"], num_microbatches=2)
    torch.manual_seed(5)
    batch = torch.randn(4, 8)
    stages = {engine.plan.unit_stages[name] for name in ("middle.0", "last")}
    assert stages == {(0,), (1,)}
    first = engine.train_step(model.training_step, batch)
    return float(first.loss), engine._seed  # type: ignore[arg-type]


def test_free_dropout_is_the_same_in_every_stage() -> None:
    results = run_ranks(2, _dropout)
    assert results[0] == results[1]
    assert results[0][0] == 0.0


def _changing_lengths() -> None:
    model, _ = make("gpt", 8)
    alone = copy.deepcopy(model)
    engine = start(model, model.batch(4))
    engine.free()
    torch.manual_seed(0)
    for length in (6, 3, 6, 5, 3):
        batch = tuple(tokens[:, :length] for tokens in model.batch(6))
        with torch.autocast("cpu", torch.bfloat16):
            expected = [alone.training_step(part.value) for part in split_batch(batch, 4)]

        def step(part: Any) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return model.training_step(part)

        result = engine.train_step(step, batch)
        torch.testing.assert_close(torch.stack(list(result.losses)), torch.stack(expected).detach())


def _lengths_out_of_the_batch() -> None:
    """Train with shapes that depend on values: padded to the longest sample of a micro-batch."""
    model, batch = make("tagger", 8)
    engine = start(model, batch)
    alone = copy.deepcopy(model)
    engine.free()
    torch.manual_seed(7)
    for _ in range(4):
        batch = model.batch(8)
        result = engine.train_step(model.training_step, batch)
        expected = [alone.training_step(part.value) for part in split_batch(batch, 4)]
        torch.testing.assert_close(torch.stack(list(result.losses)), torch.stack(expected).detach())


def _large_values() -> None:
    """Train with changing shapes where the leading integer and the first value are two messages, as for large ones."""
    with mock.patch.object(stage_p2p, "_MOST_ATTACHED", 0):
        _changing_lengths()
        _lengths_out_of_the_batch()


def test_shapes_may_change() -> None:
    run_ranks(2, _changing_lengths)
    run_ranks(2, _lengths_out_of_the_batch)
    run_ranks(2, _large_values)


class _Numbered(nn.Module):
    """Returns a value that is not a tensor and depends on the batch."""

    def __init__(self, value: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.value = nn.Linear(4, 4), value

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        return self.layer(x), self.value(x)


VALUES: dict[str, Callable[[Tensor], Any]] = {
    "float": lambda x: float(x.abs().max()),
    "int": lambda x: int((x > 0).sum()),
    "text": lambda x: str(int((x > 0).sum())),
    "array": lambda x: x.detach().abs().amax(1).numpy(),
}


class _ByNumber(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Numbered(VALUES[kind]), nn.Linear(4, 4), nn.Linear(4, 1)])

    def training_step(self, x: Tensor) -> Tensor:
        h, value = self.layers[0](x)
        h = self.layers[2](torch.tanh(self.layers[1](h)))
        return (h * torch.as_tensor(np.asarray(value, dtype=np.float32)).reshape(-1, 1)).square().mean()


def _values_that_are_no_tensors(kind: str, trusted: bool = False) -> None:
    if trusted:
        # As on backends whose messages have no tags.
        with mock.patch.object(
            pipeline_engine, "StageP2P", lambda *given, **_: StageP2P(*given, trust_signatures=True)
        ):
            _values_that_are_no_tensors(kind)
        return
    torch.manual_seed(1)
    model = _ByNumber(kind)
    alone = copy.deepcopy(model)
    engine = start(model, torch.randn(2, 4), num_microbatches=2)
    engine.free()
    for _ in range(4):
        batch = torch.randn(4, 4)
        result = engine.train_step(model.training_step, batch)
        expected = [alone.training_step(part.value) for part in split_batch(batch, 2)]
        torch.testing.assert_close(torch.stack(list(result.losses)), torch.stack(expected).detach())


@pytest.mark.parametrize("kind", VALUES)
def test_outputs_that_are_no_tensors_are_those_of_each_batch(kind: str) -> None:
    run_ranks(2, _values_that_are_no_tensors, kind)


@pytest.mark.parametrize("kind", ["float", "text", "array"])
def test_outputs_that_are_no_tensors_where_shapes_are_trusted(kind: str) -> None:
    run_ranks(2, _values_that_are_no_tensors, kind, True)


def test_numbers_that_change_where_shapes_are_trusted_are_refused() -> None:
    with pytest.raises(RankFailed, match="return values that depend on the batch as tensors"):
        run_ranks(2, _values_that_are_no_tensors, "int", True)


def _frozen_later() -> None:
    model, batch = make("gpt", 8)
    engine = start(model, batch)
    alone = copy.deepcopy(model)
    engine.free()
    for frozen in (False, True, False):
        for net in (model, alone):
            net.zero_grad()
            net.blocks[0].requires_grad_(not frozen)
            net.wte.requires_grad_(not frozen)
            net.positions.requires_grad_(not frozen)
        engine.train_step(model.training_step, batch)
        alone.training_step(batch).backward()
        for name, parameter in model.named_parameters():
            other = alone.get_parameter(name).grad
            if not parameter.is_meta:
                assert (parameter.grad is None) == (other is None)
                if other is not None:
                    torch.testing.assert_close(parameter.grad, other, rtol=1e-5, atol=1e-7)


def test_freezing_between_steps() -> None:
    run_ranks(2, _frozen_later)


def _silent_peer() -> str:
    model, batch = make("gpt", 8)
    # Separate group: after a timeout, gloo's connections in it are unusable.
    group = dist.new_group([0, 1])
    engine = start(model, batch, group=group, timeout_s=1.0)
    said = ""
    if dist.get_rank() == 1:
        begin = time.monotonic()
        with pytest.raises(PipelineTimeoutError) as caught:
            engine.train_step(model.training_step, batch)
        assert time.monotonic() - begin < 3
        said = str(caught.value)
    dist.barrier()
    dist.destroy_process_group(group)
    return said


@pytest.mark.alone
def test_waits_are_bounded() -> None:
    assert "Rank 1 waited for a message of rank 0 for 1 s" in run_ranks(2, _silent_peer)[1]


def test_wrong_settings() -> None:
    run_ranks(2, _wrong_plan)


def _wrong_plan() -> None:
    model, batch = make("gpt", 8)
    made = plan_stages(record_step(model, model.training_step, batch), 3)
    with pytest.raises(ValueError, match="plan has 3 stages, but 2 ranks with chunks_per_rank=1 run 2"):
        PipelineEngine(model, made)


class _Kept:
    """Count of tensors that autograd saves for backward: in total over a step, and the peak."""

    def __init__(self) -> None:
        self.all = self.now = self.most = 0

    def keep(self, tensor: Tensor) -> _Box:
        box = _Box(tensor)
        self.all, self.now = self.all + 1, self.now + 1
        self.most = max(self.most, self.now)
        weakref.finalize(box, self.drop)
        return box

    def drop(self) -> None:
        self.now -= 1


class _Box:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _activations_kept(schedule: str, num_microbatches: int) -> float:
    model, _ = make("gpt", 2)
    batch = model.batch(num_microbatches)
    sample = split_batch(batch, num_microbatches)[0].value
    engine = start(model, sample, schedule=schedule, num_microbatches=num_microbatches)
    engine.free()
    kept = _Kept()
    with torch.autograd.graph.saved_tensors_hooks(kept.keep, lambda box: box.tensor):
        engine.train_step(model.training_step, batch)
    assert kept.now == 0
    return kept.most / (kept.all / num_microbatches)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_activations_kept_at_a_time(num_ranks: int) -> None:
    """Live activations: all micro-batches for GPipe, the number of stages ahead for 1F1B."""
    assert run_ranks(num_ranks, _activations_kept, "gpipe", 6) == [6] * num_ranks
    assert run_ranks(num_ranks, _activations_kept, "1f1b", 6) == list(range(num_ranks, 0, -1))
