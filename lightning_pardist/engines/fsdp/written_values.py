"""User writes to gathered parameters: detected, copied to the shards, and made the same on all ranks.

A unit's unsharded parameters exist for a call of its module. Whatever is written before they are freed (by a layer that
initialises its own in ``forward`` from the first batch, such as ActNorm, or a hook that clamps them) is copied to the
shards at that point. Ranks may write different values, computed from their own samples; then the first rank's are
taken, as in DDP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pardist.compat.fsdp2 import ShardedParameter
from lightning_pardist.compat.parameter_data import count_data_accesses, data_accesses_of
from lightning_pardist.compat.tensors import foreach_copy_, is_only_holder, version_of
from lightning_pardist.engines.common.fingerprint import FINGERPRINT_SIZE, fingerprint
from lightning_pardist.engines.common.settable_parameter import changes_of
from lightning_pardist.engines.ddp.set_parameters import cast_parameter
from lightning_pardist.engines.fsdp.collective_sequencer import CollectiveSequencer
from lightning_pardist.local_tensors import local_shard, set_local_shard, shard_like, tensor_shard_shape

#: Number of elements sampled for the fingerprint of a parameter that ranks have set to the same values before.
_SAMPLED = 1 << 16


class GatheredParameter:
    """An unsharded parameter, with a record of its values at the time of its gather.

    Args:
        parameter: The sharded parameter, gathered at least once before.
        name: Its name in the sharded module.

    Attributes:
        own: Whole values that this rank has written, until they are compared across ranks; None if it has written none.
        old: This rank's shard before these writes.
        touched: Whether a write was seen that leaves no trace.
        escaped: Whether ``.data`` was accessed while gathered: its holder can write at any time without a trace.
    """

    def __init__(self, parameter: ShardedParameter, name: str) -> None:
        self.parameter = parameter
        self.name = name
        whole = parameter.unsharded
        assert whole is not None  # by the contract above
        self.whole: nn.Parameter = whole
        # Where gathers write it. Not detach(), which shares the version counter that backward checks.
        self.home = local_shard(whole).data
        self.own: Tensor | None = None
        self.old: Tensor | None = None
        self.touched = self.escaped = False
        #: Memory that the user assigned last (``p.data = ...``), which the step's autograd graph may have saved.
        self.reassigned_memory: Tensor | None = None
        self._data_accesses = count_data_accesses(whole)
        self._version = 0
        self._before: Tensor | None = None
        self._view: Tensor | None = None
        self._written_at: tuple[int, ...] = ()

    @staticmethod
    def note_all(gathered: Sequence[GatheredParameter], *, keep: bool) -> None:
        """Record the values of parameters that have just been gathered.

        Args:
            gathered: Those of one group.
            keep: Whether to copy this rank's parts rather than rely on the shards: the parameters stay gathered for
                long, or are rounded.
        """
        parts: list[Tensor] = []
        copies: list[Tensor] = []
        for one in gathered:
            if one.own is not None:
                one._restore_own_writes()
            if keep:
                part = one._home_part()
                if one._before is None:
                    one._before = torch.empty_like(part, memory_format=torch.contiguous_format)
                parts.append(part)
                copies.append(one._before)
            else:
                one._before = None
            one._note_marks()
        if parts:
            # One kernel for many parameters, to reduce launch overhead.
            foreach_copy_(copies, parts)

    def _note_marks(self) -> None:
        self.escaped = self.escaped or self._data_accesses != data_accesses_of(self.whole)
        self.touched = False
        self._version = version_of(self.whole)
        self._data_accesses = data_accesses_of(self.whole)

    def _home_part(self) -> Tensor:
        """Return this rank's part of the memory that gathers write to; a view, created once."""
        if self._view is None:
            part = shard_like(self.home, self.parameter.sharded)
            if part.untyped_storage().data_ptr() != self.home.untyped_storage().data_ptr():
                return part
            self._view = part
        return self._view

    def _part(self) -> Tensor:
        return shard_like(self.whole.detach(), self.parameter.sharded)

    def _restore_own_writes(self) -> None:
        """In a later gather of the same step, restore this rank's writes, unless the shards were changed since."""
        if self._written_at == changes_of((self.parameter.sharded,)) and self.own is not None:
            self.home.copy_(self.own)
        else:
            self.own = None

    @property
    def may_be_changed(self) -> bool:
        """Whether a write left a trace. Cheap."""
        return (
            self.touched
            or self._version != version_of(self.whole)
            or self._data_accesses != data_accesses_of(self.whole)
            or local_shard(self.whole).data_ptr() != self.home.data_ptr()
        )

    @torch.no_grad()
    def keep_changes(self) -> bool:
        """Write new values to the shard, and assigned ones (``p.data = ...``) to the memory that gathers write to.

        Returns:
            Whether a write left a trace; the change may be in other ranks' parts only.

        Raises:
            RuntimeError: If the user assigned values of another shape or dtype.
        """
        part, shard, traced = local_shard(self.whole), self.parameter.sharded, self.may_be_changed
        if part.dtype != self.home.dtype:
            raise RuntimeError(cast_parameter(self.name, self.home.dtype, part.dtype))
        if part.shape != self.home.shape:
            raise RuntimeError(
                f"{self.name} of shape {tuple(self.home.shape)} was given values of shape {tuple(part.shape)}."
                " Ranks hold parts of it, whose shapes are fixed: give it that shape before fit, or use pardist_zero2."
            )
        local, now = shard.to_local(), self._part()
        before = local.to(now) if self._before is None else self._before
        same = now == before
        # Without a trace, do not synchronise with the device to find out whether anything changed.
        if traced and self.old is None and not bool(same.all()):
            self.old = local.clone()
        local.copy_(torch.where(same, local.to(now.device), now.to(local.dtype)))
        if self._before is not None:
            self._before.copy_(now)
        if part.numel() and part.data_ptr() != self.home.data_ptr():
            # .data has its own version counter, so copying into it does not invalidate what the graph has saved.
            self.reassigned_memory = part.data
            self.home.copy_(part)
            set_local_shard(self.whole, self.home)
        self._note_marks()
        return traced

    @torch.no_grad()
    def follow(self) -> None:
        """Before a backward, copy current values into memory assigned by the user, which its graph may have saved."""
        if self.reassigned_memory is not None and is_only_holder(self.reassigned_memory):
            self.reassigned_memory = None
        if self.reassigned_memory is not None:
            self.reassigned_memory.copy_(self.home)

    def keep_own(self) -> None:
        """Save the whole values as those that this rank has written."""
        self.own = local_shard(self.whole).detach().clone()
        self._written_at = changes_of((self.parameter.sharded,))

    @torch.no_grad()
    def adopt(self, values: Tensor, *, gathered: bool) -> None:
        """Take values that are the same on all ranks.

        Args:
            values: This tensor rank's whole values.
            gathered: Whether the parameter is gathered now.
        """
        write_to_shard(self.parameter.sharded, values)
        if gathered:
            self.home.copy_(values)
            if self._before is not None:
                self._before.copy_(self._part())
            self._note_marks()

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the shard's values from before this rank's writes. The parameter is not gathered now."""
        if self.old is not None:
            self.parameter.sharded.to_local().copy_(self.old)

    def forget(self) -> None:
        """Forget this rank's writes, which have been compared across ranks."""
        self.own = self.old = None


