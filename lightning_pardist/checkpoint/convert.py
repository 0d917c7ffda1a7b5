"""Conversion between checkpoint folder and single file, and inspection of both, with one tensor in memory at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from fsspec.core import url_to_fs
from torch import Tensor

from lightning_pardist.checkpoint.chunks import Shards, shards_of, shards_of_slice
from lightning_pardist.checkpoint.coordination import SingleCoordinator
from lightning_pardist.checkpoint.folder import FolderReader, FolderSave
from lightning_pardist.checkpoint.full_file import load_file, save_file, verify_file
from lightning_pardist.checkpoint.manifest import is_folder, verify_files
from lightning_pardist.checkpoint.stream import LazyTensor
from lightning_pardist.checkpoint.tensors import (
    ABOUT,
    DIVERGED,
    FolderState,
    module_shards,
    numbered_optimizer_shards,
    optimizer_keys,
)


@dataclass(frozen=True)
class Contents:
    """Contents of a checkpoint.

    Attributes:
        path: Path of the checkpoint.
        form: ``"full"`` or ``"sharded"``.
        files: Number of files.
        file_bytes: Total size of the files.
        module: Name -> (dtype, shape) of the module's tensors.
        optimizers: Bytes of each optimizer's state.
        about: Strategy, world size, step, epoch and versions, as far as the checkpoint stores them.
    """

    path: str
    form: str
    files: int
    file_bytes: int
    module: dict[str, tuple[str, tuple[int, ...]]]
    optimizers: list[int]
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def module_bytes(self) -> int:
        """Bytes of the module's tensors; tied tensors are counted once per name."""
        return sum(math.prod(shape) * getattr(torch, dtype).itemsize for dtype, shape in self.module.values())

    @property
    def num_elements(self) -> int:
        """Number of elements of the module's tensors."""
        return sum(math.prod(shape) for _, shape in self.module.values())


def to_file(folder: str | os.PathLike[str], path: str | os.PathLike[str], *, weights_only: bool | None = None) -> None:
    """Write a checkpoint folder as Lightning's single file. Not collective.

    Args:
        folder: Local path or URL; verified first.
        path: Path of the file, which is written atomically.
        weights_only: As for ``torch.load``. By default no code from the checkpoint is run.

    Raises:
        FileNotFoundError: If there is no complete folder.
        DamagedCheckpointError: If one of its files is missing, truncated or altered.
        pickle.UnpicklingError: If it holds objects that need code to load.
    """
    reader = FolderReader(folder)
    verify_files(folder, reader.manifest)
    state = reader.trainer_state(weights_only=weights_only)
    lazy: dict[str, LazyTensor] = {}

    def later(key: str) -> LazyTensor:
        key = reader.manifest.aliases.get(key, key)
        stored = reader.describe(key)
        like = torch.empty(stored.shape, device="meta")

        def read(start: int, stop: int, flat: Tensor) -> None:
            reader.read_into(key, shards_of_slice(like, start, stop, flat))

        return lazy.setdefault(key, LazyTensor(stored.shape, getattr(torch, stored.dtype), read))

    module = FolderState(reader, state["state_dict"])
    stored_keys = {name: module.stored_key(name) for name in module}
    state["state_dict"] = {name: module[name] if key is None else later(key) for name, key in stored_keys.items()}
    if "optimizer_states" in state:
        optimizers = []
        for index, saved in enumerate(state["optimizer_states"]):
            keys = optimizer_keys(index, saved, reader.manifest.tensors)
            values = {
                number: {**saved["small"].get(number, {}), **{k: later(full) for k, full in keys[number].items()}}
                for number in saved["names"]
            }
            of_params = {number: found for number, found in values.items() if found}
            optimizers.append(
                {"state": {**of_params, **saved.get("shared", {})}, "param_groups": saved["param_groups"]}
            )
        state["optimizer_states"] = optimizers
    about = {**state.get(ABOUT, {}), "about": reader.manifest.about}
    if diverged := {key: later(key) for key in reader.manifest.tensors if key.startswith(DIVERGED)}:
        about["tensors"] = diverged
    save_file({**state, ABOUT: about}, path)


