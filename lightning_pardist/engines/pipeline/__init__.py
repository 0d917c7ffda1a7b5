"""Pipeline parallelism by stage replay: every stage runs the user's own step, with other stages' modules as stubs.

Life cycle, the same on every rank of a pipeline::

    recorded = record_step(module, step, sample_microbatch)  # one run; the module's state is restored
    made = plan_stages(recorded, num_stages)                 # print(made.describe())
    dry_run(module, step, sample_microbatch, made)           # finds failures that only occur with stubs
    engine = PipelineEngine(module, made, group=group, options=PipelineOptions(schedule="1f1b", num_microbatches=8))
    engine.free()                                            # other stages' parameters move to the meta device
    optimizer = ...
    result = engine.train_step(step, batch)                  # gradients in .grad, loss on every rank
"""

from lightning_pardist.engines.pipeline.clock import TimedAction, Timeline, expected_idle_share
from lightning_pardist.engines.pipeline.cut import BatchCut, BatchDim, SplitFunction, UnevenBatchError, split_batch
from lightning_pardist.engines.pipeline.dry_run import dry_run
from lightning_pardist.engines.pipeline.errors import CannotPipelineError, PipelineTimeoutError
from lightning_pardist.engines.pipeline.microbatch import MicroBatch, merge_results
from lightning_pardist.engines.pipeline.pipeline_engine import PipelineEngine, PipelineOptions, StepResult
from lightning_pardist.engines.pipeline.placement import Placement
from lightning_pardist.engines.pipeline.records import StepRecord
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
from lightning_pardist.engines.pipeline.stage_plan import PipelinePlan, StageCost, plan_stages
from lightning_pardist.engines.pipeline.step_record import find_loss, record_step, with_scalar_loss

__all__ = [
    "SCHEDULES",
    "SPLIT_BACKWARD",
    "Action",
    "ActionLists",
    "BatchCut",
    "BatchDim",
    "CannotPipelineError",
    "Kind",
    "MicroBatch",
    "PipelineEngine",
    "PipelineOptions",
    "PipelinePlan",
    "PipelineTimeoutError",
    "Placement",
    "SplitFunction",
    "StageCost",
    "StepRecord",
    "StepResult",
    "TimedAction",
    "Timeline",
    "UnevenBatchError",
    "build_schedule",
    "check_schedule",
    "dry_run",
    "expected_idle_share",
    "find_loss",
    "forward_schedule",
    "merge_results",
    "plan_stages",
    "record_step",
    "split_batch",
    "stage_ranks",
    "with_scalar_loss",
]
