"""Tiny random models of many families, shared by the tests of every package that needs a model.

Two layers (more where a pattern of layers needs them), four query heads, two key heads, 16 channels
per head. Weights are drawn from a wider distribution than usual, so that keys differ enough to test
with, and norms are not left at one.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

BASE = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FUSED_HEADS = {"num_key_value_heads": 4}
THETA = {"rope_theta": 10000.0}
ROPE = {**THETA, "original_max_position_embeddings": 32}

FAMILIES = {
    "llama": {},
    "llama-linear": {"rope_parameters": {**THETA, "rope_type": "linear", "factor": 4.0}},
    "llama-dynamic": {
        "max_position_embeddings": 32,
        "rope_parameters": {**THETA, "rope_type": "dynamic", "factor": 4.0},
    },
    "llama-yarn": {"rope_parameters": {**ROPE, "rope_type": "yarn", "factor": 8.0}},
    "llama-llama3": {
        "rope_parameters": {
            **ROPE,
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        }
    },
    "mistral": {"sliding_window": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {**EXPERTS, "head_dim": 32},
    "qwen3_next": {
        **EXPERTS,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "shared_expert_intermediate_size": 32,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "gemma": {"head_dim": 16, "num_key_value_heads": 1},
    "gemma2": {"head_dim": 16, "sliding_window": 16},
    "gemma3_text": {"head_dim": 16, "num_hidden_layers": 6, "sliding_window": 16},
    "phi": {},
    "phi-qk_norm": {**FUSED_HEADS, "qk_layernorm": True},
    "phi3": {"sliding_window": 16},
    "phi3-longrope": {
        "original_max_position_embeddings": 32,
        "rope_parameters": {
            **ROPE,
            "rope_type": "longrope",
            "short_factor": [1.0 + 0.05 * i for i in range(8)],
            "long_factor": [2.0 + 0.5 * i for i in range(8)],
        },
    },
    "gpt_neox": FUSED_HEADS,
    "stablelm": {"use_qkv_bias": True},
    "stablelm-qk_norm": {"qk_layernorm": True},
    "olmo2": {},
    "cohere": {},
    "cohere-qk_norm": {"use_qk_norm": True},
    "cohere2": {"num_hidden_layers": 4, "sliding_window": 16},
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "granite": {},
    "smollm3": {"num_hidden_layers": 4},
    "gpt2": FUSED_HEADS,
    "falcon": {},
    "falcon-new": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon-heads": {"multi_query": False},
}

SSM = {"num_hidden_layers": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_expand": 2}
FAMILIES |= {
    "qwen2-bias": {},
    "qwen3_5_text": {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2, "block_ff_dim": 96},
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "use_mamba_kernels": False,
        "mamba_d_state": 8,
    },
    "bamba": {**SSM, "attn_layer_indices": [1, 3], "mamba_n_groups": 1},
    "granitemoehybrid": {
        **SSM,
        "layer_types": ["mamba", "attention"] * 2,
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
        "position_embedding_type": "rope",
    },
    "nemotron_h": {
        "num_hidden_layers": 4,
        "hybrid_override_pattern": "M*M*",
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
        "head_dim": 16,
    },
    "olmo3": {"num_hidden_layers": 4, "sliding_window": 16},
    "exaone4": {"num_hidden_layers": 4, "sliding_window": 16},
    "starcoder2": {"sliding_window": 16},
    "gpt_bigcode": {},
    "gemma4_text": {
        "num_hidden_layers": 6,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 16,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 300,
    },
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "head_dim": 16,
    },
}
STATEFUL = ("qwen3_next", "qwen3_5_text", "lfm2", "jamba", "bamba", "granitemoehybrid", "nemotron_h")
"""Families with layers that keep a state instead of keys and values; nobody can crop those."""

REFUSED = {
    "falcon-alibi": {"alibi": True, **FUSED_HEADS},
    "bloom": {"n_layer": 2, "n_head": 4},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 2,
        "topk_group": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
    },
    "gemma4_text-sharing": {
        **FAMILIES["gemma4_text"],
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2,
    },
    "gpt_oss": {"num_local_experts": 4, "head_dim": 16, "sliding_window": 16},
    "diffllama": {},
    "mamba": {"state_size": 8},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8},
    "gptj": {"rotary_dim": 8},
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
}


def tiny(family: str, **overrides):
    """A random model in eval mode: `family` is a key of FAMILIES or REFUSED; overrides: config."""
    settings = {**BASE, **{**FAMILIES, **REFUSED}[family], **overrides}
    config = AutoConfig.for_model(family.split("-")[0], **settings)
    loader = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = loader.from_config(config, dtype=torch.float32).eval()
        _spread(model)
    if family == "qwen2-bias":
        _bias_keys(model)
    return model


def _bias_keys(model) -> None:
    """Three key channels of every layer far from zero, as in the models that Qwen2 released."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias[torch.tensor([1, 8, 20])] = torch.tensor([50.0, -50.0, 50.0])


def _spread(model) -> None:
    """Norms and biases off their neutral values, projections large enough for keys of order one."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.add_(0.2 * torch.randn_like(weight))
            elif "embed" not in name and "wte" not in name and "wpe" not in name:
                weight.mul_(5)