def write_to_shard(shard: Any, values: Tensor) -> None:
    """Write this rank's part of whole values to a shard, except where they equal its own values up to rounding."""
    local, new = shard.to_local(), shard_like(values, shard)
    own = local.to(new.device)
    local.copy_(torch.where(new == own.to(new.dtype), own, new.to(own)))


@dataclass(frozen=True)
class Member:
    """A parameter in the comparison across ranks.

    Attributes:
        parameter: The sharded parameter.
        written: The unsharded one on this rank; None if it was never gathered.
        gathered: Whether it is gathered now.
    """

    parameter: ShardedParameter
    written: GatheredParameter | None
    gathered: bool


class WrittenValues:
    """Parameters that this rank has written to since the last comparison across ranks.

    Args:
        sequencer: Sequencer of the ranks that train together.
        names: Names of all parameters by their positions, which are the same on all ranks.
    """

    def __init__(self, sequencer: CollectiveSequencer, names: Mapping[int, str]) -> None:
        self._sequencer = sequencer
        self._names = names
        self._written: dict[int, tuple[GatheredParameter, Tensor]] = {}
        #: Positions of parameters that ranks have set to the same values; whole copies of them are no longer kept.
        self._settled: set[int] = set()

    def note(self, position: int, written: GatheredParameter) -> None:
        """Record that this rank has written to a parameter, which is gathered now. Not collective."""
        if self._sequencer.size == 1:
            return
        settled = position in self._settled
        if settled:
            written.forget()
        else:
            written.keep_own()
        values = local_shard(written.whole).detach()
        self._written[position] = written, fingerprint(values, at_most=_SAMPLED if settled else None)

    def flags(self, size: int) -> Tensor:
        """Return one flag per position, one where this rank has written, shape ``[size]``."""
        flags = torch.zeros(size, dtype=torch.int64)
        flags[list(self._written)] = 1
        return flags

    def drop_copies(self) -> None:
        """Drop copies of this rank's writes before an optimizer step, which makes them stale. Not collective."""
        for written, _ in self._written.values():
            written.forget()

    def forget(self) -> None:
        """Forget all recorded writes. Not collective."""
        for written, _ in self._written.values():
            written.forget()
        self._written.clear()

    def agree(self, flags: Tensor, members: Callable[[int], Member]) -> list[str]:
        """Take the first rank's values of parameters that ranks have set to different ones. Collective over the mesh.

        Args:
            flags: One where any rank has written, the same on all ranks.
            members: Returns the parameter at a position.

        Returns:
            Names of the parameters that differed, the same on all ranks.
        """
        positions = flags.nonzero().flatten().tolist()
        if not positions:
            return []
        found = [members(position) for position in positions]
        wrote, has_values, prints = self._compare(positions, found)
        differing = []
        for index, (position, member) in enumerate(zip(positions, found, strict=True)):
            if bool(wrote[:, index].all()) and bool((prints[:, index] == prints[0, index]).all()):
                self._settled.add(position)
                continue
            # Ranks keep no copies of settled parameters: parts stay as they are now, later writes take the first's.
            self._settled.discard(position)
            differing.append(self._names[position])
            if bool(has_values[0, index]):
                self._take_first(member)
            elif not bool(wrote[0, index]) and member.written is not None:
                member.written.restore()
        self.forget()
        return differing

    def _compare(self, positions: list[int], members: list[Member]) -> tuple[Tensor, Tensor, Tensor]:
        """Gather flags for written and available whole values, and fingerprints, per rank and parameter. Collective.

        Returns:
            Tensors of shapes ``[ranks, parameters]`` twice, and ``[ranks, parameters, 3]``.
        """
        table = torch.zeros(len(positions), 2 + FINGERPRINT_SIZE, dtype=torch.float64)
        for row, position, member in zip(table, positions, members, strict=True):
            row[1] = float(member.gathered or (member.written is not None and member.written.own is not None))
            if position in self._written:
                row[0] = 1.0
                row[2:] = self._written[position][1]
        everyone = [torch.empty_like(table) for _ in range(self._sequencer.size)]
        dist.all_gather(everyone, table, group=self._sequencer.group)
        all_ranks = torch.stack(everyone).nan_to_num()
        return all_ranks[:, :, 0] > 0, all_ranks[:, :, 1] > 0, all_ranks[:, :, 2:]

    def _take_first(self, member: Member) -> None:
        """Broadcast the first rank's values of a parameter and take them. Collective over the data ranks."""
        shard, written = member.parameter.sharded, member.written
        values = None if written is None else written.own
        if values is None:
            if written is not None and member.gathered:
                values = written.home.clone()
            else:
                shape, dtype = tensor_shard_shape(shard), member.parameter.gather_dtype
                values = torch.empty(shape, dtype=dtype, device=local_shard(shard).device)
        dist.broadcast(values, group_src=0, group=self._sequencer.data_group)
        if written is None:
            write_to_shard(shard, values)
        else:
            written.adopt(values, gathered=member.gathered)
