"""Conversion of a checkpoint folder to Lightning's single file and back; contents of either."""

import itertools
import os
import subprocess
import sys
import zipfile

import pytest
import torch
from torch import nn

from lightning_pardist import DDPStrategy, load_from_checkpoint
from lightning_pardist.checkpoint import stream
from lightning_pardist.checkpoint.chunks import Chunk, Shards
from lightning_pardist.checkpoint.coordination import SingleCoordinator
from lightning_pardist.checkpoint.folder import FolderReader, FolderSave
from lightning_pardist.checkpoint.full_file import save_file, verify_file
from lightning_pardist.checkpoint.stream import LazyTensor, write_archive
from lightning_pardist.checkpoint.tensors import (
    TensorSlot,
    fill_optimizer,
    full_slots,
    numbered_optimizer_shards,
    optimizer_shards,
)
from lightning_pardist.cli import main
from tests.helpers.models import MODULES, Classifier
from tests.helpers.runs import quiet_trainer
from tests.helpers.scripts import ENVIRONMENT


class Custom:
    """Arbitrary object that a user might keep among hyperparameters."""


class Tied(Classifier):
    """Module with a tied weight, and hyperparameters."""

    def __init__(self, width: int = 5, **kwargs) -> None:
        super().__init__(**kwargs)
        self.save_hyperparameters()
        self.first = nn.Linear(width, width, bias=False)
        self.second = nn.Linear(width, width, bias=False)
        self.second.weight = self.first.weight


def _trained(strategy, module):
    trainer = quiet_trainer(strategy=strategy, devices=1, max_steps=2)
    trainer.fit(module, torch.utils.data.DataLoader(module.dataset(8), batch_size=4))
    return trainer


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    module = Tied(width=6, optimizer="adamw")
    _trained(DDPStrategy(checkpoint="sharded"), module).save_checkpoint(tmp_path / "folder")
    return module


def _same(left, right):
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(value, right[key]) for key, value in left.items())
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(_same, left, right))
    return left == right


class OneWay:
    """File without seek, like uploads."""

    def __init__(self, file) -> None:
        self.write, self.flush = file.write, file.flush


def test_streamed_files_are_those_of_torch(tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "PIECE_BYTES", 16)
    dtypes = [
        torch.float32,
        torch.bfloat16,
        torch.int64,
        torch.bool,
        torch.complex64,
        torch.uint16,
        torch.float8_e4m3fn,
    ]
    tensors = {str(dtype): torch.arange(6).view(2, 3).to(dtype) for dtype in dtypes}
    tensors |= {"scalar": torch.tensor(3.5), "none": torch.empty(0, 2)}

    def reader(whole):
        return lambda start, stop, flat: flat.copy_(whole.flatten()[start:stop])

    lazy = {name: LazyTensor(value.shape, value.dtype, reader(value)) for name, value in tensors.items()}
    tied = lazy["torch.float32"]
    content = {"lazy": lazy, "tied": tied, "real": tensors, "rest": [1, "two"], "dtype": torch.int8}
    save_file(content, tmp_path / "a.ckpt")
    with open(tmp_path / "b.ckpt", "wb") as file:
        write_archive(content, OneWay(file))
    for name, mmap in itertools.product(("a.ckpt", "b.ckpt"), (False, True)):
        verify_file(tmp_path / name)
        state = torch.load(tmp_path / name, mmap=mmap)
        for name, value in tensors.items():
            for found in (state["lazy"][name], state["real"][name]):
                assert (found.dtype, found.shape) == (value.dtype, value.shape)
                assert bytes(found.untyped_storage()) == bytes(value.untyped_storage())
        assert state["tied"].data_ptr() == state["lazy"]["torch.float32"].data_ptr()
        assert state["rest"] == [1, "two"]


