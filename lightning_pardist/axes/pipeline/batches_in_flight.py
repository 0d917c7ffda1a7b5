"""Look-ahead in evaluation: several batches go through the stages back to back, ahead of the Trainer's loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.model_helpers import is_overridden

#: Hooks around a batch, by running stage.
_HOOKS = {
    RunningStage.SANITY_CHECKING: ("on_validation_batch_start", "on_validation_batch_end"),
    RunningStage.VALIDATING: ("on_validation_batch_start", "on_validation_batch_end"),
    RunningStage.TESTING: ("on_test_batch_start", "on_test_batch_end"),
    RunningStage.PREDICTING: ("on_predict_batch_start", "on_predict_batch_end"),
}
_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
#: Hooks of callbacks in these packages only read batches and outputs.
_KNOWN = ("lightning.", "pytorch_lightning.", "lightning_pardist.")


class BatchPrefetcher(Iterator[Any]):
    """Replacement for a loop's data fetcher that can read batches ahead.

    Args:
        fetcher: Data fetcher that yields ``(batch, batch_idx, dataloader_idx)``, with the attribute ``done``.

    Attributes:
        current: The last item returned.
        position: Its index.
    """

    def __init__(self, fetcher: Any) -> None:
        self._fetcher = fetcher
        self._read_ahead: deque[tuple[Any, bool]] = deque()
        self._failure: Exception | None = None
        self._is_last: bool | None = None
        self.current: Any = None
        self.position = -1

    def __getattr__(self, name: str) -> Any:
        if name == "_fetcher":
            raise AttributeError(name)
        return getattr(self._fetcher, name)

    @property
    def done(self) -> bool:
        """Whether the last item returned was the final one."""
        return bool(self._fetcher.done) if self._is_last is None else self._is_last

    def __next__(self) -> Any:
        if self._read_ahead:
            self.current, self._is_last = self._read_ahead.popleft()
        elif self._failure is not None:
            raise self._failure
        else:
            self.current = next(self._fetcher)
            self._is_last = bool(self._fetcher.done)
        self.position += 1
        return self.current

    def upcoming(self, most: int) -> list[Any]:
        """Return up to ``most`` next items of the current loader without consuming them.

        An exception in reading them is raised later, by :meth:`__next__`.
        """
        while len(self._read_ahead) < most and self._failure is None and not self._fetcher.done:
            try:
                item = next(self._fetcher)
            except StopIteration:
                break
            except Exception as error:
                self._failure = error
                break
            self._read_ahead.append((item, bool(self._fetcher.done)))
        found = []
        for item, _ in list(self._read_ahead)[:most]:
            if item[2] != self.current[2]:
                break
            found.append(item)
        return found

    def replace_batches(self, batches: list[Any]) -> None:
        """Replace the batches of the next items by these, which are already on the device."""
        for index, batch in enumerate(batches):
            (_, batch_idx, dataloader_idx), last = self._read_ahead[index]
            self._read_ahead[index] = ((batch, batch_idx, dataloader_idx), last)


def find_interfering_hook(trainer: pl.Trainer) -> str:
    """Return the name of a hook that could observe, or affect, batches that run ahead of the loop; empty if none.

    Args:
        trainer: The Trainer, in an evaluation.
    """
    module, stage = trainer.lightning_module, trainer.state.stage
    hooks = () if stage is None else _HOOKS.get(stage, ())
    datamodule: Any = getattr(trainer, "datamodule", None)
    for name in (*hooks, *_TRANSFERS):
        if is_overridden(name, module):
            return f"{type(module).__name__}.{name}"
        if name in _TRANSFERS and datamodule is not None and is_overridden(name, datamodule):
            return f"{type(datamodule).__name__}.{name}"
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for name in hooks:
            home = getattr(getattr(callback, name), "__module__", "") or ""
            if not f"{home}.".startswith(_KNOWN):
                return f"{type(callback).__name__}.{name}"
    return ""
