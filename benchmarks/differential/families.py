"""Small models of every family that transformers and torchvision know, with a batch for each.

Nothing here is written for a family: a configuration gets small values under the names that it has, and a family that
does not build, is too large all the same or does not train on one process is left out, with the reason.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 64
LENGTH = 12
PIXELS = 32
CLASSES = 5
MAX_PARAMETERS = 3_000_000

_SMALL: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "word_embed_proj_dim", "d_embed"), 32
    ),
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "n_layer",
            "n_layers",
            "num_layers",
            "encoder_layers",
            "decoder_layers",
            "num_decoder_layers",
            "num_encoder_layers",
        ),
        4,
    ),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "encoder_attention_heads",
            "decoder_attention_heads",
        ),
        4,
    ),
    **dict.fromkeys(
        (
            "intermediate_size",
            "ffn_dim",
            "d_ff",
            "n_inner",
            "encoder_ffn_dim",
            "decoder_ffn_dim",
            "ffn_hidden_size",
            "hidden_dim",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "d_inner",
        ),
        48,
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "kv_channels", "v_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_source_positions"), 64),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    "qk_rope_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "state_size": 8,
    "vocab_size": VOCABULARY,
    "image_size": PIXELS,
    "patch_size": 8,
    "num_labels": CLASSES,
    "type_vocab_size": 2,
    "use_cache": False,
    **dict.fromkeys(("pad_token_id", "decoder_start_token_id"), 0),
    **dict.fromkeys(("bos_token_id",), 1),
    **dict.fromkeys(("eos_token_id",), 2),
}


@dataclass(frozen=True)
class Family:
    """One model to train.

    Attributes:
        name: ``task/family``.
        build: Makes the model; random values come from torch's global generator.
        batch: Makes ``n`` samples as a tuple of tensors, with a generator.
        loss: Model and one batch to the mean loss.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], tuple[Tensor, ...]]
    loss: Callable[[nn.Module, tuple[Tensor, ...]], Tensor]


def _tokens(count: int, draw: torch.Generator) -> tuple[Tensor, ...]:
    return (torch.randint(3, VOCABULARY, (count, LENGTH), generator=draw),)


def _labelled_tokens(count: int, draw: torch.Generator) -> tuple[Tensor, ...]:
    """Tokens, and labels of which a third is ignored, other ones in every sample."""
    tokens = torch.randint(3, VOCABULARY, (count, LENGTH), generator=draw)
    labels = tokens.masked_fill(torch.rand(count, LENGTH, generator=draw) < 1 / 3, -100)
    labels[:, 1] = tokens[:, 1]
    return tokens, labels


def _images(count: int, draw: torch.Generator) -> tuple[Tensor, ...]:
    return torch.randn(count, 3, PIXELS, PIXELS, generator=draw), torch.randint(CLASSES, (count,), generator=draw)


def _waves(count: int, draw: torch.Generator) -> tuple[Tensor, ...]:
    return torch.randn(count, 2000, generator=draw), torch.randint(CLASSES, (count,), generator=draw)


def _token_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return model(input_ids=batch[0], labels=batch[-1]).loss


def _class_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return model(pixel_values=batch[0], labels=batch[1]).loss


def _wave_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return model(input_values=batch[0], labels=batch[1]).loss


def _logits_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


#: Task: the mapping of transformers that lists its families, samples, loss.
_TASKS: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "decoder": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", _labelled_tokens, _token_loss),
    "encoder": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", _labelled_tokens, _token_loss),
    "seq2seq": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", _labelled_tokens, _token_loss),
    "image": ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", _images, _class_loss),
    "audio": ("MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES", _waves, _wave_loss),
}

_VISION = (
    "alexnet",
    "convnext_tiny",
    "densenet121",
    "efficientnet_b0",
    "googlenet",
    "mnasnet0_5",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "regnet_y_400mf",
    "resnet18",
    "shufflenet_v2_x0_5",
    "squeezenet1_1",
    "swin_t",
    "vgg11",
    "vit_b_32",
)


def families() -> list[Family]:
    """Every family by name; which of them build is found by building them."""
    from transformers.models.auto import configuration_auto, modeling_auto

    found = []
    for task, (mapping, batch, loss) in _TASKS.items():
        for name, class_name in getattr(modeling_auto, mapping).items():
            config_name = configuration_auto.CONFIG_MAPPING_NAMES.get(name)
            if config_name is not None:
                names = (name, config_name, class_name if isinstance(class_name, str) else class_name[0])
                found.append(Family(f"{task}/{name}", _builder(*names), batch, loss))
    for name in _VISION:
        found.append(Family(f"torchvision/{name}", _vision_builder(name), _images, _logits_loss))
    return found


def _builder(family: str, config_name: str, class_name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        package = importlib.import_module(f"transformers.models.{_module_of(family)}")
        config = small_config(getattr(package, config_name))
        with torch.device("meta"):
            size = sum(param.numel() for param in getattr(package, class_name)(config).parameters())
        if size > MAX_PARAMETERS:
            raise ValueError(f"{size:,} parameters with small sizes")
        return getattr(package, class_name)(config)

    return build


def _module_of(family: str) -> str:
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    return str(model_type_to_module_name(family))


def _vision_builder(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import torchvision

        settings: dict[str, Any] = {"num_classes": CLASSES}
        factory = getattr(torchvision.models, name)
        if name == "googlenet":
            settings |= {"aux_logits": False, "init_weights": False}
        if "image_size" in inspect.signature(factory).parameters or name.startswith("vit"):
            settings["image_size"] = PIXELS
        return without_dropout(factory(**settings))

    return build


def small_config(config_class: Any) -> Any:
    """A configuration with small sizes under the names that it has, and nothing random in training."""
    default = config_class()
    names = {name for name in _SMALL if hasattr(default, name)}
    values = {name: _SMALL[name] for name in names if isinstance(getattr(default, name), (int, float, type(None)))}
    for name, value in vars(default).items():
        if isinstance(value, float) and any(word in name for word in ("drop", "jitter")):
            values[name] = 0.0
    return config_class(**values)


def without_dropout(model: nn.Module) -> nn.Module:
    """The model with every dropout's probability set to zero."""
    for module in model.modules():
        for name in ("p", "drop_prob", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model
