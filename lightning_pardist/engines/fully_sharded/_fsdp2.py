"""The one place that touches names torch's ``fully_shard`` keeps to itself (torch 2.11 to 2.13)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule

from lightning_pardist.engines.fully_sharded.state import whole_over_data


def state_of(module: FSDPModule) -> Any:
    """The ``FSDPState`` of a module that ``fully_shard`` was applied to."""
    return module._get_fsdp_state()


def groups_of(module: FSDPModule) -> list[Any]:
    """The ``FSDPParamGroup``s of a module: none for one without parameters of its own."""
    state = state_of(module)
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def set_idle(group: Any) -> None:
    """Forget that the group's backward has run, so that the final callback runs it once more."""
    group._training_state = type(group._training_state).IDLE


def set_forward(group: Any) -> None:
    """Say that the group is in forward, so that it keeps what ``reshard_after_forward`` says it keeps."""
    group._training_state = type(group._training_state).FORWARD


def set_post_backward(group: Any) -> None:
    """Say that the group's backward has run."""
    group._training_state = type(group._training_state).POST_BACKWARD


def has_gathered_parameters(group: Any) -> bool:
    """Whether the group's whole parameters have been created, by its first gather."""
    return all(hasattr(parameter, "_unsharded_param") for parameter in group.fsdp_params)


def gathered_parameter(fsdp_param: Any) -> nn.Parameter | None:
    """The whole parameter, or nothing before the first gather. Its storage is empty while sharded."""
    return getattr(fsdp_param, "_unsharded_param", None)


def has_whole_gradient(fsdp_param: Any) -> bool:
    """Whether a gradient waits to be reduced."""
    gathered = gathered_parameter(fsdp_param)
    return gathered is not None and (gathered.grad is not None or fsdp_param.unsharded_accumulated_grad is not None)


def fill_missing_gradients(group: Any) -> list[Any]:
    """Give zeros to trainable parameters that backward did not reach; returns those whose shard has no gradient yet."""
    filled = []
    for fsdp_param in group.fsdp_params:
        gathered = gathered_parameter(fsdp_param)
        if gathered is None or not gathered.requires_grad or has_whole_gradient(fsdp_param):
            continue
        with torch.no_grad():
            gathered.grad = torch.zeros_like(gathered, memory_format=torch.contiguous_format)
        filled.append(fsdp_param)
    return filled


def is_being_gathered(group: Any) -> bool:
    """Whether a gather was started, ahead of its use, that nobody has waited for."""
    return group._all_gather_result is not None


def drop_pending_gather(group: Any) -> None:
    """Wait for and forget a prefetched gather that nobody used: its values would be stale after the next step."""
    pending = group._all_gather_result
    if pending is None:
        return
    if isinstance(pending.all_gather_work, dist.Work):
        pending.all_gather_work.wait()
    if pending.all_gather_event is not None and group.device.type != "cpu":
        torch.accelerator.current_stream().wait_event(pending.all_gather_event)
    group._all_gather_result = None


def reset_iteration(module: FSDPModule) -> None:
    """Forget a forward or backward that did not end; older versions of torch have no method for it."""
    if hasattr(module, "reset_iter_state"):
        module.reset_iter_state()
        return
    state = state_of(module)
    context = state._state_ctx
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False
    state._comm_ctx.post_forward_order.clear()
    for other in context.all_states:
        other._training_state = type(other._training_state).IDLE
        for group in groups_of(other._modules[0]):
            set_idle(group)
            group._post_forward_indices.clear()


def end_inner_backward(module: FSDPModule) -> None:
    """Be ready for another backward of the same forward; what is gathered stays."""
    context = state_of(module)._state_ctx
    context.post_backward_final_callback_queued = False
    for other in context.all_states:
        other._training_state = type(other._training_state).IDLE
        for group in groups_of(other._modules[0]):
            set_idle(group)


def remove_forward_hooks(module: FSDPModule) -> None:
    """Let a call of the module neither gather nor free it: whoever runs it does so by the state's own methods."""
    state = state_of(module)
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()


def undo(module: FSDPModule) -> None:
    """Take back what ``fully_shard`` did to one module, parameter by parameter. Collective over its mesh."""
    state = state_of(module)
    handles = [state._pre_forward_hook_handle, state._post_forward_hook_handle]
    for group in groups_of(module):
        handles += group._module_to_pre_save_state_dict_hook_handle.values()
        handles += group._module_to_pre_load_state_dict_hook_handle.values()
        for fsdp_param in group.fsdp_params:
            handles.append(fsdp_param._post_load_hook_handle)
            shard, info = fsdp_param.sharded_param, fsdp_param._module_info
            whole = nn.Parameter(whole_over_data(shard), requires_grad=shard.requires_grad)
            info.module._parameters[info.param_name] = whole
            for other, name in zip(info.shared_modules, info.shared_param_names, strict=True):
                other._parameters[name] = whole
    for handle in handles:
        handle.remove()
    _module_state_mapping.pop(module, None)  # type: ignore[call-overload]
    for key in (STATE_KEY, REGISTRY_KEY):
        module.__dict__.pop(key, None)
    remove_marks(module)  # type: ignore[arg-type]
    module.__class__ = type(module).__mro__[2]


def remove_marks(module: nn.Module) -> None:
    """Take away the attributes by which other libraries tell that ranks have to call a module equally often."""
    for child in module.modules():
        for mark in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            child.__dict__.pop(mark, None)


def shard_of(fsdp_param: Any) -> torch.Tensor:
    """This rank's padded, flat shard."""
    data: torch.Tensor = fsdp_param._sharded_param_data
    return data


def gathers_dtype(group: Any) -> list[torch.dtype]:
    """The dtype in which each parameter travels."""
    return [fsdp_param.param_dtype or fsdp_param.orig_dtype for fsdp_param in group.fsdp_params]


def all_fsdp_modules(module: nn.Module) -> Iterator[FSDPModule]:
    """Every module of the tree that ``fully_shard`` was applied to."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            yield child
