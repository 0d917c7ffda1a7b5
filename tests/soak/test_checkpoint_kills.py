"""Ranks killed at random while they save, and a full disk: no checkpoint is lost or incomplete."""

import json
import os
import random
import subprocess

import pytest
import torch

from lightning_pardist.checkpoint.atomic import remove_abandoned
from lightning_pardist.checkpoint.chunks import shards_of
from lightning_pardist.checkpoint.coordination import SingleCoordinator
from lightning_pardist.checkpoint.folder import FolderReader, FolderSave
from lightning_pardist.checkpoint.full_file import load_file, save_file, verify_file
from lightning_pardist.checkpoint.manifest import verify_files
from tests.helpers.scripts import ROOT, run_script

pytestmark = pytest.mark.soak

KILLS, SECONDS = 200, 420.0


@pytest.mark.timeout(600)
def test_random_kills_lose_nothing(tmp_path):
    seed = random.randrange(10**6)
    script = str(ROOT / "tests" / "scripts" / "kill_saves.py")
    result = run_script(script, str(tmp_path), str(KILLS), str(SECONDS), str(seed), timeout_s=SECONDS + 120)
    assert result.code == 0, f"seed {seed}: {result.output}"
    counts = json.loads(result.output.strip().splitlines()[-1])
    print(counts)
    assert counts["one"] + counts["all"] >= min(KILLS, 20), f"seed {seed}: only {counts} in {SECONDS:.0f} s"
    remove_abandoned(str(tmp_path))
    assert os.listdir(tmp_path) == ["last.ckpt"]


@pytest.fixture
def small_disk(tmp_path):
    """Mount a filesystem of 8 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs takes privileges that this process does not have")
    yield folder
    # Tensors loaded from there stay mapped as long as they are referenced.
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_loses_nothing(small_disk):
    small = {"weight": torch.ones(250_000)}
    large = {"weight": torch.ones(2_500_000)}
    save_file(small, small_disk / "a.ckpt")
    with pytest.raises((OSError, RuntimeError)):
        save_file(large, small_disk / "a.ckpt")
    verify_file(small_disk / "a.ckpt")
    assert torch.equal(load_file(small_disk / "a.ckpt")["weight"], small["weight"])
    _save_folder(small, small_disk / "b.ckpt")
    with pytest.raises((OSError, RuntimeError)):
        _save_folder(large, small_disk / "b.ckpt")
    reader = FolderReader(small_disk / "b.ckpt")
    verify_files(small_disk / "b.ckpt", reader.manifest)
    assert torch.equal(reader.read("model.weight"), small["weight"])
    assert sorted(os.listdir(small_disk)) == ["a.ckpt", "b.ckpt"]


def _save_folder(state, path):
    save = FolderSave({f"model.{name}": shards_of(value) for name, value in state.items()}, path)
    save.plan(SingleCoordinator())
    save.write(SingleCoordinator(), {})
