"""Text classifier on an encoder of Hugging Face's transformers, pretrained or built from a small config."""

from __future__ import annotations

import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn, optim
from torchmetrics.classification import MulticlassAccuracy

from recipes.common import require

require("transformers", recipe="finetune", extra="models")

from transformers import AutoConfig, AutoModelForSequenceClassification, BertConfig  # noqa: E402


class TextClassifier(LightningModule):
    """Sequence classifier of any transformers architecture that has one.

    Args:
        pretrained: A folder of ``save_pretrained``, or a name on the hub. By default a small byte-level BERT with
            random weights, of the sizes below, which needs neither a download nor a tokenizer.
        num_classes: Number of classes.
        frozen_blocks: Number of first blocks that are frozen, together with the embeddings; 0 trains all.
        lr: Learning rate of AdamW for the encoder.
        head_lr: Learning rate of AdamW for the classifier, which is newly initialized.
        weight_decay: Decay of all trained parameters.
        dim: Width of the small BERT.
        layers: Blocks of the small BERT.
        heads: Attention heads of the small BERT.
        max_length: Maximum number of tokens of the small BERT.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        num_classes: int = 6,
        frozen_blocks: int = 0,
        lr: float = 1e-3,
        head_lr: float = 1e-3,
        weight_decay: float = 0.01,
        dim: int = 64,
        layers: int = 4,
        heads: int = 4,
        max_length: int = 128,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        if pretrained is None:
            config = small_config(dim, layers, heads, max_length)
            config.num_labels = num_classes
            self.net = AutoModelForSequenceClassification.from_config(config)
        else:
            config = AutoConfig.from_pretrained(pretrained, num_labels=num_classes)
            self.net = AutoModelForSequenceClassification.from_pretrained(pretrained, config=config)
        freeze(self.net.base_model, frozen_blocks)
        self.val_acc = MulticlassAccuracy(num_classes=num_classes, average="micro")

    def forward(self, texts: dict[str, Tensor]) -> Tensor:
        """Return logits ``[batch, num_classes]`` of ``input_ids`` and ``attention_mask``, both ``[batch, length]``."""
        return self.net(**texts).logits

    def training_step(self, batch: tuple[dict[str, Tensor], Tensor], batch_idx: int) -> Tensor:
        texts, labels = batch
        loss = F.cross_entropy(self(texts), labels)
        self.log("train_loss", loss, prog_bar=True, batch_size=len(labels))
        return loss

    def validation_step(self, batch: tuple[dict[str, Tensor], Tensor], batch_idx: int) -> None:
        texts, labels = batch
        logits = self(texts)
        self.val_acc(logits, labels)
        self.log("val_loss", F.cross_entropy(logits, labels), prog_bar=True, sync_dist=True, batch_size=len(labels))
        self.log("val_acc", self.val_acc, prog_bar=True, batch_size=len(labels))

    def configure_optimizers(self) -> optim.Optimizer:
        encoder = {id(parameter) for parameter in self.net.base_model.parameters()}
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in trained if id(p) in encoder], "lr": self.hparams.lr},
            {"params": [p for p in trained if id(p) not in encoder], "lr": self.hparams.head_lr},
        ]
        return optim.AdamW([group for group in groups if group["params"]], weight_decay=self.hparams.weight_decay)


def small_config(dim: int, layers: int, heads: int, max_length: int) -> BertConfig:
    """Return the config of a byte-level BERT without dropout, which makes runs on any number of devices comparable."""
    return BertConfig(
        vocab_size=256,
        hidden_size=dim,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * dim,
        max_position_embeddings=max_length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def freeze(encoder: nn.Module, blocks: int) -> None:
    """Freeze the embeddings and the first ``blocks`` blocks; nothing if 0.

    Raises:
        ValueError: If ``blocks`` is negative or the encoder has fewer blocks.
    """
    if blocks == 0:
        return
    lists = [module for module in encoder.modules() if isinstance(module, nn.ModuleList)]
    stack = max(lists, key=len, default=nn.ModuleList())
    if not 0 < blocks <= len(stack):
        raise ValueError(f"frozen_blocks={blocks}, but the encoder has {len(stack)} blocks. Use 0 to {len(stack)}.")
    for module in (encoder.get_input_embeddings(), *stack[:blocks]):
        module.requires_grad_(False)
