"""Sizes of a checkpoint, and its config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from quantised_weights import FORMATS

FAMILIES = {
    "qwen3_5": "Qwen3_5",
    "qwen3_vl": "Qwen3VL",
    "cosmos3_omni": "Cosmos3Omni",
    "qwen3_omni": "Qwen3Omni",
    "qwen3_next": "Qwen3Next",
    "qwen3": "Qwen3",
    "qwen2": "Qwen2",
    "qwen2_vl": "Qwen2VL",
    "qwen2_5_vl": "Qwen2_5_VL",
    "minicpmv4_6": "MiniCPMV4_6",
    "minicpmv4_7": "MiniCPMV4_7",
    "minicpm_ocr": "MiniCPMOcr",
    "lfm2": "Lfm2",
    "internvl": "InternVL",
    "granitemoehybrid": "GraniteMoeHybrid",
    "nemotron_h": "NemotronH",
}
"""Families, and what the names of transformers' classes begin with."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class CheckpointSpec:
    """Sizes of a checkpoint.

    - `num_experts > 0` makes a mixture of experts (Qwen3-Next always is one).
    - `vision_depth = 0` makes a text-only model (Qwen3-Next, Qwen3 and Qwen2 always are, models
      named after vision never).
    - Qwen2 and its vision models have heads of `hidden_size / attention_heads` and no experts.
    - Qwen3-Omni's thinker always is a mixture of experts.
    - Qwen3-VL and Qwen3 have no Gated DeltaNet layers and no shared experts. Only Qwen3-VL has
      `deepstack_features`.
    - Experts are in every `sparse_step`-th layer after the first `dense_layers`, but in all layers
      of Qwen3.5. Only Qwen3.5 and Qwen3-Next may have an `mtp` layer for drafts.
    - MiniCPM-V cuts pictures into up to `max_slices` slices of about `slice_resolution` squared
      pixels and takes at most `max_video_frames` of a video. It merges patches after layer
      `window_layer` of its tower and has no experts.
    - LFM2 has short convolutions of `conv_kernel` taps, with a `conv_bias` or without; every
      `full_attention_interval`-th layer has attention. With a tower it cuts pictures into tiles of
      `tile_size` pixels a side, and has a `projector_norm` or none.
    - Granite (`granitemoehybrid`) and Nemotron-H have Mamba2 with the sizes of Gated DeltaNet: the
      heads and groups are `gdn_value_heads` and `gdn_key_heads`. `pattern` names their layers by
      letters: M is Mamba2, * attention, E experts, - an MLP. Granite's heads have `hidden_size /
      attention_heads`, and rotate if no layer is Mamba2. Its experts are in all layers or none.
    - InternVL has the language model `text_family`, qwen3 or qwen2, with the same rules, and always
      cuts pictures into tiles. With `large_tower` its tower is like that of its largest models.
    - `quantization` is one of `quantised_weights.FORMATS`; some have a scale per `group_size`.

    Raises:
        ValueError: the sizes do not fit together.
    """

    family: str = "qwen3_5"
    hidden_size: int = 64
    num_layers: int = 4
    intermediate_size: int = 128
    vocab_size: int = 512
    full_attention_interval: int = 4
    gdn_key_heads: int = 2
    gdn_value_heads: int = 4
    gdn_key_dim: int = 16
    gdn_value_dim: int = 16
    conv_kernel: int = 4
    conv_bias: bool = False
    attention_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    num_experts: int = 0
    experts_per_token: int = 2
    moe_intermediate_size: int = 32
    shared_intermediate_size: int = 64
    sparse_step: int = 1
    dense_layers: int = 0
    vision_depth: int = 2
    vision_hidden_size: int = 32
    vision_heads: int = 2
    vision_intermediate_size: int = 64
    patch_size: int = 8
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    deepstack_features: int = 2
    num_position_embeddings: int = 64
    window_layer: int = 0
    downsample_mode: str = "16x"
    slice_resolution: int = 96
    max_slices: int = 9
    max_video_frames: int = 16
    tile_size: int = 64
    projector_norm: bool = True
    text_family: str = ""
    pattern: str = ""
    large_tower: bool = False
    image_min_pixels: int = 32 * 32
    image_max_pixels: int = 512 * 512
    video_min_pixels: int = 2 * 32 * 32
    video_max_pixels: int = 64 * 128 * 128
    max_position_embeddings: int = 32768
    rope_theta: float = 10000.0
    tied_embeddings: bool = False
    mtp: bool = False
    dtype: str = "float32"
    quantization: str = ""
    group_size: int = 32
    shards: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        _validate(self)

    @property
    def model_type(self) -> str:
        """The family's name in transformers."""
        if self.family == "internvl":
            return self.family
        if self.tiled:
            return "lfm2_vl"
        moe = self.num_experts and not (self.mamba or self.family == "qwen3_next")
        return f"{self.family}_moe" if moe else self.family

    @property
    def architecture(self) -> str:
        """Prefix of the names of transformers' classes."""
        moe = self.model_type.endswith("_moe")
        vl = self.tiled and self.family == "lfm2"
        return FAMILIES[self.family] + ("Vl" if vl else "Moe" if moe else "")

    @property
    def hybrid(self) -> bool:
        """True if there are Gated DeltaNet layers beside gated attention."""
        others = self.mamba or self.older
        return self.kin not in ("qwen3_vl", "qwen3", "lfm2") and not others

    @property
    def mamba(self) -> bool:
        """True for families with Mamba2."""
        return self.family in ("granitemoehybrid", "nemotron_h")

    @property
    def text_sizes(self) -> dict[str, str | int]:
        """The fields of a language model's config.json that all families share."""
        return {
            "dtype": self.dtype,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.attention_heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": self.max_position_embeddings,
        }

    @property
    def kinds(self) -> str:
        """The letters of its layers, in families with Mamba2."""
        usual = {"granitemoehybrid": "M*", "nemotron_h": "ME*-"}[self.family]
        return self.pattern or (usual * self.num_layers)[: self.num_layers]

    @property
    def kin(self) -> str:
        """The family whose parts it has: Cosmos3's reasoner and Qwen3-Omni's thinker are
        Qwen3-VL."""
        same = self.family in ("cosmos3_omni", "qwen3_omni")
        return "qwen3_vl" if same else self.text_family or self.family

    @property
    def experts_apart(self) -> bool:
        """True if every expert has tensors of its own."""
        return self.family in ("qwen3_next", "qwen3", "qwen3_omni")

    @property
    def older(self) -> bool:
        """True for the language model of Qwen2 and its vision models."""
        return self.kin.startswith("qwen2")

    @property
    def sliced(self) -> bool:
        """True if pictures are cut into slices."""
        return self.family.startswith("minicpm")

    @property
    def tiled(self) -> bool:
        """True if large pictures are cut into tiles."""
        return self.family in ("lfm2", "internvl") and self.vision_depth > 0

    @property
    def deepstack(self) -> list[int]:
        """Vision layers that add features, spread evenly; none in other families."""
        count = self.deepstack_features if self.kin == "qwen3_vl" else 0
        return [(index + 1) * self.vision_depth // (count + 1) for index in range(count)]

    def attends(self, index: int) -> bool:
        """Return True if a layer has attention."""
        if self.mamba:
            return self.kinds[index] == "*"
        state = self.hybrid or self.family == "lfm2"
        return not state or (index + 1) % self.full_attention_interval == 0

    def has_experts(self, index: int) -> bool:
        """Return True if a layer has experts."""
        if self.family == "nemotron_h":
            return self.kinds[index] == "E"
        if self.family == "qwen3_5" or not self.num_experts:
            return self.num_experts > 0
        return index >= self.dense_layers and (index + 1) % self.sparse_step == 0


def _validate(spec: CheckpointSpec) -> None:
    if spec.family not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}")
    if spec.family == "qwen3_next" and (spec.vision_depth or not spec.num_experts):
        raise ValueError("qwen3_next has num_experts and no vision_depth")
    if spec.family == "qwen3_omni" and not spec.num_experts:
        raise ValueError("qwen3_omni has num_experts")
    if spec.family in ("qwen3", "qwen2") and spec.vision_depth:
        raise ValueError(f"{spec.family} has no vision_depth")
    if (spec.text_family in ("qwen3", "qwen2")) != (spec.family == "internvl"):
        raise ValueError("internvl, and no other, has a text_family, qwen3 or qwen2")
    if spec.family == "internvl" and not spec.vision_depth:
        raise ValueError("internvl has a vision_depth")
    if spec.family == "lfm2" and spec.tiled and spec.num_experts:
        raise ValueError("lfm2 has a vision_depth or num_experts")
    if spec.kin.endswith("_vl") and not spec.vision_depth:
        raise ValueError(f"{spec.family} has a vision_depth")
    whole = spec.head_dim * spec.attention_heads == spec.hidden_size
    if spec.older and (spec.num_experts or not whole):
        raise ValueError(
            f"{spec.family} has no num_experts, and its hidden_size is attention_heads * head_dim"
        )
    if spec.mamba and (spec.vision_depth or len(spec.kinds) != spec.num_layers):
        raise ValueError(f"{spec.family} has no vision_depth, and a letter of pattern for a layer")
    if spec.mamba and "E" in spec.kinds and not spec.num_experts:
        raise ValueError("a pattern with E has num_experts")
    if spec.family == "granitemoehybrid" and not (whole and set(spec.kinds) <= {"M", "*"}):
        raise ValueError(
            "granitemoehybrid has layers M and *, and its hidden_size is attention_heads * head_dim"
        )
    if spec.sliced and (not spec.vision_depth or spec.num_experts):
        raise ValueError(f"{spec.family} has a vision_depth and no num_experts")
    if spec.sliced and not 0 <= spec.window_layer < spec.vision_depth:
        raise ValueError("window_layer must be below vision_depth")
    if spec.downsample_mode not in ("16x", "4x"):
        raise ValueError("downsample_mode must be 16x or 4x")
    if len(set(spec.deepstack)) < len(spec.deepstack) or len(spec.deepstack) >= spec.num_layers:
        raise ValueError("deepstack_features must be fewer than layers, at most vision_depth")
    if spec.mtp and spec.family not in ("qwen3_5", "qwen3_next"):
        raise ValueError("only qwen3_5 and qwen3_next have an mtp layer")
    if spec.gdn_value_heads % spec.gdn_key_heads:
        raise ValueError("gdn_value_heads must be a multiple of gdn_key_heads")
    if spec.attention_heads % spec.kv_heads:
        raise ValueError("attention_heads must be a multiple of kv_heads")
    if spec.head_dim % 8:
        raise ValueError("head_dim must be a multiple of 8: a quarter of it is rotated, in pairs")
    if spec.vision_depth and spec.vision_hidden_size % (4 * spec.vision_heads):
        raise ValueError("vision_hidden_size must be a multiple of 4 * vision_heads")
    if math.isqrt(spec.num_position_embeddings) ** 2 != spec.num_position_embeddings:
        raise ValueError("num_position_embeddings must be a square")
    if spec.num_experts and not 0 < spec.experts_per_token <= spec.num_experts:
        raise ValueError("experts_per_token must be between 1 and num_experts")
    if spec.quantization and spec.quantization not in FORMATS:
        raise ValueError(f"quantization must be one of {', '.join(FORMATS)}")
    if spec.dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}")


