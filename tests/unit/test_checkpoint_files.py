"""Single-file checkpoints: complete or absent, verified before use, read without executing code."""

import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_pardist import DDPStrategy
from lightning_pardist.checkpoint import atomic
from lightning_pardist.checkpoint.errors import DamagedCheckpointError
from lightning_pardist.checkpoint.full_file import load_file, save_file, verify_file
from lightning_pardist.checkpoint.nested import map_tensors
from lightning_pardist.trainer.checkpoint_io import PardistCheckpointIO
from tests.helpers.models import MODULES
from tests.helpers.runs import quiet_trainer
from tests.helpers.scripts import ENVIRONMENT

STATE = {"state_dict": {"weight": torch.arange(7.0), "bias": torch.ones(2, 3)}, "epoch": 3, "note": ["a", 1.5]}


@dataclass(frozen=True)
class Frozen:
    """Hyperparameters, one of them computed."""

    width: torch.Tensor
    layers: range = range(3)
    doubled: int = field(init=False, default=6)


class Custom:
    """Arbitrary object that a user might keep among hyperparameters."""


def _same(state):
    tensors = STATE["state_dict"]
    return {k: v for k, v in state.items() if k != "state_dict"} == {"epoch": 3, "note": ["a", 1.5]} and all(
        torch.equal(state["state_dict"][name], value) for name, value in tensors.items()
    )


def _checked(path):
    verify_file(path)
    return load_file(path)


def test_every_flipped_byte_is_refused_or_harmless(tmp_path):
    path = tmp_path / "a.ckpt"
    save_file(STATE, path)
    content = path.read_bytes()
    refused = 0
    for index in range(len(content)):
        path.write_bytes(content[:index] + bytes([content[index] ^ 0x41]) + content[index + 1 :])
        try:
            state = _checked(path)
        except DamagedCheckpointError:
            refused += 1
        else:
            assert _same(state), index
    assert refused > len(content) / 3


def test_every_truncation_is_refused(tmp_path):
    path = tmp_path / "a.ckpt"
    save_file(STATE, path)
    content = path.read_bytes()
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        with pytest.raises(DamagedCheckpointError, match=r"a\.ckpt is damaged"):
            _checked(path)


