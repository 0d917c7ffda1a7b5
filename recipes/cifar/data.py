"""CIFAR-10 from a folder or from torchvision; without either, patches of ten photographs of installed packages."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from recipes.common import EpochShuffle, fetch, load, run_seed

Splits = tuple[TensorDataset, TensorDataset]
LAYOUT = "cifar-10-batches-py"


class PhotoData(LightningDataModule):
    """32x32 colour images: training images, shifted and mirrored at random, and validation images, with their labels.

    Args:
        data_dir: Folder with ``cifar10_subset.npz`` or torchvision's ``cifar-10-batches-py``; downloads go here.
        source: ``folder`` for the files of ``data_dir``, ``torchvision`` to download CIFAR-10 if need be, ``offline``
            for pieces of ten photographs that come with scikit-image and scikit-learn (the class is the photograph),
            ``auto`` for the first of these that is there.
        batch_size: Samples a step in each process.
        augment: Whether training images are shifted and mirrored.
        num_workers: Loader processes; the data is in memory, so none are needed.
    """

    def __init__(
        self,
        data_dir: str = ".data/cifar",
        source: Literal["auto", "folder", "torchvision", "offline"] = "auto",
        batch_size: int = 64,
        augment: bool = True,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.folder = Path(data_dir)
        self.no_download = ""

    def prepare_data(self) -> None:
        there = (self.folder / LAYOUT).is_dir()
        if self.hparams.source == "auto":
            there = there or (self.folder / "cifar10_subset.npz").is_file()
        if self.hparams.source in ("auto", "torchvision") and not there:
            from torchvision.datasets import CIFAR10

            self.no_download = fetch(lambda: CIFAR10(self.folder, download=True), CIFAR10.url)

    def setup(self, stage: str | None = None) -> None:
        if not hasattr(self, "train_set"):
            readers = {
                "folder": lambda: read_folder(self.folder),
                "torchvision": lambda: read_torchvision(self.folder, self.no_download),
                "offline": cut_photographs,
            }
            self.train_set, self.val_set = load(self, self.hparams.source, readers)

    def train_dataloader(self) -> DataLoader:
        order = EpochShuffle(self.train_set)
        return DataLoader(
            self.train_set, self.hparams.batch_size, sampler=order, drop_last=True, num_workers=self.hparams.num_workers
        )

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val_set, self.hparams.batch_size, num_workers=self.hparams.num_workers)

    def on_after_batch_transfer(
        self, batch: tuple[Tensor, Tensor, Tensor], dataloader_idx: int
    ) -> tuple[Tensor, Tensor]:
        """Standardize the images on the device; in training, also shift and mirror each image at random."""
        images, labels, index = batch
        mean = images.new_tensor([125.3, 123.0, 113.9], dtype=torch.float32).view(3, 1, 1)
        std = images.new_tensor([63.0, 62.1, 66.7], dtype=torch.float32).view(3, 1, 1)
        images = (images.float() - mean) / std
        if self.hparams.augment and self.trainer.training:
            images = shift_and_mirror(images, draws(len(self.train_set), self.trainer.current_epoch)[index.cpu()])
        return images, labels


def draws(samples: int, epoch: int) -> Tensor:
    """Return random choices for every sample of an epoch, ``[samples, 3]``: shift down, right (0..8), mirror (0 or 1).

    Drawn for the whole data set: the choices of a sample depend only on the run's seed and the epoch.
    """
    generator = torch.Generator().manual_seed(run_seed() + epoch)
    shifts = torch.randint(9, (samples, 2), generator=generator)
    return torch.cat([shifts, torch.randint(2, (samples, 1), generator=generator)], dim=1)


def shift_and_mirror(images: Tensor, choices: Tensor) -> Tensor:
    """Pad each image ``[3, height, width]`` by 4 pixels, crop it at its own offset, and mirror the chosen ones."""
    batch, _, height, width = images.shape
    down, right, mirror = choices.to(images.device).unsqueeze(-1).unbind(dim=1)
    rows = down + torch.arange(height, device=images.device)
    cols = torch.arange(width, device=images.device)
    cols = right + torch.where(mirror.bool(), width - 1 - cols, cols)
    which = torch.arange(batch, device=images.device).view(-1, 1, 1)
    padded = F.pad(images, (4, 4, 4, 4)).permute(0, 2, 3, 1)
    return padded[which, rows.unsqueeze(2), cols.unsqueeze(1)].permute(0, 3, 1, 2).contiguous()


def read_folder(folder: Path) -> Splits:
    """Read the subset in ``cifar10_subset.npz``; if it is missing, torchvision's files."""
    file = folder / "cifar10_subset.npz"
    if not file.is_file():
        return read_torchvision(folder, f"neither cifar10_subset.npz nor {LAYOUT} in {folder}")
    with np.load(file) as arrays:
        return (
            pack(arrays["train_images"], arrays["train_labels"]),
            pack(arrays["test_images"], arrays["test_labels"]),
        )


def read_torchvision(folder: Path, why_not: str = "") -> Splits:
    """Read CIFAR-10 from torchvision's files: 50,000 training and 10,000 validation images."""
    if not (folder / LAYOUT).is_dir():
        raise FileNotFoundError(why_not or f"no {LAYOUT} in {folder}")
    from torchvision.datasets import CIFAR10

    train, test = CIFAR10(folder, train=True), CIFAR10(folder, train=False)
    return pack(train.data, train.targets), pack(test.data, test.targets)


def cut_photographs(size: int = 32, per_photo: int = 120) -> Splits:
    """Cut ten photographs into non-overlapping patches: 1,000 for training and 200 for validation.

    The class of a patch is the photograph it was cut from. Every sixth patch is held out for validation.
    """
    from skimage import data
    from sklearn.datasets import load_sample_image

    photographs = [
        data.astronaut(),
        data.chelsea(),
        load_sample_image("china.jpg"),
        data.coffee(),
        load_sample_image("flower.jpg"),
        data.hubble_deep_field(),
        data.immunohistochemistry(),
        data.stereo_motorcycle()[0],
        data.retina()[256:1152, 256:1152],  # the picture is black outside this crop
        data.rocket(),
    ]
    pieces = np.concatenate([cut(photo, size, per_photo) for photo in photographs])
    labels = np.repeat(np.arange(len(photographs)), per_photo)
    held_out = np.arange(len(labels)) % 6 == 0
    return pack(pieces[~held_out], labels[~held_out]), pack(pieces[held_out], labels[held_out])


def cut(photo: np.ndarray, size: int, count: int) -> np.ndarray:
    """Return ``count`` square patches of a photograph, evenly spread over its grid: ``[count, size, size, 3]``."""
    rows, cols = photo.shape[0] // size, photo.shape[1] // size
    grid = photo[: rows * size, : cols * size].reshape(rows, size, cols, size, 3).swapaxes(1, 2)
    pieces = grid.reshape(rows * cols, size, size, 3)
    return pieces[np.arange(count) * len(pieces) // count]


def pack(images: np.ndarray, labels: np.ndarray | list[int]) -> TensorDataset:
    """Pack images ``[n, 32, 32, 3]`` as ``[n, 3, 32, 32]`` bytes, with their labels and their indices."""
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
    return TensorDataset(pixels, torch.as_tensor(labels).long(), torch.arange(len(pixels)))
