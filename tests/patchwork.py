"""A made-up architecture of known parts, as somebody would add one: attention without gates and one
axis of rotation, then a layer with state (Gated DeltaNet or Mamba2) with routed experts
alone, in turns; plain norms."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import torch
from checkpoint_parts import build_tokenizer, sample_text, write_json, write_tokenizer_files
from safetensors.torch import save_file

from vlm_serve.models.config import Config
from vlm_serve.models.decoder import Decoder
from vlm_serve.models.parts.attention import Attention
from vlm_serve.models.parts.base import Mixer, Norm, Routing
from vlm_serve.models.parts.feed_forward import Experts, Mlp
from vlm_serve.models.parts.gated_delta import GatedDelta
from vlm_serve.models.parts.mamba2 import Mamba2
from vlm_serve.models.registry import Served, spec_of
from vlm_serve.models.spec import LayerSpec, ModelSpec, Rope
from vlm_serve.models.weight_sizes import UnreadWeights
from vlm_serve.preprocess.text.family import CHATML

SERVED = Served("", "patchwork", media=(), experts=True)
CONFIG: dict[str, Any] = {
    "model_type": "patchwork",
    "dtype": "float32",
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "memory": "gated_delta",
    "state_key_heads": 2,
    "state_value_heads": 4,
    "state_key_dim": 16,
    "state_value_dim": 32,
    "conv_width": 4,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "expert_size": 48,
    "norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "max_position_embeddings": 4096,
}

MAMBA2: dict[str, Any] = {
    "memory": "mamba2",
    "mamba_heads": 4,
    "mamba_head_dim": 32,
    "mamba_groups": 2,
    "mamba_state_dim": 16,
    "mamba_bias": True,
    "least_step": 0.4,
}
KINDS: dict[str, dict[str, Any]] = {
    "gated_delta": {},
    "mamba2": MAMBA2,
    "mamba2, one group": MAMBA2 | {"mamba_groups": 1, "mamba_bias": False, "least_step": 0.0},
}


def spec(config: Config) -> ModelSpec:
    """The model of a config.json."""
    heads, head_dim = config.size("num_attention_heads"), config.size("head_dim")
    attending = LayerSpec.of(
        Attention(heads, config.size("num_key_value_heads"), head_dim, gated=False, name="attn"),
        Mlp(config.size("intermediate_size"), name="ffn"),
        ("norm_1", "norm_2"),
    )
    remembering = LayerSpec.of(
        _memory(config),
        Experts(
            Routing(config.size("num_experts"), config.size("num_experts_per_tok")),
            size=config.size("expert_size"),
            shared=0,
            name="moe",
        ),
        ("norm_1", "norm_2"),
    )
    return ModelSpec(
        hidden_size=config.size("hidden_size"),
        vocab_size=config.size("vocab_size"),
        max_position_embeddings=config.size("max_position_embeddings"),
        layers=(attending, remembering) * (config.size("num_hidden_layers") // 2),
        norm=Norm(config.number("norm_eps"), centred=False),
        rope=Rope(config.number("rope_theta"), head_dim, (head_dim // 2, 0, 0)),
        tied_embeddings=True,
        vision=None,
        dtype=config.dtype(),
        family=CHATML,
    )


def _memory(config: Config) -> Mixer:
    if config.given("memory") == "mamba2":
        return Mamba2(
            heads=config.size("mamba_heads"),
            head_dim=config.size("mamba_head_dim"),
            groups=config.size("mamba_groups"),
            state_dim=config.size("mamba_state_dim"),
            taps=config.size("conv_width"),
            limits=(config.number("least_step"), math.inf),
            bias=config.given("mamba_bias"),
            name="memory",
        )
    return GatedDelta(
        key_heads=config.size("state_key_heads"),
        value_heads=config.size("state_value_heads"),
        key_dim=config.size("state_key_dim"),
        value_dim=config.size("state_value_dim"),
        taps=config.size("conv_width"),
        name="memory",
    )


def write_checkpoint(folder: Path, changes: dict[str, Any]) -> Path:
    """Write random weights under the names that the parts ask for; the type must be registered."""
    config = CONFIG | changes
    generator = torch.Generator().manual_seed(0)
    shapes = UnreadWeights(torch.float32)
    Decoder(spec_of(config), shapes, "model.", None)
    sizes = dict(shapes.of_tensors)
    if config.get("mamba_bias"):
        projections = [name for name in sizes if re.search(r"memory\.(in|out)_proj\.weight", name)]
        sizes.update({name.replace("weight", "bias"): sizes[name][:1] for name in projections})
    tensors = {
        name: 1 + torch.rand(shape, generator=generator)
        if "norm" in name
        else torch.randn(shape, generator=generator) / max(shape[-1], 4) ** 0.5
        for name, shape in sizes.items()
    }
    tensors["model.embed_tokens.weight"] *= 4
    save_file(tensors, folder / "model.safetensors")
    tokenizer = build_tokenizer(sample_text(2000, 0), config["vocab_size"])
    write_tokenizer_files(folder, tokenizer, max_length=4096)
    write_json(folder / "config.json", config)
    return folder
