"""Tensor parallelism of an unmodified module: plan, apply, run.

Life cycle::

    found = plan(module, lambda: module.loss(batch), tp_size=2)   # one traced run, no process group needed
    print(found)                                                  # what is split, why, and what it sends
    runtime = apply(module, found, mesh["tensor_parallel"])       # parameters become DTensors in place
    optimizer = torch.optim.AdamW(module.parameters())            # as ever
    attach(optimizer)                                             # it steps on this rank's parts
    with runtime.step():                                          # around forward and backward of every step
        loss = module.loss(batch)
        loss.backward()
    optimizer.step()
    state = full_state_dict(module)                               # plain whole tensors under the module's own names
    dissolve(module)                                              # plain whole parameters again
"""

from lightning_pardist.engines.tensor.layout import Layout
from lightning_pardist.engines.tensor.optimizer import attach, steps_on_whole
from lightning_pardist.engines.tensor.parallelize import (
    apply,
    dissolve,
    full_optimizer_state,
    full_state_dict,
    load_full_optimizer_state,
    load_full_state_dict,
    local_like,
    local_squared_norm,
    whole_tensor,
)
from lightning_pardist.engines.tensor.plan import CollectivePlan, FallbackPlan, TensorParallelPlan, TensorPlan
from lightning_pardist.engines.tensor.planner import plan
from lightning_pardist.engines.tensor.runtime import Fallback, TensorRuntime
from lightning_pardist.engines.tensor.split import SplitTensor

__all__ = [
    "CollectivePlan",
    "Fallback",
    "FallbackPlan",
    "Layout",
    "SplitTensor",
    "TensorParallelPlan",
    "TensorPlan",
    "TensorRuntime",
    "apply",
    "attach",
    "dissolve",
    "full_optimizer_state",
    "full_state_dict",
    "load_full_optimizer_state",
    "load_full_state_dict",
    "local_like",
    "local_squared_norm",
    "plan",
    "steps_on_whole",
    "whole_tensor",
]
