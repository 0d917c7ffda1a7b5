"""Private parts of ``fully_shard``: its state per module, parameter groups and parameters (torch 2.11 to 2.15).

``fully_shard`` has public setters for the collectives and for prefetching. It has none for what these classes add: an
end of backward that does not depend on which inputs need gradients, units that stay unsharded through a step, several
calls of one module before one backward, and undoing the sharding.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule

from lightning_pardist.compat.contract import Private

_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState"
_CONTEXT = "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPStateContext"
_COMM = "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPCommContext"
_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup"
_PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam"
_UNDO = "making a module whole again after a run"
_END = "an end of backward that does not depend on which inputs need gradients"
_PHASES = "units that stay unsharded, and calls of one module before one backward"
_PREFETCH = "dropping gathers that nobody used, whose values are stale after a step"
_WRITTEN = "what the user writes to gathered parameters"
_READ = "compare with torch/distributed/fsdp/_fully_shard of the release, and change this file"

NAMES = (
    Private("torch.distributed.fsdp.FSDPModule._get_fsdp_state", "everything in this file", _READ),
    Private(f"{_STATE}._fsdp_param_groups", "everything in this file", _READ, since="2.12"),
    Private(f"{_STATE}._fsdp_param_group", "everything in this file", _READ, until="2.12"),
    Private(f"{_STATE}._modules", "starting anew after an exception", _READ),
    Private(f"{_STATE}._state_ctx", _END, _READ),
    Private(f"{_STATE}._comm_ctx", "starting anew after an exception", "reset_iter_state(), since 2.13"),
    Private(f"{_STATE}._training_state", _PHASES, _READ),
    Private(f"{_STATE}._root_post_backward_final_callback", _END, _READ),
    Private(f"{_STATE}._register_root_post_backward_final_callback", _END, _READ),
    Private(f"{_STATE}._register_pre_backward_hook", "outputs that are objects, and views changed in place", _READ),
    Private(f"{_STATE}._pre_backward", "outputs that are objects, and views changed in place", _READ),
    Private(f"{_STATE}._pre_forward", "units of a pipeline stage, which are gathered behind their call", _READ),
    Private(f"{_STATE}._post_forward", "units of a pipeline stage, which are gathered behind their call", _READ),
    Private(f"{_STATE}._pre_forward_hook_handle", _UNDO, _READ),
    Private(f"{_STATE}._post_forward_hook_handle", _UNDO, _READ),
    Private(f"{_CONTEXT}.all_states", _END, _READ),
    Private(f"{_CONTEXT}.iter_forward_root", "starting anew after an exception", "reset_iter_state(), since 2.13"),
    Private(f"{_CONTEXT}.post_backward_final_callback_queued", _END, _READ),
    Private(f"{_CONTEXT}.manual_backward_finalization_active", _END, _READ, since="2.15"),
    Private(f"{_COMM}.post_forward_order", "starting anew after an exception", "reset_iter_state(), since 2.13"),
    Private(f"{_GROUP}.fsdp_params", "everything in this file", _READ),
    Private(f"{_GROUP}.is_unsharded", _PHASES, _READ),
    Private(f"{_GROUP}.is_sharded", _WRITTEN, _READ),
    Private(f"{_GROUP}.mesh_info", "reductions that are deferred", _READ),
    Private(f"{_GROUP}.post_forward_mesh_info", _PHASES, _READ),
    Private(f"{_GROUP}.reduce_grads", _END, _READ),
    Private(f"{_GROUP}.all_reduce_grads", _END, _READ),
    Private(f"{_GROUP}.reshard_after_backward", "ranks that use different units", _READ),
    Private(f"{_GROUP}.post_forward", _PHASES, _READ),
    Private(f"{_GROUP}.post_backward", _END, _READ),
    Private(f"{_GROUP}.reshard", _PHASES, _READ),
    Private(f"{_GROUP}._training_state", _PHASES, _READ),
    Private(f"{_GROUP}._to_sharded", _PHASES, _READ),
    Private(f"{_GROUP}._to_sharded_post_forward", _WRITTEN, _READ),
    Private(f"{_GROUP}._to_unsharded", _WRITTEN, _READ),
    Private(f"{_GROUP}._reduce_dtype", "reductions that are deferred", "defer none"),
    Private(f"{_GROUP}._all_reduce_hook", "reductions that are deferred", "defer none"),
    Private(f"{_GROUP}._partial_reduce_output", "HSDP with several micro-batches", _READ),
    Private(f"{_GROUP}._register_post_backward_hook", _PHASES, _READ),
    Private(f"{_GROUP}._post_forward_indices", "starting anew after an exception", "reset_iter_state(), since 2.13"),
    Private(f"{_GROUP}._all_gather_result", _PREFETCH, _READ),
    Private(f"{_GROUP}._all_gather_comm", "ranks that use different units", _READ),
    Private(f"{_GROUP}._all_gather_process_group", "ranks that use different units", _READ),
    Private(f"{_GROUP}._module_to_pre_save_state_dict_hook_handle", _UNDO, _READ),
    Private(f"{_GROUP}._module_to_pre_load_state_dict_hook_handle", _UNDO, _READ),
    Private(f"{_PARAM}.sharded_param", "everything in this file", _READ),
    Private(f"{_PARAM}._unsharded_param", "gradients of parameters that are used outside of their module", _READ),
    Private(f"{_PARAM}.unsharded_accumulated_grad", "accumulation of whole gradients", _READ),
    Private(f"{_PARAM}._sharded_param_data", "ranks that use different units", _READ),
    Private(f"{_PARAM}.all_gather_outputs", "outputs that are views of parameters", _READ),
    Private(f"{_PARAM}.param_dtype", "reductions that are deferred", _READ),
    Private(f"{_PARAM}.orig_dtype", "reductions that are deferred", _READ),
    Private(f"{_PARAM}.sharded_grad_dtype", "reductions that are deferred", _READ, since="2.15"),
    Private(f"{_PARAM}.offload_to_cpu", "reductions that are deferred", _READ),
    Private(f"{_PARAM}._module_info", _UNDO, _READ),
    Private(f"{_PARAM}._post_load_hook_handle", _UNDO, _READ),
    Private(f"{_PARAM}.reset_sharded_param", "loading a state dict into shards", _READ),
    Private("torch.distributed._composable.contract.STATE_KEY", _UNDO, _READ),
    Private("torch.distributed._composable.contract.REGISTRY_KEY", _UNDO, _READ),
    Private("torch.distributed._composable_state._module_state_mapping", _UNDO, _READ),
)


class ShardedParameter:
    """One parameter of a group, torch's ``FSDPParam``.

    Args:
        private: torch's object.
    """

    __slots__ = ("_private",)

    def __init__(self, private: Any) -> None:
        self._private = private

    @property
    def sharded(self) -> Any:
        """The sharded parameter, a ``DTensor``, which the module has between steps."""
        return self._private.sharded_param

    @property
    def unsharded(self) -> nn.Parameter | None:
        """The unsharded parameter; None before the first all-gather. Its storage is empty while sharded."""
        return getattr(self._private, "_unsharded_param", None)

    def is_in_place(self, *, whole: bool) -> bool:
        """Return whether the module currently has the unsharded parameter, or the shard, under the parameter's name."""
        info = self._private._module_info
        expected = self._private._unsharded_param if whole else self._private.sharded_param
        return info.module._parameters.get(info.param_name) is expected

    @property
    def flat_shard(self) -> torch.Tensor:
        """This rank's padded shard, one-dimensional."""
        data: torch.Tensor = self._private._sharded_param_data
        return data

    @property
    def gather_buffers(self) -> list[torch.Tensor]:
        """Output buffers of all-gathers, which hold the unsharded parameter; without storage while sharded."""
        buffers: list[torch.Tensor] = self._private.all_gather_outputs
        return buffers

    @property
    def gather_dtype(self) -> torch.dtype:
        """Dtype in which the parameter is gathered and used."""
        dtype: torch.dtype = self._private.param_dtype or self._private.orig_dtype
        return dtype

    @property
    def shard_grad_dtype(self) -> torch.dtype:
        """Dtype of the shard's gradient; since torch 2.15 it may differ from the shard's."""
        dtype: torch.dtype = getattr(self._private, "sharded_grad_dtype", None) or self._private.orig_dtype
        return dtype

    @property
    def offloads_to_cpu(self) -> bool:
        """Whether the shard and its gradient are offloaded to host memory."""
        return bool(self._private.offload_to_cpu)

    @property
    def has_unsharded_grad(self) -> bool:
        """Whether an unsharded gradient is waiting to be reduced."""
        unsharded = self.unsharded
        # Before torch 2.15, gradients of backwards that do not reduce are kept apart from the parameter.
        return unsharded is not None and (
            unsharded.grad is not None or self._private.unsharded_accumulated_grad is not None
        )

    @property
    def has_post_accumulate_hooks(self) -> bool:
        """Whether the user has registered post-accumulate-grad hooks on the sharded parameter."""
        # None or a dict; listed in tensors.py.
        return bool(getattr(self.sharded, "_post_accumulate_grad_hooks", None))

    def fill_missing_grad(self) -> bool:
        """Set a zero gradient on a trainable parameter that backward did not reach; return whether it was set."""
        unsharded = self.unsharded
        if unsharded is None or not unsharded.requires_grad or self.has_unsharded_grad:
            return False
        with torch.no_grad():
            unsharded.grad = torch.zeros_like(
                unsharded, dtype=unsharded.grad_dtype, memory_format=torch.contiguous_format
            )
        return True

    def forget_grads(self) -> None:
        """Drop all gradients, reduced and unreduced."""
        if self.unsharded is not None:
            self.unsharded.grad = None
            if self._private.unsharded_accumulated_grad is not None:
                self._private.unsharded_accumulated_grad = None
        self.sharded.grad = None


