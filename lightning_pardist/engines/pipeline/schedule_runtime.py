"""Execution of a rank's list of schedule actions for one step.

[Note: why not torch's PipelineStage]
The orders of actions are those of ``torch.distributed.pipelining``; its ``PipelineStage`` and ``step()`` are not used:

- It allocates a stage's buffers once, from one set of shapes. Micro-batches of an uneven split, an epoch's last batch
  and text padded per batch need shapes per micro-batch.
- Its outputs are a tuple of tensors that all take part in autograd. Replayed stages send integers and masks as well as
  floats, pass on values that they do not compute, and need the shapes of stubs.
- It divides losses by the number of micro-batches. Here each micro-batch is weighted by its count.
- Its split backward finds the parameters' part by walking the graph from parameters to inputs, and misses parameters
  whose path to the output contains no node that leads to an input (an auxiliary loss, a learned query).
- Its waits have no timeout, and errors do not name the missing message.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from lightning_pardist.engines.common.held_tensors import mark_computed
from lightning_pardist.engines.data_engine import MicrobatchContext
from lightning_pardist.engines.pipeline.clock import TimedAction
from lightning_pardist.engines.pipeline.errors import CannotPipelineError
from lightning_pardist.engines.pipeline.loss_seeds import LossSeeds
from lightning_pardist.engines.pipeline.microbatch import MicroBatch, fresh_copy
from lightning_pardist.engines.pipeline.records import Output, TensorLeaf, Value
from lightning_pardist.engines.pipeline.replay import StageReplay, contains_stub
from lightning_pardist.engines.pipeline.schedule import COMPUTES, Action, ActionLists, Kind, peer_of
from lightning_pardist.engines.pipeline.split_backward import SplitBackward
from lightning_pardist.engines.pipeline.stage_p2p import PendingValues, StageP2P
from lightning_pardist.engines.pipeline.steady_buffers import SteadyBuffers

Place = tuple[int, int]


@dataclass
class Work:
    """Inputs of one step, shared by all its actions.

    Attributes:
        step: The user's step.
        microbatches: The micro-batches.
        losses: Seeds the micro-batches' backwards; None for evaluation, which has no backward.
        signatures: Key of each micro-batch; micro-batches with equal keys usually have equal shapes on all boundaries.
        seeds: Random seed of each micro-batch.
        grad: Whether to record gradients.
        loss_of: Returns the loss in the step's result.
    """

    step: Callable[[Any], Any]
    microbatches: Sequence[MicroBatch]
    losses: LossSeeds | None
    signatures: Sequence[Hashable]
    seeds: Sequence[int]
    grad: bool
    loss_of: Callable[[Any], torch.Tensor | None]


@dataclass
class _Kept:
    """State that a stage's forward saves for its backward."""

    received: dict[Value, torch.Tensor]
    made: dict[Value, torch.Tensor]
    loss: torch.Tensor | None
    split: SplitBackward | None = None


@dataclass
class Finished:
    """Results of one step on this rank.

    Attributes:
        results: The step's result for each micro-batch, on the rank of the last stage.
        losses: Detached loss of each micro-batch, on the same rank.
        events: Start and end of each computation, in seconds from the beginning of the step.
    """

    results: dict[int, Any] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    events: list[TimedAction] = field(default_factory=list)


