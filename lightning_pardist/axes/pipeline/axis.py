"""Pipeline axis: records the module's steps, plans stages, distributes them over ranks and runs the schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightning_pardist.axes.base import ParallelAxis
from lightning_pardist.axes.broken_off import skip_meta_in_cpu
from lightning_pardist.axes.pipeline.agreement import (
    SameBatches,
    agree_on,
    share_random_state,
)
from lightning_pardist.axes.pipeline.averaged_copies import free_copy, gather_values, placements_of_copies, restore_copy
from lightning_pardist.axes.pipeline.batches_in_flight import BatchPrefetcher, find_interfering_hook
from lightning_pardist.axes.pipeline.finetuning import FinetuningAcrossStages
from lightning_pardist.axes.pipeline.hooks import hook_warnings
from lightning_pardist.axes.pipeline.merged_values import WEIGHT
from lightning_pardist.axes.pipeline.meta_stages import create_local, meta_placeholders
from lightning_pardist.axes.pipeline.microbatch_outputs import BatchOutputs, Part, StepOutputs
from lightning_pardist.axes.pipeline.microbatching import Microbatching
from lightning_pardist.axes.pipeline.pipeline_settings import PipelineSettings
from lightning_pardist.axes.pipeline.recording import Recorded, StepRecorder
from lightning_pardist.axes.pipeline.reduction_rules import Rules, Shares, zeros_message
from lightning_pardist.axes.pipeline.refusals import check_trainer, find_joint_updates
from lightning_pardist.axes.pipeline.sample_runs import STEPS, StepKey, loss_of
from lightning_pardist.axes.together import raise_on_all_ranks
from lightning_pardist.collectives import world_group
from lightning_pardist.compat.lightning_loops import active_loop, data_fetcher, layer_sync, set_data_fetcher
from lightning_pardist.engines.common.error_notes import add_note
from lightning_pardist.engines.common.full_tensor_updates import updates_of
from lightning_pardist.engines.common.joint_updates import step_on_full_tensors
from lightning_pardist.engines.common.logged_weights import NotedMeans, weight_of_logged
from lightning_pardist.engines.common.loss_setting import terms_of
from lightning_pardist.engines.common.meta_init import on_meta, restore_random_state
from lightning_pardist.engines.common.meta_init import share_random_state as take_random_state
from lightning_pardist.engines.data_engine import MicrobatchContext
from lightning_pardist.engines.ddp.buffers import broadcast_module
from lightning_pardist.engines.pipeline import (
    CannotPipelineError,
    PipelineEngine,
    PipelineOptions,
    PipelinePlan,
    StepResult,
    find_loss,
    stage_ranks,
)
from lightning_pardist.engines.pipeline.loss_seeds import LossMakeup
from lightning_pardist.engines.pipeline.nested import map_leaves
from lightning_pardist.engines.pipeline.out_of_schedule import OutOfScheduleForward
from lightning_pardist.engines.pipeline.placement import Placement, replace_in
from lightning_pardist.engines.pipeline.replay import TensorParts, contains_stub
from lightning_pardist.mesh import Degree, degrees_of_machine
from lightning_pardist.trainer.layer_sync import WatchedBatchNorms, syncs_batch_norms
from lightning_pardist.trainer.loss_weights import coupled_samples, unlike_losses
from lightning_pardist.trainer.patch_stack import PatchStack
from lightning_pardist.trainer.random_numbers import random_draws_message
from lightning_pardist.trainer.sample_batches import on_device, undisturbed_random
from lightning_pardist.trainer.sample_mixing import is_closed, mixed_samples

#: Default number of evaluation batches in flight, per pipeline rank.
_EVAL_BATCHES_A_RANK = 4
#: Timeout of calls of the module outside of steps, which all pipeline ranks must make.
_OUTSIDE_TIMEOUT = timedelta(seconds=60)


class PipelineAxis(ParallelAxis):
    """Runs a module's steps as a pipeline over one axis of the mesh.

    Every rank holds the full module until optimizers are created. Then each step function is recorded on a sample
    batch, the stages are planned and tried, and parameters of other ranks' stages are freed (they stay in the module
    and in the optimizers as ``meta`` tensors). After a successful run the full module is restored on every rank.

    Args:
        settings: How to split the module and run it.

    Attributes:
        engine: The running pipeline; None outside of runs.
        last_result: Result of the last step.
        record_times: Whether the next steps record the times of their computations; set it to the same value on all
            ranks.
    """

    name = "pipeline"
    mesh_axes = ("pipeline_parallel",)
    order = 20
    splits_module = True
    creates_values = True

    def __init__(self, settings: PipelineSettings) -> None:
        self.settings = settings
        self.engine: PipelineEngine | None = None
        self.last_result: StepResult | None = None
        self.record_times = False
        self._out_of_schedule: OutOfScheduleForward | None = None
        self._patches = PatchStack()
        self._effects: StepOutputs | None = None
        self._same_batch: SameBatches | None = None
        self._noted = NotedMeans(enabled=False)
        self._plans: dict[StepKey, PipelinePlan] = {}
        self._unstaged: dict[StepKey, str] = {}
        self._observed: Recorded | None = None
        self._is_unsplit = False
        self._rules: dict[StepKey, Rules] = {}
        self._cut, self._loss = "", LossMakeup()
        #: For evaluation: the loop's fetcher, results of batches run ahead of the loop, and the most batches in flight.
        self._prefetched: BatchPrefetcher | None = None
        self._results: dict[int, BatchOutputs] = {}
        self._in_flight = 1
        self._runs_sequentially: set[StepKey] = set()
        self._taken: list[tuple[nn.Parameter, Tensor]] = []
        self._metrics: list[Metric] = []
        self._batch_norms: WatchedBatchNorms | None = None
        self._counted: set[nn.Parameter] | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """Process group of this rank's pipeline."""
        return self.context.mesh["pipeline_parallel"].get_group()

    @override
    def degrees(self, num_nodes: int, ranks_per_node: int) -> dict[str, Degree]:
        size = self.settings.pipeline_parallel_size
        if size == "machine":
            size = degrees_of_machine(num_nodes, ranks_per_node)["pipeline_parallel"]
        return {"pipeline_parallel": size}

    @override
    def check(self, trainer: pl.Trainer) -> None:
        check_trainer(trainer, self.context, self.settings.schedule)

    # --- the module ---------------------------------------------------------------------------------------------

    @override
    def materialize(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Record and plan with placeholders for ``meta`` tensors, then initialize this rank's stages only."""
        self._built_on_meta = on_meta(module)
        if not self._built_on_meta:
            return
        world = world_group()
        broadcast_module(module, group=world)
        share_random_state(self.group, self.context.device)
        with meta_placeholders(module, self.context.device):
            self._observed = self._record(trainer)
        settings, size = self.settings, self.group.size()
        made = self._observed.placement_plan
        ranks = stage_ranks(settings.schedule, size, settings.chunks_per_rank)
        own = take_random_state([world])
        create_local(module, Placement(module, made, ranks, self.group.rank(), self.group), init=settings.init)
        restore_random_state(own)

    @override
    def observe(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.context.dims.tensor_parallel * self.context.expert_ranks > 1:
            # Record before layers are split: the dataflow cannot be traced through parts of tensors, and distributed
            # experts need all their ranks in every run.
            share_random_state(self.group, self.context.device)
            self._observed = self._record(trainer)

    def _record(self, trainer: pl.Trainer) -> Recorded:
        recorded, found = Recorded({}, {}), self.context.found_once
        # By `repr`, since settings may hold functions and unhashable lists.
        key = "recorded", repr(self.settings), self.group.size()
        failure = None
        try:
            if found is not None and key in found:
                recorded = found[key]
            else:
                ranks, weight = dist.get_process_group_ranks(self.group), self.context.loss_weight
                with undisturbed_random():
                    samples, checks = self.context.samples, self.context.check_samples
                    ways: dict[str, Any] = {
                        "check_samples": checks,
                        "unsplittable_modules": self.context.unsplittable_modules,
                    }
                    recorder = StepRecorder(trainer, self.settings, ranks, samples, weight, found, **ways)
                    recorded = recorder.record()
                if found is not None:
                    found[key] = recorded
        except Exception as error:
            failure = error
        raise_on_all_ranks(failure, lambda said: CannotPipelineError(f"The module could not be split. {said}", ()))
        return agree_on(recorded)

    @override
    def transform(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        share_random_state(self.group, self.context.device)
        for metric in module.modules():
            if isinstance(metric, Metric) and metric.process_group is None:
                # Metric states are equal on the ranks of one pipeline and must not be reduced over them.
                metric.process_group = self.context.batch_group
                self._metrics.append(metric)
        if trainer.state.fn != TrainerFn.FITTING:
            # The optimizers of an earlier fit: their state can be saved after an evaluation too.
            self._split(trainer, module, self.context.optimizers)

    @override
    def after_optimizers(self, trainer: pl.Trainer, optimizers: Sequence[Optimizer]) -> None:
        joint = find_joint_updates(optimizers, self.context.update_scope)
        if not self.context.data_axis.steps_on_shards:
            for optimizer, found in joint:
                step_on_full_tensors(optimizer, found, group=self.context.update_group(found.scope))
        self._split(trainer, trainer.lightning_module, optimizers)

    def _split(self, trainer: pl.Trainer, module: pl.LightningModule, optimizers: Sequence[Optimizer]) -> None:
        """Record and plan the steps, create the engine, and free other ranks' parameters. Collective over the world.

        Raises:
            CannotPipelineError: On every rank, if the module cannot be split as set.
        """
        group, device = self.group, self.context.device
        recorded = self._observed or self._record(trainer)
        self._observed = None
        self._is_unsplit = recorded.microbatching is not None and recorded.microbatching.is_whole
        if recorded.owners is not None and (joint := self.context.unsplittable_modules):
            raise CannotPipelineError(
                f"{next(iter(recorded.unstaged.values()))} So there are no fixed stages, and the ranks that run"
                f" {joint[0]!r} together would reach it in different orders.",
                ("pardist_ep_zero3",),
            )
        self._plans, self._rules, self._unstaged = recorded.plans, recorded.rules, recorded.unstaged
        self._cut, self._loss = recorded.cut, recorded.loss
        self._warn_of_losses(recorded)
        first = recorded.placement_plan
        self._effects = StepOutputs(module, first.trace.unit_names, written=recorded.written)
        self._effects.adopt_rules(self._training_rules)
        self._same_batch = SameBatches(group, device)
        self._noted = NotedMeans(enabled=not any(map(is_closed, module.modules())))
        self.engine = PipelineEngine(module, first, group=group, device=device, options=self._options(recorded))
        replaced: dict[nn.Parameter, nn.Parameter] = {}
        self.engine.free(replaced)
        replace_in(optimizers, replaced)
        for placement in placements_of_copies(trainer, self.engine.placement):
            free_copy(placement)

    @override
    def compile_refusal(self, whole_step: bool) -> str:
        return (
            "runs a step in pieces on each stage, with placeholders for the results of other stages: torch compiles"
            " nothing there. Leave compile out, or use pardist_zero3"
        )

    @property
    @override
    def boundaries(self) -> list[list[nn.Module]] | None:
        """Units of this rank's stages, except those whose parameters are read outside of their ``forward``."""
        if self.engine is None:
            return None
        module, placement = self.engine.module, self.engine.placement
        recorded, unit_stages = placement.plan.trace, placement.plan.unit_stages
        read_outside = {recorded.parameters[name].unit for name in recorded.free_parameters}
        return [
            [
                module.get_submodule(name)
                for name, stages in unit_stages.items()
                if stage in stages and name not in read_outside
            ]
            for stage, rank in enumerate(placement.stage_ranks)
            if rank == placement.rank
        ]

    @override
    def replicated_parameters(self) -> list[str]:
        holders = {} if self.engine is None else self.engine.placement.holders
        return [name for name, ranks in holders.items() if len(ranks) > 1]

    @property
    @override
    def passes_per_step(self) -> int:
        return 1 if self.engine is None or self._is_unsplit else self.engine.options.num_microbatches

    @property
    @override
    def host_work(self) -> float:
        if self.engine is None or self._is_unsplit:
            return 0.0
        stages, units, stubs = self.engine.replays
        return 180.0 + self.passes_per_step * (55.0 * stages + 0.5 * (units + stubs))

    @override
    def ready(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Set up calls of the module outside of steps. Collective over the world."""
        if self.engine is None:
            return
        placement = self.engine.placement
        placement.fix_parameters()
        if trainer.state.fn == TrainerFn.FITTING:
            # Only in a fit: an evaluation may plan other stages, but optimizer state stays where the fit placed it.
            self._counted = set(placement.owned())
        if self.group.size() > 1:
            self._out_of_schedule = OutOfScheduleForward(
                placement,
                self.context.device,
                _group_for_outside(self.context.mesh),
                step_group=self.group,
                whole=self.context.plain,
            )
            self._out_of_schedule.install()
            self._patches.attach(FinetuningAcrossStages(self.group))

    def _warn_of_losses(self, recorded: Recorded) -> None:
        if recorded.owners is not None:
            rank_zero_info(
                f"No fixed stages: {next(iter(recorded.unstaged.values()))} So every rank runs the steps on whole"
                " batches, and gets each layer's output, and gradients, from the rank that holds the layer."
            )
            return
        for (name, _), reason in self._unstaged.items():
            rank_zero_warn(_unstaged_warning(name, reason))
        if (made := recorded.microbatching) is not None and made.is_whole:
            rank_zero_warn(
                f"Every batch is one micro-batch, so stages wait for each other: smaller micro-batches {made.why}."
                " Set num_microbatches to split batches all the same."
            )
        self._batch_norms = self._watched_batch_norms(recorded)
        if recorded.draws:
            rank_zero_info(random_draws_message("training_step", "each stage for each micro-batch"))
        if self._trainer.state.fn == TrainerFn.FITTING:
            units = recorded.placement_plan.trace.unit_names
            for text in hook_warnings(self._trainer.lightning_module, units, self._options(recorded).num_microbatches):
                rank_zero_warn(text)
        if (buffers := recorded.placement_plan.trace.sample_buffers) and self._options(recorded).num_microbatches > 1:
            rank_zero_warn(
                f"Buffers that depend on the samples of a batch ({', '.join(sorted(buffers))}) are updated once for"
                " every micro-batch, from its samples alone; a single process updates them once a step. pardist_mp,"
                " which makes no micro-batches, gives the results of a single process."
            )
        for (name, _), rules in self._rules.items():
            coupled = f" ({recorded.loss.coupled or rules.orders})" if recorded.loss.coupled or rules.orders else ""
            if not rules.is_explained:
                rank_zero_warn(
                    f"The loss of {name} for a batch is neither the mean nor the sum of the losses of its"
                    f" micro-batches: it compares samples of a batch{coupled}, or weights them. Training uses the"
                    " losses of micro-batches, each weighted by what it averages over (its samples or tokens, for"
                    " example). To weight them otherwise, set loss_weight."
                )
            if rules.unexplained:
                rank_zero_warn(
                    f"{name} logs or writes to {', '.join(rules.unexplained)}, and the values for micro-batches do"
                    " not combine to the value for the batch: their mean is taken (of integer tensors, the sum)."
                    " pardist_mp, which makes no micro-batches, gives the results of a single process."
                )
            if rules.zeros:
                rank_zero_info(zeros_message(name, rules.zeros))
            if rules.metrics:
                rank_zero_warn(
                    f"{name} gives samples to {', '.join(rules.metrics)}, and updates with one micro-batch after"
                    " another do not add up to one update with the batch, as in metrics that count calls"
                    " (torchmetrics.wrappers.Running): the values differ from those of a single process."
                    " pardist_mp, which makes no micro-batches, gives the results of a single process."
                )
            if rules.mixing is not None:
                rank_zero_warn(mixed_samples(self._trainer.lightning_module, rules.mixing, "micro-batch"))
            if rules.orders is not None and rules.is_explained:
                rank_zero_warn(coupled_samples(self._trainer.lightning_module, rules.orders, "micro-batch"))
            if rules.untried:
                rank_zero_warn(
                    f"{name} could not be tried on a whole batch in evaluation mode ({rules.untried}), so it is not"
                    " known how the values of micro-batches combine: their means are taken, weighted as the loss"
                    " is."
                )
        explained = all(rules.is_explained for rules in self._rules.values())
        if recorded.loss.coupled and explained and self.context.loss_group.size() > 1:
            rank_zero_warn(coupled_samples(self._trainer.lightning_module, recorded.loss.coupled))

    def _watched_batch_norms(self, recorded: Recorded) -> WatchedBatchNorms | None:
        made, trainer = recorded.microbatching, self._trainer
        fitting = trainer.state.fn == TrainerFn.FITTING and self.context.check_samples
        if not fitting or made is None or made.is_whole or made.max_count == 1:
            return None
        remedy = "With Trainer(sync_batchnorm=True) every batch is one micro-batch."
        if syncs_batch_norms(layer_sync(trainer.strategy)):  # type: ignore[arg-type]
            remedy = "Leave num_microbatches out, and with sync_batchnorm=True every batch is one micro-batch."
        return WatchedBatchNorms(trainer.lightning_module, "micro-batch", remedy, apart=False)

    @property
    def _training_rules(self) -> Rules:
        return self._rules.get(("training_step", 0), Rules())

    def _options(self, recorded: Recorded) -> PipelineOptions:
        settings, rules = self.settings, self._training_rules
        microbatching = recorded.microbatching or Microbatching(settings, self.group.size())
        return PipelineOptions(
            schedule=settings.schedule,
            num_microbatches=microbatching.max_count,
            chunks_per_rank=settings.chunks_per_rank,
            loss_of=loss_of,
            loss_weight=rules.loss_weight or self.context.loss_weight,
            by_sample=recorded.loss.by_sample,
            forwards_first=recorded.loss.several_counts and rules.loss_weight is None,
            data_group=lambda: self.context.loss_group,
            batch_rank=self.context.dims.batch_rank(dist.get_rank()),
            count=microbatching.count,
            agree=self.context.agree_on_microbatches,
            split=microbatching.split,
            share="all",
            parts=TensorParts(self.context.part_of, self.context.of_part),
            # A plan knows all values of a message or none.
            attach_lengths=not self.context.is_plan,
            agree_on_counts=self._agree_on_counts,
            timeout_s=settings.message_timeout_s,
            steady_buffers=recorded.steady,
        )

    @property
    def _agree_on_counts(self) -> Callable[[Tensor], Tensor] | None:
        return self.context.agree_on_counts if self.context.dims.context_parallel > 1 else None

    def _scaler(self) -> Any:
        return getattr(self.context.precision, "scaler", None)

    # --- steps --------------------------------------------------------------------------------------------------

    @override
    def run_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        engine, effects = self.engine, self._effects
        if engine is None or effects is None or self._same_batch is None:
            return step(*args, **kwargs)
        batch, *rest = (*args, *kwargs.values())
        stage = self._trainer.state.stage
        key = self._key_of(stage, rest)
        engine.record_times = self.record_times
        if key in self._unstaged:
            (batch,) = self._same_batch([batch])
            # Random numbers, for example when sampling text, may decide which layers are called next.
            share_random_state(self.group, self.context.device)
            with nullcontext() if self._out_of_schedule is None else self._out_of_schedule.for_a_step(engine.replay):
                result = step(batch, *rest)
            if contains_stub(result):
                raise CannotPipelineError(
                    f"{key[0]} returns a value computed from a parameter that another rank holds. When the step was"
                    " recorded, it did not read this parameter outside of its layer."
                )
            return result
        if stage != RunningStage.TRAINING:
            return effects.apply(self._evaluated(step, key, batch, rest))
        (batch,) = self._same_batch([batch])

        def run(microbatch: Any) -> Any:
            index, sizes = engine.microbatch_index, engine.sizes
            samples = Part(sum(sizes[:index]), sizes[index], sum(sizes))
            weigh = partial(self._weigh_logged, microbatch, sizes[index])
            try:
                with self._noted.step():
                    return effects.run(lambda part: step(part, *rest), microbatch, samples, weigh=weigh)
            except Exception as error:
                if len(sizes) > 1 and not isinstance(error, CannotPipelineError):
                    add_note(error, _in_microbatch(index, samples, len(sizes)))
                raise

        first, alike = engine.forwards_first, engine.losses_alike
        with effects.watching(), self._step_context():
            done = self._train(engine, run, batch)
        self._noted.end()
        if engine.forwards_first and not first:
            rank_zero_warn(
                f"The loss of {key[0]} has several counts, unlike in its first batch, and this step was weighted by"
                " one of them. From the next step on, all forwards run before the backwards, which takes more"
                " memory; loss_weight='tokens' or 'samples' always weights it by one count."
            )
        if alike and not engine.losses_alike:
            rank_zero_warn(unlike_losses(self._trainer.lightning_module))
        self.last_result = done
        self.context.loss_count = None if done.is_sum else sum(done.weights)
        if self._batch_norms is not None:
            self._batch_norms.look()
        results = [map_leaves(self._to_device, result) for result in done.results]
        outputs = effects.combine(results, Shares.of(done.weights, done.sizes), self._training_rules)
        self.context.value_weights.update(
            {arguments["name"]: arguments[WEIGHT] for arguments in outputs.logged if WEIGHT in arguments}
        )
        return effects.apply(outputs)

    def _weigh_logged(self, microbatch: Any, samples: int, result: Any, logged: list[dict[str, Any]]) -> None:
        """Store the weights of logged values relative to other micro-batches, if their autograd graphs show them."""
        if not logged:
            return
        loss = find_loss(result)
        setting, by_sample = self._training_rules.loss_weight or self.context.loss_weight, self._loss.by_sample
        terms = [] if loss is None else terms_of(loss, microbatch, samples, setting, by_sample=by_sample)
        values = [arguments["value"] for arguments in logged]
        for arguments in logged:
            with suppress(LookupError):
                arguments[WEIGHT] = weight_of_logged(
                    arguments["value"], values, loss, terms, samples, self._noted, by_sample=by_sample
                )

    def _step_context(self) -> AbstractContextManager[None]:
        return nullcontext() if self._out_of_schedule is None else self._out_of_schedule.suspended()

    def _evaluated(self, step: Callable[..., Any], key: StepKey, batch: Any, rest: Sequence[Any]) -> BatchOutputs:
        """Return an evaluation step's outputs for a batch, run now or together with an earlier batch.

        Collective over the pipeline.
        """
        engine, effects, same = self.engine, self._effects, self._same_batch
        if engine is None or effects is None or same is None:
            raise RuntimeError("There is no pipeline outside of runs.")
        ahead = self._prefetched
        position = -1 if ahead is None else ahead.position
        if position in self._results:
            return self._results.pop(position)
        self._results.clear()
        batches, arguments = [batch], [tuple(rest)]
        most = 1 if key in self._runs_sequentially else self._in_flight
        if ahead is not None and most > 1:
            for item in ahead.upcoming(most - 1):
                batches.append(on_device(self._trainer, item[0], item[2]))
                # `batch_idx` comes first, if the step takes it.
                arguments.append((item[1], *rest[1:]) if self._takes_batch_idx(key[0]) else tuple(rest))
            ahead.replace_batches(batches[1:])
        batches = same(batches, most=most)

        def run(whole: Any) -> Any:
            index = engine.microbatch_index
            return effects.run_in_order(lambda value: step(value, *arguments[index]), whole)

        start = engine.position
        with effects.watching(), self._step_context():
            done = engine.eval_steps(run, batches, plan=self._plans[key])
        self.last_result = done
        for index, result in enumerate(done.results):
            outputs = effects.of_batch(map_leaves(self._to_device, result))
            self._results[position + index] = outputs
            if outputs.has_persistent_effects and len(batches) > 1:
                # The next batches ran through the first stages without this change: they are run again.
                engine.position = start + index + 1
                self._runs_sequentially.add(key)
                break
        return self._results.pop(position)

    def _takes_batch_idx(self, name: str) -> bool:
        return is_param_in_hook_signature(getattr(self._trainer.lightning_module, name), "batch_idx", min_args=2)

    @property
    def _max_batches_in_flight(self) -> int:
        return self.settings.eval_batches_in_flight or _EVAL_BATCHES_A_RANK * self.group.size()

    @override
    def start_evaluation(self) -> None:
        """Set up running batches ahead of the Trainer's loop; by default not if a hook or callback could observe it."""
        self._prefetched, self._in_flight = None, 1
        self._results.clear()
        if self.engine is None:
            return
        most, trainer = self._max_batches_in_flight, self._trainer
        if most == 1 or (self.settings.eval_batches_in_flight is None and find_interfering_hook(trainer)):
            return
        loop = active_loop(trainer)
        if loop is not None and data_fetcher(loop) is not None:
            self._in_flight = most
            self._prefetched = BatchPrefetcher(data_fetcher(loop))
            set_data_fetcher(loop, self._prefetched)

    @override
    def end_evaluation(self) -> None:
        self._prefetched, self._in_flight = None, 1
        self._results.clear()

    def _train(self, engine: PipelineEngine, run: Callable[[Any], Any], batch: Any) -> StepResult:
        scaler = self._scaler()
        scale = (1.0 if scaler is None else float(scaler.get_scale())) / self._trainer.accumulate_grad_batches
        present = self.context.batch_counts is None or self.context.batch_counts() is not False
        # Lightning zeroes gradients between training_step and backward: keep those computed here until backward.
        with self._defer_reduction() as turns:
            earlier = engine.placement.take_gradients()
            try:
                done = engine.train_step(run, batch, scale=scale, turns=turns, present=present)
                self._taken = engine.placement.take_gradients()
            finally:
                engine.placement.add_gradients(earlier)
        return done

    def _defer_reduction(self) -> AbstractContextManager[MicrobatchContext | None]:
        data_engine = self.context.data_engine
        return nullcontext() if data_engine is None else data_engine.defer_reduction()

    @override
    def backward(self, run: Callable[[], None]) -> None:
        """Add the gradients that the schedule has computed, instead of ``run``; without stages, run backward."""
        taken, self._taken = self._taken, []
        if self.engine is None or self.engine.plan.by_owner:
            run()
        else:
            self.engine.placement.add_gradients(taken)

    @override
    def around_backward(self) -> AbstractContextManager[None]:
        # With manual optimization backward runs inside a step, in which parameters are replaced by placeholders.
        return nullcontext() if self._out_of_schedule is None else self._out_of_schedule.own_parameters()

    @override
    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        if self._out_of_schedule is not None:
            self._out_of_schedule.renew()

    def _key_of(self, stage: RunningStage | None, rest: Sequence[Any]) -> StepKey:
        name = "" if stage is None else STEPS[stage]
        if self.engine is not None and self.engine.plan.by_owner:
            # Without stages any step can run, whatever it calls.
            self._unstaged.setdefault((name, 0), "")
            return name, 0
        known = {*self._plans, *self._unstaged}
        several = sum(step == name for step, _ in known) > 1
        key = (name, int(rest[-1]) if several else 0)
        if key not in known:
            self._unstaged[key] = f"its loader {key[1]} was not there when the module was split."
            rank_zero_warn(_unstaged_warning(name, self._unstaged[key]))
        return key

    def _to_device(self, value: Any) -> Any:
        return value.to(self.context.device) if isinstance(value, Tensor) else value

    # --- gradients ----------------------------------------------------------------------------------------------

    @override
    def counts(self, param: nn.Parameter) -> bool:
        return self._counted is None or param in self._counted

    @override
    def reduce_over_axis(self, value: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        dist.all_reduce(value, op=op, group=self.group)

    # --- checkpoints --------------------------------------------------------------------------------------------

    @override
    def own_module_state(self, state: dict[str, Any]) -> dict[str, Any]:
        if self.engine is None or self.group.size() == 1:
            return state
        placement = self.engine.placement
        own: dict[str, Any] = {}
        for name, value in state.items():
            if placement.owner_of(name) == placement.rank:
                own[name] = value
            elif isinstance(value, Tensor):
                own[name] = value.to("meta")
        return own

    @override
    def local_module_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.engine is None:
            return state
        own = self.engine.module.state_dict(keep_vars=True)
        freed = {name for name, value in own.items() if isinstance(value, Tensor) and value.is_meta}
        # Loading a placeholder into itself is a no-op and keeps its key from being reported as missing.
        return {name: own[name] if name in freed else value for name, value in state.items()}

    @override
    def local_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        if self.engine is None or updates_of(optimizer) is not None:
            return state
        # Determined now, since layers may have been unfrozen after the optimizer was created.
        local = [not param.is_meta for settings in optimizer.param_groups for param in settings["params"]]
        of_params = {number for group in state["param_groups"] for number in group["params"]}
        here = {n: value for n, value in state["state"].items() if n not in of_params or local[int(n)]}
        return {**state, "state": here}

    @override
    def whole_values(self, tree: Any) -> Any:
        if self.engine is None or self.group.size() == 1:
            return tree
        return gather_values(tree, self.group, self.context.device)

    @override
    def state_dict(self) -> dict[str, Any]:
        # Position from which the random numbers of micro-batches continue.
        return {} if self.engine is None else {"random_position": self.engine.position}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.engine is not None and state.get("random_position") is not None:
            self.engine.position = state["random_position"]

    # --- description and teardown -------------------------------------------------------------------------------

    @override
    def describe(self) -> str:
        if self.engine is None:
            return ""
        options = self.engine.options
        chunks = f", {options.chunks_per_rank} stages a rank" if options.chunks_per_rank > 1 else ""
        cut = self._cut or f"evaluation of whole batches, up to {self._max_batches_in_flight} in flight"
        head = f"Pipeline: schedule {options.schedule}{chunks}, {cut}"
        if self.engine.plan.by_owner:
            head = "Model parallel without stages: whole batches, each layer on the rank that holds it"
        loss = f"\nLoss of a batch: {self._loss_text()}" if self._cut and options.num_microbatches > 1 else ""
        return f"{head}{loss}\n{self.engine.plan.describe()}"

    def _loss_text(self) -> str:
        """Return a description of how the losses of micro-batches are combined to that of the batch."""
        shown = self._training_rules.loss_weight
        if shown is not None:
            return f"{'the sum' if shown == 'sum' else 'the mean over samples'}, found by a trial (loss_weight sets it)"
        text = f"{'; '.join(self._loss.terms) or 'a mean over samples'} (loss_weight sets it)"
        if self.engine is not None and self.engine.forwards_first:
            text += "; it has several counts, so all forwards of a step come before its backwards"
        return text

    @override
    def release(self) -> None:
        self._patches.detach()
        if self._out_of_schedule is not None:
            self._out_of_schedule.remove()
            self._out_of_schedule = None

    @override
    def teardown(self) -> None:
        for metric in self._metrics:
            metric.process_group = None
        self._metrics.clear()
        engine, self.engine = self.engine, None
        # `_counted` is kept: optimizer state may be saved after the run.
        self._effects = self._same_batch = self._batch_norms = None
        self._plans, self._rules, self._unstaged, self._taken = {}, {}, {}, []
        self._built_on_meta, self._observed = False, None
        module = self.context.module
        if engine is None or module is None:
            return
        if self.ended_normally():
            replace_in(self.context.optimizers, engine.placement.restore())
            # Including copies created during the run.
            for placement in placements_of_copies(module.trainer, engine.placement):
                restore_copy(placement)
        else:
            skip_meta_in_cpu(module)

    @property
    def _trainer(self) -> pl.Trainer:
        if self.context.module is None:
            raise RuntimeError("Steps are run by a Trainer's fit, validate, test or predict.")
        return self.context.module.trainer


#: Process groups for calls outside of steps, by world and ranks; kept as long as those of the mesh.
_outside_groups: dict[tuple[dist.ProcessGroup, tuple[int, ...]], dist.ProcessGroup] = {}


def _group_for_outside(mesh: Any) -> dist.ProcessGroup:
    """Return a second group of this rank's pipeline with a short timeout. Collective over the world if it is new."""
    world = world_group()
    axis = mesh.mesh_dim_names.index("pipeline_parallel")
    rows = mesh.mesh.movedim(axis, -1).reshape(-1, mesh.mesh.shape[axis]).tolist()
    for ranks in rows:
        if (world, tuple(ranks)) not in _outside_groups:
            _outside_groups[world, tuple(ranks)] = dist.new_group(ranks, timeout=_OUTSIDE_TIMEOUT, backend="gloo")
    return next(_outside_groups[world, tuple(ranks)] for ranks in rows if dist.get_rank() in ranks)


def _unstaged_warning(name: str, reason: str) -> str:
    return (
        f"{name} does not run in the stages of the training step: {reason} Instead every rank runs it on whole batches,"
        " and gets each layer's output from the rank that holds the layer, which takes longer."
    )


def _in_microbatch(index: int, part: Part, count: int) -> str:
    """Return a note for an error of the user's step, which may be due to the split into micro-batches."""
    return (
        f"Raised in micro-batch {index + 1} of {count}, with {part.size} of the batch's {part.total} samples, starting"
        f" at sample {part.begin}. If the step runs on whole batches only, set num_microbatches=1."
    )
