"""Evaluation batches that go through the stages one behind the other, before their turn in the Trainer's loop comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.model_helpers import is_overridden

#: Hooks around a batch, by what the Trainer does.
_HOOKS = {
    RunningStage.SANITY_CHECKING: ("on_validation_batch_start", "on_validation_batch_end"),
    RunningStage.VALIDATING: ("on_validation_batch_start", "on_validation_batch_end"),
    RunningStage.TESTING: ("on_test_batch_start", "on_test_batch_end"),
    RunningStage.PREDICTING: ("on_predict_batch_start", "on_predict_batch_end"),
}
_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
#: Callbacks of these packages look at batches and outputs, and change nothing.
_KNOWN = ("lightning.", "pytorch_lightning.", "lightning_pardist.")


class LookAhead(Iterator[Any]):
    """Stands in for a loop's data fetcher, and shows what comes next.

    Args:
        fetcher: Gives ``(batch, batch_idx, dataloader_idx)``, and tells whether it was the last.

    Attributes:
        current: What was given last.
        position: Its number.
    """

    def __init__(self, fetcher: Any) -> None:
        self._fetcher = fetcher
        self._coming: deque[tuple[Any, bool]] = deque()
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
        """Whether what was given last is the last."""
        return bool(self._fetcher.done) if self._is_last is None else self._is_last

    def __next__(self) -> Any:
        if self._coming:
            self.current, self._is_last = self._coming.popleft()
        elif self._failure is not None:
            raise self._failure
        else:
            self.current = next(self._fetcher)
            self._is_last = bool(self._fetcher.done)
        self.position += 1
        return self.current

    def upcoming(self, most: int) -> list[Any]:
        """The next items of the current loader, read now and given later; an error in reading them waits as well."""
        while len(self._coming) < most and self._failure is None and not self._fetcher.done:
            try:
                item = next(self._fetcher)
            except StopIteration:
                break
            except Exception as error:
                self._failure = error
                break
            self._coming.append((item, bool(self._fetcher.done)))
        found = []
        for item, _ in list(self._coming)[:most]:
            if item[2] != self.current[2]:
                break
            found.append(item)
        return found

    def moved(self, batches: list[Any]) -> None:
        """Give the next items with these batches, which are on the device already."""
        for index, batch in enumerate(batches):
            (_, batch_idx, dataloader_idx), last = self._coming[index]
            self._coming[index] = ((batch, batch_idx, dataloader_idx), last)


def watched_by(trainer: pl.Trainer) -> str:
    """What would see, or could change, that a batch is run before its turn; empty if nothing does.

    Args:
        trainer: In an evaluation.
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