def test_a_file_without_checksums_passes(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(STATE, tmp_path / "a.ckpt")
    finally:
        torch.serialization.set_crc32_options(True)
    verify_file(tmp_path / "a.ckpt")
    torch.save(STATE, tmp_path / "b.ckpt", _use_new_zipfile_serialization=False)
    verify_file(tmp_path / "b.ckpt")
    assert _same(load_file(tmp_path / "a.ckpt"))
    assert _same(load_file(tmp_path / "b.ckpt"))


def test_objects_that_take_code_are_named_with_two_ways_out(tmp_path):
    save_file({"hyper_parameters": {"x": Custom()}}, tmp_path / "a.ckpt")
    with pytest.raises(pickle.UnpicklingError, match=r"test_checkpoint_files\.Custom.*add_safe_globals.*weights_only"):
        load_file(tmp_path / "a.ckpt")
    assert isinstance(load_file(tmp_path / "a.ckpt", weights_only=False)["hyper_parameters"]["x"], Custom)
    with torch.serialization.safe_globals([Custom]):
        load_file(tmp_path / "a.ckpt")


def test_remote_filesystems():
    save_file(STATE, "memory://folder/a.ckpt")
    verify_file("memory://folder/a.ckpt")
    assert _same(load_file("memory://folder/a.ckpt"))
    io = PardistCheckpointIO()
    io.remove_checkpoint("memory://folder/a.ckpt")
    with pytest.raises(FileNotFoundError):
        io.load_checkpoint("memory://folder/a.ckpt")


def test_local_tensors_are_mapped_and_the_file_stays_as_it_is(tmp_path):
    save_file(STATE, tmp_path / "a.ckpt")
    before = (tmp_path / "a.ckpt").read_bytes()
    load_file(tmp_path / "a.ckpt")["state_dict"]["weight"].zero_()
    assert (tmp_path / "a.ckpt").read_bytes() == before


def test_a_folder_takes_the_place_of_a_file_and_back(tmp_path):
    goal = str(tmp_path / "last.ckpt")
    save_file(STATE, goal)
    folder = atomic.temporary_name(goal)
    os.mkdir(folder)
    atomic.replace_folder(folder, goal)
    assert os.path.isdir(goal)
    save_file(STATE, goal)
    assert os.path.isfile(goal)
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_a_filesystem_that_cannot_exchange_names(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "_exchange", lambda *unused: False)
    goal = tmp_path / "last.ckpt"
    for number in range(2):
        folder = atomic.temporary_name(str(goal))
        os.mkdir(folder)
        (tmp_path / os.path.basename(folder) / str(number)).touch()
        atomic.replace_folder(folder, str(goal))
    assert os.listdir(goal) == ["1"]
    assert os.listdir(tmp_path) == ["last.ckpt"]
    # Killed between its two renames.
    os.rename(goal, atomic.temporary_name(str(goal), "old"))
    atomic.remove_abandoned(str(tmp_path))
    assert atomic.recover(str(goal))
    assert os.listdir(goal) == ["1"]


def _write_half(path):
    with atomic.complete_file(path) as stream:
        stream.write(b"half")
        raise RuntimeError("no more")


def test_a_failing_write_leaves_the_old_file(tmp_path):
    save_file(STATE, tmp_path / "a.ckpt")
    with pytest.raises(RuntimeError, match="no more"):
        _write_half(tmp_path / "a.ckpt")
    assert os.listdir(tmp_path) == ["a.ckpt"]
    assert _same(load_file(tmp_path / "a.ckpt"))


def test_a_full_disk_leaves_the_old_file(tmp_path):
    """A limit on file size stands in for a full disk: both fail a write half way."""
    save_file(STATE, tmp_path / "a.ckpt")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        with pytest.raises((OSError, RuntimeError)):
            save_file({"state_dict": {"large": torch.zeros(10**6)}}, tmp_path / "a.ckpt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert os.listdir(tmp_path) == ["a.ckpt"]
    assert _same(load_file(tmp_path / "a.ckpt"))


_SAVER = """
import sys, torch
from lightning_pardist.checkpoint.full_file import save_file
number = 0
while True:
    number += 1
    save_file({"number": number, "large": torch.full((2_000_000,), float(number))}, sys.argv[1])
    print(number, flush=True)
"""


def test_killed_at_any_moment_the_last_complete_file_is_there(tmp_path):
    path = tmp_path / "a.ckpt"
    for delay in (0.0, 0.003, 0.011):
        process = subprocess.Popen(
            [sys.executable, "-c", _SAVER, str(path)], env=os.environ | ENVIRONMENT, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3):
            said = int(process.stdout.readline())
        time.sleep(delay)
        process.kill()
        said = max([said, *(int(line) for line in process.stdout.read().split())])
        process.wait()
        process.stdout.close()
        verify_file(path)
        state = load_file(path)
        assert state["number"] >= said
        assert torch.equal(state["large"], torch.full((2_000_000,), float(state["number"])))
    save_file(STATE, path)
    assert os.listdir(tmp_path) == ["a.ckpt"], "leftovers stay"


@pytest.mark.parametrize("plugin", [AsyncCheckpointIO, lambda: AsyncCheckpointIO(PardistCheckpointIO())])
def test_inside_lightnings_own_background_io(plugin, tmp_path):
    module = MODULES["classifier"]()
    trainer = quiet_trainer(strategy=DDPStrategy(), devices=1, plugins=[plugin()], max_steps=2)
    trainer.fit(module, torch.utils.data.DataLoader(module.dataset(8), batch_size=4))
    assert isinstance(trainer.strategy.checkpoint_io.checkpoint_io, PardistCheckpointIO)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    trainer.strategy.checkpoint_io.teardown()
    assert load_file(tmp_path / "a.ckpt")["global_step"] == 2


def test_a_users_own_io_is_used(tmp_path):
    class Own(PardistCheckpointIO):
        saved: list = []

        def save_checkpoint(self, checkpoint, path, storage_options=None):
            self.saved.append((str(path), storage_options))

    module = MODULES["classifier"]()
    trainer = quiet_trainer(strategy=DDPStrategy(), devices=1, plugins=[Own()], max_steps=1)
    trainer.fit(module, torch.utils.data.DataLoader(module.dataset(8), batch_size=4))
    trainer.save_checkpoint("a.ckpt", storage_options={"x": 1})
    assert Own.saved == [("a.ckpt", {"x": 1})]


def test_hyperparameters_of_a_class_of_the_users(tmp_path):
    module = MODULES["classifier"]()
    module.save_hyperparameters({"custom": Custom()})
    trainer = quiet_trainer(strategy=DDPStrategy(), devices=1, max_steps=1)
    loader = torch.utils.data.DataLoader(module.dataset(8), batch_size=4)
    trainer.fit(module, loader)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    resumed = quiet_trainer(strategy=DDPStrategy(), devices=1, max_steps=2)
    with pytest.raises(pickle.UnpicklingError, match=r"Custom.*weights_only=False"):
        resumed.fit(MODULES["classifier"](), loader, ckpt_path=tmp_path / "a.ckpt")
    resumed = quiet_trainer(strategy=DDPStrategy(), devices=1, max_steps=2)
    resumed.fit(MODULES["classifier"](), loader, ckpt_path=tmp_path / "a.ckpt", weights_only=False)
    assert resumed.global_step >= 1


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("value", [Frozen(torch.ones(1)), range(3)], ids=["frozen dataclass", "range"])
def test_hyperparameters_that_cannot_be_rebuilt_from_their_items(value, async_save, tmp_path):
    module = MODULES["classifier"]()
    module.save_hyperparameters({"value": value})
    loader = torch.utils.data.DataLoader(module.dataset(8), batch_size=4)
    saves = ModelCheckpoint(tmp_path, filename="a", every_n_train_steps=1)
    strategy = DDPStrategy(async_save=async_save)
    quiet_trainer(strategy=strategy, devices=1, max_steps=1, callbacks=[saves], enable_checkpointing=True).fit(
        module, loader
    )
    resumed = quiet_trainer(strategy=DDPStrategy(), devices=1, max_steps=2)
    resumed.fit(MODULES["classifier"](), loader, ckpt_path=tmp_path / "a.ckpt", weights_only=False)
    assert resumed.global_step == 2
    assert load_file(tmp_path / "a.ckpt", weights_only=False)["hyper_parameters"]["value"] == value


def test_copies_of_nested_values_keep_what_they_are():
    tensor = torch.zeros(1)
    given = {
        "ordered": OrderedDict(a=[tensor], b=(tensor, 1)),
        "default": defaultdict(list, a=[tensor]),
        "last": deque([tensor, 2], maxlen=2),
        "frozen": Frozen(tensor),
        "as they are": (range(3), torch.Size([2]), Frozen(1)),
    }
    found = map_tensors(lambda each: each + 1, given)
    tensor += 1
    assert found == given
    assert all(type(found[name]) is type(value) for name, value in given.items())
    assert (found["last"].maxlen, found["default"]["new"], "new" in given["default"]) == (2, [], False)
    assert found["as they are"] is given["as they are"]
    given["ordered"]["a"].append(3)
    assert len(found["ordered"]["a"]) == 1


def test_a_damaged_checkpoint_is_refused_before_training_touches_anything(tmp_path):
    module = MODULES["classifier"]()
    loader = torch.utils.data.DataLoader(module.dataset(8), batch_size=4)
    trainer = quiet_trainer(strategy=SingleDeviceStrategy(device="cpu"), max_steps=1)
    trainer.fit(module, loader)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    content = (tmp_path / "a.ckpt").read_bytes()
    half = len(content) // 2
    (tmp_path / "a.ckpt").write_bytes(content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :])
    fresh = MODULES["classifier"]()
    before = {name: value.clone() for name, value in fresh.state_dict().items()}
    trainer = quiet_trainer(strategy=DDPStrategy(), devices=1, max_steps=2)
    with pytest.raises(DamagedCheckpointError, match=r"a\.ckpt is damaged"):
        trainer.fit(fresh, loader, ckpt_path=tmp_path / "a.ckpt")
    assert all(torch.equal(value, before[name]) for name, value in fresh.state_dict().items())
    assert trainer.global_step == 0