class Runtime:
    """Runs one step's actions of one rank.

    Args:
        replay: Runs stages.
        wire: Point-to-point messages to other ranks.
        lists: The schedule.
        rank: This rank, in the pipeline.
        stage_parameters: Parameters of each of this rank's stages, for the split backward.
        turns: Micro-batch context of the data engine, switched before each forward and backward; None if it has none.
        steady: Buffers that each micro-batch updates from their values before the step.
    """

    def __init__(
        self,
        replay: StageReplay,
        wire: StageP2P,
        lists: ActionLists,
        rank: int,
        stage_parameters: Mapping[int, Sequence[nn.Parameter]],
        turns: MicrobatchContext | None,
        steady: SteadyBuffers,
    ) -> None:
        self.replay = replay
        self.plan = replay.plan
        self.wire = wire
        self.lists = lists
        self.rank = rank
        self.stage_parameters = stage_parameters
        self.turns = turns
        self.steady = steady
        self.several = len(lists.stages_of(rank)) > 1
        self._coming: dict[Place, PendingValues] = {}
        self._arrived: dict[Place, tuple[list[torch.Tensor], list[Output]]] = {}
        self._kept: dict[Place, _Kept] = {}
        self._outgoing: dict[Place, tuple[list[torch.Tensor], list[Output]]] = {}
        self._gradients_coming: dict[Place, tuple[dict[Value, torch.Tensor], list[Any]]] = {}
        self._gradients: dict[Place, dict[Value, torch.Tensor]] = {}

    def run(self, work: Work) -> Finished:
        """Run this rank's actions. Collective over the pipeline: every rank runs its own list.

        Raises:
            CannotPipelineError: If the step deviates from the recorded run.
            PipelineTimeoutError: If a message times out.
        """
        done = Finished()
        start = time.perf_counter()
        for action in self.lists.actions[self.rank]:
            begin = time.perf_counter()
            waited = self._perform(action, work, done)
            if action.kind in COMPUTES:
                end = time.perf_counter()
                done.events.append(TimedAction(self.rank, action, begin + waited - start, end - start))
        self.wire.flush()
        return done

    def _perform(self, action: Action, work: Work, done: Finished) -> float:
        """Run one action, and return the seconds that it waited for messages."""
        stage, index = action.stage_index, action.microbatch_index
        if self.turns is not None and action.kind in COMPUTES:
            self.turns.begin((stage, index))
        if action.kind is Kind.FORWARD:
            return self._forward(stage, index, work, done)
        if action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            return self._backward(stage, index, work, whole=action.kind is Kind.BACKWARD)
        if action.kind is Kind.BACKWARD_WEIGHT:
            kept = self._kept.pop((stage, index))
            if kept.split is not None:
                kept.split.weights()
            return 0.0
        peer = peer_of(action, self.lists.stage_ranks)
        if action.kind is Kind.SEND_FORWARD:
            tensors, outputs = self._outgoing.pop((stage, index))
            self.wire.send_values((stage, work.signatures[index]), peer, self._tag(stage, index), tensors, outputs)
        elif action.kind is Kind.RECV_FORWARD:
            key = (stage - 1, work.signatures[index])
            count = len(self.plan.sent[stage - 1])
            self._coming[stage, index] = self.wire.post_values(key, peer, self._tag(stage - 1, index), count)
        elif action.kind is Kind.SEND_BACKWARD:
            gradients = self._gradients.pop((stage - 1, index))
            self.wire.send_gradients(peer, self._tag(stage, index) + 1, list(gradients.values()))
        else:
            sent = [(value, tensor) for value, tensor in self._sent_with_grad(stage, index).items()]
            self._gradients_coming[stage, index] = self.wire.post_gradients(peer, self._tag(stage + 1, index) + 1, sent)
        return 0.0

    def _tag(self, stage: int, index: int) -> int:
        return 2 * (stage * self.lists.num_microbatches + index)

    def _forward(self, stage: int, index: int, work: Work, done: Finished) -> float:
        begin = time.perf_counter()
        tensors, outputs = self._take_values(stage, index)
        waited = time.perf_counter() - begin
        names = self.plan.sent[stage - 1] if stage else ()
        grad = work.grad
        received = {
            value: tensor.detach().requires_grad_(grad and self._needs_grad(value, outputs))
            for value, tensor in zip(names, tensors, strict=True)
        }
        for value, tensor in received.items():
            recorded = self.plan.trace.calls[value.call].output.leaves[value.leaf]
            if isinstance(recorded, TensorLeaf) and not recorded.of_batch:
                mark_computed(tensor)
        batch = fresh_copy(work.microbatches[index].value, clone=self.several)
        self.replay.microbatch_index = index
        with torch.set_grad_enabled(grad), self.steady.microbatch(index):
            run = self.replay.run(stage, work.step, batch, received, outputs, seed=work.seeds[index])
        if run.left_out and work.loss_of(run.result) is not None:
            raise CannotPipelineError(
                "The step returned a loss without a call of the model, where the recorded run called it: its control"
                " flow depends on the data, so that no fixed stages exist."
            )
        loss = None
        if stage == self.plan.num_stages - 1:
            loss = self._finish(index, run.result, work, done)
        else:
            have = {**received, **run.values}
            passing = [have[value] for value in self.plan.sent[stage]]
            if self.lists.stage_ranks[stage + 1] == self.rank:
                self._arrived[stage + 1, index] = (passing, run.outputs)
            else:
                self._outgoing[stage, index] = (passing, run.outputs)
        if grad:
            self._kept[stage, index] = _Kept(received, run.values, loss)
        return waited

    def _finish(self, index: int, result: Any, work: Work, done: Finished) -> torch.Tensor | None:
        loss = work.loss_of(result)
        if loss is not None and contains_stub(loss):
            raise CannotPipelineError("The loss depends on a value that it did not use in the recorded run.")
        done.results[index] = result
        if loss is not None:
            done.losses[index] = loss.detach()
        if work.losses is not None:
            work.losses.add(index, loss)
        return loss

    def _take_values(self, stage: int, index: int) -> tuple[list[torch.Tensor], list[Output]]:
        if stage == 0:
            return [], []
        if (stage, index) in self._arrived:
            return self._arrived.pop((stage, index))
        return self.wire.finish_values(self._coming.pop((stage, index)), len(self.plan.sent[stage - 1]))

    @staticmethod
    def _needs_grad(value: Value, outputs: list[Output]) -> bool:
        return bool(getattr(outputs[value.call].leaves[value.leaf], "requires_grad", False))

    def _sent_with_grad(self, stage: int, index: int) -> dict[Value, torch.Tensor]:
        """Return the values that this stage has sent and receives gradients for."""
        kept = self._kept[stage, index]
        have = {**kept.received, **kept.made}
        return {value: have[value] for value in self.plan.sent[stage] if have[value].requires_grad}

    def _backward(self, stage: int, index: int, work: Work, *, whole: bool) -> float:
        begin = time.perf_counter()
        kept = self._kept[stage, index]
        coming = self._take_gradients(stage, index)
        waited = time.perf_counter() - begin
        roots, seeds, scaled = self._roots(stage, index, work, coming)
        inputs = {value: tensor for value, tensor in kept.received.items() if tensor.requires_grad}
        if whole:
            if roots:
                torch.autograd.backward(roots, seeds)
            found = {value: tensor.grad for value, tensor in inputs.items()}
            del self._kept[stage, index]
        else:
            kept.split = SplitBackward(roots, seeds, self.stage_parameters[stage], scaled)
            found = dict(zip(inputs, kept.split.inputs(list(inputs.values())), strict=True))
        if stage:
            gradients = {value: _sum(found[value], coming.get(value), tensor) for value, tensor in inputs.items()}
            self._gradients[stage - 1, index] = gradients
        return waited

    def _take_gradients(self, stage: int, index: int) -> dict[Value, torch.Tensor]:
        if (stage, index) in self._gradients_coming:
            buffers, works = self._gradients_coming.pop((stage, index))
            self.wire.wait(works, self.lists.stage_ranks[stage + 1])
            return buffers
        return self._gradients.pop((stage, index), {})

    def _roots(
        self, stage: int, index: int, work: Work, coming: dict[Value, torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], dict[Node, RemovableHandle]]:
        """Return the roots of a stage's backward, their gradients, and the hooks that scale a loss's terms."""
        kept = self._kept[stage, index]
        roots, seeds = [], []
        for value, tensor in kept.made.items():
            if tensor.requires_grad and value in coming:
                roots.append(tensor)
                seeds.append(coming[value])
        if work.losses is None or stage < self.plan.num_stages - 1:
            return roots, seeds, {}
        work.losses.before_backward(index)
        if kept.loss is None or not kept.loss.requires_grad:
            return roots, seeds, {}
        seed, scaled = work.losses.seed(index, kept.loss)
        return [*roots, kept.loss], [*seeds, seed], scaled


def _sum(own: torch.Tensor | None, passed: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Sum a received value's gradients, from this stage and from later stages that it was passed on to."""
    if own is None:
        return passed if passed is not None else torch.zeros_like(like)
    return own if passed is None else own + passed
