"""Tensor parallelism of an unmodified module: plan, apply, run.

Life cycle::

    found = plan_layout(module, lambda: module.loss(batch), tp_size=2)   # one traced run, no process group needed
    print(found)                                                  # what is split, why, and what it sends
    runtime = apply_layout(module, found, mesh["tensor_parallel"])       # parameters become DTensors in place
    optimizer = torch.optim.AdamW(module.parameters())            # as ever
    attach(optimizer)                                             # it steps on this rank's parts
    with runtime.step():                                          # around forward and backward of every step
        loss = module.loss(batch)
        loss.backward()
    optimizer.step()
    state = full_state_dict(module)                               # plain whole tensors under the module's own names
    unsplit_module(module)                                              # plain whole parameters again
"""

from lightning_pardist.engines.tensor.context import ContextRuntime
from lightning_pardist.engines.tensor.dispatch import Fallback, TensorRuntime
from lightning_pardist.engines.tensor.layout import Layout
from lightning_pardist.engines.tensor.parallelize import (
    apply_layout,
    local_like,
    unsplit_module,
    whole_tensor,
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
    "unsplit_module",
    "whole_tensor",
]