SMALL_SPECS = {
    "qwen3_5": CheckpointSpec(),
    "qwen3_vl": CheckpointSpec(family="qwen3_vl", vision_depth=3),
    "cosmos3_omni": CheckpointSpec(family="cosmos3_omni", vision_depth=3),
    "qwen3_omni": CheckpointSpec(family="qwen3_omni", num_experts=8, vision_depth=3, patch_size=16),
    "qwen3_next": CheckpointSpec(family="qwen3_next", num_experts=8, vision_depth=0),
    "qwen3": CheckpointSpec(family="qwen3", vision_depth=0),
    "qwen2": CheckpointSpec(family="qwen2", vision_depth=0, head_dim=16),
    "qwen2_vl": CheckpointSpec(family="qwen2_vl", head_dim=16),
    "qwen2_5_vl": CheckpointSpec(family="qwen2_5_vl", head_dim=16),
    "minicpmv4_6": CheckpointSpec(family="minicpmv4_6"),
    "minicpmv4_7": CheckpointSpec(family="minicpmv4_7"),
    "minicpm_ocr": CheckpointSpec(family="minicpm_ocr", downsample_mode="4x"),
    "lfm2": CheckpointSpec(family="lfm2", conv_kernel=3, vision_depth=0),
    "internvl": CheckpointSpec(family="internvl", text_family="qwen3"),
    "granitemoehybrid": CheckpointSpec(
        family="granitemoehybrid", vision_depth=0, num_experts=8, head_dim=16, gdn_key_heads=1
    ),
    "nemotron_h": CheckpointSpec(family="nemotron_h", vision_depth=0, num_experts=8),
}
"""What a checkpoint of each family begins as."""

