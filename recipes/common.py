"""Helpers shared by the recipes: package checks, choice of the data source, and a reproducible sample order."""

from __future__ import annotations

import importlib.util
import os
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import TypeVar

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import RandomSampler

Splits = TypeVar("Splits")
#: Packages whose distribution name differs from their import name.
_DISTRIBUTIONS = {"skimage": "scikit-image", "sklearn": "scikit-learn"}


def require(*modules: str, recipe: str, extra: str = "recipes") -> None:
    """Check that the packages a recipe needs beyond the library's own dependencies are installed.

    Args:
        modules: Names as they are imported.
        recipe: Name of the recipe.
        extra: The extra of this project that brings them.

    Raises:
        ModuleNotFoundError: If one of them is not installed.
    """
    missing = [_DISTRIBUTIONS.get(name, name) for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(
            f"The {recipe} recipe needs {', '.join(missing)}. Install the extra [{extra}]:"
            f" pip install -c constraints.txt -e '.[{extra}]'"
        )


def load(module: LightningDataModule, source: str, readers: Mapping[str, Callable[[], Splits]]) -> Splits:
    """Read the data of ``source``, or for ``"auto"`` of the first reader that finds its data, and log the choice.

    Inside a ``Trainer``, every process must call it: the choice is compared with rank zero's.

    Args:
        module: The calling data module; provides its name for messages, and its trainer.
        source: A name among ``readers``, or ``"auto"``.
        readers: Functions by name. A reader raises ``FileNotFoundError``, with the reason, if its data is missing.

    Raises:
        ValueError: If ``source`` is not a known name.
        FileNotFoundError: If no reader asked for finds its data.
        RuntimeError: If this process found another source than rank zero.
    """
    if source not in ("auto", *readers):
        raise ValueError(f"source={source!r} is unknown. Use 'auto', {', '.join(map(repr, readers))}.")
    name = type(module).__name__
    missing: list[str] = []
    for chosen in readers if source == "auto" else [source]:
        try:
            splits = readers[chosen]()
            break
        except FileNotFoundError as error:
            missing.append(f"{chosen}: {error}")
    else:
        raise FileNotFoundError(f"{name}(source={source!r}) found no data. {'; '.join(missing)}.")
    if module.trainer is not None:
        first = module.trainer.strategy.broadcast(chosen)
        if first != chosen:
            raise RuntimeError(
                f"{name} found {chosen!r} here, but {first!r} on rank zero: set source, or copy the files."
            )
    rank_zero_info(f"{name}: reading {chosen!r}" + (f" ({'; '.join(missing)})" if missing else ""))
    return splits


def fetch(download: Callable[[], object], url: str, timeout_s: float = 5.0) -> str:
    """Run a download, but fail early on a machine without network.

    Args:
        download: Does the work; called once ``url`` has answered, whatever the answer.
        url: An address at the server that ``download`` uses.
        timeout_s: Seconds to wait for the first answer, and for each later read.

    Returns:
        Why it failed, or an empty string.
    """
    failure = [f"no answer from {url} in {timeout_s:g} s"]

    def knock() -> None:
        try:
            urllib.request.urlopen(url, timeout=timeout_s).close()
            failure[0] = ""
        except urllib.error.HTTPError:  # the server responded; the file requested later may well exist
            failure[0] = ""
        except OSError as error:
            failure[0] = f"{url}: {error}"

    # Host name resolution has no timeout of its own: run it in a thread and wait for that.
    thread = threading.Thread(target=knock, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if reason := failure[0]:
        return reason
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(timeout_s)
    try:
        download()
    except (OSError, RuntimeError) as error:
        return f"{url}: {error}"
    finally:
        socket.setdefaulttimeout(before)
    return ""


class EpochShuffle(RandomSampler):
    """Sampler with a new order each epoch that depends only on the run's seed and the epoch.

    If several processes share the data, Lightning replaces a ``RandomSampler`` by a ``DistributedSampler``, whose order
    this sampler reproduces: one process with batches of 64 and four with batches of 16 train on the same 64 samples at
    every step.

    Args:
        data: What to index, anything with a length.
    """

    def __init__(self, data: Sized) -> None:
        super().__init__(data)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; the Trainer calls this before each one."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(run_seed() + self.epoch)
        return iter(torch.randperm(len(self.data_source), generator=generator).tolist())


def run_seed() -> int:
    """Return the seed given to ``seed_everything``, or 0 if it was not called."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))
