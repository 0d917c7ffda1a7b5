"""Keeps the order of collectives consistent when ranks' control flow diverges."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from lightning_pardist.engines.common.collective_record import CollectiveRecord

#: Kinds of collectives.
GATHER, REDUCE = 0, 1
_DONE = -1
_MASK = (1 << 62) - 1


class CollectiveSequencer:
    """Keeps collectives in one order when ranks need different units at the same time.

    ``fully_shard`` assumes that all ranks gather the same units in the same order. If they do not (a rank without a
    batch, a data-dependent branch), a rank would hang, or read another unit's bytes as its own. While ``active``, ranks
    exchange the index of the unit that each needs before every collective, in one small all-gather; then every rank
    takes part in all collectives that any rank needs. A rank that needs nothing more waits in :meth:`wait_for_all`,
    where it joins the others' collectives. When not active, the order is only recorded, and compared at the end of
    backward.

    Args:
        group: gloo group of all ranks that shard or replicate the same parameters.
        data_group: Group over which gradients of unsharded parameters are averaged, on the parameters' device.
    """

    def __init__(self, group: dist.ProcessGroup, data_group: dist.ProcessGroup) -> None:
        self.group = group
        self.data_group = data_group
        self.size = group.size()
        self.active = False
        self.rounds = 0
        self.sequence = 0
        self.diverged = False
        self.join: Callable[[int, int], None] = _join_nothing
        #: Returns the name of the unit with this index.
        self.name_of: Callable[[int], str] = str
        self._record = CollectiveRecord(dist.get_process_group_ranks(group), self._describe)
        self._answering = False
        self._later: list[int] = []

    def before(self, kind: int, index: int) -> None:
        """Called right before this rank gathers or reduces a unit. Collective while active."""
        if self._answering:
            return
        if self.active and self.size > 1:
            self._round(2 * index + kind)
        else:
            self.sequence = (self.sequence * 1000003 + 2 * index + kind + 1) & _MASK
            self._record.add(2 * index + kind)

    def _describe(self, code: int) -> str:
        index, kind = divmod(code, 2)
        return f"{'gathers' if kind == GATHER else 'reduces the gradients of'} {self.name_of(index)}"

    def wait_for_all(self) -> None:
        """Join the other ranks' collectives until no rank needs any more. Collective over the group."""
        if self.size > 1:
            while self._round(_DONE):
                pass

    def _round(self, mine: int) -> bool:
        """Run one exchange; return whether any rank needed a collective."""
        self.rounds += 1
        told = torch.empty(self.size, dtype=torch.int64)
        _gather_ints(told, torch.tensor([mine], dtype=torch.int64), self.group)
        wanted = sorted(set(told.tolist()) - {_DONE})
        self.diverged = self.diverged or len(set(told.tolist())) > 1
        self._later = [code for code in wanted if code > mine >= 0]
        self._answer([code for code in wanted if mine < 0 or code < mine])
        return bool(wanted)

    def after(self) -> None:
        """Called right after this rank's own collective: joins those that come later in the common order."""
        if self._answering:
            # Called from a collective joined for another rank; this rank's own is still to come.
            return
        later, self._later = self._later, []
        self._answer(later)

    def _answer(self, codes: list[int]) -> None:
        self._answering = True
        try:
            for code in codes:
                self.join(code % 2, code // 2)
        finally:
            self._answering = False

    def compare(self, flags: torch.Tensor) -> torch.Tensor:
        """Combine flags over ranks, and check that all ranks issued the same collectives. Collective.

        Args:
            flags: int64, zero or one, shape ``[n]``.

        Returns:
            One where any rank's flag is one, shape ``[n]``.

        Raises:
            RuntimeError: If ranks gathered or reduced different units since the last comparison.
        """
        sequence, self.sequence = self.sequence, 0
        sent = torch.cat([flags, torch.tensor([sequence, -sequence])])
        dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=self.group)
        if int(sent[-2]) != -int(sent[-1]):
            raise RuntimeError(
                "Ranks used different units in this step (a branch that depends on the data, or random layer drop),"
                " so they exchanged the wrong parameters. Set allow_divergent_forward=True, with which"
                " every rank joins the others' collectives, or make the branch the same on all ranks."
            )
        return sent[:-2]

    def mean_(self, flat: torch.Tensor) -> None:
        """Average a tensor over the data ranks in place. Collective."""
        if self.size > 1:
            dist.all_reduce(flat, group=self.data_group)
            flat.div_(self.size)


def _gather_ints(out: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_gather(list(out.split(1)), mine, group=group)


def _join_nothing(kind: int, index: int) -> None:
    raise RuntimeError("No engine answers this sequencer.")
