"""Recipes on one process: training reduces the loss, data splits are disjoint, a missing source is reported."""

from __future__ import annotations

import gzip
import importlib.util
import pickle
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import lightning_pardist  # noqa: F401  # first, as it mends torchvision, which lightning imports

# isort: split
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything

from recipes.cifar.data import PhotoData, draws, shift_and_mirror
from recipes.cifar.model import PhotoClassifier
from recipes.common import EpochShuffle, fetch, require
from recipes.finetune.data import TextClasses
from recipes.gpt.data import TextData, Windows
from recipes.gpt.model import GPT, warmup_cosine
from recipes.mnist.data import DigitData
from recipes.mnist.model import DigitClassifier


def train(module: LightningModule, data: LightningDataModule, root: Path, steps: int = 3) -> Trainer:
    trainer = Trainer(
        max_steps=steps,
        limit_val_batches=1,
        val_check_interval=1,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
    )
    trainer.fit(module, datamodule=data)
    return trainer


def small_gpt(**changes: object) -> GPT:
    settings = {"dim": 16, "layers": 1, "heads": 2, "context": 8, "sample_tokens": 12, "warmup_steps": 1}
    return GPT(**(settings | changes))


needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed (the extra [models])"
)


def small_encoder(**changes: object) -> LightningModule:
    from recipes.finetune.model import TextClassifier

    return TextClassifier(**({"dim": 16, "layers": 3, "heads": 2, "max_length": 16} | changes))


def few_texts() -> TextClasses:
    return TextClasses(source="offline", length=16, batch_size=4)


RECIPES = {
    "mnist": (DigitClassifier, lambda: DigitData(source="offline", batch_size=8), {"val_loss", "val_acc"}),
    "cifar": (PhotoClassifier, lambda: PhotoData(source="offline", batch_size=2), {"val_loss", "val_acc"}),
    "gpt": (
        small_gpt,
        lambda: TextData(source="offline", context=8, batch_size=4),
        {"val_loss", "val_perplexity"},
    ),
    "finetune": (small_encoder, few_texts, {"val_loss", "val_acc"}),
}
DATA = {
    "mnist": lambda **kw: DigitData(**kw),
    "cifar": lambda **kw: PhotoData(**kw),
    "gpt": lambda **kw: TextData(**kw),
    "finetune": lambda **kw: TextClasses(**kw),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_transformers if name == "finetune" else ()) for name in RECIPES]
)
def test_trains_on_offline_data(name, tmp_path):
    make_module, make_data, metrics = RECIPES[name]
    seed_everything(0, verbose=False)
    module = make_module()
    before = [parameter.detach().clone() for parameter in module.parameters()]
    trainer = train(module, make_data(), tmp_path)
    assert trainer.global_step == 3
    assert all(not torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))
    assert metrics <= set(trainer.callback_metrics)
    assert all(torch.isfinite(value) for value in trainer.callback_metrics.values())


@pytest.mark.parametrize("name", DATA)
def test_offline_splits_are_disjoint_and_repeat(name):
    one, two = DATA[name](source="offline"), DATA[name](source="offline")
    for data in (one, two):
        data.setup("fit")
    for split in ("train_set", "val_set"):
        first, second = getattr(one, split), getattr(two, split)
        assert len(first) == len(second) > 100
        leaves = [torch.utils._pytree.tree_leaves(split[7]) for split in (first, second)]
        assert all(torch.equal(a, b) for a, b in zip(*leaves, strict=True))
    if name == "gpt":
        both = torch.cat([one.train_set.tokens, one.val_set.tokens])
        assert len(one.train_set.tokens) == len(both) * 9 // 10
    elif name == "finetune":
        assert len(one.train_set) + len(one.val_set) == 6 * 300
        assert set(one.train_set.classes.tolist()) == set(one.val_set.classes.tolist()) == set(range(6))
    else:
        images = [{image.numpy().tobytes() for image in split.tensors[0]} for split in (one.train_set, one.val_set)]
        assert len(images[0] & images[1]) == 0
        assert set(one.train_set.tensors[1].tolist()) == set(one.val_set.tensors[1].tolist()) == set(range(10))