class ParameterGroup:
    """Parameters that are all-gathered and reduced together, torch's ``FSDPParamGroup``.

    Args:
        private: torch's object.
    """

    def __init__(self, private: Any) -> None:
        self._private = private
        self.parameters = [ShardedParameter(parameter) for parameter in private.fsdp_params]

    # -- all-gathers

    @property
    def is_unsharded(self) -> bool:
        """Whether the module currently holds the unsharded parameters."""
        return bool(self._private.is_unsharded)

    @property
    def was_unsharded(self) -> bool:
        """Whether the unsharded parameters have been created, by the first all-gather."""
        return all(parameter.unsharded is not None for parameter in self.parameters)

    @property
    def is_being_gathered(self) -> bool:
        """Whether a prefetched all-gather is pending that has not been waited for."""
        return self._private._all_gather_result is not None

    @property
    def reshards_after_forward(self) -> bool:
        """Whether the parameters are resharded after forward."""
        return self._private.post_forward_mesh_info is not None

    def keep_unsharded_after_forward(self) -> Callable[[], None]:
        """Keep the parameters unsharded after forward; return a function that restores the setting."""
        group, before = self._private, self._private.post_forward_mesh_info
        group.post_forward_mesh_info = None
        return lambda: setattr(group, "post_forward_mesh_info", before)

    def drop_pending_gather(self) -> None:
        """Wait for and drop an unused prefetched all-gather: its values would be stale after the next step."""
        pending = self._private._all_gather_result
        if pending is None:
            return
        if isinstance(pending.all_gather_work, dist.Work):
            pending.all_gather_work.wait()
        if pending.all_gather_event is not None and self._private.device.type != "cpu":
            # A device-specific event: torch's generic streams accept it, but do not wait for it.
            torch.get_device_module(self._private.device).current_stream().wait_event(pending.all_gather_event)
        self._private._all_gather_result = None

    def send_shard(self) -> None:
        """Join an all-gather of parameters that this rank already holds unsharded. Collective over the shard group."""
        group = self._private
        mine = torch.cat([p.flat_shard.to(group.device, p.gather_dtype) for p in self.parameters])
        process_group = group._all_gather_process_group
        out = mine.new_empty(mine.numel() * process_group.size())
        work = group._all_gather_comm(out, mine, process_group, async_op=True)
        if isinstance(work, dist.Work):
            work.wait()

    def reshard(self) -> None:
        """Reshard the parameters according to the setting for the current phase of the step. Not collective."""
        self._private.reshard()

    def free(self) -> None:
        """Reshard the parameters whatever the settings are; the shards remain. Not collective."""
        self.drop_pending_gather()
        self._private._to_sharded()

    def show_shards(self) -> None:
        """Put the shards into the module; a pending all-gather continues. Not collective."""
        self._private._to_sharded()

    def abandon(self) -> None:
        """Reshard after a failure, as :meth:`free` but without waiting; drops pending collectives. Not collective."""
        self._private._all_gather_result = None
        self._private._to_sharded()
        self.set_idle()

    # -- reductions

    @property
    def ranks(self) -> int:
        """Number of ranks over which gradients are averaged."""
        return int(self._private.mesh_info.mesh.size())

    @property
    def has_work(self) -> bool:
        """Whether gradients are to be reduced now: unsharded ones, or HSDP's partial sums of earlier micro-batches."""
        group = self._private
        if not group.reduce_grads:
            return False
        partial = group.all_reduce_grads and group._partial_reduce_output is not None
        return partial or any(parameter.has_unsharded_grad for parameter in self.parameters)

    def output_becomes_grads(self) -> bool:
        """Return whether a reduce-scatter's output becomes the shards' gradients and is not read before backward ends.

        Otherwise torch divides, casts, adds or copies the output as soon as it is ready.
        """
        group = self._private
        if isinstance(getattr(group.mesh_info, "replicate_mesh_size", None), int) or group._all_reduce_hook is not None:
            return False
        trainable = [p for p in self.parameters if p.sharded.requires_grad]
        dtypes = {p.sharded.dtype for p in trainable} | {p.shard_grad_dtype for p in trainable}
        if group._reduce_dtype is not None:
            dtypes.add(group._reduce_dtype)
        for parameter in self.parameters:
            dtypes.add(parameter.gather_dtype)
            if parameter.sharded.grad is not None or parameter.offloads_to_cpu or parameter.has_post_accumulate_hooks:
                return False
        # torch divides by the number of ranks itself unless the dtype is one of these.
        return len(dtypes) == 1 and dtypes <= {torch.float32, torch.bfloat16}

    def fill_missing_grads(self) -> list[ShardedParameter]:
        """Set zero gradients where backward did not reach; return those of the parameters whose shard has no gradient.

        torch's own ``set_reduce_scatter_unused_params`` would also reduce a unit that no rank has used.
        """
        filled = [parameter for parameter in self.parameters if parameter.fill_missing_grad()]
        return [parameter for parameter in filled if parameter.sharded.grad is None]

    def reduce_zeros(self, filled: Callable[[list[ShardedParameter]], None]) -> None:
        """Join a reduction with zero gradients, and restore the group's state. Collective over the group's mesh.

        Args:
            filled: Called with the parameters whose only gradient is the zeros set here.
        """
        group = self._private
        unsharded_parameters = [p.unsharded for p in self.parameters if p.unsharded is not None]
        kept = [(unsharded, unsharded.grad) for unsharded in unsharded_parameters]
        for unsharded, _ in kept:
            unsharded.grad = None
        state, reshards = group._training_state, group.reshard_after_backward
        group.reshard_after_backward = False
        filled(self.fill_missing_grads())
        type(group).post_backward(group)
        group._training_state, group.reshard_after_backward = state, reshards
        for unsharded, gradient in kept:
            unsharded.grad = gradient

    # -- phases of a step

    def set_idle(self) -> None:
        """Reset the group's phase so that the final callback runs its backward once more."""
        self._set_phase("IDLE")

    def set_forward(self) -> None:
        """Set the group's phase to forward, in which ``reshard_after_forward`` decides what it keeps."""
        self._set_phase("FORWARD")

    def set_post_backward(self) -> None:
        """Mark the group's backward as done."""
        self._set_phase("POST_BACKWARD")

    def _set_phase(self, name: str) -> None:
        self._private._training_state = type(self._private._training_state)[name]

    def forget_forwards(self) -> None:
        """Drop the recorded order of forwards that will have no backward."""
        self._private._post_forward_indices.clear()

    def wrap(
        self,
        *,
        post_forward: Callable[..., Any],
        post_backward: Callable[..., Any],
        register_post_backward: Callable[..., Any],
    ) -> None:
        """Wrap torch's hooks with functions that get the original as their first argument.

        Args:
            post_forward: ``(original, module, args, output) -> output``, after a module's forward.
            post_backward: ``(original, *unused)``, when the gradients of a module's inputs have been computed.
            register_post_backward: ``(original, args, kwargs) -> args, kwargs``, before a module's forward.
        """
        group = self._private
        group.post_forward = functools.partial(post_forward, group.post_forward)
        group.post_backward = functools.partial(post_backward, group.post_backward)
        group._register_post_backward_hook = functools.partial(
            register_post_backward, group._register_post_backward_hook
        )

    def wrap_transitions(
        self, *, before_gathered: Callable[[], None], gathered: Callable[[], None], before_free: Callable[[], None]
    ) -> None:
        """Register callbacks for the unsharding and resharding of the parameters.

        Args:
            before_gathered: Called when the parameters are gathered, while the module still has the shards.
            gathered: Called when the module has the unsharded parameters, before they are used.
            before_free: Called before they are freed, also if they were freed already.
        """
        group = self._private
        show, free, free_some = group._to_unsharded, group._to_sharded, group._to_sharded_post_forward

        def to_unsharded() -> None:
            if group.is_sharded:
                before_gathered()
            show()
            gathered()

        def to_sharded() -> None:
            before_free()
            free()

        def to_sharded_post_forward() -> None:
            before_free()
            free_some()

        group._to_unsharded, group._to_sharded = to_unsharded, to_sharded
        group._to_sharded_post_forward = to_sharded_post_forward

    def wrap_state_hooks(self, settle: Callable[[], None], fit: Callable[[torch.Tensor, Any, bool], Any]) -> None:
        """Replace torch's hooks on state dicts, which free gathered parameters.

        Args:
            settle: Called before a module's state dict is read or loaded.
            fit: ``(parameter, value, whole) -> value``: returns what to copy into a parameter; ``whole`` is whether the
                parameter is unsharded now.
        """
        group = self._private
        # Closures, which copies of a module share; bound methods would be copied with everything that they hold.
        before_save, before_load = _state_hooks(self, settle, fit)
        for handle in self.hook_handles():
            handle.remove()
        # torch registers its own in the first forward, and none for modules that have entries here.
        for module in {parameter._module_info.module for parameter in group.fsdp_params}:
            saving, loading = module.register_state_dict_pre_hook, module.register_load_state_dict_pre_hook
            group._module_to_pre_save_state_dict_hook_handle[module] = saving(before_save)
            group._module_to_pre_load_state_dict_hook_handle[module] = loading(before_load)
        for parameter in group.fsdp_params:
            owner = parameter._module_info.module
            hook = _after_load(self, parameter)
            parameter._post_load_hook_handle = owner.register_load_state_dict_post_hook(hook)

    def hook_handles(self) -> Iterator[Any]:
        """Yield the handles of the group's hooks on modules."""
        yield from self._private._module_to_pre_save_state_dict_hook_handle.values()
        yield from self._private._module_to_pre_load_state_dict_hook_handle.values()
        for parameter in self._private.fsdp_params:
            yield parameter._post_load_hook_handle

    def restore(self, whole: Callable[[Any], nn.Parameter]) -> None:
        """Replace the shards by unsharded parameters. Collective if ``whole`` is.

        Args:
            whole: Maps a shard to the unsharded parameter.
        """
        for parameter in self._private.fsdp_params:
            info, restored = parameter._module_info, whole(parameter.sharded_param)
            places = [
                (info.module, info.param_name),
                *zip(info.shared_modules, info.shared_param_names, strict=True),
            ]
            for module, name in places:
                module.register_parameter(name, restored)


