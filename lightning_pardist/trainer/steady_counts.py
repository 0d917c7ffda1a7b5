"""Decides whether backward may run before the counts of the other ranks' losses are known.

[Note: backward before the counts are known] The factor on a rank's gradient depends on the counts of all ranks. If all
ranks have had the same counts in two steps, all factors are 1, and backward of the next step runs while its counts are
exchanged. If they turn out to have changed, as on a smaller last batch, ranks whose counts c have not changed have a
common factor F = R c / N (R ranks, N items of all). All ranks multiply the reduced gradients by it, and those whose
counts changed, which know it, have waited before backward and scaled their loss by their own factor over F.
"""

from __future__ import annotations

import torch.distributed as dist

from lightning_pardist.engines.common.loss_balance import Counts, Exchange


class SteadyCounts:
    """Counts that all ranks have had in the latest steps. In each step :meth:`begin`, an exchange, then :meth:`end`.

    Attributes:
        known: The counts of each rank, if they were the same on all ranks in the two latest steps, else None. All ranks
            agree on whether it is None.
    """

    def __init__(self) -> None:
        self.known: Counts | None = None
        self._own: Counts | None = None
        self._group: dist.ProcessGroup | None = None
        self._were_even = False

    def begin(self, counts: Counts | None, group: dist.ProcessGroup, *, allowed: bool) -> bool:
        """Return whether this rank's counts may differ from those of its latest step. Not collective.

        Args:
            counts: This rank's counts; None if its gradient has no single factor, or may not be scaled after backward.
            group: Ranks of the exchange.
            allowed: Whether backward may run before the counts are known; equal on all ranks.
        """
        if group is not self._group or not allowed:
            self.known = self._own = None
        before, self._own, self._group = self._own, counts, group
        return counts is None or counts != before or not self._were_even

    def common_factor(self, exchange: Exchange) -> float:
        """Return the factor of the ranks whose counts have not changed, the same on all ranks. Waits for them."""
        return 1.0 if self.known is None else float(exchange.factor_of(self.known))

    def end(self, exchange: Exchange) -> None:
        """Take note of the counts of all ranks. Waits for them, unless this rank has none."""
        own = self._own
        self.known = own if own is not None and exchange.num_changed() == 0 else None
        self._were_even = own is not None and exchange.is_even(own)
