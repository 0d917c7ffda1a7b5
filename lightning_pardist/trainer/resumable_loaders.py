"""Loader and sampler wrappers that resume in the middle of an epoch, and random number states."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch.utils.data import DataLoader

from lightning_pardist.compat.lightning_loops import (
    REQUIRES_DISTRIBUTED_SAMPLER,
    data_connector,
    replace,
    restore,
)
from lightning_pardist.compat.loaders import index_sampler, index_sampler_name
from lightning_pardist.engines.common.devices import device_in_use, generator_state, has_generator, set_generator_state

#: Types of sampler attributes that are saved as state if they change: an epoch count, a seed.
_PLAIN = (bool, int, float, str, type(None))


def keep_loaders(trainer: pl.Trainer) -> Callable[[], object]:
    """Keep the user's own loaders and sample order if all ranks see the same samples.

    Lightning would insert a ``DistributedSampler`` for one replica, which always shuffles the training set, and in
    another order than the loader's own sampler.

    Args:
        trainer: Trainer whose loaders are kept.

    Returns:
        Function that reverts this.
    """
    connector: Any = data_connector(trainer)
    replace(connector, REQUIRES_DISTRIBUTED_SAMPLER, lambda loader: False)
    return partial(restore, connector, REQUIRES_DISTRIBUTED_SAMPLER)


class Order:
    """Sampler wrapper that skips the indices of trained batches once.

    Args:
        loader: Loader whose sampler is wrapped; see :meth:`attach`.
        skip: Number of batches of this epoch that were trained on.
        started: :attr:`started` of the saved run, if it had the same layout of ranks.
        rng: Random number state at the save.

    Attributes:
        started: Random number state with which the order of this epoch was drawn, including the sampler's own.
        instead: Replacement for the sampler's indices while it is set.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        skip: int,
        started: Mapping[str, Any] | None,
        rng: Mapping[str, Any] | None,
    ) -> None:
        self._loader = loader
        self._sampler = self._own = index_sampler(loader)
        self._owners = _owners(loader)
        self._before = [_plain_values(owner) for owner in self._owners]
        self._skip = skip
        self._resumed_from = started
        self._rng = rng
        self.started: dict[str, Any] = {}
        self.instead: Sequence[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "_sampler":
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def attach(self) -> None:
        """Replace the loader's sampler."""
        # DataLoader rejects assignment of a sampler; its iterators look the attribute up on each use.
        self._loader.__dict__[index_sampler_name(self._loader)] = self

    def detach(self) -> None:
        """Restore the loader's sampler."""
        self._loader.__dict__[index_sampler_name(self._loader)] = self._own

    @property
    def own(self) -> Any:
        """The loader's own sampler."""
        return self._own

    def divide(self, sampler: Any) -> None:
        """Take indices from another sampler from now on; from the loader's own if None."""
        self._sampler = self._own if sampler is None else sampler

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        skip, self._skip = self._skip, 0
        started, self._resumed_from = self._resumed_from, None
        if self.instead is not None:
            if skip and self._rng:
                set_rng_state(self._rng)
            yield from self.instead
            return
        if skip and started:
            set_rng_state(started["rng"])
            for owner, state in zip(self._owners, started.get("samplers", ()), strict=False):
                _restore(owner, state)
        own = [_state_of(owner, before) for owner, before in zip(self._owners, self._before, strict=True)]
        self.started = {"rng": rng_state(torch.device("cpu")), "samplers": own}
        indices = iter(self._sampler)
        # A loader shorter than the others starts again in the middle of the Trainer's epoch.
        length = _length(self._sampler) if skip else None
        for _ in islice(indices, skip % length if length else skip):
            pass
        if skip and self._rng:
            set_rng_state(self._rng)
        yield from indices


class Skipping:
    """Loader wrapper that skips the first batches by loading them (iterable datasets).

    Args:
        loader: The wrapped loader.
        skip: Number of batches to load and discard, in the first iteration.
        rng: Random number state to set after the skipped batches.
    """

    def __init__(self, loader: Any, skip: int, rng: Mapping[str, Any] | None) -> None:
        self._loader = loader
        self._skip = skip
        self._rng = rng

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        (skip, rng), (self._skip, self._rng) = (self._skip, self._rng), (0, None)
        batches = iter(self._loader)
        for _ in islice(batches, skip):
            pass
        if rng:
            set_rng_state(rng)
        yield from batches


# --- sampler state ----------------------------------------------------------------------------------------------------


def _owners(loader: DataLoader[Any]) -> list[Any]:
    """Return the loader, its samplers and the samplers nested in them, each once and in a fixed order."""
    found: list[Any] = [loader]
    for owner in (loader.sampler, loader.batch_sampler):
        while owner is not None and not any(owner is known for known in found):
            found.append(owner)
            owner = getattr(owner, "sampler", None)
    return found


def _length(sampler: Any) -> int | None:
    """Return the number of a sampler's batches; None if it has no length, for example if it is infinite."""
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        return None


def _attributes(owner: Any) -> dict[str, Any]:
    return {} if isinstance(owner, (list, tuple)) else dict(getattr(owner, "__dict__", {}))


def _plain_values(owner: Any) -> dict[str, Any]:
    # A loader's own settings are not state.
    if isinstance(owner, DataLoader):
        return {}
    return {name: value for name, value in _attributes(owner).items() if isinstance(value, _PLAIN)}


def _state_of(owner: Any, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of an object's random generators, and its plain attributes that have changed."""
    state: dict[str, Any] = {}
    for name, value in _attributes(owner).items():
        if isinstance(value, torch.Generator):
            state[name] = ("torch", value.get_state())
        elif isinstance(value, random.Random):
            version, words, cached = value.getstate()
            state[name] = ("python", (version, list(words), cached))
        elif (numpys := _bit_generator(value)) is not None:
            state[name] = ("numpy", _without_arrays(numpys.state))
        elif name in before and isinstance(value, _PLAIN) and before[name] != value:
            state[name] = ("plain", value)
    return state


def _restore(owner: Any, state: Mapping[str, Any]) -> None:
    for name, (kind, saved) in state.items():
        value = _attributes(owner).get(name)
        if kind == "plain":
            if isinstance(value, _PLAIN):
                owner.__dict__[name] = saved
        elif kind == "torch" and isinstance(value, torch.Generator):
            value.set_state(saved)
        elif kind == "python" and isinstance(value, random.Random):
            version, words, cached = saved
            value.setstate((version, tuple(words), cached))
        elif kind == "numpy" and (numpys := _bit_generator(value)) is not None:
            numpys.state = _with_arrays(saved, numpys.state)


def _bit_generator(value: Any) -> Any:
    """Return the bit generator of a numpy ``Generator`` or ``RandomState``; None for anything else."""
    if isinstance(value, np.random.Generator):
        return value.bit_generator
    return getattr(value, "_bit_generator", None) if isinstance(value, np.random.RandomState) else None


def _without_arrays(tree: Any) -> Any:
    """Convert arrays to lists, which can be loaded from a checkpoint without running code."""
    if isinstance(tree, dict):
        return {key: _without_arrays(value) for key, value in tree.items()}
    return tree.tolist() if isinstance(tree, np.ndarray | np.generic) else tree


def _with_arrays(saved: Any, like: Any) -> Any:
    if isinstance(like, dict):
        return {key: _with_arrays(saved[key], value) for key, value in like.items()}
    return np.asarray(saved, dtype=like.dtype) if isinstance(like, np.ndarray) else saved


# --- random number state of the process -------------------------------------------------------------------------------


def rng_state(device: torch.device | None = None) -> dict[str, Any]:
    """Return the states of this process' random number generators, as tensors and plain values.

    Args:
        device: Device whose generator is included, if it has one of its own; the device in use if None.
    """
    device = device_in_use() if device is None else device
    version, words, cached = random.getstate()
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": (version, list(words), cached)}
    if has_generator(device):
        state[device.type] = generator_state(device)
    numpy_state: dict[str, Any] = np.random.get_state(legacy=False)
    state["numpy"] = {
        "name": str(numpy_state["bit_generator"]),
        "keys": torch.from_numpy(numpy_state["state"]["key"].astype("int64")),
        "position": int(numpy_state["state"]["pos"]),
        "has_gauss": int(numpy_state["has_gauss"]),
        "gauss": float(numpy_state["gauss"]),
    }
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore a state from :func:`rng_state`, for the generators that exist on both machines."""
    torch.set_rng_state(state["torch"])
    version, words, cached = state["python"]
    random.setstate((version, tuple(words), cached))
    device = device_in_use()
    if has_generator(device) and device.type in state:
        set_generator_state(state[device.type], device)
    if "numpy" in state:
        saved = state["numpy"]
        keys = saved["keys"].numpy().astype("uint32")
        np.random.set_state((saved["name"], keys, saved["position"], saved["has_gauss"], saved["gauss"]))
