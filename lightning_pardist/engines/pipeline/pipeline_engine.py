"""``PipelineEngine``: an unmodified module and its step, run by several ranks as stages of a pipeline."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from lightning_pardist.collectives import wire_device, world_group
from lightning_pardist.engines.common.devices import random_stays
from lightning_pardist.engines.common.loss_setting import LossWeight
from lightning_pardist.engines.common.own_generators import generators_of, generators_stay
from lightning_pardist.engines.data_engine import MicrobatchContext
from lightning_pardist.engines.pipeline.clock import TimedAction, Timeline
from lightning_pardist.engines.pipeline.cut import split_batch
from lightning_pardist.engines.pipeline.errors import CannotPipelineError
from lightning_pardist.engines.pipeline.loss_seeds import LossSeeds, Weighing
from lightning_pardist.engines.pipeline.microbatch import MicroBatch
from lightning_pardist.engines.pipeline.nested import flatten, map_leaves, rebuild
from lightning_pardist.engines.pipeline.placement import Placement
from lightning_pardist.engines.pipeline.replay import WHOLE, StageReplay, TensorParts, contains_stub
from lightning_pardist.engines.pipeline.schedule import (
    ActionLists,
    build_schedule,
    closest_schedule,
    forward_schedule,
    forwards_first_schedule,
    stage_ranks,
)
from lightning_pardist.engines.pipeline.schedule_runtime import Finished, Runtime, Work
from lightning_pardist.engines.pipeline.stage_p2p import StageP2P
from lightning_pardist.engines.pipeline.stage_plan import PipelinePlan
from lightning_pardist.engines.pipeline.steady_buffers import SteadyBuffers
from lightning_pardist.engines.pipeline.step_record import find_loss

Share = Literal["loss", "all"]
#: Distance of the seeds of two steps, more than a step has micro-batches.
_SEEDS_A_STEP = 65_536


@dataclass(frozen=True)
class PipelineOptions:
    """How a plan is run.

    Attributes:
        schedule: ``"mp"``, ``"gpipe"``, ``"1f1b"``, ``"interleaved"``, ``"interleaved_zb"`` or ``"zbv"``.
        num_microbatches: Micro-batches a training step; a batch with fewer samples makes fewer.
        chunks_per_rank: Stages a rank.
        loss_of: Finds the loss in what the step returns.
        loss_weight: How the losses of micro-batches, and of other data ranks, make up the batch's.
        forwards_first: Whether all forwards of a training step come before its backwards, whatever the schedule.
        data_group: Gives the ranks with other samples and the same stages whose losses make up that of the next step;
            None if there are none.
        batch_rank: Index of this pipeline among those with other samples, which draw other random numbers. Ranks that
            share each stage's layers among them have the same.
        count: Micro-batches of a batch, in place of ``num_microbatches``.
        agree: Given how many micro-batches this rank can make, how many all make that run a stage's layers together.
        split: Cuts a batch into so many micro-batches at most.
        share: What every rank learns of the step: the loss, or everything that the step returned.
        parts: What tensors consist of that the ranks of a stage have in parts.
        agree_on_counts: Combines what ranks that share a micro-batch have each seen of what its loss counts. Collective
            over these.
        timeout_s: Longest wait for one message, in seconds.
        steady_buffers: Names of buffers that change once a step, whatever the number of micro-batches.
        record_times: Whether to keep the times of all computations.
    """

    schedule: str = "1f1b"
    num_microbatches: int = 1
    chunks_per_rank: int = 1
    loss_of: Callable[[Any], torch.Tensor | None] = find_loss
    loss_weight: LossWeight = "auto"
    forwards_first: bool = False
    data_group: Callable[[], dist.ProcessGroup | None] = lambda: None
    batch_rank: int = 0
    count: Callable[[Any], int] | None = None
    agree: Callable[[int], int] = lambda count: count
    split: Callable[[Any, int], list[MicroBatch]] = split_batch
    share: Share = "loss"
    parts: TensorParts = WHOLE
    agree_on_counts: Callable[[torch.Tensor], torch.Tensor] | None = None
    timeout_s: float = 600.0
    steady_buffers: frozenset[str] = frozenset()
    record_times: bool = False


@dataclass(frozen=True)
class StepResult:
    """What a step came to, the same on every rank of the pipeline.

    Attributes:
        loss: The batch's loss, detached; None if the training step returned none, which adds nothing to gradients.
        losses: Those of the micro-batches.
        weights: What weighs the micro-batches' losses.
        sizes: Samples in the micro-batches.
        results: What the step returned for each micro-batch, detached: everywhere with ``share="all"``, otherwise on
            the last stage's rank.
        timeline: Times of all ranks' computations, with ``record_times``.
        is_sum: Whether the micro-batches' losses add up to that of the batch.
    """

    loss: torch.Tensor | None
    losses: tuple[torch.Tensor, ...]
    weights: tuple[float, ...]
    sizes: tuple[int, ...]
    results: tuple[Any, ...] = ()
    timeline: Timeline | None = None
    is_sum: bool = False


@dataclass
class _Program:
    """One kind of step (training, validation): its plan, ready to run."""

    replay: StageReplay
    wire: StageP2P
    lists: dict[tuple[int, bool], ActionLists] = field(default_factory=dict)


class PipelineEngine:
    """Runs training and evaluation steps of one module over the ranks of one pipeline.

    Life cycle: ``trace`` and ``plan`` (the same on every rank) before anything is freed; the engine; ``free()``, then
    optimizers; ``train_step`` and ``eval_steps``. ``.grad`` of the local parameters is complete after
    ``train_step``: summed over micro-batches, and over ranks for tied parameters. It is added to what was there before.

    Args:
        module: The root module.
        plan: The plan for the training step, of ``ranks x chunks_per_rank`` stages.
        group: The pipeline's process group; None for the default group.
        options: How to run it.
        device: Device of this rank's tensors.

    Attributes:
        record_times: Whether steps keep their times; may be set between steps, on all ranks alike.
        forwards_first: As set, and from the first loss on that turns out to need it.
        losses_alike: Whether the losses of all micro-batches so far consisted of the same terms.

    Raises:
        ValueError: If the plan's stages do not fit the ranks, or the schedule does not exist for these numbers.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: PipelinePlan,
        *,
        group: dist.ProcessGroup | None = None,
        options: PipelineOptions = PipelineOptions(),
        device: torch.device | None = None,
    ) -> None:
        self.module = module
        self.plan = plan
        self.group = group
        self.options = options
        self.device = device or torch.device("cpu")
        self.record_times = options.record_times
        self.forwards_first = options.forwards_first
        self.losses_alike = True
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self.stage_ranks = stage_ranks(options.schedule, self.num_ranks, options.chunks_per_rank)
        if plan.num_stages != len(self.stage_ranks):
            raise ValueError(
                f"The plan has {plan.num_stages} stages, but {self.num_ranks} ranks with"
                f" chunks_per_rank={options.chunks_per_rank} run {len(self.stage_ranks)}."
                f" Plan with num_stages={len(self.stage_ranks)}."
            )
        self.schedule = build_schedule(
            options.schedule, self.num_ranks, options.num_microbatches, chunks_per_rank=options.chunks_per_rank
        )
        self.placement = Placement(module, plan, self.stage_ranks, self.rank, group)
        self._train = self._program(plan)
        self._steady = SteadyBuffers(module, options.steady_buffers)
        self._running = self._train.replay
        self._evals: list[tuple[PipelinePlan, _Program]] = []
        self._losses = LossSeeds(options.loss_weight, options.data_group, self.device, options.agree_on_counts)
        self._steps = 0
        self._sizes: tuple[int, ...] = ()
        self._seed = self._agree_on_seed()

    @property
    def position(self) -> int:
        """Where the random numbers of the next step start; equal on all ranks. Set it to go on as another run did."""
        return self._seed + self._steps

    @position.setter
    def position(self, position: int) -> None:
        self._seed, self._steps = position, 0

    @property
    def replay(self) -> StageReplay:
        """What runs the stages of the plan that placed the parameters."""
        return self._train.replay

    @property
    def microbatch_index(self) -> int:
        """Which of the batch's micro-batches the step is being run on."""
        return self._running.microbatch_index

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of the micro-batches that are being run."""
        return self._sizes

    def free(self, replaced: dict[nn.Parameter, nn.Parameter] | None = None) -> int:
        """Free the parameters of other ranks' stages; the bytes freed. Not collective.

        Args:
            replaced: Receives each freed parameter and its stand-in.
        """
        return self.placement.free(replaced)

    def train_step(
        self,
        step: Callable[[Any], Any],
        batch: Any,
        *,
        scale: float = 1.0,
        turns: MicrobatchContext | None = None,
        present: bool = True,
    ) -> StepResult:
        """Forward and backward of one batch. Collective over the pipeline, and its last stage's data group.

        Args:
            step: The user's step; called with a micro-batch, for every stage of this rank.
            batch: The whole batch, the same on every rank of the pipeline.
            scale: Factor on the gradients: ``1 / accumulate``, or a loss scale for fp16.
            turns: Told whose forward or backward runs; completes the gradients of all in the end.
            present: Whether the batch counts; if not, it adds zeros.

        Raises:
            CannotPipelineError: If the step does not do what the recorded run did.
            PipelineTimeoutError: If a message does not come in time.
        """
        options = self.options
        parts = options.split(batch, options.num_microbatches if options.count is None else options.count(batch))
        count = options.agree(len(parts) if turns is None else turns.agree(len(parts)))
        lists = self._training_lists(count)
        if lists.num_microbatches != len(parts):
            parts = options.split(batch, lists.num_microbatches)
            lists = self._training_lists(len(parts))
        # Earlier steps' gradients are complete.
        earlier = self.placement.take_gradients()
        self._losses.begin(parts, scale=scale, present=present)
        with self._steady.step():
            done = self._run(self._train, lists, step, parts, losses=self._losses, turns=turns)
        if turns is not None:
            turns.finish()
        self.placement.reduce_tied()
        result = self._result(done, parts, self._losses.finish())
        self.placement.add_gradients(earlier)
        return result

    def eval_steps(
        self, step: Callable[[Any], Any], batches: Sequence[Any], *, plan: PipelinePlan | None = None
    ) -> StepResult:
        """Forward of several batches, one behind the other through the stages, without gradients.

        Each batch goes whole: there is no backward to overlap with, and what a step computes of a batch is what one
        process computes. Collective over the pipeline.

        Args:
            step: The user's step; :attr:`microbatch_index` says which of the batches it is given.
            batches: The same on every rank of the pipeline.
            plan: ``self.plan.adapt(trace)`` of this step, if it is another than the training step.

        Returns:
            A result for each batch, and no loss.

        Raises:
            CannotPipelineError: If the step does not do what the recorded run did.
            PipelineTimeoutError: If a message does not come in time.
        """
        program, count = self._eval_program(plan or self.plan), len(batches)
        if (count, False) not in program.lists:
            program.lists[count, False] = forward_schedule(self.stage_ranks, count)
        parts = [MicroBatch(batch, 1) for batch in batches]
        done = self._run(program, program.lists[count, False], step, parts)
        return self._result(done, parts, None)

    def _run(
        self,
        program: _Program,
        lists: ActionLists,
        step: Callable[[Any], Any],
        parts: list[MicroBatch],
        *,
        losses: LossSeeds | None = None,
        turns: MicrobatchContext | None = None,
    ) -> Finished:
        grad = losses is not None
        # A training step is one, however many micro-batches it makes; of batches in flight each is one.
        first = (self.position + 1) * _SEEDS_A_STEP
        seeds = [first + index * (1 if grad else _SEEDS_A_STEP) for index in range(len(parts))]
        self._steps += 1 if grad else len(parts)
        self._running, self._sizes = program.replay, tuple(part.size for part in parts)
        mode = self._mode(grad)
        signatures = [(_signature(part.value), mode) for part in parts]
        work = Work(step, parts, losses, signatures, seeds, grad, self.options.loss_of)
        stages = lists.stages_of(self.rank)
        parameters = {stage: self.placement.stage_parameters(stage) for stage in stages}
        runtime = Runtime(program.replay, program.wire, lists, self.rank, parameters, turns, self._steady)
        own = program.replay.generators = generators_of(self.module)
        with random_stays(self.device), generators_stay(own), program.replay.stub_parameters():
            return runtime.run(work)

    def _mode(self, grad: bool) -> Hashable:
        """What shapes and gradients depend on beside the batch; the user's code keeps it alike on all ranks."""
        trained = tuple(parameter.requires_grad for parameter in self.module.parameters())
        return grad, self.module.training, hash(trained)

    def _training_lists(self, count: int) -> ActionLists:
        options, key = self.options, (count, self.forwards_first)
        if key not in self._train.lists:
            self._train.lists[key] = (
                forwards_first_schedule(options.schedule, self.stage_ranks, count)
                if self.forwards_first
                else closest_schedule(options.schedule, self.num_ranks, count, chunks_per_rank=options.chunks_per_rank)
            )
        return self._train.lists[key]

    def _program(self, plan: PipelinePlan) -> _Program:
        # Where messages have no tags: anything but gloo, which sends from host memory.
        trust = wire_device(self.group or world_group(), self.device).type != "cpu"
        return _Program(
            StageReplay(self.module, plan, self.device, parts=self.options.parts),
            StageP2P(self.group, self.device, self.options.timeout_s, trust_signatures=trust),
        )

    def _eval_program(self, plan: PipelinePlan) -> _Program:
        for known, program in self._evals:
            if known is plan:
                return program
        program = self._program(plan)
        self._evals.append((plan, program))
        return program

    def _result(self, done: Finished, parts: list[MicroBatch], weighing: Weighing | None) -> StepResult:
        last = self.stage_ranks[-1]
        results = tuple(_plain(done.results[index]) for index in sorted(done.results))
        losses = tuple(done.losses[index] for index in sorted(done.losses))
        sent = (losses, results if self.options.share == "all" else (), weighing)
        losses, shared, weighing = self._broadcast(sent, last)
        if weighing is not None and 0 < len(losses) < len(parts):
            raise CannotPipelineError(
                f"The step returned no loss for {len(parts) - len(losses)} of {len(parts)} micro-batches. Let it return"
                " None for a whole batch, or a loss of 0 for what is to be left out."
            )
        loss, weights = None, (1.0,) * len(parts)
        if weighing is not None:
            weights = weighing.weights
            self.placement.scale_gradients(weighing.correction)
            self.forwards_first |= weighing.several_counts
            self.losses_alike &= weighing.alike
            if len(losses) == len(parts):
                loss = weighing.value(losses)
        results = shared if self.options.share == "all" else results
        sizes = tuple(part.size for part in parts)
        is_sum = weighing is not None and weighing.is_sum
        return StepResult(loss, losses, weights, sizes, results, self._timeline(done), is_sum)

    def _broadcast(self, value: Any, rank: int) -> Any:
        if self.num_ranks == 1:
            return value
        leaves, spec = flatten(value) if self.rank == rank else ([], None)
        # Of a device: it may have another number there.
        moved = [isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu" for leaf in leaves]
        box = [([leaf.cpu() if away else leaf for leaf, away in zip(leaves, moved, strict=True)], moved, spec)]
        source = rank if self.group is None else dist.get_global_rank(self.group, rank)
        dist.broadcast_object_list(box, src=source, group=self.group)
        if self.rank == rank:
            return value
        leaves, moved, spec = box[0]
        leaves = [leaf.to(self.device) if away else leaf for leaf, away in zip(leaves, moved, strict=True)]
        return None if spec is None else rebuild(spec, leaves)

    def _timeline(self, done: Finished) -> Timeline | None:
        if not self.record_times:
            return None
        rows: list[list[TimedAction] | None] = [None] * self.num_ranks
        dist.all_gather_object(rows, done.events, group=self.group)
        return Timeline(self.num_ranks, tuple(event for row in rows if row is not None for event in row))

    def _agree_on_seed(self) -> int:
        source = 0 if self.group is None else dist.get_global_rank(self.group, 0)
        box = [(torch.initial_seed() + self.options.batch_rank) % 2**31]
        dist.broadcast_object_list(box, src=source, group=self.group)
        return int(box[0])


def _plain(result: Any) -> Any:
    """A result without graph, and without what only other stages know or what cannot travel."""

    def leaf(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return None if contains_stub(item) else item.detach()
        try:
            pickle.dumps(item)
        except Exception:
            return None
        return item

    return map_leaves(leaf, result)


def _signature(value: Any) -> Hashable:
    leaves, _ = flatten(value)
    return tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf).__name__ for leaf in leaves
    )
