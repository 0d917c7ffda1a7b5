"""Third-party models in LightningModules as their users write them: a pipeline against one process."""

import lightning_pardist

# isort: split
import copy
import functools
import tempfile
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import quiet_trainer

transformers = pytest.importorskip("transformers")
torchvision = pytest.importorskip("torchvision")

_DECODER = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
_GROUPED = {**_DECODER, "num_key_value_heads": 2, "head_dim": 8}
_T5 = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
_BART = {
    "vocab_size": 96,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "dropout": 0.0,
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GPT2_DROPOUTS = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
LANGUAGE = {
    "GPT2LMHeadModel": {
        "vocab_size": 96,
        "n_positions": 32,
        "n_embd": 32,
        "n_layer": 4,
        "n_head": 4,
        **_GPT2_DROPOUTS,
    },
    "LlamaForCausalLM": _GROUPED,
    "Qwen2ForCausalLM": {**_DECODER, "num_key_value_heads": 2},
    "MixtralForCausalLM": {**_GROUPED, "num_local_experts": 4, "output_router_logits": False},
    "GPTNeoXForCausalLM": {**_DECODER, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "OPTForCausalLM": {
        "vocab_size": 96,
        "hidden_size": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 32,
        "max_position_embeddings": 64,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "BertForMaskedLM": {**_DECODER, **_NO_DROPOUT},
    "T5ForConditionalGeneration": {**_T5, "decoder_start_token_id": 0, "pad_token_id": 0},
    "BartForConditionalGeneration": {**_BART, "decoder_start_token_id": 0, "pad_token_id": 0},
    "Gemma2ForCausalLM": _GROUPED,
    "MambaForCausalLM": {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 4, "state_size": 4},
    "DistilBertForMaskedLM": {
        "vocab_size": 96,
        "dim": 32,
        "n_layers": 4,
        "n_heads": 4,
        "hidden_dim": 64,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    },
}
_VIT = {key: value for key, value in _DECODER.items() if key != "vocab_size"}
VISION = {
    "ViTForImageClassification": {**_VIT, "image_size": 32, "patch_size": 8, "num_labels": 10, **_NO_DROPOUT},
    "resnet18": {},
    "VisionTransformer": {
        "image_size": 32,
        "patch_size": 8,
        "num_layers": 4,
        "num_heads": 4,
        "hidden_dim": 32,
        "mlp_dim": 64,
    },
    "convnext_tiny": {},
    "swin_t": {},
    "densenet121": {},
    "efficientnet_b0": {},
}
#: Four samples per micro-batch: batch norm over fewer amplifies rounding without bound.
SIZE, PARTS = 8, 2


def _without_chance(model):
    """Disable dropout and stochastic depth, whose draws differ per micro-batch."""
    for module in model.modules():
        for attribute in ("p", "dropout", "attention_dropout", "dropout_prob"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)
    return model


class LanguageModel(pl.LightningModule):
    """The model computes the loss, the batch is a dict, and padding is ignored."""

    def __init__(self, name):
        super().__init__()
        self.save_hyperparameters()
        kind = getattr(transformers, name)
        self.model = _without_chance(kind(kind.config_class(**LANGUAGE[name])))
        self.val_loss = MeanMetric()
        self.losses = []

    def forward(self, **inputs):
        return self.model(**inputs)

    def training_step(self, batch, batch_idx):
        output = self(**batch)
        self.log("train_loss", output.loss, prog_bar=True, on_step=True, on_epoch=True, batch_size=1)
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])
        return output.loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].detach().clone())

    def validation_step(self, batch, batch_idx):
        output = self(**batch)
        self.val_loss(output.loss)
        self.log("val_loss", self.val_loss, prog_bar=True)

    def predict_step(self, batch, batch_idx):
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        if self.model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = batch["input_ids"]
        return self(**inputs).logits.argmax(-1)

    def configure_optimizers(self):
        decayed = [p for p in self.parameters() if p.ndim > 1]
        plain = [p for p in self.parameters() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @staticmethod
    def samples(count):
        generator = torch.Generator().manual_seed(7)
        made = []
        for index in range(count):
            tokens = torch.randint(3, 96, (10,), generator=generator)
            mask = (torch.arange(10) < 10 - index % 4).long()
            labels = tokens.where(mask > 0, -100)
            made.append({"input_ids": tokens.where(mask > 0, 0), "attention_mask": mask, "labels": labels})
        return made


class ImageModel(pl.LightningModule):
    """The loss is computed outside the model, batches are tuples, and metrics count classes."""

    def __init__(self, name):
        super().__init__()
        if hasattr(torchvision.models, name):
            self.model = getattr(torchvision.models, name)(num_classes=10, **VISION[name])
        else:
            kind = getattr(transformers, name)
            self.model = kind(kind.config_class(**VISION[name]))
        _without_chance(self.model)
        metrics = MetricCollection({"acc": MulticlassAccuracy(10), "f1": MulticlassF1Score(10)})
        self.train_metrics, self.val_metrics = metrics.clone(prefix="train_"), metrics.clone(prefix="val_")
        self.losses = []

    def forward(self, x):
        y = self.model(x)
        return getattr(y, "logits", y)

    def _shared_step(self, batch, stage, metrics):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y, label_smoothing=0.1)
        metrics.update(logits, y)
        self.log(f"{stage}_loss", loss, prog_bar=True, on_step=stage == "train", on_epoch=True)
        return loss, logits

    def training_step(self, batch, batch_idx):
        loss, logits = self._shared_step(batch, "train", self.train_metrics)
        self.log_dict({"largest": logits.detach().max(), "one": 1})
        return {"loss": loss, "preds": logits.argmax(1)}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert outputs["preds"].shape == batch[1].shape
        self.losses.append(outputs["loss"].detach().clone())

    def on_train_epoch_end(self):
        self.log_dict(self.train_metrics.compute())
        self.train_metrics.reset()

    def validation_step(self, batch, batch_idx):
        self._shared_step(batch, "val", self.val_metrics)
        self.log_dict(self.val_metrics)

    def predict_step(self, batch, batch_idx):
        return self(batch[0]).softmax(1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    @staticmethod
    def samples(count):
        images = torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(7))
        return [(image, index % 10) for index, image in enumerate(images)]


