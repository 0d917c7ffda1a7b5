"""Byte windows of a text: from a folder, Shakespeare's plays by download, or else Python's own source."""

from __future__ import annotations

import sysconfig
import urllib.request
from pathlib import Path
from typing import Literal

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from recipes.common import EpochShuffle, fetch, load, require

require("tensorboard", recipe="gpt")

SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"


class Windows(Dataset):
    """Dataset of byte windows: a sample is a window of a text and the window one byte later, both ``[context]``.

    Args:
        text: The text's bytes.
        context: Bytes per window.

    Raises:
        ValueError: If the text has fewer than ``context + 1`` bytes.
    """

    def __init__(self, text: bytes, context: int) -> None:
        if len(text) <= context:
            raise ValueError(f"context={context} needs a text of {context + 1} bytes, this one has {len(text)}.")
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        window = self.tokens[start : start + self.context + 1].long()
        return window[:-1], window[1:]


class TextData(LightningDataModule):
    """Windows of bytes: the first 90% of a text for training, the rest for validation.

    Args:
        data_dir: A text file, or a folder with ``input.txt``; downloads go here.
        source: ``folder`` for the file at ``data_dir``, ``download`` to fetch Shakespeare's plays there if missing,
            ``offline`` for the source of Python's standard library, ``auto`` for the first of these that is available.
        context: Bytes per window; the model's ``context`` must not be smaller.
        batch_size: Windows per step in each process.
        num_workers: Loader processes; the data is in memory, so none are needed.
    """

    def __init__(
        self,
        data_dir: str = ".data/gpt",
        source: Literal["auto", "folder", "download", "offline"] = "auto",
        context: int = 64,
        batch_size: int = 32,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.file = Path(data_dir) if Path(data_dir).is_file() else Path(data_dir) / "input.txt"
        self.no_download = ""

    def prepare_data(self) -> None:
        if self.hparams.source in ("auto", "download") and not self.file.is_file():
            self.no_download = fetch(lambda: download(SHAKESPEARE, self.file), SHAKESPEARE)

    def setup(self, stage: str | None = None) -> None:
        if not hasattr(self, "train_set"):
            readers = {
                "folder": lambda: read_file(self.file),
                "download": lambda: read_file(self.file, self.no_download),
                "offline": read_standard_library,
            }
            text = load(self, self.hparams.source, readers)
            cut = len(text) * 9 // 10
            self.train_set = Windows(text[:cut], self.hparams.context)
            self.val_set = Windows(text[cut:], self.hparams.context)

    def train_dataloader(self) -> DataLoader:
        order = EpochShuffle(self.train_set)
        return DataLoader(
            self.train_set, self.hparams.batch_size, sampler=order, drop_last=True, num_workers=self.hparams.num_workers
        )

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val_set, self.hparams.batch_size, num_workers=self.hparams.num_workers)


def read_file(file: Path, why_not: str = "") -> bytes:
    """Return the bytes of a text file."""
    if not file.is_file():
        raise FileNotFoundError(why_not or f"no {file}")
    return file.read_bytes()


def read_standard_library(size: int = 1_000_000) -> bytes:
    """Return the first ``size`` bytes of Python's top-level modules, in the order of their names."""
    folder = Path(sysconfig.get_path("stdlib"))
    return b"".join(path.read_bytes() for path in sorted(folder.glob("[a-z]*.py")))[:size]


def download(url: str, file: Path) -> None:
    """Download ``url`` to ``file``, which appears only once it is complete."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    with urllib.request.urlopen(url) as answer:
        partial.write_bytes(answer.read())
    partial.replace(file)
