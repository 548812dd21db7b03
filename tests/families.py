"""Random checkpoints of every model type that can be served, in shapes that differ where families
have their traps: groups of heads, dense layers among experts, features of the vision tower."""

from __future__ import annotations

from checkpoint_spec import CheckpointSpec

Shapes = dict[str, CheckpointSpec]

_QWEN3_5: Shapes = {
    "dense": CheckpointSpec(gdn_key_heads=2, gdn_value_heads=4, kv_heads=2),
    "dense, equal heads, one kv head": CheckpointSpec(
        gdn_key_heads=2, gdn_value_heads=2, kv_heads=1, seed=1, tied_embeddings=True
    ),
    "attention alone, no state": CheckpointSpec(full_attention_interval=1, seed=3),
}
_QWEN3_5_MOE: Shapes = {
    "moe, three value heads, four kv heads": CheckpointSpec(
        gdn_key_heads=2, gdn_value_heads=6, kv_heads=4, num_experts=8, seed=2
    ),
}
_TEXT: Shapes = {
    "text": CheckpointSpec(vision_depth=0, seed=4),
    "text, tied": CheckpointSpec(vision_depth=0, gdn_value_heads=2, tied_embeddings=True, seed=5),
}
_MOE_TEXT: Shapes = {
    "text, moe": CheckpointSpec(vision_depth=0, num_experts=8, seed=6),
    "text, moe, three value heads": CheckpointSpec(
        vision_depth=0, num_experts=4, experts_per_token=3, gdn_value_heads=6, seed=7
    ),
}
_QWEN3_VL: Shapes = {
    "vl": CheckpointSpec(family="qwen3_vl", vision_depth=3, seed=8),
    "vl, tied, one feature, one kv head": CheckpointSpec(
        family="qwen3_vl", deepstack_features=1, kv_heads=1, tied_embeddings=True, seed=9
    ),
    "vl, features behind all layers but the last": CheckpointSpec(
        family="qwen3_vl", vision_depth=4, deepstack_features=3, attention_heads=6, seed=10
    ),
}
_COSMOS3: Shapes = {
    "cosmos": CheckpointSpec(family="cosmos3_omni", vision_depth=3, seed=30),
}
_QWEN3_VL_MOE: Shapes = {
    "vl moe": CheckpointSpec(family="qwen3_vl", vision_depth=3, num_experts=8, seed=11),
    "vl moe, every second layer dense": CheckpointSpec(
        family="qwen3_vl", num_experts=6, num_layers=6, sparse_step=2, dense_layers=2, seed=12
    ),
}
_QWEN3_OMNI: Shapes = {
    "omni": CheckpointSpec(
        family="qwen3_omni", vision_depth=3, num_experts=8, patch_size=16, seed=34
    ),
    "omni, tied, one kv head, dense layers": CheckpointSpec(
        family="qwen3_omni",
        num_experts=6,
        num_layers=6,
        sparse_step=2,
        dense_layers=2,
        kv_heads=1,
        patch_size=16,
        tied_embeddings=True,
        seed=35,
    ),
}
_QWEN3_NEXT: Shapes = {
    "next": CheckpointSpec(family="qwen3_next", vision_depth=0, num_experts=8, seed=13),
    "next, three value heads, dense layers": CheckpointSpec(
        family="qwen3_next",
        vision_depth=0,
        num_experts=4,
        num_layers=8,
        sparse_step=2,
        dense_layers=2,
        gdn_value_heads=6,
        gdn_value_dim=32,
        seed=14,
    ),
}
_QWEN3: Shapes = {
    "qwen3": CheckpointSpec(family="qwen3", vision_depth=0, seed=19),
    "qwen3, tied, three heads of a kv head": CheckpointSpec(
        family="qwen3",
        vision_depth=0,
        attention_heads=6,
        head_dim=16,
        tied_embeddings=True,
        shards=2,
        seed=20,
    ),
}
_QWEN3_MOE: Shapes = {
    "qwen3 moe": CheckpointSpec(family="qwen3", vision_depth=0, num_experts=8, seed=21),
    "qwen3 moe, every second layer dense": CheckpointSpec(
        family="qwen3",
        vision_depth=0,
        num_experts=6,
        experts_per_token=3,
        num_layers=6,
        sparse_step=2,
        dense_layers=2,
        seed=22,
    ),
}

_QWEN2: Shapes = {
    "qwen2": CheckpointSpec(family="qwen2", vision_depth=0, head_dim=16, seed=24),
    "qwen2, tied, three heads of a kv head": CheckpointSpec(
        family="qwen2",
        vision_depth=0,
        hidden_size=96,
        attention_heads=6,
        head_dim=16,
        tied_embeddings=True,
        seed=25,
    ),
}
_QWEN2_VL: Shapes = {
    "vl of qwen2": CheckpointSpec(family="qwen2_vl", head_dim=16, vision_depth=3, seed=26),
    "vl of qwen2, tied, one kv head": CheckpointSpec(
        family="qwen2_vl",
        hidden_size=128,
        head_dim=32,
        kv_heads=1,
        vision_heads=4,
        tied_embeddings=True,
        seed=27,
    ),
}
_QWEN2_5_VL: Shapes = {
    "vl of qwen2.5": CheckpointSpec(family="qwen2_5_vl", head_dim=16, vision_depth=3, seed=28),
    "vl of qwen2.5, tied, one kv head": CheckpointSpec(
        family="qwen2_5_vl",
        hidden_size=128,
        head_dim=32,
        kv_heads=1,
        vision_depth=4,
        vision_heads=4,
        vision_intermediate_size=72,
        tied_embeddings=True,
        seed=29,
    ),
}