BENCHMARK_SPEC = CheckpointSpec(
    hidden_size=512,
    num_layers=8,
    intermediate_size=1536,
    vocab_size=8192,
    gdn_key_heads=4,
    gdn_value_heads=8,
    gdn_key_dim=128,
    gdn_value_dim=128,
    attention_heads=8,
    kv_heads=2,
    head_dim=128,
    vision_depth=4,
    vision_hidden_size=256,
    vision_heads=4,
    vision_intermediate_size=1024,
    patch_size=16,
    num_position_embeddings=2304,
    image_max_pixels=1024 * 1024,
)
"""The 49M-parameter model of the benchmarks: 39M weights are read per decoded token."""

LARGER_SPEC = replace(
    BENCHMARK_SPEC,
    hidden_size=1024,
    num_layers=16,
    intermediate_size=3584,
    gdn_key_heads=8,
    gdn_value_heads=16,
    vocab_size=32768,
    vision_depth=0,
    dtype="bfloat16",
)
"""About 330M parameters, text only: steps are bound by reading weights."""

_TEXT_SPEC = replace(BENCHMARK_SPEC, vision_depth=0, head_dim=64)

BENCHMARK_SPECS = {
    "qwen3_5": BENCHMARK_SPEC,
    "qwen3_vl": replace(
        BENCHMARK_SPEC, family="qwen3_vl", intermediate_size=1600, deepstack_features=3
    ),
    "lfm2": replace(
        _TEXT_SPEC,
        family="lfm2",
        num_layers=12,
        intermediate_size=1600,
        full_attention_interval=3,
        conv_kernel=3,
    ),
    "granitemoehybrid": replace(
        _TEXT_SPEC,
        family="granitemoehybrid",
        pattern="MMM*MMM*",
        intermediate_size=2368,
        gdn_key_heads=1,
        gdn_value_heads=16,
        gdn_value_dim=64,
    ),
    "nemotron_h": replace(
        _TEXT_SPEC,
        family="nemotron_h",
        num_layers=16,
        pattern="M-M-M*-M-M-M*-M-",
        intermediate_size=2880,
        gdn_key_heads=8,
        gdn_value_heads=16,
        gdn_value_dim=64,
    ),
}
"""Models of about that size, by family; those of text alone are dense."""