class _EarlyEnd(EarlyStopping):
    """EarlyStopping that stops at the first deterioration, and logs when."""


def exam(name, strategy="auto", devices=1, in_parts=False, **kwargs):
    """Fit, validate and predict; return all user-visible results.

    Batch norm sees micro-batches in a pipeline: ``in_parts`` makes one process do the same, by accumulation.
    """
    torch.manual_seed(11)
    module = LanguageModel(name) if name in LANGUAGE else ImageModel(name)
    # Batch norm over a few pixels amplifies rounding by thousands: fp64 removes that.
    double = name not in LANGUAGE
    samples = module.samples(24 if name in LANGUAGE else 16)
    folder = Path(tempfile.mkdtemp())
    checkpoint = ModelCheckpoint(dirpath=folder, monitor="val_loss", filename="best-{epoch}-{step}")
    trainer = quiet_trainer(
        strategy=strategy() if callable(strategy) else strategy,
        devices=devices,
        max_epochs=2,
        enable_checkpointing=True,
        callbacks=[checkpoint, _EarlyEnd("val_loss", patience=1)],
        precision="64-true" if double else "32-true",
        accumulate_grad_batches=PARTS if in_parts else 1,
        num_sanity_val_steps=1,
        **kwargs,
    )
    size = SIZE // PARTS if in_parts else SIZE
    val = DataLoader(copy.deepcopy(samples[:12]), batch_size=SIZE)
    trainer.fit(module, DataLoader(samples, batch_size=size), val)
    losses = torch.stack(module.losses)
    metrics = {key: value.detach().clone() for key, value in trainer.callback_metrics.items()}
    predicted = torch.cat(trainer.predict(module, val))
    return {
        "losses": {"loss": losses.unflatten(0, (-1, PARTS)).sum(1) if in_parts else losses},
        "metrics": {key: value for key, value in metrics.items() if not in_parts or key.startswith("val")},
        "weights": snapshot(module),
        "predicted": {"predicted": predicted.double()},
        "best": Path(checkpoint.best_model_path).name.split("-step")[0],
        "epochs": trainer.current_epoch,
    }


def _compare(got, want, what):
    assert got["best"] == want["best"], what
    assert got["epochs"] == want["epochs"], what
    for part in ("losses", "metrics", "weights", "predicted"):
        if part == "metrics":
            got[part] = {key: value for key, value in got[part].items() if key in want[part]}
        assert_close(got[part], want[part])


@pytest.mark.slow
@pytest.mark.parametrize("name", LANGUAGE)
def test_language_models(name):
    want = exam(name)
    for got in run_ranks(2, exam, name, "pardist_pp", 2):
        _compare(got, want, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", VISION)
def test_image_models(name):
    want = exam(name, in_parts=True)
    strategy = functools.partial(lightning_pardist.PipelineStrategy, num_microbatches=PARTS)
    for got in run_ranks(2, exam, name, strategy, 2):
        _compare(got, want, name)
