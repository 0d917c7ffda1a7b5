"""Data-parallel duties besides gradients: buffers, exact evaluation, metric reduction, Lightning's collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_pardist.axes.base import RunContext
from lightning_pardist.collectives import all_gather, gather_among, reduce, reduce_among, world_group
from lightning_pardist.engines.common.eager_runs import eagerly
from lightning_pardist.engines.common.sync_batchnorm import CurrentBatch
from lightning_pardist.engines.data_engine import DataEngine
from lightning_pardist.engines.ddp import BufferSync
from lightning_pardist.engines.ddp.set_parameters import SetParameters, cast_parameter, differing_values
from lightning_pardist.engines.fsdp.fsdp_units import original_class
from lightning_pardist.engines.pipeline import BatchCut
from lightning_pardist.trainer.batch_figures import BatchFigures, figures_of_ranks
from lightning_pardist.trainer.evaluated_means import EvaluatedMeans
from lightning_pardist.trainer.evaluation import ExactEvaluation
from lightning_pardist.trainer.layer_sync import WatchedBatchNorms
from lightning_pardist.trainer.logged_results import EpochResults, no_sync_advice
from lightning_pardist.trainer.loss_weights import LossWeights, coupled_samples
from lightning_pardist.trainer.patch_stack import Patch, PatchStack
from lightning_pardist.trainer.random_numbers import random_draws_message, random_fingerprint
from lightning_pardist.trainer.sample_mixing import SampleMixing, is_closed, mixed_samples
from lightning_pardist.trainer.sample_orders import SampleOrders
from lightning_pardist.trainer.sample_pairs import SamplePairs
from lightning_pardist.trainer.trial_run import without_side_effects
from lightning_pardist.trainer.uneven_inputs import EvenSteps, UnevenInputs


class DataParallelDuties:
    """Handles buffers, exact evaluation, reduction of epoch values and Lightning's collectives on data-parallel ranks.

    Args:
        context: Context of the strategy.
        broadcast_buffers: Whether buffers are synchronised to the first rank's.
        sync_metrics: Whether epoch values are combined over the batch mesh.
        uneven_inputs: How ranks with fewer batches than others are handled.

    Attributes:
        evaluation: Exact evaluation; set during a run with several data ranks.
        loss_weights: Loss weighting; set during ``fit`` if ranks see different samples.
        even_steps: Step count synchronisation; set during ``fit`` on several ranks.
        normalized_batch: Whether synchronized batch norms count this rank's samples, in a step and its backward.
    """

    def __init__(
        self,
        context: RunContext,
        *,
        broadcast_buffers: bool,
        sync_metrics: bool,
        uneven_inputs: UnevenInputs,
    ) -> None:
        self.context = context
        self.broadcast_buffers = broadcast_buffers
        self.sync_metrics = sync_metrics
        self.uneven_inputs: UnevenInputs = uneven_inputs
        self.evaluation: ExactEvaluation | None = None
        self.loss_weights: LossWeights | None = None
        self.even_steps: EvenSteps | None = None
        self.normalized_batch = CurrentBatch()
        self._buffers: BufferSync | None = None
        #: Whether the first step is still to be checked for mixed samples and for batch-wide numbers.
        self._looks_for_mixing = self._looks_for_figures = False
        self._batch_norms: WatchedBatchNorms | None = None
        self._mixing: SampleMixing | None = None
        self._means: EvaluatedMeans | None = None
        self._has_warned = self._watches_parameters = self._is_first = self._has_told_of_assigned = False
        self._named_as_left: set[str] = set()
        #: Fingerprint of the random number state before hooks received the first batch.
        self._drawn_before: int | None = None
        self._first_batch, self._attached = PatchStack(), PatchStack()

    def attach_first(self, trainer: pl.Trainer) -> None:
        """Attach what must precede the creation of optimizers, which may need the number of steps. Not collective."""
        dims = self.context.dims
        if not self._trains(trainer) or dims.world_size == 1:
            return
        self.even_steps = EvenSteps(
            trainer,
            self.uneven_inputs,
            group=self.context.batch_group if dims.batch_size == dims.world_size else world_group(),
            place=(dims.batch_rank(self.context.distributed.global_rank), dims.batch_size),
            before=self.context.before_collective,
        )
        self._attached.attach(self.even_steps)
        if dims.batch_size > 1:
            self.context.batch_counts = partial(getattr, self.even_steps, "counts", None)

    def average_assigned(self, engine: DataEngine, optimizer: Optimizer) -> bool:
        """Average gradients that a step with manual optimization has assigned instead of running a backward.

        Collective over the data axis if there are some.

        Returns:
            Whether there were any.
        """
        module = self.context.module
        if module is None or module.automatic_optimization:
            return False
        params = [param for group in optimizer.param_groups for param in group["params"]]
        found = engine.average_assigned(params, 1.0 if self.loss_weights is None else self.loss_weights.batch_weight)
        if found == "different" and not self._has_told_of_assigned:
            self._has_told_of_assigned = True
            rank_zero_warn(
                f"{original_class(module).__name__}.training_step assigns gradients that differ between ranks. They are"
                " averaged, weighted by samples, which differs from a single process if the losses count something"
                " else, such as tokens, or if the gradients are not linear in the losses. self.manual_backward(loss)"
                " weights them by what each loss counts."
            )
        return found != "none"

    @staticmethod
    def _trains(trainer: pl.Trainer) -> bool:
        return trainer.state.fn == TrainerFn.FITTING

    def attach(self, trainer: pl.Trainer) -> None:
        """Attach to a run, as far as there are several data ranks. Not collective.

        Args:
            trainer: Trainer of the run; its loaders are not created yet.
        """
        context, module = self.context, self.context.module
        if self._trains(trainer) and context.dims.batch_size > 1:
            self.loss_weights = LossWeights(
                trainer,
                context.loss_weight,
                group=lambda: context.loss_group,
                before=context.before_collective,
                value_weights=context.value_weights,
                loss_count=lambda: context.loss_count,
                agree=context.agree_on_counts if context.dims.context_parallel > 1 else None,
                notes_counts=self._sees_values and context.dims.pipeline_parallel == context.dims.context_parallel == 1,
            )
            self._attached.attach(self.loss_weights)
        if self.sync_metrics or context.dims.batch_size == 1:
            self._attached.attach(no_sync_advice())
        if context.dims.batch_size == 1 or module is None:
            return
        self._is_first = self._trains(trainer)
        if self._is_first:
            # The first operation of the loop on a batch.
            plugin = trainer.precision_plugin
            self._first_batch.attach(Patch(plugin, "convert_input", partial(self._note_batch, plugin.convert_input)))
        # If ranks compute a layer together, its calls are collective, and no rank can try them alone.
        alone = context.dims.batch_size == context.distributed.world_size and context.in_lockstep
        alone = alone and all(axis.calls_may_differ for axis in context.axes)
        self._looks_for_mixing = context.check_samples and alone and self._trains(trainer)
        # Without lockstep, results are not expected to equal those of a single process.
        self._looks_for_figures = context.check_samples and context.in_lockstep and self._trains(trainer)
        whole_updates = context.in_lockstep and context.data_group.size() > 1
        if context.check_samples and whole_updates and self._trains(trainer):
            remedy = "Trainer(sync_batchnorm=True) normalizes over all ranks."
            self._batch_norms = WatchedBatchNorms(module, "rank", remedy, apart=True)
        group = context.batch_group
        if self.broadcast_buffers:
            self._buffers = BufferSync(module, group=context.gradient_group)
            # Steps with manual optimization change parameters anyway.
            self._watches_parameters = self._trains(trainer) and module.automatic_optimization
        self.evaluation = ExactEvaluation(trainer, group=group, sit_out=self._join_without_samples)
        self._attached.attach(self.evaluation)
        context.own_batch_counts = self.evaluation.own_batch_counts
        if self.sync_metrics:
            if self._sees_counts:
                self._means = EvaluatedMeans(trainer)
                self._attached.attach(self._means)
            results = EpochResults(trainer, group=group, before=context.before_collective, means=self._means)
            self._attached.attach(results)

    @property
    def _sees_counts(self) -> bool:
        """Whether this rank's code shows what means divide by: of ranks that compute a batch together, some may not."""
        return self._sees_values and self.context.dims.batch_size == self.context.distributed.world_size

    @property
    def _sees_values(self) -> bool:
        """Whether functions may be replaced during steps; they would be traced into compiled code."""
        return self.context.module is not None and not any(map(is_closed, self.context.module.modules()))

    def detach(self) -> None:
        """Detach after the run. Not collective."""
        self._first_batch.detach()
        self._attached.detach()
        self.context.batch_counts = self._mixing = self._batch_norms = self._means = None
        self.evaluation = self._buffers = self.loss_weights = self.even_steps = self.context.own_batch_counts = None

    def _join_without_samples(self) -> None:
        """Take part in an evaluation without samples, since other ranks may need parameters that this rank holds."""
        for axis in self.context.axes:
            axis.start_evaluation()
        for axis in self.context.axes:
            axis.end_evaluation()

    # --- evaluation -----------------------------------------------------------------------------------------------

    def start_evaluation(self) -> None:
        """Begin an evaluation. Not collective."""
        self.normalized_batch.counts = True
        if self._means is not None:
            self._means.start()

    def evaluation_step(self) -> AbstractContextManager[None]:
        """Context of a validation or test step. Not collective."""
        return nullcontext() if self._means is None else self._means.step()

    # --- checks of the first step ---------------------------------------------------------------------------------

    def _noting_calls(self, batch: Any) -> AbstractContextManager[None]:
        module = self.context.module
        if not self._looks_for_mixing or module is None:
            return nullcontext()
        self._looks_for_mixing = False
        local = not any(axis.calls_communicate for axis in self.context.axes)
        self._mixing = SampleMixing(module, times=2, local=local)
        return self._mixing.noting(batch, BatchCut().samples_of(batch))

    @contextmanager
    def _following(self, batch: Any) -> Iterator[None]:
        """Context for the first step: warn if its loss depends on numbers, orders or pairs of this rank's samples only.

        Not collective.
        """
        module = self.context.module
        looks, self._looks_for_figures = self._looks_for_figures, False
        samples = BatchCut().samples_of(batch) if looks else None
        # A torch function mode would be traced into compiled functions.
        if module is None or samples is None or any(map(is_closed, module.modules())):
            yield
            return
        pairs = SamplePairs(batch, samples)
        with eagerly(), BatchFigures(batch, samples) as figures, SampleOrders(batch, samples) as orders, pairs:
            yield
        if figures.found is not None:
            rank_zero_warn(figures_of_ranks(module, figures.found))
        if orders.found is not None:
            rank_zero_warn(coupled_samples(module, orders.found))
        # Coupling that the loss' graph shows has already been warned about.
        if pairs.found is not None and not (self.loss_weights is not None and self.loss_weights.warned_coupled):
            rank_zero_warn(coupled_samples(module, pairs.found))

    def before_training_step(self, trainer: pl.Trainer, run_step: Callable[[Callable[[], None]], None]) -> None:
        """Check, before the second step, whether layers called in the first mix samples. Collective over the world.

        Between steps no backward is pending, and calls are like those of an evaluation.

        Args:
            trainer: Trainer that provides the precision context of a step.
            run_step: Runs a function as a step of the module.
        """
        mixing, self._mixing = self._mixing, None
        module = self.context.module
        if mixing is None or module is None:
            return
        found: str | None = None

        def look() -> None:
            nonlocal found
            with trainer.precision_plugin.train_step_context():
                found = mixing.find()

        for axis in self.context.axes:
            axis.start_evaluation()
        with torch.no_grad(), without_side_effects(module, trainer, parameters=False):
            run_step(look)
        for axis in self.context.axes:
            axis.end_evaluation()
        names = [name for name, _ in module.named_modules()]
        first = torch.tensor(len(names) if found is None else names.index(found), device=self.context.device)
        self.context.before_collective()
        dist.all_reduce(first, op=dist.ReduceOp.MIN, group=self.context.batch_group)
        if first < len(names):
            rank_zero_warn(mixed_samples(module, names[int(first)], "rank"))

    # --- buffers ------------------------------------------------------------------------------------------------

    def training_step(self, run: Callable[[], Any], batch: Any) -> Any:
        """Run a training step, synchronise buffers and weight its loss. Collective over the gradient ranks.

        Args:
            run: Runs the step.
            batch: Batch of the step.
        """
        if self._buffers is not None:
            self._buffers.before_training_step()
        watched = self._watch_parameters()
        first, self._is_first = self._is_first, False
        self._first_batch.detach()
        dtypes, drawn = (self._dtypes(), self._draws()) if first else ({}, None)
        if first and self._drawn_before not in (None, drawn):
            hooks = "What runs on a batch before training_step (on_after_batch_transfer, on_train_batch_start)"
            rank_zero_info(random_draws_message(hooks, "each rank for its own samples"))
        even, weights = self.even_steps, self.loss_weights
        counts = None if self.context.batch_counts is None else self.context.batch_counts()
        self.normalized_batch.counts = counts is not False
        with (
            nullcontext() if even is None else even.discarding_side_effects(),
            self._noting_calls(batch),
            self._following(batch),
        ):
            output = run() if weights is None else weights.training_step(run, batch, counts=counts)
        if first and drawn != self._draws():
            rank_zero_info(random_draws_message("training_step", "each rank for its own samples"))
        self._refuse_casts(dtypes)
        if self._batch_norms is not None:
            self._batch_norms.look()
        if self._buffers is not None:
            self.context.before_collective()
            self._buffers.after_training_step()
            self._warn_of_buffers(self._buffers.differing)
            self._name_left_alone(self._buffers.left_alone)
        if watched is not None:
            self.context.before_collective()
            held_in_parts = [name for axis in self.context.axes for name in axis.sync_set_parameters()]
            if names := [*watched.end(), *held_in_parts]:
                rank_zero_warn(differing_values(names))
        return output

    def _note_batch(self, convert: Callable[[Any], Any], batch: Any) -> Any:
        """Replacement for the precision plugin's ``convert_input`` until the first step."""
        module = self.context.module
        if module is not None and module.trainer.training:
            self._drawn_before = self._draws()
        return convert(batch)

    def _draws(self) -> int | None:
        return None if self.context.module is None else random_fingerprint(self.context.module)

    def _dtypes(self) -> dict[torch.nn.Parameter, torch.dtype]:
        """Return the dtypes of all parameters that require a gradient."""
        module = self.context.module
        return {each: each.dtype for each in ([] if module is None else module.parameters()) if each.requires_grad}

    def _refuse_casts(self, dtypes: dict[torch.nn.Parameter, torch.dtype]) -> None:
        """Check that the step has not cast parameters (``layer.to(dtype)`` in forward), which breaks averaging.

        Raises:
            RuntimeError: If it has; the message names one parameter.
        """
        module = self.context.module
        for name, each in module.named_parameters() if dtypes and module is not None else ():
            # A full parameter that replaces a shard during a step may have another dtype.
            if each.dtype != dtypes.get(each, each.dtype):
                raise RuntimeError(cast_parameter(name, dtypes[each], each.dtype))

    def _watch_parameters(self) -> SetParameters | None:
        if not self._watches_parameters or self.context.module is None:
            return None
        self._watches_parameters = False
        return SetParameters(self.context.module, group=self.context.gradient_group)

    def _warn_of_buffers(self, names: list[str]) -> None:
        if not names or self._has_warned:
            return
        self._has_warned = True
        rank_zero_warn(
            f"Buffers depend on each rank's own samples ({', '.join(names)}); in a single process they depend on all"
            " samples. The first rank's buffers are kept, as in Lightning's ddp. Combine the values they are computed"
            " from over ranks in the step, by self.all_gather(...) or self.trainer.strategy.reduce(...), or choose a"
            " strategy whose ranks see the same samples, such as pardist_tp. broadcast_buffers=False keeps each rank's"
            " own."
        )

    def _name_left_alone(self, names: set[str]) -> None:
        if fresh := sorted(names - self._named_as_left):
            self._named_as_left |= names
            rank_zero_info(
                f"Each rank keeps its own buffers {', '.join(fresh)}: their shapes differ between ranks, as do those of"
                " masks for a rank's batch."
            )

    def synchronize_buffers(self) -> None:
        """Broadcast the first rank's buffers before evaluation and before a checkpoint. Collective over the axis."""
        if self._buffers is not None:
            self._buffers.synchronize()
            self._name_left_alone(self._buffers.left_alone)

    # --- collectives --------------------------------------------------------------------------------------------

    def reduce(self, tensor: Tensor, group: Any | None, op: dist.ReduceOp | str | None) -> Tensor:
        """Reduce a tensor over ``group`` (the axis if None); in an evaluation step, over the ranks with a batch."""
        batch_group = self.context.batch_group
        if (present := self._present_in(group)) is not None:
            return reduce_among(tensor, group=batch_group, ranks=present, op=op)
        return reduce(tensor, group=batch_group if group is None else group, op=op)

    def all_gather(self, tensor: Tensor, group: Any | None, sync_grads: bool) -> Tensor:
        """Gather a tensor over ``group`` and stack it, as in :meth:`reduce`; the world is treated as the axis."""
        batch_group = self.context.batch_group
        if (present := self._present_in(group)) is not None:
            return gather_among(tensor, group=batch_group, ranks=present)
        # LightningModule.all_gather passes the world as its default.
        if group is None or group is dist.group.WORLD:
            group = batch_group
        return all_gather(tensor, group=group, sync_grads=sync_grads)

    def _present_in(self, group: Any | None) -> list[int] | None:
        """Return the ranks with a batch in an evaluation step for which some ranks have none; None otherwise."""
        if self.evaluation is None or (group is not None and group is not dist.group.WORLD):
            return None
        return self.evaluation.present
