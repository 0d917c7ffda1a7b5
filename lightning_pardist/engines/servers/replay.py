"""Repeats in one process what workers and servers did, in the order that the servers logged."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pardist.engines.common.update_scope import ScopeSetting, find_scope
from lightning_pardist.engines.servers.share import Share
from lightning_pardist.engines.servers.update_log import Entry, ServerLog, read_logs


def replay(
    folder: str | os.PathLike[str],
    optimizers: Sequence[Optimizer],
    gradients: Callable[[int, int, int], None],
    *,
    update_scope: ScopeSetting = "auto",
) -> None:
    """Repeat a run with asynchronous parameter servers; parameters and state equal its servers' afterwards.

    Args:
        folder: The folder that ``update_log`` was set to, or the folder of one run in it, with all servers' files.
        optimizers: As the module configured them, over parameters with the values at the start of the run.
        gradients: Called with a worker, the number of its turn (from 1, over all optimizers) and the index of the
            optimizer; sets ``.grad`` to the gradients of the worker's batch of that turn, at the current parameters.
        update_scope: As in the run.

    Raises:
        FileNotFoundError: If there is no log.
        RuntimeError: If the logs are inconsistent, because a file is missing or cut off.
    """
    _Replay(read_logs(folder), optimizers, gradients, update_scope).run()


class _Replay:
    def __init__(
        self,
        logs: Sequence[ServerLog],
        optimizers: Sequence[Optimizer],
        gradients: Callable[[int, int, int], None],
        setting: ScopeSetting,
    ) -> None:
        self._logs, self._gradients = logs, gradients
        self._params = [[param for group in one.param_groups for param in group["params"]] for one in optimizers]
        self._owners = logs[0].owners
        found = [find_scope(one, form="flat", setting=setting) for one in optimizers]
        self._shares = {
            log.server: [
                Share(one, [owner == log.server for owner in owners], scope)
                for one, owners, scope in zip(optimizers, self._owners, found, strict=True)
            ]
            for log in logs
        }
        #: Each worker's copy of each parameter.
        self._copies = {
            worker: [[param.detach().clone() for param in params] for params in self._params]
            for worker in logs[0].workers
        }
        #: Gradients of workers' current turns.
        self._made: dict[tuple[int, int], list[Tensor | None]] = {}
        #: Number of pulls in each worker's turn that are still to be repeated before its next turn.
        self._pulls = {
            (worker, turn): sum(
                entry.did == "pull" and (entry.worker, entry.turn) == (worker, turn)
                for log in logs
                for entry in log.entries
            )
            for worker, turn in {(entry.worker, entry.turn) for log in logs for entry in log.entries}
        }

    @torch.no_grad()
    def run(self) -> None:
        """Repeat the entries of all logs, each log in its order."""
        at = dict.fromkeys(self._shares, 0)
        while True:
            moved = False
            for log in self._logs:
                while at[log.server] < len(log.entries) and self._do(log.server, log.entries[at[log.server]]):
                    at[log.server] += 1
                    moved = True
            if not moved:
                break
        if any(at[log.server] < len(log.entries) for log in self._logs):
            raise RuntimeError("The logs of the servers do not match: one of them is truncated, or from another run.")
        for shares in self._shares.values():
            for share in shares:
                for param, original in zip(share.params, share.originals, strict=True):
                    original.copy_(param)
                share.publish()

    def _do(self, server: int, entry: Entry) -> bool:
        """Repeat an entry, unless it depends on one of another server that is still to come; return whether it did."""
        if entry.did == "lost":
            return True
        share, turn = self._shares[server][entry.optimizer], (entry.worker, entry.turn)
        if entry.did == "pull":
            self._pull(server, entry, share)
            return True
        before = self._pulls.get((entry.worker, entry.turn - 1), 0)
        if before:
            return False
        if entry.did == "update":
            if turn not in self._made:
                self._made[turn] = self._compute(entry)
            owners = self._owners[entry.optimizer]
            grads = [grad for grad, owner in zip(self._made[turn], owners, strict=True) if owner == server]
            share.update(grads, entry.numbers)
        return True

    def _pull(self, server: int, entry: Entry, share: Share) -> None:
        copies = self._copies[entry.worker][entry.optimizer]
        owners = self._owners[entry.optimizer]
        mine = [copy for copy, owner in zip(copies, owners, strict=True) if owner == server]
        for copy, param in zip(mine, share.params, strict=True):
            copy.copy_(param)
        self._pulls[entry.worker, entry.turn] -= 1
        self._made.pop((entry.worker, entry.turn - 1), None)

    def _compute(self, entry: Entry) -> list[Tensor | None]:
        for params, copies in zip(self._params, self._copies[entry.worker], strict=True):
            for param, copy in zip(params, copies, strict=True):
                param.copy_(copy)
                param.grad = None
        with torch.enable_grad():
            self._gradients(entry.worker, entry.turn, entry.optimizer)
        grads = [param.grad for param in self._params[entry.optimizer]]
        return [None if grad is None else grad.detach().clone() for grad in grads]
