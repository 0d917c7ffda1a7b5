"""Labelled texts: from a folder, or pieces of Python's standard library if there is none."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from recipes.common import EpochShuffle, load, require

PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "unittest")
Labelled = list[tuple[str, int]]


class Texts(Dataset):
    """Dataset of tokens, attention mask and class of each text, all of one length.

    Args:
        texts: The texts with their classes.
        length: Tokens per text; longer ones are truncated, shorter ones padded and masked.
        tokenizer: A tokenizer of transformers; bytes if None.
    """

    def __init__(self, texts: Labelled, length: int, tokenizer: Any = None) -> None:
        if tokenizer is None:
            found = [torch.tensor(list(text.encode()[:length])) for text, _ in texts]
            lengths = torch.tensor([len(tokens) for tokens in found])
            self.tokens = torch.nn.utils.rnn.pad_sequence([*found, torch.zeros(length)], batch_first=True)[:-1].long()
            self.mask = (torch.arange(length) < lengths[:, None]).long()
        else:
            made = tokenizer(
                [text for text, _ in texts],
                max_length=length,
                padding="max_length",
                truncation=True,
                return_tensors="pt",
            )
            self.tokens, self.mask = made["input_ids"], made["attention_mask"]
        self.classes = torch.tensor([number for _, number in texts])

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        return {"input_ids": self.tokens[index], "attention_mask": self.mask[index]}, self.classes[index]


class TextClasses(LightningDataModule):
    """Texts to classify: five sixths for training, the rest for validation.

    Args:
        data_dir: A folder with one subfolder per class, each with ``.txt`` files.
        source: ``folder`` for the files of ``data_dir``, ``offline`` for pieces of six packages of Python's standard
            library (the class is the package), ``auto`` for the first of these that is available.
        tokenizer: Folder or name of a tokenizer, the one of ``pretrained``; by default bytes.
        length: Tokens per text; must not exceed the model's maximum.
        batch_size: Texts per step in each process.
        num_workers: Loader processes; the data is in memory, so none are needed.
    """

    def __init__(
        self,
        data_dir: str = ".data/texts",
        source: Literal["auto", "folder", "offline"] = "auto",
        tokenizer: str | None = None,
        length: int = 128,
        batch_size: int = 32,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str | None = None) -> None:
        if hasattr(self, "train_set"):
            return
        readers = {"folder": lambda: read_folder(Path(self.hparams.data_dir)), "offline": cut_standard_library}
        texts = load(self, self.hparams.source, readers)
        tokenizer = None
        if self.hparams.tokenizer is not None:
            require("transformers", recipe="finetune", extra="models")
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(self.hparams.tokenizer)
        kept, held_out = [t for n, t in enumerate(texts) if n % 6], texts[::6]
        self.train_set = Texts(kept, self.hparams.length, tokenizer)
        self.val_set = Texts(held_out, self.hparams.length, tokenizer)

    def train_dataloader(self) -> DataLoader:
        order = EpochShuffle(self.train_set)
        return DataLoader(
            self.train_set, self.hparams.batch_size, sampler=order, drop_last=True, num_workers=self.hparams.num_workers
        )

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val_set, self.hparams.batch_size, num_workers=self.hparams.num_workers)


def read_folder(folder: Path) -> Labelled:
    """Read every ``.txt`` file of each subfolder; classes are numbered in the order of the folders' names."""
    classes = sorted(path for path in folder.glob("*/") if path.is_dir() and any(path.glob("*.txt")))
    if not classes:
        raise FileNotFoundError(f"no folders with .txt files in {folder}")
    return [
        (file.read_text(errors="replace"), number)
        for number, path in enumerate(classes)
        for file in sorted(path.glob("*.txt"))
    ]


def cut_standard_library(characters: int = 256, per_package: int = 300) -> Labelled:
    """Cut the sources of six packages into non-overlapping pieces; the class of a piece is its package."""
    root = Path(sysconfig.get_path("stdlib"))
    pieces: Labelled = []
    for number, package in enumerate(PACKAGES):
        text = "".join(path.read_text(errors="replace") for path in sorted((root / package).rglob("*.py")))
        starts = range(0, min(len(text), per_package * characters) - characters + 1, characters)
        pieces += [(text[start : start + characters], number) for start in starts]
    return pieces
