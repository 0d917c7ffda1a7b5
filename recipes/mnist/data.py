"""MNIST from a folder or from torchvision; scikit-learn's small digits if there is neither."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from recipes.common import EpochShuffle, fetch, load, require

require("torchvision", "sklearn", "tensorboard", recipe="mnist")

Splits = tuple[TensorDataset, TensorDataset]


class DigitData(LightningDataModule):
    """28x28 greyscale digits: training and validation images with their labels.

    Args:
        data_dir: Folder with MNIST's IDX files, plain or gzipped; downloads go here.
        source: ``folder`` for the files of ``data_dir``, ``torchvision`` to download them if need be, ``offline`` for
            the 1,797 digits that come with scikit-learn, ``auto`` for the first of these that is there.
        batch_size: Samples a step in each process.
        num_workers: Loader processes; the data is in memory, so none are needed.
    """

    def __init__(
        self,
        data_dir: str = ".data/mnist",
        source: Literal["auto", "folder", "torchvision", "offline"] = "auto",
        batch_size: int = 64,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.folder = Path(data_dir)
        self.downloaded = self.folder / "MNIST" / "raw"  # where torchvision puts its files
        self.no_download = ""

    def prepare_data(self) -> None:
        there = find_idx(self.downloaded, "t10k") or (self.hparams.source == "auto" and find_idx(self.folder, "t10k"))
        if self.hparams.source in ("auto", "torchvision") and not there:
            from torchvision.datasets import MNIST

            self.no_download = fetch(lambda: MNIST(self.folder, download=True), MNIST.mirrors[0])

    def setup(self, stage: str | None = None) -> None:
        if not hasattr(self, "train_set"):
            readers = {
                "folder": lambda: read_folder(self.folder),
                "torchvision": lambda: read_folder(self.downloaded, self.no_download),
                "offline": read_sklearn_digits,
            }
            self.train_set, self.val_set = load(self, self.hparams.source, readers)

    def train_dataloader(self) -> DataLoader:
        order = EpochShuffle(self.train_set)
        return DataLoader(
            self.train_set, self.hparams.batch_size, sampler=order, drop_last=True, num_workers=self.hparams.num_workers
        )

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val_set, self.hparams.batch_size, num_workers=self.hparams.num_workers)


def read_folder(folder: Path, why_not: str = "") -> Splits:
    """Read MNIST's own split; if the training files are missing, split the test digits into 9,000 and 1,000."""
    test = find_idx(folder, "t10k")
    if not test:
        raise FileNotFoundError(
            why_not or f"no t10k-images-idx3-ubyte[.gz] and t10k-labels-idx1-ubyte[.gz] in {folder}"
        )
    images, labels = map(read_idx, test)
    train = find_idx(folder, "train")
    if train:
        return pack(*map(read_idx, train)), pack(images, labels)
    cut = len(labels) * 9 // 10
    return pack(images[:cut], labels[:cut]), pack(images[cut:], labels[cut:])


def read_sklearn_digits() -> Splits:
    """Read scikit-learn's 8x8 digits, enlarged to 28x28: 1,437 for training, every fifth (360) for validation."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(digits.images).float().mul(255 / 16)
    images = F.interpolate(images.unsqueeze(1), size=28, mode="bilinear").squeeze(1)
    labels = torch.from_numpy(digits.target)
    held_out = torch.arange(len(labels)) % 5 == 0
    return pack(images[~held_out], labels[~held_out]), pack(images[held_out], labels[held_out])


def find_idx(folder: Path, split: str) -> list[Path]:
    """Return the image and label files of a split (``train`` or ``t10k``), or an empty list."""
    for end in ("", ".gz"):
        pair = [folder / f"{split}-{kind}-ubyte{end}" for kind in ("images-idx3", "labels-idx1")]
        if all(path.is_file() for path in pair):
            return pair
    return []


def read_idx(path: Path) -> Tensor:
    """Read an IDX file of bytes: two zeros, the type (8), the number of dims, their sizes, the values."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if raw[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is not an IDX file of bytes: it starts with {raw[:3]!r}. Get the file again.")
    shape = np.frombuffer(raw, dtype=">i4", count=raw[3], offset=4)
    values = np.frombuffer(raw, dtype=np.uint8, offset=4 + 4 * raw[3])
    return torch.from_numpy(values.reshape(shape.tolist()).copy())


def pack(images: Tensor, labels: Tensor) -> TensorDataset:
    """Standardize images of 0..255 as floats with a channel dim, and convert labels to int64."""
    return TensorDataset(images.unsqueeze(1).float().div(255).sub(0.1307).div(0.3081), labels.long())