_MINICPMV4_6: Shapes = {
    "minicpm": CheckpointSpec(family="minicpmv4_6", vision_depth=3, window_layer=1, seed=15),
    "minicpm, 4x, tied": CheckpointSpec(
        family="minicpmv4_6",
        vision_heads=4,
        gdn_value_heads=2,
        downsample_mode="4x",
        max_slices=4,
        num_position_embeddings=49,
        tied_embeddings=True,
        seed=16,
    ),
}
_MINICPMV4_7: Shapes = {
    "minicpm on a canvas": CheckpointSpec(family="minicpmv4_7", vision_depth=3, seed=17),
    "minicpm on a canvas, 4x, tied": CheckpointSpec(
        family="minicpmv4_7",
        vision_heads=4,
        window_layer=1,
        gdn_value_heads=2,
        downsample_mode="4x",
        max_slices=4,
        num_position_embeddings=49,
        tied_embeddings=True,
        seed=18,
    ),
}

_MINICPM_OCR: Shapes = {
    "minicpm ocr": CheckpointSpec(
        family="minicpm_ocr", vision_depth=3, downsample_mode="4x", tied_embeddings=True, seed=23
    ),
}

_LFM2: Shapes = {
    "lfm2": CheckpointSpec(family="lfm2", conv_kernel=3, vision_depth=0, seed=24),
    "lfm2, tied, biased, four taps": CheckpointSpec(
        family="lfm2",
        attention_heads=2,
        kv_heads=1,
        conv_bias=True,
        full_attention_interval=3,
        num_layers=5,
        tied_embeddings=True,
        vision_depth=0,
        seed=25,
    ),
}

_LFM2_MOE: Shapes = {
    "lfm2 moe": CheckpointSpec(
        family="lfm2",
        conv_kernel=3,
        num_experts=8,
        experts_per_token=3,
        dense_layers=1,
        vision_depth=0,
        seed=26,
    ),
}

_LFM2_VL: Shapes = {
    "lfm2 vl": CheckpointSpec(family="lfm2", conv_kernel=3, tied_embeddings=True, seed=27),
    "lfm2 vl, three layers of a tower, no norm": CheckpointSpec(
        family="lfm2",
        conv_kernel=3,
        vision_depth=3,
        vision_heads=4,
        num_position_embeddings=49,
        projector_norm=False,
        seed=28,
    ),
}

_INTERNVL: Shapes = {
    "internvl": CheckpointSpec(family="internvl", text_family="qwen3", vision_depth=3, seed=31),
    "internvl, qwen2, tied, a large tower, resampled positions": CheckpointSpec(
        family="internvl",
        text_family="qwen2",
        head_dim=16,
        vision_heads=4,
        large_tower=True,
        num_position_embeddings=36,
        tied_embeddings=True,
        seed=32,
    ),
    "internvl, one kv head": CheckpointSpec(
        family="internvl", text_family="qwen2", head_dim=16, kv_heads=1, tile_size=48, seed=33
    ),
}

_GRANITE: Shapes = {
    "granite h": CheckpointSpec(
        family="granitemoehybrid",
        vision_depth=0,
        num_experts=8,
        head_dim=16,
        gdn_key_heads=1,
        gdn_value_heads=4,
        gdn_value_dim=32,
        seed=33,
    ),
    "granite h, dense, tied, ends with mamba": CheckpointSpec(
        family="granitemoehybrid",
        vision_depth=0,
        head_dim=16,
        kv_heads=1,
        gdn_key_heads=1,
        gdn_value_heads=4,
        gdn_value_dim=32,
        num_layers=3,
        pattern="M*M",
        tied_embeddings=True,
        seed=34,
    ),
    "granite, rotated attention alone": CheckpointSpec(
        family="granitemoehybrid",
        vision_depth=0,
        head_dim=16,
        gdn_key_heads=1,
        pattern="****",
        seed=35,
    ),
}
_NEMOTRON: Shapes = {
    "nemotron": CheckpointSpec(family="nemotron_h", vision_depth=0, num_experts=8, seed=36),
    "nemotron, dense, three heads a group, ends with mamba": CheckpointSpec(
        family="nemotron_h",
        vision_depth=0,
        num_layers=5,
        pattern="M-*-M",
        gdn_key_heads=2,
        gdn_value_heads=6,
        gdn_key_dim=32,
        seed=37,
    ),
}
FAMILIES: dict[str, Shapes] = {
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5_MOE,
    "qwen3_5_text": _TEXT,
    "qwen3_5_moe_text": _MOE_TEXT,
    "qwen3_vl": _QWEN3_VL,
    "qwen3_vl_moe": _QWEN3_VL_MOE,
    "cosmos3_omni": _COSMOS3,
    "qwen3_omni_moe": _QWEN3_OMNI,
    "qwen3_next": _QWEN3_NEXT,
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3_MOE,
    "qwen2": _QWEN2,
    "qwen2_vl": _QWEN2_VL,
    "qwen2_5_vl": _QWEN2_5_VL,
    "minicpmv4_6": _MINICPMV4_6,
    "minicpmv4_7": _MINICPMV4_7,
    "minicpm_ocr": _MINICPM_OCR,
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2_MOE,
    "lfm2_vl": _LFM2_VL,
    "internvl": _INTERNVL,
    "granitemoehybrid": _GRANITE,
    "nemotron_h": _NEMOTRON,
}
"""By model type, as the registry has them."""

SPECS: Shapes = {name: spec for shapes in FAMILIES.values() for name, spec in shapes.items()}
