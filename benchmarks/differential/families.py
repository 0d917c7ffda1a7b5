"""Small models of every family in transformers and torchvision, with a batch for each.

A configuration gets small values under the names it has, and those of a table where its sizes depend on each other. A
family that does not build, is still too large or does not train on one process is left out, with the reason.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.differential.sizes import CLASSES, LENGTH, PIXELS, TIMM, VOCABULARY, small_config

MAX_PARAMETERS = 3_000_000


@dataclass(frozen=True)
class Family:
    """One model to train.

    Attributes:
        name: ``task/family``.
        build: Makes the model; random values come from torch's global generator.
        batch: Makes ``n`` samples as a tuple of tensors, with a generator.
        loss: Returns the mean loss of a model on one batch.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], tuple[Tensor, ...]]
    loss: Callable[[nn.Module, tuple[Tensor, ...]], Tensor]


def _tokens(count: int, draw: torch.Generator) -> tuple[Tensor, ...]:
    return (torch.randint(3, VOCABULARY, (count, LENGTH), generator=draw),)


def _labelled_tokens(count: int, draw: torch.Generator) -> tuple[Tensor, ...]:
    """Return tokens and labels; a third of the labels are ignored, at different positions in every sample."""
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


def _spoken(count: int, draw: torch.Generator) -> tuple[Tensor, ...]:
    """Return spectrograms of 80 bands with time last, and labels of which some are ignored."""
    return torch.randn(count, 80, 64, generator=draw), *_labelled_tokens(count, draw)[1:]


def _captioned(count: int, draw: torch.Generator) -> tuple[Tensor, ...]:
    return torch.randn(count, 3, PIXELS, PIXELS, generator=draw), *_labelled_tokens(count, draw)


def _segmented(count: int, draw: torch.Generator) -> tuple[Tensor, ...]:
    """Return images, and the class of every pixel, 255 where it is ignored."""
    classes = torch.randint(CLASSES, (count, PIXELS, PIXELS), generator=draw)
    ignored = torch.rand(count, PIXELS, PIXELS, generator=draw) < 1 / 4
    return torch.randn(count, 3, PIXELS, PIXELS, generator=draw), classes.masked_fill(ignored, 255)


def _spectra(count: int, draw: torch.Generator) -> tuple[Tensor, ...]:
    return torch.randn(count, 64, 16, generator=draw), torch.randint(CLASSES, (count,), generator=draw)


def _series(count: int, draw: torch.Generator) -> tuple[Tensor, ...]:
    """Return the past and the future of two channels, ``[count, time, channel]``."""
    whole = torch.randn(count, 64, 2, generator=draw).cumsum(1) / 4
    return whole[:, :48], whole[:, 48:]


def _spoken_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    # Whisper's spectrograms are [sample, band, time], Speech2Text's [sample, time, band].
    spectrum = batch[0] if hasattr(model.config, "num_mel_bins") else batch[0].transpose(1, 2)
    return model(input_features=spectrum, labels=batch[1].clamp(min=0)).loss


def _caption_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return model(pixel_values=batch[0], input_ids=batch[1], labels=batch[2]).loss


def _series_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    past, future = batch
    times = {}
    if hasattr(model.config, "num_time_features"):
        # Time features are each point's age; the mask marks all points as observed.
        age = torch.arange(64, dtype=past.dtype, device=past.device).expand(len(past), -1).unsqueeze(-1) / 64
        times = {"past_time_features": age[:, :48], "future_time_features": age[:, 48:]}
        times["past_observed_mask"] = torch.ones_like(past)
    return model(past_values=past, future_values=future, **times).loss


def _pixel_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0])["out"], batch[1], ignore_index=255)


def _logits_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


