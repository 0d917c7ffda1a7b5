"""Values before sharding: broadcast, or created unit by unit for modules built on ``meta``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from lightning_pardist.collectives import as_bytes, collective_device
from lightning_pardist.compat.modules import own_buffers, own_parameters
from lightning_pardist.local_tensors import own_part

#: Small tensors are broadcast together, up to this many bytes.
BROADCAST_BYTES = 16 * 2**20

InitFunction = Callable[[nn.Module], None]


def sync_from_first_rank(tensors: Sequence[torch.Tensor], groups: Sequence[dist.ProcessGroup]) -> None:
    """Overwrite tensors with those of the groups' first rank. Collective over ``groups``, one after the other.

    Args:
        tensors: Same shapes, dtypes and kinds of devices on every rank (a module's layers that were made in
            ``configure_model`` are on the device already); not on ``meta``. Of DTensors this rank's parts are meant.
        groups: Process groups of the mesh axes, outermost first.
    """
    with torch.no_grad():
        for group in groups:
            source = dist.get_global_rank(group, 0)
            for bucket in _buckets([own_part(tensor).detach() for tensor in tensors if tensor.numel()]):
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
    """Whether any parameter or buffer has no values yet."""
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def reset_method(module: nn.Module) -> InitFunction | None:
    """What the class runs in its constructor to fill its parameters: ``reset_parameters`` by torch's convention."""
    for name in ("reset_parameters", "_reset_parameters"):
        if callable(getattr(type(module), name, None)):
            return getattr(type(module), name)  # type: ignore[no-any-return]
    return None


def share_random_state(groups: Sequence[dist.ProcessGroup]) -> torch.Tensor:
    """Set the host's random generator to the first rank's state. Collective over ``groups``.

    Returns:
        This rank's own state before, for :func:`restore_random_state`.
    """
    own = torch.get_rng_state()
    shared = own.clone()
    sync_from_first_rank([shared], groups)
    torch.set_rng_state(shared)
    return own if not torch.equal(own, shared) else torch.empty(0, dtype=torch.uint8)


def restore_random_state(own: torch.Tensor) -> None:
    """Give back a state that differed from the first rank's; ranks that agreed go on as one process would."""
    if own.numel():
        torch.set_rng_state(own)


def materialize(
    module: nn.Module,
    shard_now: Callable[[nn.Module], None],
    *,
    is_unit: Callable[[nn.Module], bool],
    init: InitFunction | None = None,
) -> None:
    """Give values to a module on ``meta`` in the order of its construction, sharding each unit when it has all of its.

    Modules are visited children first, as constructors run, and each gets ``reset_parameters`` once: with the same
    random state this is one process' initialization, number by number; of tied parameters the first module's counts.
    Only the unit at hand is whole. Units below a module that initializes its children again (it has a reset method
    and children) wait for it.

    Args:
        module: The root. Not collective by itself; ``shard_now`` may be.
        shard_now: Called for every unit, inner before outer, the root last.
        is_unit: Whether a module is a unit.
        init: Initializes the own parameters of one module in place of its reset method.

    Raises:
        ValueError: If parameters on ``meta`` belong to a module that says nothing about their values.
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
    """Run a module's initialization. Values of tied parameters stay as their first module left them: the second one
    was initialized too, which used up random numbers, before its parameter was replaced."""
    if init is None:
        return
    with torch.no_grad():
        kept = [tensor.clone() for tensor in tied]
        init(module)
        for tensor, values in zip(tied, kept, strict=True):
            tensor.copy_(values)


def _fill_own(module: nn.Module, copies: dict[torch.Tensor, torch.Tensor]) -> bool:
    """Replace the module's own tensors on ``meta`` by empty ones on the host, tied ones by the same."""
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
    """Whether a module above initializes what is below it."""
    return any(
        other is not child and reset_method(other) is not None and any(inner is child for inner in other.modules())
        for other in root.modules()
    )
