"""Small random decoders of every family that the backend is tried on."""

from __future__ import annotations

from typing import Any

import torch
import transformers as tf

_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_SIZES, "intermediate_size": 96, "num_key_value_heads": 2}

FAMILIES: dict[str, Any] = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_GROUPED)),
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**_GROUPED)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**_GROUPED, head_dim=16)),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**_GROUPED, sliding_window=None)),
    "glm4": lambda: tf.Glm4ForCausalLM(tf.Glm4Config(**_GROUPED, head_dim=16)),
    "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**_GROUPED)),
    "opt": lambda: tf.OPTForCausalLM(
        tf.OPTConfig(**_SIZES, ffn_dim=96, word_embed_proj_dim=64, dropout=0.0)
    ),
}


def make(family: str, seed: int = 0) -> Any:
    """A small model of a family, the same for a seed.

    Its projections are widened, so that attention is far from uniform and a wrong token shows.
    """
    torch.manual_seed(seed)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and any(part in name for part in ("q_proj", "k_proj", "qkv")):
                weight.mul_(8.0)
    model.generation_config.eos_token_id = None
    return model


def prompt(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random token ids `[batch, length]`, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 128, (batch, length), generator=generator)