def _state_hooks(
    group: ParameterGroup, settle: Callable[[], None], fit: Callable[[torch.Tensor, Any, bool], Any]
) -> tuple[Callable[..., None], Callable[..., None]]:
    def before_save(*unused: Any) -> None:
        settle()

    def before_load(module: nn.Module, state: dict[str, Any], prefix: str, *unused: Any) -> None:
        settle()
        own = {id(held) for p in group.parameters for held in (p.sharded, p.unsharded)}
        for name, parameter in module.named_parameters(recurse=False):
            key = prefix + name
            if id(parameter) in own and isinstance(state.get(key), torch.Tensor):
                state[key] = fit(parameter, state[key], group.is_unsharded)

    return before_save, before_load


def _after_load(group: ParameterGroup, parameter: Any) -> Callable[..., None]:
    def after_load(*unused: Any) -> None:
        # With assign=True the shard may be a new tensor, perhaps without torch's padding.
        if not group.is_unsharded:
            parameter.reset_sharded_param()

    return after_load


class ModuleState:
    """State of one module under ``fully_shard``, torch's ``FSDPState``.

    Args:
        module: A module to which ``fully_shard`` was applied.
    """

    def __init__(self, module: FSDPModule) -> None:
        self.module = module
        self._private: Any = module._get_fsdp_state()
        #: Empty for a module without parameters of its own.
        self.groups = [ParameterGroup(group) for group in _private_groups(self._private)]

    # -- hooks

    def wrap(self, *, final: Callable[..., Any], register_pre_backward: Callable[..., Any]) -> None:
        """Replace torch's callbacks.

        Args:
            final: ``(original)``, at the end of backward if this module is the root.
            register_pre_backward: ``(output) -> output``, after forward.
        """
        state = self._private
        state._root_post_backward_final_callback = functools.partial(final, state._root_post_backward_final_callback)
        state._register_pre_backward_hook = register_pre_backward

    def remove_forward_hooks(self) -> None:
        """Remove the module's forward hooks: its caller runs :meth:`pre_forward` and :meth:`post_forward` instead."""
        self._private._pre_forward_hook_handle.remove()
        self._private._post_forward_hook_handle.remove()

    def pre_forward(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Run the pre-forward hook. Collective over the shard group."""
        args, kwargs = self._private._pre_forward(self.module, args, kwargs)
        return args, kwargs

    def post_forward(self, args: Any, output: Any) -> Any:
        """Run the post-forward hook. Not collective."""
        return self._private._post_forward(self.module, args, output)

    # -- backward

    def pre_backward(self, gradient: torch.Tensor) -> torch.Tensor:
        """Run the pre-backward hook, when backward reaches an output of the module. Collective over the shard group."""
        result: torch.Tensor = self._private._pre_backward(gradient)
        return result

    def queue_final(self) -> None:
        """Queue the root's final callback for the end of the running backward."""
        self._private._register_root_post_backward_final_callback()

    def run_final(self) -> None:
        """Run the final callback without a backward. Collective over the mesh."""
        context = self._private._state_ctx
        # Since torch 2.15 a backward decides at its start whether the caller finalizes it.
        if getattr(context, "manual_backward_finalization_active", False) is None:
            context.manual_backward_finalization_active = context.manual_backward_finalization
        self._private._root_post_backward_final_callback()

    def end_inner_backward(self) -> None:
        """Prepare for another backward of the same forward; unsharded parameters stay."""
        self._private._state_ctx.post_backward_final_callback_queued = False
        self._set_all_idle()

    def _set_all_idle(self) -> None:
        for other in self._private._state_ctx.all_states:
            other._training_state = type(other._training_state).IDLE
            for group in _private_groups(other):
                ParameterGroup(group).set_idle()

    def reset_iteration(self) -> None:
        """Reset after a forward or backward that did not end; torch 2.11 has no method for it."""
        if hasattr(self.module, "reset_iter_state"):
            self.module.reset_iter_state()
            return
        context = self._private._state_ctx
        context.iter_forward_root = None
        context.post_backward_final_callback_queued = False
        self._private._comm_ctx.post_forward_order.clear()
        self._set_all_idle()
        for other in context.all_states:
            for group in _private_groups(other):
                ParameterGroup(group).forget_forwards()

    # -- taking it back

    def undo(self, whole: Callable[[Any], nn.Parameter]) -> None:
        """Undo ``fully_shard`` on the module, parameter by parameter. Collective if ``whole`` is.

        Args:
            whole: Maps a shard to the unsharded parameter.
        """
        self.remove_forward_hooks()
        for group in self.groups:
            for handle in group.hook_handles():
                handle.remove()
            group.restore(whole)
        module: Any = self.module
        _module_state_mapping.pop(module, None)
        for key in (STATE_KEY, REGISTRY_KEY):
            module.__dict__.pop(key, None)
        remove_marks(module)
        module.__class__ = unsharded_class(type(module))


def _private_groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    # torch 2.11: at most one.
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def states_in(module: nn.Module) -> Iterator[ModuleState]:
    """Yield the states of all submodules to which ``fully_shard`` was applied."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            yield ModuleState(child)


def is_sharded(module: nn.Module) -> bool:
    """Return whether ``fully_shard`` was applied to any submodule, or to the module itself."""
    return any(isinstance(child, FSDPModule) for child in module.modules())


def unsharded_class(cls: type) -> type:
    """Return a module's class before ``fully_shard``, which creates a subclass of it and ``FSDPModule``."""
    if not issubclass(cls, FSDPModule):
        return cls
    # The last base: before it is FSDPModule, and what fitted_class() puts in front.
    return cls.__bases__[-1]


#: Subclasses by class, for :func:`fitted_class`.
_FITTED: dict[type, type] = {}


@contextmanager
def fitted_class(module: nn.Module) -> Iterator[None]:
    """Context in which ``fully_shard`` can change the class of a module; it refuses some modules otherwise.

    It makes a class of the bases ``FSDPModule`` and the module's class. Python takes it for an existing instance only
    if both add ``__dict__`` to the same base, which is not so for ``class Layer(ABC, nn.Module)``: its first base is
    ``ABC``, which has none. A base in front that adds it as the module's class does makes them alike.

    Args:
        module: The module. Its class is a subclass of its own inside, and that of ``fully_shard`` afterwards.
    """
    cls: type = type(module)
    if _first_with_dict(cls).__base__ is object:
        yield
        return
    if cls not in _FITTED:
        metaclass: Any = type(f"Fitting{type(cls).__name__}", (_Fitting, type(cls)), {})
        _FITTED[cls] = metaclass(f"FSDP{cls.__name__}", (cls,), {})
    module.__class__ = _FITTED[cls]
    try:
        yield
    except BaseException:
        module.__class__ = cls
        raise


def _first_with_dict(cls: type) -> type:
    """Return the class that adds ``__dict__`` to the instances of a class, along its first bases."""
    found, base = cls, cls.__base__
    while base is not None and base.__dictoffset__:
        found, base = base, base.__base__
    return found


class _Fitting(type):
    """Metaclass that puts a base in front of those of the class that ``fully_shard`` makes."""

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        if bases[0] is not FSDPModule:
            return super().__new__(mcs, name, bases, namespace)
        (cls,) = bases[1].__bases__
        front = super().__new__(mcs, "FSDPLayout", (_first_with_dict(cls),), {"__new__": _new_unsharded})
        return super().__new__(mcs, f"FSDP{cls.__name__}", (front, FSDPModule, cls), namespace)


def _new_unsharded(cls: type, *args: Any, **kwargs: Any) -> Any:
    """Make an instance of the class before ``fully_shard``, as ``FSDPModule`` does (slices of containers)."""
    own: Any = unsharded_class(cls)
    made = own.__new__(own, *args, **kwargs)
    made.__init__(*args, **kwargs)
    return made


def make_copyable(module: nn.Module) -> None:
    """Make ``copy.deepcopy`` of a sharded module return an ordinary module; torch refuses to copy it.

    Parameters are copied by their own ``__deepcopy__``.

    Args:
        module: A module to which ``fully_shard`` was applied.
    """
    type(module).__deepcopy__ = _copy_without_sharding  # type: ignore[attr-defined]


def _copy_without_sharding(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    cls: Any = unsharded_class(type(module))
    copied: nn.Module = cls.__new__(cls)
    memo[id(module)] = copied
    # A LightningModule's own state leaves out the Trainer.
    own: Any = getattr(module, "__getstate__", dict)()
    state = own if isinstance(own, dict) and own else module.__dict__
    state = {key: value for key, value in state.items() if key not in (STATE_KEY, REGISTRY_KEY)}
    state = {key: value for key, value in state.items() if not _is_of_engine(value)}
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        hooks = {number: hook for number, hook in state[name].items() if not _is_of_engine(hook)}
        state[name] = type(state[name])(hooks)
    copied.__dict__.update(copy.deepcopy(state, memo))
    return copied


def _is_of_engine(value: Any) -> bool:
    """Return whether a hook or attribute belongs to the engine that gathers and frees the module."""
    while isinstance(value, functools.partial):
        value = value.func
    owner = type(getattr(value, "__self__", value)).__module__
    return owner.startswith(("torch.distributed.fsdp.", "lightning_pardist.engines.fsdp."))


def remove_marks(module: nn.Module) -> None:
    """Remove the attributes by which other libraries recognise modules that every rank has to call equally often."""
    for child in module.modules():
        for mark in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            child.__dict__.pop(mark, None)
