"""Checkpoints, types and pools that compiled steps are tested with."""

from __future__ import annotations

from dataclasses import replace

import torch
from checkpoint_spec import CheckpointSpec
from families import SPECS as FAMILIES

SPECS = {
    "dense": CheckpointSpec(vision_depth=0),
    "experts": CheckpointSpec(vision_depth=0, num_experts=6, experts_per_token=3, num_layers=8),
    # Blocks of 64 columns that are not full, several tiles of columns in a head, groups of three.
    "wide": CheckpointSpec(
        vision_depth=0,
        hidden_size=80,
        intermediate_size=208,
        vocab_size=1001,
        gdn_key_heads=1,
        gdn_value_heads=3,
        gdn_key_dim=48,
        gdn_value_dim=80,
        conv_kernel=3,
        attention_heads=6,
        head_dim=80,
        full_attention_interval=2,
    ),
    # Attention alone, without gates; features behind two layers; every second one dense.
    "convolutions": FAMILIES["lfm2, tied, biased, four taps"],
    "sigmoids": FAMILIES["lfm2 moe"],
    "scaled, experts beside an mlp": FAMILIES["granite h"],
    "one branch a layer, no gates": FAMILIES["nemotron"],
    "features": replace(FAMILIES["vl moe, every second layer dense"], deepstack_features=2),
}
TYPES = {
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "bfloat16 in float32": (torch.bfloat16, torch.float32),
    "float16 in float32": (torch.float16, torch.float32),
}
"""Types of weights and activations."""
POOLS: dict[str, tuple[torch.dtype | None, torch.dtype]] = {
    "plain": (None, torch.float32),
    "pages of int8": (torch.uint8, torch.float32),
    "pages of float8": (torch.float8_e4m3fn, torch.float32),
    "states in bfloat16": (None, torch.bfloat16),
    "both": (torch.uint8, torch.bfloat16),
}
"""Types of pages (None: those of activations) and of states."""
ROUNDED = [name for name in POOLS if name != "plain"]
