"""Layer shapes of public Qwen3.5 checkpoints, for compiling and timing the GPU kernels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shapes:
    """One checkpoint's layers (or one rank's share of them, in the dimensions kernels see)."""

    name: str
    hidden: int
    query_heads: int
    kv_heads: int
    key_heads: int
    value_heads: int
    head_dim: int = 256
    rotated: int = 64
    state_dim: int = 128
    conv_taps: int = 4
    experts: int = 0
    top_k: int = 0
    expert_width: int = 0

    @property
    def conv_channels(self) -> int:
        return (2 * self.key_heads + self.value_heads) * self.state_dim


QWEN_4B = Shapes("4B", 2560, 16, 4, 16, 32)
QWEN_27B = Shapes("27B", 5120, 24, 4, 16, 48)
QWEN_35B_A3B = Shapes("35B-A3B", 2048, 16, 2, 16, 32, experts=256, top_k=8, expert_width=512)
ALL = (QWEN_4B, QWEN_27B, QWEN_35B_A3B)
