"""Sizes of small models: values for configurations of transformers and arguments of timm."""

from __future__ import annotations

from typing import Any

VOCABULARY = 64
LENGTH = 12
PIXELS = 32
CLASSES = 5

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
    "type_vocab_size": 2,
    "use_cache": False,
    "apply_spec_augment": False,
    **dict.fromkeys(("pad_token_id", "decoder_start_token_id"), 0),
    **dict.fromkeys(("bos_token_id",), 1),
    **dict.fromkeys(("eos_token_id",), 2),
}


#: Width to which the narrowest entry of a list of widths is scaled.
_NARROW = 16

#: Sizes that depend on each other, by family.
_RELATED: dict[str, dict[str, Any]] = {
    **{name: {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8} for name in ("bamba", "granitemoehybrid")},
    **{name: {"rotary_dim": 8} for name in ("codegen", "gptj")},
    **{
        name: {"num_key_value_heads": 4}
        for name in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu")
    },
    **{name: {"num_heads": [2, 4], "depths": [1, 1], "patch_size": 2} for name in ("swin", "donut-swin", "swinv2")},
    **{name: {"num_stages": 2, "depths": [1, 1], "hidden_sizes": [16, 32]} for name in ("convnext", "convnextv2")},
    **{name: {"decoder_start_token_id": 0} for name in ("switch_transformers", "t5")},
    **{
        name: {"context_length": 41, "prediction_length": 16, "input_size": 2, "num_time_features": 1}
        for name in ("autoformer", "informer", "time_series_transformer")
    },
    **{
        name: {"context_length": 48, "prediction_length": 16, "num_input_channels": 2, "patch_length": 8}
        for name in ("patchtst", "patchtsmixer")
    },
    "audio-spectrogram-transformer": {
        "max_length": 64,
        "num_mel_bins": 16,
        "frequency_stride": 8,
        "time_stride": 8,
    },
    "funnel": {"block_sizes": [2, 2]},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "longt5": {"num_layers": 2, "decoder_start_token_id": 0},
    "mobilevit": {"hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 32]},
    "mamba2": {"num_heads": 8},
    "prophetnet": {"ngram": 2},
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds": False,
        "attn_layers": ["local", "local"],
        "local_attn_chunk_length": 4,
    },
    "roc_bert": {"pronunciation_vocab_size": 16, "shape_vocab_size": 16},
    "whisper": {"max_source_positions": 32, "num_mel_bins": 80},
    "xlnet": {"n_layer": 4},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    "zamba2": {"layer_types": ["mamba", "hybrid", "mamba", "hybrid"], "num_mem_blocks": 1},
}


#: Arguments that make models of timm tiny.
TIMM: dict[str, dict[str, Any]] = {
    **{
        name: {"img_size": PIXELS, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 4}
        for name in (
            "vit_tiny_patch16_224",
            "deit_tiny_distilled_patch16_224",
            "eva02_tiny_patch14_224",
            "cait_xxs24_224",
            "beit_base_patch16_224",
        )
    },
    "xcit_nano_12_p16_224": {"img_size": PIXELS, "embed_dim": 32, "depth": 4, "num_heads": 4},
    "swin_tiny_patch4_window7_224": {
        "img_size": PIXELS,
        "embed_dim": 32,
        "depths": (1, 1),
        "num_heads": (2, 4),
        "window_size": 4,
    },
}


def small_config(config_class: Any, family: str = "") -> Any:
    """Return a configuration with small sizes under the names it has, and without randomness in training.

    Nested configurations, of a text or a vision tower, are made small as well. Lists of widths (``hidden_sizes``,
    ``conv_dim``) shrink in proportion.
    """
    default = config_class()
    values: dict[str, Any] = {}
    for name, small in _SMALL.items():
        computed = isinstance(getattr(config_class, name, None), property)
        if hasattr(default, name) and not computed and isinstance(getattr(default, name), (int, float, type(None))):
            values[name] = small
    for name, value in vars(default).items():
        if isinstance(value, float) and any(word in name for word in ("drop", "jitter")):
            values[name] = 0.0
        if any(word in name for word in ("dim", "hidden_sizes", "channels", "width")) and _is_wide(value):
            values[name] = type(value)(item * _NARROW // min(value) for item in value)
    for name in getattr(config_class, "sub_configs", {}):
        made = getattr(default, name, None)
        if made is not None:
            values[name] = small_config(type(made)).to_dict()
    return config_class(**{"num_labels": CLASSES} | values | _RELATED.get(family, {}))


def _is_wide(value: Any) -> bool:
    """Return whether a value is a list of widths all above the narrowest."""
    listed = isinstance(value, (list, tuple)) and len(value) > 0 and all(isinstance(item, int) for item in value)
    return listed and min(value) > _NARROW
