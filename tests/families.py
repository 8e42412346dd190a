"""Tiny configurations of many architectures: a row a family, and everything is tried on it.

Adding a family is one row: the prefix of its classes in transformers, and the fields in which its tiny form differs
from `COMMON`. Fields that a family calls otherwise are given under its own names.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers

import zoo
from headstart.heads.backbone import Backbone

COMMON: dict[str, Any] = {
    "vocab_size": zoo.VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 2, "initializer_range": 0.3,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GPT2 = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 256}
MIXED = ["sliding_attention", "full_attention"] * 2
PER_LAYER = {
    "head_dim": 8, "sliding_window": 8, "layer_types": MIXED, "vocab_size_per_layer_input": zoo.VOCAB,
    "hidden_size_per_layer_input": 8, "activation_sparsity_pattern": [0.0] * 4,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 24,
    "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
GLOBAL = {"num_global_layers": 1, "intermediate_layers_indices": [0], "vision_output_dim": 32}
TOWER = {
    **VISION, "depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32, "out_hidden_size": 32,
    "fullatt_block_indexes": [0], "deepstack_visual_indexes": [0],
}  # fmt: skip
BY_THREE = {  # positions in time, height and width; the same ones in a text
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
}  # fmt: skip


def scaled(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **more}}


LONGROPE = {  # other factors from position 20 on, in the midst of what the tests generate
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 20,
        "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [9.0, 1.0, 30.0, 40.0],
    },
}  # fmt: skip

ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("Llama", {"head_dim": 20}),
    "llama-linear": ("Llama", scaled("linear")),
    "llama-dynamic": ("Llama", scaled("dynamic")),
    "llama-yarn": ("Llama", scaled("yarn", original_max_position_embeddings=64)),
    "llama-proportional": (
        "Llama",
        {"rope_parameters": {"rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
    "llama-llama3": (
        "Llama",
        scaled("llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "mistral-full": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2-mixed": ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "layer_types": MIXED}),
    "qwen2-moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 24, "decoder_sparse_step": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 16, "decoder_sparse_step": 1}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3", {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16, "layer_types": MIXED}),
    "gemma3n": (
        "Gemma3n",
        {**PER_LAYER, "num_kv_shared_layers": 0, "laurel_rank": 4, "altup_num_inputs": 2},
    ),
    "gemma4": ("Gemma4", {**PER_LAYER, "num_kv_shared_layers": 2, "global_head_dim": 16}),
    "phi": ("Phi", {"partial_rotary_factor": 0.5}),
    "phi3": ("Phi3", {"sliding_window": 8}),
    "phi3-longrope": ("Phi3", {**LONGROPE, "original_max_position_embeddings": 20, "sliding_window": None}),
    "llama-longrope": ("Llama", LONGROPE),
    "gpt2": ("GPT2", GPT2),
    "gptj": ("GPTJ", {**GPT2, "rotary_dim": 4}),
    "gpt-neox": ("GPTNeoX", {"rotary_pct": 0.5}),
    "gpt-bigcode": ("GPTBigCode", GPT2),
    "codegen": ("CodeGen", {**GPT2, "rotary_dim": 4, "n_ctx": 256}),
    "opt": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "falcon": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False}),
    "stablelm": ("StableLm", {"partial_rotary_factor": 0.5, "use_qkv_bias": True}),
    "starcoder2": ("Starcoder2", {"sliding_window": 8}),
    "persimmon": ("Persimmon", {}),
    "nemotron": ("Nemotron", {"partial_rotary_factor": 0.5, "head_dim": 8}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    "cohere2": ("Cohere2", {"logit_scale": 0.25, "sliding_window": 8, "layer_types": MIXED}),
    "granite": (
        "Granite",
        {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2},
    ),
    "granite-moe": ("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 2.0}),
    "olmo": ("Olmo", {}),
    "olmo2": ("Olmo2", {}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1, 1]}),
    "glm": ("Glm", {"head_dim": 8, "partial_rotary_factor": 0.5}),
    "glm4": ("Glm4", {"head_dim": 8, "partial_rotary_factor": 0.5}),
    "exaone4": ("Exaone4", {"sliding_window": 8, "layer_types": MIXED}),
    "ernie": ("Ernie4_5", {"head_dim": 8}),
    "deepseek-v3": ("DeepseekV3", LATENT),
    "gpt-oss": (
        "GptOss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 8, "layer_types": MIXED},
    ),
    "diffllama": ("DiffLlama", {}),
    "bitnet": ("BitNet", {}),
    "helium": ("Helium", {"head_dim": 8}),
    "arcee": ("Arcee", {}),
    "apertus": ("Apertus", {}),
    "seed-oss": ("SeedOss", {"head_dim": 8}),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 8}),
    "ministral": ("Ministral", {"head_dim": 8, "sliding_window": 8, "layer_types": MIXED}),
    "olmo3": ("Olmo3", {"sliding_window": 8, "layer_types": MIXED}),
    "flex-olmo": ("FlexOlmo", {"num_experts": 4, "num_experts_per_tok": 2}),
    "glm4-moe": ("Glm4Moe", {**EXPERTS, "head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}),
    "phi-moe": ("Phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "jetmoe": ("JetMoe", {"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "xglm": ("XGLM", {"d_model": 32, "ffn_dim": 48, "num_layers": 4, "attention_heads": 4}),
    "biogpt": ("BioGpt", {}),
    "deepseek-v2": ("DeepseekV2", LATENT),
    "glm4-moe-lite": ("Glm4MoeLite", LATENT),
    "youtu": ("Youtu", LATENT),
    "minimax-m2": ("MiniMaxM2", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "rotary_dim": 4}),
    "ernie-moe": ("Ernie4_5_Moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24}),
    "hunyuan-moe": ("HunYuanMoEV1", {"num_experts": 4, "moe_topk": 2, "head_dim": 8}),
    "dots1": ("Dots1", {**LATENT, "n_shared_experts": 1, "num_key_value_heads": 2}),
    "granite-moe-shared": ("GraniteMoeShared", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "exaone-moe": ("ExaoneMoe", {**EXPERTS, "head_dim": 8, "sliding_window": 8, "layer_types": MIXED}),
    "cwm": ("Cwm", {"head_dim": 8, "sliding_window": 8, "layer_types": MIXED}),
    "vaultgemma": ("VaultGemma", {"head_dim": 8, "sliding_window": 8, "layer_types": MIXED}),
    "nanochat": ("NanoChat", {}),
    "jais2": ("Jais2", {}),
    "doge": ("Doge", {}),
    "mllama": ("Mllama", {"cross_attention_layers": [1]}),
    "llama4": (
        "Llama4",
        {
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": 8,
        },
    ),
}
"""Name of a row to the prefix of its classes and its fields."""

NESTED: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": ("Llava", {"text": "llama", "vision_config": {"model_type": "clip_vision_model", **VISION}}),
    "gemma3-vision": ("Gemma3", {"text": "gemma3", "vision_config": VISION, "mm_tokens_per_image": 4}),
    "mistral3": ("Mistral3", {"text": "mistral", "vision_config": {"model_type": "pixtral", **VISION}}),
    "aya-vision": ("AyaVision", {"text": "cohere", "vision_config": {"model_type": "siglip_vision_model", **VISION}}),
    "mllama-vision": ("Mllama", {"text": "mllama", "vision_config": {**GLOBAL, **VISION}}),
    "qwen2-vl": ("Qwen2VL", {"text": BY_THREE, "vision_config": TOWER}),
    "qwen2.5-vl": ("Qwen2_5_VL", {"text": BY_THREE, "vision_config": TOWER}),
    "qwen3-vl": ("Qwen3VL", {"text": {"head_dim": 8, **BY_THREE}, "vision_config": TOWER}),
    "glm4v": ("Glm4v", {"text": BY_THREE, "vision_config": TOWER}),
}
"""Multimodal checkpoints: their text model is one of the rows above, or has these fields."""


@functools.cache
def backbone(name: str, attention: str = "sdpa") -> Backbone:
    """The tiny model of a row, random, in fp32, with the tiny tokenizer; biases and norms away from 0 and 1."""
    torch.manual_seed(0)
    made = _nested(name) if name in NESTED else _flat(name)
    if attention == "eager" or made._supports_sdpa:
        made.set_attn_implementation(attention)
    with torch.no_grad():
        for weight in made.parameters():
            if weight.ndim == 1:
                weight.add_(0.2 * torch.randn_like(weight))
    return Backbone(made.eval(), zoo.tokenizer(), name=f"tiny-{name}")


def config(name: str) -> Any:
    prefix, fields = ROWS[name]
    kind = _class(prefix, "TextConfig", "Config")
    return kind(**{**COMMON, **fields})


def _flat(name: str) -> Any:
    return _class(ROWS[name][0], "ForCausalLM", "LMHeadModel")(config(name))


def _nested(name: str) -> Any:
    prefix, fields = NESTED[name]
    rest = {key: value for key, value in fields.items() if key != "text"}
    text = fields["text"]
    inner = config(text).to_dict() if isinstance(text, str) else {**COMMON, **text}
    made = _class(prefix, "Config")(text_config=inner, **rest)
    return _class(prefix, "ForConditionalGeneration")(made)


def _class(prefix: str, *endings: str) -> Any:
    return next(getattr(transformers, prefix + ending) for ending in endings if hasattr(transformers, prefix + ending))


CORE = {
    "llama", "llama-tied", "llama-biased", "llama-wide-heads", "llama-yarn", "mistral", "qwen2-moe", "qwen3", "gemma",
    "gemma2", "gemma3", "phi", "phi3", "gpt2", "gpt-neox", "opt", "falcon", "stablelm", "mixtral", "cohere2", "granite",
    "olmo2", "smollm3", "deepseek-v3", "gpt-oss", "llama4", "gemma3-vision",
}  # fmt: skip
"""Rows that differ from each other in kind; the others vary them."""