def test_to_a_file_and_back(saved, tmp_path, capsys):
    assert main(["convert", str(tmp_path / "folder"), str(tmp_path / "a.ckpt")]) == 0
    state = torch.load(tmp_path / "a.ckpt")
    assert _same(dict(saved.state_dict()), dict(state["state_dict"]))
    assert state["state_dict"]["first.weight"].data_ptr() == state["state_dict"]["second.weight"].data_ptr()
    assert main(["convert", str(tmp_path / "a.ckpt"), str(tmp_path / "again")]) == 0
    assert main(["convert", str(tmp_path / "again"), str(tmp_path / "b.ckpt")]) == 0
    assert _same(state, torch.load(tmp_path / "b.ckpt"))
    for name in ("folder", "again", "a.ckpt"):
        module = Tied(width=6, optimizer="adamw")
        trainer = quiet_trainer(strategy=DDPStrategy(), devices=1, max_epochs=2)
        loader = torch.utils.data.DataLoader(module.dataset(8), batch_size=4)
        trainer.fit(module, loader, ckpt_path=tmp_path / name)
        assert trainer.global_step == 4
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("as_before", [False, True])
@pytest.mark.parametrize("shape", [(1,), ()])
def test_state_of_a_parameter_with_one_element_is_divided(shape, as_before, tmp_path):
    param = nn.Parameter(torch.ones(shape))
    optimizer = torch.optim.AdamW([param])
    param.sum().backward()
    optimizer.step()
    moment = optimizer.state[param]["exp_avg"].clone()
    tensors, rest = numbered_optimizer_shards(0, optimizer.state_dict())
    if as_before:
        # Folders of earlier versions.
        tensors, rest["small"] = {}, {0: dict(optimizer.state[param])}
    save = FolderSave(tensors, str(tmp_path / "folder"))
    save.plan(SingleCoordinator())
    save.write(SingleCoordinator(), {})
    for start, stop in ((0, 1), (1, 1)):
        slot = TensorSlot(param, (start, stop, torch.zeros(stop - start)))
        fill_optimizer(0, optimizer, [[slot]], rest, FolderReader(tmp_path / "folder"))
        assert torch.equal(optimizer.state[param]["exp_avg"], moment.view(-1)[start:stop])
        assert optimizer.state[param]["step"].dim() == 0


@pytest.mark.parametrize("numbered", [False, True])
def test_state_under_keys_of_any_kind_keeps_them(numbered, tmp_path):
    module = nn.ModuleDict({"exp": nn.Linear(3, 2)})
    optimizer = torch.optim.SGD(module.parameters())
    keys = ["plain", "exp.weight.a", "100%", "%2E", "%=0", "", "0", 0, -1.5, ("exp", 2), None]
    for param in module.parameters():
        optimizer.state[param] = {key: torch.full_like(param, number) for number, key in enumerate(keys)}
    slots, names = full_slots(optimizer), {param: name for name, param in module.named_parameters()}
    if numbered:
        tensors, rest = numbered_optimizer_shards(0, optimizer.state_dict())
    else:
        tensors, rest = optimizer_shards(0, optimizer, slots, names)
    save = FolderSave(tensors, str(tmp_path / "folder"))
    save.plan(SingleCoordinator())
    save.write(SingleCoordinator(), {})
    fill_optimizer(0, optimizer, slots, rest, FolderReader(tmp_path / "folder"))
    for param in module.parameters():
        found = {key: value.unique().item() for key, value in optimizer.state[param].items()}
        assert found == {key: number for number, key in enumerate(keys)}
    optimizer.state[param][object()] = torch.zeros_like(param)
    with pytest.raises(TypeError, match="Use a string or a number"):
        optimizer_shards(0, optimizer, slots, names)


def test_load_from_checkpoint_of_either_form(saved, tmp_path):
    main(["convert", str(tmp_path / "folder"), str(tmp_path / "a.ckpt")])
    for path in (tmp_path / "folder", tmp_path / "a.ckpt"):
        loaded = load_from_checkpoint(Tied, path)
        assert loaded.hparams.width == 6
        assert _same(dict(saved.state_dict()), dict(loaded.state_dict()))
    with pytest.raises(RuntimeError, match="size mismatch"):
        load_from_checkpoint(Tied, tmp_path / "folder", width=7)
    with pytest.raises(FileNotFoundError):
        load_from_checkpoint(Tied, tmp_path / "nowhere")


def test_inspect(saved, tmp_path, capsys):
    main(["convert", str(tmp_path / "folder"), str(tmp_path / "a.ckpt")])
    capsys.readouterr()
    for name, form in (("folder", "sharded"), ("a.ckpt", "full")):
        assert main(["inspect", str(tmp_path / name), "--tensors", "--check"]) == 0
        text = capsys.readouterr().out
        for word in (form, "2, 1", "DDPStrategy", "torch", "first.weight", "(6, 6)", "checksums      match"):
            assert word in text, (name, word, text)
    content = (tmp_path / "a.ckpt").read_bytes()
    (tmp_path / "a.ckpt").write_bytes(content[: len(content) // 2])
    assert main(["inspect", str(tmp_path / "a.ckpt")]) == 1
    assert "damaged" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"pardist inspect: {tmp_path / 'nowhere'} does not exist."


@pytest.mark.parametrize("command", ["inspect", "convert"])
@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"epoch: 3\n", "is not a checkpoint: torch.save did not write it."),
        (b"PK\x05\x06" + bytes(18), "is not a checkpoint: torch.save did not write it."),
        (None, "is not a checkpoint: it is a zip archive that torch.save did not write."),
    ],
    ids=["text", "empty_archive", "archive"],
)
def test_what_is_no_checkpoint_is_refused_in_a_sentence(tmp_path, capsys, command, content, wanted):
    path = tmp_path / "a.ckpt"
    if content is None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("word/document.xml", "text")
    else:
        path.write_bytes(content)
    more = [str(tmp_path / "target")] if command == "convert" else []
    assert main([command, str(path), *more]) == 2
    assert capsys.readouterr().err == f"pardist {command}: {path} {wanted}\n"
    assert not (tmp_path / "target").exists()


