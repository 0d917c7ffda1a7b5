"""Tensor parallelism for an unmodified module: plan the layout, apply it, run the step.

Life cycle::

    found = plan_layout(module, lambda: module.loss(batch), tp_size=2)   # one traced run, no process group needed
    print(found)                                                  # what is sharded, why, and the collectives
    runtime = apply_layout(module, found, mesh["tensor_parallel"])  # parameters become DTensors in place
    optimizer = torch.optim.AdamW(module.parameters())            # unchanged
    attach(optimizer)                                             # its step updates the local shards
    with runtime.step():                                          # around forward and backward of every step
        loss = module.loss(batch)
        loss.backward()
    optimizer.step()
    unsplit_module(module)                                        # plain full parameters again
"""

from lightning_pardist.engines.tensor.context import ContextRuntime
from lightning_pardist.engines.tensor.dispatch import Fallback, TensorRuntime
from lightning_pardist.engines.tensor.layout import Layout
from lightning_pardist.engines.tensor.parallelize import (
    apply_layout,
    local_like,
    to_full_tensor,
    unsplit_module,
)
from lightning_pardist.engines.tensor.planner import plan_layout
from lightning_pardist.engines.tensor.split_tensor import SplitTensor
from lightning_pardist.engines.tensor.tensor_optimizer import attach
from lightning_pardist.engines.tensor.tensor_plan import CollectivePlan, FallbackPlan, TensorParallelPlan, TensorPlan

__all__ = [
    "CollectivePlan",
    "ContextRuntime",
    "Fallback",
    "FallbackPlan",
    "Layout",
    "SplitTensor",
    "TensorParallelPlan",
    "TensorPlan",
    "TensorRuntime",
    "apply_layout",
    "attach",
    "local_like",
    "plan_layout",
    "to_full_tensor",
    "unsplit_module",
]
