"""Initialize parameter values before sharding: by broadcast, or unit by unit for modules built on ``meta``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from lightning_pardist.collectives import as_bytes, collective_device
from lightning_pardist.compat.modules import own_buffers, own_parameters
from lightning_pardist.local_tensors import distinct_elements, is_dense, local_shard

#: Small tensors are broadcast together, up to this many bytes.
BROADCAST_BYTES = 16 * 2**20

InitFunction = Callable[[nn.Module], None]


def sync_from_first_rank(tensors: Sequence[torch.Tensor], groups: Sequence[dist.ProcessGroup]) -> None:
    """Overwrite tensors with those of the groups' first rank. Collective over ``groups``, one after the other.

    Args:
        tensors: Tensors of the same shapes, dtypes and device types on every rank (layers created in
            ``configure_model`` are on the device already); not on ``meta``. For DTensors, the local parts are sent.
        groups: Process groups of the mesh axes, outermost first.

    Sparse tensors are skipped: strategies verify that they are equal.
    """
    tensors = [tensor for tensor in tensors if is_dense(tensor)]
    with torch.no_grad():
        for group in groups:
            source = dist.get_global_rank(group, 0)
            parts = [distinct_elements(local_shard(tensor).detach()) for tensor in tensors if tensor.numel()]
            for bucket in _buckets(parts):
                device = collective_device(group, bucket[0].device)
                if len(bucket) == 1 and bucket[0].is_contiguous() and bucket[0].device == device:
                    dist.broadcast(as_bytes(bucket[0]), source, group=group)
                    continue
                flat = torch.cat([tensor.reshape(-1) for tensor in bucket]).to(device)
                dist.broadcast(as_bytes(flat), source, group=group)
                for tensor, values in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                    tensor.copy_(values.view_as(tensor))


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    waiting: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        alike = not waiting or (waiting[0].dtype, waiting[0].device) == (tensor.dtype, tensor.device)
        if waiting and (size + nbytes > BROADCAST_BYTES or not alike):
            yield waiting
            waiting, size = [], 0
        waiting.append(tensor)
        size += nbytes
    if waiting:
        yield waiting


def on_meta(module: nn.Module) -> bool:
    """Return whether any parameter or buffer of a module is on ``meta``."""
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def reset_method(module: nn.Module) -> InitFunction | None:
    """Return the method by which a module's class initializes its parameters: ``reset_parameters`` by convention."""
    for name in ("reset_parameters", "_reset_parameters"):
        if callable(getattr(type(module), name, None)):
            return getattr(type(module), name)  # type: ignore[no-any-return]
    return None


def share_random_state(groups: Sequence[dist.ProcessGroup]) -> torch.Tensor:
    """Set the host's random number generator to the first rank's state. Collective over ``groups``.

    Returns:
        This rank's previous state, empty if it equals the first rank's; for :func:`restore_random_state`.
    """
    own = torch.get_rng_state()
    shared = own.clone()
    sync_from_first_rank([shared], groups)
    torch.set_rng_state(shared)
    return own if not torch.equal(own, shared) else torch.empty(0, dtype=torch.uint8)


def restore_random_state(own: torch.Tensor) -> None:
    """Restore a state that differed from the first rank's; otherwise the generator continues as on a single process."""
    if own.numel():
        torch.set_rng_state(own)


def materialize(
    module: nn.Module,
    shard_now: Callable[[nn.Module], None],
    *,
    is_unit: Callable[[nn.Module], bool],
    init: InitFunction | None = None,
) -> None:
    """Initialize a module on ``meta`` in the order of its construction, and shard each unit once it is initialized.

    Modules are visited children first, as constructors run, and ``reset_parameters`` is called once for each. With the
    same random state this gives exactly the values of a single process; tied parameters keep the values of their first
    module. Only the current unit is materialized unsharded. Units inside a module that initializes its children again
    (one with a reset method and children) are sharded after that module.

    Args:
        module: The root module. Not collective by itself; ``shard_now`` may be.
        shard_now: Called for every unit, inner before outer, the root last.
        is_unit: Returns whether a module is a unit.
        init: Initializes the own parameters of one module in place of its reset method.

    Raises:
        ValueError: If parameters or buffers on ``meta`` belong to a module without an initialization method.
    """
    _refuse_values_unknown(module, init)
    done: set[nn.Module] = set()
    copies: dict[torch.Tensor, torch.Tensor] = {}
    waiting: list[nn.Module] = []

    def visit(child: nn.Module, held: bool) -> None:
        if child in done:
            return
        done.add(child)
        reset = reset_method(child)
        holds = reset is not None and any(True for _ in child.children())
        for grandchild in child.children():
            visit(grandchild, held or holds)
        tied = [copies[p] for p in child.parameters(recurse=False) if p in copies]
        filled = _fill_own(child, copies)
        created = {id(parameter) for parameter in copies.values()}
        if filled or (holds and any(id(parameter) in created for parameter in child.parameters())):
            _initialize(child, init or reset, tied)
        if is_unit(child):
            waiting.append(child)
        if not held:
            for unit in waiting:
                shard_now(unit)
            waiting.clear()

    visit(module, False)


def _initialize(module: nn.Module, init: InitFunction | None, tied: Sequence[torch.Tensor]) -> None:
    """Run a module's initialization, and restore tied parameters to the values set by their first module.

    The second module is initialized too, because its constructor draws random numbers before its parameter is replaced.
    """
    if init is None:
        return
    with torch.no_grad():
        kept = [tensor.clone() for tensor in tied]
        init(module)
        for tensor, values in zip(tied, kept, strict=True):
            tensor.copy_(values)


def _fill_own(module: nn.Module, copies: dict[torch.Tensor, torch.Tensor]) -> bool:
    """Replace the module's own ``meta`` tensors by host tensors, uninitialized for parameters and zero for buffers.

    Tied tensors are replaced by the same tensor. Returns whether any was replaced.
    """
    filled = False
    for name, parameter in list(own_parameters(module).items()):
        if parameter is not None and parameter.is_meta:
            if parameter not in copies:
                empty = torch.empty_like(parameter, device="cpu")
                copies[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            own_parameters(module)[name] = copies[parameter]  # type: ignore[assignment]
            filled = True
    for name, buffer in list(own_buffers(module).items()):
        if buffer is not None and buffer.is_meta:
            if buffer not in copies:
                copies[buffer] = torch.zeros_like(buffer, device="cpu")
            own_buffers(module)[name] = copies[buffer]
            filled = True
    return filled


def _refuse_values_unknown(module: nn.Module, init: InitFunction | None) -> None:
    if init is not None:
        return
    unknown = []
    for path, child in module.named_modules():
        own = [*child.named_parameters(recurse=False), *child.named_buffers(recurse=False)]
        if reset_method(child) is None and not _reset_by_parent(module, child):
            unknown += [f"{path}.{name}" if path else name for name, tensor in own if tensor.is_meta]
    if unknown:
        shown = ", ".join(unknown[:5]) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
        raise ValueError(
            f"{shown} were built on the meta device and their modules have no reset_parameters() to give them values."
            " Define it, pass init=, or build the module with values."
        )


def _reset_by_parent(root: nn.Module, child: nn.Module) -> bool:
    """Return whether an ancestor of a module has a reset method."""
    return any(
        other is not child and reset_method(other) is not None and any(inner is child for inner in other.modules())
        for other in root.modules()
    )