def test_a_folder_that_is_no_checkpoint_is_refused_in_a_sentence(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 2
    assert "is not a complete checkpoint folder: it has no manifest.json" in capsys.readouterr().err


def test_nothing_is_overwritten_unless_asked_for(saved, tmp_path, capsys):
    for source, target in (("folder", "a.ckpt"), ("a.ckpt", "again")):
        assert main(["convert", str(tmp_path / source), str(tmp_path / target)]) == 0
        capsys.readouterr()
        assert main(["convert", str(tmp_path / source), str(tmp_path / target)]) == 2
        assert capsys.readouterr().err == (
            f"pardist convert: {tmp_path / target} exists. Pass --overwrite to replace it, or name another target.\n"
        )
        assert main(["convert", str(tmp_path / source), str(tmp_path / target), "--overwrite"]) == 0
        assert main(["inspect", str(tmp_path / target), "--check"]) == 0


def test_code_is_run_only_if_allowed(tmp_path, capsys):
    module = MODULES["classifier"]()
    module.save_hyperparameters({"custom": Custom()})
    _trained(DDPStrategy(), module).save_checkpoint(tmp_path / "a.ckpt")
    assert main(["convert", str(tmp_path / "a.ckpt"), str(tmp_path / "folder")]) == 2
    assert "Custom" in (said := capsys.readouterr().err)
    assert "--allow-code" in said
    assert main(["convert", str(tmp_path / "a.ckpt"), str(tmp_path / "folder"), "--allow-code"]) == 0


_CONVERT = """
import sys, threading
from lightning_pardist.checkpoint import convert

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))

def peak_of(what):
    over, peak, before = threading.Event(), [0], anonymous()

    def watch():
        while not over.wait(0.001):
            peak[0] = max(peak[0], anonymous() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    what()
    over.set()
    watcher.join()
    return peak[0]

folder, file, again, small = sys.argv[1:]
# What the libraries load on first use is no part of it.
convert.to_file(small, file)
convert.to_folder(file, again)
convert.contents(file, check=True)
print(peak_of(lambda: convert.to_file(folder, file)))
print(peak_of(lambda: convert.to_folder(file, again)))
print(peak_of(lambda: convert.contents(file, check=True)))
print(peak_of(lambda: convert.contents(again, check=True)))
"""


@pytest.mark.slow
def test_conversion_needs_less_memory_than_the_model(tmp_path):
    """Mapped pages do not count, as the system can drop them at any time."""
    small = FolderSave({"model.0": Shards((2,), torch.float32, (Chunk((0,), torch.ones(2)),))}, tmp_path / "small")
    small.plan(SingleCoordinator())
    small.write(SingleCoordinator(), {"state_dict": {}})
    tensors = {}
    for index in range(16):
        whole = torch.full((1024, 1024), float(index))
        halves = (Chunk((0, 0), whole[:512]), Chunk((512, 0), whole[512:]))
        tensors[f"model.{index}"] = Shards((1024, 1024), torch.float32, halves)
    save = FolderSave(tensors, tmp_path / "folder")
    save.plan(SingleCoordinator())
    save.write(SingleCoordinator(), {"state_dict": {}})
    places = [str(tmp_path / name) for name in ("folder", "a.ckpt", "again", "small")]
    command = [sys.executable, "-c", _CONVERT, *places]
    result = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    # 64 MB of tensors; one piece of 4 MB at a time is in memory to be verified or written.
    assert max(map(int, result.stdout.split())) < 16_000, result.stdout
    state = torch.load(tmp_path / "a.ckpt", mmap=True)["state_dict"]
    assert all(torch.equal(state[str(i)], torch.full((1024, 1024), float(i))) for i in range(16))
    assert FolderReader(tmp_path / "again").manifest.tensors.keys() == tensors.keys()
