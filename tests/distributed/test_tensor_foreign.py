"""Third-party models, built from small configurations, without any model-specific code in the engine."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

import lightning_pardist  # noqa: F401  (before torchvision, which it mends)
from lightning_pardist.engines.tensor import to_full_tensor
from tests.distributed.test_tensor import split
from tests.helpers.ranks import run_ranks

pytest.importorskip("transformers")
torchvision = pytest.importorskip("torchvision")

DECODER = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GROUPED = {**DECODER, "num_key_value_heads": 2, "head_dim": 8}
OPT = {"vocab_size": 96, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
T5 = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
TOKENS = {
    "GPT2LMHeadModel": {"vocab_size": 96, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "LlamaForCausalLM": GROUPED,
    "Qwen3ForCausalLM": {**GROUPED, "num_key_value_heads": 1},
    "Qwen2ForCausalLM": GROUPED,
    "Phi3ForCausalLM": {**DECODER, "num_key_value_heads": 2, "pad_token_id": 0},
    "GPTNeoXForCausalLM": DECODER,
    "FalconForCausalLM": {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "BloomForCausalLM": {"vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "MixtralForCausalLM": {**GROUPED, "num_local_experts": 4},
    "Gemma2ForCausalLM": GROUPED,
    "OPTForCausalLM": {**OPT, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    "BertForMaskedLM": DECODER,
    "DistilBertForMaskedLM": {"vocab_size": 96, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4},
    "T5ForConditionalGeneration": {**T5, "decoder_start_token_id": 0, "pad_token_id": 0},
    "MambaForCausalLM": {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
}
IMAGES = ["ViTForImageClassification", "resnet18", "mobilenet_v3_small", "convnext_tiny", "swin_t", "vgg11_bn"]
IMAGES += ["efficientnet_b0", "VisionTransformer"]
#: Models with two blocks of attention and MLP whose collectives in forward and backward match Megatron's count.
MEGATRON = ["GPT2LMHeadModel", "LlamaForCausalLM", "GPTNeoXForCausalLM", "MixtralForCausalLM", "Gemma2ForCausalLM"]


class Foreign(torch.nn.Module):
    """Third-party model with its loss, without dropout."""

    def __init__(self, name):
        super().__init__()
        import transformers

        torch.manual_seed(0)
        self.name = name
        if name == "VisionTransformer":
            self.model = torchvision.models.VisionTransformer(64, 16, 2, 4, 32, 64, num_classes=10)
        elif hasattr(torchvision.models, name):
            self.model = getattr(torchvision.models, name)(num_classes=10)
        elif name in TOKENS:
            kind = getattr(transformers, name)
            self.model = kind(kind.config_class(**TOKENS[name]))
        else:
            kind = getattr(transformers, name)
            size = {"image_size": 32, "patch_size": 8, "num_labels": 10}
            self.model = kind(kind.config_class(**DECODER_WITHOUT_VOCABULARY, **size))
        for module in self.model.modules():
            for attribute in ("p", "dropout", "attention_dropout", "dropout_prob"):
                if isinstance(getattr(module, attribute, None), float):
                    setattr(module, attribute, 0.0)

    def batch(self, seed):
        generator = torch.Generator().manual_seed(seed)
        if self.name in TOKENS:
            return torch.randint(3, 96, (2, 10), generator=generator)
        size = 32 if self.name.startswith("ViT") else 64
        return torch.randn(4, 3, size, size, generator=generator), torch.tensor([1, 2, 3, 4])

    def loss(self, batch):
        if self.name in TOKENS:
            mask = torch.ones_like(batch)
            if "Bert" in self.name or "T5" in self.name:
                mask[0, 7:] = 0
            return self.model(input_ids=batch, attention_mask=mask, labels=batch).loss
        out = self.model(batch[0])
        return torch.nn.functional.cross_entropy(getattr(out, "logits", out), batch[1])


DECODER_WITHOUT_VOCABULARY = {key: value for key, value in DECODER.items() if key != "vocab_size"}


def one_step(name):
    """Run one step; images in fp64, as batch norm over a few pixels makes fp32 meaningless."""
    warnings.filterwarnings("ignore")
    dtype = torch.float32 if name in TOKENS else torch.float64
    reference = Foreign(name).to(dtype)
    model = copy.deepcopy(reference)
    batch = reference.batch(0)
    if not isinstance(batch, torch.Tensor):
        batch = (batch[0].to(dtype), batch[1])
    model.batch = lambda seed: batch
    found, runtime = split(model, 2)
    expected = reference.loss(batch)
    expected.backward()
    with runtime.step():
        loss = model.loss(batch)
        forward = runtime.group.calls.total()
        loss.backward()
    worst = abs(loss.item() / expected.item() - 1)
    scale = max(p.grad.norm() for p in reference.parameters() if p.grad is not None)
    for one, many in zip(reference.parameters(), model.parameters(), strict=True):
        assert (one.grad is None) == (many.grad is None)
        if one.grad is not None:
            worst = max(worst, ((to_full_tensor(many.grad) - one.grad).norm() / scale).item())
    backward = runtime.group.calls.total() - forward
    return worst, (forward, backward), found.bytes_per_rank / found.total_bytes, sorted(runtime.fallbacks)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TOKENS, *IMAGES])
def test_foreign_models(name):
    worst, sent, share, fallbacks = run_ranks(2, one_step, name)[0]
    print(f"{name}: error {worst:.0e}, sent {sent}, share {share:.3f}, fallbacks {fallbacks}")
    assert worst < 1e-5
    assert not fallbacks
    if name in MEGATRON:
        assert sent == (4 + (3 if name == "GPT2LMHeadModel" else 2), 4 + 1)