#: By task: the mapping of transformers that lists its families (or families and their classes), samples, and loss.
_TASKS: dict[str, tuple[str | dict[str, str], Callable[..., Any], Callable[..., Any]]] = {
    "decoder": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", _labelled_tokens, _token_loss),
    "encoder": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", _labelled_tokens, _token_loss),
    "seq2seq": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", _labelled_tokens, _token_loss),
    "image": ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", _images, _class_loss),
    "audio": ("MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES", _waves, _wave_loss),
    "pixels": ("MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES", _segmented, _class_loss),
    "speech": ("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", _spoken, _spoken_loss),
    "caption": (
        {"blip": "BlipForConditionalGeneration", "git": "GitForCausalLM", "vilt": "ViltForMaskedLM"},
        _captioned,
        _caption_loss,
    ),
    "spectrum": ({"audio-spectrogram-transformer": "ASTForAudioClassification"}, _spectra, _wave_loss),
    "series": (
        {
            "patchtst": "PatchTSTForPrediction",
            "patchtsmixer": "PatchTSMixerForPrediction",
            "autoformer": "AutoformerForPrediction",
            "informer": "InformerForPrediction",
            "time_series_transformer": "TimeSeriesTransformerForPrediction",
        },
        _series,
        _series_loss,
    ),
}

_VISION = (
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
)

_SEGMENTATION = ("deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large")


def families() -> list[Family]:
    """Return every family by name; whether one builds is only found by building it."""
    from transformers.models.auto import configuration_auto, modeling_auto

    found = []
    for task, (mapping, batch, loss) in _TASKS.items():
        classes = getattr(modeling_auto, mapping) if isinstance(mapping, str) else mapping
        for name, class_name in classes.items():
            config_name = configuration_auto.CONFIG_MAPPING_NAMES.get(name)
            if config_name is not None:
                names = (name, config_name, class_name if isinstance(class_name, str) else class_name[0])
                found.append(Family(f"{task}/{name}", _builder(*names), batch, loss))
    for name in _VISION:
        found.append(Family(f"torchvision/{name}", _vision_builder(name), _images, _logits_loss))
    for name, build in {"vit": _tiny_vit, "swin": _tiny_swin, "convnext": _tiny_convnext}.items():
        found.append(Family(f"torchvision/{name}", build, _images, _logits_loss))
    for name in _SEGMENTATION:
        found.append(Family(f"segmentation/{name}", _segmentation_builder(name), _segmented, _pixel_loss))
    if importlib.util.find_spec("timm"):
        for name in TIMM:
            found.append(Family(f"timm/{name}", _timm_builder(name), _images, _logits_loss))
    return found


def _builder(family: str, config_name: str, class_name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        package = importlib.import_module(f"transformers.models.{_module_of(family)}")
        config = small_config(getattr(package, config_name), family)
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
        if name == "googlenet":
            settings |= {"aux_logits": False, "init_weights": False}
        return without_dropout(getattr(torchvision.models, name)(**settings))

    return build


def _tiny_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(PIXELS, 8, num_layers=4, num_heads=4, hidden_dim=32, mlp_dim=64, num_classes=CLASSES)


def _tiny_swin() -> nn.Module:
    from torchvision.models import SwinTransformer

    sizes: dict[str, Any] = {"embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4], "window_size": [4, 4]}
    return SwinTransformer([2, 2], **sizes, num_classes=CLASSES, stochastic_depth_prob=0.0)


def _tiny_convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    blocks = [CNBlockConfig(16, 32, 2), CNBlockConfig(32, None, 2)]
    return ConvNeXt(blocks, stochastic_depth_prob=0.0, num_classes=CLASSES)


def _segmentation_builder(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import torchvision

        factory = getattr(torchvision.models.segmentation, name)
        return without_dropout(factory(num_classes=CLASSES, weights=None, weights_backbone=None))

    return build


def _timm_builder(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        return without_dropout(timm.create_model(name, num_classes=CLASSES, **TIMM[name]))

    return build


def without_dropout(model: nn.Module) -> nn.Module:
    """Return the model with every dropout probability set to zero."""
    for module in model.modules():
        for name in ("p", "drop_prob", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model