@pytest.mark.parametrize("name", DATA)
def test_missing_folder_is_named(name, tmp_path):
    data = DATA[name](source="folder", data_dir=str(tmp_path / "nowhere"))
    data.prepare_data()
    with pytest.raises(FileNotFoundError, match=r"source='folder'.*no.*nowhere"):
        data.setup("fit")


@pytest.mark.parametrize("name", DATA)
def test_unknown_source_is_refused(name):
    with pytest.raises(ValueError, match=r"source='web' is unknown\. Use 'auto', 'folder', "):
        DATA[name](source="web").setup("fit")


def write_idx(path: Path, values: np.ndarray) -> None:
    head = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, dtype=">i4").tobytes()
    raw = head + values.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


def write_mnist(folder: Path, split: str, count: int, end: str) -> np.ndarray:
    folder.mkdir(parents=True, exist_ok=True)
    images = np.random.default_rng(count).integers(0, 256, (count, 28, 28))
    write_idx(folder / f"{split}-images-idx3-ubyte{end}", images)
    write_idx(folder / f"{split}-labels-idx1-ubyte{end}", np.arange(count) % 10)
    return images


def test_mnist_folder_with_test_files_only(tmp_path):
    images = write_mnist(tmp_path, "t10k", 20, ".gz")
    data = DigitData(data_dir=str(tmp_path), source="auto")
    data.prepare_data()
    data.setup("fit")
    assert (len(data.train_set), len(data.val_set)) == (18, 2)
    image, label = data.val_set[1]
    assert label == 9
    torch.testing.assert_close(image[0] * 0.3081 + 0.1307, torch.from_numpy(images[19] / 255).float())


def test_mnist_folder_as_torchvision_leaves_it(tmp_path):
    write_mnist(tmp_path / "MNIST" / "raw", "train", 30, "")
    write_mnist(tmp_path / "MNIST" / "raw", "t10k", 10, "")
    data = DigitData(data_dir=str(tmp_path), source="torchvision")
    data.prepare_data()
    data.setup("fit")
    assert (len(data.train_set), len(data.val_set)) == (30, 10)


def test_mnist_file_of_another_kind_is_named(tmp_path):
    write_mnist(tmp_path, "t10k", 10, "")
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(b"<html>")
    with pytest.raises(ValueError, match="t10k-images-idx3-ubyte is not an IDX file"):
        DigitData(data_dir=str(tmp_path)).setup("fit")