def to_folder(
    path: str | os.PathLike[str], folder: str | os.PathLike[str], *, weights_only: bool | None = None
) -> None:
    """Write Lightning's single file as a checkpoint folder. Not collective.

    Args:
        path: Local path or URL; verified first.
        folder: Path of the folder, which is written atomically.
        weights_only: As for ``torch.load``. By default no code from the checkpoint is run.

    Raises:
        FileNotFoundError: If there is no such file.
        DamagedCheckpointError: If it is truncated or altered.
        ValueError: If it is not a Lightning checkpoint.
        pickle.UnpicklingError: If it holds objects that need code to load.
    """
    state = _checked_file(path, weights_only)
    tensors, aliases, rest = module_shards(state["state_dict"])
    content = {key: value for key, value in state.items() if key not in ("state_dict", "optimizer_states")}
    content["state_dict"] = rest
    if ABOUT in content:
        content[ABOUT] = dict(content[ABOUT])
        tensors.update({key: shards_of(value) for key, value in content[ABOUT].pop("tensors", {}).items()})
    if "optimizer_states" in state:
        content["optimizer_states"] = []
        for index, saved in enumerate(state["optimizer_states"]):
            boxes, others = numbered_optimizer_shards(index, saved)
            tensors.update(boxes)
            content["optimizer_states"].append(others)
    save = FolderSave(tensors, folder, aliases=aliases, about=_about(state))
    save.plan(SingleCoordinator())
    save.write(SingleCoordinator(), content)


def contents(path: str | os.PathLike[str], *, check: bool = False, weights_only: bool | None = None) -> Contents:
    """Describe a checkpoint of either form without reading its tensors. Not collective.

    Args:
        path: Local path or URL.
        check: Whether to verify all checksums.
        weights_only: As for ``torch.load``. By default no code from the checkpoint is run.

    Raises:
        FileNotFoundError: If the checkpoint does not exist.
        DamagedCheckpointError: If it is damaged, as far as it was read.
        ValueError: If it is not a Lightning checkpoint.
        pickle.UnpicklingError: If it is a file that holds objects that need code to load.
    """
    if not is_folder(path):
        state = _checked_file(path, weights_only, check=check)
        filesystem, plain = url_to_fs(os.fspath(path))
        module = {name: _described(shards_of(v)) for name, v in state["state_dict"].items() if isinstance(v, Tensor)}
        optimizers = [_tensor_bytes(saved["state"]) for saved in state.get("optimizer_states", [])]
        return Contents(os.fspath(path), "full", 1, filesystem.size(plain), module, optimizers, _about(state))
    reader = FolderReader(path)
    if check:
        verify_files(path, reader.manifest)
    manifest = reader.manifest
    names = FolderState(reader, {})
    stored = {name: reader.describe(names.stored_key(name) or "") for name in names}
    sizes: dict[str, int] = {}
    for key, tensor in manifest.tensors.items():
        if key.startswith("optimizer_"):
            owner = key.partition(".")[0]
            sizes[owner] = sizes.get(owner, 0) + math.prod(tensor.shape) * getattr(torch, tensor.dtype).itemsize
    return Contents(
        os.fspath(path),
        "sharded",
        len(manifest.files) + 1,
        sum(size for size, _ in manifest.files.values()),
        {name: (tensor.dtype, tensor.shape) for name, tensor in stored.items()},
        [sizes[owner] for owner in sorted(sizes)],
        manifest.about,
    )


def _checked_file(path: str | os.PathLike[str], weights_only: bool | None, *, check: bool = True) -> dict[str, Any]:
    if check:
        verify_file(path)
    state = load_file(path, weights_only=weights_only)
    if not isinstance(state, dict) or not isinstance(state.get("state_dict"), Mapping):
        raise ValueError(f"{os.fspath(path)} is not a Lightning checkpoint: it has no state_dict.")
    return state


def _about(state: Mapping[str, Any]) -> dict[str, Any]:
    known = dict(state.get(ABOUT, {}).get("about", {}))
    known.setdefault("versions", {"lightning": state.get("pytorch-lightning_version", "unknown")})
    return {**known, "global_step": state.get("global_step"), "epoch": state.get("epoch")}


def _described(shards: Shards) -> tuple[str, tuple[int, ...]]:
    return str(shards.dtype).removeprefix("torch."), shards.shape


def _tensor_bytes(state: Any) -> int:
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    return sum(map(_tensor_bytes, state.values())) if isinstance(state, Mapping) else 0
