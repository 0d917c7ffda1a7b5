"""Loads a module from a checkpoint without a Trainer."""

from __future__ import annotations

from typing import Any, TypeVar

import lightning.pytorch as pl

from lightning_pardist.checkpoint.folder import FolderReader
from lightning_pardist.checkpoint.manifest import is_folder, verify_files
from lightning_pardist.checkpoint.tensors import FolderState
from lightning_pardist.compat.lightning_functions import PATH, load_module_state

ModuleT = TypeVar("ModuleT", bound=pl.LightningModule)


def load_from_checkpoint(
    cls: type[ModuleT], path: PATH, *, strict: bool | None = None, weights_only: bool | None = None, **kwargs: Any
) -> ModuleT:
    """Load a module on the host, as ``cls.load_from_checkpoint``, from a checkpoint of either form. Not collective.

    Args:
        cls: The module's class.
        path: A checkpoint folder, or Lightning's single file: local paths or URLs.
        strict: Whether names must match; the module's ``strict_loading`` if None.
        weights_only: As in ``torch.load``. By default no code from the checkpoint is run.
        **kwargs: Arguments of the class, which override the saved hyperparameters.

    Raises:
        FileNotFoundError: If there is no complete checkpoint.
        DamagedCheckpointError: If a file of the folder is missing, truncated or altered.
        pickle.UnpicklingError: If it holds objects that need code to be built.
    """
    if not is_folder(path):
        return cls.load_from_checkpoint(path, map_location="cpu", strict=strict, weights_only=weights_only, **kwargs)
    reader = FolderReader(path)
    verify_files(path, reader.manifest)
    checkpoint = reader.trainer_state(weights_only=weights_only)
    checkpoint["state_dict"] = FolderState(reader, checkpoint["state_dict"])
    checkpoint.setdefault(cls.CHECKPOINT_HYPER_PARAMS_KEY, {}).update(kwargs)
    module = load_module_state(cls, checkpoint, strict=strict, **kwargs)
    if not isinstance(module, cls):
        raise TypeError(f"{cls.__name__} is not a LightningModule.")
    return module
