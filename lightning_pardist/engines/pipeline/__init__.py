"""Pipeline parallelism by stage replay: every stage runs the user's own step, with other stages' modules as stubs.

Life cycle, the same on every rank of a pipeline::

    recorded = trace(module, step, sample_microbatch)       # one run, nothing left behind
    made = plan(recorded, num_stages)                        # print(made.describe())
    dry_run(module, step, sample_microbatch, made)           # refuses what only stubs would find
    engine = PipelineEngine(module, made, group=group, options=PipelineOptions(schedule="1f1b", num_microbatches=8))
    engine.free()                                            # other stages' parameters go to the meta device
    optimizer = ...
    result = engine.train_step(step, batch)                  # gradients in .grad, loss known everywhere
"""

from lightning_pardist.engines.pipeline.clock import (
    Durations,
    TimedAction,
    Timeline,
    expected_idle_share,
    simulate,
)
from lightning_pardist.engines.pipeline.dry_run import dry_run
from lightning_pardist.engines.pipeline.engine import PipelineEngine, PipelineOptions, StepResult
from lightning_pardist.engines.pipeline.errors import CannotPipelineError, PipelineTimeoutError
from lightning_pardist.engines.pipeline.microbatch import MicroBatch, batch_size_of, merge_results, split_batch
from lightning_pardist.engines.pipeline.placement import Placement
from lightning_pardist.engines.pipeline.plan import PipelinePlan, StageCost, plan
from lightning_pardist.engines.pipeline.records import Trace
from lightning_pardist.engines.pipeline.schedule import (
    SCHEDULES,
    SPLIT_BACKWARD,
    Action,
    ActionLists,
    Kind,
    build_schedule,
    check_schedule,
    forward_schedule,
    stage_ranks,
)
from lightning_pardist.engines.pipeline.trace import find_loss, trace

__all__ = [
    "SCHEDULES",
    "SPLIT_BACKWARD",
    "Action",
    "ActionLists",
    "CannotPipelineError",
    "Durations",
    "Kind",
    "MicroBatch",
    "PipelineEngine",
    "PipelineOptions",
    "PipelinePlan",
    "PipelineTimeoutError",
    "Placement",
    "StageCost",
    "StepResult",
    "TimedAction",
    "Timeline",
    "Trace",
    "batch_size_of",
    "build_schedule",
    "check_schedule",
    "dry_run",
    "expected_idle_share",
    "find_loss",
    "forward_schedule",
    "merge_results",
    "plan",
    "simulate",
    "split_batch",
    "stage_ranks",
    "trace",
]
