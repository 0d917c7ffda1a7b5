"""Parity check: train a model of the zoo as a pipeline and in one process, and compare everything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_pardist.engines.pipeline import (
    PipelineEngine,
    PipelineOptions,
    dry_run,
    plan_stages,
    record_step,
    split_batch,
)
from lightning_pardist.engines.pipeline.microbatch import fresh_copy
from lightning_pardist.engines.pipeline.placement import Placement
from tests.helpers.pipeline_zoo import count_tokens, make

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
STEPS = 3


@dataclass(frozen=True)
class Case:
    """Settings of one parity run."""

    model: str
    schedule: str = "1f1b"
    num_microbatches: int = 4
    chunks_per_rank: int = 1
    batch_size: int = 8
    optimizer: str = "sgd"
    accumulate: int = 1
    last_batch_size: int | None = None


@dataclass
class Outcome:
    """Results of a training run."""

    losses: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    norm: torch.Tensor
    state: dict[str, torch.Tensor]


def make_optimizer(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if name == "adam":
        return torch.optim.Adam(parameters, lr=1e-2, eps=1e-3)
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def batches_of(case: Case) -> list[Any]:
    """Return the batches of a run, from a fixed seed."""
    model, _ = make(case.model, 2)
    torch.manual_seed(100)
    sizes = [case.batch_size] * (STEPS * case.accumulate)
    if case.last_batch_size is not None:
        sizes[-1] = case.last_batch_size
    return [model.batch(size) for size in sizes]


def train_alone(case: Case, counts: list[int]) -> Outcome:
    """Train in one process on the same micro-batches in sequence, for the same batch norm inputs as in the pipeline."""
    model, _ = make(case.model, case.batch_size)
    optimizer = make_optimizer(case.optimizer, list(model.parameters()))
    losses = []
    for index, batch in enumerate(batches_of(case)):
        if index % case.accumulate == 0:
            optimizer.zero_grad()
        parts = split_batch(batch, counts[index])
        weights = [count_tokens(part.value) for part in parts]
        total = torch.zeros(())
        for part, weight in zip(parts, weights, strict=True):
            result = model.training_step(fresh_copy(part.value))
            loss = (result["loss"] if isinstance(result, dict) else result) * (weight / sum(weights))
            (loss / case.accumulate).backward()
            total += loss.detach()
        losses.append(total)
        if (index + 1) % case.accumulate == 0:
            gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()
            optimizer.step()
    return Outcome(losses, gradients, norm, model.state_dict())


def train_as_pipeline(case: Case) -> tuple[Outcome, list[int], int]:
    """Train on every rank; return the outcome with complete state, micro-batches of each step, and bytes freed here."""
    model, batch = make(case.model, case.batch_size)
    sample = split_batch(batch, case.num_microbatches)[0].value
    recorded = record_step(model, model.training_step, sample)
    made = plan_stages(recorded, dist.get_world_size() * case.chunks_per_rank)
    dry_run(model, model.training_step, sample, made)
    options = PipelineOptions(
        schedule=case.schedule,
        num_microbatches=case.num_microbatches,
        chunks_per_rank=case.chunks_per_rank,
        loss_weight=count_tokens,
        timeout_s=20.0,
    )
    engine = PipelineEngine(model, made, options=options)
    freed = engine.free()
    optimizer = make_optimizer(case.optimizer, list(model.parameters()))
    losses, counts = [], []
    for index, batch in enumerate(batches_of(case)):
        if index % case.accumulate == 0:
            optimizer.zero_grad()
        result = engine.train_step(model.training_step, batch, scale=1 / case.accumulate)
        losses.append(result.loss)
        counts.append(len(result.sizes))
        if (index + 1) % case.accumulate == 0:
            squares = sum(p.grad.float().square().sum() for p in engine.placement.owned() if p.grad is not None)
            squares = torch.as_tensor(squares)
            dist.all_reduce(squares)
            gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            optimizer.step()
    outcome = Outcome(losses, gradients, squares.sqrt(), whole_state(engine.placement))
    return outcome, counts, freed


def whole_state(placement: Placement) -> dict[str, Any]:
    """Return the module's state, each entry from its owner rank. Collective over the pipeline."""
    state = placement.module.state_dict()
    own = {name: value for name, value in state.items() if placement.owner_of(name) == placement.rank}
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    return {name: of_ranks[placement.owner_of(name)][name] for name in state}


def assert_parity(case: Case) -> dict[str, Any]:
    """Compare a pipeline with one process; runs on every rank, and returns values for further checks."""
    torch.manual_seed(0)
    piped, counts, freed = train_as_pipeline(case)
    alone = train_alone(case, counts)
    for step, (mine, other) in enumerate(zip(piped.losses, alone.losses, strict=True)):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6, msg=lambda m, s=step: f"{case}: loss {s}: {m}")
    assert piped.gradients.keys() <= alone.gradients.keys()
    for name, gradient in piped.gradients.items():
        compare(case, name, gradient, alone.gradients[name])
    torch.testing.assert_close(piped.norm, alone.norm, rtol=1e-5, atol=1e-6)
    if dist.get_rank() == 0:
        assert piped.state.keys() == alone.state.keys()
        for name, value in piped.state.items():
            compare(case, name, value, alone.state[name])
    return {"gradients": sorted(piped.gradients), "freed": freed, "counts": counts}


def compare(case: Case, name: str, mine: torch.Tensor, other: torch.Tensor) -> None:
    """Check equality to 1e-5 of the tensor's largest entry."""
    size = float(other.abs().max()) if other.numel() else 0.0
    torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5 * max(size, 1e-2), msg=lambda m: f"{case} {name}: {m}")


def assert_parity_of_all(cases: list[Case]) -> list[dict[str, Any]]:
    """Check several cases in one call."""
    return [assert_parity(case) for case in cases]