def test_cifar_folder_with_arrays(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (12, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(12) % 10
    np.savez(
        tmp_path / "cifar10_subset.npz",
        train_images=images[:8],
        train_labels=labels[:8],
        test_images=images[8:],
        test_labels=labels[8:],
    )
    data = PhotoData(data_dir=str(tmp_path), source="folder")
    data.setup("fit")
    image, label, index = data.val_set[1]
    assert (label, index, len(data.train_set)) == (9, 1, 8)
    assert torch.equal(image, torch.from_numpy(images[9]).permute(2, 0, 1))


def test_cifar_folder_as_torchvision_leaves_it(tmp_path, monkeypatch):
    from torchvision.datasets import CIFAR10

    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    batch = {"data": np.zeros((2, 3072), dtype=np.uint8), "labels": [3, 4]}
    for name, _ in CIFAR10.train_list + CIFAR10.test_list:
        (folder / name).write_bytes(pickle.dumps(batch))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    monkeypatch.setattr(CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setitem(CIFAR10.meta, "md5", None)
    data = PhotoData(data_dir=str(tmp_path), source="folder")
    data.setup("fit")
    assert (len(data.train_set), len(data.val_set)) == (10, 2)


@pytest.mark.parametrize("given", ["folder", "file"])
def test_gpt_folder_or_file(given, tmp_path):
    text = bytes(range(100))
    file = tmp_path / ("input.txt" if given == "folder" else "poem.txt")
    file.write_bytes(text)
    data = TextData(data_dir=str(tmp_path if given == "folder" else file), source="folder", context=4)
    data.setup("fit")
    assert bytes(data.train_set.tokens.tolist()) == text[:90]
    assert bytes(data.val_set.tokens.tolist()) == text[90:]
    tokens, targets = data.train_set[2]
    assert (tokens.tolist(), targets.tolist()) == ([8, 9, 10, 11], [9, 10, 11, 12])


def test_texts_of_a_folder(tmp_path):
    for name, texts in (("a", ["one", "a longer text"]), ("b", ["two"])):
        (tmp_path / name).mkdir()
        for number, text in enumerate(texts):
            (tmp_path / name / f"{number}.txt").write_text(text)
    data = TextClasses(data_dir=str(tmp_path), source="folder", length=5)
    data.setup("fit")
    tokens, number = data.train_set[0]
    assert bytes(tokens["input_ids"].tolist()) == b"a lon"
    assert number == 0
    tokens, _ = data.train_set[1]
    assert (tokens["attention_mask"].tolist(), tokens["input_ids"].tolist()) == ([1, 1, 1, 0, 0], [*b"two", 0, 0])
    assert bytes(data.val_set[0][0]["input_ids"].tolist()[:3]) == b"one"


@needs_transformers
def test_frozen_blocks_keep_their_weights(tmp_path):
    module = small_encoder(frozen_blocks=2)
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    train(module, few_texts(), tmp_path, steps=2)
    kept = {name for name, parameter in module.named_parameters() if torch.equal(before[name], parameter)}
    assert {name.split(".")[3] if "encoder" in name else "embeddings" for name in kept} >= {"embeddings"}
    assert {name for name in kept if "layer.0." in name or "layer.1." in name}
    assert not {name for name in kept if "layer.2." in name or "classifier" in name}
    with pytest.raises(ValueError, match="frozen_blocks=4, but the encoder has 3 blocks"):
        small_encoder(frozen_blocks=4)


@needs_transformers
def test_fine_tunes_what_transformers_has_saved(tmp_path):
    from recipes.finetune.model import TextClassifier, small_config

    torch.manual_seed(0)
    first = small_encoder()
    first.net.save_pretrained(tmp_path / "saved")
    second = TextClassifier(pretrained=str(tmp_path / "saved"), frozen_blocks=1)
    for (name, one), two in zip(first.net.bert.named_parameters(), second.net.bert.parameters(), strict=True):
        assert torch.equal(one, two), name
    assert second.net.config.hidden_size == small_config(16, 3, 2, 16).hidden_size
    train(second, few_texts(), tmp_path, steps=1)


def test_missing_packages_are_named_with_the_extra_that_brings_them():
    require("json", "skimage", recipe="cifar")
    with pytest.raises(
        ModuleNotFoundError,
        match=r"The cifar recipe needs no_such_one\. Install the extra \[recipes\]: pip install -c constraints.txt",
    ):
        require("json", "no_such_one", recipe="cifar")


@pytest.mark.parametrize(
    ("recipe", "lacking", "wanted"),
    [
        ("cifar", "skimage", "The cifar recipe needs scikit-image. Install the extra [recipes]:"),
        ("finetune", "transformers", "The finetune recipe needs transformers. Install the extra [models]:"),
    ],
)
@pytest.mark.slow
def test_a_recipe_without_its_packages_says_what_to_install(recipe, lacking, wanted):
    """Like `pardist fit -c recipes/NAME/config.yaml` in an environment that lacks a package."""
    code = (
        "import sys, importlib.util as util; find = util.find_spec\n"
        f"util.find_spec = lambda name, *more: None if name == {lacking!r} else find(name, *more)\n"
        "from lightning_pardist.cli import main\n"
        f"sys.exit(main(['fit', '-c', 'recipes/{recipe}/config.yaml']))"
    )
    root = Path(__file__).parents[2]
    finished = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120, check=False
    )
    assert finished.returncode == 2, finished.stderr
    assert wanted in finished.stderr
    assert "Traceback" not in finished.stderr


def test_text_shorter_than_a_window_is_refused():
    with pytest.raises(ValueError, match="context=8 needs a text of 9 bytes, this one has 8"):
        Windows(b"12345678", context=8)


@pytest.mark.alone
def test_server_that_never_answers_is_given_up_on():
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        asked = []
        started = time.monotonic()
        assert url in fetch(lambda: asked.append(url), url, timeout_s=0.2)
        assert time.monotonic() - started < 2
        assert not asked


def test_failed_download_is_the_reason_given(tmp_path, monkeypatch):
    monkeypatch.setattr("recipes.gpt.data.SHAKESPEARE", "http://127.0.0.1:1/input.txt")
    data = TextData(data_dir=str(tmp_path), source="download")
    data.prepare_data()
    with pytest.raises(FileNotFoundError, match=r"source='download'.*refused"):
        data.setup("fit")
    data = TextData(data_dir=str(tmp_path), source="auto")
    data.prepare_data()
    data.setup("fit")
    assert len(data.train_set) > 1000


def test_order_is_the_one_lightning_deals_to_several_processes(monkeypatch):
    from lightning.pytorch.trainer.connectors.data_connector import _get_distributed_sampler, _is_dataloader_shuffled

    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    one = EpochShuffle(range(12))
    loader = torch.utils.data.DataLoader(range(12), sampler=one)
    shuffled = _is_dataloader_shuffled(loader)
    ranks = [_get_distributed_sampler(loader, shuffled, 0, num_replicas=3, rank=rank) for rank in range(3)]
    for sampler in (one, *ranks):
        sampler.set_epoch(2)
    dealt = [index for step in zip(*ranks, strict=True) for index in step]
    assert list(one) == dealt
    one.set_epoch(3)
    assert list(one) != dealt


def test_augmentation_of_a_sample_ignores_its_batch():
    images = torch.rand(6, 3, 32, 32)
    choices = draws(6, epoch=1)
    whole = shift_and_mirror(images, choices)
    assert torch.equal(whole[4:5], shift_and_mirror(images[4:5], choices[4:5]))
    assert torch.equal(shift_and_mirror(images, torch.tensor([[4, 4, 0]] * 6)), images)
    assert torch.equal(shift_and_mirror(images, torch.tensor([[4, 4, 1]] * 6)), images.flip(3))
    moved = shift_and_mirror(images, torch.tensor([[5, 4, 0]] * 6))
    assert torch.equal(moved[:, :, :-1], images[:, :, 1:])


def test_gpt_ties_and_groups_its_parameters(tmp_path):
    module = small_gpt()
    train(module, TextData(source="offline", context=8, batch_size=4), tmp_path, steps=1)
    assert module.head.weight is module.embed.weight
    decayed, rest = module.optimizers().param_groups
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert all(p.dim() == 2 for p in decayed["params"])
    assert len(decayed["params"]) + len(rest["params"]) == len(list(module.parameters()))


def test_gpt_refuses_heads_that_do_not_fit():
    with pytest.raises(ValueError, match="heads=3 does not divide dim=16"):
        small_gpt(heads=3)


def test_gpt_looks_only_back_and_writes_the_same_again():
    module = small_gpt(dropout=0.0)
    tokens = torch.randint(256, (1, 8))
    changed = tokens.clone()
    changed[0, 5] += 1 if changed[0, 5] < 255 else -1
    torch.testing.assert_close(module(tokens)[:, :5], module(changed)[:, :5])
    assert module.write("ab", 10) == module.write("ab", 10)


def test_schedule_warms_up_and_ends_at_a_tenth():
    factors = [warmup_cosine(step, warmup=4, steps=20) for step in range(21)]
    assert factors[0] == 0.25
    assert factors[4] == max(factors) == 1.0
    assert factors[20] == pytest.approx(0.1)
