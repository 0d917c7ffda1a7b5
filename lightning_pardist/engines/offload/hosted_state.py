"""State of optimizers that update whole tensors, kept in host memory or files between steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pardist.engines.offload.copies import HostCopies
from lightning_pardist.engines.offload.mapped_files import SMALLEST_BYTES, StateFile
from lightning_pardist.engines.offload.offload_settings import Offload


class HostedState:
    """Moves state to where updates are computed, and back to where it is kept.

    The optimizer determines the structure of a tensor's state: tensors of any shape, also in lists and dicts (Shampoo's
    factors). Tensors with dims are kept on the host or in a file; scalars stay where they are. Memory in which state
    was kept before is reused for tensors that fit it. Tensor subclasses (quantised state) allocate their own memory:
    they are moved by their class, and not to files.

    Args:
        device: Device on which updates are computed.
        store: File in which state is kept; in host memory if None, pinned for copies from and to a device.
        window_bytes: With a store, bytes of state to fetch at a time; the state of one tensor is always fetched whole.
    """

    def __init__(
        self, device: torch.device, *, store: StateFile | None = None, window_bytes: int | None = None
    ) -> None:
        self.device = device
        self.window_bytes = window_bytes if store is not None else None
        self._store = store
        self._copies = HostCopies(device)
        #: Owner of the state -> all memory that was ever allocated to keep it.
        self._homes: dict[Any, list[Tensor]] = {}
        self._pending_copies: list[torch.Event] = []

    @classmethod
    def of(cls, offload: Offload | None, device: torch.device, store: StateFile | None) -> HostedState | None:
        """Create the object that a setting requires; None if there is no offload, or state is on the host anyway."""
        if offload is None or (store is None and device.type == "cpu"):
            return None
        return cls(device, store=store, window_bytes=int(offload.window_mb * 2**20))

    @property
    def in_files(self) -> bool:
        """Whether state is kept in a file."""
        return self._store is not None

    @staticmethod
    def num_bytes(entry: dict[str, Any]) -> int:
        """Return the bytes of a tensor's state, as it is kept."""
        return sum(value.numel() * value.element_size() for value in _tensors(entry) if value.dim())

    def fetch(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Return state on the device where updates are computed; state that is kept there is returned itself.

        Later work on the device's current stream runs after the copies.
        """
        arriving: list[torch.Event] = []

        def bring(value: Tensor) -> Tensor:
            if self._store is not None:
                self._store.prefetch(value)
            if value.device == self.device or not value.dim():
                return value
            if _is_subclass(value):
                return value.to(self.device)
            there = torch.empty_like(value, device=self.device)
            event = self._copies.start(value, there)
            if event is not None:
                arriving.append(event)
            return there

        found: dict[str, Any] = _mapped(entry, bring)
        for event in arriving:
            event.wait()
        return found

    def keep(self, owner: Any, entry: dict[str, Any]) -> dict[str, Any]:
        """Keep a tensor's state after an update, or after a checkpoint was loaded.

        Args:
            owner: Key of the tensor that the state belongs to.
            entry: The state.

        Returns:
            The same state, as it is kept; may be read on the host only after :meth:`wait`.

        Raises:
            RuntimeError: If the disk has no room for it.
            TypeError: If a tensor in the state cannot be kept in a file.
        """
        # State may have been rearranged: what was kept under one key may be under another now.
        used = [value for value in _tensors(entry) if value.device.type == "cpu" and not _is_subclass(value)]
        free = [home for home in self._homes.get(owner, ()) if not any(_is_view_within(value, home) for value in used)]

        def put(value: Tensor) -> Tensor:
            if self._is_in_place(value):
                self._evict(value)
                return value
            if _is_subclass(value):
                if self._store is not None:
                    raise TypeError(
                        f"offload to a folder keeps plain tensors, and the optimizer's state has a"
                        f" {type(value).__name__}: use offload='cpu'."
                    )
                return value.to("cpu")
            home = next((each for each in free if _fits(each, value)), None)
            if home is None:
                home = self._host_buffer(value)
                self._homes.setdefault(owner, []).append(home)
            else:
                free[:] = [each for each in free if each is not home]
            kept = home.view(value.shape)
            event = self._copies.start(value.detach(), kept)
            if event is not None:
                self._pending_copies.append(event)
            self._evict(kept)
            return kept

        found: dict[str, Any] = _mapped(entry, put)
        return found

    def evict(self, entry: dict[str, Any]) -> None:
        """Release pages of state that was read elsewhere (by a checkpoint)."""
        for value in _tensors(entry):
            self._evict(value)

    def wait(self) -> None:
        """Wait until copies of the state to the host have finished, so that the host may read it."""
        for event in self._pending_copies:
            event.synchronize()
        self._pending_copies.clear()

    def _is_in_place(self, value: Tensor) -> bool:
        if not value.dim():
            return True
        if value.device.type != "cpu":
            return False
        if self._store is None:
            # Copies from unpinned memory would make the device wait.
            return self.device.type == "cpu" or _is_subclass(value) or value.is_pinned()
        return not _is_subclass(value) and (
            self._store.holds(value) or value.numel() * value.element_size() < SMALLEST_BYTES
        )

    def _host_buffer(self, value: Tensor) -> Tensor:
        if self._store is None:
            return self._copies.buffer(value.numel(), value.dtype)
        return self._store.zeros(value.numel(), value.dtype)

    def _evict(self, value: Tensor) -> None:
        if self._store is not None:
            self._store.evict(value)


def _is_subclass(value: Tensor) -> bool:
    return type(value) not in (Tensor, nn.Parameter)


def _fits(home: Tensor, value: Tensor) -> bool:
    return home.dtype == value.dtype and home.numel() == value.numel()


def _is_view_within(value: Tensor, home: Tensor) -> bool:
    return 0 <= value.data_ptr() - home.data_ptr() < home.numel() * home.element_size()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _mapped(value: Any, function: Callable[[Tensor], Tensor], known: dict[int, Tensor] | None = None) -> Any:
    """Map the tensors of nested containers into new containers; a tensor that occurs twice is mapped once."""
    known = {} if known is None else known
    if isinstance(value, Tensor):
        if id(value) not in known:
            known[id(value)] = function(value)
        return known[id(value)]
    if isinstance(value, dict):
        found = copy.copy(value)
        found.update({key: _mapped(item, function, known) for key, item in value.items()})
        return found
    if isinstance(value, list | tuple):
        items = [_mapped(item, function, known) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
