"""Small modules of many kinds, with data, for comparing plans with real runs."""

from __future__ import annotations

import lightning_pardist  # noqa: F401  (before lightning)

# isort: split
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.workloads import GPTLoss


class _Module(pl.LightningModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class GPTModule(_Module):
    """Decoder with 3 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = GPTLoss(dim=192, layers=4, heads=4, context=128, vocab_size=4096)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(*batch)

    @staticmethod
    def data(count: int) -> TensorDataset:
        tokens = torch.randint(4096, (count, 129), generator=torch.Generator().manual_seed(1))
        return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


class ResNetModule(_Module):
    """ResNet-18 on 64x64 images."""

    def __init__(self) -> None:
        super().__init__()
        from torchvision.models import resnet18

        self.net = resnet18(num_classes=10)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    @staticmethod
    def data(count: int) -> TensorDataset:
        return TensorDataset(torch.randn(count, 3, 64, 64), torch.randint(10, (count,)))


class LSTMModule(_Module):
    """Two LSTM layers over text, with 2 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(2000, 256)
        self.lstm = nn.LSTM(256, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, 2000)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out, _ = self.lstm(self.embed(batch[0]))
        return F.cross_entropy(self.head(out).flatten(0, 1), batch[1].flatten())

    @staticmethod
    def data(count: int) -> TensorDataset:
        tokens = torch.randint(2000, (count, 65), generator=torch.Generator().manual_seed(1))
        return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


class MLPModule(_Module):
    """Wide linear layers on few samples: communication and update dominate."""

    def __init__(self) -> None:
        super().__init__()
        widths = [256, 1024, 1024, 1024, 1024, 10]
        stack: list[nn.Module] = []
        for before, after in pairwise(widths):
            stack += [nn.Linear(before, after), nn.GELU()]
        self.net = nn.Sequential(*stack[:-1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    @staticmethod
    def data(count: int) -> TensorDataset:
        return TensorDataset(torch.randn(count, 256), torch.randint(10, (count,)))


class BertModule(_Module):
    """BERT of transformers with 4 layers and a masked-token head."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertForMaskedLM

        config = BertConfig(vocab_size=2000, hidden_size=192, num_hidden_layers=4, num_attention_heads=4,
                            intermediate_size=768, max_position_embeddings=128)  # fmt: skip
        self.net = BertForMaskedLM(config)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(input_ids=batch[0], labels=batch[1]).loss

    @staticmethod
    def data(count: int) -> TensorDataset:
        return TensorDataset(*(torch.randint(2000, (count, 64)) for _ in range(2)))


class T5Module(_Module):
    """T5 of transformers with 3 encoder and 3 decoder layers."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import T5Config, T5ForConditionalGeneration

        config = T5Config(vocab_size=2000, d_model=192, d_kv=48, d_ff=512, num_layers=3, num_heads=4,
                          decoder_start_token_id=0)  # fmt: skip
        self.net = T5ForConditionalGeneration(config)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(input_ids=batch[0], labels=batch[1]).loss

    @staticmethod
    def data(count: int) -> TensorDataset:
        return TensorDataset(torch.randint(2000, (count, 48)), torch.randint(2000, (count, 32)))


class MixtralModule(_Module):
    """Mixtral of transformers: a decoder of 3 layers with 4 experts each, 2 of them per token."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import MixtralConfig, MixtralForCausalLM

        config = MixtralConfig(vocab_size=2000, hidden_size=128, intermediate_size=256, num_hidden_layers=3,
                               num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
                               max_position_embeddings=128)  # fmt: skip
        self.net = MixtralForCausalLM(config)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(input_ids=batch[0], labels=batch[0]).loss

    @staticmethod
    def data(count: int) -> TensorDataset:
        return TensorDataset(torch.randint(2000, (count, 64)))


class MixtureModule(_Module):
    """Two mixture-of-experts layers with a list of experts that a router dispatches tokens to."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(2000, 128), nn.Linear(128, 2000)
        self.layers = nn.ModuleList(_Experts() for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embed(batch[0])
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch[0].flatten())

    @staticmethod
    def data(count: int) -> TensorDataset:
        return TensorDataset(torch.randint(2000, (count, 64)))


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(128, 8)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)) for _ in range(8)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2, -1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            out = out.index_add(0, row, expert(flat[row]) * weights[row, place, None])
        return out.view_as(x)


class UNetModule(_Module):
    """U-Net with two levels and skip connections, on 32x32 images."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down, self.low = _convolutions(3, 32), _convolutions(32, 64), _convolutions(64, 128)
        self.up, self.last = _convolutions(192, 64), _convolutions(96, 32)
        self.head = nn.Conv2d(32, 3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first = self.first(batch[0])
        down = self.down(F.max_pool2d(first, 2))
        low = self.low(F.max_pool2d(down, 2))
        up = self.up(torch.cat([F.interpolate(low, scale_factor=2), down], 1))
        last = self.last(torch.cat([F.interpolate(up, scale_factor=2), first], 1))
        return F.mse_loss(self.head(last), batch[0])

    @staticmethod
    def data(count: int) -> TensorDataset:
        return TensorDataset(torch.randn(count, 3, 32, 32))


def _convolutions(inside: int, outside: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(8, outside), nn.SiLU()),
        *(nn.Conv2d(outside, outside, 3, padding=1), nn.GroupNorm(8, outside), nn.SiLU()),
    )


class GRUModule(_Module):
    """Tagger with a bidirectional GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(3000, 192), nn.Linear(384, 40)
        self.gru = nn.GRU(192, 192, num_layers=2, batch_first=True, bidirectional=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(self.gru(self.embed(batch[0]))[0]).flatten(0, 1), batch[1].flatten())

    @staticmethod
    def data(count: int) -> TensorDataset:
        return TensorDataset(torch.randint(3000, (count, 48)), torch.randint(40, (count, 48)))


class EncoderModule(_Module):
    """Transformer encoder of torch, 5 layers."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(192, 6, 768, batch_first=True, dropout=0.0)
        self.embed, self.net, self.head = nn.Linear(32, 192), nn.TransformerEncoder(layer, 5), nn.Linear(192, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.head(self.net(self.embed(batch[0]))), batch[1])

    @staticmethod
    def data(count: int) -> TensorDataset:
        return TensorDataset(torch.randn(count, 64, 32), torch.randn(count, 64, 8))


class ImageModule(_Module):
    """A model that classifies images.

    Args:
        net: Takes images.

    Attributes:
        size: Height and width of an image.
    """

    size = 64

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    @classmethod
    def data(cls, count: int) -> TensorDataset:
        return TensorDataset(torch.randn(count, 3, cls.size, cls.size), torch.randint(10, (count,)))


class ViTModule(ImageModule):
    """Vision transformer of torchvision, 4 layers."""

    def __init__(self) -> None:
        from torchvision.models import VisionTransformer

        super().__init__(VisionTransformer(64, 8, 4, 4, 192, 384, num_classes=10))


class MobileNetModule(ImageModule):
    """MobileNet V3 of torchvision."""

    size = 96

    def __init__(self) -> None:
        from torchvision.models import mobilenet_v3_small

        super().__init__(mobilenet_v3_small(num_classes=10))


class ConvNeXtModule(ImageModule):
    """ConvNeXt of torchvision, three stages."""

    def __init__(self) -> None:
        from torchvision.models.convnext import CNBlockConfig, ConvNeXt

        blocks = [CNBlockConfig(48, 96, 2), CNBlockConfig(96, 192, 2), CNBlockConfig(192, None, 4)]
        super().__init__(ConvNeXt(blocks, num_classes=10))


class AutoencoderModule(_Module):
    """Autoencoder of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        widths = (784, 512, 256, 64, 256, 512, 784)
        layers = [each for pair in pairwise(widths) for each in (nn.Linear(*pair), nn.ReLU())]
        self.net = nn.Sequential(*layers[:-1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[0])

    @staticmethod
    def data(count: int) -> TensorDataset:
        return TensorDataset(torch.randn(count, 784))


class MixerModule(_Module):
    """MLP-Mixer of 6 layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(48, 128), nn.Linear(128, 10)
        self.tokens, self.channels = (
            nn.ModuleList(
                nn.Sequential(nn.LayerNorm(width), nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
                for _ in range(6)
            )
            for width, inner in ((64, 128), (128, 512))
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embed(batch[0])
        for tokens, channels in zip(self.tokens, self.channels, strict=True):
            x = x + tokens(x.transpose(1, 2)).transpose(1, 2)
            x = x + channels(x)
        return F.cross_entropy(self.head(x.mean(1)), batch[1])

    @staticmethod
    def data(count: int) -> TensorDataset:
        return TensorDataset(torch.randn(count, 64, 48), torch.randint(10, (count,)))


class WideModule(_Module):
    """Recommender with 12 embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embeds = nn.ModuleList(nn.Embedding(2000, 32) for _ in range(12))
        self.net = nn.Sequential(nn.Linear(384, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        values = torch.cat([embed(batch[0][:, index]) for index, embed in enumerate(self.embeds)], 1)
        return F.binary_cross_entropy_with_logits(self.net(values)[:, 0], batch[1])

    @staticmethod
    def data(count: int) -> TensorDataset:
        return TensorDataset(torch.randint(2000, (count, 12)), torch.rand(count))


class GPT2Module(_Module):
    """GPT-2 of transformers, 6 layers."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(vocab_size=4000, n_embd=256, n_layer=6, n_head=8, n_positions=128, resid_pdrop=0.0,
                            embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
        self.net = GPT2LMHeadModel(config)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(input_ids=batch[0], labels=batch[0]).loss

    @staticmethod
    def data(count: int) -> TensorDataset:
        return TensorDataset(torch.randint(4000, (count, 96)))


class LlamaModule(_Module):
    """Llama of transformers, 6 layers."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(vocab_size=3000, hidden_size=192, intermediate_size=512, num_hidden_layers=6,
                             num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=128)  # fmt: skip
        self.net = LlamaForCausalLM(config)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(input_ids=batch[0], labels=batch[0]).loss

    @staticmethod
    def data(count: int) -> TensorDataset:
        return TensorDataset(torch.randint(3000, (count, 80)))


MODELS: dict[str, Any] = {
    "gpt": GPTModule,
    "resnet18": ResNetModule,
    "lstm": LSTMModule,
    "mlp": MLPModule,
    "bert": BertModule,
    "t5": T5Module,
    "mixtral": MixtralModule,
    "mixture": MixtureModule,
    "unet": UNetModule,
    # With those below no factor of the time model was chosen.
    "gru": GRUModule,
    "encoder": EncoderModule,
    "vit": ViTModule,
    "mobilenet": MobileNetModule,
    "convnext": ConvNeXtModule,
    "autoencoder": AutoencoderModule,
    "mixer": MixerModule,
    "wide": WideModule,
    "gpt2": GPT2Module,
    "llama": LlamaModule,
}
