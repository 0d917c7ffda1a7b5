"""``PipelineEngine``: runs an unmodified module and its step over several ranks as stages of a pipeline."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from lightning_pardist.collectives import wire_device, world_group
from lightning_pardist.engines.common.devices import preserve_random_state
from lightning_pardist.engines.common.loss_setting import LossWeight
from lightning_pardist.engines.common.own_generators import generators_of, preserve_generators
from lightning_pardist.engines.data_engine import MicrobatchContext
from lightning_pardist.engines.pipeline.clock import TimedAction, Timeline
from lightning_pardist.engines.pipeline.cut import split_batch
from lightning_pardist.engines.pipeline.errors import CannotPipelineError
from lightning_pardist.engines.pipeline.loss_seeds import LossSeeds, LossWeighting
from lightning_pardist.engines.pipeline.microbatch import MicroBatch
from lightning_pardist.engines.pipeline.nested import flatten, map_leaves, rebuild
from lightning_pardist.engines.pipeline.placement import Placement
from lightning_pardist.engines.pipeline.records import Replays
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
#: Distance between the random seeds of two steps; larger than the number of micro-batches in a step.
_SEEDS_A_STEP = 65_536
#: Largest number of elements of a tensor that is packed with others before it is sent.
_SMALL = 4096


@dataclass(frozen=True)
class PipelineOptions:
    """Settings with which a pipeline plan is run.

    Attributes:
        schedule: ``"mp"``, ``"gpipe"``, ``"1f1b"``, ``"interleaved"``, ``"interleaved_zb"`` or ``"zbv"``.
        num_microbatches: Micro-batches per training step; fewer for a batch with fewer samples.
        chunks_per_rank: Stages per rank.
        loss_of: Returns the loss in the step's result.
        loss_weight: How the losses of micro-batches and of data-parallel ranks are weighted in the batch's loss.
        by_sample: Whether a loss may be a mean or sum of one loss per sample, each with its own count.
        forwards_first: Whether to run all forwards of a training step before its backwards, whatever the schedule.
        data_group: Returns the process group of the next step's data-parallel ranks with the same stages, whose losses
            are combined; None if there are none.
        batch_rank: Index of this pipeline among the data-parallel ones, which draw different random numbers. Equal on
            ranks that share the layers of a stage.
        count: Returns the number of micro-batches for a batch, in place of ``num_microbatches``.
        agree: Synchronises the number of micro-batches over ranks that share a stage's layers, given this rank's
            maximum.
        split: Cuts a batch into at most the given number of micro-batches.
        share: What is broadcast to every rank after a step: the loss, or the step's results as well.
        parts: Conversion of split tensors to and from this rank's part, if ranks share the layers of a stage.
        agree_on_counts: Combines the loss's counts over ranks that share a micro-batch and see a part of it each.
            Collective over these ranks.
        timeout_s: Maximum wait for one message, in seconds.
        steady_buffers: Names of buffers that are updated once per step, whatever the number of micro-batches.
        record_times: Whether to record the times of all computations.
        attach_lengths: Whether a small value is sent in one message with the integer before it.
    """

    schedule: str = "1f1b"
    num_microbatches: int = 1
    chunks_per_rank: int = 1
    loss_of: Callable[[Any], torch.Tensor | None] = find_loss
    loss_weight: LossWeight = "auto"
    by_sample: bool = True
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
    attach_lengths: bool = True


@dataclass(frozen=True)
class StepResult:
    """Result of a step, the same on every rank of the pipeline.

    Attributes:
        loss: The batch's loss, detached; None if the training step returned none, which adds nothing to gradients.
        losses: Losses of the micro-batches.
        weights: Weights of the micro-batches' losses.
        sizes: Number of samples of each micro-batch.
        results: The step's result for each micro-batch, detached: on every rank with ``share="all"``, otherwise on the
            last stage's rank only.
        timeline: Times of all ranks' computations, with ``record_times``.
        is_sum: Whether the batch's loss is the sum of the micro-batches' losses.
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
    """Replay, messages and cached schedules for one plan (training or validation)."""

    replay: StageReplay
    wire: StageP2P
    lists: dict[tuple[int, bool], ActionLists] = field(default_factory=dict)


