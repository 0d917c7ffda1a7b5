"""Quantised communication under a Trainer: exact weights outside of steps, resuming, refusals, convergence."""

import re
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_pardist import FSDPStrategy, HybridStrategy, ZeroStrategy
from lightning_pardist.axes.compression_setting import CompressionSetting
from lightning_pardist.mesh import ParallelDims
from recipes.gpt.data import Windows, read_standard_library
from recipes.gpt.model import GPT
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import quiet_trainer

STRATEGIES = {
    "zero1": lambda **codes: ZeroStrategy(zero_stage=1, **codes),
    "zero2": ZeroStrategy,
    "zero3": FSDPStrategy,
}
CODES = {"gather": "int8", "reduce": "int8"}
TINY = {"dim": 32, "layers": 2, "heads": 2, "context": 16, "warmup_steps": 2, "sample_tokens": 0, "dropout": 0.0}


class Watch(Callback):
    """Callback that records the loss of each validation's first batch on this rank."""

    def __init__(self) -> None:
        self.losses = []

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if batch_idx == 0:
            x, y = batch
            self.losses.append(F.cross_entropy(pl_module(x).flatten(0, 1), y.flatten()).item())


def _fit(kind, folder, resume=None):
    torch.manual_seed(5)
    windows = Windows(read_standard_library(size=16 * 64 + 1), TINY["context"])
    module = GPT(**TINY)
    watch = Watch()
    saved = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = quiet_trainer(
        strategy=STRATEGIES[kind](**CODES),
        devices=torch.distributed.get_world_size(),
        callbacks=[saved, watch],
        enable_checkpointing=True,
        max_epochs=-1,
        max_steps=5,
        val_check_interval=4,
        check_val_every_n_epoch=None,
        limit_val_batches=1,
    )
    loader = DataLoader(windows, batch_size=4)
    trainer.fit(module, loader, DataLoader(windows, batch_size=4), ckpt_path=resume)
    return snapshot(module), watch.losses


def _goes_on(kind, folder):
    whole, losses = _fit(kind, folder / "whole")
    resumed, _ = _fit(kind, folder / "resumed", folder / "whole" / "step=2.ckpt")
    return whole, resumed, losses


@pytest.mark.push("zero2")
@pytest.mark.parametrize("kind", ["zero2", "zero3"])
def test_exact_weights_are_validated_saved_and_gone_on_from(kind, tmp_path):
    results = run_ranks(2, _goes_on, kind, tmp_path)
    for rank, (whole, resumed, losses) in enumerate(results):
        assert_close(resumed, whole)
        assert_close(whole, results[0][0], rtol=0)
        at_four = torch.load(tmp_path / "whole" / "step=4.ckpt", weights_only=False)["state_dict"]
        alone = GPT(**TINY)
        alone.load_state_dict(at_four)
        windows = Windows(read_standard_library(size=16 * 64 + 1), TINY["context"])
        # Samples are interleaved over ranks.
        x, y = (torch.stack(each) for each in zip(*(windows[2 * i + rank] for i in range(4)), strict=True))
        assert F.cross_entropy(alone(x).flatten(0, 1), y.flatten()).item() == pytest.approx(losses[-1], rel=1e-5)


# --- what it learns ---------------------------------------------------------------------------------------------------


def _validated(kind, codes, steps):
    torch.manual_seed(5)
    text = read_standard_library(size=400_000)
    cut = len(text) * 9 // 10
    module = GPT(dim=64, layers=2, heads=2, context=32, warmup_steps=30, sample_tokens=0, dropout=0.0)
    trainer = quiet_trainer(
        strategy=STRATEGIES[kind](**codes),
        devices=torch.distributed.get_world_size(),
        max_epochs=-1,
        max_steps=steps,
        gradient_clip_val=1.0,
    )
    trainer.fit(module, DataLoader(Windows(text[:cut], 32), batch_size=16, shuffle=True))
    (found,) = trainer.validate(module, DataLoader(Windows(text[cut:], 32), batch_size=32), verbose=False)
    return found["val_loss"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "world"), [("zero2", 2), ("zero3", 2)])
def test_a_language_model_learns_as_much(kind, world):
    whole, coded = (run_ranks(world, _validated, kind, codes, 300, timeout_s=400)[0] for codes in ({}, CODES))
    print(f"\n{kind} on {world} ranks, 300 steps: validation loss {whole:.4f} in fp32, {coded:.4f} in int8")
    assert coded <= 1.005 * whole


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ZeroStrategy(gather="int3"), "gather='int3' is unknown. Use bf16, int8, int4 or None."),
        (lambda: FSDPStrategy(reduce="fp8"), "reduce='fp8' is unknown"),
        (lambda: ZeroStrategy(gather="int8", error_feedback=True), "error_feedback=True concerns"),
        (lambda: FSDPStrategy(error_feedback=False), "error_feedback=False concerns"),
        (lambda: FSDPStrategy(gather="int8", tile_linear_above_mb=1), "tile_linear_above_mb=1 is set"),
    ],
)
def test_settings_that_do_not_go_together(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_remainders_of_scaled_gradients_are_refused():
    scaled = SimpleNamespace(precision=SimpleNamespace(scaler=object()), dims=ParallelDims(data_shard=2))
    with pytest.raises(ValueError, match="precision='16-mixed'"):
        CompressionSetting(None, "int8", True).check(scaled)
    CompressionSetting("int8", "int8", False).check(scaled)
    CompressionSetting("int8", None, None).check(scaled)


def test_codes_that_depend_on_neighbours_are_refused_on_tensor_ranks():
    split = SimpleNamespace(precision=None, dims=ParallelDims(data_shard=2, tensor_parallel=2))
    for codes in (
        CompressionSetting("int8", None, None),
        CompressionSetting(None, "int4", True),
        CompressionSetting(None, "bf16", True),
    ):
        with pytest.raises(ValueError, match=r"between the 2 tensor ranks.*norms, biases"):
            codes.check(split)
    # bf16 quantises each number separately; int8 is accepted without data parallelism: no gradients are exchanged.
    CompressionSetting("bf16", None, None).check(split)
    CompressionSetting("int8", "int8", True).check(
        SimpleNamespace(precision=None, dims=ParallelDims(tensor_parallel=2))
    )


def _copies():
    texts = []
    for data_parallel in ("zero1", "zero3"):
        strategy = HybridStrategy(pipeline_parallel_size=2, data_parallel=data_parallel, data_settings=CODES)
        trainer = quiet_trainer(strategy=strategy, devices=4, max_steps=1)
        windows = Windows(read_standard_library(size=16 * 16 + 1), TINY["context"])
        with pytest.raises(ValueError, match="drift apart") as caught:
            trainer.fit(GPT(**TINY), DataLoader(windows, batch_size=4))
        texts.append(str(caught.value))
    return texts


def test_copies_on_several_stages_are_refused():
    """The first and the last layer share one weight."""
    for texts in run_ranks(4, _copies):
        assert all("reduce='int8'" in text and "copies of embed.weight" in text for text in texts)


def _islands():
    strategy = HybridStrategy(outer_parallel_size=2, data_parallel="zero1", data_settings={"gather": "int8"})
    trainer = quiet_trainer(strategy=strategy, devices=4, max_steps=1)
    windows = Windows(read_standard_library(size=16 * 8 + 1), TINY["context"])
    try:
        trainer.fit(GPT(**TINY), DataLoader(windows, batch_size=1))
    except ValueError as error:
        return str(error)
    return ""


def test_islands_of_rounded_parameters_are_refused():
    assert all("outer_compression" in text for text in run_ranks(4, _islands))