class PipelineEngine:
    """Runs training and evaluation steps of one module over the ranks of one pipeline.

    Life cycle: the recorded run and the plan (the same on every rank) are made before any parameter is freed; then the
    engine is constructed, ``free()`` is called, and optimizers are made; then ``train_step`` and ``eval_steps``. After
    ``train_step``, ``.grad`` of the local parameters is complete: summed over micro-batches, and over ranks for tied
    parameters. It is added to existing gradients.

    Args:
        module: The root module.
        plan: The plan for the training step, with ``ranks x chunks_per_rank`` stages.
        group: The pipeline's process group; None for the default group.
        options: Settings with which to run the plan.
        device: Device of this rank's tensors; None for the CPU.

    Attributes:
        record_times: Whether to record times; may be set between steps, to the same value on all ranks.
        forwards_first: As in the options; set to True after the first step whose losses have several counts.
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
        self._losses = LossSeeds(
            options.loss_weight,
            options.data_group,
            self.device,
            options.agree_on_counts,
            by_sample=options.by_sample,
        )
        self._steps = 0
        self._sizes: tuple[int, ...] = ()
        self._seed = self._agree_on_seed()

    @property
    def position(self) -> int:
        """Position in the sequence of random seeds, equal on all ranks; set it to continue another run's sequence."""
        return self._seed + self._steps

    @position.setter
    def position(self, position: int) -> None:
        self._seed, self._steps = position, 0

    @property
    def replay(self) -> StageReplay:
        """The replay of the training plan, which determined the placement of the parameters."""
        return self._train.replay

    @property
    def microbatch_index(self) -> int:
        """Index of the micro-batch on which the step is running."""
        return self._running.microbatch_index

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of samples of each micro-batch of the current step."""
        return self._sizes

    def free(self, replaced: dict[nn.Parameter, nn.Parameter] | None = None) -> int:
        """Free the parameters of other ranks' stages, and return the bytes freed. Not collective.

        Args:
            replaced: Filled with each freed parameter and its placeholder.
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
        """Run forward and backward of one batch. Collective over the pipeline, and its last stage's data group.

        Args:
            step: The user's step; called with a micro-batch, for every stage of this rank.
            batch: The whole batch, the same on every rank of the pipeline.
            scale: Factor on the gradients: ``1 / accumulate``, or a loss scale for fp16.
            turns: Micro-batch context of the data engine, switched before each computation and finished at the end.
            present: Whether the batch counts; if not, it adds zeros.

        Raises:
            CannotPipelineError: If the step deviates from the recorded run.
            PipelineTimeoutError: If a message times out.
        """
        options = self.options
        parts = options.split(batch, options.num_microbatches if options.count is None else options.count(batch))
        count = options.agree(len(parts) if turns is None else turns.agree(len(parts)))
        lists = self._training_lists(count)
        if lists.num_microbatches != len(parts):
            parts = options.split(batch, lists.num_microbatches)
            lists = self._training_lists(len(parts))
        # Set accumulated gradients aside: they are complete, and must not be reduced or scaled again.
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
        """Run forward of several batches without gradients, pipelined over the stages. Collective over the pipeline.

        Batches are not cut into micro-batches, so that the step computes the same as on one process; the stages overlap
        by processing different batches.

        Args:
            step: The user's step; :attr:`microbatch_index` is the index of the batch that it is called with.
            batches: The batches, the same on every rank of the pipeline.
            plan: ``self.plan.adapt(trace)`` for this step; None for the training step's plan.

        Returns:
            A result for each batch, and no loss.

        Raises:
            CannotPipelineError: If the step deviates from the recorded run.
            PipelineTimeoutError: If a message times out.
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
        # Seeds advance by one per training step, whatever its number of micro-batches, and by one per evaluation batch.
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
        with preserve_random_state(self.device), preserve_generators(own), program.replay.stub_parameters():
            return runtime.run(work)

    def _mode(self, grad: bool) -> Hashable:
        """Return a key of the module state that determines shapes and gradients; user code keeps it equal on ranks."""
        trained = tuple(parameter.requires_grad for parameter in self.module.parameters())
        return grad, self.module.training, hash(trained)

    @property
    def replays(self) -> Replays:
        """What this rank runs of the recorded run for each micro-batch."""
        stages = [stage for stage, rank in enumerate(self.stage_ranks) if rank == self.rank]
        own = [self.plan.calls_of(stage) for stage in stages]
        return Replays(len(stages), sum(map(len, own)), sum(calls.start for calls in own))

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
        # Backends other than gloo, which sends from host memory, do not support message tags.
        trust = wire_device(self.group or world_group(), self.device).type != "cpu"
        return _Program(
            StageReplay(self.module, plan, self.device, parts=self.options.parts),
            StageP2P(
                self.group,
                self.device,
                self.options.timeout_s,
                trust_signatures=trust,
                attach_lengths=self.options.attach_lengths,
            ),
        )

    def _eval_program(self, plan: PipelinePlan) -> _Program:
        for known, program in self._evals:
            if known is plan:
                return program
        program = self._program(plan)
        self._evals.append((plan, program))
        return program

    def _result(self, done: Finished, parts: list[MicroBatch], weighing: LossWeighting | None) -> StepResult:
        last = self.stage_ranks[-1]
        results = tuple(_plain(done.results[index]) for index in sorted(done.results))
        losses = tuple(done.losses[index] for index in sorted(done.losses))
        sent = (losses, results if self.options.share == "all" else (), weighing)
        losses, shared, weighing = self._broadcast(sent, last)
        if weighing is not None and 0 < len(losses) < len(parts):
            raise CannotPipelineError(
                f"The step returned no loss for {len(parts) - len(losses)} of {len(parts)} micro-batches. Return None"
                " for all micro-batches of a batch, or a loss of 0 for those to be left out."
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
        # Tensors are sent from the CPU: the device index may differ on the receiver.
        moved = [isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu" for leaf in leaves]
        box = [(*_pack_small(leaves), moved, spec)]
        source = rank if self.group is None else dist.get_global_rank(self.group, rank)
        dist.broadcast_object_list(box, src=source, group=self.group)
        if self.rank == rank:
            return value
        leaves, packs, moved, spec = box[0]
        leaves = _unpack_small(leaves, packs)
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


@dataclass(frozen=True, slots=True)
class _Packed:
    """Place of a small tensor in the packed tensor of its kind, from ``start`` on."""

    kind: Hashable
    start: int
    shape: torch.Size


def _pack_small(leaves: list[Any]) -> tuple[list[Any], dict[Hashable, torch.Tensor]]:
    """Return leaves on the CPU, with small tensors in one tensor for each dtype and device: pickling each is slow."""
    packed: dict[int, _Packed] = {}
    parts: dict[Hashable, list[torch.Tensor]] = {}
    sizes: Counter[Hashable] = Counter()
    for leaf in leaves:
        is_small = type(leaf) is torch.Tensor and leaf.layout == torch.strided and leaf.numel() <= _SMALL
        if is_small and id(leaf) not in packed:
            kind = leaf.dtype, leaf.device.type
            packed[id(leaf)] = _Packed(kind, sizes[kind], leaf.shape)
            parts.setdefault(kind, []).append(leaf.detach().reshape(-1))
            sizes[kind] += leaf.numel()
    sent = [packed.get(id(leaf)) or (leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf) for leaf in leaves]
    return sent, {kind: torch.cat(tensors).cpu() for kind, tensors in parts.items()}


def _unpack_small(leaves: list[Any], packs: dict[Hashable, torch.Tensor]) -> list[Any]:
    """Return the leaves that were given to :func:`_pack_small`, on the CPU; the same tensors are the same again."""
    tensors = {
        place: packs[place.kind].narrow(0, place.start, place.shape.numel()).view(place.shape)
        for place in leaves
        if isinstance(place, _Packed)
    }
    return [tensors[leaf] if isinstance(leaf, _Packed) else leaf for leaf in leaves]


_ALWAYS_PICKLED = frozenset({str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size})


def _plain(result: Any) -> Any:
    """Detach a result's tensors, and replace stubs and values that cannot be pickled by None."""

    def leaf(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return None if contains_stub(item) else item.detach()
        if type(item) in _ALWAYS_PICKLED:
            return item
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
